"""Which dimension of a tile lanes lie side by side along, where Triton cannot tell it from the addresses.

Triton lets lanes walk the dimension of a tile along which it knows most addresses to be neighbours. Of an index that it
cannot follow, because it is loaded, clamped or halved, or begins anew after an odd number of points, it knows none along
any. It then takes the first dimension, or since 3.7 the last one, whatever lies there. The dimension along which such
accesses are near each other is put where they do.

Worked example: ``x[:, (2 * i).clamp(max=99)]`` over rows and ``i`` in tiles of 64 rows by 16 columns. Triton 3.6 gives 32
rows to a warp, each lane of which loads from another line of memory. In tiles of 16 columns by 64 rows it gives it two rows.
Lanes that move eight neighbours of another tensor at once are eight points apart in such an access as well, if they walk
the same dimension: a softmax over 512 with a bias whose heads are neighbours takes 203 µs across its rows, 372 along them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import version

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.tile_cost import LINE
from dynafuse.lowering.triton.tile_facts import TileFacts
from dynafuse.lowering.triton.tiles import Schedule, clamp, strides_of, traffic, vector_length
from dynafuse.partition.kernel_class import LANES, estimate

EXCHANGED = 2.0
"""How many times as many lines are touched before lanes that walk the other dimension exchange what they have loaded."""

LAST_SINCE = (3, 7)
"""The version of Triton from which on lanes walk the last dimension of a tile where no other is known to be better."""


class Ties:
    """Which accesses of a region are tied, by the order in which tiles walk its axes.

    Args:
        spec: The region.
        probed: Its probe.
    """

    def __init__(self, spec: Spec, probed: Probe) -> None:
        self.spec = spec
        self.probed = probed
        self._tied: dict[str, list[int]] = {}  # accesses by number, by order

    def lanes_first(self, schedule: Schedule) -> bool:
        """Return whether the dimension of tiles that lanes are meant to walk is to be the first, not the last.

        Args:
            schedule: A schedule, of tiles with two dimensions or one.
        """
        tied = self._of(schedule)
        if not tied:
            return False
        of_lanes = "x" if "y" in schedule.order else schedule.lanes
        (other,) = schedule.order.keys() - {of_lanes}
        are_columns = of_lanes == "x" and other == "r"  # lanes that walk them have nothing to exchange before they add it up
        goes_along = are_columns or (
            self._touched(schedule, tied, of_lanes) <= EXCHANGED * self._touched(schedule, tied, other))
        return _ties_go_first() == goes_along

    def _of(self, schedule: Schedule) -> list[int]:
        """Return the tied accesses of a schedule, by number."""
        if len(schedule.order) < 2 or 1 in schedule.block.values():
            return []
        order = str(schedule.order)
        if order not in self._tied:
            self._tied[order] = [k for k, access in enumerate(self.probed.accesses)
                                 if _is_tied(self.spec, self.probed, access, schedule)]
        return self._tied[order]

    def _touched(self, schedule: Schedule, tied: Sequence[int], tile: str) -> float:
        """Return the lines that a warp touches for tied accesses, relative to others, if lanes walk a dimension first."""
        (across,) = schedule.order.keys() - {tile}
        moved = _moved_at_once(self.spec, self.probed, schedule, tile)
        along = clamp(schedule.block[tile] // moved, 1, LANES)
        inner, outer = self._innermost(schedule, tile), self._innermost(schedule, across)
        return sum(traffic(self.spec, self.probed, self.probed.accesses[k]) * self._lines(k, inner, along, moved)
                   * self._lines(k, outer, LANES // along, 1) for k in tied)

    def _innermost(self, schedule: Schedule, tile: str) -> int:
        """Return the innermost axis of more than one point along a dimension."""
        order = schedule.order[tile]
        return next((axis for axis in reversed(order) if self._facts.sizes[axis] > 1), order[-1])

    def _lines(self, k: int, axis: int, lanes: int, step: int) -> float:
        """Return the lines of memory that lanes touch in an access which lie along an axis, so many points apart."""
        return 1 + (lanes - 1) * min(self._facts.apart(k, axis) * step, LINE) / LINE

    @cached_property
    def _facts(self) -> TileFacts:
        return TileFacts(self.spec, self.probed)


def _moved_at_once(spec: Spec, probed: Probe, schedule: Schedule, tile: str) -> int:
    """Return how many neighbours along a dimension a lane moves at once: as many as any access that varies along both."""
    alike = (access for access in probed.accesses if _varies_along_all(probed, access, schedule))
    return max((vector_length(spec, probed, access, schedule.order[tile]) for access in alike), default=1)


@cache
def _ties_go_first() -> bool:
    return tuple(map(int, version("triton").split(".")[:2])) < LAST_SINCE


def _is_tied(spec: Spec, probed: Probe, access: Access, schedule: Schedule) -> bool:
    """Return whether an access varies along both dimensions of a tile, and has no neighbours along either."""
    return _varies_along_all(probed, access, schedule) and not any(
        _has_neighbours(spec, probed, access, axes) for axes in schedule.order.values())


def _varies_along_all(probed: Probe, access: Access, schedule: Schedule) -> bool:
    """Return whether an access varies along all dimensions of a tile."""
    along = probed.axes_along(access.offset)
    return all(not along.isdisjoint(axes) for axes in schedule.order.values())


def _has_neighbours(spec: Spec, probed: Probe, access: Access, axes: Sequence[int]) -> bool:
    """Return whether Triton knows points beside one another along axes, outermost first, to be so in an access as well."""
    strides = strides_of(probed, access)
    run = 1
    for axis in reversed(axes):
        if strides[axis] != run or axis in probed.axes_along(access.offset - run * probed.axes[axis]):
            break
        run *= estimate(spec.axes[axis].size)
    else:
        return True
    return run > 1 and run % 2 == 0
