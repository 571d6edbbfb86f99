"""The op table's column for nvFuser: how each op that is not pointwise is recorded, and what is refused.

A pointwise op needs no entry: its one expression serves (see :mod:`dynafuse.ops.nvfuser_math`). Any other op without an
entry is beyond nvFuser, and :func:`refusal` says so; it needs neither nvFuser nor a region, so that the partitioner can ask.

Worked example::

    >>> row = lookup(torch.ops.aten.flip.default)
    >>> refusal(row, call, [x])
    'nvFuser has no flip'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import sympy
import torch

from dynafuse.ops import table
from dynafuse.ops.gathers import placement
from dynafuse.ops.indexing_math import as_expr, known_equal, product
from dynafuse.ops.literals import literal, opmath
from dynafuse.ops.nvfuser_math import missing
from dynafuse.ops.nvfuser_parts import Fuse, Fusion, Part
from dynafuse.ops.overloads import overloads
from dynafuse.ops.promotion import Operand, compute_dtype
from dynafuse.ops.reductions import correction, keepdim, reduced_dims
from dynafuse.ops.table import Call, Context, Kind, NvfuserRow, Row, lookup, register
from dynafuse.ops.views import argument, clamped_bound, dim_of, dims_of, source

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool,
})
MAX_RANK = 8
Accepts = Callable[[Call, "Sequence[Strided]"], str]


class Strided(Protocol):
    """What is known of a tensor before there is a region."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[Any]: ...


# Views ----------------------------------------------------------------------------------------------------------------


def _same(f: Fusion, call: Call) -> Part:
    return f.operand(source(call))


def _reshape(f: Fusion, call: Call) -> Part:
    """Where only dimensions of size 1 come and go, nothing is merged or split: nvFuser then has less to analyse."""
    part = f.operand(source(call))
    if [s for s in part.shape if s != 1] != [s for s in map(_plain, call.shape) if s != 1]:
        return f.move("reshape", [part], call.shape, f.sizes(call.shape))
    return _with_ones(f, part, call.shape)


def _with_ones(f: Fusion, part: Part, shape: Sequence[Any]) -> Part:
    part = f.squeezed(part, [d for d, size in enumerate(part.shape) if size == 1])
    new = [size == 1 for size in shape]
    return f.unsqueezed(part, new) if any(new) else part


def _permuted(f: Fusion, part: Part, order: Sequence[int]) -> Part:
    return f.move("permute", [part], [part.shape[d] for d in order], tuple(order), spread=[part.spread[d] for d in order])


def _permute(f: Fusion, call: Call) -> Part:
    return _permuted(f, f.operand(source(call)), dims_of(argument(call, "dims", "permutation"), len(call.shape)))


def _transpose(f: Fusion, call: Call) -> Part:
    order = list(range(len(call.shape)))
    if order:
        first, second = dims_of((call["dim0"], call["dim1"]), len(order))
        order[first], order[second] = second, first
    return _permuted(f, f.operand(source(call)), order)


def _t(f: Fusion, call: Call) -> Part:
    return _permuted(f, f.operand(source(call)), range(len(call.shape))[::-1])


def _expand(f: Fusion, call: Call) -> Part:
    return f.expanded(f.operand(source(call)), call.shape)


def _broadcast_in_dim(f: Fusion, call: Call) -> Part:
    kept = call["broadcast_dimensions"]
    part = f.unsqueezed(f.operand(source(call)), [d not in kept for d in range(len(call.shape))])
    return f.expanded(part, call.shape)


def _slice(f: Fusion, call: Call) -> Part:
    part, shape = f.operand(source(call)), f.shape(source(call))
    dim = dim_of(call["dim"], len(shape))
    start = clamped_bound(call["start"], shape[dim], sympy.S.Zero)
    return sliced(f, part, dim, start, start + call.shape[dim])


def sliced(f: Fusion, part: Part, dim: int, start: sympy.Expr, end: sympy.Expr) -> Part:
    """The elements from ``start`` to ``end`` of a dimension."""
    shape: list[Any] = [*part.shape]
    if start == 0 and end == shape[dim]:
        return part
    starts: list[Any] = [0] * len(shape)
    ends = [*shape]
    starts[dim], ends[dim], shape[dim] = start, end, end - start
    steps = (1,) * len(shape)
    return f.move("slice", [part], shape, f.sizes(starts), f.sizes(ends), steps, True,
                  spread=[(flag and d != dim) or shape[d] == 1 for d, flag in enumerate(part.spread)])


