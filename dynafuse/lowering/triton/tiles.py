"""What schedules are made of: the value itself, sizes as numbers, and how accesses walk the axes of a spec.

Worked example: in ``x + y.t()`` over ``[8, 4]`` the axes of ``x`` have strides 4 and 1, those of ``y.t()`` 1 and 8;
``by_stride`` puts axis 0 before axis 1, as the first of the two equally large accesses has them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.fx import UNKNOWN_SIZE
from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.probe import Probe
from dynafuse.ops import Value
from dynafuse.ops.reductions import reduced_dims
from dynafuse.ops.symbols import with_symbols_at
from dynafuse.partition.kernel_class import estimate


@dataclass(frozen=True)
class Schedule:
    """How a spec becomes kernels. The keys of ``order`` and ``block`` are its tile dimensions.

    As text ``tiled y=0/64 x=1,2/32 w4 s1 p1`` walks axis 0 in tiles of 64, axes 1 and 2 in tiles of 32, by 4 warps, with one
    stage and one program a row; ``1*4`` walks axis 1 in steps of four points, all of which one lane computes.
    """

    schedule_class: str  # flat | tiled | persistent | looped | split | rowcol
    order: dict[str, tuple[int, ...]]  # the axes that each tile dimension walks, outermost first
    block: dict[str, int]  # the points of a tile along each tile dimension
    warps: int
    stages: int = 1  # tiles of a loop that are on their way from memory to shared memory at a time
    splits: int = 1  # programs per row (split) or programs in all (rowcol)
    deferred: frozenset[int] = frozenset()  # reductions that a second kernel completes
    hoist_invariants: bool = True  # whether what all rows share is read once before the loop, and held in registers
    loads_early: bool = False  # whether what is read along rows is loaded before rows are first reduced
    loads_next: bool = False  # whether the next rows of a loop are on their way to registers while rows are computed
    reads_again: bool = False  # whether rows are read again once they are reduced, instead of held in registers
    parts: int = 1  # tiles along a row, beside one another
    lanes: str = "r"  # of a tile with rows, the dimension along which neighbouring lanes lie
    lanes_first: bool = False  # whether that is the tile's first dimension, not its last
    cuts: tuple[int, ...] = ()  # where tiles along ``x`` begin anew, of one axis
    register_tile: tuple[tuple[int, int], ...] = ()  # axes of which a lane computes several points, and how many
    running: int = 0  # along the row, the states of a loop: a tile is combined to these first; 0 for one per element

    def __str__(self) -> str:
        steps = {axis: f"{axis}*{points}" for axis, points in self.register_tile}
        axes = " ".join(f"{tile}={','.join(steps.get(axis, str(axis)) for axis in order)}/{self.block[tile]}"
                        for tile, order in self.order.items())
        axes += "".join(f"|{cut}" for cut in self.cuts)
        axes += f"x{self.parts}" if self.parts > 1 else ""
        ahead = "n" * self.loads_next + "a" * self.reads_again
        return f"{self.schedule_class} {axes} w{self.warps} s{self.stages}{ahead} p{self.splits}"

    @property
    def fills_registers(self) -> bool:
        """Return whether few warps suffice, with many registers each: for rows, windows, or tiles on their way."""
        return self.schedule_class in ("persistent", "rowcol") or self.stages > 1 or bool(self.register_tile)

    def cuts_along(self, tile: str) -> tuple[int, ...]:
        """Return where tiles along a dimension begin anew, beside at its begin."""
        return self.cuts if tile == "x" else ()

    def tile_of(self, axis_count: int) -> list[str]:
        """Return the tile dimension that walks each axis."""
        tile_of_axis = {axis: tile for tile, axes in self.order.items() for axis in axes}
        return [tile_of_axis[axis] for axis in range(axis_count)]


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def clamp(value: int, low: int, high: int) -> int:
    """Return a number, raised or lowered to the nearest one in a range.

    Args:
        value: The number.
        low, high: The range, both included; the lower end wins if it is the larger.
    """
    return max(low, min(value, high))


def probe(spec: Spec, register_tile: Iterable[tuple[int, int]] = ()) -> Probe:
    """Return an emitter that has emitted everything once, with a tile dimension per axis: its accesses are the kernel's.

    Args:
        spec: The region; of a register tile, in steps of that.
        register_tile: How many points a lane computes along which axes, if not one.
    """
    emitter = Probe(spec)
    emitter.register_tile = dict(register_tile)
    emitter.loops = not spec.of_rows
    dims = dict(spec.of_rows)

    def load_operand(op: int, tiles: frozenset[str] = frozenset()) -> Value:
        operand = next(iter(emitter.calls[op][1].args.values()))
        emitter.operand(operand, emitter.index(dims[op]))
        return emitter.keep_reduced(op, Value(emitter.new_name("red"), spec.ops[op].dtype, tiles))

    def load_scanned(op: int) -> Value:
        return load_operand(op, frozenset().union(*map(emitter.tiles, emitter.index(dims[op]))))

    emitter.on_reduction, emitter.on_scan = load_operand, load_scanned
    for _ in emitter.register_points():
        for k, store in enumerate(spec.stores):
            emitter.store_op(f"out{k}", store)
    return emitter


def reduced_axes(spec: Spec, op: int) -> frozenset[int]:
    """Return the axes that a reduction or a scan of the spec closes over."""
    operand_dims = dict(spec.of_rows)[op]
    reduced = reduced_dims(dict(spec.ops[op].args), len(operand_dims))
    remaining = {axis for d, axes in enumerate(operand_dims) if d not in reduced for axis in axes}
    return frozenset(axis for axes in operand_dims for axis in axes if axis not in remaining)


def weight(access: Access) -> float:
    """Return the bytes that an access moves; a store counts a little more, since no cache can serve it."""
    return math.prod(map(estimate, access.layout.shape)) * access.layout.dtype.itemsize * (1.01 if access.is_store else 1)


def traffic(spec: Spec, probed: Emitter, access: Access) -> float:
    """Return the bytes that an access moves, of a slice those of the slice; a store counts a little more.

    Args:
        spec: The region.
        probed: Its probe.
        access: An access of that.
    """
    whole = weight(access)
    axes = [k for k, axis in enumerate(probed.axes) if access.offset.has(axis)]
    others = access.offset.free_symbols - set(probed.axes)
    if any(str(symbol) not in spec.symbols for symbol in others):  # it depends on values that are loaded
        return whole
    return min(whole, point_count(spec, axes) * access.layout.dtype.itemsize * (1.01 if access.is_store else 1))


def strides_of(probed: Emitter, access: Access) -> list[int | None]:
    """Return how far apart neighbours along each axis are in an access, in elements; None where the index is not linear."""
    return [stride_along(access.offset, axis) for axis in probed.axes]


def start_of(probed: Emitter, access: Access) -> sympy.Expr:
    """Return the offset of an access where all axes begin."""
    return access.offset.xreplace(dict.fromkeys(probed.axes, sympy.S.Zero))


@functools.lru_cache(maxsize=4096)
def stride_along(offset: sympy.Expr, axis: sympy.Symbol) -> int | None:
    """Return how far apart neighbours along an axis are at an offset, in elements; None where the offset is not linear."""
    factor = offset.coeff(axis)
    return None if (offset - factor * axis).has(axis) else with_symbols_at(factor, UNKNOWN_SIZE)


def vector_length(spec: Spec, probed: Emitter, access: Access, axes: Sequence[int]) -> int:
    """Return how many neighbours an access moves with one instruction of a lane; 1 if it is not known.

    Args:
        spec: The region.
        probed: Its probe.
        access: An access of that.
        axes: The axes that the neighbours lie along, outermost first.
    """
    strides = strides_of(probed, access)
    start = start_of(probed, access) if None not in strides else sympy.nan
    if not start.is_Integer:
        return 1
    run, inner = run_along(spec, strides, axes)
    others = [stride or 0 for k, stride in enumerate(strides) if k in inner or k not in axes]
    ends = [run] if inner else []  # where a run ends the next begins elsewhere
    return math.gcd(access.layout.alignment // access.layout.dtype.itemsize, int(start), *others, *ends) if run > 1 else 1


def run_along(spec: Spec, strides: Sequence[int | None], axes: Sequence[int]) -> tuple[int, list[int]]:
    """Return how many neighbours along axes, given outermost first, are so in memory, and the axes beyond them.

    Args:
        spec: The region.
        strides: How far apart neighbours along each of its axes are, in elements; None where that differs.
        axes: The axes.
    """
    run, inner = 1, list(axes)
    while inner and strides[inner[-1]] == run:
        run *= estimate(spec.axes[inner.pop()].size)
    return run, inner


def by_stride(probed: Probe, accesses: Sequence[Access], axes: Sequence[int]) -> tuple[int, ...]:
    """Return axes by falling stride in the largest access that runs along all of them, else in the largest of all.

    An axis along which an index is loaded counts with what the index counts: rows that are looked up are as far apart as
    rows are.

    Args:
        probed: The region's probe.
        accesses: Accesses of that, the largest first.
        axes: The axes; if no access tells their strides they stay in this order.
    """
    all_strides = [_strides_by_indices(probed, access) for access in accesses]
    complete = [strides for strides in all_strides if all(strides[k] for k in axes)]
    for strides in (*complete, *all_strides):
        if all(strides[k] is not None for k in axes):
            return tuple(sorted(axes, key=lambda k: (-(strides[k] or 0), k)))
    return tuple(axes)


def _strides_by_indices(probed: Probe, access: Access) -> list[int | None]:
    """Return what ``strides_of`` does, and along axes that only other indices vary along, how far those are apart."""
    strides = strides_of(probed, access)
    for index in access.offset.free_symbols - set(probed.axes):
        for axis in probed.axes_along(index):
            if strides[axis] == 0:
                strides[axis] = stride_along(access.offset, index)
    return strides


def along_row(spec: Spec, probed: Probe, accesses: Sequence[Access], reduced: Iterable[int]) -> tuple[int, ...]:
    """Return the axes of a row, outermost first: in the order of the dimension that is scanned, else by falling stride.

    Args:
        spec: The region.
        probed: Its probe.
        accesses: Accesses of that, the largest first.
        reduced: The axes.
    """
    if not spec.scans:
        return by_stride(probed, accesses, sorted(reduced))
    op, dims = spec.scans[0]
    (scanned,) = reduced_dims(dict(spec.ops[op].args), len(dims))
    return dims[scanned]


def point_count(spec: Spec, axes: Iterable[int]) -> int:
    """Return the number of points that some axes span together."""
    return math.prod(estimate(spec.axes[k].size) for k in axes)


def are_known(spec: Spec, axes: Iterable[int]) -> bool:
    """Return whether the sizes of some axes are known, and not only estimated."""
    return all(spec.axes[k].is_known and isinstance(spec.axes[k].size, int) for k in axes)


def values_per_tile(spec: Spec, order: Mapping[str, Sequence[int]], block: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield axes of which every block holds equally many values, with whole rows of what lies inside; and how many.

    Args:
        spec: The region.
        order: The axes that each tile dimension walks, outermost first.
        block: The points of a tile along each tile dimension.
    """
    for tile, axes in order.items():
        inner = 1
        for axis in reversed(axes):
            size = spec.axes[axis].size
            if inner % block[tile] == 0:
                yield axis, 1
            elif block[tile] % inner == 0 and isinstance(size, int) and size % (block[tile] // inner) == 0:
                yield axis, block[tile] // inner
            if not isinstance(size, int):
                break
            inner *= size
