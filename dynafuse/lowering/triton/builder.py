"""What the kernel classes share to build kernels: tile dimensions, reductions, stores, launches.

Worked example: ``tile_dimension(builder, "r", "0", 4096, axes, emitter)`` defines
``r = 0 + tl.arange(0, RBLOCK)[None, :]`` and ``r_mask = r < 4096``, of which :mod:`source` writes what the kernel uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from dynafuse.ir import ARRIVED, Classed, Launch, Size, Spec, Store, Workspace
from dynafuse.lowering.triton.aligned_sizes import ANY, in_two_forms, multiples_of
from dynafuse.lowering.triton.dependent import WAITS, prologue
from dynafuse.lowering.triton.draws import FOUR
from dynafuse.lowering.triton.early_loads import load_early
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.eviction import innermost, keep_what_is_loaded_again
from dynafuse.lowering.triton.filled_loads import fill_loads
from dynafuse.lowering.triton.overwrites import overwrites
from dynafuse.lowering.triton.pieces import Piece, end_text, pieces_of, start_text, tile_count
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.scopes import PER_PROGRAM, PER_STEP
from dynafuse.lowering.triton.source import TileDimension, divides_evenly, render
from dynafuse.lowering.triton.text import escape, size_text
from dynafuse.lowering.triton.tiles import Schedule, are_known, point_count, reduced_axes, values_per_tile
from dynafuse.ops import Index, Value, lookup
from dynafuse.ops.indexing_math import flatten
from dynafuse.ops.literals import triton_type
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import correction, reduced_dims
from dynafuse.ops.symbols import with_symbols_at

POINTER_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}

MOST_PROGRAMS = 65535
"""Programs along the second or third dimension of CUDA's grids; along the first there may be 2**31 - 1."""

PROGRAM, X_SIZE = "program", "x_size"
"""What functions are told: the number of the program along each dimension of a grid, how many points ``x`` walks."""

ROW_TILES = frozenset("xr")
"""The tile dimensions of kernels with reductions: ``x`` walks the rows, ``r`` the elements of a row."""