def _accepts_slice(call: Call, tensors: Sequence[Strided]) -> str:
    return "" if call["step"] == 1 else f"a slice of step {call['step']}: nvFuser's have step 1"


def _select(f: Fusion, call: Call) -> Part:
    part, shape = f.operand(source(call)), f.shape(source(call))
    dim = dim_of(call["dim"], len(shape))
    at = as_expr(call["index"])
    at = at if at.is_nonnegative else at + shape[dim]
    return f.squeezed(sliced(f, part, dim, at, at + 1), [dim])


# Concatenation, padding and creation ----------------------------------------------------------------------------------


def _cat(f: Fusion, call: Call) -> Part:
    """One dtype for all: what is joined is stored in the op's own."""
    dim = dim_of(call["dim"], len(call.shape))
    parts = [f.cast(f.operand(piece), call.dtype) for piece in call["tensors"] if len(f.shape(piece)) == len(call.shape)]
    return _joined(f, parts, call.shape, dim)


def _joined(f: Fusion, parts: Sequence[Part], shape: Sequence[Any], dim: int) -> Part:
    return f.move("cat", parts, shape, dim) if len(parts) > 1 else parts[0]


def _stack(f: Fusion, call: Call) -> Part:
    dim = dim_of(call["dim"], len(call.shape))
    new = [d == dim for d in range(len(call.shape))]
    return _joined(f, [f.unsqueezed(f.cast(f.operand(p), call.dtype), new) for p in call["tensors"]], call.shape, dim)


def _accepts_pieces(call: Call, tensors: Sequence[Strided]) -> str:
    return "pieces without elements" if any(_plain(s) == 0 for t in tensors for s in t.shape) else ""


def _pad(f: Fusion, call: Call) -> Part:
    part = f.operand(call["self"])
    held = f.cast(part, torch.int32) if part.dtype is torch.bool else part  # nvFuser pads no bools
    value = float(call["value"]) if held.dtype.is_floating_point else int(call["value"])
    return f.cast(f.move("pad", [held], call.shape, f.sizes(call["pad"]), value), part.dtype)


def _full(f: Fusion, call: Call) -> Part:
    fill = next((call.args[name] for name in ("fill_value", "s", "scalar") if name in call.args), None)
    return f.full(call.shape, int("ones" in str(call.target)) if fill is None else fill, opmath(call.dtype))


def _arange(f: Fusion, call: Call) -> Part:
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    if isinstance(start, float) or isinstance(step, float):
        at = f.cast(f.iota(call.shape[0], 0, 1), opmath(call.dtype))
        return f.pointwise("add", f.pointwise("mul", at, step), start)
    return f.cast(f.iota(call.shape[0], start, step), opmath(call.dtype))


def _along(f: Fusion, shape: Sequence[Any], dim: int) -> Part:
    """The position along ``dim``, of size 1 in the other dimensions."""
    dim = dim % len(shape)
    return f.unsqueezed(f.iota(shape[dim], 0, 1), [d != dim for d in range(len(shape))])


def _eye(f: Fusion, call: Call) -> Part:
    return f.cast(_along(f, call.shape, 0) == _along(f, call.shape, 1), opmath(call.dtype))


def _tri(compare: str) -> Fuse:
    def build(f: Fusion, call: Call) -> Part:
        part = f.cast(f.operand(call["self"]), opmath(call.dtype))
        ahead = _along(f, call.shape, -1) - _along(f, call.shape, -2)
        kept = f.pointwise(compare, ahead, int(call["diagonal"]))
        return f.cast(f.pointwise("where", kept, part, 0), part.dtype)

    return build


def _glu(f: Fusion, call: Call) -> Part:
    part, dim = f.operand(call["self"]), dim_of(call["dim"], len(call.shape))
    half = call.shape[dim]
    value, gate = (f.cast(sliced(f, part, dim, at, at + half), opmath(call.dtype)) for at in (sympy.S.Zero, half))
    return value * f.pointwise("sigmoid", gate)


# Gathers --------------------------------------------------------------------------------------------------------------


