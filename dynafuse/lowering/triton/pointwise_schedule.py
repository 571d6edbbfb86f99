"""Chooses the schedules of pointwise specs: which axes one or two tile dimensions walk, and how large tiles are.

Orders and tiles are enumerated, and the one with the lowest price is taken (``tile_cost.py``). Two tile dimensions pay where
accesses are contiguous along two axes, where much of what is computed varies along one of them alone, and where they save
dividing the index of every element. Where columns are pieces of a concatenation, tiles that begin anew at each are tried as
well (``pieces.py``).

Worked example: ``x + y.t()`` over ``float32[4096, 4096]`` is scheduled ``tiled``: ``y`` walks the rows, ``x`` the columns,
so that the reads of both tensors are contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.register_tiles import with_register_tiles
from dynafuse.lowering.triton.tile_cost import TileCost
from dynafuse.lowering.triton.tiles import (
    Schedule,
    by_stride,
    clamp,
    point_count,
    power_of_two,
    strides_of,
    weight,
)
from dynafuse.partition.kernel_class import LANES, PROCESSORS

Order = dict[str, tuple[int, ...]]

MOST_ORDERS = 4  # ways to walk memory whose order is tried
MUCH = 8 << 20  # bytes of a tensor from which on it is not in a cache whenever it is read again
SMALL = 64 * 64  # points below which no tile is better than another
NARROWEST, WIDEST = 8, 2048  # points of a tile along the axes that memory is contiguous along
WIDEST_UNKNOWN = 64  # the same where their sizes are known at run time only: all beyond the end of a short row is in vain
FEW = frozenset({2, 4, 8})  # points of columns with which the axis outside of them is tried as one more of them
SIZES = ((1024, 4), (2048, 8), (2048, 4), (512, 4), (1024, 8), (256, 4), (512, 8), (256, 2), (256, 8))
"""Points of a tile of one dimension, with its warps: the usual one first."""

WINDOW_SIZES = ((512, 4), (1024, 8), (256, 2))
"""The same where windows are read, of four points a lane: with more of them their places need too many registers."""

FEWER_POINTS = ((256, 4), (512, 8), (256, 8))
"""The same with fewer points a lane: for windows of large elements, and those of which neighbours share little."""

MOST_BYTES_HELD = 256  # bytes that a lane holds of what it reads
PREFERENCE = 1.1  # how much cheaper two tile dimensions must be than one
PREFERENCE_SIZE = 1.05  # how much cheaper a tile of one dimension must be than one of the usual size
PREFERENCE_UNKNOWN = 2.0  # the same where sizes are known at run time only: a short row may fill little of a tile
PREFERENCE_POINTS = 1.8  # how much cheaper another number of points of windows a lane must be than the usual one
PREFERENCE_WINDOWS = 1.5  # the same where windows are read: runs have those of neighbours under way together


def pointwise_schedules(spec: Spec, probed: Probe) -> Iterator[Schedule]:
    """Yield schedules of a spec without reductions: of windows those with register tiles; the cheapest; the others.

    The best of each order of axes is before any other of that. Nothing is priced for who needs no more than the first of
    windows with a register tile, and some come more than once.
    """
    accesses = sorted(probed.accesses, key=lambda access: -weight(access))
    of_windows = list(with_register_tiles(spec, probed, by_stride(probed, accesses, range(len(spec.axes)))))
    yield from of_windows[:1]
    schedules = [*of_windows, *_by_price(spec, probed, accesses)]
    best: dict[str, Schedule] = {}  # of each order
    for schedule in schedules:
        best.setdefault(str(schedule.order), schedule)
    yield from best.values()
    yield from schedules


def _by_price(spec: Spec, probed: Probe, accesses: Sequence[Access]) -> list[Schedule]:
    """Return schedules, the cheapest first."""
    base = by_stride(probed, accesses, range(len(spec.axes)))
    cost = TileCost(spec, probed)
    is_fewer = cost.has_windows_apart or cost.has_wide_windows
    sizes, others = (FEWER_POINTS, WINDOW_SIZES) if is_fewer else (WINDOW_SIZES, FEWER_POINTS)
    flat = list(_flat_tiles(spec, base, sizes if cost.has_windows else SIZES))
    if point_count(spec, base) < SMALL:
        return flat
    usual, is_run = cost.price(flat[0]), len(cost.groups(base)) < 2
    # Of the sizes of one dimension the first is taken, unless another is much cheaper: as where lanes jump in memory.
    priced = [(price if PREFERENCE_SIZE * price < usual else max(usual, price), schedule)
              for schedule, price in ((schedule, cost.price(schedule)) for schedule in flat)]
    if cost.has_windows:
        priced += [(PREFERENCE_POINTS * cost.price(schedule), schedule) for schedule in _flat_tiles(spec, base, others)]
    if is_run:
        return _cheapest_first(priced)
    is_known = all(isinstance(axis.size, int) for axis in spec.axes)
    preference = PREFERENCE_UNKNOWN if not is_known else PREFERENCE_WINDOWS if cost.has_windows else PREFERENCE
    priced += [(preference * cost.price(schedule), schedule)
               for order in _orders(cost, probed, accesses, base) if not _jumps_along(probed, order["x"])
               for schedule in _tiles(cost, order)]
    return _cheapest_first(priced)


def _jumps_along(probed: Probe, columns: tuple[int, ...]) -> bool:
    """Return whether something is stored at loaded indices that vary along columns.

    Triton then knows no dimension of a tile along which memory is contiguous, and some versions let lanes walk its rows.
    """
    return any(not probed.axes_along(symbol).isdisjoint(columns) for access in probed.accesses if access.is_store
               for symbol in access.offset.free_symbols if symbol not in probed.axes)


def _cheapest_first(priced: Iterable[tuple[float, Schedule]]) -> list[Schedule]:
    """Return schedules by price; of equal ones the first stays first."""
    return [schedule for _, schedule in sorted(priced, key=lambda entry: entry[0])]


# ---------------------------------------------------------------------- orders


def _orders(cost: TileCost, probed: Probe, accesses: Sequence[Access], base: tuple[int, ...]) -> list[Order]:
    """Return the orders of axes in two tile dimensions: cuts of ``base``, with the rows in any order that an access has."""
    cuts = [cut for cut in range(1, len(base)) if not cost.merges(base[cut - 1], base[cut])]
    orders = []
    for rows in _row_orders(cost, probed, accesses, base):
        for cut in cuts:
            columns = base[cut:]
            others = tuple(axis for axis in rows if axis not in columns)
            if _is_run(cost, columns) and point_count(cost.spec, others) > 1:
                orders.append({"y": others, "x": columns})
    return list({str(order): order for order in orders}.values())


def _is_run(cost: TileCost, columns: tuple[int, ...]) -> bool:
    """Return whether lanes beside each other along columns touch memory side by side: columns are one for all accesses.

    Few columns, as many as a lane takes at once, are tried with the axis outside of them, if they are one for some access:
    pairs of elements, say. Lanes would divide others, such as the nine places of a window: 1.4 of the time of runs.
    """
    groups = cost.groups(columns)
    if len(groups) < 2:
        return len(groups) == 1
    return math.prod(group.size for group in groups[1:]) in FEW and cost.is_contiguous(columns)


def _row_orders(cost: TileCost, probed: Probe, accesses: Sequence[Access],
                base: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield orders in which rows may be walked: that of the largest access, and those of accesses that lie across it.

    Axes along which an access reads the same again are outermost; if it reads much, innermost as well: then it is still in
    the processor's cache.
    """
    yield base
    ways: dict[tuple[int | None, ...], float] = {}
    for access in accesses:
        ways.setdefault(tuple(strides_of(probed, access)), weight(access))
    for strides, moved in itertools.islice(ways.items(), MOST_ORDERS):
        walked = [stride for stride, size in zip(strides, cost.sizes, strict=True) if size > 1]
        if 1 in walked:
            yield tuple(sorted(base, key=lambda k: (strides[k] is not None, strides[k] != 0, -(strides[k] or 0))))
            if moved > MUCH and 0 in walked:
                yield tuple(sorted(base, key=lambda k: (strides[k] is not None, -(strides[k] or 0))))


