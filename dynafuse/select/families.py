"""Near matches: which regions run on a kernel that is not quite their own, because it serves others as well.

A fold can run on its family's kernel (``cache.families``) once the family has several lengths in this process. Whether it
does is for the cost model to say: what the kernel loses a call against the region's share of the compile time saved.

Worked example: in a network whose layer k sums k tensors, on an H200, the layers of 5 to 8 run on one kernel of 8 terms. The
layer of 5 loses 0.4 µs a call by four more arguments, and its share of three kernels of 0.22 s less is 5.5 µs a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dynafuse.cache.canonical import Bound, family, reuse
from dynafuse.config import Config
from dynafuse.cost.device import Device
from dynafuse.cost.model import family_gain_us, family_loss_us
from dynafuse.ir import Near, Plan, Region
from dynafuse.lowering.triton.schedule import schedule

LENGTHS: dict[str, set[int]] = {}
"""How long the folds of a family were, in this process, by the key of its kernel."""


def near(plan: Plan, bounds: Mapping[str, Bound], config: Config, device: Device) -> tuple[Plan, dict[str, Bound]]:
    """The plan with the regions that run on their families' kernels, if the option ``near_match`` lets them."""
    if not config.near_match:
        return plan, dict(bounds)
    families = _families(bounds, int(device.near_least_terms))
    for found in families.values():
        LENGTHS.setdefault(found.key, set()).add(_terms(found))
    shared = _shared(bounds, families)
    sites = reuse(list(bounds.values()))
    made = {name: _chosen(bound, shared[name], sites[bound.key], plan, config, device) if name in shared else bound
            for name, bound in bounds.items()}
    return replace(plan, steps=tuple(made[s.name].region if isinstance(s, Region) else s for s in plan.steps)), made


def _families(bounds: Mapping[str, Bound], least: int) -> dict[str, Bound]:
    """The regions that have a fold of at least ``least`` terms, on their families' kernels."""
    without: set[str] = set()  # keys
    families = {}
    for name, bound in bounds.items():
        found = None if bound.key in without else family(bound, least)
        if found is None:
            without.add(bound.key)
        else:
            families[name] = found
    return families


def _shared(bounds: Mapping[str, Bound], families: Mapping[str, Bound]) -> dict[str, Bound]:
    """Of the families those that have several lengths and whose kernel computes the same bits as the region's own."""
    alike: dict[str, bool] = {}  # by key: a schedule takes milliseconds
    shared = {}
    for name, found in families.items():
        bound = bounds[name]
        if len(LENGTHS[found.key]) > 1 and bound.key not in alike:
            alike[bound.key] = _sums_alike(bound, found)
            if not alike[bound.key]:
                LENGTHS[found.key].discard(_terms(found))
        if alike.get(bound.key):
            shared[name] = found
    return shared


def _sums_alike(bound: Bound, found: Bound) -> bool:
    """Whether rows are summed up in the same order by a region's own kernel and by its family's."""
    return not bound.spec.reductions or schedule(found.code) == schedule(bound.code)


def _terms(found: Bound) -> int:
    assert found.member is not None
    return found.member.terms


def _chosen(bound: Bound, found: Bound, sites: int, plan: Plan, config: Config, device: Device) -> Bound:
    """A region on its own kernel or on its family's, with the numbers in its decision or its reasons."""
    member, region = found.member, bound.region
    assert member is not None
    arguments = len(found.arguments) - len(bound.inputs) + len(found.numbers) - len(bound.numbers) + 1
    tensors = (tensor for n in (*region.inputs, *region.outputs) if (tensor := plan.annotated.facts[n].tensor) is not None)
    loss = family_loss_us(arguments, member.width - member.terms, max(tensor.hint for tensor in tensors), device,
                          config.cudagraphs)
    lengths = len(LENGTHS[found.key])
    saved = family_gain_us(lengths, sites, device)
    if loss < saved:
        decision = replace(region.decision, near=Near(member.terms, member.width, loss, saved))
        return replace(found, region=replace(region, decision=decision))
    if lengths < 2:
        return bound
    reason = f"a kernel of its own: as a {member} it would lose {loss:.2f} µs a call, and save {saved:.2f} of compile time"
    return replace(bound, region=replace(region, reasons=(*region.reasons, reason)))
