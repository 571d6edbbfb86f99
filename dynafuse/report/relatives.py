"""Relatives: new kernels that are nearly equal to an earlier one of the report, with the differences.

Worked example: layers attend in turn to a window of positions and to all of them. Where ``r1`` masks by both ends of a
window, ``r4`` masks by one: its kernel is new, with ``Relative("r1", 1, ("op 4 of the second: lt in ... alone",))``.

A kernel is compared with a bounded number of others, so that the work is linear in the kernels: with the latest ones, of
those with the ones that have most ops in common, and only where that is three quarters of the ops.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from dynafuse.cache.canonical import CanonicalRegion, diff
from dynafuse.report.data import Relative

MOST_LOOKED_AT = 64  # earlier kernels whose op counts are compared with a new one's
MOST_COMPARED = 3  # of those, the ones whose differences are spelt out
MOST_OPS = 256  # ops of a kernel that is compared: matching the ops of two kernels takes quadratic time
MOST_APART = 0.25  # ops that only one of two kernels has, relative to the larger one's, for them to be relatives


@dataclass(frozen=True)
class _First:
    """The first region that uses a kernel."""

    bound: CanonicalRegion
    ops: Counter[str]
    name: str
    graph: int


class Kernels:
    """The kernels of a report so far."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._latest: deque[_First] = deque(maxlen=MOST_LOOKED_AT)

    def add(self, bound: CanonicalRegion, name: str, graph: int) -> tuple[bool, Relative | None]:
        """Add a region.

        Args:
            bound: The region in canonical form.
            name: Its name in its graph.
            graph: The number of that graph in the report.

        Returns:
            Whether an earlier region has its kernel; and its nearest relative among earlier kernels, None if an earlier
            region has its kernel, if it has too many ops to be compared, or if none is near.
        """
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
        """Return the earlier kernel with the fewest differences, the earliest of equals."""
        nearest = heapq.nsmallest(MOST_COMPARED, self._candidates(new), key=lambda pair: pair[0])
        relatives = [Relative(first.name, first.graph, tuple(diff(new.bound, first.bound))) for _, first in nearest]
        return min(relatives, key=lambda relative: len(relative.differences), default=None)

    def _candidates(self, new: _First) -> Iterator[tuple[int, _First]]:
        """Yield the earlier kernels for the same executor with most ops in common, each after its number of other ops."""
        for first in self._latest:
            apart = _apart(new.ops, first.ops)
            if first.bound.region.executor == new.bound.region.executor and apart <= MOST_APART * _larger(new, first):
                yield apart, first


def _apart(a: Counter[str], b: Counter[str]) -> int:
    """Return how many ops only one of two kernels has."""
    return sum(abs(a[name] - b[name]) for name in a | b)


def _larger(a: _First, b: _First) -> int:
    return max(a.ops.total(), b.ops.total())
