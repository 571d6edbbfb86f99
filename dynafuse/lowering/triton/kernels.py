"""The kernel classes: how tile dimensions walk the iteration space, pass by pass.

- ``flat`` and ``tiled``: pointwise, one or two tile dimensions.
- ``persistent``: a whole row in registers. ``looped``: passes over a row, one per level of reductions.
- ``split``: several programs per row leave partial states; a second kernel combines them.
- ``rowcol``: a program walks several rows, reduces each, and keeps running column states; a second kernel combines them.

Worked example: ``sum(x, dim=0)`` of ``x[8192, 512]`` is split: 8 × 64 programs each add up 128 rows of 64 columns into a
workspace ``[64, 512]``, and the second kernel adds the 64 partial sums of every column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ir import Launch, Layout, Lowered, Size, Spec, Store, Workspace
from dynafuse.lowering.triton.emitter import Emitter, factor_text, size_text
from dynafuse.lowering.triton.levels import levels
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.schedule import Tiles, estimate, power_of_two, reduced_axes
from dynafuse.lowering.triton.source import HEADER, Tile, render
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import flatten
from dynafuse.ops.literals import triton_type
from dynafuse.ops.reductions import correction, reduced_dims

POINTER_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.bool: "*i1",
    torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}
INT32_LIMIT = 2**31 - 1


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

    def exact(self, tile: str, block: int) -> bool:
        """Whether blocks of a tile dimension never reach beyond its end."""
        total = self.numel(tile)
        return isinstance(total, int) and total % block == 0


def wide(spec: Spec) -> bool:
    """Whether some offset does not provably fit in 32 bits."""
    for layout in (*spec.inputs, *(s.layout for s in spec.stores)):
        last: Size = 1
        for size, stride in zip(layout.shape, layout.stride, strict=True):
            last = last + (size - 1) * stride
        if not isinstance(last, int) or last > INT32_LIMIT - 2**16:
            return True
    points: Size = 1
    for axis in spec.axes:
        points = points * axis.size
    return not isinstance(points, int) or points > INT32_LIMIT - 2**16


# ---------------------------------------------------------------------- pieces shared by the classes


def emitter(parts: Parts, loop: str | None = None, tile_of: list[str] | None = None) -> Emitter:
    """A fresh emitter for one kernel of the spec."""
    made = Emitter(parts.spec, tile_of or parts.tiles.tile_of(len(parts.spec.axes)), loop, parts.round_like_eager)
    if tile_of is None:
        made.exact = frozenset(t for t, block in parts.tiles.block.items() if parts.exact(t, block))
    return made


def tile(parts: Parts, name: str, start: str, spread: str, total: Size, axes: tuple[int, ...], emit: Emitter,
         in_loop: bool = False) -> Tile:
    """A tile dimension that begins at ``start``."""
    define = [f"{name} = {start} + tl.arange(0, {name.upper()}BLOCK){spread}"]
    define += [f"{name}_mask = {name} < {size_text(total)}", f"{name}_zero = {name} * 0"]
    return Tile(name, tuple(define), [emit.axes[k] for k in axes], in_loop)


def program(parts: Parts, dimension: int) -> str:
    """The program's number along a grid dimension, wide enough for offsets."""
    return f"tl.program_id({dimension})" + (".to(tl.int64)" if wide(parts.spec) else "")


