"""Chooses how a spec becomes kernels: the class, which tile dimension walks which axes, tile sizes, warps.

A first, dry run of the emitter tells what is read and written where; the order of axes follows the memory layout of the
largest access, so that neighbouring lanes touch neighbouring elements.

Worked example: a row softmax over ``bfloat16[8192, 4096]`` is scheduled ``persistent``: ``x`` walks the rows, ``r`` the
4096 elements, one row a program, 4 warps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.ir import Size, Spec, references
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.online import find
from dynafuse.lowering.triton.reduction_passes import levels, passes, runs_along
from dynafuse.ops import Value
from dynafuse.ops.symbols import with_symbols_at

UNKNOWN = 4096  # stands for a size that is only known at run time
PROCESSORS = 132  # programs that fill a device of today; only a granularity, not a limit
LONGEST_PERSISTENT = 32768  # elements of a row that fit in a program's registers, when one tensor is read along it
LONGEST_HELD = 16384  # elements of a row up to which holding it is better than reading it twice
SPLIT_ABOVE = 2048  # elements of a row from which splitting it over programs pays when rows are few
LONG_ROW = 16384  # elements from which on fewer warps with more registers each are faster
COLUMN_PROGRAMS = 256  # columns per program's share of the device: a program of 64 has few loads in flight
LONGEST_AHEAD = 8192  # elements of a row up to which the next rows are loaded ahead
IN_FLIGHT = 32 << 10  # bytes per processor on their way from memory that keep it busy (Little's law: 4 TB/s × 1 µs / 132)
SHARED = 96 << 10  # bytes of shared memory that loads under way may take: less than any device of today has


@dataclass(frozen=True)
class Tiles:
    """The schedule of a spec. ``order`` lists each tile dimension's axes, outermost first."""

    kernel_class: str  # flat | tiled | persistent | looped | split | rowcol
    order: dict[str, tuple[int, ...]]
    block: dict[str, int]
    warps: int
    stages: int = 1  # tiles of a loop that are on their way from memory at a time
    splits: int = 1  # programs per row (split) or programs in all (rowcol)
    late: frozenset[int] = frozenset()  # reductions that a second kernel completes
    rereads: bool = False  # what all rows share is read again for every row, for want of registers

    def tile_of(self, count: int) -> list[str]:
        """The tile dimension of each axis."""
        found = {axis: tile for tile, axes in self.order.items() for axis in axes}
        return [found[axis] for axis in range(count)]


def estimate(size: Size) -> int:
    """A size, or what stands for it."""
    return size if isinstance(size, int) else max(1, with_symbols_at(size, UNKNOWN))


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def clamp(value: int, low: int, high: int) -> int:
    """``value``, not below ``low`` and not above ``high``."""
    return max(low, min(value, high))


def probe(spec: Spec) -> Emitter:
    """Emit everything once, without tiles, to see what is accessed where."""
    emitter = Emitter(spec, ["x"] * len(spec.axes))
    reductions = dict(spec.reductions)

    def dry(op: int) -> Value:
        operand = next(iter(emitter.calls[op][1].args.values()))
        emitter.operand(operand, emitter.index(reductions[op]))
        emitter.reduced[op] = Value(emitter.name("red"), spec.ops[op].dtype)
        return emitter.reduced[op]

    emitter.on_reduction = dry
    for store in spec.stores:
        index = emitter.index(store.dims)
        value = emitter.value(store.op, _output_index(spec, store.op, index))
        emitter.store("out", store.layout, index, value, frozenset(), False)
    return emitter


def _output_index(spec: Spec, op: int, index: tuple[sympy.Expr, ...]) -> tuple[sympy.Expr, ...]:
    """An op's own index from its store's (they differ where a copy stores into a larger rank)."""
    return index[len(index) - len(spec.ops[op].shape):]


