"""What the schedule of a spec that reduces one set of axes depends on: its rows, and how they lie in memory.

Worked example: of ``sum(x, 0)`` of ``bfloat16[8192, 1024]`` there are 1024 rows of 8192 elements. What is contiguous lies
across them, so neighbouring lanes take neighbouring rows: ``lanes`` is ``x``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from dynafuse.ir import Spec, references
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.builder import recurrence_of, with_guests
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.tile_facts import LEAST_PLACES
from dynafuse.lowering.triton.tiles import (
    Schedule,
    along_row,
    are_known,
    by_stride,
    clamp,
    point_count,
    run_along,
    strides_of,
    traffic,
    vector_length,
    weight,
)
from dynafuse.ops import lookup
from dynafuse.ops.overloads import overload
from dynafuse.partition.kernel_class import LANES, PROCESSORS, REGISTER, SECTOR, combine_parts, counted, estimate, is_mixed

LONGEST_IN_LANE = 64  # elements of a row that a single lane may hold
SHARED_BYTES = 96 << 10  # shared memory that loads under way may take: less than any device of today has
MOST_WARPS = 16  # of a program
RESIDENT = 8 * PROCESSORS  # programs of four warps that run at a time: enough for the loads under way that memory wants
RESIDENT_WARPS = 64 * PROCESSORS  # that can run at a time
FEW_WARPS = 8 * PROCESSORS  # in all, below which a processor has too few to run while others wait
HEAVY_HELD = 60.0  # instructions per element from which on a lane has registers for fewer elements
MOST_SPLITS = 2048  # partial states of a row that the second kernel holds at a time
PARTS = (4096, 2048)  # elements of a part of a long row, of which eight warps load as many at a time as they can
COPIED = 8  # bytes to which rows have to be aligned for asynchronous copies to pay
MOST_REPEATED = 8  # times an element is read up to which that counts as reading memory
FUNCTIONS = 8  # arithmetic per element above which a scan calls functions: its code then takes as much as so many tensors


def full_reads(spec: Spec, probed: Emitter) -> list[Access]:
    """Return the reads of tensors that run along all axes: a row kernel holds their rows in registers."""
    total = point_count(spec, range(len(spec.axes)))
    return [access for access in _held_reads(probed) if math.prod(map(estimate, access.layout.shape)) >= total]


def _held_reads(probed: Emitter) -> list[Access]:
    """Return the reads; of the places of a window one, since what is made of them all is held, and not they."""
    reads = [access for access in probed.accesses if not access.is_store]
    places = Counter(access.tensor for access in reads)
    firsts = {access.tensor: access for access in reversed(reads)}
    return [access for access in reads if places[access.tensor] < LEAST_PLACES or access is firsts[access.tensor]]


def bytes_read_along(probed: Emitter, *axis_groups: Iterable[int]) -> int:
    """Return the bytes per element of the reads that vary along an axis of each group."""
    groups = [{probed.axes[k] for k in axes} for axes in axis_groups]
    return sum(access.layout.dtype.itemsize for access in probed.accesses
               if not access.is_store and all(access.offset.free_symbols & group for group in groups))


def instructions_along(probed: Probe, *axis_groups: Collection[int]) -> float:
    """Return the instructions per element of what varies along an axis of each group."""
    return sum(work.instructions for work in probed.work if all(not work.axes.isdisjoint(group) for group in axis_groups))


def contiguous_bytes(spec: Spec, probed: Emitter, accesses: Sequence[Access], axes: Collection[int]) -> float:
    """Return the bytes of the accesses whose neighbours in memory are neighbours along some axes, of a tensor all at most.

    Args:
        spec: The region.
        probed: Its probe.
        accesses: Accesses of that.
        axes: The axes.
    """
    moved: dict[str, float] = {}
    for access in accesses:
        if _fastest_axis(spec, probed, access) in axes:
            moved[access.tensor] = min(moved.get(access.tensor, 0.0) + traffic(spec, probed, access), weight(access))
    return sum(moved.values())


def _across_lanes(spec: Spec, probed: Emitter, accesses: Sequence[Access], row: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of a column with that one innermost along which most bytes are contiguous that lie across others.

    Lanes walk neighbouring columns, in whatever order those are walked. A tile then has whole sectors of what lies so.
    """
    contiguous = {k: contiguous_bytes(spec, probed, accesses, (k,)) for k in row}
    inner = max(row, key=lambda k: contiguous[k])
    return (*(k for k in row if k != inner), inner) if contiguous[inner] else row


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
    """Return whether rows may be split over programs: no store along the row, no reduction, needs a complete row, no scan
    what is before it."""
    if spec.scans:
        return False
    reductions = frozenset(op for op, _ in spec.reductions)
    dependent = _ops_that_need(spec, reductions)
    stored_along_row = [store.op for store in spec.stores if runs_along(store, reduced)]
    return dependent.isdisjoint(stored_along_row) and dependent.isdisjoint(reductions)