# ---------------------------------------------------------------------- tiles


def _flat_tiles(spec: Spec, order: tuple[int, ...], sizes: Sequence[tuple[int, int]]) -> Iterator[Schedule]:
    """Yield tiles of one dimension: enough programs for all processors, then those of ``sizes``, with warps."""
    total = point_count(spec, order)
    usual = clamp(power_of_two(total // (PROCESSORS * 2)), 128, sizes[0][0])
    blocks = [(min(block, power_of_two(total)), warps) for block, warps in ((usual, 4 if usual >= 256 else 2), *sizes)]
    for block, warps in dict.fromkeys(blocks):
        yield Schedule("flat", {"x": order}, {"x": block}, warps)


def _tiles(cost: TileCost, order: Order) -> Iterator[Schedule]:
    """Yield tiles of two dimensions, of as many points a lane as it can hold."""
    rows, columns = (power_of_two(point_count(cost.spec, order[tile])) for tile in ("y", "x"))
    cuts = cost.cuts(order["x"])
    widest = WIDEST if all(isinstance(cost.spec.axes[k].size, int) for k in order["x"]) else WIDEST_UNKNOWN
    for warps in (4, 8):
        for per_lane in (8, 16):
            if per_lane > 8 and per_lane * cost.bytes_read > MOST_BYTES_HELD:
                continue
            points = per_lane * warps * LANES
            x = min(columns, widest)
            while x >= min(NARROWEST, columns):
                y = min(rows, max(1, points // x))
                if 2 * x * y >= points or x * y == rows * columns:
                    yield Schedule("tiled", order, {"y": y, "x": x}, warps)
                    if any(cut % x for cut in cuts):
                        yield Schedule("tiled", order, {"y": y, "x": x}, warps, cuts=cuts)
                x //= 2