def blocks(total: Size, block: int) -> Size:
    """How many blocks cover ``total``."""
    if isinstance(total, int):
        return -(-total // block)
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(total + block - 1, block)


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
    pointers = _pointers(parts, emit)
    parameters = [n for n, _ in pointers] + list(parts.spec.symbols)
    constants = {f"{t.upper()}BLOCK": size for t, size in block.items()}
    source = render(emit, tiles, name, parameters, list(constants), _docstring(parts, suffix))
    parts.sources.append(source)
    signature = tuple(pointers) + tuple((s, "i64") for s in parts.spec.symbols)
    parts.launches.append(Launch(name, signature, grid, tuple(constants.items()), warps or parts.tiles.warps))


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
    from dynafuse.ops import lookup
    from dynafuse.ops.overloads import overload

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
    value = emit.cast(emit.operand(operand, index), rule.element)
    if not rule.indexed:
        return value, None
    call = emit.calls[op][1]
    shape = emit.shape(operand)
    gone = reduced_dims(call.target, call.args, len(shape))
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
    spread = "".join(f" + {t}_zero" for t in sorted(full - value.tiles))
    texts = rule.start(value.name, position.name if position else "")
    for (dtype, identity), text in zip(rule.states, texts, strict=True):
        text = text if mask is None and not spread else _spread(text, dtype, identity, mask, full)
        states.append(emit.define(text.replace("{", "{{").replace("}", "}}"), dtype, full).name)
    return states


def _spread(text: str, dtype: torch.dtype, identity: str, mask: str | None, full: frozenset[str]) -> str:
    """An element over the whole tile: what lies beyond the row is the identity."""
    condition = mask or " & ".join(f"({t} >= 0)" for t in sorted(full))
    everywhere = " & ".join(f"({t} >= 0)" for t in sorted(full)) if mask is None or len(full) > 1 else ""
    condition = condition if not everywhere or condition == everywhere else f"{condition} & {everywhere}"
    return f"tl.where({condition}, {text}, {_identity(dtype, identity)})"


def _identity(dtype: torch.dtype, text: str) -> str:
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


# ---------------------------------------------------------------------- pointwise


def pointwise(parts: Parts) -> None:
    """One program per tile, one or two tile dimensions."""
    emit = emitter(parts)
    emit_stores(parts, emit, list(enumerate(parts.spec.stores)))
    order, block = parts.tiles.order, parts.tiles.block
    tiles: list[Tile] = []
    grid: list[Size] = []
    spreads = {"x": ""} if len(order) == 1 else {"y": "[:, None]", "x": "[None, :]"}
    for name in ("x", "y"):
        if name in order:
            start = f"{program(parts, len(grid))} * {name.upper()}BLOCK"
            tiles.append(tile(parts, name, start, spreads[name], parts.numel(name), order[name], emit))
            grid.append(blocks(parts.numel(name), block[name]))
    add_launch(parts, emit, tiles, (grid[0], grid[1] if len(grid) > 1 else 1, 1))


# ---------------------------------------------------------------------- rows


def _mask(parts: Parts, name: str, block: int) -> str | None:
    return None if parts.exact(name, block) else f"{name}_mask"


def persistent(parts: Parts) -> None:
    """A whole row in registers: every value is computed once."""
    emit = emitter(parts)
    full = frozenset("xr")

    def reduce(op: int) -> Value:
        rule = recurrence_of(parts.spec, op)
        value, position = element(parts, emit, op, rule)
        row_mask = _mask(parts, "r", parts.tiles.block["r"])
        if rule.element.is_floating_point and len(rule.states) == 3:
            return _two_pass_variance(parts, emit, op, value, row_mask)
        states = states_of_element(emit, rule, value, position, full, row_mask)
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op),
                                    parts.spec.ops[op].dtype, 1)
        return emit.reduced[op]

    emit.on_reduction = reduce
    emit_stores(parts, emit, list(enumerate(parts.spec.stores)))
    _row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "0")


def _two_pass_variance(parts: Parts, emit: Emitter, op: int, value: Value, mask: str | None) -> Value:
    """The variance of a row in registers: the mean, then the mean of squared deviations. No recurrence is as accurate."""
    dtype, full, x = value.dtype, frozenset("xr"), frozenset("x")
    total = recurrence("sum", dtype, dtype)
    count = element_count(parts, op)
    mean = combined(emit, recurrence("mean", dtype, dtype),
                    states_of_element(emit, total, value, None, full, mask), x, count, dtype, 1)
    deviation = emit.expression("({0} - {1}) * ({0} - {1})", dtype, value, mean)
    rule = recurrence_of(parts.spec, op)
    squares = combined(emit, total, states_of_element(emit, total, deviation, None, full, mask), x, count, dtype, 1)
    finished = emit.define(rule.finish(["0", squares.name], count), dtype, x)
    emit.reduced[op] = emit.cast(finished, parts.spec.ops[op].dtype)
    return emit.reduced[op]


def _row_launch(parts: Parts, emit: Emitter, x_start: str, r_start: str, r_loop: bool = False) -> None:
    order, block = parts.tiles.order, parts.tiles.block
    tiles = [
        tile(parts, "x", x_start, "[:, None]", parts.numel("x"), order["x"], emit),
        tile(parts, "r", r_start, "[None, :]", parts.numel("r"), order["r"], emit, in_loop=r_loop),
    ]
    splits = parts.tiles.splits if parts.tiles.kernel_class == "split" else 1
    add_launch(parts, emit, tiles, (blocks(parts.numel("x"), block["x"]), splits, 1))


