"""Growing regions: which units share a kernel, decided by what it saves.

Every unit starts as a region of its own. Pairs that could share memory traffic (a producer and its reader, two readers
of one tensor) are tried in the order of what they would save, and merged where one kernel can compute both, no cycle
arises and the prediction says that it pays. A merge that is turned down is kept as a ``Refusal``.

Worked example: in ``softmax(x) * mask`` the maximum, the exponential, the sum, the division and the product end in one
region; in ``relu(x @ a) @ b`` ``relu`` stays alone between the two products, which run eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from dynafuse.ir import Annotated, Axis, Dims, Plan, Refusal, Region
from dynafuse.partition import legality
from dynafuse.partition.axes import AxisDims, leaves
from dynafuse.partition.cost import Work, region_us
from dynafuse.partition.device import Device
from dynafuse.partition.legality import Shape, classify, members, product
from dynafuse.partition.order import Dependencies, schedule
from dynafuse.partition.spaces import COPIES_INTO, Read, Spaces

ROUNDS = 4  # passes over the candidate pairs; a merge can make another one legal
MAX_TENSORS = 40  # tensors that one kernel reads and writes
ROW_TILE = 32  # elements of contiguous output that one program of a column reduction makes


@dataclass(eq=False)
class Group:
    """A region while it grows."""

    nodes: list[Node]
    reads: list[Read]
    inlined: frozenset[Node] = frozenset()
    us: float = 0.0
    reasons: list[str] = field(default_factory=list)
    shape: Shape | None = None


@dataclass(frozen=True)
class Candidate:
    """Two units that might share a kernel: a producer with its reader, or two readers of ``tensor``."""

    saving: int  # bytes
    first: Node
    second: Node
    tensor: Node
    vertical: bool


def partition(annotated: Annotated, device: Device, *, recompute: bool = True, max_ops: int = 200) -> Plan:
    """The plan for a graph on a device: regions, eager calls and views in an order that respects every dependency."""
    return _Growth(Spaces(annotated, recompute), device, max_ops).run(annotated)


class _Growth:
    """The working state of :func:`partition`."""

    def __init__(self, spaces: Spaces, device: Device, max_ops: int) -> None:
        self.spaces = spaces
        self.device = device
        self.max_ops = max_ops
        self.refusals: dict[tuple[Node, Node], Refusal] = {}
        self.reads = {unit: spaces.reads(unit) for unit in spaces.dims}
        self.group = {unit: Group([unit], reads) for unit, reads in self.reads.items()}
        self.dependencies = Dependencies(spaces, self.group)
        self.readers = self._readers()
        for group in self.group.values():
            group.us, group.shape = self._price(group.nodes, group.reads, group.inlined)

    def run(self, annotated: Annotated) -> Plan:
        candidates = sorted(self._candidates(), key=lambda c: -c.saving)
        for _ in range(ROUNDS):
            before = len(candidates)
            candidates = [c for c in candidates if not self._try(c)]
            if len(candidates) == before:
                break
        groups = list({id(g): g for g in self.group.values()}.values())
        regions = [self._region(f"r{i}", group) for i, group in enumerate(groups)]
        steps = schedule(self.spaces, regions)
        standing = [r for (a, b), r in self.refusals.items() if self.group[a] is not self.group[b]]
        return Plan(annotated, steps, tuple(standing))

    # ------------------------------------------------------------------ what to try

    def _readers(self) -> dict[Node, set[Node]]:
        """Per tensor in memory or to be: the units, eager nodes and outputs that read it."""
        readers: dict[Node, set[Node]] = {}
        for unit, reads in self.reads.items():
            for read in reads:
                readers.setdefault(read.source, set()).add(unit)
        for node in self.spaces.needed:
            outside = [u for u in node.users if self.spaces.facts[u].role in ("eager", "output", "host")]
            readers.setdefault(self.spaces.base(node), set()).update(outside)
            if node.target is COPIES_INTO:
                readers.setdefault(node, set()).add(node.graph.output_node())
        return readers

    def _candidates(self) -> Iterable[Candidate]:
        for tensor, readers in self.readers.items():
            if self.spaces.facts[tensor].tensor is None:
                continue
            size = self.spaces.tensor(tensor).bytes
            units = sorted((r for r in readers if r in self.group), key=self.dependencies.position)
            if tensor in self.group:
                yield from (Candidate(2 * size, tensor, unit, tensor, True) for unit in units)
            for first, second in itertools.pairwise(units):
                yield Candidate(size, first, second, tensor, False)

    # ------------------------------------------------------------------ one merge

    def _try(self, candidate: Candidate) -> bool:
        """Merge if it is legal and pays. True when the pair is settled and need not be tried again."""
        first, second = self.group[candidate.first], self.group[candidate.second]
        if first is second:
            return True
        mark = self.spaces.unifier.mark()
        merged = self._merged(candidate, first, second)
        if isinstance(merged, Refusal):
            self.spaces.unifier.undo(mark)
            self.refusals[candidate.first, candidate.second] = merged
            return False
        self.refusals.pop((candidate.first, candidate.second), None)
        self.dependencies.merged(first, second, merged)
        for node in merged.nodes:
            self.group[node] = merged
        return True

    def _merged(self, candidate: Candidate, first: Group, second: Group) -> Group | Refusal:
        a, b = candidate.first.name, candidate.second.name
        if len(first.nodes) + len(second.nodes) > self.max_ops:
            return Refusal("region too large", a, b, f"{len(first.nodes)} + {len(second.nodes)} ops")
        if self.spaces.tensor(candidate.first).device != self.spaces.tensor(candidate.second).device:
            return Refusal("different devices", a, b)
        forced = {executor for n in (*first.nodes, *second.nodes) if (executor := self.spaces.facts[n].forced)}
        if len(forced) > 1:
            return Refusal("forced to different executors", a, b, ", ".join(sorted(forced)))
        nodes = sorted(first.nodes + second.nodes, key=self.dependencies.position)
        inlined = self._aligned(candidate, first, second)
        if isinstance(inlined, Refusal):
            return inlined
        reads = first.reads + second.reads
        found = members(self.spaces, nodes, inlined, self._outputs(nodes))
        shape = classify(self.spaces, found)
        if isinstance(shape, Refusal):
            return shape
        conflict = self._write_conflict(nodes, reads)
        if conflict:
            return Refusal("reads what the other overwrites", a, b, conflict)
        elsewhere = self._read_elsewhere(nodes, inlined)
        if elsewhere is not None:
            return Refusal("known at one place, read at another", a, b, elsewhere.name)
        us, shape_ = self._price(nodes, reads, inlined)
        if us >= first.us + second.us:
            return Refusal("does not pay", a, b, f"{us:.1f} us together, {first.us:.1f} + {second.us:.1f} us apart")
        if self.dependencies.would_cycle(first, second):
            return Refusal("a path outside runs from one to the other", a, b)
        return Group(nodes, reads, inlined, us, [*first.reasons, *second.reasons, f"{a} + {b}"], shape_)

    def _aligned(self, candidate: Candidate, first: Group, second: Group) -> frozenset[Node] | Refusal:
        """Unify the two groups' axes along what they share; the nodes that have to be computed at other indices."""
        a, b = candidate.first.name, candidate.second.name
        inlined = first.inlined | second.inlined
        if candidate.second in inlined or candidate.first in inlined:
            return self._inline(candidate, first, inlined)
        there = [r.dims for r in self.reads[candidate.second] if r.source is candidate.tensor]
        if candidate.vertical:
            here: Sequence[AxisDims | None] = [self.spaces.out_dims(candidate.first)]
        else:
            here = [r.dims for r in self.reads[candidate.first] if r.source is candidate.tensor]
        if any(dims is None for dims in (*here, *there)):
            if candidate.vertical:
                return self._inline(candidate, first, inlined)
            return Refusal("reads at different places", a, b)
        if not self.spaces.unifier.unify_dims(here[0], there[0]):  # type: ignore[arg-type]
            return Refusal("dimensions do not line up", a, b)
        return inlined

    def _inline(self, candidate: Candidate, first: Group, inlined: frozenset[Node]) -> frozenset[Node] | Refusal:
        """Compute all of ``first`` at whatever index its reader asks for."""
        a, b = candidate.first.name, candidate.second.name
        if not candidate.vertical:
            return Refusal("reads at different places", a, b)
        inside = set(first.nodes) | set(self.group[candidate.second].nodes)
        blocker = legality.computes_anywhere(self.spaces, first.nodes)
        if blocker is not None:
            return Refusal("cannot be computed at another index", a, b, blocker.name)
        for node in first.nodes:
            if not self.readers.get(node, set()) <= inside:
                return Refusal("stored, and read at another index", a, b, node.name)
        return inlined | frozenset(first.nodes)

    def _write_conflict(self, nodes: Sequence[Node], reads: Sequence[Read]) -> str:
        """A tensor that the region overwrites and also reads elsewhere than where it writes."""
        for node in nodes:
            if node.target is not COPIES_INTO:
                continue
            into = self.spaces.base(node.all_input_nodes[0])
            written = [leaves(dim) for dim in self.spaces.dims[node]]
            for read in reads:
                if read.source is into and (read.dims is None or [leaves(d) for d in read.dims] != written):
                    return into.name
        return ""

    def _read_elsewhere(self, nodes: Sequence[Node], inlined: frozenset[Node]) -> Node | None:
        """A value that one kernel knows only along its own axes, and that the region also reads at another index.

        Such are reductions, readers of a tensor that the region overwrites, and what is computed from either.
        """
        written = {self.spaces.base(n.all_input_nodes[0]) for n in nodes if n.target is COPIES_INTO}
        fixed: set[Node] = set()
        for node in nodes:
            for read in self.reads[node]:
                if read.source in fixed and (node in inlined or not self._same_place(read)):
                    return read.source
            sources = {read.source for read in self.reads[node]}
            if self.spaces.is_reduction(node) or sources & fixed or sources & written:
                fixed.add(node)
        return None

    def _same_place(self, read: Read) -> bool:
        """Whether a unit is read along the very axes that it is computed along."""
        if read.dims is None:
            return False
        return [leaves(d) for d in read.dims] == [leaves(d) for d in self.spaces.out_dims(read.source)]

    # ------------------------------------------------------------------ what it costs

    def _outputs(self, nodes: Sequence[Node]) -> frozenset[Node]:
        inside = set(nodes)
        return frozenset(n for n in nodes if not self.readers.get(n, set()) <= inside or n.target is COPIES_INTO)

    def _price(
        self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node]
    ) -> tuple[float, Shape | None]:
        """Predicted microseconds of a region, and its iteration space (infinite if none fits)."""
        outputs = self._outputs(nodes)
        found = members(self.spaces, nodes, inlined, outputs)
        shape = classify(self.spaces, found)
        inside = set(nodes)
        sources = {read.source for read in reads} - inside
        tensors = len(sources) + len(outputs)
        if isinstance(shape, Refusal) or (tensors > MAX_TENSORS and len(nodes) > 1):
            return float("inf"), None
        moved = self._moved(reads, sources, product(shape.axes)) + sum(self.spaces.tensor(n).bytes for n in outputs)
        flops = self._flops(shape, found, nodes, inlined)
        return region_us(self._work(shape, found, moved, flops), self.device), shape

    def _moved(self, reads: Sequence[Read], sources: set[Node], points: int) -> int:
        """Bytes read: each source once, but of one that is only picked from no more than there are points."""
        whole = {read.source for read in reads if read.dims is not None}
        total = 0
        for source in sources:
            tensor = self.spaces.tensor(source)
            total += tensor.bytes if source in whole else min(tensor.bytes, points * tensor.dtype.itemsize)
        return total

    def _flops(
        self, shape: Shape, found: Sequence[legality.Member], nodes: Sequence[Node], inlined: frozenset[Node]
    ) -> float:
        """Arithmetic: everything is computed at every point, but for what is known once per row."""
        points = product(shape.axes)
        per_row = {m.node for m in found if shape.reduced and not m.reduced and not m.out & shape.reduced}
        total = 0.0
        for node in self.dependencies.closure(nodes):
            row = self.spaces.facts[node].row
            times = shape.rows if node in per_row else points
            total += (row.flops if row else 1.0) * times
        return total

    def _work(self, shape: Shape, found: Sequence[legality.Member], moved: int, flops: float) -> Work:
        if shape.kind == "pointwise":
            return Work(moved, flops, max(product(shape.axes) // 256, 1), "pointwise")
        if shape.kind == "rowcol":
            return Work(moved, flops, shape.rows, "rowcol", launches=2)
        inner = legality._innermost(self.spaces, found, shape.reduced)
        programs = shape.rows if inner else max(shape.rows // ROW_TILE, 1)
        if programs < 2 * self.device.processors and shape.length > 1024 and self._splits(shape, found):
            return Work(moved, flops, programs * max(shape.length // 1024, 1), "split", launches=2)
        return Work(moved, flops, programs, "row" if inner else "column")

    def _splits(self, shape: Shape, found: Sequence[legality.Member]) -> bool:
        """Whether rows can be split over programs: then nothing may need a complete row before the end."""
        reductions = frozenset(m.node for m in found if m.reduced)
        late = legality.after(self.spaces, found, reductions)
        return not any(m.node in late and (m.reduced or m.out & shape.reduced) for m in found)

    # ------------------------------------------------------------------ the result

    def _region(self, name: str, group: Group) -> Region:
        """The frozen form of a group, with the views and cheap nodes that it computes for itself."""
        shape = group.shape
        assert shape is not None
        outputs = [n for n in group.nodes if n in self._outputs(group.nodes)]
        order = {axis: i for i, axis in enumerate(shape.axes)}
        own = [n for n in group.nodes if n not in group.inlined]
        dims = {n: self._numbered(self.spaces.dims[n], order) for n in own}
        out_dims = {n: self._numbered(self.spaces.out_dims(n), order) for n in outputs}
        copies = {n: self.spaces.base(n.all_input_nodes[0]) for n in outputs if n.target is COPIES_INTO}
        inside = set(group.nodes)
        closure = self.dependencies.closure(group.nodes)
        inputs = sorted({r.source for r in group.reads} - inside, key=self.dependencies.position)
        bytes_ = sum(self.spaces.tensor(n).bytes for n in (*inputs, *outputs))
        axes = tuple(Axis(axis.size, axis in shape.reduced) for axis in shape.axes)
        reductions = frozenset(n for n in own if self.spaces.is_reduction(n))
        return Region(name, "triton", closure, tuple(inputs), tuple(outputs), axes, dims, out_dims, reductions, copies,
                      bytes_, group.us, tuple(group.reasons))

    def _numbered(self, dims: AxisDims, order: dict) -> Dims:  # type: ignore[type-arg]
        return tuple(tuple(order[axis] for axis in leaves(dim)) for dim in dims)