@dataclass
class KernelBuilder:
    """The kernels of one spec while they are built."""

    spec: Spec
    schedule: Schedule
    name: str
    round_like_eager: bool
    inside: bool = False  # whether its kernel is a function that is told its place in a grid, and the end of ``x``
    launches: list[Launch] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)

    def numel(self, tile: str) -> Size:
        """Return how many points a tile dimension walks."""
        return numel(self.spec, self.schedule.order.get(tile, ()))

    def loop_header(self, variable: str, begin: str, end: str, step: str) -> str:
        """Return the header of a loop, which loads ahead if the schedule has several stages.

        The loop's variable is wide enough for offsets: Triton takes a bare number for 32 bits, or for unsigned ones, of
        which a loop to 2**31 and more makes negative ones.

        Args:
            variable: The loop's variable.
            begin, end, step: The texts of its bounds, as of ``range``.
        """
        if self.spec.wide and begin.isdigit() and end.isdigit():
            begin, end = (f"tl.full([], {bound}, tl.int64)" for bound in (begin, end))
        bounds = f"{begin}, {end}, {step}"
        if self.schedule.stages == 1:
            return f"for {variable} in range({bounds}):"
        return f"for {variable} in tl.range({bounds}, num_stages={self.schedule.stages}):"

    def is_exact(self, tile: str, block: int) -> bool:
        """Return whether blocks of a tile dimension never reach beyond its end."""
        total = self.numel(tile)
        if self.schedule.cuts_along(tile):
            return all(piece.is_exact(block) for piece in self.pieces(tile))
        if isinstance(self.spec, Classed) and not isinstance(total, int):
            total = int(total.as_coeff_Mul()[0])  # a divisor of the number of points, whatever the size
        return block == 1 or (isinstance(total, int) and total % block == 0)

    def pieces(self, tile: str) -> list[Piece]:
        """Return the pieces that a tile dimension of a known size is cut into."""
        total = self.numel(tile)
        assert isinstance(total, int), total
        return pieces_of(total, self.schedule.cuts_along(tile), self.schedule.block[tile])

    def tile_count(self, tile: str) -> Size:
        """Return how many tiles there are along a dimension."""
        block, cuts, total = self.schedule.block[tile], self.schedule.cuts_along(tile), self.numel(tile)
        return tile_count(total, cuts, block) if isinstance(total, int) else block_count(total, block)

    def start(self, tile: str, program: str) -> str:
        """Return the text of the first point of a tile along a dimension, given that of the program's number."""
        if not self.schedule.cuts_along(tile):
            return f"{program} * {tile.upper()}BLOCK"
        return start_text(tile, program, self.pieces(tile), self.schedule.block[tile])

    def mask(self, tile: str) -> str | None:
        """Return the name of a tile dimension's mask; None if its blocks never reach beyond its end."""
        return None if self.is_exact(tile, self.schedule.block[tile]) else f"{tile}_mask"

    def even_axes(self, tile: str) -> Iterator[int]:
        """Yield the axes of a tile dimension that have one value all over a tile."""
        inner: Size = 1
        for axis in reversed(self.schedule.order[tile]):
            if divides_evenly(self.schedule.block[tile], inner):
                yield axis
            inner = inner * self.spec.axes[axis].size

    def deferred_reductions(self) -> list[int]:
        """Return the reductions that a second kernel completes, in order."""
        return [op for op, _ in self.spec.reductions if op in self.schedule.deferred]

    def is_of_lanes(self, tile: str) -> bool:
        """Return whether neighbouring lanes are meant to walk a tile dimension."""
        return len(self.schedule.order) == 1 or tile == ("x" if "y" in self.schedule.order else self.schedule.lanes)

    def tile_dim(self, tile: str) -> int:
        """Return which of two dimensions of a tile a tile dimension is: neighbouring lanes' is the last, or the first."""
        return int(self.is_of_lanes(tile) != self.schedule.lanes_first)

    def spread(self, tile: str) -> str:
        """Return the text of the index that lays points along a tile dimension's dimension; "" if it is the only one."""
        if len(self.schedule.order) == 1:
            return ""
        return "[None, :]" if self.tile_dim(tile) == 1 else "[:, None]"

    def tile_shape(self, x: str, *r: str) -> str:
        """Return the text of the shape of a tile of ``x`` by ``r`` points; ``r`` may be several dimensions."""
        return f"[{', '.join((x, *r) if self.tile_dim('r') == 1 else (*r, x))}]"

    def running_states(self, rule: Recurrence) -> int:
        """Return how many states of a reduction a loop over the row keeps along it."""
        is_combined_first = self.schedule.running and len(rule.states) == 1
        return self.schedule.running if is_combined_first else self.schedule.block["r"]


def numel(spec: Spec, axes: Sequence[int]) -> Size:
    """Return the number of points of some axes."""
    total: Size = 1
    for axis in axes:
        total = total * spec.axes[axis].size
    return total


class Asking(Emitter):
    """An emitter that finds out at which indices the points of a register tile want what loops add up."""

    def _looped(self, position: int, index: Index, steps: int) -> Value:
        self.awaited.setdefault(position, []).append(index)
        return Value(self.new_name(), self.calls[position][1].dtype, self._all_tiles - PER_STEP)