def looped(parts: Parts) -> None:
    """Passes over the row: each computes the reductions whose operands are known by then, and stores what it can."""
    emit = emitter(parts, loop="r")
    level = levels(parts.spec)
    along_row = [bool(set(parts.tiles.order["r"]) & {a for dim in s.dims for a in dim}) for s in parts.spec.stores]
    waiting = [(n, s) for n, s in enumerate(parts.spec.stores) if along_row[n]]
    passes = max([level[op] - 1 for op, _ in parts.spec.reductions] + [level[s.op] for _, s in waiting]) + 1
    for current in range(passes):
        now = [op for op, _ in parts.spec.reductions if level[op] == current + 1]
        # An input is overwritten in the last pass: those before it may read it again.
        stores = [(n, s) for n, s in waiting if current == (level[s.op] if s.into is None else passes - 1)]
        if now or stores:
            _pass(parts, emit, now, stores)
    emit_stores(parts, emit, [(n, s) for n, s in enumerate(parts.spec.stores) if not along_row[n]])
    _row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "r_base", r_loop=True)


def _pass(parts: Parts, emit: Emitter, now: list[int], stores: list[tuple[int, Store]],
          bounds: str | None = None) -> None:
    """One loop over the row."""
    running = {op: _start(emit, op, parts) for op in now}
    everything = f"0, {size_text(parts.numel('r'))}"
    emit.open_loop(f"for r_base in range({bounds or everything}, RBLOCK):")
    for op in now:
        _advance(parts, emit, op, running[op])
    emit_stores(parts, emit, stores)
    emit.close_loop()
    for op in now:
        rule = recurrence_of(parts.spec, op)
        if parts.tiles.kernel_class != "split":
            emit.reduced[op] = combined(emit, rule, running[op], frozenset("x"), element_count(parts, op),
                                        parts.spec.ops[op].dtype, 1)
        else:
            _leave_partials(parts, emit, op, rule, running[op])


def _start(emit: Emitter, op: int, parts: Parts) -> list[str]:
    """The running states of a reduction, one per lane."""
    names = []
    for dtype, identity in recurrence_of(parts.spec, op).states:
        names.append(emit.name("acc"))
        emit.line(f"{names[-1]} = tl.full([XBLOCK, RBLOCK], {identity}, {triton_type(dtype)})".replace("{", "{{"),
                  frozenset())
    return names


def _advance(parts: Parts, emit: Emitter, op: int, states: list[str]) -> None:
    """Take in one element per lane."""
    full = frozenset("xr")
    rule = recurrence_of(parts.spec, op)
    value, position = element(parts, emit, op, rule)
    new = rule.update(states, value.name, position.name if position else "")
    texts = [new] if isinstance(new, str) else list(new)
    fresh = [emit.name("n") for _ in states]
    emit.line(f"{', '.join(fresh)} = {', '.join(texts)}", full)
    mask = None if parts.tiles.kernel_class != "split" and parts.exact("r", parts.tiles.block["r"]) else "r_mask"
    for state, candidate in zip(states, fresh, strict=True):
        emit.line(f"{state} = " + (f"tl.where({mask}, {candidate}, {state})" if mask else candidate), full)


# ---------------------------------------------------------------------- split rows and columns


def split(parts: Parts) -> None:
    """Several programs per row, then a kernel that combines what they leave."""
    emit = emitter(parts, loop="r")
    r = parts.numel("r")
    chunk = blocks(blocks(r, parts.tiles.splits), parts.tiles.block["r"]) * parts.tiles.block["r"]
    emit.top.lines.extend(_chunk_lines(emit, chunk, r))
    early = [(n, s) for n, s in enumerate(parts.spec.stores) if _along(parts, s, "r")]
    _pass(parts, emit, [op for op, _ in parts.spec.reductions], early, "r_begin, r_end")
    done = {n for n, _ in early}
    _row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "r_base", r_loop=True)
    combine(parts, parts.tiles.order["x"], done)


def _chunk_lines(emit: Emitter, chunk: Size, total: Size):  # type: ignore[no-untyped-def]
    from dynafuse.lowering.triton.emitter import Line

    yield Line(f"r_begin = tl.program_id(1) * {factor_text(chunk)}")
    yield Line(f"r_end = tl.minimum(r_begin + {size_text(chunk)}, {size_text(total)})")


