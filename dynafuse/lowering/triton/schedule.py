"""Chooses how a spec becomes kernels: the class, which tile dimension walks which axes, tile sizes, warps.

A dry run of the emitter shows what is read and written where. The order of axes follows the memory layout of the largest
access, so that neighbouring lanes touch neighbouring elements.

Worked example: a row softmax over ``bfloat16[8192, 4096]`` is scheduled ``persistent``: ``x`` walks the rows, ``r`` the
4096 elements, one row a program, 4 warps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynafuse.ir import Size, Spec, references
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.online import find_online_sums
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before, runs_along
from dynafuse.ops import Value
from dynafuse.ops.reductions import reduced_dims
from dynafuse.ops.symbols import with_symbols_at

ASSUMED_SIZE = 4096  # stands for a size that is only known at run time
PROCESSORS = 132  # programs that fill a device of today; only a granularity, not a limit
LONGEST_PERSISTENT = 32768  # elements of a row that fit in a program's registers, when one tensor is read along it
LONGEST_HELD = 16384  # elements of a row up to which holding it is better than reading it twice
SPLIT_ABOVE = 2048  # elements of a row from which splitting it over programs pays when rows are few
LONG_ROW = 16384  # elements from which on fewer warps with more registers each are faster
COLUMN_PROGRAMS = 256  # columns per program's share of the device: a program of 64 has few loads in flight
LONGEST_AHEAD = 8192  # elements of a row up to which the next rows are loaded ahead
IN_FLIGHT = 32 << 10  # bytes per processor on their way from memory that keep it busy (Little's law: 4 TB/s × 1 µs / 132)
SHARED_BYTES = 96 << 10  # shared memory that loads under way may take: less than any device of today has


@dataclass(frozen=True)
class Schedule:
    """How a spec becomes kernels. The keys of ``order`` and ``block`` are its tile dimensions."""

    kernel_class: str  # flat | tiled | persistent | looped | split | rowcol
    order: dict[str, tuple[int, ...]]  # the axes that each tile dimension walks, outermost first
    block: dict[str, int]  # the points of a tile along each tile dimension
    warps: int
    stages: int = 1  # tiles of a loop that are on their way from memory at a time
    splits: int = 1  # programs per row (split) or programs in all (rowcol)
    deferred: frozenset[int] = frozenset()  # reductions that a second kernel completes
    hoist_invariants: bool = True  # whether what all rows share is read once before the loop, and held in registers

    def tile_of(self, axis_count: int) -> list[str]:
        """Return the tile dimension that walks each axis."""
        tile_of_axis = {axis: tile for tile, axes in self.order.items() for axis in axes}
        return [tile_of_axis[axis] for axis in range(axis_count)]


def estimate(size: Size) -> int:
    """Return a size, with :data:`ASSUMED_SIZE` for each of its symbols, but at least 1."""
    return size if isinstance(size, int) else max(1, with_symbols_at(size, ASSUMED_SIZE))


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def clamp(value: int, low: int, high: int) -> int:
    """Return ``value``, raised to ``low`` or lowered to ``high``."""
    return max(low, min(value, high))


def probe(spec: Spec) -> Emitter:
    """Return an emitter that has emitted everything once, without tiles: its accesses are the kernel's."""
    emitter = Emitter(spec, ["x"] * len(spec.axes))
    reductions = dict(spec.reductions)

    def load_operand(op: int) -> Value:
        operand = next(iter(emitter.calls[op][1].args.values()))
        emitter.operand(operand, emitter.index(reductions[op]))
        emitter.reduced[op] = Value(emitter.new_name("red"), spec.ops[op].dtype)
        return emitter.reduced[op]

    emitter.on_reduction = load_operand
    for store in spec.stores:
        emitter.store_op("out", store)
    return emitter


def reduced_axes(spec: Spec, op: int) -> frozenset[int]:
    """Return the axes that a reduction of the spec closes over."""
    operand_dims = dict(spec.reductions)[op]
    reduced = reduced_dims(dict(spec.ops[op].args), len(operand_dims))
    remaining = {axis for d, axes in enumerate(operand_dims) if d not in reduced for axis in axes}
    return frozenset(axis for axes in operand_dims for axis in axes if axis not in remaining)