def make_emitter(builder: KernelBuilder, loop: str | None = None, tile_of: list[str] | None = None,
                 kind: type[Emitter] = Emitter) -> Emitter:
    """Return a new emitter for one kernel of the spec.

    Args:
        builder: The kernels of the spec.
        loop: The tile dimension that the kernel's loop walks, if it has one.
        tile_of: The tile dimension of each axis, if not the schedule's.
        kind: What it is.
    """
    schedule = builder.schedule
    emitter = kind(builder.spec, tile_of or schedule.tile_of(len(builder.spec.axes)), loop, builder.round_like_eager)
    emitter.hoist_invariants = schedule.hoist_invariants
    emitter.register_tile = dict(schedule.register_tile)
    emitter.eviction.beside = innermost(emitter.axes, (order for tile, order in schedule.order.items() if tile != "y"))
    emitter.tile_dims = {tile: builder.tile_dim(tile) for tile in ("yx" if "y" in schedule.order else "xr")}
    if tile_of is None:
        lanes = next(tile for tile in schedule.order if builder.is_of_lanes(tile))
        if builder.tile_dim(lanes) == 1 and schedule.block[lanes] % FOUR == 0:
            emitter.lanes = tuple(emitter.axes[axis] for axis in schedule.order[lanes])
        exact_tiles = (tile for tile, block in schedule.block.items() if builder.is_exact(tile, block))
        emitter.exact_tiles = PER_STEP.union(exact_tiles)
        if loop == "r":
            emitter.tile_of.update((emitter.axes[axis], PER_STEP) for axis in builder.even_axes("r"))
        emitter.tile_of.update((emitter.axes[axis], PER_PROGRAM) for tile in schedule.order if tile not in ("r", loop)
                               for axis in builder.even_axes(tile))
    if tile_of is None and (loop == "r" or not builder.spec.of_rows):  # elsewhere a branch might hold a reduction
        order = {"x": schedule.order["x"]} if loop == "r" else schedule.order
        counts = values_per_tile(builder.spec, order, schedule.block)
        emitter.values_per_tile = {emitter.axes[axis]: count for axis, count in counts}
        if schedule.cuts:
            (cut,) = schedule.order["x"]
            emitter.cuts = {emitter.axes[cut]: frozenset(schedule.cuts)}
    return emitter


def tile_dimension(builder: KernelBuilder, name: str, start: str, total: Size, axes: tuple[int, ...],
                   emitter: Emitter, in_loop: bool = False) -> TileDimension:
    """Return a tile dimension of a kernel.

    Args:
        builder: The kernels of the spec.
        name: ``x``, ``y`` or ``r``.
        start: The text of its first point; of a row in parts each begins at its own.
        total: How many points it walks.
        axes: The axes that it walks, outermost first.
        emitter: The kernel's emitter.
        in_loop: Whether it begins anew in every step of the loop.
    """
    parts = builder.schedule.parts if name == "r" else 1
    start = start if parts == 1 else f"{name}_base"
    cast = ".to(tl.int64)" if builder.spec.wide else ""
    zero = f" + tl.full([], 0, tl.int{64 if builder.spec.wide else 32})" if in_loop else ""  # a tensor for the interpreter
    points = f"tl.arange(0, {name.upper()}BLOCK){cast}{builder.spread(name)}"
    define = [f"{name} = {start} + {points}", f"{name}_first = {start}{zero}"]
    is_even = in_loop or any(emitter.tile_of[emitter.axes[k]] == PER_PROGRAM for k in axes)
    block = builder.schedule.block[name] if is_even else 0
    end = X_SIZE if builder.inside and name == "x" else size_text(total)
    if builder.schedule.cuts_along(name):
        define = [f"{name}_first = {start}", f"{name} = {name}_first + {points}"]
        end = end_text(name, builder.pieces(name))
    define += [f"{name}_mask = {name} < {end}", f"{name}_zero = {name} * 0"]
    is_joined = builder.schedule.stages > 1 and not builder.is_of_lanes(name)
    return TileDimension(name, tuple(define), [emitter.axes[k] for k in axes], in_loop, block, is_joined, parts)


def program_id(builder: KernelBuilder, dimension: int) -> str:
    """Return the text of the program's number along a grid dimension, wide enough for offsets."""
    number = f"{PROGRAM}{dimension}" if builder.inside else f"tl.program_id({dimension})"
    return number + (".to(tl.int64)" if builder.spec.wide else "")


