"""Schedules of columns: neighbouring ones by a program, from top to bottom or split over several.

The numbers were measured, as in `row_schedule.py`.

Worked example: ``sum(x, 0)`` of ``bfloat16[8192, 1024]`` is split: eight programs side by side take 128 columns each, as
often as it takes to keep all processors busy.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynafuse.lowering.triton.reduced_rows import (
    COPIED,
    FEW_WARPS,
    HEAVY_HELD,
    LONGEST_IN_LANE,
    RESIDENT,
    RESIDENT_WARPS,
    Rows,
    split_over,
    stages_within,
)
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before
from dynafuse.lowering.triton.tiles import Schedule, clamp, power_of_two
from dynafuse.partition.kernel_class import LANES, PROCESSORS, REGISTER, SECTOR, columns_of_program

LONG_COLUMN = 256  # elements from which on larger tiles are faster
UNDER_WAY = PROCESSORS * 80 << 10  # bytes of the tiles of columns that are worked on at a time, so that enough are loaded
MANY_ALONG = 7  # accesses along a column, stores among them, from which on copying ahead costs more than it hides
LIGHT = 2  # bytes read per element up to which programs of two warps, twice as many of them, are faster
BUSY_WARPS = 2 * FEW_WARPS  # in all, below which more warps of columns are faster
WARP_ACROSS = 512  # elements of each then
COPIED_ACROSS = 4  # bytes that a lane moves at once, of which asynchronous copies take no fewer
WIDEST_TORN = 32  # columns of a tile up to which rows that do not fill it are not copied ahead
MOST_TILES = 2  # of a program, up to which each has a program of its own where that is faster than a loop
FEW_ACROSS = 3  # reads, some of which lie across others, up to which copying them ahead pays
FEW_STEPS = 8  # of a loop, which end before tiles that are loaded ahead pay
HEAVY = 40.0  # instructions per element that take as long as its bytes: more than once would be too often
UNEVEN = 256  # elements of a warp where it reads bytes: of more than eight a lane, Triton gives it 16 neighbours of all else
BESIDE = 2048  # elements of a tile of which rows lie along lanes and others across them
HELD_LINE = 128  # bytes of a row of a tile that holds short columns
HELD_IN_LANE = 64  # registers of a lane for longer ones, of 32 elements at least; half of both if much is computed of each
LONGEST_HELD, LONGEST_COUNTED = 1024, 64  # elements of such a column, of all tensors; of one whose variance is taken
NARROW = 64  # columns of which four warps load as many rows at a time as keep Triton from computing an element twice


def columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules in which a program takes neighbouring columns from top to bottom."""
    widths = _within_run(facts, _column_widths(facts))
    if facts.is_mixed and facts.lanes == "r" and facts.stores_along:
        yield from _beside_rows(facts)
    yield from _held_columns(facts)
    if facts.rows < 2 * PROCESSORS * widths[0]:
        yield from _narrow_columns(facts)
    elif facts.piece and facts.is_static and facts.length <= LONGEST_IN_LANE:
        # A column in a lane: all of a program's columns are of one piece, whose loads are all under way.
        yield Schedule("looped", facts.order, {"x": LANES, "r": power_of_two(facts.length)}, 1, lanes=facts.lanes)
    elif facts.is_scattered and max(widths) * 2 * PROCESSORS <= facts.rows:
        # Lanes load an element at a time, so do it row by row: of many rows at a time lines leave the cache half read.
        yield Schedule("looped", facts.order, {"x": max(widths), "r": 2}, 4, lanes=facts.lanes)
    else:
        yield from _of_few_programs(facts, widths[0])
    best = widths[0]
    narrow = min(32, power_of_two(facts.rows))
    usual = (2048, 1024) if facts.is_static and facts.length >= LONG_COLUMN else (1024, 512)
    if facts.is_scattered and facts.rows // best * 2 < FEW_WARPS:  # while they wait for elements one by one
        usual = (2048, 512)
    for x, tile, lanes, stages in (
            (best, *usual, 1), (best, *usual, 3), (best, 1024, 512, 1), (best, 1024, 512, 3), (best, 1024, 1024, 1),
            (narrow, 1024, 512, 1), (best, 2048, 512, 1), (best, 2048, 1024, 1), (narrow, 512, 512, 1),
            (widths[-1], 1024, 512, 1)):
        r = _row_block(facts, tile, x)
        warps = clamp(power_of_two(x * r // lanes), 1, 16)
        if stages == 1 and facts.vector > 1 and _can_be_ahead(facts) and _is_little_under_way(facts, x, r, warps):
            stages = 3
        ahead = min(stages, stages_within(x * r * facts.bytes_read, stages)) if facts.length > 4 * r else 1
        yield Schedule("looped", facts.order, {"x": x, "r": r}, warps, ahead, lanes=facts.lanes)


def _passes(facts: Rows) -> int:
    """Return how often a loop passes over a column."""
    return pass_count(facts.spec, passes_before(facts.spec), facts.order["r"])


def _of_few_programs(facts: Rows, columns: int) -> Iterator[Schedule]:
    """Yield a schedule with more warps where usual tiles leave few that read one tensor or few bytes at a time, or very few.

    Means over 14 × 14 and 18 × 18 positions of 64 to 128 images with 366 to 672 channels take 0.56 to 0.93 of the time, sums
    of two and of four tensors over 14 × 14 positions of 43,008 and 49,152 channels 0.87 and 0.82.

    Args:
        facts: What the schedule depends on.
        columns: How many a usual tile has.
    """
    warps = facts.rows // columns * 2
    if warps >= BUSY_WARPS or not _can_be_ahead(facts) or _passes(facts) > 1:
        return
    widths, tile = [columns], 4 * WARP_ACROSS
    if facts.vector * facts.itemsize <= COPIED_ACROSS:
        widths, tile = [min(LANES, columns)], WARP_ACROSS
    elif facts.bytes_read <= LIGHT and warps * 2 < BUSY_WARPS:
        widths = [max(columns // 2, LANES), columns]
    elif facts.bytes_read > LIGHT and warps >= FEW_WARPS:
        return
    for x in widths:
        r = _row_block(facts, tile, x)
        if facts.length > FEW_STEPS * r:
            yield Schedule("looped", facts.order, {"x": x, "r": r}, clamp(x * r // WARP_ACROSS, 1, 16),
                           stages_within(x * r * facts.bytes_read, 3), lanes=facts.lanes)
            return


def _held_columns(facts: Rows) -> Iterator[Schedule]:
    """Yield a schedule that holds whole columns that would be read again: as many as fill sectors, if they are short.

    Softmax, norms and cross-entropy over 21 to 512 channels, and their gradients, take 0.67 of the time that loops over
    them take, geometric mean of 18 kernels; the place of a maximum of 21 takes 0.76. A variance takes longer than in a loop
    from 96 channels on, as each of its two sums goes over all lanes.
    """
    r = power_of_two(facts.length)
    x = min(HELD_LINE // facts.itemsize if r <= LANES else LANES, power_of_two(facts.rows))
    pays = _passes(facts) > 1 or (facts.states > 1 and LANES // 2 <= r <= LANES)
    is_even = not (facts.is_mixed or facts.spec.scans or (facts.is_scattered and r > LANES))
    longest = LONGEST_COUNTED if facts.counts else LONGEST_HELD // facts.held
    if pays and is_even and facts.is_static and facts.rows >= 2 * PROCESSORS * x and r <= longest:
        registers, least = (HELD_IN_LANE // 2, LANES // 2) if facts.instructions >= HEAVY_HELD else (HELD_IN_LANE, LANES)
        warps = power_of_two(max(x * r // (LANES * max(registers // facts.held, least)), 1))
        yield Schedule("persistent", facts.order, {"x": x, "r": r}, warps)


def _beside_rows(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of few rows beside one another, where more lies along rows than across them, and is stored so.

    Tiles have whole sectors of what lies across, and long pieces of rows. A softmax of 65,536 rows of 1,024 scores with a
    bias whose heads are neighbours takes 0.54 of the time that it takes in tiles of 128 by 16, of which a row's bools fill
    half a sector; 0.43 with two rows to a warp, which reads parts of sectors from the cache.
    """
    x = SECTOR // facts.itemsize
    for rows, r, warps in ((x, BESIDE // x, 8), (2, 256, 1)):
        yield Schedule("looped", facts.order, {"x": rows, "r": min(r, power_of_two(facts.length))}, warps, lanes=facts.lanes)


def _column_widths(facts: Rows) -> list[int]:
    """Return how many columns a program may take, the best first: those with few lanes beyond the last, then the widest."""
    most = min(power_of_two(facts.rows), 256)
    widths = [width for width in (32, 64, 128, 256) if width <= most] or [most]
    widths = [width for width in widths if facts.piece % width == 0] or widths  # a program then computes one piece alone

    def padded(width: int) -> float:
        # Narrow pieces of a row take more requests for the same bytes.
        return -(-facts.rows // width) * width * (1.0 if width * facts.itemsize >= 4 * SECTOR or width == most else 1.5)

    return sorted(widths, key=lambda width: (padded(width), abs(width - 128), -width))


def _within_run(facts: Rows, widths: list[int]) -> list[int]:
    """Return those of some widths for which a tile's rows are pieces of memory, where the pieces of others lie far apart.

    Sums of 1,024 rows of 16 neighbours take 0.24 of the time that they take in tiles of 128 columns.
    """
    is_piece = facts.run == power_of_two(facts.run) and facts.run * facts.itemsize >= 2 * SECTOR and facts.run < facts.rows
    if facts.is_scattered or not is_piece:
        return widths
    return [width for width in widths if width <= facts.run] or [facts.run]


def _row_block(facts: Rows, tile: int, x: int) -> int:
    """Return how many rows a tile of so many elements has: if a column is short, as few as waste little beyond its end."""
    most = clamp(tile // x, 1, power_of_two(facts.length))
    if facts.block >= 8 and most > facts.block:
        return facts.block
    if not facts.is_static or facts.length > 16 * most:
        return most
    sizes = [size for size in (most, most // 2) if size >= 4] or [most]
    return min(sizes, key=lambda size: (-(-facts.length // size) * size * (1.0 if size == most else 1.1), -size))


def _can_be_ahead(facts: Rows) -> bool:
    """Return whether columns may be copied ahead.

    What is copied arrives in a layout of its own: Triton then reads it one by one for stores that lie otherwise. For few
    accesses that was measured to cost less than waiting for loads.
    """
    is_aligned = facts.rows * facts.itemsize % COPIED == 0 or _counts_pairs(facts)
    return facts.streams and is_aligned and not (facts.is_mixed or _stores_many(facts))


def _counts_pairs(facts: Rows) -> bool:
    """Return whether variances are taken of what lanes move four bytes at a time: such loads each wait for the one before.

    Variances of 25,088 rows of 366 elements take 14 µs copied ahead, 60 without.
    """
    return facts.counts and facts.vector > 1 and facts.vector * facts.itemsize == COPIED_ACROSS


def _stores_many(facts: Rows) -> bool:
    """Return whether a program stores along its columns, and loads or stores many things there."""
    return facts.stores_along > 0 and facts.reads_along + facts.stores_along >= MANY_ALONG


def _is_little_under_way(facts: Rows, x: int, r: int, warps: int) -> bool:
    """Return whether the tiles of all programs that run at a time are fewer bytes than keep the memory busy."""
    programs = min(-(-facts.rows // x), RESIDENT_WARPS // warps)
    return programs * x * r * facts.bytes_read < UNDER_WAY


def _narrow_columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules for few columns: as many programs as the sectors of memory allow, each with many loads under way."""
    width = columns_of_program(facts.rows, facts.itemsize)
    if facts.spec.scans and facts.rows < width * PROCESSORS:  # each of few programs takes as long as it waits for itself
        width = max(width // 2, 1)
    tiles = [(width, 4096), (width, 8192)]
    if facts.rows <= width * PROCESSORS and not facts.spec.scans:  # a program alone has as much under way as it can
        tiles.reverse()
    for x, tile in (*tiles, (2 * width, 8192), (width, 2048), (max(width // 2, 1), 4096)):
        x = min(x, power_of_two(facts.rows))
        r = min(tile // x, power_of_two(facts.length))
        # Programs that are alone on a processor are done the sooner the less of much arithmetic a lane does.
        elements = 64 if facts.instructions >= HEAVY and facts.rows <= x * PROCESSORS else 512  # of a warp
        yield Schedule("looped", facts.order, {"x": x, "r": r}, clamp(x * r // elements, 1, 16), lanes=facts.lanes)


def split_columns(facts: Rows) -> Iterator[Schedule]:
    """Yield schedules of several programs for each piece of neighbouring columns."""
    widths = _column_widths(facts)
    if facts.is_mixed:
        widths = [min(32, power_of_two(facts.rows)), *widths]
    best = widths[0]
    steps = facts.rows * facts.length // (2048 * RESIDENT // 2)  # of a program of tiles of 2048
    is_heavy = facts.instructions >= HEAVY and facts.stores_along > 0 and facts.reads_of_rows > 0
    if is_heavy:
        best = min(best, NARROW)  # copied ahead, elements lie otherwise than what is read once a column
    pays = best <= 2 * facts.rows and (_counts_pairs(facts) or not (facts.counts and steps <= 2 * FEW_STEPS))
    is_branched = facts.piece > 0 and facts.piece % best == 0  # what is loaded in a branch cannot be copied ahead
    ahead = 3 if _can_be_ahead(facts) and pays and not is_branched and not _is_torn(facts, best) else 1
    usual, other = _elements_of_warps(facts, ahead)
    first = _usual_split(facts, best, steps, ahead, is_heavy)
    for x, tile, lanes, programs, stages in (
            first, (best, 2048, usual, RESIDENT // 2, ahead), (best, 2048, other, RESIDENT // 2, 4 - ahead),
            (best, 2048, 1024, RESIDENT, 1), (best, 1024, 512, RESIDENT // 2, ahead),
            (widths[-1], 2048, 512, RESIDENT // 2, ahead), (best, 2048, 512, RESIDENT // 4, ahead),
            (best, 4096, 1024, RESIDENT // 2, ahead), (best, 2048, 1024, RESIDENT, 3)):
        r = _row_block(facts, tile, x)
        if facts.is_uneven and facts.stores_along:
            lanes, programs = min(lanes, UNEVEN), max(programs, RESIDENT)
        warps = clamp(power_of_two(x * r // lanes), 1, 16)
        programs *= max(1, 4 // warps) if stages == 1 and lanes == 512 else 1
        tiles = -(-facts.length // r) * -(-facts.rows // x)
        if facts.counts and tiles <= MOST_TILES * programs:
            programs = max(programs, tiles)  # each tile is summed up twice, which takes less than to count in a loop
        if facts.is_scattered:  # lanes that move an element at a time have little under way: it takes all that can run
            programs = RESIDENT_WARPS // warps
        yield split_over(facts, x, r, warps, programs, min(stages, stages_within(x * r * facts.bytes_read, stages)))


def _is_torn(facts: Rows, columns: int) -> bool:
    """Return whether rows of few copies each do not fill a tile of so many columns: lanes are beyond their end."""
    return facts.rows < columns <= WIDEST_TORN


def _elements_of_warps(facts: Rows, ahead: int) -> tuple[int, int]:
    """Return how many elements of a tile a warp has, and how many else it may."""
    return (512, 1024) if ahead > 1 or facts.stores_along else (1024, 512)


def _usual_split(facts: Rows, columns: int, steps: int, ahead: int, is_heavy: bool) -> tuple[int, int, int, int, int]:
    """Return columns and elements of a tile, elements of a warp, programs and stages: what is chosen without timings.

    Args:
        facts: What the schedule depends on.
        columns: How many a tile has.
        steps: Of a program's loop, by tiles of 2048 elements.
        ahead: Stages, if copying ahead may pay.
        is_heavy: Whether computing an element takes as long as its bytes.
    """
    if facts.is_mixed and not facts.is_scattered:
        if facts.reads_along <= FEW_ACROSS:
            return columns, 2048, 1024, RESIDENT, 1 if facts.is_in_parts else 3  # all parts would be copied
        return columns, 1024, 256, RESIDENT // 2, 1
    # A torn row has little of a tile, what is copied for few steps of much arithmetic is there too late, and large elements
    # are many bytes under way without that.
    is_wide = facts.itemsize >= REGISTER and not facts.stores_along
    if (_is_torn(facts, columns) and not facts.is_mixed) or (is_heavy and steps <= FEW_STEPS) or is_wide:
        return columns, 2048, 1024, RESIDENT, 1
    # Small tiles where columns are short, where many accesses leave few registers, or where these lie across one another.
    is_small = steps <= FEW_STEPS or not facts.reads_along if ahead > 1 else facts.stores_along > 0
    if facts.is_mixed or is_small:
        return columns, 1024, 512, RESIDENT // 2, ahead
    if is_heavy:
        return columns, 2048, 512, RESIDENT, ahead
    if facts.bytes_read <= LIGHT and not (facts.stores_along or facts.counts):
        return columns, 2048, 1024, RESIDENT, ahead
    return columns, 2048, _elements_of_warps(facts, ahead)[0], RESIDENT // 2, ahead
