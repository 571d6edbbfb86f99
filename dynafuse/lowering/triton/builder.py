"""What the kernel classes share: the spec with its schedule, tiles, stores, launches, elements and results of reductions.

Worked example: ``tile(parts, "r", "0", "[None, :]", 4096, axes, emit)`` defines ``r = 0 + tl.arange(0, RBLOCK)[None, :]``
and ``r_mask = r < 4096``, of which :mod:`source` writes what the kernel uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from dynafuse.ir import Classed, Launch, Size, Spec, Store, Workspace
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.schedule import Tiles, reduced_axes
from dynafuse.lowering.triton.source import Tile, render
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops import Value, lookup
from dynafuse.ops.indexing_math import flatten
from dynafuse.ops.literals import triton_type
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import correction, reduced_dims
from dynafuse.ops.symbols import with_symbols_at

POINTER_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}


MOST_PROGRAMS = 65535  # along the second and third dimension of CUDA's grids; along the first there may be 2**31 - 1


@dataclass
class Parts:
    """What the kernels of one spec share while they are written."""

    spec: Spec
    tiles: Tiles
    name: str
    round_like_eager: bool
    launches: list[Launch] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)

    def numel(self, tile: str) -> Size:
        """How many points a tile dimension walks."""
        total: Size = 1
        for axis in self.tiles.order.get(tile, ()):
            total = total * self.spec.axes[axis].size
        return total

    def loop(self, variable: str, begin: str, end: str, step: str) -> str:
        """The header of a loop; with several stages, it loads ahead. Its variable is wide enough for offsets."""
        if self.spec.wide and begin.isdigit() and end.isdigit():  # a bare number has 32 bits for Triton, or is unsigned
            begin = f"tl.full([], {begin}, tl.int64)"
        bounds = f"{begin}, {end}, {step}"
        if self.tiles.stages == 1:
            return f"for {variable} in range({bounds}):"
        return f"for {variable} in tl.range({bounds}, num_stages={self.tiles.stages}):"

    def exact(self, tile: str, block: int) -> bool:
        """Whether blocks of a tile dimension never reach beyond its end."""
        total = self.numel(tile)
        if isinstance(self.spec, Classed) and not isinstance(total, int):
            total = int(total.as_coeff_Mul()[0])  # divides the number of points of every size
        return isinstance(total, int) and total % block == 0

    def grains(self) -> Iterator[tuple[int, int]]:
        """Axes of which every block has as many values, whole rows of what lies inside of them, with that number."""
        for tile, axes in self.tiles.order.items():
            inner, block = 1, self.tiles.block[tile]
            for axis in reversed(axes):
                size = self.spec.axes[axis].size
                if inner % block == 0:
                    yield axis, 1
                elif block % inner == 0 and isinstance(size, int) and size % (block // inner) == 0:
                    yield axis, block // inner
                if not isinstance(size, int):
                    break
                inner *= size


def emitter(parts: Parts, loop: str | None = None, tile_of: list[str] | None = None) -> Emitter:
    """A fresh emitter for one kernel of the spec."""
    made = Emitter(parts.spec, tile_of or parts.tiles.tile_of(len(parts.spec.axes)), loop, parts.round_like_eager)
    made.rereads = parts.tiles.rereads
    if tile_of is None:
        made.exact = frozenset(t for t, block in parts.tiles.block.items() if parts.exact(t, block))
    if made.loop is None and not parts.spec.reductions:
        made.grain = {made.axes[k]: grain for k, grain in parts.grains()}
    return made


def tile(parts: Parts, name: str, start: str, spread: str, total: Size, axes: tuple[int, ...], emit: Emitter,
         in_loop: bool = False) -> Tile:
    """A tile dimension that begins at ``start``."""
    wide = ".to(tl.int64)" if parts.spec.wide else ""
    define = [f"{name} = {start} + tl.arange(0, {name.upper()}BLOCK){wide}{spread}", f"{name}_first = {start}"]
    define += [f"{name}_mask = {name} < {size_text(total)}", f"{name}_zero = {name} * 0"]
    return Tile(name, tuple(define), [emit.axes[k] for k in axes], in_loop)


def program(parts: Parts, dimension: int) -> str:
    """The program's number along a grid dimension, wide enough for offsets."""
    return f"tl.program_id({dimension})" + (".to(tl.int64)" if parts.spec.wide else "")


