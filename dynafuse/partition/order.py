"""The order of things: dependencies between regions while they grow, and the order of steps in a plan.

Worked example: ``a → mm → b`` and ``a → b``: merging ``a`` with ``b`` would need ``mm`` to run in the middle of their
kernel, so :meth:`UnitOrder.would_cycle` says no.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Protocol

from torch.fx import Node

from dynafuse.fx import in_place
from dynafuse.ir import Region, Role
from dynafuse.ops.overloads import COPIES_INTO, is_done, moves_generator, written_to
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.releases import Releases

LEAST_FREED = 1 << 20
"""Bytes that a region has to free, beyond what it makes, to come earlier than where its results stand in the graph; or to
make, beyond what it frees, to come later."""


class HasNodes(Protocol):
    """A region while it grows."""

    nodes: list[Node]


Unit = Node | HasNodes
"""What runs as one: a node, or a region while it grows."""


def beyond_operands(spaces: Spaces) -> dict[Node, list[Node]]:
    """Return extra dependencies, which no operand shows: per node, what has to run after it."""
    extra = overwrites(spaces)
    for first, second in itertools.pairwise(filter(moves_generator, spaces.graph.nodes)):
        extra.setdefault(first, []).append(second)
    return extra


def overwrites(spaces: Spaces) -> dict[Node, list[Node]]:
    """Return extra dependencies: readers of memory come before what writes to it, or after it as in the graph.

    The copy that overwrites an input at a functional graph's end, or a scatter that does so in place, comes after all its
    readers but those that change it, too.
    """
    place = {node: i for i, node in enumerate(spaces.graph.nodes)}
    written = {node: frozenset(map(spaces.annotated.memory, written_to(node))) for node in spaces.graph.nodes}
    extra: dict[Node, list[Node]] = {}
    for node, bases in written.items():
        for base in () if is_done(node) else bases:
            at_the_end = (node.target is COPIES_INTO and base.op == "placeholder") or in_place(node)
            for reader in _readers(spaces, base):
                if reader is not node:
                    before = place[reader] < place[node] or (at_the_end and base not in written[reader])
                    first, second = (reader, node) if before else (node, reader)
                    extra.setdefault(first, []).append(second)
    return extra


def _readers(spaces: Spaces, node: Node) -> Iterable[Node]:
    """Yield who reads a node's memory or writes to it: looking through views, and through what its readers compute again."""
    for user in node.users:
        solid = spaces.facts[user].role is not Role.VIEW and user not in spaces.cheap
        if solid and spaces.facts[user].role is not Role.OUTPUT:
            yield user
        if not solid or spaces.annotated.memory(user) is not user:  # a view that is made by an eager call is both
            yield from _readers(spaces, user)


class Dependencies:
    """Which units run after which: views and cheap nodes are computed by whoever reads them, so they are no units."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._place = {node: i for i, node in enumerate(spaces.graph.nodes)}
        self._looked_through = {node: [argument for argument in node.all_input_nodes if self._transparent(argument)]
                                for node in spaces.graph.nodes}
        self.solid = [node for node in spaces.graph.nodes if not self._transparent(node)]
        self.after = self._solid_successors()

    def position(self, node: Node) -> int:
        """Return the place of a node in the graph."""
        return self._place[node]

    def closure(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return ``nodes`` with the views and cheap nodes between them and what they read, in graph order."""
        computed = set(nodes)
        stack = list(nodes)
        while stack:
            for argument in self._looked_through[stack.pop()]:
                if argument not in computed:
                    computed.add(argument)
                    stack.append(argument)
        return tuple(sorted(computed, key=self._place.__getitem__))

    def _solid_successors(self) -> dict[Node, list[Node]]:
        """Return, per node, the units that need it, looking through views and cheap nodes."""
        extra = beyond_operands(self._spaces)
        successors: dict[Node, list[Node]] = {}
        for node in reversed(list(self._spaces.graph.nodes)):
            after: dict[Node, None] = {}
            for user in (*node.users, *extra.get(node, ())):
                after.update(dict.fromkeys(successors[user] if self._transparent(user) else [user]))
            successors[node] = list(after)
        return successors

    def _transparent(self, node: Node) -> bool:
        return self._spaces.facts[node].role is Role.VIEW or node in self._spaces.cheap


