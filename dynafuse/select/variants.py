"""Measuring of a kernel's variants: ways to make it that compute the same bits, such as the tiles of a pointwise kernel.

Nothing but ``tune="always"`` asks for it, because every variant has to be compiled. What is found is kept with the other
measurements, on disk too, so that neither this process nor a later one looks for it again. Where torch is asked for
deterministic algorithms nothing is timed.

Worked example: ``x + y.t()`` over ``float32[4096, 4096]`` is compiled under four tiles, side by side, and timed. Its region
says ``tiled y=0/64 x=1/32 w4 s1 p1, of 4 that were timed``, if that was the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion, varied
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.registry import executor
from dynafuse.select import Measurement, Tuner
from dynafuse.select.compile import request
from dynafuse.select.measurement import measurement_key
from dynafuse.select.stored import measurements

MOST_TIMED = 4
"""Variants of a region that are timed, the most promising ones."""


def on_fastest_variants(plan: CanonicalPlan, compilation: Compilation) -> CanonicalPlan:
    """Return the plan with kernels made in the way that was measured to be the fastest, where the options ask for that.

    Args:
        plan: The plan, whose regions are on the executors that they will run on.
        compilation: What for and with which options kernels are compiled.
    """
    if compilation.config.tune != "always" or torch.are_deterministic_algorithms_enabled():
        return plan
    search = _Search(plan, compilation)
    return plan.mapped(search.settled)


class _Search:
    """The variants of one plan's regions, which are all asked for before the first is timed."""

    def __init__(self, plan: CanonicalPlan, compilation: Compilation) -> None:
        self.compilation = compilation
        self.tuner = Tuner(compilation.config.tune_budget_s, store=measurements(compilation.config))
        self.variants = {region.name: self._variants(region) for region in plan.regions}
        self.requests: Mapping[str, Mapping[str, Future[Any]]] = {
            region.name: {label: request(variant, compilation) for label, variant in self._unmeasured(region).items()}
            for region in plan.regions}

    def _variants(self, region: CanonicalRegion) -> dict[str, CanonicalRegion]:
        """Return the variants of a region by how reports call them, the usual one first; none where it has no other."""
        runs_on = executor(region.region.executor)
        names = runs_on.variants(region)[:MOST_TIMED]
        if len(names) < 2 or self.tuner.obstacle(region.device):
            return {}
        return {f"{runs_on} {name}": varied(region, name) if place else region for place, name in enumerate(names)}

    def _unmeasured(self, region: CanonicalRegion) -> dict[str, CanonicalRegion]:
        """Return the variants of a region that have to be timed: all, or none if their times are known."""
        variants = self.variants[region.name]
        known = self.tuner.store.get(measurement_key(region.spec, region.hints, region.device)) if variants else {}
        return {} if all(label in known for label in variants) else variants

    def settled(self, region: CanonicalRegion) -> CanonicalRegion:
        """Return a region as the variant that is the fastest, with what was measured."""
        variants = self.variants[region.name]
        if not variants:
            return region
        builds = {label: self._build(region.name, label) for label in variants}
        measurement = self.tuner.measure(region, builds, region.device)
        label = _winner(measurement, next(iter(variants)))
        times = {name: timing.device_us for name, timing in measurement.timings.items() if timing.device_us is not None}
        decision = replace(region.region.decision, measured={**region.region.decision.measured, **times})
        reasons = (*region.region.reasons, *_reasons(measurement, label, len(times)))
        chosen = variants[label]
        return replace(chosen, region=replace(chosen.region, decision=decision, reasons=reasons))

    def _build(self, name: str, label: str) -> Callable[[], Any]:
        """Return what waits for the kernel of a variant: of one that has been asked for, if it has to be timed."""
        def awaited() -> Any:
            requested = self.requests[name].get(label) or request(self.variants[name][label], self.compilation)
            return requested.result()

        return awaited


def _winner(measurement: Measurement, usual: str) -> str:
    """Return the fastest variant, or the usual one unless another is faster by more than timings differ."""
    return measurement.handicapped(usual).winner if measurement.decided else usual


def _reasons(measurement: Measurement, chosen: str, timed: int) -> tuple[str, ...]:
    """Return what a report says of a search: what won, and what was not considered."""
    won = f"{chosen}, of {timed} that were timed" if measurement.decided else measurement.reason
    dropped = tuple(f"{name} was not considered: {why}" for name, why in measurement.failures.items())
    return (*((won,) if won else ()), *dropped)
