"""Which executors a graph may use, and measuring where the cost model cannot tell which one a region should run on.

Worked example: with ``executors="triton,nvfuser"``, on a GPU with nvFuser, ``usable(config, "cuda", False)`` is
``(("triton", "nvfuser", "eager"), {})``; a norm
for which both are predicted within ``model_error`` of each other is measured, and the plan takes the faster one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dynafuse.build import moved, request
from dynafuse.cache.canonical import Bound
from dynafuse.cache.persist import verdicts
from dynafuse.config import Config
from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import calls_prediction, plan_prediction
from dynafuse.cost.model import Prediction, choose
from dynafuse.errors import DynafuseWarning, ExecutorError
from dynafuse.ir import Decision, Plan, Region
from dynafuse.lowering.inductor import availability as inductor
from dynafuse.lowering.nvfuser import availability as nvfuser
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.select import Tuner, contenders

log = logging.getLogger(__name__)

ON_CUDA = ("triton", "eager")
ON_CPU = ("inductor", "eager")
INTERPRETED = ("triton", "eager")
SERVES = {"cuda": ("triton", "nvfuser", "inductor"), "cpu": ("inductor",)}
"""Executors for tensors on a type of device, wherever there is one of it."""

REMEDIES = {
    "triton": "for CPU tensors there is `inductor`",
    "nvfuser": "install it, or leave it out of `executors`",
    "inductor": "`dynafuse doctor` tries the compiler",
}
"""Per executor what to do where it is not there."""

_told: set[str] = set()


def usable(config: Config, device_type: str, planning: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of the executors that the options name, those that run on a device type; why not, for the others.

    With ``planning`` nothing will run, and the plan is one for a GPU: then it is enough that an executor could.
    """
    on_gpu = device_type == "cuda" or planning
    names = config.executors or (ON_CUDA if on_gpu else INTERPRETED if interpreting() else ON_CPU)
    reasons = {name: reason for name in names if (reason := _unusable(name, config, device_type, on_gpu))}
    return tuple(name for name in names if name not in reasons), reasons


def _unusable(name: str, config: Config, device_type: str, on_gpu: bool) -> str:
    if name == "nvfuser":
        found = nvfuser.find()
        return str(found) if not found.available else "" if on_gpu else "nvFuser runs on CUDA devices"
    if name == "inductor":
        if config.round_like_eager:
            return "Inductor does not round as eager does (round_like_eager)"
        compiler = inductor.find("cuda" if on_gpu else device_type)
        return "" if compiler.available else str(compiler)
    only = "Triton runs on CUDA devices, and slowly anywhere with TRITON_INTERPRET=1"
    return only if name == "triton" and not on_gpu and not interpreting() else ""


def tell(config: Config, device_type: str, enabled: Sequence[str], reasons: Mapping[str, str]) -> None:
    """Say, once per process and cause, which executors of a graph are not there and what to do about it.

    Silence is for those that are for other devices, where another executor fuses or there is such a device: then it is these
    tensors that are elsewhere. Raises ExecutorError when strict, but not for what the options themselves rule out.
    """
    if config.executors is None and device_type == "cpu" and "triton" in enabled:
        _once("TRITON_INTERPRET=1: CPU tensors run in Triton's interpreter, slowly, instead of in C++ kernels", log.warning)
    fuses = any(name != "eager" for name in enabled)
    for name, reason in reasons.items():
        if name not in SERVES[device_type] and (fuses or torch.cuda.is_available()):
            continue
        ruled_out = name == "inductor" and config.round_like_eager
        tensors = f"{device_type.upper()} tensors"
        left = f"plans for {tensors} use {', '.join(enabled)}" if fuses else f"nothing is fused, {tensors} run eager"
        text = f"executor {name!r} cannot be used: {reason}. {left[0].upper()}{left[1:]}"
        text += "" if ruled_out else f"; {REMEDIES[name]}"
        if config.strict and not ruled_out:
            raise ExecutorError(text)
        _once(text, lambda told: warnings.warn(told, DynafuseWarning, stacklevel=2))


def _once(text: str, say: Callable[[str], None]) -> None:
    if text not in _told:
        _told.add(text)
        say(text)


def reset() -> None:
    """Forget what the user has been told."""
    _told.clear()


