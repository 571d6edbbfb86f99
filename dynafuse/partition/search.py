"""The quickest plan of several: regions grow greedily, and once more in other ways where that may have led astray.

What is merged first decides what else can be, so that a merge that saves much may keep apart what would save more. A graph
is planned again

- where long rows took the room of columns, with rows in kernels of their own;
- where the host bounds what is apart, but not what is merged, as if the device bounded it from the beginning: launches are
  spared at any price as long as there are many;
- where regions read what they might share, with that merged first, or without one of their other merges; whatever makes the
  plan quicker stays, and is the next to be changed.

Worked example: of images ``x`` the sum over each channel is subtracted, the difference stored, multiplied by ``y``, and
summed over each image. Greedily the difference is merged with the product, which saves as much as any, so that the first sum
is a kernel of its own: none sums over different dimensions. Merged with that sum first, ``x`` is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dynafuse.cost.device import Device
from dynafuse.cost.model import Prediction
from dynafuse.ir import Annotated, Plan, RefusalKind
from dynafuse.lowering.registry import PREFERRED
from dynafuse.partition.executors import Executors
from dynafuse.partition.grow import Growth, Way
from dynafuse.partition.units import Units

MOST_TRIED = 12  # other merges, of small graphs
MOST_UNITS = 200  # units that grow again for that, in all: each takes about a millisecond
LEAST_SHARED = 0.03  # of a graph's time, which two regions read or write both if it is worth trying to merge them
LEAST_GAIN = 0.01  # of it, which another plan takes less
CLOSE = 0.1  # of it, within which what the host takes longer is not told from what it takes on another day

Grown = tuple[Plan, Growth]


def partition(annotated: Annotated, device: Device, executors: Executors | None = None, *, captured: bool = False,
              recompute: bool = True, max_ops: int = 200, joins: bool = True) -> Plan:
    """Return the plan for a graph on a device: regions, eager calls and views in an order that respects every dependency.

    Args:
        annotated: The graph with its facts.
        device: The device that is priced.
        executors: What may run regions; None: Triton alone.
        captured: Whether the graph will be replayed as a CUDA graph, where no host time counts.
        recompute: Whether cheap ops may be computed again by every region that reads them.
        max_ops: The most nodes of a region.
        joins: Whether regions that have nothing in common may share a launch.
    """
    executors = executors or Executors(annotated.facts, (PREFERRED,))
    return quickest(Units(annotated, device, executors, recompute=recompute, max_ops=max_ops, joins=joins), captured)


def quickest(units: Units, captured: bool = False) -> Plan:
    """Return the quickest plan of several for a graph.

    Args:
        units: The graph's units; what is found out about them is there for the next plan.
        captured: Whether the graph will be replayed as a CUDA graph, where no host time counts.
    """
    if units.unplaced:
        return Plan(units.spaces.annotated, (), (), units.unplaced)

    def made(way: Way) -> Grown:
        growth = Growth(units, way)
        return growth.run(), growth

    def grown(way: Way) -> Grown | None:
        plan, growth = made(way)
        return (plan, growth) if plan.steps else None

    greedy = made(Way(captured))
    if not greedy[0].steps:
        return greedy[0]
    others = filter(None, map(grown, _otherwise(*greedy)))
    return _improved(_least_busy([greedy, *others]), grown)[0]


def _least_busy(plans: Sequence[Grown]) -> Grown:
    """Return the quickest plan; of those that are about as quick the one that keeps the device the least busy.

    Users wait for the device whatever the host is like, but for the host only where nothing keeps the device busy meanwhile.
    """
    least = min(growth.us for _, growth in plans)
    return min((plan for plan in plans if plan[1].us <= (1 + CLOSE) * least), key=lambda plan: plan[1].pricing.now.device_us)


def _otherwise(plan: Plan, growth: Growth) -> Iterator[Way]:
    """Yield ways for the whole graph that may be better than the greedy one."""
    beside = any(region.decision.kernel_class == "rowcol" for region in plan.regions)
    if beside and any(refusal.kind is RefusalKind.ROWS_TOO_LONG for refusal in plan.refusals):
        yield replace(growth.way, one_pass=False)
    if not growth.way.captured and growth.apart.is_host_bound and not growth.pricing.now.is_host_bound:
        yield replace(growth.way, beside=Prediction(device_us=growth.apart.host_us))


def _improved(best: Grown, grown: Callable[[Way], Grown | None]) -> Grown:
    """Return a plan with other merges, changed one by one as long as that makes it quicker."""
    most = min(MOST_TRIED, MOST_UNITS // max(len(best[1].group), 1))
    tried: set[Way] = set()
    while len(tried) < most and (way := next((way for way in _neighbours(best[1]) if way not in tried), None)):
        tried.add(way)
        other = grown(way)
        if other is not None and other[1].us < (1 - LEAST_GAIN) * best[1].us:
            best = other
    return best


def _neighbours(growth: Growth) -> Iterator[Way]:
    """Yield ways that merge regions first which share much, and ways that leave out one of their merges each."""
    missed = list(growth.missed(LEAST_SHARED))
    for candidate in missed:
        yield replace(growth.way, first=(*growth.way.first, candidate))
    groups = {id(group): group for pair in missed for group in (growth.group[pair.first], growth.group[pair.second])}
    for group in groups.values():
        for merge in reversed(group.merges):
            yield replace(growth.way, apart=growth.way.apart | {merge})