def reduced_axes(spec: Spec, op: int) -> frozenset[int]:
    """The axes that a reduction of the spec closes over."""
    dims = next(dims for position, dims in spec.reductions if position == op)
    out = set(_surviving(spec, op, dims))
    return frozenset(axis for dim in dims for axis in dim if axis not in out)


def _surviving(spec: Spec, op: int, dims: tuple[tuple[int, ...], ...]) -> list[int]:
    from dynafuse.ops.overloads import overload
    from dynafuse.ops.reductions import reduced_dims

    target = overload(spec.ops[op].target)
    assert target is not None, spec.ops[op]
    gone = reduced_dims(dict(spec.ops[op].args), len(dims))
    return [axis for d, dim in enumerate(dims) if d not in gone for axis in dim]


def schedule(spec: Spec) -> Tiles:
    """The schedule of a spec: for a class of sizes the one of its typical size."""
    spec = spec.typical
    probed = probe(spec)
    accesses = sorted(probed.accesses, key=lambda a: -_weight(a))
    sets = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.reductions))
    if not sets:
        return _pointwise(spec, probed, accesses)
    if len(sets) == 1:
        return _rows(spec, probed, accesses, sets[0])
    return _rowcol(spec, probed, accesses, sets)


def _weight(access: Access) -> float:
    """What an access moves; a store counts a little more, since it cannot be served from a cache."""
    return math.prod(map(estimate, access.layout.shape)) * access.layout.dtype.itemsize * (1.01 if access.store else 1)


def strides(probed: Emitter, access: Access) -> list[int | None]:
    """How far apart neighbours along each axis are in an access; None where the index is not linear."""
    found: list[int | None] = []
    for axis in probed.axes:
        factor = access.offset.coeff(axis)
        rest = access.offset - factor * axis
        found.append(None if rest.has(axis) else with_symbols_at(factor, UNKNOWN))
    return found


def _ordered(probed: Emitter, accesses: Sequence[Access], axes: Sequence[int]) -> tuple[int, ...]:
    """Axes by falling stride in the largest access that runs along all of them, else in the largest at all."""
    every = [strides(probed, a) for a in accesses]
    complete = [s for s in every if all(s[k] for k in axes)]
    for candidate in (*complete, *every):
        if all(candidate[k] is not None for k in axes):
            return tuple(sorted(axes, key=lambda k: (-(candidate[k] or 0), k)))
    return tuple(axes)


def _count(spec: Spec, axes: Sequence[int]) -> int:
    return math.prod(estimate(spec.axes[k].size) for k in axes)


# ---------------------------------------------------------------------- pointwise