def _picked(f: Fusion, operand: Part, index: Part, dim: int) -> Part:
    """``operand`` at an index of any rank along ``dim``: nvFuser's index has one dimension."""
    count = product(index.shape)
    flat = index
    if len(index.shape) != 1:
        flat = f.move("reshape", [index], [count], f.sizes([count])) if index.shape else f.unsqueezed(index, [True])
    before, after = operand.shape[:dim], operand.shape[dim + 1:]
    rows = f.move("index_select", [operand, flat], [*before, count, *after], dim)
    if len(index.shape) == 1:
        return rows
    shape = (*before, *index.shape, *after)
    return f.squeezed(rows, [dim]) if not index.shape else f.move("reshape", [rows], shape, f.sizes(shape))


def _embedding(f: Fusion, call: Call) -> Part:
    return _picked(f, f.operand(call["weight"]), f.operand(call["indices"]), 0)


def _index_select(f: Fusion, call: Call) -> Part:
    operand, index = f.operand(call["self"]), f.operand(call["index"])
    flat = index if index.shape else f.unsqueezed(index, [True])
    return _picked(f, operand, flat, dim_of(call["dim"], len(operand.shape)))


def _index(f: Fusion, call: Call) -> Part:
    """One index tensor; negative indices count from the end."""
    operand = f.operand(call["self"])
    at, = (at for at in call["indices"] if at is not None)
    start, _ = placement(call["indices"], [0])
    index = f.operand(at)
    size = f.full((), operand.shape[start], index.dtype)
    return _picked(f, operand, f.pointwise("where", index < 0, index + size, index), start)


def _accepts_index(call: Call, tensors: Sequence[Strided]) -> str:
    several = sum(at is not None for at in call["indices"]) > 1
    return "an index of several tensors" if several else _accepts_rank(call, tensors)


def _accepts_rank(call: Call, tensors: Sequence[Strided]) -> str:
    return "" if len(tensors[0].shape) else "a gather from a 0-d tensor"


def _gather(f: Fusion, call: Call) -> Part:
    operand, index = f.operand(call["self"]), f.operand(call["index"])
    return f.move("take_along_axis", [operand, index], call.shape, dim_of(call["dim"], len(call.shape)))


def _accepts_gather(call: Call, tensors: Sequence[Strided]) -> str:
    operand, index = (tuple(map(as_expr, t.shape)) for t in tensors[:2])
    if not operand:
        return "a gather from a 0-d tensor"
    dim = dim_of(call["dim"], len(operand))
    same = all(known_equal(a, b) for d, (a, b) in enumerate(zip(operand, index, strict=True)) if d != dim)
    return "" if same else "a gather from a part of the tensor"


def _one_row_scatter(f: Fusion, call: Call) -> Part:
    """A scatter along a dimension in which the index has one element: the source where the index is the position."""
    before = f.cast(f.operand(call["self"]), opmath(call.dtype))
    given = call.args.get("src", call.args.get("value"))
    after = given if isinstance(given, (bool, int, float)) else f.cast(f.operand(given), opmath(call.dtype))
    index = f.cast(f.operand(call["index"]), torch.int64)
    hit = _along(f, call.shape, dim_of(call["dim"], len(call.shape))) == index
    if call.target is torch.ops.aten.scatter_add.default:
        after = before + after
    return f.cast(f.pointwise("where", hit, after, before), before.dtype)


# Reductions -----------------------------------------------------------------------------------------------------------


def _operand(f: Fusion, call: Call, dtype: torch.dtype) -> tuple[Part, tuple[int, ...], bool]:
    part = f.operand(source(call))
    return f.cast(part, dtype), reduced_dims(call.args, len(part.shape)), keepdim(call.args)


def _fold(name: str) -> Fuse:
    def build(f: Fusion, call: Call) -> Part:
        return f.reduce(name, *_operand(f, call, opmath(call.dtype)))

    return build


def _extreme(name: str) -> Fuse:
    """Of bools as integers."""

    def build(f: Fusion, call: Call) -> Part:
        dtype = f.operand(source(call)).dtype
        part, dims, keep = _operand(f, call, torch.int32 if dtype is torch.bool else opmath(dtype))
        return f.cast(f.reduce(name, part, dims, keep), opmath(call.dtype))

    return build


