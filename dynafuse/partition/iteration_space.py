"""Iteration spaces: along which axes each node runs, and where it reads its operands.

A *unit* is a node that must exist in memory unless its readers share its kernel. Views and cheap nodes are no units:
they are looked through, and computed again wherever they are read.

Worked example: in ``y = x.t() + 1``, ``add`` runs along two axes ``(i, j)`` and reads unit ``x`` at ``(j, i)``.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import Node

from dynafuse.fx import hint
from dynafuse.ir import Annotated, Facts, Role, Size, Tensor
from dynafuse.ops import Call, Combine, Kind, Row, View
from dynafuse.ops.overloads import COPIES_INTO, written_to
from dynafuse.ops.reductions import keepdim, reduced_dims
from dynafuse.partition.axes import Axes, AxisDims, Unifier, fresh
from dynafuse.partition.kernel_class import LANES, estimate
from dynafuse.partition.places import ELEMENTWISE, Operand, Reading, readings
from dynafuse.partition.windows import window_loads

UNROLL = 8  # a reduction over no more elements than this is written out, and so can be computed at any index
UNROLL_BACK = 4  # the same where each of those elements is computed with the result
UNROLL_NEAR, NEAR = 16, 32 << 10  # the same where what it reads, of so many bytes, stays in a processor's first cache
LEAST_FOR_LANES = 8  # elements from which on lanes load them side by side, where results are fewer than lanes
LITTLE_MORE = 1.125  # bytes that reading a node's operands may take for each of its own, if it is not to be stored
CHEAP_FLOPS = 12.0  # a node with more arithmetic than this, its cheap operands included, is not computed twice
TURNED_FLOPS = 3.0  # of loads of something transposed, where lanes side by side read far from each other
PLACE_FLOPS = 100.0  # the same of integers that depend on their place alone: indices are computed of places like that
INTEGERS = frozenset({torch.int32, torch.int64})  # of which places are
FUNCTION = 8.0  # what a function counts for in that
FUNCTION_FLOPS = 32.0  # of a function, at most: as long as it takes to store a 16-bit float and load it


Place = tuple[Axes | None, ...]
"""Where a tensor is read: per dimension the axes along which, or None where the position is not made of whole axes."""


@dataclass(frozen=True)
class Read:
    """A unit that is read, where, and by which unit.

    ``elements`` is a hint of how many of its elements are loaded, at most, by a reader that is computed at all of its
    ``points``. Who reads a slice along whole axes of the slice reads the same elements as others that do: then ``view`` is
    the slice, and ``view_dims`` are the axes along it. Units that run along the same axes read the same elements where
    ``elements_at`` are the same, if not None.

    Worked example: in ``x[:, 1:].amax(1)`` the maximum reads ``x`` at ``place`` ``(i, None)``, so that its ``dims`` are
    None, and the slice along ``(i, j)``.
    """

    source: Node
    place: Place
    elements: int
    view: Node | None = None
    view_dims: AxisDims | None = None
    elements_at: Hashable = None
    reader: Node | None = None
    points: int = 0

    @cached_property
    def dims(self) -> AxisDims | None:
        """Return the axes along which it is read; None if a dimension is not read along whole axes (a slice, a gather)."""
        return whole(self.place)

    def along(self, tensor: Node) -> AxisDims | None:
        """Return the axes along which ``tensor``, the unit or the view of it, is read; None where it is neither."""
        if tensor is self.source:
            return self.dims
        return self.view_dims if tensor is self.view else None


def count(shape: tuple[Size, ...]) -> Size:
    """Return the number of elements of a shape."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def whole(place: Place) -> AxisDims | None:
    """Return a place at which every dimension is read along whole axes; None for others."""
    return None if None in place else place  # type: ignore[return-value]


def _flops_again(row: Row, call: Call | None) -> float:
    """Return what an op counts for where it is computed again: memory hides a function, but not many."""
    flops = row.flops_in(call)
    return FUNCTION if FUNCTION < flops <= FUNCTION_FLOPS else flops