def blocks(total: Size, block: int) -> Size:
    """How many blocks cover ``total``."""
    if isinstance(total, int):
        return -(-total // block)
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(total + block - 1, block)


def fits_grid(parts: Parts, size: Size) -> bool:
    """Whether a grid certainly may have so many programs along its second or third dimension."""
    if isinstance(size, sympy.Expr) and isinstance(parts.spec, Classed):
        size = with_symbols_at(size, parts.spec.most)
    return isinstance(size, int) and size <= MOST_PROGRAMS


def emit_stores(parts: Parts, emit: Emitter, stores: Sequence[tuple[int, Store]]) -> None:
    """Compute and store outputs; if one overwrites an input, all are computed before any is stored."""
    if any(store.into is not None for _, store in stores):
        for _, store in stores:
            _output(parts, emit, store)
    for number, store in stores:
        value = _output(parts, emit, store)
        name = f"out{number}" if store.into is None else f"in{store.into}"
        emit.store(name, store.layout, emit.index(store.dims), value, frozenset(), barrier=name in overwritten(emit))


def _output(parts: Parts, emit: Emitter, store: Store) -> Value:
    index = emit.index(store.dims)
    rank = len(parts.spec.ops[store.op].shape)
    return emit.value(store.op, index[len(index) - rank:])


def overwritten(emit: Emitter) -> set[str]:
    """Inputs that have been loaded and may be overwritten."""
    return {a.tensor for a in emit.accesses if not a.store}


def add_launch(parts: Parts, emit: Emitter, tiles: list[Tile], grid: tuple[Size, Size, Size], suffix: str = "",
               block: dict[str, int] | None = None, warps: int | None = None) -> None:
    """Render one kernel and say how it is launched."""
    block = block or parts.tiles.block
    name = parts.name + suffix
    assert all(fits_grid(parts, size) for size in grid[1:]), grid
    pointers = _pointers(parts, emit)
    numbers = [number for number in parts.spec.numbers if number in emit.numbers]
    counts = [count for count in parts.spec.counts if count in emit.numbers]
    parameters = [*(n for n, _ in pointers), *parts.spec.symbols, *numbers, *counts]
    constants = {f"{t.upper()}BLOCK": size for t, size in block.items()}
    source = render(emit, tiles, name, parameters, list(constants), _docstring(parts, suffix))
    parts.sources.append(source)
    signature = (*pointers, *((s, _size_type(parts.spec)) for s in parts.spec.symbols), *((n, "fp32") for n in numbers),
                 *((n, "i32") for n in counts))
    parts.launches.append(
        Launch(name, signature, grid, tuple(constants.items()), warps or parts.tiles.warps, asserts=emit.asserts))


def _size_type(spec: Spec) -> str:
    """The type of size symbols: as wide as the offsets that are compared with them."""
    return "i32" if isinstance(spec, Classed) and not spec.wide else "i64"


def _docstring(parts: Parts, suffix: str) -> str:
    what = {"": parts.tiles.kernel_class, "_combine": "combines the partial states of the kernel above"}[suffix]
    return f"{what}: {' '.join(op.target.split('.')[1] for op in parts.spec.ops)}"[:110]


def _pointers(parts: Parts, emit: Emitter) -> list[tuple[str, str]]:
    """The tensors that a kernel touches, in a fixed order, with their Triton types."""
    used = {a.tensor: a.layout.dtype for a in emit.accesses}
    names = [f"in{i}" for i in range(len(parts.spec.inputs))] + [f"out{i}" for i in range(len(parts.spec.stores))]
    names += [w.name for w in parts.workspaces]
    return [(n, POINTER_TYPES[used[n]]) for n in names if n in used]


def recurrence_of(spec: Spec, op: int) -> Recurrence:
    """The recurrence of a reduction of the spec."""
    made = spec.ops[op]
    row = lookup(overload(made.target))
    assert row is not None and row.reduction is not None
    operand = dict(made.args)[next(name for name, _ in made.args)]
    source = (spec.inputs if operand.kind == "in" else spec.ops)[operand.position].dtype
    return recurrence(row.reduction, source, made.dtype, correction(dict(made.args)))


def element(parts: Parts, emit: Emitter, op: int, rule: Recurrence) -> tuple[Value, Value | None]:
    """The element that a reduction takes in, and its position in the row if it asks for that."""
    dims = dict(parts.spec.reductions)[op]
    index = emit.index(dims)
    operand = next(iter(emit.calls[op][1].args.values()))
    value = emit.element(op, index, rule.element)
    if not rule.indexed:
        return value, None
    call = emit.calls[op][1]
    shape = emit.shape(operand)
    gone = reduced_dims(call.args, len(shape))
    return value, emit.index_value(flatten([index[d] for d in gone], [shape[d] for d in gone]))


def element_count(parts: Parts, op: int) -> str:
    """The number of elements of a row, as text."""
    total: Size = 1
    for axis in reduced_axes(parts.spec, op):
        total = total * parts.spec.axes[axis].size
    return str(float(total)) if isinstance(total, int) else f"({size_text(total)}).to(tl.float32)"


def states_of_element(emit: Emitter, rule: Recurrence, value: Value, position: Value | None, full: frozenset[str],
                      mask: str | None) -> list[str]:
    """One element's states, spread over the whole tile, with the identity where the mask is off."""
    states = []
    texts = rule.start(value.name, position.name if position else "")
    for (dtype, identity), text in zip(rule.states, texts, strict=True):
        # A position varies along the row alone, whatever its value does.
        tiles = position.tiles if position is not None and text == position.name else value.tiles
        text = text if mask is None and tiles >= full else _spread(text, dtype, identity, mask, full)
        states.append(emit.define(text.replace("{", "{{").replace("}", "}}"), dtype, full).name)
    return states


def _spread(text: str, dtype: torch.dtype, identity: str, mask: str | None, full: frozenset[str]) -> str:
    """An element over the whole tile: what lies beyond the row is the identity."""
    condition = mask or " & ".join(f"({t} >= 0)" for t in sorted(full))
    everywhere = " & ".join(f"({t} >= 0)" for t in sorted(full)) if mask is None or len(full) > 1 else ""
    condition = condition if not everywhere or condition == everywhere else f"{condition} & {everywhere}"
    return f"tl.where({condition}, {text}, {identity_text(dtype, identity)})"


def identity_text(dtype: torch.dtype, text: str) -> str:
    return f"tl.full([], {text}, {triton_type(dtype)})"


def combined(emit: Emitter, rule: Recurrence, states: list[str], tiles: frozenset[str], count: str, out: torch.dtype,
             axis: int) -> Value:
    """Combine states along a tile dimension and finish."""
    text = rule.combine(states).replace("AXIS", str(axis))
    names = [emit.name("c") for _ in states]
    expand = "[:, None]" if axis == 1 else "[None, :]"
    emit.line(f"{', '.join(names)} = {text}", tiles)
    for name in names:
        emit.line(f"{name} = {name}{expand}", tiles)
    finished = emit.define(rule.finish(names, count), out, tiles)
    return emit.cast(Value(finished.name, _held(rule, finished, out), tiles), out)


def _held(rule: Recurrence, finished: Value, out: torch.dtype) -> torch.dtype:
    """The dtype in which a finished reduction is held: its state's, unless the result is a position or a truth value."""
    if rule.indexed:
        return torch.int64
    if rule.element is torch.bool:
        return torch.bool
    return rule.element


def mask_of(parts: Parts, name: str) -> str | None:
    return None if parts.exact(name, parts.tiles.block[name]) else f"{name}_mask"