def choose_schedule(spec: Spec) -> Schedule:
    """Return the schedule of a spec; for a class of sizes that of its typical size."""
    spec = spec.typical
    probed = probe(spec)
    accesses = sorted(probed.accesses, key=lambda access: -_weight(access))
    reduced_sets = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.reductions))
    if not reduced_sets:
        return _pointwise(spec, probed, accesses)
    if len(reduced_sets) == 1:
        return _rows(spec, probed, accesses, reduced_sets[0])
    return _rowcol(spec, probed, accesses, reduced_sets)


def _weight(access: Access) -> float:
    """Return the bytes that an access moves; a store counts a little more, since no cache can serve it."""
    return math.prod(map(estimate, access.layout.shape)) * access.layout.dtype.itemsize * (1.01 if access.is_store else 1)


def _strides(probed: Emitter, access: Access) -> list[int | None]:
    """Return how far apart neighbours along each axis are in an access, in elements; None where the index is not linear."""
    strides: list[int | None] = []
    for axis in probed.axes:
        factor = access.offset.coeff(axis)
        rest = access.offset - factor * axis
        strides.append(None if rest.has(axis) else with_symbols_at(factor, ASSUMED_SIZE))
    return strides


def _by_stride(probed: Emitter, accesses: Sequence[Access], axes: Sequence[int]) -> tuple[int, ...]:
    """Return axes by falling stride in the largest access that runs along all of them, else in the largest of all."""
    all_strides = [_strides(probed, access) for access in accesses]
    complete = [strides for strides in all_strides if all(strides[k] for k in axes)]
    for strides in (*complete, *all_strides):
        if all(strides[k] is not None for k in axes):
            return tuple(sorted(axes, key=lambda k: (-(strides[k] or 0), k)))
    return tuple(axes)


def _point_count(spec: Spec, axes: Iterable[int]) -> int:
    return math.prod(estimate(spec.axes[k].size) for k in axes)


# ---------------------------------------------------------------------- pointwise


def _pointwise(spec: Spec, probed: Emitter, accesses: Sequence[Access]) -> Schedule:
    order = _by_stride(probed, accesses, range(len(spec.axes)))
    cut = _transposed_cut(spec, probed, accesses, order)
    if cut:
        return _tiled(spec, order, cut)
    total = _point_count(spec, order)
    block = clamp(power_of_two(total // (PROCESSORS * 8)), 128, 1024)
    return Schedule("flat", {"x": order}, {"x": min(block, power_of_two(total))}, 4 if block >= 512 else 2)


def _transposed_cut(spec: Spec, probed: Emitter, accesses: Sequence[Access], order: tuple[int, ...]) -> int:
    """Return where to cut the axes in two tile dimensions so that a large access across them is contiguous too; else 0."""
    if len(order) < 2 or _point_count(spec, order) < 64 * 64:
        return 0
    largest = _weight(accesses[0])
    for access in accesses:
        strides = _strides(probed, access)
        contiguous = next((axis for axis in order if strides[axis] == 1), None)
        if contiguous is None:
            continue
        cut = order.index(contiguous) + 1
        inner = order[cut:]
        is_long = _point_count(spec, inner) >= 8 and estimate(spec.axes[contiguous].size) >= 8
        if is_long and 2 * _weight(access) >= largest and any(strides[axis] for axis in inner):
            return cut
    return 0


def _tiled(spec: Spec, order: tuple[int, ...], cut: int) -> Schedule:
    rows, columns = order[:cut], order[cut:]
    block = {"y": min(64, power_of_two(_point_count(spec, rows))), "x": min(64, power_of_two(_point_count(spec, columns)))}
    return Schedule("tiled", {"y": rows, "x": columns}, block, 8 if block["x"] * block["y"] >= 4096 else 4)


# ---------------------------------------------------------------------- reductions


def _full_reads(spec: Spec, probed: Emitter) -> list[Access]:
    """Return the reads of tensors that run along all axes: a row kernel holds their rows in registers."""
    total = _point_count(spec, range(len(spec.axes)))
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
        contiguous = [k for k, stride in enumerate(_strides(probed, access)) if stride == 1]
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
    order = {"x": _by_stride(probed, accesses, remaining), "r": _by_stride(probed, accesses, sorted(reduced))}
    rows, length = _point_count(spec, remaining), _point_count(spec, reduced)
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
    order = {"x": _by_stride(probed, accesses, sorted(column)), "r": _by_stride(probed, accesses, sorted(row))}
    rows, length = _point_count(spec, column), _point_count(spec, row)
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
