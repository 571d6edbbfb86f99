"""Chooses how a spec becomes kernels: the class, which tile dimension walks which axes, tile sizes, warps.

A dry run of the emitter shows what is read and written where. The order of axes follows the memory layout of the largest
access, so that neighbouring lanes touch neighbouring elements.

Worked example: a row softmax over ``bfloat16[8192, 4096]`` is scheduled ``persistent``: ``x`` walks the rows, ``r`` the
4096 elements, one row a program, 4 warps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dynafuse.ir import Spec, references
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.online import find_online_sums
from dynafuse.lowering.triton.pointwise_schedule import schedule_pointwise
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before, runs_along
from dynafuse.lowering.triton.tiles import (
    PROCESSORS,
    Schedule,
    by_stride,
    clamp,
    estimate,
    point_count,
    power_of_two,
    probe,
    reduced_axes,
    strides_of,
    weight,
)

LONGEST_PERSISTENT = 32768  # elements of a row that fit in a program's registers, when one tensor is read along it
LONGEST_HELD = 16384  # elements of a row up to which holding it is better than reading it twice
SPLIT_ABOVE = 2048  # elements of a row from which splitting it over programs pays when rows are few
LONG_ROW = 16384  # elements from which on fewer warps with more registers each are faster
COLUMN_PROGRAMS = 256  # columns per program's share of the device: a program of 64 has few loads in flight
LONGEST_AHEAD = 8192  # elements of a row up to which the next rows are loaded ahead
IN_FLIGHT = 32 << 10  # bytes per processor on their way from memory that keep it busy (Little's law: 4 TB/s × 1 µs / 132)
SHARED_BYTES = 96 << 10  # shared memory that loads under way may take: less than any device of today has


def choose_schedule(spec: Spec) -> Schedule:
    """Return the schedule of a spec; for a class of sizes that of its typical size."""
    spec = spec.typical
    probed = probe(spec)
    accesses = sorted(probed.accesses, key=lambda access: -weight(access))
    reduced_sets = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.reductions))
    if not reduced_sets:
        return schedule_pointwise(spec, probed, accesses)
    if len(reduced_sets) == 1:
        return _rows(spec, probed, accesses, reduced_sets[0])
    return _rowcol(spec, probed, accesses, reduced_sets)


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


def _is_contiguous(probed: Emitter, accesses: Sequence[Access], axes: frozenset[int]) -> bool:
    """Return whether the largest access that is contiguous along an axis is so along one of ``axes``."""
    for access in accesses:
        contiguous = [k for k, stride in enumerate(strides_of(probed, access)) if stride == 1]
        if contiguous:
            return contiguous[0] in axes
    return True


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


def _rows(spec: Spec, probed: Emitter, accesses: Sequence[Access], reduced: frozenset[int]) -> Schedule:
    remaining = [k for k in range(len(spec.axes)) if k not in reduced]
    order = {"x": by_stride(probed, accesses, remaining), "r": by_stride(probed, accesses, sorted(reduced))}
    rows, length = point_count(spec, remaining), point_count(spec, reduced)
    is_static = all(isinstance(spec.axes[k].size, int) for k in reduced)
    is_contiguous = _is_contiguous(probed, accesses, reduced)
    programs = rows if is_contiguous else max(1, rows // COLUMN_PROGRAMS)
    tensors = max(1, len(_full_reads(spec, probed)))
    # With unknown strides nothing is loaded ahead.
    bytes_read = _bytes_read_along(probed, reduced) if is_static else SHARED_BYTES
    if programs < 2 * PROCESSORS and length >= SPLIT_ABOVE and splittable(spec, reduced):
        return _split(spec, order, rows, length, is_contiguous, bytes_read)
    if not is_contiguous:
        return _columns(order, rows, length)
    online_sums = find_online_sums(spec)
    passes = pass_count(spec, passes_before(spec, online_sums), order["r"])
    longest_held = LONGEST_HELD if passes <= 2 else LONGEST_PERSISTENT
    longest_in_registers = LONGEST_PERSISTENT // (2 * power_of_two(tensors // 2) if tensors > 1 else 1)
    if is_static and length <= min(longest_held, longest_in_registers):
        return _persistent(order, rows, length, tensors)
    if online_sums:
        return _online(spec, order, length, tensors, bytes_read)
    return _looped(order, rows, length, tensors)


def _stages(tile_bytes: int, most: int) -> int:
    """Return how many tiles of so many bytes a loop loads ahead, at most ``most``."""
    return clamp(SHARED_BYTES // max(tile_bytes, 1), 1, most)


def _persistent(order: dict[str, tuple[int, ...]], rows: int, length: int, tensors: int) -> Schedule:
    """Return a schedule that holds whole rows; several short ones per program, so that it has enough loads in flight."""
    r = power_of_two(length)
    x = clamp(min(4096 // r, rows // PROCESSORS), 1, 128) if r < 4096 else 1
    x = power_of_two(x + 1) // 2  # rounded down to a power of two
    elements_per_lane = clamp(power_of_two(64 // tensors), 16, 64 if r >= LONG_ROW else 32)
    return Schedule("persistent", order, {"x": x, "r": r}, clamp(power_of_two(x * r // (32 * elements_per_lane)), 1, 16))


def _online(spec: Spec, order: dict[str, tuple[int, ...]], length: int, tensors: int, bytes_read: int) -> Schedule:
    """Return a schedule of few steps and few warps: every step ends in two sums over the tile."""
    has_stores = any(runs_along(store, order["r"]) for store in spec.stores)
    r = clamp(power_of_two(length), 128, 4096 if has_stores else 8192)
    stages = _stages(r * bytes_read, 3) if has_stores else 1
    return Schedule("looped", order, {"x": 1, "r": r}, 4 if tensors == 1 else 8, stages)


def _columns(order: dict[str, tuple[int, ...]], rows: int, length: int) -> Schedule:
    x = min(64, power_of_two(rows))
    return Schedule("looped", order, {"x": x, "r": min(2048 // x, power_of_two(length))}, 4)


def _looped(order: dict[str, tuple[int, ...]], rows: int, length: int, tensors: int) -> Schedule:
    """Return a schedule with few lanes for one tensor, which keep enough loads in flight, and more for several."""
    r = min(2048 if tensors == 1 else 4096, power_of_two(length))
    x = 1 if r >= 512 else clamp(512 // r, 1, power_of_two(rows))
    return Schedule("looped", order, {"x": x, "r": r}, 16 if r >= 4096 else 8 if r >= 2048 else 4)


def _split(spec: Spec, order: dict[str, tuple[int, ...]], rows: int, length: int, is_contiguous: bool,
           bytes_read: int) -> Schedule:
    """Return a schedule of many small programs: each has few loads in flight, so many run side by side or load ahead."""
    x = 1 if is_contiguous else min(64, power_of_two(rows))
    r = min((4096 if is_contiguous else 2048) // x, power_of_two(length))
    row_programs = -(-rows // x)
    wanted_splits = power_of_two((4 if is_contiguous else 16) * PROCESSORS // row_programs)
    splits = min(clamp(wanted_splits, 2, 256), -(-length // r))
    tile_bytes = x * r * bytes_read
    wanted_stages = -(-IN_FLIGHT * PROCESSORS // max(row_programs * splits * tile_bytes, 1))
    stages = _stages(tile_bytes, 4 if is_contiguous else clamp(wanted_stages, 1, 4))
    return Schedule("split", order, {"x": x, "r": r}, 4, stages, splits, frozenset(op for op, _ in spec.reductions))


def _rowcol(spec: Spec, probed: Emitter, accesses: Sequence[Access], reduced_sets: list[frozenset[int]]) -> Schedule:
    row = frozenset(k for k, axis in enumerate(spec.axes) if axis.reduced)
    column = next(axes for axes in reduced_sets if axes != row)
    order = {"x": by_stride(probed, accesses, sorted(column)), "r": by_stride(probed, accesses, sorted(row))}
    rows, length = point_count(spec, column), point_count(spec, row)
    r = power_of_two(length)
    x = clamp(4096 // r, 1, power_of_two(rows)) if r < 4096 else 1
    deferred = frozenset(op for op, _ in spec.reductions if reduced_axes(spec, op) == column)
    bytes_read = sum(access.layout.dtype.itemsize for access in _full_reads(spec, probed))
    bytes_held = x * r * (4 * len(deferred) + bytes_read)
    warps = 4 if bytes_held <= 48 << 10 else 8 if bytes_held <= 160 << 10 else 16
    stages = _stages(x * r * _bytes_read_along(probed, column, row), 3) if r <= LONGEST_AHEAD else 1
    programs = min(-(-rows // x), PROCESSORS * (2 if warps == 4 else 1))
    return Schedule("rowcol", order, {"x": x, "r": r}, warps, stages, programs, deferred,
                    hoist_invariants=r <= LONGEST_AHEAD)
