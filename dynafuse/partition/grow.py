"""Growing regions: which units share a kernel, decided by what it saves.

Every unit starts as a region of its own. Pairs that could share memory traffic (a producer and its reader, two readers
of one tensor) are tried in the order of what they would save, and merged where one kernel can compute both, no cycle
arises and the prediction says that it pays. A rejected merge is kept as a ``Refusal``, and tried again once one of the two
has grown. Then come units side by side that run over equally many points, where they take hardly longer than their
launches. All of that is done first without, then with what makes few programs walk whole long rows that several could
share: whether it pays depends on all that shares them. Last comes what has nothing in common but may share a launch
(``joins.py``). ``search.py`` has all of it done in several ways; which pairs there are say ``Growth._sharing`` and
``Growth._equal_loops``, what keeps one apart ``Growth._merged``.

Worked example: in ``softmax(x) * mask`` the maximum, the exponential, the sum, the division and the product end in one
region; in ``relu(x @ a) @ b`` ``relu`` stays alone between the two products, which run eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.model import NOTHING, Prediction, efficiency_to_match, in_use, launched_us
from dynafuse.fx import user_line
from dynafuse.ir import Axis, Decision, Dims, Option, Override, Plan, Refusal, RefusalKind, Region, Size
from dynafuse.lowering.registry import EAGER, PREFERRED
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.partition.axes import Axes, AxisDims, leaves
from dynafuse.partition.group import Group
from dynafuse.partition.iteration_space import Place, Read
from dynafuse.partition.joins import Joins, SharedLaunch, may_join, side_by_side
from dynafuse.partition.kernel_class import walks_whole_rows
from dynafuse.partition.kernels import Kernel
from dynafuse.partition.legality import Shape, classify, computes_anywhere, members_of
from dynafuse.partition.order import UnitOrder, schedule
from dynafuse.partition.pricing import Priced, Pricing
from dynafuse.partition.units import Units

BRIEF = 2  # launches as long as which a region of one takes if it may be joined with another for a launch less
NEARBY = 100  # nodes of the graph between two units that are joined for a launch less: none waits long for the other
REGIONS_OF_LAUNCH = 2  # as large as may be, whose nodes may share one: those that compute the same share their code
ROUNDS = 4  # passes over the candidate pairs; a merge can make another one legal


@dataclass(frozen=True)
class Candidate:
    """Two units that might share a kernel: a producer with its reader, two readers of ``tensor``, or equal loops (None)."""

    saving: int  # bytes
    first: Node
    second: Node
    tensor: Node | None
    vertical: bool = False


@dataclass(frozen=True)
class Way:
    """How regions grow, other than by falling saving.

    Attributes:
        captured: Whether the graph will be replayed as a CUDA graph, where no host time counts.
        one_pass: Whether long rows may be reduced in the kernel that reduces columns.
        beside: What is assumed to run beside the graph.
        first: Pairs that are merged before all others.
        apart: The names of pairs that are not merged.
    """

    captured: bool = False
    one_pass: bool = True
    beside: Prediction = NOTHING
    first: tuple[Candidate, ...] = ()
    apart: frozenset[tuple[str, str]] = frozenset()


class Growth:
    """Regions that grow in one way. ``us`` is what the plan costs once :meth:`run` has made it."""

    def __init__(self, units: Units, way: Way) -> None:
        self.units = units
        self.way = way
        self.spaces = units.spaces
        self.device = units.device
        self.position = units.dependencies.position
        self.may_walk_rows = False  # whether what is merged may walk whole long rows that several programs could share
        self.refusals: dict[Candidate, Refusal] = {}
        self._refused: dict[Candidate, tuple[Group, Group]] = {}  # the groups that a refusal is of
        self.group = units.apart()
        self.order = UnitOrder(units.dependencies, self.group)
        self.pricing = Pricing(units.device, way.captured, units.calls, way.beside)
        for unit, group in self.group.items():
            self._price(group, units.alone[unit])
        self.apart = self.pricing.now  # what all units cost before any are merged

    @property
    def us(self) -> float:
        """Return the microseconds that the user waits for what there is now."""
        return self.pricing.us

    def run(self) -> Plan:
        """Return the plan; one without steps if the graph is not to be fused so, or what is to be merged first cannot be."""
        annotated = self.spaces.annotated
        if not all(map(self._try, self.way.first)):
            return Plan(annotated, (), ())
        self._grow()
        self.may_walk_rows = True
        self._refused = {c: pair for c, pair in self._refused.items() if self.refusals[c].kind is not RefusalKind.WAITS}
        self._grow()
        groups = list({id(g): g for g in self.group.values()}.values())
        for group in groups:
            self._price(group, group.kernel)
        cheaper = {node: said for group in groups if (said := _cheaper_eager(group)) for node in group.nodes}
        if cheaper:
            return Plan(annotated, (), (), cheaper)
        standing = self._standing()
        most_nodes = REGIONS_OF_LAUNCH * self.units.max_ops if self.units.joins else 0
        joins = Joins(self.units, self.order, self.pricing, self.group, most_nodes)
        regions = [self._launch(f"r{i}", launch) for i, launch in enumerate(joins.of(groups))]
        return Plan(annotated, schedule(self.spaces, regions, self.units.releases), standing)

    def missed(self, least: float) -> Iterator[Candidate]:
        """Yield pairs that are apart since one of them is merged with something else, of two regions the best.

        Args:
            least: The share of the graph's time that what a pair shares takes at least.
        """
        seen: set[tuple[int, int]] = set()
        least_bytes = least * self.us * self.device.bandwidth_tbs * 1e6
        for candidate in sorted(self.refusals, key=lambda c: -c.saving):
            first, second = self.group[candidate.first], self.group[candidate.second]
            regions = id(first), id(second)
            is_merged = len(first.nodes) + len(second.nodes) > 2
            if candidate.saving >= least_bytes and first is not second and is_merged and regions not in seen:
                seen.add(regions)
                yield candidate

    def _grow(self) -> None:
        """Merge until nothing else pays."""
        grows = True
        while grows:
            while self._merge(sorted(self._untried(self._sharing()), key=lambda c: -c.saving)):
                pass  # groups have new neighbours among the readers of a tensor
            grows = self._merge(list(self._untried(self._equal_loops())))

    def _merge(self, candidates: Sequence[Candidate]) -> bool:
        """Merge what pays, and return whether anything did."""
        count = len(candidates)
        for _ in range(ROUNDS):
            before = len(candidates)
            candidates = [c for c in candidates if not self._try(c)]
            if len(candidates) == before:
                break
        return len(candidates) < count

    # ------------------------------------------------------------------ what to try

    def _untried(self, candidates: Iterable[Candidate]) -> Iterable[Candidate]:
        """Yield the candidates that are apart, and have not been refused as they are now."""
        for candidate in candidates:
            pair = self.group[candidate.first], self.group[candidate.second]
            if pair[0] is not pair[1] and self._refused.get(candidate) != pair:
                yield candidate

    def _sharing(self) -> Iterable[Candidate]:
        """Yield a producer with its reader, and two readers of a tensor or of a view."""
        for tensor, readers in self.units.readers.items():
            if self.spaces.facts[tensor].tensor is None:
                continue
            size = self.spaces.tensor(tensor).bytes
            units = self._one_of_each(sorted((r for r in readers if r in self.group), key=self.position))
            if tensor in self.group:
                yield from (Candidate(2 * size, tensor, unit, tensor, True) for unit in units)
            yield from (Candidate(size, *pair, tensor) for pair in itertools.pairwise(units))
        for view, units in self._readers_of_views().items():
            size = self.spaces.tensor(view).bytes
            yield from (Candidate(size, *pair, view) for pair in itertools.pairwise(self._one_of_each(units)))

    def _equal_loops(self) -> Iterable[Candidate]:
        """Yield two units that run over equally many points in equal dimensions: one launch does for both."""
        units: dict[tuple[Size, ...], list[Node]] = {}
        for unit in self.units.reads:
            shape = self.spaces.iterated_shape(unit)
            units.setdefault(tuple(size for size in shape if size != 1), []).append(unit)
        for first, second in itertools.chain(*map(itertools.pairwise, map(self._one_of_each, units.values()))):
            if self.position(second) - self.position(first) <= NEARBY:
                yield Candidate(0, first, second, None)

    def _one_of_each(self, units: Iterable[Node]) -> list[Node]:
        """Return the first unit of each group, in order."""
        firsts: dict[int, Node] = {}
        for unit in units:
            firsts.setdefault(id(self.group[unit]), unit)
        return list(firsts.values())

    def _readers_of_views(self) -> dict[Node, list[Node]]:
        """Return per view that shows a part of a tensor the units that read it along whole axes of it, in order."""
        readers: dict[Node, dict[Node, None]] = {}
        for unit, reads in self.units.reads.items():
            for read in reads:
                if read.view is not None:
                    readers.setdefault(read.view, {})[unit] = None
        return {view: list(units) for view, units in readers.items()}

    # ------------------------------------------------------------------ one merge

    def _try(self, candidate: Candidate) -> bool:
        """Merge if it is legal and pays. True when the pair is settled and need not be tried again."""
        first, second = self.group[candidate.first], self.group[candidate.second]
        if first is second:
            return True
        if self._refused.get(candidate) == (first, second) and self.refusals[candidate].kind is not RefusalKind.DOES_NOT_PAY:
            return False  # all else is a matter of these two, and a path from one to the other stays
        mark = self.spaces.unifier.mark()
        merged = self._merged(candidate, first, second)
        if isinstance(merged, Refusal):
            self.spaces.unifier.undo(mark)
            self.refusals[candidate] = merged
            self._refused[candidate] = (first, second)
            return False
        self.order.merged(first, second, merged)
        self.pricing.replace(first.prediction + second.prediction, merged.prediction)
        for node in merged.nodes:
            self.group[node] = merged
        return True

    def _merged(self, candidate: Candidate, first: Group, second: Group) -> Group | Refusal:
        a, b = candidate.first.name, candidate.second.name
        if (a, b) in self.way.apart:
            return Refusal(RefusalKind.DOES_NOT_PAY, a, b, "others merge better without it")
        if len(first.nodes) + len(second.nodes) > self.units.max_ops:
            return Refusal(RefusalKind.REGION_TOO_LARGE, a, b, f"{len(first.nodes)} + {len(second.nodes)} ops")
        if self.spaces.tensor(candidate.first).device != self.spaces.tensor(candidate.second).device:
            return Refusal(RefusalKind.DIFFERENT_DEVICES, a, b)
        forced = {executor for n in (*first.nodes, *second.nodes) if (executor := self.spaces.facts[n].forced)}
        if len(forced) > 1:
            return Refusal(RefusalKind.FORCED_APART, a, b, ", ".join(sorted(forced)))
        inlined = self._aligned(candidate, first, second)
        if isinstance(inlined, Refusal):
            return inlined
        nodes = sorted(first.nodes + second.nodes, key=self.position)
        reads = first.reads + second.reads
        conflict = self._write_conflict(nodes, reads)
        if conflict:
            return Refusal(RefusalKind.OVERWRITTEN, a, b, conflict)
        scattered = self._scattered(nodes)
        if scattered is not None:
            return Refusal(RefusalKind.SCATTERED, a, b, scattered.name)
        elsewhere = self._read_elsewhere(nodes, inlined)
        if elsewhere is not None:
            return Refusal(RefusalKind.READ_ELSEWHERE, a, b, elsewhere.name)
        if self.order.would_cycle(first, second):  # looked at before the price, which takes much longer
            return Refusal(RefusalKind.CYCLE, a, b)
        apart = first.prediction + second.prediction
        merges = [*first.merges, *second.merges]
        kernel = self.units.kernels.known(nodes, reads, inlined, self.way.one_pass, (candidate, frozenset(merges)))
        if isinstance(kernel, Refusal):
            return _between(a, b, kernel)
        priced = self.pricing.price(kernel, apart)
        if not self.may_walk_rows and walks_whole_rows(priced.work.kernel_class, priced.work.programs, priced.work.length):
            return Refusal(RefusalKind.WAITS, a, b)
        us = self.pricing.adds(apart, self.pricing.total.less(apart))
        if first.priced and second.priced and not _pays(priced, us, first.priced, second.priced):
            return Refusal(RefusalKind.DOES_NOT_PAY, a, b, f"{priced.us:.1f} us together, {us:.1f} us apart")
        return Group(nodes, reads, inlined, [*merges, (a, b)], priced)

    def _aligned(self, candidate: Candidate, first: Group, second: Group) -> frozenset[Node] | Refusal:
        """Unify the two groups' axes along what they share; the nodes that have to be computed at other indices."""
        a, b = candidate.first.name, candidate.second.name
        inlined = first.inlined | second.inlined
        if candidate.second in inlined or candidate.first in inlined:
            return self._inline(candidate, first, inlined)
        if candidate.tensor is None:
            return self._in_one_loop(candidate, first, second) or inlined
        places_of_second = self._reads_along(candidate.second, candidate.tensor)
        if candidate.vertical:
            places_of_first: Sequence[AxisDims | None] = [self.spaces.out_dims(candidate.first)]
        else:
            places_of_first = self._reads_along(candidate.first, candidate.tensor)
        if any(dims is None for dims in (*places_of_first, *places_of_second)):
            if candidate.vertical:
                return self._inline(candidate, first, inlined)
            if not self._same_elements(candidate):
                return Refusal(RefusalKind.DIFFERENT_PLACES, a, b)
            places_of_first, places_of_second = [self.spaces.dims[candidate.first]], [self.spaces.dims[candidate.second]]
        if not self.spaces.unifier.unify_dims(places_of_first[0], places_of_second[0]):  # type: ignore[arg-type]
            return Refusal(RefusalKind.DIMENSIONS_DIFFER, a, b)
        if not candidate.vertical:
            self._line_up(candidate.first, candidate.second)
        return inlined

    def _line_up(self, first: Node, second: Node) -> None:
        """Unify dimensions of two units along which neither is known to run with the other, where their sizes are equal."""
        left, right = self.spaces.dims[first], self.spaces.dims[second]
        if len(left) != len(right):
            return
        known = [set(leaves(axis for dim in dims for axis in dim)) for dims in (left, right)]
        for own, other in zip(left, right, strict=True):
            if known[1].isdisjoint(leaves(own)) and known[0].isdisjoint(leaves(other)):
                mark = self.spaces.unifier.mark()
                if not self.spaces.unifier.unify(own, other):
                    self.spaces.unifier.undo(mark)

    def _in_one_loop(self, candidate: Candidate, first: Group, second: Group) -> Refusal | None:
        """Unify the axes of two units that share nothing but how many points they run over."""
        a, b = candidate.first, candidate.second
        brief_us = (BRIEF - 1) * self.device.constants[f"launch_us_{PREFERRED}"]
        if any(group.priced is None or group.prediction.device_us > brief_us + launched_us(group.priced.work, self.device)
               for group in (first, second)):
            return Refusal(RefusalKind.DOES_NOT_PAY, a.name, b.name, "only a launch is saved")
        if self.order.are_independent(first, second) and all(map(self._is_better_apart, (first, second))):
            return Refusal(RefusalKind.DOES_NOT_PAY, a.name, b.name, "they may share a launch with programs of their own")
        left, right = ([axis for dim in self.spaces.dims[unit] for axis in dim] for unit in (a, b))
        return None if self.spaces.unifier.unify(left, right) else Refusal(RefusalKind.DIMENSIONS_DIFFER, a.name, b.name)

    def _is_better_apart(self, group: Group) -> bool:
        """Return whether a region may share a launch with programs of its own, and the device has room for those.

        Where one loop fills the device, others in it share its index arithmetic, and what it computes of no tensor.
        """
        return (self.units.joins and may_join(self.spaces, group) and group.priced is not None
                and in_use(group.priced.work, self.device) < 1)

    def _reads_along(self, unit: Node, tensor: Node) -> list[AxisDims | None]:
        """Return the axes along which a unit reads a tensor, or a view of one, per read."""
        return [read.along(tensor) for read in self._reads_of(unit, tensor)]

    def _same_elements(self, candidate: Candidate) -> bool:
        """Return whether two units read the same elements of a tensor if they run along the same axes."""
        first, second = ({read.elements_at for read in self._reads_of(unit, candidate.tensor)}
                         for unit in (candidate.first, candidate.second))
        return first == second and None not in first

    def _reads_of(self, unit: Node, tensor: Node | None) -> list[Read]:
        """Return where a unit reads a tensor, or a view of one."""
        return [read for read in self.units.reads[unit] if tensor in (read.source, read.view)]

    def _inline(self, candidate: Candidate, first: Group, inlined: frozenset[Node]) -> frozenset[Node] | Refusal:
        """Compute all of ``first`` at whatever index its reader asks for."""
        a, b = candidate.first.name, candidate.second.name
        if not candidate.vertical:
            return Refusal(RefusalKind.DIFFERENT_PLACES, a, b)
        inside = set(first.nodes) | set(self.group[candidate.second].nodes)
        blocker = computes_anywhere(self.spaces, first.nodes)
        if blocker is not None:
            return Refusal(RefusalKind.FIXED_INDEX, a, b, blocker.name)
        for node in first.nodes:
            if not self.units.readers.get(node, set()) <= inside:
                return Refusal(RefusalKind.STORED, a, b, node.name)
        return inlined | frozenset(first.nodes)

    def _write_conflict(self, nodes: Sequence[Node], reads: Sequence[Read]) -> str:
        """Return a tensor that the region overwrites and also reads elsewhere than where it writes."""
        for node in nodes:
            if node.target is not COPIES_INTO:
                continue
            into = self.spaces.annotated.memory(node.all_input_nodes[0])
            written = [leaves(dim) for dim in self.spaces.dims[node]]
            for read in reads:
                same = read.source is into and read.dims is not None and [leaves(d) for d in read.dims] == written
                if self.spaces.annotated.memory(read.source) is into and not same:
                    return into.name
        return ""

    def _scattered(self, nodes: Sequence[Node]) -> Node | None:
        """Return a value that would be read before it is complete: a scatter's base, or its result.

        Scatters that add one after the other to the same base are one kernel's: the order of sums does not matter.
        """
        if not any(map(self.spaces.is_scatter, nodes)):
            return None
        inside = set(nodes)
        bases = {node: self.spaces.facts[node].scatters_into for node in nodes}
        memory = self.spaces.annotated.memory
        overwritten = {memory(base) for base in bases.values() if base is not None}
        for node, base in bases.items():
            for source in {read.source for read in self.units.reads[node]}:
                if source not in inside:
                    if source is not base and memory(source) in overwritten:  # an input, which a scatter overwrites in place
                        return source
                    continue
                is_chain = source is base and self.spaces.is_scatter(source) and self.spaces.combines_alike(source, node)
                if (source is base or self.spaces.is_scatter(source)) and not is_chain:
                    return source
        return None

    def _read_elsewhere(self, nodes: Sequence[Node], inlined: frozenset[Node]) -> Node | None:
        """Return a value that one kernel knows only along its own axes, and that the region also reads at another index.

        Such are readers of a tensor that the region overwrites, and what is computed from them. What is computed from a
        reduction of rows is known in its row, wherever along it; a scan, and what is computed from one, only where it is.
        """
        memory = self.spaces.annotated.memory
        written = {memory(n.all_input_nodes[0]) for n in nodes if n.target is COPIES_INTO}
        closed = {frozenset(leaves(axis for dim in self.spaces.reduced_axes(n) for axis in dim))
                  for n in nodes if self.spaces.takes_rows(n)}
        if not written and not closed:
            return None
        row: frozenset[object] = next(iter(closed)) if len(closed) == 1 and not written else frozenset()
        fixed: dict[Node, frozenset[object]] = {}  # with the axes along which each is known anywhere
        for node in nodes:
            if node in inlined:  # its readers' reads go on to what it reads
                continue
            reads = self._reads_through(node, inlined)
            for source, place in reads:
                if source in fixed and not self._is_known(source, place, fixed[source]):
                    return source
            sources = {source for source, _ in reads}
            needed = [fixed[source] for source in sources if source in fixed]
            if self.spaces.is_reduction(node):
                fixed[node] = row
            elif self.spaces.is_scan(node):
                fixed[node] = frozenset()
            elif needed or (written and written.intersection(map(memory, sources))):
                fixed[node] = row.intersection(*needed)
        return None

    def _reads_through(self, node: Node, inlined: frozenset[Node]) -> Iterable[tuple[Node, Place]]:
        """Return what a unit reads, and where, each once; of what is computed where it is read, also what that reads."""
        stack = [(read.source, read.place) for read in self.units.reads[node]]
        if not any(source in inlined for source, _ in stack):
            return stack
        reached: dict[tuple[Node, Place], None] = {}
        while stack:
            source, at = stack.pop()
            if (source, at) in reached:  # by another way, of which at may be exponentially many
                continue
            reached[source, at] = None
            if source in inlined:
                own = [leaves(dim) for dim in self.spaces.dims[source]]
                stack += [(read.source, tuple(_moved(axes, own, at) for axes in read.place))
                          for read in self.units.reads[source]]
        return reached

    def _is_known(self, source: Node, place: Place, row: frozenset[object]) -> bool:
        """Return whether a unit is read along the very axes that it is computed along, but for those of ``row``."""
        return all(set(own) <= row or (axes is not None and leaves(axes) == own)
                   for axes, own in zip(place, map(leaves, self.spaces.out_dims(source)), strict=True))

    def _standing(self) -> tuple[Refusal, ...]:
        """Return why pairs are apart that could share memory traffic: of each the refusal of what would have saved most."""
        pairs: dict[tuple[Node, Node], Refusal] = {}
        for candidate, refusal in self.refusals.items():  # by falling saving
            if candidate.tensor is None or refusal.kind is RefusalKind.WAITS:  # tried again by others of the two regions
                continue
            if self.group[candidate.first] is not self.group[candidate.second]:
                pairs.setdefault((candidate.first, candidate.second), refusal)
        return tuple(pairs.values())

    # ------------------------------------------------------------------ what it costs

    def _price(self, group: Group, kernel: Kernel) -> None:
        """Price a group beside all that there is now, and count it in the total."""
        before = group.prediction
        group.priced = self.pricing.price(kernel, before)
        self.pricing.replace(before, group.prediction)

    # ------------------------------------------------------------------ the result

    def _launch(self, name: str, launch: SharedLaunch) -> Region:
        """Return the region of one launch."""
        regions = [self._region(name, group) for group in launch.members]
        if len(regions) == 1:
            return regions[0]
        return side_by_side(name, regions, launch.prediction, self.position)

    def _region(self, name: str, group: Group) -> Region:
        """Return the frozen form of a group, with the views and cheap nodes that it computes for itself."""
        priced, stored = group.priced, self.units.outputs(group.nodes)
        shape = classify(self.spaces, members_of(self.spaces, group.nodes, group.inlined, stored))
        assert priced is not None and isinstance(shape, Shape)
        outputs = [n for n in group.nodes if n in stored]
        order = {axis: i for i, axis in enumerate(shape.axes)}
        own = [n for n in group.nodes if n not in group.inlined]
        dims = {n: self._numbered(self.spaces.dims[n], order) for n in own}
        out_dims = {n: self._numbered(self.spaces.out_dims(n), order) for n in outputs}
        copies = {n: self.spaces.annotated.base(n.all_input_nodes[0]) for n in outputs if n.target is COPIES_INTO}
        copies |= {n: self._base_of_chain(n, frozenset(group.nodes)) for n in outputs if self.spaces.is_scatter(n)}
        inside = set(group.nodes)
        closure = self.units.dependencies.closure(group.nodes)
        inputs = sorted({r.source for r in group.reads} - inside, key=self.position)
        axes = tuple(Axis(axis.size, axis in shape.reduced) for axis in shape.axes)
        reductions = frozenset(n for n in own if self.spaces.is_reduction(n))
        chosen = priced.choice.executor
        return Region(name, chosen, closure, tuple(inputs), tuple(outputs), axes, dims, out_dims, reductions, copies,
                      priced.work.bytes, priced.kernel.predictions[chosen].device_us, (), _decided(priced, self.device),
                      tuple(dict.fromkeys(filter(None, map(user_line, group.nodes)))), tuple(group.merges))

    def _base_of_chain(self, scatter: Node, inside: frozenset[Node]) -> Node:
        """Return what a scatter writes into, and those before it in its region."""
        base = self.spaces.facts[scatter].scatters_into
        assert base is not None
        return self._base_of_chain(base, inside) if base in inside else base

    def _numbered(self, dims: AxisDims, order: dict) -> Dims:  # type: ignore[type-arg]
        return tuple(tuple(order[axis] for axis in leaves(dim)) for dim in dims)