def block_count(total: Size, block: int) -> Size:
    """Return how many blocks cover ``total`` points."""
    return -(-total // block) if isinstance(total, int) else FloorDiv(total + block - 1, block)


def fits_grid(builder: KernelBuilder, size: Size) -> bool:
    """Return whether a grid may have ``size`` programs along its second or third dimension, whatever the size symbols."""
    if isinstance(size, sympy.Expr) and isinstance(builder.spec, Classed):
        size = with_symbols_at(size, builder.spec.most)
    return isinstance(size, int) and size <= MOST_PROGRAMS


def looping_emitter(builder: KernelBuilder) -> Emitter:
    """Return a new emitter that adds values up in loops, those of all points of a register tile in one."""
    emitter = make_emitter(builder)
    emitter.loops = True
    if emitter.register_tile and any(row.loop is not None for row, _ in emitter.calls):
        asking = make_emitter(builder, kind=Asking)
        asking.loops = True
        for _ in asking.register_points():
            for store in builder.spec.stores:
                asking.stored(store)
        emitter.awaited = asking.awaited
    return emitter


def emit_stores(builder: KernelBuilder, emitter: Emitter, stores: Sequence[tuple[int, Store]]) -> None:
    """Compute and store outputs at all points of a register tile.

    All are computed first if one overwrites an input, or if there are several points: ptxas moves no load before a store.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        stores: The stores, each with its number in the spec.
    """
    if emitter.register_tile or any(store.into is not None for _, store in stores):
        for _ in emitter.register_points():
            for _, store in stores:
                emitter.stored(store)
    for _ in emitter.register_points():
        for number, store in stores:
            name = f"out{number}" if store.into is None else f"in{store.into}"
            emitter.store_op(name, store, barrier=name in loaded_tensors(emitter))


def loaded_tensors(emitter: Emitter) -> set[str]:
    """Return the names of the tensors that a kernel loads from."""
    return {access.tensor for access in emitter.accesses if not access.is_store}


# ---------------------------------------------------------------------- launches


def add_launch(builder: KernelBuilder, emitter: Emitter, tiles: list[TileDimension], grid: tuple[Size, Size, Size],
               suffix: str = "", block: dict[str, int] | None = None, warps: int | None = None,
               function: Emitter | None = None) -> None:
    """Write one kernel and its launch.

    Args:
        builder: The kernels of the spec, to which it is added.
        emitter: What the kernel computes.
        tiles: Its tile dimensions.
        grid: The number of programs along each dimension of the grid.
        suffix: What its name has after the spec's: ``_combine`` for a second kernel.
        block: The size of a tile along each dimension, if not the schedule's.
        warps: Warps per program, if not the schedule's.
        function: What the function computes that its last programs call, if there is one.
    """
    assert all(fits_grid(builder, size) for size in grid[1:]), grid
    block, warps = block or builder.schedule.block, warps or builder.schedule.warps
    parts = [emitter] if function is None else [emitter, function]
    signature = _signature(builder, parts) + (() if function is None else ((ARRIVED, "*i32"),))
    name, parameters, constants = builder.name + suffix, [name for name, _ in signature], _constants(block)
    _place_loads(builder, emitter, suffix)
    programs, points = _programs_and_points(builder, tiles, block, grid)
    first = [] if builder.inside else list(prologue(programs, points))
    docstring = _docstring(builder, suffix)
    if builder.inside:
        parameters += [f"{PROGRAM}0", f"{PROGRAM}1", X_SIZE, *_typed(constants)]
    else:
        parameters += [*_typed(constants), f"{WAITS}: tl.constexpr = False"]
    multiples = {} if suffix else _multiples(builder, parts)
    if multiples:
        builder.sources.append(render(emitter, tiles, name + ANY, parameters, docstring, []))
        builder.sources.append(in_two_forms(name, parameters, multiples, first))
    else:
        builder.sources.append(render(emitter, tiles, name, parameters, docstring, first))
    elsewhere = set() if function is None else {access.tensor for access in function.accesses}
    over = (pair for pair in overwrites(builder.spec, emitter, block, warps) if elsewhere.isdisjoint(pair))
    builder.launches.append(Launch(name, signature, grid, tuple(constants.items()), warps,
                                   alignments=builder.spec.alignments,
                                   asserts=any(part.has_asserts for part in parts), overwrites=tuple(over)))


def _multiples(builder: KernelBuilder, parts: Sequence[Emitter]) -> dict[str, int]:
    """Return the symbols for whose multiples a kernel of some parts has a form of its own."""
    spec, offsets = builder.spec, (access.offset for part in parts for access in part.accesses)
    if builder.inside or not spec.examples:
        return {}
    totals = (builder.numel(tile) for tile in builder.schedule.order if builder.is_of_lanes(tile))
    return multiples_of(offsets, totals, dict(zip(spec.symbols, spec.examples, strict=True)))


def add_function(builder: KernelBuilder, emitter: Emitter, tiles: list[TileDimension], suffix: str,
                 block: Mapping[str, int]) -> str:
    """Write a function that a kernel of the spec calls; return the call, which takes the sizes of tiles as they are.

    Args:
        builder: The kernels of the spec, to which it is added.
        emitter: What the function computes.
        tiles: Its tile dimensions.
        suffix: What its name has after the spec's.
        block: The size of a tile along each dimension.
    """
    name, constants = builder.name + suffix, _constants(block)
    parameters = [name for name, _ in _signature(builder, [emitter])]
    _place_loads(builder, emitter, suffix)
    docstring = _docstring(builder, suffix)
    builder.sources.append(render(emitter, tiles, name, [*parameters, *_typed(constants)], docstring, []))
    return f"{name}({', '.join([*parameters, *map(str, constants.values())])})"


def _constants(block: Mapping[str, int]) -> dict[str, int]:
    """Return the constexpr arguments of a kernel by name: the sizes of its tiles."""
    return {f"{tile.upper()}BLOCK": size for tile, size in block.items()}


def _typed(constants: Iterable[str]) -> Iterator[str]:
    """Yield constexpr parameters."""
    return (f"{constant}: tl.constexpr" for constant in constants)


def _place_loads(builder: KernelBuilder, emitter: Emitter, suffix: str) -> None:
    """Put the loads of a complete kernel where they are early enough, and say which of them stay in the cache."""
    if emitter.first_wait is not None:
        load_early(emitter.top, emitter.first_wait, along_rows=builder.schedule.loads_early or bool(suffix))
    loads = ((access.tensor, access.layout, access.offset) for access in emitter.accesses if not access.is_store)
    keep_what_is_loaded_again(emitter.top, loads)
    fill_loads(emitter.top)


def _signature(builder: KernelBuilder, parts: Sequence[Emitter]) -> tuple[tuple[str, str], ...]:
    """Return what a kernel of some parts takes, but for constants: each argument with its Triton type."""
    spec, scalars = builder.spec, set[str]().union(*(part.used_scalars for part in parts))
    sizes = [(symbol, "i64" if spec.wide or symbol not in spec.counted else "i32") for symbol in spec.symbols]
    floats = [(name, "fp32") for name in spec.hoisted if name in scalars]
    counts = [(count, "i32") for count in spec.counts if count in scalars]
    return (*_pointer_parameters(builder, parts), *sizes, *floats, *counts)


def _programs_and_points(builder: KernelBuilder, tiles: Sequence[TileDimension], block: Mapping[str, int],
                         grid: Sequence[Size]) -> tuple[Size, int | None]:
    """Return how many programs there are and how many points one computes, of a class of sizes at the smallest.

    The points are None if they are not known, as with a loop over a dynamic size.
    """
    spec = builder.spec
    programs = math.prod(map(spec.smallest, grid))
    if not any(tile.in_loop for tile in tiles):
        return programs, math.prod(block.values())
    points = spec.smallest(numel(spec, range(len(spec.axes))))
    is_known = isinstance(points, int) and isinstance(programs, int)
    return programs, points // max(programs, 1) + 1 if is_known else None


def _docstring(builder: KernelBuilder, suffix: str) -> str:
    """Return a kernel's docstring: its class, or what it is for, and the ops of the region."""
    purpose = {"": builder.schedule.schedule_class, "_combine": "combines partial states"}[suffix]
    return f"{purpose}: {' '.join(op.target.split('.')[1] for op in builder.spec.ops)}"[:110]


def _pointer_parameters(builder: KernelBuilder, parts: Sequence[Emitter]) -> list[tuple[str, str]]:
    """Return the tensors that a kernel's parts touch, in a fixed order, with their Triton types."""
    dtypes = {access.tensor: access.layout.dtype for part in parts for access in part.accesses}
    names = [f"in{i}" for i in range(len(builder.spec.inputs))] + [f"out{i}" for i in range(len(builder.spec.stores))]
    names += [workspace.name for workspace in builder.workspaces]
    return [(name, POINTER_TYPES[dtypes[name]]) for name in names if name in dtypes]


# ---------------------------------------------------------------------- reductions


def recurrence_of(spec: Spec, op: int) -> Recurrence:
    """Return the recurrence of a reduction of the spec."""
    reduction = spec.ops[op]
    row = lookup(overload(reduction.target))
    assert row is not None and row.reduction is not None
    args = dict(reduction.args)
    operand = next(iter(args.values()))
    operand_dtype = spec.tensor(operand).dtype
    is_count = operand_dtype is torch.bool and are_known(spec, axes := reduced_axes(spec, op))  # of others it is all one
    length = point_count(spec, axes) if is_count else None
    return recurrence(row.reduction, operand_dtype, reduction.dtype, correction(args), length)


def with_guests(spec: Spec, ops: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return those of some reductions that keep states, each with the others that are finished from the same ones.

    A sum, a mean and a variance of the same elements share the sum.
    """
    hosts: dict[object, int] = {}
    guests: dict[int, tuple[int, ...]] = {}
    axes = dict(spec.reductions)
    for op in sorted(ops, key=lambda op: (-len(recurrence_of(spec, op).states), op)):
        rule = recurrence_of(spec, op)
        elements = (spec.ops[op].args[0][1], axes[op], reduced_axes(spec, op), rule.element_dtype)
        host = hosts.setdefault(elements if rule.begins_with_sum else op, op)
        guests[host] = (*guests[host], op) if host != op else ()
    return {op: tuple(sorted(guests[op])) for op in ops if op in guests}


def element_and_position(
    builder: KernelBuilder, emitter: Emitter, op: int, rule: Recurrence
) -> tuple[Value, Value | None]:
    """Return the element that a reduction takes in, and its position in the row; None if the recurrence needs no position.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        op: The reduction's position in the spec.
        rule: Its recurrence.
    """
    index = emitter.index(dict(builder.spec.of_rows)[op])
    element = emitter.reduction_element(op, index, rule.element_dtype)
    if not rule.needs_position:
        return element, None
    call = emitter.calls[op][1]
    shape = emitter.shape(next(iter(call.args.values())))
    dims = reduced_dims(call.args, len(shape))
    return element, emitter.index_value(flatten([index[d] for d in dims], [shape[d] for d in dims]))


def element_count(builder: KernelBuilder, op: int) -> str:
    """Return the text of the number of elements in a row of a reduction, as a float."""
    total = numel(builder.spec, sorted(reduced_axes(builder.spec, op)))
    return str(float(total)) if isinstance(total, int) else f"({size_text(total)}).to(tl.float32)"


def states_of_element(emitter: Emitter, rule: Recurrence, element: Value, position: Value | None,
                      mask: str | None) -> list[str]:
    """Return the names of one element's states, spread over the whole tile.

    Args:
        emitter: The kernel's emitter.
        rule: The reduction's recurrence.
        element: The element.
        position: Its position in the row; None if the recurrence needs none.
        mask: The text of a mask, where it is off the states are the identity; None for no mask.
    """
    states = []
    texts = rule.start(element.name, position.name if position else "")
    for (dtype, identity), text in zip(rule.states, texts, strict=True):
        # A position varies along the row alone, whatever the element varies along.
        tiles = position.tiles if position is not None and text == position.name else element.tiles
        if mask is not None or not tiles >= ROW_TILES:
            text = _spread_over_tile(text, tiles, dtype, identity, mask)
        states.append(emitter.define(escape(text), dtype, ROW_TILES).name)
    return states


def _spread_over_tile(text: str, tiles: frozenset[str], dtype: torch.dtype, identity: str, mask: str | None) -> str:
    """Return the text of a state that varies along ``tiles`` over the whole tile: the identity where the mask is off."""
    missing = sorted(ROW_TILES - tiles)
    conditions = ([mask] if mask else []) + [f"({tile} >= 0)" for tile in missing if mask != f"{tile}_mask"]
    return f"tl.where({' & '.join(conditions)}, {text}, {identity_text(dtype, identity)})"


def identity_text(dtype: torch.dtype, identity: str) -> str:
    """Return the text of a state's initial value, as a scalar."""
    return f"tl.full([], {identity}, {triton_type(dtype)})"


def start_states(builder: KernelBuilder, emitter: Emitter, rule: Recurrence) -> list[str]:
    """Write the running states of a reduction before a loop; return their names.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        rule: The reduction's recurrence.
    """
    names = []
    running = builder.running_states(rule)
    shape = builder.tile_shape("XBLOCK", "RBLOCK" if running == builder.schedule.block["r"] else str(running))
    for dtype, identity in rule.states:
        names.append(emitter.new_name("acc"))
        emitter.add_line(f"{names[-1]} = tl.full({shape}, {identity}, {triton_type(dtype)})", frozenset())
    return names


def combine_lanes(emitter: Emitter, rule: Recurrence, states: list[str], weight: str, count: str, tiles: frozenset[str],
                  axis: int) -> list[str]:
    """Combine the states of all lanes along a dimension of the tile; returns the names of the combined states.

    Args:
        emitter: The kernel's emitter.
        rule: The recurrence.
        states: The names of the lanes' states.
        weight: The text of the number of elements that each lane has taken in, if the recurrence counts.
        count: The text of the number of elements that all lanes together have taken in.
        tiles: The tile dimensions that the combined states vary along.
        axis: The dimension of the tile: 0 or 1. It stays, with size 1.
    """
    emitter.wait()
    combined = rule.combine(states, weight, count).replace("AXIS", str(axis))
    spread = "[:, None]" if axis == 1 else "[None, :]"
    if len(states) == 1:  # defined as a value, so that what two reductions need is computed once
        return [emitter.define(f"{combined}{spread}", rule.states[0][0], tiles).name]
    names = [emitter.new_name("c") for _ in states]
    emitter.add_line(f"{', '.join(names)} = {combined}", tiles)
    for name in names:
        emitter.add_line(f"{name} = {name}{spread}", tiles)
    return names


def finish_reduction(builder: KernelBuilder, emitter: Emitter, op: int, states: list[str], weight: str = "",
                     guests: Sequence[int] = ()) -> dict[int, Value]:
    """Combine the states of a row's lanes, finish the reductions and keep their results for whoever asks; return these.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, which keeps the result.
        op: The reduction's position in the spec.
        states: The names of the states.
        weight: As for :func:`combine_lanes`.
        guests: Other reductions that are finished from the same states.
    """
    rule, count = recurrence_of(builder.spec, op), element_count(builder, op)
    combined = combine_lanes(emitter, rule, states, weight, count, frozenset("x"), builder.tile_dim("r"))
    return finish_combined(builder, emitter, (op, *guests), combined)


def finish_combined(builder: KernelBuilder, emitter: Emitter, ops: Sequence[int], combined: Sequence[str]
                    ) -> dict[int, Value]:
    """Return the results of reductions whose states are combined already, and keep them for whoever asks.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, which keeps the results.
        ops: The reductions' positions in the spec.
        combined: The names of the states, of which each takes as many as it has.
    """
    results, rows = {}, frozenset("x")
    for op in ops:
        rule, dtype = recurrence_of(builder.spec, op), builder.spec.ops[op].dtype
        finished = emitter.define(rule.finish(combined, element_count(builder, op)), dtype, rows)
        results[op] = emitter.keep_reduced(op, emitter.cast(Value(finished.name, _result_dtype(rule), rows), dtype))
    return results


def _result_dtype(rule: Recurrence) -> torch.dtype:
    """Return the dtype in which a finished reduction is held: its state's, unless the result is a position."""
    return torch.int64 if rule.needs_position else rule.element_dtype
