"""Schedules of rows and columns that are reduced in one pass: a row in registers, and running states of all columns.

Worked example: the gradient of a layer norm over ``[8192, 1024]`` runs in four programs of four warps on each processor.
Each walks over its rows, of which the next two are on their way from memory. That over ``[8192, 12288]`` runs in one of
eight warps, which computes a row in three parts and loads the next one meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.reduced_rows import (
    PARTS,
    SHARED_BYTES,
    bytes_read_along,
    contiguous_bytes,
    full_reads,
    may_be_in_parts,
)
from dynafuse.lowering.triton.tiles import Schedule, along_row, by_stride, clamp, point_count, power_of_two, reduced_axes
from dynafuse.partition.kernel_class import (
    LONG_BESIDE_COLUMNS,
    LONGEST_AHEAD,
    MOST_HELD,
    PROCESSORS,
    REGISTER,
    RowsBeside,
    is_mixed,
    rows_beside_columns,
)

LEAST_ACROSS, MOST_ACROSS = 4, 32  # rows beside one another that a tile has where much is contiguous across them
SHORT = 512  # elements of a row up to which a warp or two, with two rows at a time, are faster than four
FEWEST = 8 * PROCESSORS  # rows from which on they are
FEW_BYTES = 8  # read per element, above which that takes more rows: until the first ones are there nothing hides the wait
FEWEST_OF_MUCH = 48 * PROCESSORS
ALONE = 256  # elements of a row up to which a warp holds it alone
LIGHT = 48 << 10  # bytes below which four warps hold a longer row as well, if they hold nothing that all rows share
MOST_IDLE = 0.25  # of the elements of parts, beyond the row's end
WIDE_AGAIN = 16384  # elements of a row that is read again from which on sixteen warps are faster


def rowcol(
    spec: Spec, probed: Probe, accesses: Sequence[Access], reduced_sets: list[frozenset[int]]
) -> Iterator[Schedule]:
    """Yield schedules of a spec that reduces rows and columns: a row in registers, and running states of all columns.

    Args:
        spec: The region.
        probed: Its probe.
        accesses: Accesses of that, the largest first.
        reduced_sets: The axes along which it reduces: those of rows, and those of columns.
    """
    row = frozenset(k for k, axis in enumerate(spec.axes) if axis.reduced)
    column = next(axes for axes in reduced_sets if axes != row)
    order = {"x": by_stride(probed, accesses, sorted(column)), "r": along_row(spec, probed, accesses, row)}
    rows, length = point_count(spec, column), point_count(spec, row)
    r = power_of_two(length)
    deferred = frozenset(op for op, _ in spec.reductions if reduced_axes(spec, op) == column)
    read = [access.layout.dtype.itemsize for access in full_reads(spec, probed)]
    states = REGISTER * (len(deferred) + len(spec.scans))
    bytes_ahead = bytes_read_along(probed, column, row)
    most = clamp(4096 // r, 1, power_of_two(rows)) if r < 4096 else 1
    held, wide = states + sum(read), sum(max(REGISTER, size) for size in read)  # bytes per element of a tile
    beside = rows_beside_columns(length, read=sum(read), held=wide, states=states, in_parts=may_be_in_parts(spec, deferred))

    def schedule(x: int, warps: int, per_processor: int, stages: int) -> Schedule:
        most_ahead = 2 * SHARED_BYTES if r > LONGEST_AHEAD else SHARED_BYTES
        room = min(most_ahead, 2 * SHARED_BYTES // per_processor)
        stages = min(stages, clamp(1 + room // max(x * r * bytes_ahead, 1), 1, 3))
        programs = min(-(-rows // x), PROCESSORS * per_processor)
        hoists = r <= (LONG_BESIDE_COLUMNS if warps <= 4 else LONGEST_AHEAD)
        return Schedule("rowcol", order, {"x": x, "r": r}, warps, stages, programs, deferred, hoist_invariants=hoists)

    def warps_for(x: int) -> int:
        return 4 if x * r * held <= 48 << 10 else 8 if x * r * held <= 160 << 10 else 16

    half, quarter = max(most // 2, 1), max(most // 4, 1)
    along, across = (contiguous_bytes(spec, probed, accesses, axes) for axes in (row, column))
    if is_mixed(along, across) or across > along:
        x = min(clamp(half, LEAST_ACROSS, MOST_ACROSS), most)
        ahead = schedule(x, warps_for(x), 2, 3)
        yield ahead if ahead.stages == 3 else schedule(x, 4, 4, 1)
    elif r <= SHORT and rows >= (FEWEST if sum(read) <= FEW_BYTES else FEWEST_OF_MUCH):
        # Warps that are alone wait for no others at the end of a row.
        yield schedule(max(ALONE // r, 2), max(r // ALONE, 1), 6, 3)
    if beside is RowsBeside.NEXT and 2 * length * (held + wide) <= MOST_HELD:
        yield replace(schedule(1, 4, 2, 1), loads_next=True)
    elif beside in (RowsBeside.NEXT, RowsBeside.AGAIN):
        again = beside is RowsBeside.AGAIN
        part = next((part for part in PARTS if -length % part <= MOST_IDLE * length), PARTS[-1])
        yield replace(schedule(1, 16 if again and length >= WIDE_AGAIN else 8, 1, 1), block={"x": 1, "r": part},
                      parts=-(-length // part), loads_next=True, reads_again=again, hoist_invariants=False)
    if r >= LONG_BESIDE_COLUMNS:  # two programs of few warps, as long as these hold a row, or one, with more on their way
        yield schedule(1, 4, 2, 3) if r == LONG_BESIDE_COLUMNS or length * held < LIGHT else schedule(1, 8, 1, 3)
    yield schedule(quarter, warps_for(quarter), 4, 3)
    yield schedule(half, warps_for(half), 2, 3)
    yield schedule(half, warps_for(half), 4, 1)
    yield schedule(quarter, warps_for(quarter), 4, 2)
    yield schedule(quarter, warps_for(quarter), 6, 2)
    yield schedule(quarter, max(warps_for(quarter) // 2, 1), 4, 2)
    yield schedule(quarter, warps_for(quarter), 4, 1)
    yield schedule(most, warps_for(most), 1, 2)
