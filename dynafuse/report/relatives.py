"""Which kernels of a report have nearly been there before, and what keeps them apart.

Worked example: layers attend to a window of places and to all places in turn. Where ``r1`` masks by both ends of a window,
``r4`` masks by one: a kernel of its own, and ``Relative("r1", 1, ("op 4 of the second: lt in the second alone", ...))``.

A kernel is compared with few others, so the work grows with the kernels and not with their square: the latest ones, of those
with most ops in common, and only such as have three quarters of their ops in common at all.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from dynafuse.cache.canonical import CanonicalRegion, diff
from dynafuse.report.data import Relative

MOST_LOOKED_AT = 64  # kernels before one whose ops are counted against its own
MOST_COMPARED = 3  # of those, whose differences are spelt out
MOST_OPS = 256  # of a kernel that is compared: finding which ops stand for each other takes their square
MOST_APART = 0.25  # ops that only one of two kernels has, over those of the larger, for one to be nearly the other


@dataclass(frozen=True)
class _First:
    """The first region of a kernel."""

    bound: CanonicalRegion
    ops: Counter[str]
    name: str
    graph: int


class Kernels:
    """The kernels of a report so far, for asking of the next region whether its own was there."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._latest: deque[_First] = deque(maxlen=MOST_LOOKED_AT)

    def add(self, bound: CanonicalRegion, name: str, graph: int) -> tuple[bool, Relative | None]:
        """Whether an earlier region has the kernel of this one; where none has, the earlier one that nearly has it."""
        if bound.key in self._keys:
            return True, None
        self._keys.add(bound.key)
        if len(bound.code.ops) > MOST_OPS:
            return False, None
        new = _First(bound, Counter(op.target for op in bound.code.ops), name, graph)
        relative = self._nearest(new)
        self._latest.append(new)
        return False, relative

    def _nearest(self, new: _First) -> Relative | None:
        """The earlier kernel with the fewest differences, the earliest of equals."""
        found = heapq.nsmallest(MOST_COMPARED, self._candidates(new), key=lambda pair: pair[0])
        told = [Relative(first.name, first.graph, tuple(diff(new.bound, first.bound))) for _, first in found]
        return min(told, key=lambda relative: len(relative.differences), default=None)

    def _candidates(self, new: _First) -> Iterator[tuple[int, _First]]:
        """Earlier kernels for the same executor with most ops in common, and how many ops they do not have in common."""
        for first in self._latest:
            apart = _apart(new.ops, first.ops)
            if first.bound.region.executor == new.bound.region.executor and apart <= MOST_APART * _larger(new, first):
                yield apart, first


def _apart(a: Counter[str], b: Counter[str]) -> int:
    """How many ops only one of two kernels has."""
    return sum(abs(a[name] - b[name]) for name in a | b)


def _larger(a: _First, b: _First) -> int:
    return max(a.ops.total(), b.ops.total())
