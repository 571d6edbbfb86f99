"""The order of things: dependencies between regions while they grow, and the order of steps in a plan.

Worked example: ``a → mm → b`` and ``a → b``: merging ``a`` with ``b`` would need ``mm`` to run in the middle of their
kernel, so :meth:`Dependencies.would_cycle` says no.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch.fx import Node

from dynafuse.ir import Region
from dynafuse.partition.spaces import COPIES_INTO, Spaces


class HasNodes(Protocol):
    """A region while it grows."""

    nodes: list[Node]


def overwrites(spaces: Spaces) -> dict[Node, list[Node]]:
    """Extra dependencies: every reader of an input comes before the copy that overwrites it."""
    extra: dict[Node, list[Node]] = {}
    for node in spaces.graph.nodes:
        if node.target is COPIES_INTO:
            for reader in _readers(spaces, spaces.base(node.all_input_nodes[0])):
                if reader is not node:
                    extra.setdefault(reader, []).append(node)
    return extra


def _readers(spaces: Spaces, node: Node) -> Iterable[Node]:
    for user in node.users:
        if spaces.facts[user].role == "output":
            continue
        yield user
        if spaces.facts[user].role == "view" or user in spaces.cheap:
            yield from _readers(spaces, user)


class Dependencies:
    """Which nodes run after which, with merged nodes running as one."""

    def __init__(self, spaces: Spaces, group: Mapping[Node, HasNodes]) -> None:
        self._spaces = spaces
        self._group = group
        self._place = {node: i for i, node in enumerate(spaces.graph.nodes)}
        self._extra = overwrites(spaces)

    def position(self, node: Node) -> int:
        """The place of a node in the graph."""
        return self._place[node]

    def successors(self, node: Node) -> Iterable[Node]:
        """Nodes that need ``node`` to have run."""
        yield from node.users
        yield from self._extra.get(node, ())

    def would_cycle(self, first: Sequence[Node], second: Sequence[Node]) -> bool:
        """Whether a path leads from one of two groups out and into the other."""
        inside = set(first) | set(second)
        limit = max(self._place[n] for n in inside)
        seen: set[Node] = set()
        stack = self._leaving(inside)
        while stack:
            node = stack.pop()
            if node in inside:
                return True
            if node in seen or self._first(node) > limit:
                continue
            together = self._group[node].nodes if node in self._group else [node]
            seen.update(together)
            stack.extend(s for n in together for s in self.successors(n) if s not in seen)
        return False

    def _leaving(self, inside: set[Node]) -> list[Node]:
        """Where paths out of ``inside`` begin. Views and cheap nodes on the way are computed inside, so they are no exit."""
        looked_through: set[Node] = set()
        stack = list(inside)
        exits: list[Node] = []
        while stack:
            for successor in self.successors(stack.pop()):
                if successor in inside or successor in looked_through:
                    continue
                if self._transparent(successor):
                    looked_through.add(successor)
                    stack.append(successor)
                else:
                    exits.append(successor)
        return exits

    def _transparent(self, node: Node) -> bool:
        return self._spaces.facts[node].role == "view" or node in self._spaces.cheap

    def _first(self, node: Node) -> int:
        """The earliest place of whatever runs together with ``node``."""
        group = self._group.get(node)
        return self._place[node if group is None else group.nodes[0]]

    def closure(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """``nodes`` with the views and cheap nodes between them and what they read, in graph order."""
        found = set(nodes)
        stack = list(nodes)
        while stack:
            for argument in stack.pop().all_input_nodes:
                if self._transparent(argument) and argument not in found:
                    found.add(argument)
                    stack.append(argument)
        return tuple(sorted(found, key=self.position))


def schedule(spaces: Spaces, regions: Sequence[Region]) -> tuple[Region | Node, ...]:
    """Regions, eager nodes, host scalars and views that must exist, each after what it needs, near the graph's order."""
    unit: dict[Node, Region | Node] = {}
    for region in regions:
        unit.update((node, region) for node in region.nodes if spaces.is_unit(node))
    alive = [n for n in spaces.graph.nodes if n not in unit and _is_step(spaces, n)]
    unit.update((node, node) for node in alive)
    needs = {id(step): _needs(spaces, step, unit) for step in unit.values()}
    _add_overwrites(spaces, unit, needs)
    return _topological(unit, needs, {n: i for i, n in enumerate(spaces.graph.nodes)})


def _is_step(spaces: Spaces, node: Node) -> bool:
    role = spaces.facts[node].role
    return role in ("eager", "host") and node.op != "placeholder" or (role == "view" and node in spaces.needed)


def _needs(spaces: Spaces, step: Region | Node, unit: Mapping[Node, Region | Node]) -> set[int]:
    nodes = step.nodes if isinstance(step, Region) else (step,)
    found = {id(unit[a]) for n in nodes for a in n.all_input_nodes if a in unit}
    if isinstance(step, Region):
        found |= {id(unit[i]) for i in step.inputs if i in unit}
    found.discard(id(step))
    return found


def _add_overwrites(spaces: Spaces, unit: Mapping[Node, Region | Node], needs: dict[int, set[int]]) -> None:
    for reader, copies in overwrites(spaces).items():
        for step in _steps_computing(spaces, reader, unit):
            for copy in copies:
                if unit[copy] is not step:
                    needs[id(unit[copy])].add(id(step))


def _steps_computing(spaces: Spaces, node: Node, unit: Mapping[Node, Region | Node]) -> list[Region | Node]:
    """The steps in which ``node`` takes part: its own, or those that look through it."""
    if node in unit:
        return [unit[node]]
    return [step for user in node.users if spaces.facts[user].role != "output"
            for step in _steps_computing(spaces, user, unit)]


def _topological(
    unit: Mapping[Node, Region | Node], needs: Mapping[int, set[int]], place: Mapping[Node, int]
) -> tuple[Region | Node, ...]:
    steps = list({id(s): s for s in unit.values()}.values())
    by_id = {id(s): s for s in steps}
    rank = {id(s): max(place[n] for n in s.outputs or s.nodes) if isinstance(s, Region) else place[s] for s in steps}
    missing = {key: len(needs[key]) for key in by_id}
    after: dict[int, list[int]] = {}
    for key, before in needs.items():
        for b in before:
            after.setdefault(b, []).append(key)
    ready = [(rank[k], k) for k, n in missing.items() if n == 0]
    heapq.heapify(ready)
    order: list[Region | Node] = []
    while ready:
        _, key = heapq.heappop(ready)
        order.append(by_id[key])
        for later in after.get(key, ()):
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(ready, (rank[later], later))
    assert len(order) == len(steps), "the regions of a plan depend on each other in a circle"
    return tuple(order)
