"""Fold families: which regions run on a kernel that is not quite their own, because it serves others as well.

A fold can run on its family's kernel (``cache.fold_families``) once the family has several lengths in this process. Whether
it does is for the cost model to say: what the kernel loses a call against the region's share of the compile time saved.

Worked example: in a network whose layer k sums k tensors, on an H200, the layers of 5 to 8 run on one kernel of 8 terms. The
layer of 5 loses 0.4 µs a call by four more arguments, and its share of three kernels of 0.22 s less is 5.5 µs a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion, family, reuse
from dynafuse.config import Config
from dynafuse.cost.device import Device
from dynafuse.cost.model import family_gain_us, family_loss_us
from dynafuse.ir import FoldFamily
from dynafuse.lowering.triton.schedule import choose_schedule

LENGTHS: dict[str, set[int]] = {}
"""The lengths of the folds that this process has met and that could run on a family's kernel, by that kernel's key."""


def fold_families(plan: CanonicalPlan, config: Config, device: Device) -> CanonicalPlan:
    """Return the plan with the regions that run on their families' kernels, if the option ``near_match`` lets them.

    Args:
        plan: The plan with every region on a kernel of its own.
        config: The options.
        device: The device that is priced; it says from how many terms on a fold may share a kernel.
    """
    if not config.near_match:
        return plan
    families = _families(plan.regions, int(device.near_least_terms))
    for shared in families.values():
        LENGTHS.setdefault(shared.key, set()).add(_terms(shared))
    alike = _alike(plan.by_name, families)
    sites = reuse(plan.regions)

    def chosen(region: CanonicalRegion) -> CanonicalRegion:
        shared = alike.get(region.name)
        return region if shared is None else _chosen(region, shared, sites[region.key], plan, config, device)

    return plan.mapped(chosen)


def _families(regions: Sequence[CanonicalRegion], least: int) -> dict[str, CanonicalRegion]:
    """Return the regions that have a fold of at least ``least`` terms, on their families' kernels, by name."""
    without: set[str] = set()  # keys
    families = {}
    for region in regions:
        shared = None if region.key in without else family(region, least)
        if shared is None:
            without.add(region.key)
        else:
            families[region.name] = shared
    return families


def _alike(regions: Mapping[str, CanonicalRegion], families: Mapping[str, CanonicalRegion]) -> dict[str, CanonicalRegion]:
    """Return the families that have several lengths and whose kernel computes the same bits as the region's own."""
    same_bits: dict[str, bool] = {}  # by key: a schedule takes milliseconds
    alike = {}
    for name, shared in families.items():
        region = regions[name]
        if len(LENGTHS[shared.key]) > 1 and region.key not in same_bits:
            same_bits[region.key] = _sums_alike(region, shared)
            if not same_bits[region.key]:
                LENGTHS[shared.key].discard(_terms(shared))
        if same_bits.get(region.key):
            alike[name] = shared
    return alike


def _sums_alike(region: CanonicalRegion, shared: CanonicalRegion) -> bool:
    """Return whether rows are summed up in the same order by a region's own kernel and by its family's."""
    return not region.spec.of_rows or choose_schedule(shared.code) == choose_schedule(region.code)


def _terms(shared: CanonicalRegion) -> int:
    assert shared.member is not None
    return shared.member.terms


def _chosen(own: CanonicalRegion, shared: CanonicalRegion, sites: int, plan: CanonicalPlan, config: Config,
            device: Device) -> CanonicalRegion:
    """Return a region on its own kernel or on its family's, with the numbers in its decision or its reasons."""
    member, region = shared.member, own.region
    assert member is not None
    arguments = len(shared.arguments) - len(own.inputs) + len(shared.hoisted) - len(own.hoisted) + 1
    tensors = (tensor for n in (*region.inputs, *region.outputs) if (tensor := plan.annotated.facts[n].tensor) is not None)
    loss = family_loss_us(arguments, member.width - member.terms, max(tensor.hint for tensor in tensors), device,
                          config.cudagraphs)
    lengths = len(LENGTHS[shared.key])
    saved = family_gain_us(lengths, sites, device)
    if loss < saved:
        decision = replace(region.decision, family=FoldFamily(member.terms, member.width, loss, saved))
        return replace(shared, region=replace(region, decision=decision))
    if lengths < 2:
        return own
    reason = f"a kernel of its own: as a {member} it would lose {loss:.2f} µs a call, and save {saved:.2f} of compile time"
    return replace(own, region=replace(region, reasons=(*region.reasons, reason)))