class UnitOrder:
    """An order of a graph's units, with merged nodes running as one, that respects every dependency.

    It is kept up to date (Pearce, Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", 2006), so that
    only units between two candidates have to be looked at: paths ascend. ``group`` has what each node belongs to.
    """

    def __init__(self, dependencies: Dependencies, group: Mapping[Node, HasNodes]) -> None:
        self.dependencies = dependencies
        self._group = group
        self._order: list[Unit | None] = [group.get(node, node) for node in dependencies.solid]
        self._rank: dict[Unit, int] = {unit: i for i, unit in enumerate(self._order) if unit is not None}

    def would_cycle(self, first: HasNodes, second: HasNodes) -> bool:
        """Return whether a path leads from one of two groups out and into the other.

        Args:
            first: A unit of the order.
            second: Another one.
        """
        return self._between(first, second) is None

    def are_independent(self, first: HasNodes, second: HasNodes) -> bool:
        """Return whether neither of two groups needs anything of the other, directly or not.

        Args:
            first: A unit of the order.
            second: Another one.
        """
        source, target = sorted((first, second), key=self._rank.__getitem__)
        return target not in self._successors(source) and self._between(first, second) is not None

    def merged(self, first: HasNodes, second: HasNodes, both: HasNodes) -> None:
        """Put a merged group in the place of two that would not cycle, before its nodes are said to belong to it.

        Args:
            first: A unit of the order.
            second: Another one.
            both: The group of both groups' nodes.
        """
        later = self._between(first, second)
        assert later is not None
        low, high = sorted((self._rank.pop(first), self._rank.pop(second)))
        window = [u for u in self._order[low:high + 1] if u is not None and u is not first and u is not second]
        early = [u for u in window if u not in later]
        placed: list[Unit | None] = [*early, both, *(u for u in window if u in later)]
        placed += [None] * (high + 1 - low - len(placed))
        self._order[low:high + 1] = placed
        self._rank.update((u, low + i) for i, u in enumerate(placed) if u is not None)

    def _between(self, first: HasNodes, second: HasNodes) -> set[Unit] | None:
        """Return the units between two groups that need the earlier one; None if the later one needs any of them."""
        source, target = sorted((first, second), key=self._rank.__getitem__)
        limit = self._rank[target]
        seen: set[Unit] = set()
        stack = [u for u in self._successors(source) if u is not target]
        while stack:
            unit = stack.pop()
            if unit is target:
                return None
            if unit not in seen and self._rank[unit] < limit:
                seen.add(unit)
                stack.extend(self._successors(unit))
        return seen

    def _successors(self, unit: Unit) -> set[Unit]:
        nodes = [unit] if isinstance(unit, Node) else unit.nodes
        unit_of = self._group.get
        return {unit_of(later, later) for node in nodes for later in self.dependencies.after[node]} - {unit}


def schedule(spaces: Spaces, regions: Sequence[Region], releases: Releases) -> tuple[Region | Node, ...]:
    """Order regions, eager nodes, host scalars and views that must exist: each after its needs, near the graph's order.

    A step comes no later than what needs it, be it that some of its results stand behind that. What could run at once, and
    makes more than it lets go of, comes just before what reads it: zeros that something is added to, an input in another
    layout. Until then it would only take memory. A region that lets go of more than it makes comes as soon as it may.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        regions: The regions, among which there is no cycle.
        releases: What regions let go of.
    """
    unit: dict[Node, Region | Node] = {}
    for region in regions:
        unit.update((node, region) for node in region.nodes if spaces.is_unit(node))
    alive = [n for n in spaces.graph.nodes if n not in unit and _is_step(spaces, n)]
    unit.update((node, node) for node in alive)
    needs = {id(step): _needs(spaces, step, unit) for step in (*regions, *alive)}
    _add_extra(spaces, unit, needs)
    place = {node: float(i) for i, node in enumerate(spaces.graph.nodes)}
    rank = {id(step): max(place[node] for node in (step.outputs or step.nodes)) if isinstance(step, Region) else place[step]
            for step in unit.values()}

    def computed(node: Node) -> float:
        return rank[id(unit[node])] if node in unit else place[node]

    freed = {id(r): releases.of(r.nodes, r.inputs, r.outputs, computed) for r in regions}
    earlier = {key: min(rank[key], release.place + 0.5) for key, release in freed.items() if release.bytes > LEAST_FREED}
    late = {id(r) for r in regions if not needs[id(r)] and (not r.inputs or freed[id(r)].bytes < -LEAST_FREED)}
    return _topological(unit, needs, rank | earlier, late,
                        lambda step: isinstance(step, Node) and spaces.facts[step].role is Role.VIEW)