def how_to_enable(name: str, config: Config, device_type: str, planning: bool) -> str:
    """Why an executor is not enabled for tensors on a type of device, and what enables it."""
    reason = _unusable(name, config, device_type, device_type == "cuda" or planning)
    if reason:
        return f"{name} cannot be enabled here: {reason}"
    named = ",".join(dict.fromkeys((*(one for one in usable(config, device_type, planning)[0] if one != "eager"), name)))
    return f'to enable {name}: options={{"executors": "{named}"}}, or DYNAFUSE_EXECUTORS={named}'


def tuned(plan: Plan, bounds: Mapping[str, Bound], config: Config, device: Device,
          capability: int | None) -> tuple[Plan, dict[str, Bound]]:
    """The plan with what measurements decided, where the option ``tune`` asks for them."""
    names = {region.name: contenders(region.decision, config.tune, [option.executor for option in region.decision.options])
             for region in plan.regions}
    if config.tune == "unsure" and any(names.values()):
        worth = _worth_measuring(plan, bounds, device)
        names = {name: found if name in worth else () for name, found in names.items()}
    if not any(names.values()):
        return plan, dict(bounds)
    measuring = _Measuring(plan, config, device, capability)
    found = {name: measuring.bound(bound, names[name]) if names[name] else bound for name, bound in bounds.items()}
    steps = (found[step.name].region if isinstance(step, Region) else step for step in plan.steps)
    return replace(plan, steps=tuple(steps)), found


def _worth_measuring(plan: Plan, bounds: Mapping[str, Bound], device: Device) -> set[str]:
    """The regions that, with all their equals, the model may have wrong by enough to show in the plan's time."""
    together: dict[str, float] = {}
    for region in plan.regions:
        key = bounds[region.name].key
        together[key] = together.get(key, 0.0) + region.predicted_us
    least = device.measured_gain * (sum(together.values()) + calls_prediction(plan.annotated.facts, device).device_us)
    return {r.name for r in plan.regions if r.decision.error * together[bounds[r.name].key] >= least}


class _Measuring:
    """Measures regions of one plan."""

    def __init__(self, plan: Plan, config: Config, device: Device, capability: int | None) -> None:
        self.config = config
        self.device = device
        self.capability = capability
        self.tuner = Tuner(config.tune_budget_s, store=verdicts(config))
        self.predicted = {region.name: _predictions(region) for region in plan.regions}
        self.others = plan_prediction(plan, device)

    def bound(self, before: Bound, names: tuple[str, ...]) -> Bound:
        """A region on the executor that is fastest, with what was measured."""
        region = before.region
        on = {name: moved(before, name, self.capability) for name in names}
        builds = {name: _built(bound, self.capability, self.config) for name, bound in on.items()}
        verdict = self.tuner.verdict(before, builds, region.outputs[0].meta["val"].device)
        predicted = self.predicted[region.name]
        known = verdict.predictions({name: predicted[name] for name in names})
        beside = self.others.less(predicted[region.executor]) if region.executor in predicted else self.others
        chosen = choose(known, self.device, self.config.cudagraphs, beside).executor
        times = {name: one.device_us for name, one in verdict.measured.items() if one.device_us is not None}
        decision = _decided(region.decision, chosen, times)
        return replace(on[chosen], region=replace(on[chosen].region, decision=decision,
                                                  predicted_us=predicted[chosen].device_us))


def _predictions(region: Region) -> dict[str, Prediction]:
    """What a region was predicted to cost, by executor."""
    return {o.executor: Prediction(o.device_us, o.host_us, 0.0, o.device_us) for o in region.decision.options}


def _built(bound: Bound, capability: int | None, config: Config) -> Callable[[], Any]:
    """A candidate for the tuner. Triton's are asked for at once, so that worker processes compile while others are measured.

    The others compile in this process: only if they are measured, and not where the verdict is known.
    """
    if bound.region.executor != "triton":
        return lambda: request(bound, capability, config).result()
    future = request(bound, capability, config)
    return lambda: future.result()


def _decided(decision: Decision, chosen: str, times: Mapping[str, float]) -> Decision:
    """A decision after measuring: the chosen executor first, and nothing unsure."""
    options = tuple(sorted(decision.options, key=lambda option: option.executor != chosen))
    return replace(decision, options=options, unsure=(), measured=times)
