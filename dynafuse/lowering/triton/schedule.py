"""Chooses how a spec becomes kernels: the class, which tile dimension walks which axes, tile sizes, warps.

A dry run of the emitter shows what is read and written where. The order of axes follows the memory layout of the largest
access, so that neighbouring lanes touch neighbouring elements.

Worked example: a row softmax over ``bfloat16[8192, 4096]`` is scheduled ``persistent``: ``x`` walks the rows, ``r`` the
4096 elements, one row a program, 4 warps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dynafuse.ir import Spec, references
from dynafuse.lowering.base import VARIANT
from dynafuse.lowering.triton.builder import recurrence_of
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.online import find_online_sums
from dynafuse.lowering.triton.pointwise_schedule import pointwise_schedules
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before, runs_along
from dynafuse.lowering.triton.tiles import (
    LANES,
    Schedule,
    by_stride,
    clamp,
    point_count,
    power_of_two,
    probe,
    reduced_axes,
    strides_of,
    traffic,
    vector_length,
)
from dynafuse.partition.kernel_class import PROCESSORS, estimate, reduction_class

LONGEST_PERSISTENT = 32768  # elements of a row that fit in a program's registers, when one tensor is read along it
LONGEST_HELD = 16384  # elements of a row up to which holding it is better than reading it twice
LONGEST_IN_LANE = 64  # elements of a row that a single lane may hold
LONG_ROW = 16384  # elements from which on fewer warps with more registers each are faster
LONGEST_AHEAD = 8192  # elements of a row up to which the next rows are loaded ahead
SHARED_BYTES = 96 << 10  # shared memory that loads under way may take: less than any device of today has
RESIDENT = 8 * PROCESSORS  # programs of four warps that run at a time: enough for the loads under way that memory wants
RESIDENT_WARPS = 64 * PROCESSORS  # that can run at a time
UNDER_WAY = PROCESSORS * 80 << 10  # bytes of the tiles of columns that are worked on at a time, so that enough are loaded
MOST_SPLITS = 2048  # partial states of a row that the second kernel holds at a time
MANY_ALONG = 7  # accesses along a column, stores among them, from which on copying ahead costs more than it hides
EVEN_BLOCK = 256  # elements of a tile that are enough to walk a row in
MIXED = 0.25  # share of the bytes from which on accesses across the others count
COPIED = 8  # bytes to which rows have to be aligned for asynchronous copies to pay
SECTOR = 32  # bytes that memory moves at least
FEW_WARPS = 8 * PROCESSORS  # in all, below which a processor has too few to run while others wait
EVEN_LOAD = 16  # elements of a lane from which on half as many are loaded as fast
REGISTER = 4  # bytes of a register
MOST_IN_LANE = 128  # registers for what a lane reads along the row that it holds
MOST_CANDIDATES = 8


def choose_schedule(spec: Spec) -> Schedule:
    """Return the schedule that a spec's options name, else the best; for a class of sizes that of its typical size."""
    named = dict(spec.options).get(VARIANT)
    if named is None:
        return next(iter(_schedules(spec.typical)))
    return next(schedule for schedule in candidates(spec) if str(schedule) == named)


def candidates(spec: Spec) -> tuple[Schedule, ...]:
    """Return schedules of a spec that differ in speed by what no formula knows, the one to choose without timings first."""
    return tuple(itertools.islice(_distinct(_schedules(spec.typical)), MOST_CANDIDATES))


def _schedules(spec: Spec) -> Iterable[Schedule]:
    """Return schedules of a spec, the best first, some more than once."""
    probed = probe(spec)
    reduced_sets = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.reductions))
    if not reduced_sets:
        return pointwise_schedules(spec, probed)
    accesses = sorted(probed.accesses, key=lambda access: -traffic(spec, probed, access))
    if len(reduced_sets) == 1:
        return _rows(spec, probed, accesses, reduced_sets[0])
    return _rowcol(spec, probed, accesses, reduced_sets)


