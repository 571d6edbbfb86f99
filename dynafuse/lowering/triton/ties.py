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
from functools import cache
from importlib.metadata import version

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.tile_cost import LINE, TileCost
from dynafuse.lowering.triton.tiles import Schedule, clamp, strides_of, traffic, vector_length
from dynafuse.partition.kernel_class import LANES, estimate

EXCHANGED = 2.0
"""How many times as many lines are touched before lanes that walk the other dimension exchange what they have loaded."""

LAST_SINCE = (3, 7)
"""The version of Triton from which on lanes walk the last dimension of a tile where no other is known to be better."""


def lanes_first(spec: Spec, probed: Probe, schedule: Schedule) -> bool:
    """Return whether the dimension of a schedule's tiles that its lanes are meant to walk is to be the first, not the last.

    Args:
        spec: The region.
        probed: Its probe.
        schedule: A schedule, of tiles with two dimensions or one.
    """
    tied = [k for k, access in enumerate(probed.accesses) if _is_tied(spec, probed, access, schedule)]
    if not tied:
        return False
    cost = TileCost(spec, probed)

    def lines(k: int, tile: str, lanes: int, step: int) -> float:
        """Return the lines of memory that lanes touch which lie along a dimension, so many points apart."""
        inner = next((axis for axis in reversed(schedule.order[tile]) if cost.sizes[axis] > 1), schedule.order[tile][-1])
        return 1 + (lanes - 1) * min(cost.apart(k, inner) * step, LINE) / LINE

    def touched(tile: str) -> float:
        """Return the lines that a warp touches for tied accesses, relative to others, if lanes walk a dimension first."""
        (across,) = schedule.order.keys() - {tile}
        moved = _moved_at_once(spec, probed, schedule, tile)
        along = clamp(schedule.block[tile] // moved, 1, LANES)
        return sum(traffic(spec, probed, probed.accesses[k]) * lines(k, tile, along, moved)
                   * lines(k, across, LANES // along, 1) for k in tied)

    of_lanes = "x" if "y" in schedule.order else schedule.lanes
    (other,) = schedule.order.keys() - {of_lanes}
    are_columns = of_lanes == "x" and other == "r"  # lanes that walk them have nothing to exchange before they add it up
    return _ties_go_first() == (are_columns or touched(of_lanes) <= EXCHANGED * touched(other))


def _moved_at_once(spec: Spec, probed: Probe, schedule: Schedule, tile: str) -> int:
    """Return how many neighbours along a dimension a lane moves at once: as many as any access that varies along both."""
    alike = (access for access in probed.accesses if _varies_along_all(probed, access, schedule))
    return max((vector_length(spec, probed, access, schedule.order[tile]) for access in alike), default=1)


@cache
def _ties_go_first() -> bool:
    return tuple(map(int, version("triton").split(".")[:2])) < LAST_SINCE


def _is_tied(spec: Spec, probed: Probe, access: Access, schedule: Schedule) -> bool:
    """Return whether an access varies along both dimensions of a tile, and has no neighbours along either."""
    is_flat = len(schedule.order) < 2 or 1 in schedule.block.values()
    return not is_flat and _varies_along_all(probed, access, schedule) and not any(
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
