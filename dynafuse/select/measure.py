"""Measuring where the cost model cannot tell which executor a region should run on, and in which way its kernel is made.

Worked example: a norm for which Triton and nvFuser are predicted within ``model_error`` of each other is compiled for both
and measured, and the plan takes the faster one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion
from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import calls_prediction, plan_prediction
from dynafuse.cost.model import Prediction, choose
from dynafuse.ir import Decision, Region
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.registry import PREFERRED, executor
from dynafuse.select import Tuner, contenders
from dynafuse.select.compile import request
from dynafuse.select.place import moved
from dynafuse.select.stored import measurements
from dynafuse.select.variants import on_fastest_variants


def measured(plan: CanonicalPlan, device: Device, compilation: Compilation) -> CanonicalPlan:
    """Return the plan with what measurements decided, where the option ``tune`` asks for them.

    Args:
        plan: The plan with what was predicted.
        device: The device that is priced.
        compilation: What kernels are compiled for.
    """
    return on_fastest_variants(_on_fastest_executors(plan, device, compilation), compilation)


def _on_fastest_executors(plan: CanonicalPlan, device: Device, compilation: Compilation) -> CanonicalPlan:
    """Return the plan with every region on the executor that was measured to be the fastest, where the model is unsure."""
    tune = compilation.config.tune
    names = {region.name: contenders(region.region.decision, tune, _executors(region.region)) for region in plan.regions}
    if tune == "unsure" and any(names.values()):
        worth = _worth_measuring(plan, device)
        names = {name: candidates if name in worth else () for name, candidates in names.items()}
    if not any(names.values()):
        return plan
    measuring = _Measuring(plan, device, compilation)
    return plan.mapped(lambda region: measuring.decided(region, names[region.name]) if names[region.name] else region)


def _executors(region: Region) -> list[str]:
    return [option.executor for option in region.decision.options]


def _worth_measuring(plan: CanonicalPlan, device: Device) -> set[str]:
    """Return the regions that, with all their equals, the model may have wrong by enough to show in the plan's time."""
    together: dict[str, float] = {}
    for region in plan.regions:
        together[region.key] = together.get(region.key, 0.0) + region.region.predicted_us
    least = device.measured_gain * (sum(together.values()) + calls_prediction(plan.annotated.facts, device).device_us)
    return {region.name for region in plan.regions if region.region.decision.error * together[region.key] >= least}


class _Measuring:
    """Measures regions of one plan."""

    def __init__(self, plan: CanonicalPlan, device: Device, compilation: Compilation) -> None:
        self.device = device
        self.compilation = compilation
        self.tuner = Tuner(compilation.config.tune_budget_s, store=measurements(compilation.config))
        self.predicted = {region.name: _predictions(region.region) for region in plan.regions}
        self.others = plan_prediction(plan.plan, device)

    def decided(self, before: CanonicalRegion, names: tuple[str, ...]) -> CanonicalRegion:
        """Return a region on the executor that is fastest, with what was measured."""
        region = before.region
        candidates = {name: moved(before, name, self.compilation.capability) for name in names}
        builds = {name: _build(candidate, self.compilation) for name, candidate in candidates.items()}
        measurement = self.tuner.measure(before, builds, before.device)
        predicted = self.predicted[region.name]
        known = measurement.handicapped(PREFERRED).predictions({name: predicted[name] for name in names})
        beside = self.others.less(predicted[region.executor]) if region.executor in predicted else self.others
        chosen = choose(known, self.device, self.compilation.config.cudagraphs, beside).executor
        times = {name: timing.device_us for name, timing in measurement.timings.items() if timing.device_us is not None}
        decision = _decided(region.decision, chosen, times)
        return replace(candidates[chosen], region=replace(candidates[chosen].region, decision=decision,
                                                          predicted_us=predicted[chosen].device_us))


def _predictions(region: Region) -> dict[str, Prediction]:
    """Return what a region was predicted to cost, by executor."""
    return {o.executor: Prediction(o.device_us, o.host_us, 0.0, o.device_us) for o in region.decision.options}


def _build(region: CanonicalRegion, compilation: Compilation) -> Callable[[], Any]:
    """Return a candidate for the tuner. What compiles aside is asked for at once, while others are measured.

    The others compile in this process: only if they are measured, and not where the measurement is known.
    """
    if not executor(region.region.executor).compiles_aside:
        return lambda: request(region, compilation).result()
    future = request(region, compilation)
    return lambda: future.result()


def _decided(decision: Decision, chosen: str, times: Mapping[str, float]) -> Decision:
    """Return a decision after measuring: the chosen executor first, and nothing unsure."""
    options = tuple(sorted(decision.options, key=lambda option: option.executor != chosen))
    return replace(decision, options=options, unsure=(), measured=times)