def _along(parts: Parts, store: Store, name: str) -> bool:
    return bool(set(parts.tiles.order[name]) & {axis for dim in store.dims for axis in dim})


def _leave_partials(parts: Parts, emit: Emitter, op: int, rule: Recurrence, states: list[str]) -> None:
    """Combine a program's lanes and write the states to the workspace, one row per program."""
    names = _combine_lanes(emit, rule, states, frozenset("x"), 1)
    for name, (dtype, _) in zip(names, rule.states, strict=True):
        _write_partial(parts, emit, op, name, dtype, "x", "tl.program_id(1)")


def _combine_lanes(emit: Emitter, rule: Recurrence, states: list[str], tiles: frozenset[str], axis: int) -> list[str]:
    names = [emit.name("c") for _ in states]
    emit.line(f"{', '.join(names)} = {rule.combine(states).replace('AXIS', str(axis))}", tiles)
    for name in names:
        emit.line(f"{name} = {name}{'[:, None]' if axis == 1 else '[None, :]'}", tiles)
    return names


def _write_partial(parts: Parts, emit: Emitter, op: int, name: str, dtype: torch.dtype, along: str, row: str) -> None:
    total = parts.numel(along)
    space = Workspace(f"tmp{len(parts.workspaces)}", dtype, parts.tiles.splits * total)
    parts.workspaces.append(space)
    emit.accesses.append(_workspace_access(space, True))
    held = f"{name}.to({triton_type(dtype)})"
    emit.line(f"tl.store({space.name} + ({row} * {factor_text(total)} + {along}), {held}, {along}_mask)", frozenset())


def _workspace_access(space: Workspace, store: bool):  # type: ignore[no-untyped-def]
    from dynafuse.lowering.triton.emitter import Access

    return Access(space.name, Layout(space.dtype, (space.size,), (1,)), sympy.S.Zero, store)


def combine(parts: Parts, axes: tuple[int, ...], done: set[int]) -> None:
    """The second kernel: combines partial states, then computes and stores what depends on them."""
    spec = parts.spec
    emit = emitter(parts, tile_of=["x" if k in axes else "r" for k in range(len(spec.axes))])
    splits, total = parts.tiles.splits, _total(spec, axes)
    spaces = _spaces_of(parts)
    block = {"x": min(_combine_width(splits), power_of_two(estimate(total))), "r": power_of_two(splits)}
    warps = 8 if block["x"] * block["r"] >= 4096 else 4

    def reduce(op: int) -> Value:
        rule = recurrence_of(spec, op)
        states = []
        for space, (dtype, identity) in zip(spaces[op], rule.states, strict=True):
            emit.accesses.append(_workspace_access(space, False))
            load = f"tl.load({space.name} + (r * {factor_text(total)} + x), x_mask & r_mask)"
            load += ".to(tl.int1)" if dtype is torch.bool else ""
            text = f"tl.where(r_mask, {load}, {_identity(dtype, identity)})"
            states.append(emit.define(text, dtype, frozenset("xr")).name)
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op), spec.ops[op].dtype, 1)
        return emit.reduced[op]

    emit.on_reduction = reduce
    emit_stores(parts, emit, [(n, s) for n, s in enumerate(spec.stores) if n not in done])
    tiles = [
        tile(parts, "x", f"{program(parts, 0)} * XBLOCK", "[:, None]", total, axes, emit),
        Tile("r", ("r = tl.arange(0, RBLOCK)[None, :]", f"r_mask = r < {splits}"), []),
    ]
    add_launch(parts, emit, tiles, (blocks(total, block["x"]), 1, 1), "_combine", block, warps)