def tensor_arguments(node: Node) -> tuple[Node, ...]:
    """Return the distinct nodes whose values a node needs (a copy does not read what it overwrites)."""
    return (node.args[1],) if node.target is COPIES_INTO else tuple(node.all_input_nodes)  # type: ignore[return-value]


class Spaces:
    """The axes of every unit of a graph.

    ``dims`` are those of each unit. ``operands`` are the nodes whose values a node needs, with what it reads of each for one
    element of its own, and ``flops`` is the arithmetic of that element.
    """

    copies_into = COPIES_INTO

    def __init__(self, annotated: Annotated, recompute: bool) -> None:
        self.annotated = annotated
        self.facts = annotated.facts
        self.graph = annotated.graph
        self.unifier = Unifier()
        self._recompute = recompute
        self.dims: dict[Node, AxisDims] = {}
        self._readings: dict[Node, Mapping[Node, Reading] | None] = {}
        self._reduced_dims: dict[Node, tuple[int, ...]] = {}
        self._scatters = frozenset(node for node, facts in self.facts.items() if facts.scatters_into is not None)
        fused = [node for node, facts in self.facts.items() if facts.is_fused]
        self._scans = frozenset(node for node in fused if self._kind(node) is Kind.SCAN)
        self._reductions = frozenset(
            node for node in fused if self._kind(node) is Kind.REDUCTION and not self.is_unrolled(node))
        self.operands = {node: self._operands_of(node) for node in self.graph.nodes}
        self.flops = {node: self._flops_of(node) for node in self.graph.nodes}
        for node in self.graph.nodes:
            if self.is_unit(node):
                self.dims[node] = fresh(self.iterated_shape(node))

    # ------------------------------------------------------------------ what is a unit

    def tensor(self, node: Node) -> Tensor:
        """Return the tensor facts of a node that has them."""
        tensor = self.facts[node].tensor
        assert tensor is not None, node
        return tensor

    def is_unit(self, node: Node) -> bool:
        """Return whether ``node`` is computed by a fused kernel as a value of its own."""
        return self.facts[node].role is Role.FUSED and node not in self.cheap

    @cached_property
    def needed(self) -> frozenset[Node]:
        """Return the nodes that are read outside fused kernels: they must exist in memory (or be views of what does)."""
        needed: set[Node] = set()
        for node in reversed(list(self.graph.nodes)):
            role = self.facts[node].role
            if role in (Role.EAGER, Role.OUTPUT, Role.HOST) or (role is Role.VIEW and node in needed):
                needed.update(node.all_input_nodes)
            elif (base := self.facts[node].scatters_into) is not None:
                needed.add(base)
            elif node.target is COPIES_INTO and role is not Role.VIEW:
                needed.add(node)
                if self._reads_elsewhere(node):
                    needed.add(node.args[1])
        return frozenset(needed)

    def _reads_elsewhere(self, copy: Node) -> bool:
        """Return whether what is copied is computed, element by element, from other elements of what is overwritten."""
        into = self.annotated.memory(copy.all_input_nodes[0])
        stack: list[tuple[Node, bool]] = [(copy.args[1], False)]  # type: ignore[list-item]
        seen = set(stack)
        while stack:
            node, moved = stack.pop()
            facts = self.facts[node]
            same = self.annotated.memory(node) is into
            if same and (moved or facts.role is Role.EAGER):  # an eager view shows any element
                return True
            if facts.role is Role.VIEW or (facts.role is Role.FUSED and self._kind(node) is Kind.POINTWISE):
                moved = moved or facts.role is Role.VIEW
                fresh_ = [(a, moved or self._shape_of(a) != self._shape_of(node)) for a in node.all_input_nodes]
                stack += [item for item in fresh_ if item not in seen]
                seen.update(fresh_)
        return False

    def _shape_of(self, node: Node) -> tuple[Size, ...] | None:
        tensor = self.facts[node].tensor
        return None if tensor is None else tensor.shape

    @cached_property
    def cheap(self) -> frozenset[Node]:
        """Return fusible nodes that cost no more to compute again than to read: casts up, scalings by a row, constants."""
        cheap: dict[Node, tuple[frozenset[Node], float]] = {}
        for node in self.graph.nodes:
            facts = self.facts[node]
            if facts.role is Role.FUSED and node not in self.needed and self._follows_readers(node, facts.forced):
                sources, flops = self._recomputation(node, facts, cheap)
                if self._pays(facts, sources, flops * self._evaluations[node]):
                    cheap[node] = (sources, flops)
        return frozenset(cheap)

    @cached_property
    def _evaluations(self) -> Mapping[Node, int]:
        """Return how often, at most, a node is computed per point of a kernel if each of its readers computes it again."""
        evaluations: dict[Node, int] = {}
        for node in reversed(list(self.graph.nodes)):
            most = picked = 0 if node.users else 1
            sliced = 0.0
            for user in node.users:
                operand = self.operands[user].get(node, ELEMENTWISE)  # a copy does not read what it overwrites
                times = self._read_by(user, operand, evaluations)
                most = max(most, times)
                picked += times if operand.is_picked else 0
                sliced += times * self._share_of_slice(user, node)
            evaluations[node] = max(most, picked, round(sliced))
        return evaluations

    def _share_of_slice(self, user: Node, node: Node) -> float:
        """Return how much of a node a slice of it is, 0 of anything else: what several slices have is computed for each."""
        tensor = self.facts[node].tensor  # None for the number at which a slice begins
        if user.target is not torch.ops.aten.slice.Tensor or tensor is None or not tensor.bytes:
            return 0.0
        return self.tensor(user).bytes / tensor.bytes

    def _read_by(self, user: Node, operand: Operand, evaluations: Mapping[Node, int]) -> int:
        """Return how often a reader needs an element of an operand: often itself if it may be computed again, too."""
        facts = self.facts[user]
        if facts.role not in (Role.VIEW, Role.FUSED) or facts.row is None:
            return 1
        again = facts.role is Role.VIEW or (facts.row.kind is Kind.POINTWISE and user not in self.needed and (
            _flops_again(facts.row, facts.call) * evaluations[user] <= CHEAP_FLOPS))
        return operand.reach * (evaluations[user] if again else 1)

    def _follows_readers(self, node: Node, forced: str | None) -> bool:
        """Return whether readers may compute a node again for themselves: a forced one only where they are forced alike."""
        return forced is None or all(self.facts[user].forced == forced for user in node.users)

    def _pays(self, facts: Facts, sources: frozenset[Node], flops: float) -> bool:
        assert facts.row is not None and facts.tensor is not None
        if facts.row.kind is Kind.CREATION:
            return True
        if facts.row.kind is not Kind.POINTWISE or facts.call is None or not self._recompute:
            return False
        if self.overwritten.intersection(map(self.annotated.memory, sources)):
            return False  # computed again, it had to be before the overwriting
        most = PLACE_FLOPS if not sources and self._is_of_integers(facts) else CHEAP_FLOPS
        return flops <= most and sum(self.tensor(s).bytes for s in sources) <= LITTLE_MORE * facts.tensor.bytes

    def _is_of_integers(self, facts: Facts) -> bool:
        """Return whether a call computes integers of integers."""
        assert facts.call is not None
        tensors = [facts.tensor, *(self.facts[a].tensor for a in facts.call.args.values() if isinstance(a, Node))]
        return all(tensor is not None and tensor.dtype in INTEGERS for tensor in tensors)

    @cached_property
    def overwritten(self) -> frozenset[Node]:
        """Return what something writes into: inputs, and whatever ops that are not functional change."""
        return frozenset(self.annotated.memory(written) for node in self.graph.nodes for written in written_to(node))

    def _recomputation(
        self, node: Node, facts: Facts, cheap: dict[Node, tuple[frozenset[Node], float]]
    ) -> tuple[frozenset[Node], float]:
        """Return what must be read to compute ``node`` again, and the arithmetic."""
        assert facts.row is not None
        sources: set[Node] = set()
        flops = _flops_again(facts.row, facts.call) + (TURNED_FLOPS if self.annotated.turns(node) else 0.0)
        for argument in tensor_arguments(node):
            base = self.annotated.base(argument)
            if base in cheap:
                more, extra = cheap[base]
                sources |= more
                flops += extra
            elif self.facts[base].tensor is not None:
                sources.add(base)
        return frozenset(sources), flops

    def is_unrolled(self, node: Node) -> bool:
        """Return whether a reduction is short enough to be written out."""
        if self._kind(node) is not Kind.REDUCTION or not self._plain(node):
            return False
        total, results = count(tuple(self._reduced_sizes(node))), count(self.tensor(node).shape)
        near = self.tensor(node.all_input_nodes[0]).bytes <= NEAR
        if not isinstance(total, int) or total > (UNROLL_NEAR if near else UNROLL):
            return False
        if total > UNROLL and not self._is_read_elsewhere(node, results):
            return False
        if total > UNROLL_BACK and self._is_spread_back(node, results):
            return False
        leaves_lanes_idle = isinstance(results, int) and results < LANES and total >= LEAST_FOR_LANES
        return not leaves_lanes_idle or self._is_spread(node, results)

    def _is_spread(self, node: Node, results: Size) -> bool:
        """Return whether a reader has another number of elements, and so computes a short reduction anywhere."""
        return any(size != results for size in self._sizes_of_readers(node, {Role.VIEW}))

    def _is_read_elsewhere(self, node: Node, results: Size) -> bool:
        """Return whether a result is spread over other elements than those that are reduced, for which a row computes it."""
        sizes = {results, count(self.tensor(node.all_input_nodes[0]).shape)}
        return any(size not in sizes for size in self._sizes_of_readers(node, {Role.FUSED, Role.VIEW}))

    def _is_spread_back(self, node: Node, results: Size) -> bool:
        """Return whether a result is spread over the elements that are reduced: a row has each once, not all for each."""
        operand = count(self.tensor(node.all_input_nodes[0]).shape)
        return operand != results and any(size == operand for size in self._sizes_of_readers(node, {Role.FUSED, Role.VIEW}))

    def _sizes_of_readers(self, node: Node, roles: Container[Role]) -> Iterator[Size]:
        """Yield how many elements readers have, also those behind nodes of some roles that have as many as ``node``."""
        own, reached, seen = count(self.tensor(node).shape), [node], {node}
        while reached:
            for user in reached.pop().users.keys() - seen:
                seen.add(user)
                shape = self._shape_of(user)
                size = own if shape is None else count(shape)
                yield size
                if size == own and self.facts[user].role in roles:
                    reached.append(user)

    def _plain(self, node: Node) -> bool:
        row = self.facts[node].row
        return row is not None and row.states == 1

    def is_reduction(self, node: Node) -> bool:
        """Return whether ``node`` is a reduction that its kernel must loop or combine for."""
        return node in self._reductions

    def is_scan(self, node: Node) -> bool:
        """Return whether ``node`` is a scan, of which an element is made of all before it along one dimension."""
        return node in self._scans

    def takes_rows(self, node: Node) -> bool:
        """Return whether ``node`` takes in whole rows: a reduction that is not written out, or a scan."""
        return node in self._reductions or node in self._scans

    def row_count(self, node: Node) -> int:
        """Return a hint of how many rows a reduction or a scan takes in."""
        tensor = self.tensor(node)
        if not self.is_scan(node):
            return tensor.hint
        (dim,), value = self._reduced(node), node.meta["val"]
        return tensor.hint // max(hint(value.shape[dim]), 1)

    def is_scatter(self, node: Node) -> bool:
        """Return whether ``node`` writes at computed places, so that nothing of it is known before its kernel has ended."""
        return node in self._scatters

    def adds(self, node: Node) -> bool:
        """Return whether ``node`` is a scatter that combines values with what its base holds, in any order."""
        row, call = self.facts[node].row, self.facts[node].call
        if not self.is_scatter(node) or row is None or row.scatter is None or call is None:
            return False
        return row.scatter.combine(call.args) is not Combine.STORE

    def combines_alike(self, first: Node, second: Node) -> bool:
        """Return whether of two scatters into one base the second need not wait for the first: both add."""
        combines = [row.scatter.combine(facts.call.args) for facts in (self.facts[first], self.facts[second])
                    if (row := facts.row) is not None and row.scatter is not None and facts.call is not None]
        return len(combines) == 2 and combines[0] is combines[1] and self.adds(first)

    def _kind(self, node: Node) -> Kind:
        row = self.facts[node].row
        assert row is not None, node
        return row.kind

    # ------------------------------------------------------------------ axes of a unit

    def _reduced(self, node: Node) -> tuple[int, ...]:
        if node not in self._reduced_dims:
            call = self.facts[node].call
            assert call is not None
            self._reduced_dims[node] = reduced_dims(call.args, len(self._operand_shape(node)))
        return self._reduced_dims[node]

    def _operand_shape(self, node: Node) -> tuple[Size, ...]:
        return self.tensor(node.all_input_nodes[0]).shape

    def _reduced_sizes(self, node: Node) -> Iterator[Size]:
        if self._kind(node) is Kind.REDUCTION:
            shape = self._operand_shape(node)
            yield from (shape[d] for d in self._reduced(node))

    def iterated_shape(self, node: Node) -> tuple[Size, ...]:
        """Return the sizes of what a unit runs over: of its result, of a reduction's operand, of a scatter's points."""
        if self.is_scatter(node):
            return self._points(node)
        return self._operand_shape(node) if self.is_reduction(node) else self.tensor(node).shape

    def _points(self, node: Node) -> tuple[Size, ...]:
        """Return the sizes of a scatter's iteration space."""
        row, call = self.facts[node].row, self.facts[node].call
        assert row is not None and row.scatter is not None and call is not None
        return tuple(int(size) if size.is_Integer else size for size in row.scatter.points(call))

    def point_count(self, node: Node) -> int:
        """Return a hint of how many values a scatter writes."""
        total = count(self._points(node))
        operands = (self.facts[argument].tensor for argument in node.all_input_nodes)
        return total if isinstance(total, int) else max(tensor.hint for tensor in operands if tensor is not None)

    def out_dims(self, node: Node) -> AxisDims:
        """Return the axes of a unit's output."""
        dims = self.dims[node]
        if not self.is_reduction(node):
            return dims
        reduced = set(self._reduced(node))
        call = self.facts[node].call
        assert call is not None
        if keepdim(call.args):
            return tuple(() if d in reduced else axes for d, axes in enumerate(dims))
        return tuple(axes for d, axes in enumerate(dims) if d not in reduced)

    def reduced_axes(self, node: Node) -> AxisDims:
        """Return the axes that a reduction closes over; those that a scan walks, outermost first."""
        return tuple(self.dims[node][d] for d in self._reduced(node))

    # ------------------------------------------------------------------ reads

    def reads(self, node: Node) -> list[Read]:
        """Return what unit ``node`` reads, looking through views and cheap nodes."""
        if self.is_scatter(node):
            points = self.point_count(node)
        else:
            points = self.tensor(node.all_input_nodes[0] if self._kind(node) is Kind.REDUCTION else node).hint
        reads: list[Read] = []
        for argument in tensor_arguments(node):
            same = self._elements_at(node, argument)
            reads += (replace(read, elements_at=same, reader=node, points=points)
                      for read in self._operand(node, argument, self.dims[node], points))
        return reads

    def _elements_at(self, node: Node, argument: Node) -> Hashable:
        """Return what two units have in common that read the same elements of an operand if they run along the same axes."""
        reading = (self.moves(node) or {}).get(argument)
        return (argument, reading.indices) if reading is not None and reading.told else None

    def _reads_of(self, node: Node, place: Place, elements: int) -> Iterator[Read]:
        for argument in tensor_arguments(node):
            yield from self._operand(node, argument, place, elements)

    def _operand(self, node: Node, argument: Node, place: Place, elements: int) -> Iterator[Read]:
        if self.facts[argument].tensor is not None:
            elements = elements * self.operands[node][argument].reach
            yield from self._resolve(argument, self._operand_place(node, argument, place), elements)

    def _operands_of(self, node: Node) -> Mapping[Node, Operand]:
        """Return the nodes whose values a node needs, with what it reads of each for one element of its own."""
        row, arguments = self.facts[node].row, tensor_arguments(node)
        if row is None or row.kind not in (Kind.INDEX, Kind.GATHER):
            return dict.fromkeys(arguments, ELEMENTWISE)
        operands = {argument: self._moved(node, argument) for argument in arguments}
        in_windows = {argument: self.tensor(argument) for argument, operand in operands.items() if operand.reach > 1}
        if in_windows:
            readings, (steps, dim) = self.moves(node) or {}, self._loop(node)
            for argument, loads in window_loads(self.tensor(node), readings, in_windows, steps, dim).items():
                operands[argument] = replace(operands[argument], shared=loads)
        return operands

    def _loop(self, node: Node) -> tuple[int, int]:
        """Return in how many steps a loop adds a node up, and along which dimension of its operands a step moves."""
        row, call = self.facts[node].row, self.facts[node].call
        if row is None or row.loop is None or call is None:
            return 1, 0
        return row.loop.count(call, lambda argument: self.tensor(argument).shape), row.loop.dim

    def _moved(self, node: Node, argument: Node) -> Operand:
        """Return what a node that moves data reads of an operand for one element of its own."""
        moved, reading = self.moves(node), None
        if moved is not None:
            reading = moved.get(argument)
            if reading is None:
                return Operand(0, 0.0)
        reach, is_picked = 1 if reading is None else len(reading.indices), reading is not None and not reading.told
        if reach > 1 or self._kind(node) is not Kind.INDEX or (reading is not None and reading.shifted is None):
            return Operand(reach, reach, is_picked)
        share = self._share(node, argument)
        is_mixed = share < 1.0 and reading is not None and self._run(node, argument, reading) < LANES
        return Operand(share=share, is_mixed=is_mixed)

    def _share(self, node: Node, part: Node) -> float:
        """Return how much of a node one of its parts makes up."""
        tensor = self.facts[part].tensor
        return 1.0 if tensor is None else min(1.0, tensor.hint / max(self.tensor(node).hint, 1))

    def _run(self, node: Node, part: Node, reading: Reading) -> int:
        """Return how many elements side by side in a node's memory belong to one of its parts."""
        result, run = self.tensor(node), 1
        sizes = dict(zip(reading.shifted or (), self.tensor(part).shape, strict=True))
        for k in sorted(range(len(result.shape)), key=lambda k: (estimate(result.stride[k]), -k)):
            run *= estimate(sizes.get(k, 1))
            if sizes.get(k, 1) != result.shape[k]:
                break
        return run

    @cached_property
    def spread(self) -> Mapping[Node, Mapping[Node, int]]:
        """Return per node the operands that it repeats, or is made of by windows, and how many elements these have."""
        spread: dict[Node, dict[Node, int]] = {}
        for node in self.graph.nodes:
            for argument, reading in (self.moves(node) or {}).items():
                tensor = self.facts[argument].tensor
                if reading.shifted is None and tensor is not None and tensor.hint < self.tensor(node).hint:
                    spread.setdefault(node, {})[argument] = tensor.hint
        return spread

    def _flops_of(self, node: Node) -> float:
        """Return the arithmetic of one element of a node, once for each that it takes from its widest operand."""
        facts = self.facts[node]
        reach = max((operand.reach for operand in self.operands[node].values()), default=1)
        return reach * (facts.row.flops_in(facts.call) if facts.row else 1.0)

    def moves(self, node: Node) -> Mapping[Node, Reading] | None:
        """Return where a fused node that moves data reads its operands; None for any other node."""
        if self.facts[node].role is not Role.FUSED or self._kind(node) not in (Kind.INDEX, Kind.GATHER):
            return None
        return self._reading(node)

    def _reading(self, node: Node) -> Mapping[Node, Reading] | None:
        if node not in self._readings:
            self._readings[node] = readings(node, self.facts)
        return self._readings[node]

    def _operand_place(self, node: Node, argument: Node, place: Place) -> Place:
        facts = self.facts[node]
        assert facts.row is not None and facts.call is not None
        if self.takes_rows(node):
            return place
        if self.is_scatter(node) and not self._lines_up(node, argument):
            return (None,) * len(self.tensor(argument).shape)
        if facts.row.kind is Kind.POINTWISE or any(facts.call.args.get(name) is argument for name in facts.row.aligned):
            return self._broadcast(place, self.tensor(argument).shape)
        return self._followed(node, argument, place)

    def _lines_up(self, scatter: Node, argument: Node) -> bool:
        """Return whether an operand is read at the points of a scatter, or broadcast to them; not of a larger one."""
        row, call = self.facts[scatter].row, self.facts[scatter].call
        assert row is not None and call is not None
        sizes, points = self.tensor(argument).shape, self._points(scatter)
        pairs = zip(sizes[::-1], points[::-1], strict=False)
        is_aligned = any(call.args.get(name) is argument for name in row.aligned)
        return is_aligned and len(sizes) <= len(points) and all(size in (1, point) for size, point in pairs)

    def _broadcast(self, place: Place, shape: tuple[Size, ...]) -> Place:
        """Return where a broadcast operand is read: trailing dimensions line up, one of size 1 runs along nothing."""
        trailing = place[len(place) - len(shape):]
        return tuple(() if size == 1 else axes for axes, size in zip(trailing, shape, strict=True))

    def _followed(self, node: Node, argument: Node, place: Place) -> Place:
        """Return where an operand is read whose dimensions follow some of the node's, as the row of the op table tells."""
        shape, reading = self.tensor(argument).shape, (self._reading(node) or {}).get(argument)
        dimensions = (None,) * len(shape) if reading is None else reading.followed
        own = self.tensor(node).shape
        return tuple(() if size == 1 else None if k is None or size != own[k] else place[k]
                     for k, size in zip(dimensions, shape, strict=True))

    def _resolve(self, node: Node, place: Place, elements: int) -> Iterator[Read]:
        role, row = self.facts[node].role, self.facts[node].row
        if role is Role.VIEW:
            if row is not None and row.view is View.EXPAND:  # what is repeated is loaded once
                elements = min(elements, self.tensor(node).hint)
            base, base_place = node.all_input_nodes[0], self._through_view(node, place)
            dims = whole(place)
            if dims is None or whole(base_place) is not None:
                yield from self._resolve(base, base_place, elements)
            else:
                yield from (replace(read, view=node, view_dims=dims) for read in self._resolve(base, base_place, elements))
        elif role is Role.FUSED and node in self.cheap:
            yield from self._reads_of(node, place, elements)
        else:
            yield Read(node, place, elements)

    def _through_view(self, node: Node, place: Place) -> Place:
        """Return where a view's base is read when the view is read at a place."""
        base = node.all_input_nodes[0]
        shape, dims = self.tensor(base).shape, whole(place)
        row, call = self.facts[node].row, self.facts[node].call
        assert row is not None and call is not None
        if row.view is View.RESHAPE:
            regrouped = None if dims is None else self.unifier.regroup(dims, shape)
            return self._followed(node, base, place) if regrouped is None else regrouped
        if row.view is View.EXPAND:
            return self._broadcast(place, shape)
        if row.order is not None:
            order = row.order(call.args, len(place))
            return tuple(place[order.index(d)] for d in range(len(place)))
        return self._followed(node, base, place)