def may_be_in_parts(spec: Spec, deferred: Collection[int] = ()) -> bool:
    """Return whether rows may be computed part by part: what is made of whole ones combines parts.

    What a kernel overwrites it reads at the same places and nowhere else, so that no part is overwritten before it is read.

    Args:
        spec: The region.
        deferred: Its reductions of columns.
    """
    reductions = (lookup(overload(spec.ops[op].target)) for op, _ in spec.reductions if op not in deferred)
    return not spec.scans and combine_parts(reductions)


@dataclass(frozen=True)
class Rows:
    """What the schedule of a spec with one set of reduced axes depends on."""

    spec: Spec
    order: dict[str, tuple[int, ...]]
    rows: int
    length: int
    tensors: int  # how many are read along all axes, or scanned
    held: int  # registers for an element of each tensor that is read along rows and across them
    reads_along: int  # accesses that vary along the row
    reads_apart: int  # those of them, across rows as well, whose neighbours along the row are none in memory
    reads_of_rows: int  # accesses that vary across rows alone
    shares_along: bool  # whether something varies along the row that all rows share
    bytes_read: int  # per element, of what varies along the row
    bytes_of_rows: int  # those of them that vary across rows as well, which each row loads from memory
    itemsize: int  # of the largest access
    alignment: int  # bytes that the addresses of all tensors are multiples of
    states: int  # of all reductions together
    counts: bool  # whether a reduction has several states, all of which every element changes
    stores_along: int  # results that are stored along the row
    stores_late: int  # those of them that need the row's reductions, so that it is read again unless it is held
    instructions: float  # per element, of what varies along rows and across them
    flops: float  # per element, as the op table counts them, of all ops
    is_static: bool  # whether the length is known
    lanes: str  # the tile dimension along which most bytes are contiguous
    vector: int  # elements that a lane moves at most with one instruction
    is_uneven: bool  # whether elements of one byte are read along the row, and others of four bytes or more
    is_scattered: bool  # whether lanes move most bytes along the row an element at a time
    streams: bool  # whether something is read that is not repeated often: all else is read again from the cache
    along: float  # bytes that are contiguous along rows
    across: float  # bytes that are contiguous along what lies across them
    run: int  # rows beside one another that are neighbours in memory, for the largest access; 1 if none are
    is_in_parts: bool  # whether something is read only where a condition holds, such as a piece of a concatenation
    piece: int  # a divisor of where pieces of rows beside one another begin that are not computed alike; 0 without such
    block: int  # a divisor of the row, of which every multiple begins where what varies along outer axes changes; or 0

    @property
    def is_mixed(self) -> bool:
        """Return whether many bytes are contiguous along one of both, and many along the other one."""
        return is_mixed(self.along, self.across)

    @property
    def is_aligned(self) -> bool:
        """Return whether all rows begin where asynchronous copies may."""
        return math.gcd(self.length * self.itemsize, self.alignment) % COPIED == 0