def _distinct(schedules: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield schedules, each once."""
    seen: list[Schedule] = []
    for schedule in schedules:
        if schedule not in seen:
            seen.append(schedule)
            yield schedule


def _full_reads(spec: Spec, probed: Emitter) -> list[Access]:
    """Return the reads of tensors that run along all axes: a row kernel holds their rows in registers."""
    total = point_count(spec, range(len(spec.axes)))
    return [access for access in probed.accesses
            if not access.is_store and math.prod(map(estimate, access.layout.shape)) >= total]


def _bytes_read_along(probed: Emitter, *axis_groups: Iterable[int]) -> int:
    """Return the bytes per element of the reads that vary along an axis of each group."""
    groups = [{probed.axes[k] for k in axes} for axes in axis_groups]
    return sum(access.layout.dtype.itemsize for access in probed.accesses
               if not access.is_store and all(access.offset.free_symbols & group for group in groups))


def _contiguous_bytes(spec: Spec, probed: Emitter, accesses: Sequence[Access], axes: Collection[int]) -> float:
    """Return the bytes of the accesses whose neighbours in memory are neighbours along one of ``axes``."""
    return sum(traffic(spec, probed, access) for access in accesses if _fastest_axis(spec, probed, access) in axes)


def _fastest_axis(spec: Spec, probed: Emitter, access: Access) -> int | None:
    """Return the longest of the axes along which an access fills a sector of memory; None if it jumps."""
    strides = {stride: k for k, stride in enumerate(strides_of(probed, access)) if stride}
    run, axes = 1, []
    while run in strides and run * access.layout.dtype.itemsize < SECTOR:
        axes.append(strides[run])
        run *= max(2, estimate(spec.axes[axes[-1]].size))
    return max(axes, key=lambda k: estimate(spec.axes[k].size), default=None)


def _ops_that_need(spec: Spec, results: frozenset[int]) -> set[int]:
    """Return the ops that are computed from one of ``results``."""
    dependent: set[int] = set()
    for position, op in enumerate(spec.ops):
        if any(ref.kind == "op" and ref.position in (dependent | results) for ref in references(op.args)):
            dependent.add(position)
    return dependent


def splittable(spec: Spec, reduced: frozenset[int]) -> bool:
    """Return whether rows may be split over programs: no store along the row, and no reduction, needs a complete row."""
    reductions = frozenset(op for op, _ in spec.reductions)
    dependent = _ops_that_need(spec, reductions)
    stored_along_row = [store.op for store in spec.stores if runs_along(store, reduced)]
    return dependent.isdisjoint(stored_along_row) and dependent.isdisjoint(reductions)


@dataclass(frozen=True)
class Rows:
    """What the schedule of a spec with one set of reduced axes depends on."""

    spec: Spec
    order: dict[str, tuple[int, ...]]
    rows: int
    length: int
    tensors: int  # how many are read along all axes
    held: int  # registers for an element of each tensor that is read along rows and across them
    reads_along: int  # accesses that vary along the row
    reads_of_rows: int  # accesses that vary across rows alone
    bytes_read: int  # per element, of what varies along the row
    itemsize: int  # of the largest access
    states: int  # of all reductions together
    stores_along: int  # results that are stored along the row
    is_static: bool  # whether the length is known
    lanes: str  # the tile dimension along which most bytes are contiguous
    vector: int  # elements that a lane moves at most with one instruction
    is_scattered: bool  # whether lanes move most bytes along the row an element at a time
    is_mixed: bool  # whether many bytes are contiguous along the other one
    block: int  # a divisor of the row, of which every multiple begins where what varies along outer axes changes; or 0


def _rows(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced: frozenset[int]) -> Iterable[Schedule]:
    """Return schedules of a spec that reduces rows alone."""
    facts = rows_of(spec, probed, accesses, reduced)
    return (with_running_states(facts, schedule) for schedule in _row_schedules(facts, reduced))


def with_running_states(facts: Rows, schedule: Schedule) -> Schedule:
    """Return a schedule whose loop keeps a state per element that a lane moves at once, not one per element of its tile."""
    is_copied_for_stores = schedule.stages > 1 and facts.stores_along  # in a layout in which lanes hold other elements
    if schedule.schedule_class not in ("looped", "split") or is_copied_for_stores:
        return schedule
    moved = LANES * schedule.warps * facts.vector  # elements
    running = max(moved // (schedule.block["x"] if schedule.lanes == "x" else 1), 1)
    return replace(schedule, running=running) if running < schedule.block["r"] else schedule


def _row_schedules(facts: Rows, reduced: frozenset[int]) -> Iterable[Schedule]:
    """Return schedules of a spec that reduces rows alone, which keep a state per element of a tile."""
    by_rows = _by_rows(facts)
    if reduction_class(facts.rows, facts.length, contiguous=by_rows, splittable=splittable(facts.spec, reduced)) == "split":
        return _split_rows(facts) if by_rows else _split_columns(facts)
    # Few programs that take neighbouring rows would be slower than many that do not.
    are_few = facts.is_mixed and facts.rows < 32 * PROCESSORS and facts.is_static and facts.length <= LONGEST_AHEAD
    return _whole_rows(facts) if by_rows or are_few else _columns(facts)


def _by_rows(facts: Rows) -> bool:
    """Return whether a program may take a single row: nothing much is contiguous across rows."""
    return facts.lanes == "r" and not facts.is_mixed


def rows_of(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced: frozenset[int]) -> Rows:
    """Return what the schedule of a spec that reduces rows depends on.

    Args:
        spec: The region.
        probed: Its probe.
        accesses: Accesses of that, the largest first.
        reduced: The axes along which it reduces.
    """
    remaining = [k for k in range(len(spec.axes)) if k not in reduced]
    order = {"x": by_stride(probed, accesses, remaining), "r": by_stride(probed, accesses, sorted(reduced))}
    is_static = all(isinstance(spec.axes[k].size, int) for k in reduced)
    along, across = (_contiguous_bytes(spec, probed, accesses, axes) for axes in (reduced, remaining))
    reads = [access for access in probed.accesses if not access.is_store]
    lanes = "x" if across > along else "r"
    vectors = {access: vector_length(spec, probed, access, order[lanes]) for access in probed.accesses
               if _varies(probed, access, reduced)}
    return Rows(
        spec, order, point_count(spec, remaining), point_count(spec, reduced),
        tensors=max(1, len(_full_reads(spec, probed))),
        held=max(1, sum(-(-access.layout.dtype.itemsize // REGISTER) for access in reads
                        if _varies(probed, access, reduced) and _varies(probed, access, remaining))),
        reads_along=sum(_varies(probed, access, reduced) for access in reads),
        reads_of_rows=sum(_varies(probed, access, remaining) and not _varies(probed, access, reduced) for access in reads),
        bytes_read=_bytes_read_along(probed, reduced) if is_static else SHARED_BYTES,  # of those nothing is loaded ahead
        itemsize=accesses[0].layout.dtype.itemsize,
        states=sum(len(recurrence_of(spec, op).states) for op, _ in spec.reductions),
        stores_along=sum(runs_along(store, reduced) for store in spec.stores),
        is_static=is_static,
        lanes=lanes,
        vector=max(vectors.values(), default=1),
        is_scattered=2 * sum(traffic(spec, probed, access) for access, vector in vectors.items() if vector == 1) > (
            sum(traffic(spec, probed, access) for access in vectors)),
        is_mixed=min(along, across) > MIXED * max(along, across),
        block=_even_block(spec, probed, order["r"]),
    )


def _varies(probed: Probe, access: Access, axes: Iterable[int]) -> bool:
    """Return whether the index of an access depends on one of ``axes``, by way of loaded indices too."""
    return not probed.axes_along(access.offset).isdisjoint(axes)


def _even_block(spec: Spec, probed: Probe, row: tuple[int, ...]) -> int:
    """Return the largest power of two whose multiples cut the row where reads along its outer axes move on; 0 without such.

    Those are then read once a tile, and their index needs no division per element.
    """
    inner, block = 1, 0
    for k in reversed(row):
        size = spec.axes[k].size
        is_outer = inner > 1 and any(
            _varies(probed, access, [k]) and not _varies(probed, access, row[row.index(k) + 1:])
            for access in probed.accesses)
        if is_outer:
            block = inner & -inner
            break
        if not isinstance(size, int):
            break
        inner *= size
    return block


def _stages(tile_bytes: int, most: int) -> int:
    """Return how many tiles of so many bytes a loop loads ahead, at most ``most``."""
    return clamp(SHARED_BYTES // max(tile_bytes, 1), 1, most)


# ---------------------------------------------------------------------- rows that are contiguous


def _whole_rows(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules in which one program takes a whole row, or several."""
    online_sums = find_online_sums(facts.spec)
    passes = pass_count(facts.spec, passes_before(facts.spec, online_sums), facts.order["r"])
    longest_held = LONGEST_HELD if passes <= 2 else LONGEST_PERSISTENT
    tensors = facts.tensors
    longest_in_registers = LONGEST_PERSISTENT // (2 * power_of_two(tensors // 2) if tensors > 1 else 1)
    can_be_held = facts.is_static and facts.length <= LONGEST_PERSISTENT
    loops = _online(facts) if online_sums else _looped(facts)
    if can_be_held and facts.length <= min(longest_held, longest_in_registers):
        yield from _persistent(facts)
        yield from itertools.islice(loops, 2 if facts.length >= 2048 else 0)
    else:
        yield from loops
        yield from itertools.islice(_persistent(facts), 1 if can_be_held else 0)


def _persistent(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules that hold whole rows; several short ones per program, so that it has enough loads in flight.

    Where a program has 32 rows per warp, Triton computes what belongs to a row in one lane instead of in a whole warp.
    """
    r = power_of_two(facts.length)
    most = clamp(power_of_two(facts.rows // PROCESSORS + 1) // 2, 1, 128)
    x = min(max(1024 // r, 1), most)
    per_lane = clamp(power_of_two(64 // max(facts.tensors, facts.held)), 16, 64 if r >= LONG_ROW else 32)
    warps = clamp(power_of_two(x * r // (32 * per_lane)), 1, 16)
    if r == 128:  # a row is what a warp loads at a time
        warps = max(1, x // 2)
    elif r == 2048:
        warps = 4
    if -(-facts.rows // x) * warps < FEW_WARPS and x * r >= 2 * EVEN_LOAD * LANES * warps:
        warps *= 2  # there is nothing else to run while a row is waited for
    tiles = [(x, warps), (x, 2 * warps), (x, 4 * warps), (2 * x, 2 * warps), (4 * x, 4 * warps), (x, max(warps // 2, 1)),
             (max(x // 2, 1), max(warps // 2, 1)), (2 * x, warps)]
    if r <= LONGEST_IN_LANE and facts.rows >= 32 and facts.reads_of_rows and facts.held * r <= MOST_IN_LANE:
        tiles = [(32, 1), (64, 2), *tiles]
    most = power_of_two(facts.rows)
    yield from (Schedule("persistent", facts.order, {"x": x, "r": r}, warps) for x, warps in tiles
                if x <= most and warps <= 16 and x * r <= 4096 * warps)


def _online(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of few steps and few warps: every step ends in two sums over the tile.

    Where the row is read again, large programs are an alternative: few rows are under way at a time, which then are still in
    the cache.
    """
    r = clamp(power_of_two(facts.length), 128, 4096 if facts.stores_along else 8192)
    stages = _stages(r * facts.bytes_read, 3) if facts.stores_along else 1
    cannot_be_ahead = facts.length * facts.itemsize % COPIED
    if facts.stores_along and cannot_be_ahead and facts.length >= LONG_ROW:
        yield from _loops(facts, (LONG_ROW, 16, 1))
    yield Schedule("looped", facts.order, {"x": 1, "r": r}, 4 if facts.tensors == 1 else 8, stages)
    yield from _loops(facts, (8192, 16, 1), (16384, 32, 1), (8192, 8, 2), (4096, 8, 2), (2048, 4, 4), (16384, 16, 1))


def _loops(facts: Rows, *tiles: tuple[int, int, int]) -> Iterator[Schedule]:
    """Yield schedules of one row a program, given elements of a tile, warps and stages."""
    for r, warps, stages in tiles:
        if r <= power_of_two(facts.length):
            yield Schedule("looped", facts.order, {"x": 1, "r": r}, warps, min(stages, _stages(r * facts.bytes_read, 4)))


def _looped(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules with few lanes for one tensor, which keep enough loads in flight, and more for several."""
    length = power_of_two(facts.length)
    r = min(2048 if facts.tensors == 1 else 4096, length)
    x = 1 if r >= 512 else clamp(512 // r, 1, power_of_two(facts.rows))
    yield Schedule("looped", facts.order, {"x": x, "r": r}, 16 if r >= 4096 else 8 if r >= 2048 else 4)
    yield from _loops(facts, (4096, 8, 1), (8192, 16, 1), (2048, 4, 3), (4096, 16, 1), (16384, 32, 1), (1024, 4, 4))


def _split_rows(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of several programs a row, as many as run at a time."""
    largest = facts.block if facts.block >= EVEN_BLOCK else 4096
    # A tile for each program, and not more states in a lane than there are registers.
    most, lanes = (1024, 512) if facts.states > 2 else (4096, 1024 if facts.reads_along <= 3 else 512)
    size = clamp(power_of_two(facts.rows * facts.length // (2 * RESIDENT)), 512, most)
    for tile, elements, programs in (
            (size, lanes, RESIDENT), (size, 512, RESIDENT), (512, 512, 2 * RESIDENT), (4096, 1024, RESIDENT),
            (1024, 1024, 2 * RESIDENT), (4096, 512, RESIDENT), (size, lanes, RESIDENT // 2), (2048, 512, RESIDENT)):
        r = min(tile, largest, power_of_two(facts.length))
        # Rows of which there cannot be enough programs have more warps in each.
        fewest = RESIDENT_WARPS // (facts.rows * MOST_SPLITS) if facts.length >= r * MOST_SPLITS else 1
        warps = clamp(max(r // elements, fewest), 1, min(16, r // 32))
        if fewest > r // elements:
            programs = RESIDENT_WARPS // warps
        yield split_over(facts, 1, r, warps, max(min(4 * programs // warps, 4 * RESIDENT), programs))


def split_over(facts: Rows, x: int, r: int, warps: int, programs: int, stages: int = 1) -> Schedule:
    """Return a schedule that splits rows over programs, so many in all if rows are long enough.

    Args:
        facts: What the schedule depends on.
        x: How many rows a tile has.
        r: How many elements of each.
        warps: Warps per program.
        programs: How many programs there are to be; each row has two at least.
        stages: Tiles of a loop that are on their way from memory at a time.
    """
    row_programs = -(-facts.rows // x)
    splits = clamp(programs // row_programs, 2, MOST_SPLITS)
    tiles = -(-facts.length // r)
    tiles_per_program = -(-tiles // min(splits, tiles))
    return Schedule("split", facts.order, {"x": x, "r": r}, warps, stages, max(2, -(-tiles // tiles_per_program)),
                    frozenset(op for op, _ in facts.spec.reductions), lanes=facts.lanes)


# ---------------------------------------------------------------------- columns


def _column_widths(facts: Rows) -> list[int]:
    """Return how many columns a program may take, the best first: those with few lanes beyond the last, then the widest."""
    most = min(power_of_two(facts.rows), 256)
    widths = [width for width in (32, 64, 128, 256) if width <= most] or [most]

    def padded(width: int) -> float:
        # Narrow pieces of a row take more requests for the same bytes.
        return -(-facts.rows // width) * width * (1.0 if width * facts.itemsize >= 4 * SECTOR or width == most else 1.5)

    return sorted(widths, key=lambda width: (padded(width), abs(width - 128), -width))


def _row_block(facts: Rows, tile: int, x: int) -> int:
    """Return how many rows a tile of so many elements has: if a column is short, as few as waste little beyond its end."""
    most = clamp(tile // x, 1, power_of_two(facts.length))
    if facts.block >= 8 and most > facts.block:
        return facts.block
    if not facts.is_static or facts.length > 16 * most:
        return most
    sizes = [size for size in (most, most // 2) if size >= 4] or [most]
    return min(sizes, key=lambda size: (-(-facts.length // size) * size * (1.0 if size == most else 1.1), -size))


def _columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules in which a program takes neighbouring columns from top to bottom."""
    widths = _column_widths(facts)
    if facts.rows < 2 * PROCESSORS * widths[0]:
        yield from _narrow_columns(facts)
    best = widths[0]
    narrow = min(32, power_of_two(facts.rows))
    for x, tile, lanes, stages in (
            (best, 1024, 512, 1), (best, 1024, 512, 3), (best, 1024, 1024, 1), (narrow, 1024, 512, 1), (best, 2048, 512, 1),
            (best, 2048, 1024, 1), (narrow, 512, 512, 1), (widths[-1], 1024, 512, 1)):
        r = _row_block(facts, tile, x)
        warps = clamp(power_of_two(x * r // lanes), 1, 16)
        is_copied_in_words = facts.vector > 1 and not facts.stores_along
        if stages == 1 and is_copied_in_words and _can_be_ahead(facts) and _is_little_under_way(facts, x, r, warps):
            stages = 3
        ahead = min(stages, _stages(x * r * facts.bytes_read, stages)) if facts.length > 4 * r else 1
        yield Schedule("looped", facts.order, {"x": x, "r": r}, warps, ahead, lanes=facts.lanes)


def _can_be_ahead(facts: Rows) -> bool:
    """Return whether columns may be copied ahead.

    What is copied arrives in a layout of its own: Triton then reads it one by one for stores that lie otherwise. For few
    accesses that was measured to cost less than waiting for loads.
    """
    return not (facts.is_mixed or facts.rows * facts.itemsize % COPIED or _stores_many(facts))


def _stores_many(facts: Rows) -> bool:
    """Return whether a program stores along its columns, and loads or stores many things there."""
    return facts.stores_along > 0 and facts.reads_along + facts.stores_along >= MANY_ALONG


def _is_little_under_way(facts: Rows, x: int, r: int, warps: int) -> bool:
    """Return whether the tiles of all programs that run at a time are fewer bytes than keep the memory busy."""
    programs = min(-(-facts.rows // x), RESIDENT_WARPS // warps)
    return programs * x * r * facts.bytes_read < UNDER_WAY


def _narrow_columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules for few columns: as many programs as the sectors of memory allow, each with many loads under way."""
    sector = SECTOR // min(facts.itemsize, SECTOR)
    width = clamp(power_of_two(facts.rows // PROCESSORS + 1) // 2, sector, 64)
    for x, tile in ((width, 4096), (width, 8192), (2 * width, 8192), (width, 2048), (max(width // 2, 1), 4096)):
        x = min(x, power_of_two(facts.rows))
        r = min(tile // x, power_of_two(facts.length))
        yield Schedule("looped", facts.order, {"x": x, "r": r}, clamp(x * r // 512, 1, 16), lanes=facts.lanes)


def _split_columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of several programs for each piece of neighbouring columns."""
    widths = _column_widths(facts)
    if facts.is_mixed:
        widths = [min(32, power_of_two(facts.rows)), *widths]
    best = widths[0]
    ahead = 3 if _can_be_ahead(facts) and best <= 2 * facts.rows else 1
    fewest, most = (512, 1024) if ahead > 1 or facts.stores_along else (1024, 512)
    for x, tile, lanes, programs, stages in (
            (best, 2048, fewest, RESIDENT // 2, ahead), (best, 2048, most, RESIDENT // 2, 4 - ahead),
            (best, 2048, 1024, RESIDENT, 1), (best, 1024, 512, RESIDENT // 2, ahead),
            (widths[-1], 2048, 512, RESIDENT // 2, ahead), (best, 2048, 512, RESIDENT // 4, ahead),
            (best, 4096, 1024, RESIDENT // 2, ahead), (best, 2048, 1024, RESIDENT, 3)):
        r = _row_block(facts, tile, x)
        warps = clamp(power_of_two(x * r // lanes), 1, 16)
        programs *= max(1, 4 // warps) if stages == 1 and lanes == 512 else 1
        if facts.is_scattered:  # lanes that move an element at a time have little under way: it takes all that can run
            programs = RESIDENT_WARPS // warps
        yield split_over(facts, x, r, warps, programs, min(stages, _stages(x * r * facts.bytes_read, stages)))


# ---------------------------------------------------------------------- rows and columns in one pass


def _rowcol(
    spec: Spec, probed: Probe, accesses: Sequence[Access], reduced_sets: list[frozenset[int]]
) -> Iterator[Schedule]:
    """Yield schedules of a spec that reduces rows and columns: a row in registers, and running states of all columns."""
    row = frozenset(k for k, axis in enumerate(spec.axes) if axis.reduced)
    column = next(axes for axes in reduced_sets if axes != row)
    order = {"x": by_stride(probed, accesses, sorted(column)), "r": by_stride(probed, accesses, sorted(row))}
    rows, length = point_count(spec, column), point_count(spec, row)
    r = power_of_two(length)
    deferred = frozenset(op for op, _ in spec.reductions if reduced_axes(spec, op) == column)
    bytes_read = sum(access.layout.dtype.itemsize for access in _full_reads(spec, probed))
    bytes_ahead = _bytes_read_along(probed, column, row)
    most = clamp(4096 // r, 1, power_of_two(rows)) if r < 4096 else 1
    held = 4 * len(deferred) + bytes_read  # bytes per element of a tile

    def schedule(x: int, warps: int, per_processor: int, stages: int) -> Schedule:
        room = min(SHARED_BYTES, 2 * SHARED_BYTES // per_processor)
        stages = min(stages, clamp(room // max(x * r * bytes_ahead, 1), 1, 3))
        programs = min(-(-rows // x), PROCESSORS * per_processor)
        return Schedule("rowcol", order, {"x": x, "r": r}, warps, stages if r <= LONGEST_AHEAD else 1, programs, deferred,
                        hoist_invariants=r <= LONGEST_AHEAD)

    def warps_for(x: int) -> int:
        return 4 if x * r * held <= 48 << 10 else 8 if x * r * held <= 160 << 10 else 16

    half, quarter = max(most // 2, 1), max(most // 4, 1)
    if r >= 4096:
        yield schedule(1, 16, 1, 2)
    yield schedule(quarter, warps_for(quarter), 4, 2)
    yield schedule(half, warps_for(half), 2, 2)
    yield schedule(half, warps_for(half), 4, 1)
    yield schedule(quarter, warps_for(quarter), 4, 3)
    yield schedule(quarter, warps_for(quarter), 6, 2)
    yield schedule(quarter, max(warps_for(quarter) // 2, 1), 4, 2)
    yield schedule(quarter, warps_for(quarter), 4, 1)
    yield schedule(most, warps_for(most), 1, 2)
