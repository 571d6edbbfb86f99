"""What regions let go of, and how early in the graph's order they could; what they make of inputs, and how late they could.

Worked example: of ``x @ w`` the maximum of each row is taken, and which elements are as large; the mask is for the backward,
so that it stands behind the loss in the graph. It frees the product, and could do so just behind the maximum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from dynafuse.ir import Role, is_piece
from dynafuse.partition.iteration_space import Spaces

MOST_HELD = 16 << 20
"""Bytes that a region may free and still wait for another one with which it shares a launch."""

MOST_EARLY = 4 << 20
"""Bytes that regions may make of inputs, weights in another layout, long before they are read: as others in a launch are."""


@dataclass(frozen=True)
class Release:
    """What a region frees and makes, and where."""

    bytes: int  # that are free behind it, less those that it makes
    place: float  # behind which it could free them
    early: int  # bytes that it makes of inputs alone, at any time
    read: float  # the first place that needs what it makes


class Releases:
    """The memory of a graph, and who reads it: ``after`` tells which units come after each, because they need it."""

    def __init__(self, spaces: Spaces, after: Mapping[Node, Sequence[Node]]) -> None:
        self.spaces = spaces
        self._readers: dict[Node, list[Node]] = {}
        for node, readers in after.items():
            self._readers.setdefault(spaces.annotated.memory(node), []).extend(readers)
        calls = (facts.role is Role.EAGER and not is_piece(node) for node, facts in spaces.facts.items())
        self._calls = [0, *itertools.accumulate(calls)]

    def of(self, nodes: Collection[Node], inputs: Iterable[Node], outputs: Iterable[Node],
           place: Callable[[Node], float]) -> Release:
        """Return what a region lets go of.

        Args:
            nodes: Its nodes.
            inputs: What it reads.
            outputs: What it stores.
            place: Returns where in the order a node is computed.
        """
        last, inside = max(map(place, nodes)), set(nodes)
        memories = {memory for node in inputs if (memory := self.spaces.annotated.memory(node)).op == "call_function"}
        others = {memory: [place(reader) for reader in self._readers[memory] if reader not in inside]
                  for memory in memories - inside}
        freed = {memory: places for memory, places in others.items() if all(other < last for other in places)}
        behind = [place(memory) for memory in memories - inside] + [other for places in freed.values() for other in places]
        stored = self._bytes(outputs)
        readers = (place(reader) for node in outputs for reader in self._readers.get(node, ()) if reader not in inside)
        return Release(self._bytes(freed) - stored, max(behind, default=-1.0), 0 if memories else stored,
                       min(readers, default=len(self._calls) - 1.0))

    def would_wait(self, releases: Sequence[Release]) -> bool:
        """Return whether memory would be held while libraries run if some regions were one, by their places in the graph."""
        last, first = max(release.place for release in releases), min(release.read for release in releases)
        early = sum(release.early for release in releases if self._calls[int(release.read)] > self._calls[int(first)])
        return early > MOST_EARLY or any(
            release.bytes > MOST_HELD and self._calls[int(last) + 1] > self._calls[int(release.place) + 1]
            for release in releases)

    def _bytes(self, nodes: Iterable[Node]) -> int:
        return sum(tensor.bytes for node in nodes if (tensor := self.spaces.facts[node].tensor) is not None)