def rows_of(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced: frozenset[int]) -> Rows:
    """Return what the schedule of a spec that reduces rows depends on.

    Args:
        spec: The region.
        probed: Its probe.
        accesses: Accesses of that, the largest first.
        reduced: The axes along which it reduces.
    """
    remaining = [k for k in range(len(spec.axes)) if k not in reduced]
    is_static = are_known(spec, reduced)
    rows, length = point_count(spec, remaining), point_count(spec, reduced)
    along, across = (contiguous_bytes(spec, probed, accesses, axes) for axes in (reduced, remaining))
    along, across = counted(along, across, rows * length)
    lanes = "x" if across > along else "r"
    row = along_row(spec, probed, accesses, reduced)
    if lanes == "x" and not spec.scans:
        row = _across_lanes(spec, probed, accesses, row)
    order = {"x": by_stride(probed, accesses, remaining), "r": row}
    reads = [access for access in probed.accesses if not access.is_store]
    vectors = {access: vector_length(spec, probed, access, order[lanes]) for access in probed.accesses
               if _varies(probed, access, reduced)}
    rules = [recurrence_of(spec, op) for op in with_guests(spec, [op for op, _ in spec.reductions])]
    late = _ops_that_need(spec, frozenset(op for op, _ in spec.reductions))
    return Rows(
        spec, order, rows, length,
        tensors=max(1, len(full_reads(spec, probed)) + sum(_weight_of_scan(spec, op) for op, _ in spec.scans)),
        held=max(1, sum(-(-access.layout.dtype.itemsize // REGISTER) for access in _held_reads(probed)
                        if _varies(probed, access, reduced) and _varies(probed, access, remaining))),
        reads_along=sum(_varies(probed, access, reduced) for access in reads),
        reads_apart=sum(_varies(probed, access, reduced) and _varies(probed, access, remaining)
                        and _fastest_axis(spec, probed, access) not in reduced for access in reads),
        reads_of_rows=sum(_varies(probed, access, remaining) and not _varies(probed, access, reduced) for access in reads),
        shares_along=any(_varies(probed, access, reduced) and not _varies(probed, access, remaining) for access in reads),
        bytes_read=bytes_read_along(probed, reduced) if is_static else SHARED_BYTES,  # of those nothing is loaded ahead
        bytes_of_rows=sum(access.layout.dtype.itemsize for access in reads
                          if _varies(probed, access, reduced) and _varies(probed, access, remaining)),
        itemsize=accesses[0].layout.dtype.itemsize,
        alignment=min(access.layout.alignment for access in accesses),
        states=sum(len(rule.states) for rule in rules),
        counts=any(rule.counts for rule in rules),
        stores_along=sum(runs_along(store, reduced) for store in spec.stores),
        stores_late=sum(store.op in late and runs_along(store, reduced) for store in spec.stores),
        flops=sum(row.flops_in(call) for row, call in probed.calls),
        instructions=instructions_along(probed, reduced, *([remaining] if remaining else [])),
        is_static=is_static,
        lanes=lanes,
        vector=max(vectors.values(), default=1),
        is_uneven=_is_uneven(access for access in vectors if not access.is_store),
        is_scattered=2 * sum(traffic(spec, probed, access) for access, vector in vectors.items()
                             if vector == 1 and not _is_repeated(spec, probed, access, order[lanes])) >= (
            sum(traffic(spec, probed, access) for access in vectors)),
        streams=MOST_REPEATED * max((math.prod(map(estimate, access.layout.shape)) for access in reads), default=0)
        >= point_count(spec, range(len(spec.axes))),
        along=along,
        across=across,
        run=run_along(spec, strides_of(probed, accesses[0]), order["x"])[0],
        is_in_parts=any(access.masks for access in reads),
        piece=_even_piece(spec, probed, order["x"]),
        block=_even_block(spec, probed, order["r"]),
    )


def _is_repeated(spec: Spec, probed: Probe, access: Access, axes: Sequence[int]) -> bool:
    """Return whether several lanes beside each other read the same, and those beside them its neighbours, if any."""
    strides = strides_of(probed, access)
    inner = [k for k in axes if estimate(spec.axes[k].size) > 1]
    if not inner or strides[inner[-1]] != 0:
        return False
    return estimate(spec.axes[inner[-1]].size) >= LANES or run_along(spec, strides, [k for k in inner if strides[k]])[0] > 1


def _is_uneven(accesses: Iterable[Access]) -> bool:
    """Return whether some accesses are of one byte an element, and some of four or more."""
    sizes = {access.layout.dtype.itemsize for access in accesses}
    return 1 in sizes and max(sizes) >= REGISTER


def _weight_of_scan(spec: Spec, op: int) -> int:
    """Return how many tensors take as many registers as a scan; of one that calls functions the code is larger still."""
    row = lookup(overload(spec.ops[op].target))
    assert row is not None
    registers = -(-recurrence_of(spec, op).element_dtype.itemsize // REGISTER)
    return registers * FUNCTIONS if row.flops > FUNCTIONS else registers


def _varies(probed: Probe, access: Access, axes: Iterable[int]) -> bool:
    """Return whether the index of an access depends on one of ``axes``, by way of loaded indices too."""
    return not probed.axes_along(access.offset).isdisjoint(axes)


def _even_piece(spec: Spec, probed: Probe, across: tuple[int, ...]) -> int:
    """Return a divisor of where pieces begin that conditions on one axis across the rows tell apart; 0 without such."""
    begins = []
    for axes, bound, _ in probed.conditions().values():
        if len(axes) == 1 and axes <= {*across} and bound:
            inner = [spec.axes[k].size for k in across[across.index(*axes) + 1:]]
            begins += [bound * math.prod(map(estimate, inner))] if all(isinstance(size, int) for size in inner) else []
    return math.gcd(*begins)


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


def stages_within(tile_bytes: int, most: int) -> int:
    """Return how many tiles of so many bytes are under way, at most ``most``: of these one has left shared memory."""
    return clamp(1 + SHARED_BYTES // max(tile_bytes, 1), 1, most)


def with_running_states(facts: Rows, schedule: Schedule) -> Schedule:
    """Return a schedule whose loop keeps a state per element that a lane moves at once, not one per element of its tile."""
    is_copied_for_stores = schedule.stages > 1 and facts.stores_along  # in a layout in which lanes hold other elements
    if schedule.schedule_class not in ("looped", "split") or is_copied_for_stores:
        return schedule
    moved = LANES * schedule.warps * facts.vector  # elements
    running = max(moved // (schedule.block["x"] if schedule.lanes == "x" else 1), 1)
    return replace(schedule, running=running) if running <= schedule.block["r"] else schedule


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