def _is_step(spaces: Spaces, node: Node) -> bool:
    role = spaces.facts[node].role
    if role is Role.VIEW:  # a view of a view is made from the base at once
        return any(spaces.facts[user].role in (Role.EAGER, Role.OUTPUT, Role.HOST) for user in node.users)
    return role in (Role.EAGER, Role.HOST) and node.op != "placeholder"


def _needs(spaces: Spaces, step: Region | Node, unit: Mapping[Node, Region | Node]) -> set[int]:
    if isinstance(step, Region):
        sources: Iterable[Node] = step.inputs
    else:
        sources = [spaces.annotated.base(step)] if spaces.facts[step].role is Role.VIEW else step.all_input_nodes
    hosts = [a for n in step.nodes for a in n.all_input_nodes] if isinstance(step, Region) else step.all_input_nodes
    needed = {id(unit[a]) for a in sources if a in unit}
    needed |= {id(unit[a]) for a in hosts if a in unit and spaces.facts[a].role is Role.HOST}
    needed.discard(id(step))
    return needed


def _add_extra(spaces: Spaces, unit: Mapping[Node, Region | Node], needs: dict[int, set[int]]) -> None:
    for first, others in beyond_operands(spaces).items():
        for step in _steps_computing(spaces, first, unit):
            for second in others:
                if unit[second] is not step:
                    needs[id(unit[second])].add(id(step))


def _steps_computing(spaces: Spaces, node: Node, unit: Mapping[Node, Region | Node]) -> list[Region | Node]:
    """Return the steps in which ``node`` takes part: its own, or those that look through it."""
    if node in unit:
        return [unit[node]]
    return [step for user in node.users if spaces.facts[user].role is not Role.OUTPUT
            for step in _steps_computing(spaces, user, unit)]


def _topological(
    unit: Mapping[Node, Region | Node], needs: Mapping[int, set[int]], rank: Mapping[int, float], late: Container[int],
    is_view: Callable[[Region | Node], bool],
) -> tuple[Region | Node, ...]:
    steps = list({id(s): s for s in unit.values()}.values())
    by_id = {id(s): s for s in steps}
    number = {id(s): i for i, s in enumerate(steps)}  # tells apart which of two comes first where ranks do not
    after: dict[int, list[int]] = {}
    for key in by_id:
        for before in needs[key]:
            after.setdefault(before, []).append(key)

    def urgency(key: int, readers: Sequence[float]) -> float:
        """Return the rank by which a step comes, given those of what needs it: a step is as urgent as that."""
        if not readers:
            return rank[key]
        if is_view(by_id[key]):
            return min(readers)
        return min(readers) - 0.5 if key in late else min(rank[key], *readers)

    urgent: dict[int, float] = {}
    for key in reversed(list(TopologicalSorter(needs).static_order())):
        urgent[key] = urgency(key, [urgent[reader] for reader in after.get(key, ())])
    sorter = TopologicalSorter(needs)
    sorter.prepare()
    ready: list[tuple[float, int]] = []
    order: list[Region | Node] = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, (urgent[key], number[key]))
        step = steps[heapq.heappop(ready)[1]]
        order.append(step)
        sorter.done(id(step))
    return tuple(order)
