"""Schedules of rows that are contiguous: held in registers, walked tile by tile, or split over programs.

The numbers were measured: `python -m bench.schedules` times kernels under schedules that these formulas do not choose.

Worked example: rows of 512 ``bfloat16`` numbers go two to a program of one warp, which holds 32 elements a lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dynafuse.lowering.triton.online import find_online_sums
from dynafuse.lowering.triton.reduced_rows import (
    FEW_WARPS,
    HEAVY_HELD,
    LONGEST_IN_LANE,
    MOST_SPLITS,
    MOST_WARPS,
    PARTS,
    RESIDENT,
    RESIDENT_WARPS,
    Rows,
    may_be_in_parts,
    split_over,
    stages_within,
)
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before
from dynafuse.lowering.triton.tile_cost import BYTES, STARTED
from dynafuse.lowering.triton.tiles import Schedule, clamp, power_of_two
from dynafuse.partition.kernel_class import LANES, PROCESSORS, REGISTER, SECTOR

LONGEST_PERSISTENT = 32768  # elements of a row that fit in a program's registers, when one tensor is read along it
LONGEST_HELD = 16384  # elements of a row up to which holding it is better than reading it twice
LONGEST_HELD_APART = 26624  # the same where it has left the cache by then and is not aligned
SHORT_IN_LANE = 32  # elements of a row up to which a lane takes one, whatever is done with it, if there are enough rows
LONG_ROW = 16384  # elements from which on fewer warps with more registers each are faster
LONGEST_SUMMED_TWICE = 8192  # elements of a row up to which a variance is summed up twice faster than in a loop, or in parts
LONGEST_OF_FEW_WARPS = 20480  # elements of a row up to which eight warps hold it in parts
FEW_READ = 3  # tensors that a row reads which a loop reads again fast enough
FULL = 0.75  # share of the lanes' registers that a row fills from which on it counts as filling all
FEW_ROWS = 4 * PROCESSORS  # of which hardly two are on a processor at a time, so that either may fill half of its registers
MOST_HELD = 128 << 10  # bytes of such a row, which is held if reading it twice costs more than its bytes
MANY_ROWS = 16 * RESIDENT  # of which small programs take turns evenly
LEAST_PROGRAMS = 24 * PROCESSORS  # that are left where programs take more rows than they need to, so as to be fewer
LEAST_MOVED = BYTES / STARTED  # bytes that a program of many moves at least: memory is faster than they are started
MOST_IDLE = 0.1  # of a row, the elements of large tiles beyond its end that cost less than these spare
MOST_IDLE_APART = 0.2  # the same of rows that are not aligned, of which small tiles are loaded more slowly
EVEN_BLOCK = 256  # elements of a tile that are enough to walk a row in
EVEN_LOAD = 16  # elements of a lane from which on half as many are loaded as fast
EARLY_WARPS = 32 * PROCESSORS  # in all, up to which all run at a time whatever they hold, and nothing hides a wait
LEAST_LATE = 16384  # elements of a row from which on what is loaded late is loaded as fast
SEVERAL_WARPS = 1024  # elements of several warps: a processor has room for more of them than of programs
MUCH = 24.0  # instructions per element from which on programs do not hide them behind their loads if they have few warps
WIDE = 10  # bytes read per element of rows of float32, from which on a lane has few then: norms take 0.80 to 0.98, one 0.64
HEAVY_WINDOWS = 80.0  # the same from which on it has them for few, as of windows
ROW_OF_WARP = 128  # elements of a row that a warp loads at a time, and holds alone
MOST_OF_WARP = 4096  # elements of a warp of a program that holds rows
MOST_ACROSS = 8192  # elements that a program holds of rows which fill more than a sector across them
WARPS_ACROSS = 8  # of such a program, at most
MOST_IN_LANE = 128  # registers for what a lane reads along the row that it holds


def whole_rows(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules in which one program takes a whole row, or several."""
    online_sums = find_online_sums(facts.spec)
    passes = pass_count(facts.spec, passes_before(facts.spec, online_sums), facts.order["r"])
    is_far = _is_far_when_read_again(facts, passes, bool(online_sums))
    longest_far = LONGEST_PERSISTENT if facts.is_aligned or passes > 2 else LONGEST_HELD_APART
    longest_held = longest_far if passes > 2 or is_far else LONGEST_HELD
    tensors = facts.tensors
    longest_in_registers = LONGEST_PERSISTENT // (2 * power_of_two(tensors // 2) if tensors > 1 else 1)
    can_be_held = facts.is_static and facts.length <= LONGEST_PERSISTENT
    loops = _online(facts, passes, is_far) if online_sums else _looped(facts, is_far)
    is_dear = facts.reads_apart and facts.rows <= FEW_ROWS and facts.length * facts.bytes_read <= MOST_HELD
    if passes == 1 and tensors > 1 and not (facts.stores_along or online_sums) and power_of_two(facts.length) >= LONG_ROW:
        yield from _loops(facts, (4096, 8, 1))  # nothing of a row is needed again
    is_counted = facts.counts and facts.length > LONGEST_SUMMED_TWICE and facts.reads_along <= FEW_READ and not is_dear
    if can_be_held and is_counted and facts.stores_late and tensors == 1 and may_be_in_parts(facts.spec):
        yield from _in_parts(facts)
    if can_be_held and ((is_dear and not online_sums) or facts.length <= min(longest_held, longest_in_registers)):
        is_busy = facts.instructions >= MUCH and facts.length > LONGEST_SUMMED_TWICE and facts.rows > 2 * PROCESSORS
        if is_counted or is_busy:  # one program of a processor that computes leaves the memory idle meanwhile
            yield from _loops(facts, (4096, 8, 1) if facts.rows > PROCESSORS else (LONG_ROW // 2, 16, 1))
        yield from _persistent(facts)
        yield from itertools.islice(loops, 2 if facts.length >= 2048 else 0)
    else:
        yield from loops
        yield from itertools.islice(_persistent(facts), 1 if can_be_held else 0)


def _is_far_when_read_again(facts: Rows, passes: int, is_online: bool) -> bool:
    """Return whether a loop of usual tiles reads long rows again when others have taken their place in the cache.

    They are held then if they are aligned, or walked in large tiles, so that few are under way at a time: rows of 20,000 to
    128,256 elements take 0.79 of the time on average of 56 kernels, and 0.80 of 30 others; an instance norm over 65,536
    elements and its gradient, of two tensors, 0.80 and 0.79. Where no row is stored, small programs are faster all the same
    if two of three hold: there are sums of exponentials; elements have 16 bits; the last of large tiles reaches far beyond.

    Args:
        facts: What the schedule depends on.
        passes: How often a loop passes over a row.
        is_online: Whether it adds up exponentials in one pass.
    """
    is_usual = facts.tensors <= 2 and not facts.spec.scans and facts.instructions < HEAVY_HELD
    if passes == 1 or facts.length <= LONGEST_HELD or not is_usual:
        return False
    beyond = -facts.length % LONG_ROW if facts.length > LONGEST_PERSISTENT else 0
    against = (is_online, facts.itemsize < REGISTER, beyond > MOST_IDLE * facts.length)
    return facts.stores_along > 0 or sum(against) < 2


def _in_parts(facts: Rows) -> Iterator[Schedule]:
    """Yield a schedule that holds a row in tiles beside one another, which reach less far beyond its end than one would.

    Layer and group norms over 8,200 to 31,360 elements take 0.66 to 0.99 of the time that they take in a loop, which reads
    rows twice and counts what its lanes have taken in.
    """
    ends = {part: -(-facts.length // part) * part for part in PARTS}
    part = PARTS[-1] if facts.length <= LONGEST_HELD and ends[PARTS[-1]] < ends[PARTS[0]] else PARTS[0]
    warps = 16 if facts.length > LONGEST_OF_FEW_WARPS or facts.rows <= 2 * PROCESSORS else 8
    yield Schedule("persistent", facts.order, {"x": 1, "r": part}, warps, parts=ends[part] // part)


def _persistent(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules that hold whole rows; several short ones per program, so that it has enough loads in flight.

    Where a program has 32 rows per warp, Triton computes what belongs to a row in one lane instead of in a whole warp.
    """
    r = power_of_two(facts.length)
    x = _rows_held(facts, r)
    warps = _warps_of_held(facts, x, r)
    tiles = [(x, warps), (x, 2 * warps), (x, 4 * warps), (2 * x, 2 * warps), (4 * x, 4 * warps), (x, max(warps // 2, 1)),
             (max(x // 2, 1), max(warps // 2, 1)), (2 * x, warps)]
    reads_once = facts.reads_of_rows and facts.held * r <= MOST_IN_LANE and not facts.stores_along
    if r <= SHORT_IN_LANE or (r <= LONGEST_IN_LANE and reads_once):
        wide = _enough_rows(facts, LANES)
        in_lanes = [(wide, wide // LANES), (2 * wide, 2 * wide // LANES)]
        is_first = facts.rows >= LANES * 4 * PROCESSORS and facts.instructions < MUCH
        tiles = in_lanes + tiles if is_first else tiles[:1] + in_lanes + tiles[1:]
    most = power_of_two(facts.rows)
    yield from (Schedule("persistent", facts.order, {"x": x, "r": r}, warps,
                         loads_early=_loads_early(-(-facts.rows // x), r, warps)) for x, warps in tiles
                if x <= most and warps <= MOST_WARPS and x * r <= MOST_OF_WARP * warps)


def _loads_early(programs: int, r: int, warps: int) -> bool:
    """Return whether programs load all that they need before they first wait for each other.

    That helps where little is under way: 17 kernels of rows of 4,608 to 6,272 elements take 0.95 of the time (0.72 to 1.06).
    Longer rows keep the memory busy by themselves.
    """
    return programs * warps <= EARLY_WARPS and (r < LEAST_LATE or programs == 1)


def _rows_held(facts: Rows, r: int) -> int:
    """Return how many rows of ``r`` elements a program holds: several short ones, but no more than leave enough programs."""
    share = power_of_two(facts.rows // PROCESSORS + 1)  # of a processor
    x = min(max((1024 if r > LONGEST_IN_LANE else 512) // r, 1), clamp(share // 4, 1, 128))
    if facts.is_mixed:  # what lies across the rows fills sectors too, as far as there are registers
        sector = SECTOR // min(facts.itemsize, SECTOR)
        most = clamp(MOST_ACROSS // r, sector, 2 * sector)
        x = min(clamp(share, x, most), max(MOST_WARPS * MOST_OF_WARP // r, 1))
    elif r == ROW_OF_WARP and facts.shares_along and facts.rows >= MANY_ROWS:
        x = 2 * x  # lanes of four warps would hold an element each of what all rows share: rows were exchanged for these
    return _enough_rows(facts, x)


def _enough_rows(facts: Rows, x: int) -> int:
    """Return as many rows, ``x`` at least, as take longer than a program takes to be started, or as keep several warps busy.

    Sums of 131,072 rows of 64 elements take 0.47 of the time in programs of 32 rows that they take in programs of eight;
    layer norms of 200,704 such rows 0.78 in programs of 16.
    """
    stored = facts.itemsize * facts.stores_along
    loaded, moved = facts.length * (facts.bytes_read + stored), facts.length * (facts.bytes_of_rows + stored)  # of a row
    while facts.rows >= 2 * x * LEAST_PROGRAMS and (
            x * loaded < LEAST_MOVED or (x * moved < LEAST_MOVED and x * facts.length < SEVERAL_WARPS)):
        x *= 2
    is_short = facts.instructions >= MUCH and facts.length <= LONGEST_IN_LANE and not facts.is_scattered
    while is_short and x * facts.length < SEVERAL_WARPS and facts.rows >= 2 * x * RESIDENT:
        x *= 2
    return x


def _warps_of_held(facts: Rows, x: int, r: int) -> int:
    """Return the warps that hold ``x`` rows of ``r`` elements: what registers ask for, more where little else runs."""
    is_heavy, is_window = facts.instructions >= HEAVY_HELD, facts.instructions >= HEAVY_WINDOWS
    most = WARPS_ACROSS if facts.is_mixed else MOST_WARPS
    warps = clamp(power_of_two(x * r // (LANES * _held_in_lane(facts, r))), 1, most)
    if r == ROW_OF_WARP and not facts.is_mixed:
        return max(1, x // 2)
    if facts.spec.scans and x * r <= LANES * LANES:  # warps that share rows would hand on to each other what they have
        return max(x // 2, 1) if r <= ROW_OF_WARP else 1
    if r == 2048 and not is_heavy:
        return 2 if facts.rows >= RESIDENT else 4
    if r == LONG_ROW // 2 and facts.length <= FULL * r:
        warps = max(warps // 2, 1)
    if r >= LONG_ROW and facts.rows <= 2 * PROCESSORS:  # one that has a processor to itself has registers for more warps
        return r // (LANES * MOST_IN_LANE) * (2 if facts.rows <= PROCESSORS else 1)
    usual = 2 * FEW_WARPS if r >= MOST_OF_WARP and facts.tensors == 1 else FEW_WARPS  # a lane loads it in many rounds
    few, at_once = (RESIDENT_WARPS // 2, EVEN_LOAD // 2) if is_heavy else (usual, EVEN_LOAD)
    if -(-facts.rows // x) * warps < few and x * r >= 2 * at_once * LANES * warps:  # alone while a row is waited for
        warps *= 4 if is_window or (facts.is_scattered and x == 1) else 2
    return min(warps, 8 if r == LONG_ROW // 2 and not is_heavy else MOST_WARPS)


def _held_in_lane(facts: Rows, r: int) -> int:
    """Return how many elements of a row of ``r`` a lane holds: fewer of several tensors, or if much is computed of each."""
    is_wide = facts.itemsize >= REGISTER and facts.bytes_read >= WIDE and r < LONG_ROW
    is_short = r <= LONGEST_IN_LANE and not facts.is_scattered  # whose sums take longer the more lanes have of a row
    if facts.instructions >= (MUCH if is_wide or is_short else HEAVY_WINDOWS):
        return EVEN_LOAD // 2
    is_long = facts.tensors > 1 and r >= LANES * LANES
    if facts.instructions >= (MUCH if is_long else HEAVY_HELD):
        return EVEN_LOAD
    return clamp(power_of_two(64 // max(facts.tensors, facts.held)), EVEN_LOAD, 64 if r >= LONG_ROW else 32)


def _online(facts: Rows, passes: int, is_far: bool) -> Iterator[Schedule]:
    """Yield schedules of few steps and few warps: every step ends in two sums over the tile.

    Where the row is read again, large programs are an alternative: few rows are under way at a time, which then are still in
    the cache.

    Args:
        facts: What the schedule depends on.
        passes: How often a loop passes over a row.
        is_far: Whether rows have left the cache by then otherwise.
    """
    r = clamp(power_of_two(facts.length), 128, 4096 if facts.stores_along else 8192)
    stages = stages_within(r * facts.bytes_read, 3) if facts.stores_along else 1
    if not facts.is_aligned and facts.length >= LONG_ROW:
        yield from _loops(facts, *_unaligned(facts))
    if facts.rows < 2 * PROCESSORS:  # few are under way at a time
        yield from _loops(facts, (LONG_ROW, 16, 1))
    if is_far:
        yield from _loops(facts, (LONG_ROW, 32, 1))
    if facts.rows >= MANY_ROWS and not facts.stores_along:
        if facts.tensors == 1:  # a warp that is alone waits for no other at the end of a step
            yield from _loops(facts, (2048, 1, 1))
        yield from _loops(facts, (2048, 4, 1))
    if passes == 1 and facts.tensors == 1 and not facts.stores_along:  # nothing to keep for a second look
        yield from _loops(facts, (2048, 4, 1))
    yield Schedule("looped", facts.order, {"x": 1, "r": r}, 4 if facts.tensors == 1 else 8, stages)
    yield from _loops(facts, (8192, 16, 1), (16384, 32, 1), (8192, 8, 2), (4096, 8, 2), (2048, 4, 4), (16384, 16, 1))


def _unaligned(facts: Rows) -> Iterator[tuple[int, int, int]]:
    """Yield tiles of long rows whose elements are loaded one by one, where they differ from those of other rows.

    That takes instructions, which many small programs issue side by side. Where the row is read again, large ones have it in
    the cache; more so where elements are larger.
    """
    is_narrow, many = facts.itemsize < REGISTER, facts.rows > FEW_ROWS
    if facts.stores_late:
        is_smaller = many if is_narrow else -facts.length % LONG_ROW > MOST_IDLE_APART * facts.length
        yield (LONG_ROW // 2, 16, 1) if is_smaller else (LONG_ROW, 16 if is_narrow else 32, 1)
    elif facts.stores_along:
        yield (2048, 8, 1)
    elif 2 * PROCESSORS <= facts.rows < MANY_ROWS:
        yield (2048, 8, 1) if is_narrow and many else (LONG_ROW // 2, 16, 1)


def _loops(facts: Rows, *tiles: tuple[int, int, int]) -> Iterator[Schedule]:
    """Yield schedules of one row a program, given elements of a tile, warps and stages."""
    for r, warps, stages in tiles:
        if r <= power_of_two(facts.length):
            stages = min(stages, stages_within(r * facts.bytes_read, 4))
            yield Schedule("looped", facts.order, {"x": 1, "r": r}, warps, stages)


def _looped(facts: Rows, is_far: bool) -> Iterator[Schedule]:
    """Yield schedules with few lanes for one tensor, which keep enough loads in flight, and more for several.

    Args:
        facts: What the schedule depends on.
        is_far: Whether rows that are read again have left the cache by then, unless large programs walk few at a time.
    """
    length = power_of_two(facts.length)
    most_alone = 2 * PROCESSORS if facts.tensors == 1 else PROCESSORS
    if facts.rows <= most_alone:  # such a program has as much under way as it can
        yield from _loops(facts, (8192, 16, 1))
    if is_far:
        yield from _loops(facts, (LONG_ROW, 32, 1))
    is_small = facts.tensors == 1 and (facts.rows > FEW_ROWS or facts.stores_along)
    r = min(2048 if is_small else 4096, length)
    x = 1 if r >= 512 else clamp(512 // r, 1, power_of_two(facts.rows))
    yield Schedule("looped", facts.order, {"x": x, "r": r}, 16 if r >= 4096 else 8 if r >= 2048 else 4)
    yield from _loops(facts, (4096, 8, 1), (8192, 16, 1), (2048, 4, 3), (4096, 16, 1), (16384, 32, 1), (1024, 4, 4))


def split_rows(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of several programs a row, as many as run at a time."""
    largest = facts.block if facts.block >= EVEN_BLOCK else 4096
    # A tile for each program, and not more states in a lane than there are registers.
    most, lanes = (4096, 1024) if facts.reads_along <= 3 else (2048, 512)
    least = 512
    if facts.counts and facts.rows * facts.length <= 1024 * 4 * RESIDENT:
        least = most = lanes = 1024  # a tile for each program, summed up twice: that takes less than to count in a loop
    elif facts.instructions >= HEAVY_HELD:
        most, lanes = 1024, 128
    elif facts.counts or facts.states > 2:
        most = lanes = 512
    size = clamp(power_of_two(facts.rows * facts.length // (2 * RESIDENT)), least, most)
    many = RESIDENT if facts.reads_along <= 3 else 2 * RESIDENT
    if size > 1024 and facts.vector == 1:  # lanes load an element at a time, and hold the place of each
        size, lanes, many = 1024, 256, 2 * RESIDENT
    elif size > lanes == 1024 and facts.rows > 1:  # several warps take a tile
        many = 2 * RESIDENT
    for tile, elements, programs in (
            (size, lanes, many), (size, lanes, RESIDENT), (size, 512, RESIDENT), (512, 512, 2 * RESIDENT),
            (4096, 1024, RESIDENT), (1024, 1024, 2 * RESIDENT), (4096, 512, RESIDENT), (size, lanes, RESIDENT // 2),
            (2048, 512, RESIDENT)):
        r = min(tile, largest, power_of_two(facts.length))
        # Rows of which there cannot be enough programs have more warps in each.
        fewest = RESIDENT_WARPS // (facts.rows * MOST_SPLITS) if facts.length >= r * MOST_SPLITS else 1
        warps = clamp(max(r // elements, fewest), 1, min(16, r // 32))
        if fewest > r // elements:
            programs = RESIDENT_WARPS // warps
        yield split_over(facts, 1, r, warps, max(min(4 * programs // warps, 4 * RESIDENT), programs))
