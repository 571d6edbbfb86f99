"""Schedules of rows and columns that are reduced in one pass: a row in registers, and running states of all columns.

Worked example: the gradient of a layer norm over ``[8192, 1024]`` runs in four programs of four warps on each processor.
Each walks over its rows, of which the next two are on their way from memory. That over ``[8192, 12288]`` runs in one of
eight warps, which computes a row in three parts and loads the next one meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.reduced_rows import (
    MOST_WARPS,
    PARTS,
    SHARED_BYTES,
    bytes_read_along,
    contiguous_bytes,
    full_reads,
    instructions_along,
    may_be_in_parts,
)
from dynafuse.lowering.triton.tiles import Schedule, along_row, by_stride, clamp, point_count, power_of_two, reduced_axes
from dynafuse.partition.kernel_class import (
    LANES,
    LONG_BESIDE_COLUMNS,
    LONGEST_AHEAD,
    MIXED_BESIDE_COLUMNS,
    MOST_HELD,
    PROCESSORS,
    REGISTER,
    SECTOR,
    RowsBeside,
    is_mixed,
    rows_beside_columns,
)

LEAST_ACROSS, MOST_ACROSS = 4, 32  # rows beside one another that a tile has where much is contiguous across them
LEAST_HALVED = 128  # elements of a row from which on such a tile has half as many rows
LEAST_FILLED = 256  # elements of a row from which on rows beside one another fill sectors, if most lies across
OF_WARP = 512  # elements that a warp then has of rows of SHORT elements; of shorter ones it has twice as many
HEAVY, LEAST_HEAVY = 30.0, 2048  # instructions per element, and elements of a row, that four warps are too few for
EVEN_POINTS = 8  # elements of a lane of such a row
STEPS = 5  # of a loop over such tiles for which more programs pay
SHORT = 512  # elements of a row up to which a warp or two, with two rows at a time, are faster than four
FEWEST = 8 * PROCESSORS  # rows from which on they are
FEW_BYTES = 8  # read per element of such a row, above which that takes more of them: nothing hides the first wait
FEWEST_OF_MUCH = 48 * PROCESSORS
ALONE = 256  # elements of a row up to which a warp holds it alone, whatever it reads
FEWEST_STEPS = 2  # of its loop: fewer leave more partial states than they save time
MANY_STEPS = 72  # of one program on each processor, from which on twelve warps pay, with more rows at a time
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
    facts = _facts_of(spec, probed, accesses, reduced_sets)
    if facts.r >= LEAST_HEAVY and facts.instructions >= HEAVY and facts.read <= REGISTER:
        yield _heavy(facts)
    elif facts.lies_across:
        yield _across(facts)
    elif _is_alone(facts):
        yield _alone(facts)
    yield from _long(facts)
    most, half, quarter = facts.most, max(facts.most // 2, 1), max(facts.most // 4, 1)
    for x, share, per_processor, stages in (
            (quarter, 1, 4, 3), (half, 1, 2, 3), (half, 1, 4, 1), (quarter, 1, 4, 2), (quarter, 1, 6, 2), (quarter, 2, 4, 2),
            (quarter, 1, 4, 1), (most, 1, 1, 2)):
        yield facts.schedule(x, max(facts.warps_for(x) // share, 1), per_processor, stages)


@dataclass(frozen=True)
class _Facts:
    """What the schedule of a spec that reduces rows and columns depends on."""

    order: dict[str, tuple[int, ...]]
    rows: int
    length: int
    deferred: frozenset[int]  # the reductions of columns
    read: int  # bytes per element, of what all of is read
    held: int  # of a tile, with the states of columns
    wide: int  # of what is read, in registers
    ahead: int  # of what a loop has on its way
    instructions: float  # per element, of what varies along rows and columns
    itemsize: int  # of the largest access
    lies_across: bool  # whether much is contiguous across rows
    fills_across: bool  # whether most is
    beside: RowsBeside | None

    @property
    def r(self) -> int:
        """Return the elements of a tile along a row."""
        return power_of_two(self.length)

    @property
    def most(self) -> int:
        """Return the rows of the largest tile."""
        return clamp(4096 // self.r, 1, power_of_two(self.rows)) if self.r < 4096 else 1

    def warps_for(self, x: int) -> int:
        """Return the warps that hold ``x`` rows."""
        return 4 if x * self.r * self.held <= 48 << 10 else 8 if x * self.r * self.held <= 160 << 10 else 16

    def steps(self, x: int) -> int:
        """Return the steps of a loop over ``x`` rows at a time, of a program on each processor."""
        return self.rows // (x * PROCESSORS)

    def schedule(self, x: int, warps: int, per_processor: int, stages: int) -> Schedule:
        """Return the schedule of tiles of ``x`` rows, with so many programs a processor and at most so many stages."""
        most_ahead = 2 * SHARED_BYTES if self.r > LONGEST_AHEAD else SHARED_BYTES
        room = min(most_ahead, 2 * SHARED_BYTES // per_processor)
        stages = min(stages, clamp(1 + room // max(x * self.r * self.ahead, 1), 1, 3))
        programs = min(-(-self.rows // x), PROCESSORS * per_processor)
        hoists = self.r <= (LONG_BESIDE_COLUMNS if warps <= 4 else LONGEST_AHEAD)
        return Schedule("rowcol", self.order, {"x": x, "r": self.r}, warps, stages, programs, self.deferred,
                        hoist_invariants=hoists)


def _facts_of(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced_sets: list[frozenset[int]]) -> _Facts:
    row = frozenset(k for k, axis in enumerate(spec.axes) if axis.reduced)
    column = next(axes for axes in reduced_sets if axes != row)
    length = point_count(spec, row)
    deferred = frozenset(op for op, _ in spec.reductions if reduced_axes(spec, op) == column)
    sizes = [access.layout.dtype.itemsize for access in full_reads(spec, probed)]
    states, read, wide = REGISTER * (len(deferred) + len(spec.scans)), sum(sizes), sum(max(REGISTER, size) for size in sizes)
    along, across = (contiguous_bytes(spec, probed, accesses, axes) for axes in (row, column))
    return _Facts(
        order={"x": by_stride(probed, accesses, sorted(column)), "r": along_row(spec, probed, accesses, row)},
        rows=point_count(spec, column), length=length, deferred=deferred, read=read, held=states + read, wide=wide,
        ahead=bytes_read_along(probed, column, row), itemsize=accesses[0].layout.dtype.itemsize,
        instructions=instructions_along(probed, row, column),
        lies_across=is_mixed(along, across, MIXED_BESIDE_COLUMNS) or across > along, fills_across=across > along,
        beside=rows_beside_columns(length, read=read, held=wide, states=states, in_parts=may_be_in_parts(spec, deferred)))


def _heavy(facts: _Facts) -> Schedule:
    """Return a schedule of as many warps as compute a row that is not read but computed, as that of all pairs is.

    A processor runs as many as a program may have at least. Their gradients take 0.62 to 0.69 of the time of four warps.
    """
    warps = min(facts.r // (LANES * EVEN_POINTS), MOST_WARPS)
    return facts.schedule(1, warps, max(MOST_WARPS // warps, 2), 3)


def _across(facts: _Facts) -> Schedule:
    """Return a schedule of tiles with enough rows beside one another for what is contiguous across them.

    Where most is, they fill sectors of it: the gradient of a layer norm over 192 and 384 channels of images takes 0.6.
    """
    if LEAST_FILLED <= facts.r <= SHORT and facts.fills_across and facts.rows >= FEWEST:
        x = SECTOR // min(facts.itemsize, SECTOR)
        warps = clamp(x * facts.r // (OF_WARP if facts.r == SHORT else 2 * OF_WARP), 4, MOST_WARPS)
        return replace(facts.schedule(x, warps, MOST_WARPS // warps, 1), loads_next=True)
    x = min(clamp(facts.most // 2, LEAST_ACROSS, MOST_ACROSS), facts.most)
    if LEAST_HALVED <= facts.r <= SHORT and facts.rows >= FEWEST:
        ahead = facts.schedule(x // 2, max(facts.warps_for(x) // 2, 1), clamp(facts.steps(x // 2) // STEPS, 2, 4), 3)
    else:
        ahead = facts.schedule(x, facts.warps_for(x), 2, 3)
    return ahead if ahead.stages == 3 else facts.schedule(x, 4, 4, 1)


def _is_alone(facts: _Facts) -> bool:
    """Return whether a warp or two hold rows alone: they wait for no others at the end of a row."""
    if facts.r <= ALONE:
        return facts.rows >= FEWEST
    return facts.r <= SHORT and facts.rows >= (FEWEST if facts.read <= FEW_BYTES else FEWEST_OF_MUCH)


def _alone(facts: _Facts) -> Schedule:
    """Return a schedule of short rows, some of which a warp or two hold."""
    x, warps = max(ALONE // facts.r, 2), max(facts.r // ALONE, 1)
    steps = facts.steps(x)
    if steps >= MANY_STEPS:
        return facts.schedule(max(2 * ALONE // facts.r, 2), warps, 12 // warps, 3)
    return facts.schedule(x, warps, clamp(steps // FEWEST_STEPS, 2, 6), 3)


def _long(facts: _Facts) -> Iterator[Schedule]:
    """Yield schedules of long rows: the next one on its way to registers or to shared memory, or read again."""
    if facts.beside is RowsBeside.NEXT and 2 * facts.length * (facts.held + facts.wide) <= MOST_HELD:
        yield replace(facts.schedule(1, 4, 2, 1), loads_next=True)
    elif facts.beside in (RowsBeside.NEXT, RowsBeside.AGAIN):
        again = facts.beside is RowsBeside.AGAIN
        part = next((part for part in PARTS if -facts.length % part <= MOST_IDLE * facts.length), PARTS[-1])
        yield replace(facts.schedule(1, 16 if again and facts.length >= WIDE_AGAIN else 8, 1, 1), block={"x": 1, "r": part},
                      parts=-(-facts.length // part), loads_next=True, reads_again=again, hoist_invariants=False)
    if facts.r >= LONG_BESIDE_COLUMNS:  # two programs of few warps, if these hold a row, or one, with more on their way
        holds = facts.r == LONG_BESIDE_COLUMNS or facts.length * facts.held < LIGHT
        yield facts.schedule(1, 4, 2, 3) if holds else facts.schedule(1, 8, 1, 3)