def _truth(name: str) -> Fuse:
    """``any`` is the maximum of truths as integers, ``all`` the minimum."""

    def build(f: Fusion, call: Call) -> Part:
        part = f.operand(source(call))
        _, dims, keep = _operand(f, call, part.dtype)
        truth = f.cast(f.cast(part, opmath(part.dtype)), torch.bool)
        return f.cast(f.reduce(name, f.cast(truth, torch.int32), dims, keep), call.dtype)

    return build


def _mean(f: Fusion, call: Call) -> Part:
    part, dims, keep = _operand(f, call, opmath(call.dtype))
    return _average(f, part, dims, keep)


def _average(f: Fusion, part: Part, dims: Sequence[int], keep: bool, less: float = 0) -> Part:
    """The sum over as many elements, ``less`` fewer; over none it is what 0 divided by 0 is, or infinite."""
    total, count = f.reduce("sum", part, dims, keep), product([part.shape[d] for d in dims])
    if not count.is_Integer:
        return total / f.pointwise("maximum", f.full((), count, part.dtype) - less, 0.0)
    return total * (1 / (int(count) - less) if int(count) > less else float("inf"))


def _variance(f: Fusion, call: Call) -> Part:
    """In two passes, over deviations from the mean. nvFuser's own mean beside its variance is NaN where there is an
    infinity, and a sum beside its variance is more than it can compile for 16-bit floats."""
    part, dims, keep = _operand(f, call, opmath(call.dtype))
    deviation = part - _average(f, part, dims, True)
    return _average(f, deviation * deviation, dims, keep, correction(call.args))


def _deviation(f: Fusion, call: Call) -> Part:
    return f.pointwise("sqrt", _variance(f, call))


# The column -----------------------------------------------------------------------------------------------------------

_REDUCTIONS: dict[str, Fuse] = {
    "sum": _fold("sum"), "prod": _fold("prod"), "mean": _mean, "max": _extreme("max"), "min": _extreme("min"),
    "any": _truth("max"), "all": _truth("min"), "var": _variance, "std": _deviation,
}
_BUILDS: dict[str, tuple[Fuse, Accepts | None]] = {
    "aten.view.default aten._unsafe_view.default aten.reshape.default aten._reshape_alias.default "
    "aten.flatten.using_ints aten.unflatten.int aten.view_as.default aten.view_copy.default prims.reshape.default "
    "prims.collapse_view.default prims.collapse.default prims.split_dim.default aten.squeeze.default aten.squeeze.dim "
    "aten.squeeze.dims aten.squeeze_copy.default aten.squeeze_copy.dim aten.squeeze_copy.dims prims.squeeze.default "
    "aten.unsqueeze.default aten.unsqueeze_copy.default": (_reshape, None),
    "aten.permute.default aten.permute_copy.default prims.transpose.default": (_permute, None),
    "aten.transpose.int aten.transpose_copy.int": (_transpose, None),
    "aten.t.default aten.t_copy.default": (_t, None),
    "aten.expand.default aten.expand_copy.default aten.broadcast_to.default": (_expand, None),
    "prims.broadcast_in_dim.default": (_broadcast_in_dim, None),
    "aten.slice.Tensor aten.slice_copy.Tensor": (_slice, _accepts_slice),
    "aten.select.int aten.select_copy.int": (_select, None),
    "aten.alias.default aten.detach.default": (_same, None),
    "aten.cat.default prims.cat.default": (_cat, _accepts_pieces),
    "aten.stack.default": (_stack, None),
    "aten.constant_pad_nd.default": (_pad, None),
    "aten.triu.default": (_tri("ge"), None),
    "aten.tril.default": (_tri("le"), None),
    "aten.glu.default": (_glu, None),
    "aten.full.default aten.full_like.default aten.new_full.default aten.scalar_tensor.default prims.full.default "
    "prims.full_like.default prims.scalar_tensor.default aten.zeros.default aten.zeros_like.default "
    "aten.new_zeros.default aten.ones.default aten.ones_like.default aten.new_ones.default": (_full, None),
    "prims.iota.default aten.arange.default aten.arange.start aten.arange.start_step": (_arange, None),
    "aten.eye.default aten.eye.m": (_eye, None),
    "aten.embedding.default": (_embedding, None),
    "aten.index_select.default": (_index_select, _accepts_rank),
    "aten.index.Tensor aten._unsafe_index.Tensor": (_index, _accepts_index),
    "aten.gather.default": (_gather, _accepts_gather),
    "aten.scatter.src aten.scatter.value aten.scatter_add.default": (_one_row_scatter, None),
}