def _moved(axes: Axes | None, own: Sequence[Sequence[object]], place: Place) -> Axes | None:
    """Return the axes of a read by a unit that is itself computed at ``place``; None where they are not whole dimensions."""
    if not axes:
        return axes
    return next((at for dim, at in zip(own, place, strict=True) if dim == leaves(axes)), None)


def _pays(together: Priced, apart_us: float, first: Priced, second: Priced) -> bool:
    """Return whether a kernel is better than what there is of its parts. Eager parts may come together for a third one."""
    if together.is_eager:
        return first.is_eager and second.is_eager and together.us < first.us + second.us
    return together.us < apart_us


def _cheaper_eager(group: Group) -> str:
    """Say why a region's ops run eager one by one, if they are cheaper so; else ""."""
    if group.priced is None or not group.priced.is_eager:
        return ""
    return f"cheaper eager: {group.priced.kernel.eager.device_us:.1f} us, fused {group.priced.fused.device_us:.1f} us"


def _between(a: str, b: str, refusal: Refusal) -> Refusal:
    """Say the refusal of a set of nodes of the pair that would have brought them together, with its own pair as a detail."""
    pair = "" if {refusal.first, refusal.second} <= {a, b} else f"{refusal.first} and {refusal.second}"
    return replace(refusal, first=a, second=b, detail=", ".join(filter(None, (refusal.detail, pair))))


def _decided(priced: Priced, device: Device) -> Decision:
    """Return the choice with its numbers, and for each executor that lost the constant that would have made it win."""
    choice = priced.choice
    won = priced.fused
    options = []
    for name, prediction in sorted(priced.kernel.predictions.items(), key=lambda item: item[0] != choice.executor):
        flip = efficiency_to_match(priced.work, device, name, won.device_us) if name != choice.executor else None
        constant = f"efficiency_{name}_{priced.work.kernel_class}"
        override = Override(constant, round(flip, 2)) if flip is not None else None
        options.append(Option(name, prediction.device_us, prediction.host_us, override))
    eager = Option(EAGER, priced.kernel.eager.device_us, priced.kernel.eager.host_us)
    return Decision(tuple(options), choice.margin, choice.unsure, priced.work.kernel_class, error=choice.error, eager=eager)
