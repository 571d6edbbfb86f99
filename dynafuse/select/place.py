"""Regions in canonical form, each on an executor that takes it as a whole.

While regions grow, executors are asked for nodes and groups of nodes. Whether one takes a region can depend on more: on
layouts, on what its library says. Such a region goes to the next executor, else its ops run eager.

Worked example: a region whose output is channels-last goes from nvFuser, which would write it contiguous, to Triton, and its
reasons say ``not on nvfuser: ...``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion, canonical, rekeyed
from dynafuse.config import Config
from dynafuse.ir import Option, Plan, Region, Role
from dynafuse.lowering.registry import executor

log = logging.getLogger(__name__)

REJECTED: dict[str, str] = {}
"""What libraries of executors have said against regions that others can take, by key: in this process, in no file."""


def place(plan: Plan, config: Config, capability: int | None) -> CanonicalPlan:
    """Return a plan with every region in canonical form, on an executor that takes it as a whole.

    Where none does, and nobody has forced the region, its ops are ``unplaced`` in a plan without steps; those of the given
    plan, which no executor takes by themselves, stay so.

    Args:
        plan: The plan as it was grown.
        config: The options.
        capability: The device's compute capability, as 90, which is a part of keys; None where nothing runs natively.
    """
    placing = _Placing(plan, config, capability)
    steps = tuple(placing.placed(step) if isinstance(step, Region) else step for step in plan.steps)
    unplaced = {**plan.unplaced, **placing.unplaced}
    return CanonicalPlan(plan.annotated, () if unplaced else steps, plan.refusals, unplaced)


def moved(region: CanonicalRegion, name: str, capability: int | None) -> CanonicalRegion:
    """Return a region on another executor: what it computes is the same, its kernel is not.

    Args:
        region: The region.
        name: The other executor.
        capability: The device's compute capability, as 90; None where nothing runs natively.
    """
    return rekeyed(region, replace(region.region, executor=name), target_of(region.region, name, capability))


def target_of(region: Region, name: str, capability: int | None) -> str:
    """Return what the kernel of a region runs on, as part of its key.

    Args:
        region: The region; its first output's device counts.
        name: The executor.
        capability: The device's compute capability, as 90; None where nothing runs natively.
    """
    return executor(name).target(region.outputs[0].meta["val"].device, capability)


def reject(plan: CanonicalPlan, errors: Mapping[str, BaseException]) -> dict[str, BaseException]:
    """Return the errors of some regions, by name, that are failures.

    Others only tell that an executor's library does not want a region: where another executor can take it, :func:`place`
    heeds them from now on.

    Args:
        plan: The plan.
        errors: What went wrong, by the names of regions.
    """
    failures: dict[str, BaseException] = {}
    regions = plan.by_name
    for name, error in errors.items():
        region = regions[name].region
        reason = executor(region.executor).rejects(error)
        if reason and len(region.decision.options) > 1:
            REJECTED[regions[name].key] = reason
            log.info("%s: not on %s: %s", region, region.executor, reason)
        else:
            failures[name] = error
    return failures


class _Placing:
    """Places the regions of one plan; ``unplaced`` are ops that no executor takes, with the reasons."""

    def __init__(self, plan: Plan, config: Config, capability: int | None) -> None:
        self.annotated = plan.annotated
        self.config = config
        self.capability = capability
        self.unplaced: dict[Node, str] = {}

    def placed(self, region: Region) -> CanonicalRegion:
        """Return a region in canonical form, on the first of its executors that takes it."""
        target = target_of(region, region.executor, self.capability)
        whole = canonical(self.annotated, region, self.config.key(), target, self.config.size_classes)
        options = region.decision.options
        reasons = {option.executor: reason for option in options if (reason := self._refusal(whole, option.executor))}
        possible = [option for option in options if option.executor not in reasons]
        if reasons and possible:
            return self._moved_to(possible, whole, reasons)
        facts = self.annotated.facts
        if reasons and not any(facts[node].forced for node in region.nodes):
            reason = "; ".join(_sentences(reasons))
            self.unplaced |= {node: reason for node in region.nodes if facts[node].role is Role.FUSED}
        return whole

    def _refusal(self, region: CanonicalRegion, name: str) -> str:
        """Return why an executor does not take a region, or "". What its library says counts where there is a choice."""
        reason = executor(name).refuses_spec(region.spec)
        if reason or not REJECTED or len(region.region.decision.options) < 2:
            return reason
        return REJECTED.get(moved(region, name, self.capability).key, "")

    def _moved_to(self, possible: Sequence[Option], whole: CanonicalRegion, reasons: Mapping[str, str]) -> CanonicalRegion:
        """Return a region on its executor, or on the fastest of the possible ones."""
        region = whole.region
        options = tuple(sorted(possible, key=lambda option: (option.executor != region.executor, option.device_us)))
        unsure = tuple(name for name in region.decision.unsure if name not in reasons)
        decision = replace(region.decision, options=options, unsure=unsure if len(unsure) > 1 else (),
                           margin=region.decision.margin if len(options) > 1 else float("inf"))
        said = _sentences({name: reason for name, reason in reasons.items() if name == region.executor})
        region = replace(region, decision=decision, predicted_us=options[0].device_us, reasons=(*region.reasons, *said))
        return moved(replace(whole, region=region), options[0].executor, self.capability)


def _sentences(reasons: Mapping[str, str]) -> list[str]:
    return [f"not on {name}: {reason}" for name, reason in reasons.items()]