def _fill() -> None:
    for row in table.rows():
        if row.kind is Kind.REDUCTION and row.reduction in _REDUCTIONS:
            register(dataclasses.replace(row, nvfuser=NvfuserRow(_REDUCTIONS[row.reduction])))
    for names, (build, accepts) in _BUILDS.items():
        for target in overloads(names):
            known = lookup(target)
            assert known is not None, target
            register(dataclasses.replace(known, nvfuser=NvfuserRow(build, accepts)))


_fill()


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(row: Row, call: Call, tensors: Sequence[Strided]) -> str:
    """Why nvFuser cannot do a call of a fusible op, or "".

    ``tensors`` are its tensor arguments in order, those in lists included. What ``ops.refusal`` says of the call comes first
    and is not asked again.
    """
    return (row.reason or _unheld(call, tensors)
            or (_unwritten(row, call, tensors) if row.nvfuser is None else _unaccepted(row.nvfuser, call, tensors)))


def _unheld(call: Call, tensors: Sequence[Strided]) -> str:
    """Dtypes and ranks."""
    strange = [dtype for dtype in (call.dtype, *(t.dtype for t in tensors)) if dtype not in DTYPES]
    if strange:
        return f"nvFuser has no {strange[0]}"
    rank = max(map(len, (call.shape, *(t.shape for t in tensors))))
    return f"{rank} dimensions: nvFuser has at most {MAX_RANK}" if rank > MAX_RANK else ""


def _unaccepted(entry: NvfuserRow, call: Call, tensors: Sequence[Strided]) -> str:
    return entry.accepts(call, tensors) if entry.accepts else ""


def _unwritten(row: Row, call: Call, tensors: Sequence[Strided]) -> str:
    """What an op's expression needs and nvFuser lacks; any other op without an entry is missing as a whole."""
    if row.kind is not Kind.POINTWISE or row.emit is None:
        return f"nvFuser has no {call.target._schema.name.split('::')[1]}"
    names = ", ".join(missing(text_of(row, call, tensors)))
    return f"nvFuser has no {names}" if names else ""


def text_of(row: Row, call: Call, tensors: Sequence[Strided]) -> str:
    """A pointwise call's expression, before its operands have names."""
    rest = iter(tensors)
    schema = {argument.name: argument for argument in call.target._schema.arguments}
    kinds = [_kind(arg, next(rest) if _takes_tensor(schema[name], arg) else None) for name, arg in call.args.items()]
    dtype = compute_dtype(row, call, [kind for i, kind in enumerate(kinds) if kind is not None and i not in row.raw])
    context = Context(opmath(dtype or call.dtype), call.dtype, tuple(t.dtype for t in tensors))
    return expression(row, context, [f"x{i}" if isinstance(kind, tuple) or _is_size(arg) else arg
                                     for i, (kind, arg) in enumerate(zip(kinds, call.args.values(), strict=True))])


def _takes_tensor(argument: torch.Argument, given: Any) -> bool:
    number = given is None or isinstance(given, (bool, int, float)) or _is_size(given)
    return "Tensor" in str(argument.type) and not number


def _kind(arg: Any, tensor: Strided | None) -> Operand | None:
    """An argument as promotion sees it."""
    if tensor is not None:
        return tensor.dtype, len(tensor.shape) == 0
    if isinstance(arg, (bool, int, float)):
        return type(arg)
    return int if _is_size(arg) else None


def _is_size(arg: Any) -> bool:
    """Whether an argument is an integer that is known at run time."""
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return isinstance(value, (sympy.Expr, torch.SymInt))


def expression(row: Row, context: Context, operands: Sequence[Any]) -> str:
    """A pointwise row's expression over operands: names, and numbers."""
    if callable(row.emit):
        return row.emit(context, *operands)
    assert row.emit is not None
    return row.emit.format(*(literal(o, context.dtype) if isinstance(o, (bool, int, float)) else o for o in operands))


def _plain(size: Any) -> Any:
    expr = as_expr(size)
    return int(expr) if expr.is_Integer else expr