def _combine_width(splits: int) -> int:
    """Columns per program: enough neighbours for whole memory sectors, not so many that registers run out."""
    return max(16, 2048 // power_of_two(splits))


def _total(spec: Spec, axes: tuple[int, ...]) -> Size:
    total: Size = 1
    for axis in axes:
        total = total * spec.axes[axis].size
    return total


def _spaces_of(parts: Parts) -> dict[int, list[Workspace]]:
    """The workspaces of each reduction that a second kernel completes, in the order in which they were made."""
    rest = iter(parts.workspaces)
    order = [op for op, _ in parts.spec.reductions if op in parts.tiles.late]
    return {op: [next(rest) for _ in recurrence_of(parts.spec, op).states] for op in order}


# ---------------------------------------------------------------------- rows and columns in one pass


def rowcol(parts: Parts) -> None:
    """Programs walk rows; running column states stay in registers until the end."""
    emit = emitter(parts, loop="x")
    late = [op for op, _ in parts.spec.reductions if op in parts.tiles.late]
    running = {op: _start_column(emit, op, parts) for op in late}
    emit.open_loop(f"for x_base in range({program(parts, 0)} * XBLOCK, {size_text(parts.numel('x'))}, "
                   "tl.num_programs(0) * XBLOCK):")
    emit.on_reduction = _row_reducer(parts, emit)
    along = [(n, s) for n, s in enumerate(parts.spec.stores) if _along(parts, s, "x")]
    if any(s.into is not None for _, s in along):  # then what the columns read comes before it is overwritten
        for op in late:
            element(parts, emit, op, recurrence_of(parts.spec, op))
    emit_stores(parts, emit, along)
    for op in late:
        _advance_column(parts, emit, op, running[op])
    emit.close_loop()
    for op in late:
        for name, (dtype, _) in zip(running[op], recurrence_of(parts.spec, op).states, strict=True):
            _write_partial(parts, emit, op, name, dtype, "r", "tl.program_id(0)")
    order = parts.tiles.order
    tiles = [
        tile(parts, "x", "x_base", "[:, None]", parts.numel("x"), order["x"], emit, in_loop=True),
        tile(parts, "r", "0", "[None, :]", parts.numel("r"), order["r"], emit),
    ]
    add_launch(parts, emit, tiles, (parts.tiles.splits, 1, 1))
    combine(parts, order["r"], {n for n, _ in along})


def _row_reducer(parts: Parts, emit: Emitter) -> Callable[[int], Value]:
    full = frozenset("xr")

    def reduce(op: int) -> Value:
        if op in parts.tiles.late:
            raise LoweringError(parts.spec.ops[op].target, "its result is needed before it is complete")
        rule = recurrence_of(parts.spec, op)
        value, position = element(parts, emit, op, rule)
        states = states_of_element(emit, rule, value, position, full, _mask(parts, "r", parts.tiles.block["r"]))
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op),
                                    parts.spec.ops[op].dtype, 1)
        return emit.reduced[op]

    return reduce


def _start_column(emit: Emitter, op: int, parts: Parts) -> list[str]:
    names = []
    for dtype, identity in recurrence_of(parts.spec, op).states:
        names.append(emit.name("acc"))
        emit.line(f"{names[-1]} = tl.full([1, RBLOCK], {identity}, {triton_type(dtype)})", frozenset())
    return names


def _advance_column(parts: Parts, emit: Emitter, op: int, running: list[str]) -> None:
    """Combine a tile's rows and take the result into the running column states."""
    rule = recurrence_of(parts.spec, op)
    full = frozenset("xr")
    value, position = element(parts, emit, op, rule)
    states = states_of_element(emit, rule, value, position, full, _mask(parts, "x", parts.tiles.block["x"]))
    if parts.tiles.block["x"] > 1:
        states = _combine_lanes(emit, rule, states, full, 0)
    merged = [(running[k], states[k]) for k in range(len(states))]
    if len(merged) > 1:
        raise NotImplementedError("column states of several parts")
    new = rule.update([merged[0][0]], merged[0][1], "")
    emit.line(f"{running[0]} = {new[0]}", full)


CLASSES: dict[str, Callable[[Parts], None]] = {
    "flat": pointwise, "tiled": pointwise, "persistent": persistent, "looped": looped, "split": split, "rowcol": rowcol,
}


def lowered(spec: Spec, tiles: Tiles, round_like_eager: bool) -> Lowered:
    """The kernels of a spec under a schedule."""
    parts = Parts(spec, tiles, _name(spec, tiles), round_like_eager)
    CLASSES[tiles.kernel_class](parts)
    source = HEADER + "".join(f"\n\n{text}" for text in parts.sources)
    return Lowered(source, tuple(parts.launches), tuple(parts.workspaces), tiles.kernel_class)


def _name(spec: Spec, tiles: Tiles) -> str:
    """A kernel's name: its class and its telling ops."""
    quiet = {"view", "permute", "expand", "convert_element_type", "unsqueeze", "squeeze", "_unsafe_view", "full"}
    ops = [op.target.split(".")[1] for op in spec.ops]
    told = list(dict.fromkeys(op for op in ops if op not in quiet)) or ops
    return f"dynafuse_{tiles.kernel_class}_{'_'.join(told)}"[:60].rstrip("_")

