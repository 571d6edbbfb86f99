"""Regions that have nothing in common but that launches take most of their time: they share one, in programs of their own.

When all regions have grown, each is put beside earlier ones that are still open: where neither needs the other, and where
the prediction says that less is waited for. What shares a launch is one region, with a loop nest for each (``Nest``).

Worked example: of the norms of queries ``[4, 16, 2048, 64]`` and of keys ``[4, 8, 2048, 64]`` each is a kernel of 3 µs;
side by side they take 4 µs. So do the steps of an optimizer on parameters of different sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from dynafuse.cost.model import Prediction, Work, predict_together
from dynafuse.ir import MAX_TENSORS, Axis, Decision, Dims, Nest, Option, Region
from dynafuse.lowering.registry import EAGER, executor
from dynafuse.partition.group import Group
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.order import UnitOrder
from dynafuse.partition.pricing import Pricing
from dynafuse.partition.releases import Release
from dynafuse.partition.units import Units

MOST_NESTS = 32  # of a launch
MOST_OPEN = 8  # launches at a time to which a region may still come
LEAST_GAIN = 0.03  # of the time apart: what is left of large kernels is not worth that they hold registers for each other
LEAST_OF_SMALLER = 0.15  # the same of the smaller one's time: two large ones hold many
MOST_OF_NOTHING = 16 << 20  # bytes that a region which reads nothing may write, and share its launch
CLASSES = frozenset({"pointwise", "row", "column"})
"""Kernel classes that take one launch, and nothing beside their tensors."""

KERNEL_CLASS = "side by side"

COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "c10d"})
"""Namespaces of ops that other processes take part in."""


@dataclass(eq=False)
class SharedLaunch:
    """What shares a launch so far: some regions, and what they cost together."""

    members: list[Group]
    unit: Group  # of all their nodes, as the order knows it
    works: list[Work]
    tensors: int
    executor: str
    prediction: Prediction
    releases: list[Release]


class Joins:
    """Finds what shares a launch, of at most ``most_nodes``: 0 if each region has one of its own.

    ``group`` has what each node belongs to, as ``order`` knows it.
    """

    def __init__(self, units: Units, order: UnitOrder, pricing: Pricing,
                 group: MutableMapping[Node, Group], most_nodes: int) -> None:
        self.units = units
        self.spaces = units.spaces
        self.order = order
        self.pricing = pricing
        self.group = group
        self.most_nodes = most_nodes

    def of(self, groups: Sequence[Group]) -> list[SharedLaunch]:
        """Return launches for regions that have a price, of one or several of these each, in the order of the first ones."""
        place = {id(group): number for number, group in enumerate(groups)}
        opened: deque[SharedLaunch] = deque(maxlen=MOST_OPEN)
        launches: list[SharedLaunch] = []
        for group in sorted(groups, key=lambda group: max(map(self.order.dependencies.position, group.nodes))):
            launch, is_open = self._alone(group), may_join(self.spaces, group)
            if is_open and any(self._joined(other, launch) for other in reversed(opened)):
                continue
            launches.append(launch)
            if is_open:
                opened.append(launch)
        return sorted(launches, key=lambda launch: place[id(launch.members[0])])

    def _alone(self, group: Group) -> SharedLaunch:
        assert group.priced is not None
        priced = group.priced
        return SharedLaunch([group], group, [priced.work], priced.kernel.tensors, priced.choice.executor, priced.prediction,
                            [self.units.release(group.nodes)])

    def _joined(self, launch: SharedLaunch, other: SharedLaunch) -> bool:
        """Put the only region of another launch beside those of a launch, if it may come and that pays."""
        nodes = [*launch.unit.nodes, *other.unit.nodes]
        if launch.executor != other.executor or self._device(launch) != self._device(other):
            return False
        if len(launch.members) >= MOST_NESTS or len(nodes) > self.most_nodes or launch.tensors + other.tensors > MAX_TENSORS:
            return False
        releases = [*launch.releases, *other.releases]
        if not self.order.are_independent(launch.unit, other.unit) or self.units.releases.would_wait(releases):
            return False
        apart = launch.prediction + other.prediction
        works = [*launch.works, *other.works]
        together = predict_together(works, self.pricing.device, launch.executor)
        rest = self.pricing.total.less(apart)
        us = self.pricing.adds(apart, rest)
        gain = us - self.pricing.adds(together, rest)
        smaller = min(launch.prediction.device_us, other.prediction.device_us)
        if gain <= LEAST_GAIN * us or gain <= LEAST_OF_SMALLER * smaller:
            return False
        both = Group(nodes, [*launch.unit.reads, *other.unit.reads])
        self.order.merged(launch.unit, other.unit, both)
        self.group.update(dict.fromkeys(nodes, both))
        self.pricing.replace(apart, together)
        launch.members += other.members
        launch.unit, launch.works, launch.prediction = both, works, together
        launch.tensors += other.tensors
        launch.releases = releases
        return True

    def _device(self, launch: SharedLaunch) -> object:
        return self.spaces.tensor(launch.unit.nodes[0]).device


def may_join(spaces: Spaces, group: Group) -> bool:
    """Return whether a region may share its launch: it takes one, of known sizes, and writes at no loaded places.

    What a collective takes is made as early as can be, so that other processes do not wait for what shares its launch. What
    is large and made of nothing, such as zeros that are added to at the end of a backward, is made just before it is read.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        group: The region.
    """
    priced = group.priced
    if priced is None or priced.choice.unsure or not executor(priced.choice.executor).joins:
        return False
    if not group.reads and priced.work.bytes > MOST_OF_NOTHING:
        return False
    return (priced.work.launches == 1 and priced.work.kernel_class in CLASSES
            and not any(spaces.is_scatter(node) or any(map(_is_collective, node.users)) for node in group.nodes)
            and all(isinstance(axis.size, int) for axis in priced.kernel.shape.axes))


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace in COLLECTIVES


def side_by_side(name: str, regions: Sequence[Region], prediction: Prediction, position: Callable[[Node], int]) -> Region:
    """Return regions as one, with a loop nest for each.

    Args:
        name: Its name.
        regions: The regions, on one executor, none of which needs another.
        prediction: What they cost together.
        position: Returns the place of a node in the graph.
    """
    first = regions[0]
    outputs = _in_order((node for region in regions for node in region.outputs), position)
    dims: dict[Node, Dims] = {}
    out_dims: dict[Node, Dims] = {}
    copies: dict[Node, Node] = {}
    axes: list[Axis] = []
    nests: list[Nest] = []
    for region in regions:
        begin = len(axes)
        axes += region.axes
        dims |= {node: _shifted(own, begin) for node, own in region.dims.items()}
        out_dims |= {node: _shifted(own, begin) for node, own in region.out_dims.items()}
        copies |= region.copies
        nests.append(Nest(tuple(range(begin, len(axes))), tuple(map(outputs.index, region.outputs))))
    decision = Decision((Option(first.executor, prediction.device_us, prediction.host_us),), kernel_class=KERNEL_CLASS,
                        eager=_eager(regions))
    return Region(
        name, first.executor, _in_order((node for region in regions for node in region.nodes), position),
        _in_order((node for region in regions for node in region.inputs), position), outputs, tuple(axes), dims, out_dims,
        frozenset[Node]().union(*(region.reductions for region in regions)), copies, sum(region.bytes for region in regions),
        prediction.device_us, (f"{len(regions)} loops that have nothing in common share the launch",), decision,
        tuple(dict.fromkeys(origin for region in regions for origin in region.origins)),
        tuple(merge for region in regions for merge in region.merges), tuple(nests))


def _in_order(nodes: Iterable[Node], position: Callable[[Node], int]) -> tuple[Node, ...]:
    """Return nodes in the graph's order, each once."""
    return tuple(sorted(dict.fromkeys(nodes), key=position))


def _shifted(dims: Dims, begin: int) -> Dims:
    return tuple(tuple(begin + axis for axis in dim) for dim in dims)


def _eager(regions: Sequence[Region]) -> Option:
    """Return what all ops of some regions take one by one."""
    options = [region.decision.eager for region in regions if region.decision.eager is not None]
    return Option(EAGER, sum(option.device_us for option in options), sum(option.host_us for option in options))