def _pointwise(spec: Spec, probed: Emitter, accesses: Sequence[Access]) -> Tiles:
    order = _ordered(probed, accesses, range(len(spec.axes)))
    cut = _transposed(spec, probed, accesses, order)
    if cut:
        return _tiled(spec, order, cut)
    total = _count(spec, order)
    block = clamp(power_of_two(total // (PROCESSORS * 8)), 128, 1024)
    return Tiles("flat", {"x": order}, {"x": min(block, power_of_two(total))}, 4 if block >= 512 else 2)


def _transposed(spec: Spec, probed: Emitter, accesses: Sequence[Access], order: tuple[int, ...]) -> int:
    """Where to cut the axes in two tile dimensions so that an access across them is contiguous too; 0 for nowhere."""
    if len(order) < 2 or _count(spec, order) < 64 * 64:
        return 0
    largest = _weight(accesses[0])
    for access in accesses:
        along = strides(probed, access)
        unit = [k for k in order if along[k] == 1]
        inner = order[order.index(unit[0]) + 1:] if unit else ()
        small = _count(spec, inner) < 8 or estimate(spec.axes[unit[0]].size) < 8 if unit else True
        if not small and 2 * _weight(access) >= largest and any(along[k] for k in inner):
            return order.index(unit[0]) + 1
    return 0


def _tiled(spec: Spec, order: tuple[int, ...], cut: int) -> Tiles:
    rows, columns = order[:cut], order[cut:]
    block = {"y": min(64, power_of_two(_count(spec, rows))), "x": min(64, power_of_two(_count(spec, columns)))}
    return Tiles("tiled", {"y": rows, "x": columns}, block, 8 if block["x"] * block["y"] >= 4096 else 4)


# ---------------------------------------------------------------------- reductions


def _whole(spec: Spec, probed: Emitter) -> list[Access]:
    """The reads that run along all axes: what a row kernel must hold in registers."""
    total = _count(spec, range(len(spec.axes)))
    return [a for a in probed.accesses if not a.store and math.prod(map(estimate, a.layout.shape)) >= total]


def _along(probed: Emitter, *axes: Iterable[int]) -> int:
    """Bytes per element of the reads that vary along some of each group of axes."""
    groups = [{probed.axes[k] for k in group} for group in axes]
    reads = (a for a in probed.accesses if not a.store and all(a.offset.free_symbols & group for group in groups))
    return sum(a.layout.dtype.itemsize for a in reads)


def _contiguous(probed: Emitter, accesses: Sequence[Access], axes: frozenset[int]) -> bool:
    """Whether the largest access is contiguous along one of ``axes``."""
    for access in accesses:
        unit = [k for k, s in enumerate(strides(probed, access)) if s == 1]
        if unit:
            return unit[0] in axes
    return True


def _dependent(spec: Spec, late: frozenset[int]) -> set[int]:
    """Ops that need a result of ``late``."""
    reached: set[int] = set()
    for position, op in enumerate(spec.ops):
        if any(ref.kind == "op" and ref.position in (reached | late) for ref in references(op.args)):
            reached.add(position)
    return reached


def splittable(spec: Spec, reduced: frozenset[int]) -> bool:
    """Whether rows may be split over programs: no store along the row, and no reduction, needs a complete row."""
    reductions = frozenset(op for op, _ in spec.reductions)
    late = _dependent(spec, reductions)
    along_row = [s for s in spec.stores if runs_along(s, reduced)]
    return not any(s.op in late for s in along_row) and not any(op in late for op in reductions)


def _rows(spec: Spec, probed: Emitter, accesses: Sequence[Access], reduced: frozenset[int]) -> Tiles:
    kept = [k for k in range(len(spec.axes)) if k not in reduced]
    order = {"x": _ordered(probed, accesses, kept), "r": _ordered(probed, accesses, sorted(reduced))}
    rows, length = _count(spec, kept), _count(spec, sorted(reduced))
    static = all(isinstance(spec.axes[k].size, int) for k in reduced)
    inner = _contiguous(probed, accesses, reduced)
    programs = rows if inner else max(1, rows // COLUMN_PROGRAMS)
    live = max(1, len(_whole(spec, probed)))
    read = _along(probed, reduced) if static else SHARED  # unknown strides: nothing is loaded ahead
    if programs < 2 * PROCESSORS and length >= SPLIT_ABOVE and splittable(spec, reduced):
        return _split(spec, order, rows, length, inner, read)
    if not inner:
        return _columns(order, rows, length)
    online = find(spec)
    longest = LONGEST_HELD if passes(spec, levels(spec, online), order["r"]) <= 2 else LONGEST_PERSISTENT
    if static and length <= min(longest, LONGEST_PERSISTENT // (2 * power_of_two(live // 2) if live > 1 else 1)):
        return _persistent(order, rows, length, live)
    return _online(spec, order, length, live, read) if online else _looped(order, rows, length, live)


def _ahead(bytes_: int, most: int) -> int:
    """Tiles of so many bytes that a loop loads ahead."""
    return clamp(SHARED // max(bytes_, 1), 1, most)


def _persistent(order: dict[str, tuple[int, ...]], rows: int, length: int, live: int) -> Tiles:
    """Rows of few elements go several to a program, so that it has enough loads in flight."""
    r = power_of_two(length)
    x = clamp(min(4096 // r, rows // PROCESSORS), 1, 128) if r < 4096 else 1
    x = power_of_two(x + 1) // 2  # rounded down to a power of two
    per_lane = clamp(power_of_two(64 // live), 16, 64 if r >= LONG_ROW else 32)
    return Tiles("persistent", order, {"x": x, "r": r}, clamp(power_of_two(x * r // (32 * per_lane)), 1, 16))


def _online(spec: Spec, order: dict[str, tuple[int, ...]], length: int, live: int, read: int) -> Tiles:
    """Every step ends in two sums over the tile: few steps, and few warps to agree on them."""
    stores = any(runs_along(store, order["r"]) for store in spec.stores)
    r = clamp(power_of_two(length), 128, 4096 if stores else 8192)
    return Tiles("looped", order, {"x": 1, "r": r}, 4 if live == 1 else 8, _ahead(r * read, 3) if stores else 1)


def _columns(order: dict[str, tuple[int, ...]], rows: int, length: int) -> Tiles:
    x = min(64, power_of_two(rows))
    return Tiles("looped", order, {"x": x, "r": min(2048 // x, power_of_two(length))}, 4)


def _looped(order: dict[str, tuple[int, ...]], rows: int, length: int, live: int) -> Tiles:
    """A program that loops over one tensor has enough in flight with few lanes; the more tensors, the more lanes share."""
    r = min(2048 if live == 1 else 4096, power_of_two(length))
    x = 1 if r >= 512 else clamp(512 // r, 1, power_of_two(rows))
    return Tiles("looped", order, {"x": x, "r": r}, 16 if r >= 4096 else 8 if r >= 2048 else 4)


def _split(
    spec: Spec, order: dict[str, tuple[int, ...]], rows: int, length: int, inner: bool, read: int
) -> Tiles:
    """Many small programs: each has few loads in flight, so that many must run side by side, or each must load ahead."""
    x = 1 if inner else min(64, power_of_two(rows))
    r = min((4096 if inner else 2048) // x, power_of_two(length))
    programs = -(-rows // x)
    wanted = power_of_two((4 if inner else 16) * PROCESSORS // programs)
    splits = min(clamp(wanted, 2, 256), -(-length // r))
    tile = x * r * read
    wanting = -(-IN_FLIGHT * PROCESSORS // max(programs * splits * tile, 1))
    stages = _ahead(tile, 4 if inner else clamp(wanting, 1, 4))
    return Tiles("split", order, {"x": x, "r": r}, 4, stages, splits, frozenset(op for op, _ in spec.reductions))


def _rowcol(spec: Spec, probed: Emitter, accesses: Sequence[Access], sets: list[frozenset[int]]) -> Tiles:
    row = frozenset(k for k, axis in enumerate(spec.axes) if axis.reduced)
    column = next(s for s in sets if s != row)
    order = {"x": _ordered(probed, accesses, sorted(column)), "r": _ordered(probed, accesses, sorted(row))}
    rows, length = _count(spec, sorted(column)), _count(spec, sorted(row))
    r = power_of_two(length)
    x = clamp(4096 // r, 1, power_of_two(rows)) if r < 4096 else 1
    late = frozenset(op for op, _ in spec.reductions if reduced_axes(spec, op) == column)
    read = sum(a.layout.dtype.itemsize for a in _whole(spec, probed))
    held = x * r * (4 * len(late) + read)
    warps = 4 if held <= 48 << 10 else 8 if held <= 160 << 10 else 16
    stages = _ahead(x * r * _along(probed, column, row), 3) if r <= LONGEST_AHEAD else 1
    programs = min(-(-rows // x), PROCESSORS * (2 if warps == 4 else 1))
    return Tiles("rowcol", order, {"x": x, "r": r}, warps, stages, programs, late, r > LONGEST_AHEAD)
