"""The op table's column for nvFuser: how each op that is not pointwise is recorded, and what is refused.

A pointwise op needs no entry, since its expression serves nvFuser too (see :mod:`dynafuse.ops.nvfuser_math`). Any other op
without an entry is beyond nvFuser, and :func:`refusal` says so; it needs neither nvFuser nor a region, so that the
partitioner can ask.

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
from dynafuse.ops.nvfuser_fusion import Fusion, FusionTensor, RecordOp
from dynafuse.ops.nvfuser_math import missing
from dynafuse.ops.overloads import overloads
from dynafuse.ops.promotion import Operand, compute_dtype
from dynafuse.ops.reductions import correction, keepdim, reduced_dims
from dynafuse.ops.table import Call, Context, Kind, NvfuserRow, Row, lookup, register
from dynafuse.ops.views import argument, clamped_bound, dim_of, dims_of, source

DTYPES = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool,
})
MAX_RANK = 8
Accepts = Callable[[Call, "Sequence[TensorLike]"], str]


class TensorLike(Protocol):
    """The dtype and sizes of a tensor, before there is a region."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[Any]: ...


# Views ----------------------------------------------------------------------------------------------------------------


def _alias(f: Fusion, call: Call) -> FusionTensor:
    return f.operand(source(call))


def _reshape(f: Fusion, call: Call) -> FusionTensor:
    """Record a reshape; one that only adds or drops dimensions of size 1 leaves nvFuser less to analyse."""
    tensor = f.operand(source(call))
    if [s for s in tensor.shape if s != 1] != [s for s in map(_int_or_expr, call.shape) if s != 1]:
        return f.move("reshape", [tensor], call.shape, f.sizes(call.shape))
    return _change_ones(f, tensor, call.shape)


def _change_ones(f: Fusion, tensor: FusionTensor, shape: Sequence[Any]) -> FusionTensor:
    tensor = f.squeeze(tensor, [d for d, size in enumerate(tensor.shape) if size == 1])
    new = [size == 1 for size in shape]
    return f.unsqueeze(tensor, new) if any(new) else tensor


def _record_permute(f: Fusion, tensor: FusionTensor, order: Sequence[int]) -> FusionTensor:
    broadcast = [tensor.broadcast[d] for d in order]
    return f.move("permute", [tensor], [tensor.shape[d] for d in order], tuple(order), broadcast=broadcast)


def _permute(f: Fusion, call: Call) -> FusionTensor:
    return _record_permute(f, f.operand(source(call)), dims_of(argument(call, "dims", "permutation"), len(call.shape)))


def _transpose(f: Fusion, call: Call) -> FusionTensor:
    order = list(range(len(call.shape)))
    if order:
        first, second = dims_of((call["dim0"], call["dim1"]), len(order))
        order[first], order[second] = second, first
    return _record_permute(f, f.operand(source(call)), order)


def _t(f: Fusion, call: Call) -> FusionTensor:
    return _record_permute(f, f.operand(source(call)), range(len(call.shape))[::-1])


def _expand(f: Fusion, call: Call) -> FusionTensor:
    return f.expand(f.operand(source(call)), call.shape)


def _broadcast_in_dim(f: Fusion, call: Call) -> FusionTensor:
    own_dims = call["broadcast_dimensions"]
    tensor = f.unsqueeze(f.operand(source(call)), [d not in own_dims for d in range(len(call.shape))])
    return f.expand(tensor, call.shape)


def _slice(f: Fusion, call: Call) -> FusionTensor:
    tensor, shape = f.operand(source(call)), f.shape(source(call))
    dim = dim_of(call["dim"], len(shape))
    start = clamped_bound(call["start"], shape[dim], sympy.S.Zero)
    return _record_slice(f, tensor, dim, start, start + call.shape[dim])


def _record_slice(f: Fusion, tensor: FusionTensor, dim: int, start: sympy.Expr, end: sympy.Expr) -> FusionTensor:
    """Return the elements from ``start`` to ``end`` of a dimension."""
    shape: list[Any] = [*tensor.shape]
    if start == 0 and end == shape[dim]:
        return tensor
    starts: list[Any] = [0] * len(shape)
    ends = [*shape]
    starts[dim], ends[dim], shape[dim] = start, end, end - start
    steps = (1,) * len(shape)
    return f.move("slice", [tensor], shape, f.sizes(starts), f.sizes(ends), steps, True,
                  broadcast=[(flag and d != dim) or shape[d] == 1 for d, flag in enumerate(tensor.broadcast)])


def _accepts_slice(call: Call, tensors: Sequence[TensorLike]) -> str:
    return "" if call["step"] == 1 else f"a slice of step {call['step']}: nvFuser's have step 1"


def _select(f: Fusion, call: Call) -> FusionTensor:
    tensor, shape = f.operand(source(call)), f.shape(source(call))
    dim = dim_of(call["dim"], len(shape))
    index = as_expr(call["index"])
    index = index if index.is_nonnegative else index + shape[dim]
    return f.squeeze(_record_slice(f, tensor, dim, index, index + 1), [dim])


# Concatenation, padding and creation ----------------------------------------------------------------------------------


def _cat(f: Fusion, call: Call) -> FusionTensor:
    """Record a concatenation in the op's dtype; an empty piece of another rank, which torch allows, is left out."""
    dim = dim_of(call["dim"], len(call.shape))
    tensors = [f.cast(f.operand(piece), call.dtype) for piece in call["tensors"] if len(f.shape(piece)) == len(call.shape)]
    return _record_cat(f, tensors, call.shape, dim)


def _record_cat(f: Fusion, tensors: Sequence[FusionTensor], shape: Sequence[Any], dim: int) -> FusionTensor:
    return f.move("cat", tensors, shape, dim) if len(tensors) > 1 else tensors[0]


def _stack(f: Fusion, call: Call) -> FusionTensor:
    dim = dim_of(call["dim"], len(call.shape))
    new = [d == dim for d in range(len(call.shape))]
    return _record_cat(f, [f.unsqueeze(f.cast(f.operand(p), call.dtype), new) for p in call["tensors"]], call.shape, dim)


def _accepts_pieces(call: Call, tensors: Sequence[TensorLike]) -> str:
    return "pieces without elements" if any(_int_or_expr(s) == 0 for t in tensors for s in t.shape) else ""


def _pad(f: Fusion, call: Call) -> FusionTensor:
    tensor = f.operand(call["self"])
    paddable = f.cast(tensor, torch.int32) if tensor.dtype is torch.bool else tensor  # nvFuser pads no bools
    value = float(call["value"]) if paddable.dtype.is_floating_point else int(call["value"])
    return f.cast(f.move("pad", [paddable], call.shape, f.sizes(call["pad"]), value), tensor.dtype)


def _full(f: Fusion, call: Call) -> FusionTensor:
    fill = next((call.args[name] for name in ("fill_value", "s", "scalar") if name in call.args), None)
    return f.full(call.shape, int("ones" in str(call.target)) if fill is None else fill, opmath(call.dtype))


def _arange(f: Fusion, call: Call) -> FusionTensor:
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    if isinstance(start, float) or isinstance(step, float):
        positions = f.cast(f.iota(call.shape[0], 0, 1), opmath(call.dtype))
        return f.pointwise("add", f.pointwise("mul", positions, step), start)
    return f.cast(f.iota(call.shape[0], start, step), opmath(call.dtype))


def _positions(f: Fusion, shape: Sequence[Any], dim: int) -> FusionTensor:
    """Return the positions along ``dim``, with size 1 in the other dimensions."""
    dim = dim % len(shape)
    return f.unsqueeze(f.iota(shape[dim], 0, 1), [d != dim for d in range(len(shape))])


def _eye(f: Fusion, call: Call) -> FusionTensor:
    return f.cast(_positions(f, call.shape, 0) == _positions(f, call.shape, 1), opmath(call.dtype))


def _triangle(compare: str) -> RecordOp:
    """Return the entry of triu or tril: ``compare`` is ``ge`` or ``le``."""

    def build(f: Fusion, call: Call) -> FusionTensor:
        tensor = f.cast(f.operand(call["self"]), opmath(call.dtype))
        diagonal = _positions(f, call.shape, -1) - _positions(f, call.shape, -2)
        is_inside = f.pointwise(compare, diagonal, int(call["diagonal"]))
        return f.cast(f.pointwise("where", is_inside, tensor, 0), tensor.dtype)

    return build


def _glu(f: Fusion, call: Call) -> FusionTensor:
    tensor, dim = f.operand(call["self"]), dim_of(call["dim"], len(call.shape))
    half = call.shape[dim]
    value, gate = (f.cast(_record_slice(f, tensor, dim, start, start + half), opmath(call.dtype))
                   for start in (sympy.S.Zero, half))
    return value * f.pointwise("sigmoid", gate)


# Gathers --------------------------------------------------------------------------------------------------------------


def _take(f: Fusion, operand: FusionTensor, index: FusionTensor, dim: int) -> FusionTensor:
    """Return the elements of ``operand`` at an index of any rank along ``dim``; nvFuser's own index has one dimension."""
    count = product(index.shape)
    flat = index
    if len(index.shape) != 1:
        flat = f.move("reshape", [index], [count], f.sizes([count])) if index.shape else f.unsqueeze(index, [True])
    before, after = operand.shape[:dim], operand.shape[dim + 1:]
    rows = f.move("index_select", [operand, flat], [*before, count, *after], dim)
    if len(index.shape) == 1:
        return rows
    shape = (*before, *index.shape, *after)
    return f.squeeze(rows, [dim]) if not index.shape else f.move("reshape", [rows], shape, f.sizes(shape))


def _embedding(f: Fusion, call: Call) -> FusionTensor:
    return _take(f, f.operand(call["weight"]), f.operand(call["indices"]), 0)


def _index_select(f: Fusion, call: Call) -> FusionTensor:
    operand, index = f.operand(call["self"]), f.operand(call["index"])
    flat = index if index.shape else f.unsqueeze(index, [True])
    return _take(f, operand, flat, dim_of(call["dim"], len(operand.shape)))


def _index(f: Fusion, call: Call) -> FusionTensor:
    """Record an indexing by one tensor, in which negative indices count from the end."""
    operand = f.operand(call["self"])
    start, _ = placement(call["indices"], [0])
    index, = (f.operand(index) for index in call["indices"] if index is not None)
    size = f.full((), operand.shape[start], index.dtype)
    return _take(f, operand, f.pointwise("where", index < 0, index + size, index), start)


def _accepts_index(call: Call, tensors: Sequence[TensorLike]) -> str:
    has_several = sum(index is not None for index in call["indices"]) > 1
    return "an index of several tensors" if has_several else _accepts_rank(call, tensors)


def _accepts_rank(call: Call, tensors: Sequence[TensorLike]) -> str:
    return "" if len(tensors[0].shape) else "a gather from a 0-d tensor"


def _gather(f: Fusion, call: Call) -> FusionTensor:
    operand, index = f.operand(call["self"]), f.operand(call["index"])
    return f.move("take_along_axis", [operand, index], call.shape, dim_of(call["dim"], len(call.shape)))


def _accepts_gather(call: Call, tensors: Sequence[TensorLike]) -> str:
    operand, index = (tuple(map(as_expr, t.shape)) for t in tensors[:2])
    if not operand:
        return "a gather from a 0-d tensor"
    dim = dim_of(call["dim"], len(operand))
    same_sizes = all(known_equal(a, b) for d, (a, b) in enumerate(zip(operand, index, strict=True)) if d != dim)
    return "" if same_sizes else "a gather from a part of the tensor"


def _one_row_scatter(f: Fusion, call: Call) -> FusionTensor:
    """Record a scatter whose index has one element along the dimension: the source where the index is the position."""
    old = f.cast(f.operand(call["self"]), opmath(call.dtype))
    source_arg = call.args.get("src", call.args.get("value"))
    new = source_arg if isinstance(source_arg, (bool, int, float)) else f.cast(f.operand(source_arg), opmath(call.dtype))
    index = f.cast(f.operand(call["index"]), torch.int64)
    is_target = _positions(f, call.shape, dim_of(call["dim"], len(call.shape))) == index
    if call.target is torch.ops.aten.scatter_add.default:
        new = old | new if old.dtype is torch.bool else old + new
    return f.cast(f.pointwise("where", is_target, new, old), old.dtype)


# Reductions -----------------------------------------------------------------------------------------------------------


def _operand(f: Fusion, call: Call, dtype: torch.dtype) -> tuple[FusionTensor, tuple[int, ...], bool]:
    """Return the operand of a reduction in a dtype, the dimensions that are reduced, and whether they stay with size 1."""
    tensor = f.operand(source(call))
    return f.cast(tensor, dtype), reduced_dims(call.args, len(tensor.shape)), keepdim(call.args)


def _reduction(name: str) -> RecordOp:
    """Return the entry of a reduction that nvFuser has by that name."""

    def build(f: Fusion, call: Call) -> FusionTensor:
        return f.reduce(name, *_operand(f, call, opmath(call.dtype)))

    return build


def _extreme(name: str) -> RecordOp:
    """Return the entry of amax or amin, which are taken of bools as integers."""

    def build(f: Fusion, call: Call) -> FusionTensor:
        dtype = f.operand(source(call)).dtype
        tensor, dims, keep = _operand(f, call, torch.int32 if dtype is torch.bool else opmath(dtype))
        return f.cast(f.reduce(name, tensor, dims, keep), opmath(call.dtype))

    return build


def _any_or_all(name: str) -> RecordOp:
    """Return the entry of any or all: the maximum or the minimum of truth values as integers."""

    def build(f: Fusion, call: Call) -> FusionTensor:
        tensor = f.operand(source(call))
        _, dims, keep = _operand(f, call, tensor.dtype)
        truths = f.cast(f.cast(tensor, opmath(tensor.dtype)), torch.bool)
        return f.cast(f.reduce(name, f.cast(truths, torch.int32), dims, keep), call.dtype)

    return build


def _mean(f: Fusion, call: Call) -> FusionTensor:
    tensor, dims, keep = _operand(f, call, opmath(call.dtype))
    return _record_mean(f, tensor, dims, keep)


def _record_mean(f: Fusion, tensor: FusionTensor, dims: Sequence[int], keep: bool, less: float = 0) -> FusionTensor:
    """Return the sum divided by the number of elements less ``less``; where that is not positive, NaN or infinity."""
    total, count = f.reduce("sum", tensor, dims, keep), product([tensor.shape[d] for d in dims])
    if not count.is_Integer:
        return total / f.pointwise("maximum", f.full((), count, tensor.dtype) - less, 0.0)
    return total * (1 / (int(count) - less) if int(count) > less else float("inf"))


def _variance(f: Fusion, call: Call) -> FusionTensor:
    """Record a variance in two passes, over deviations from the mean.

    nvFuser's own mean beside its variance is NaN where there is an infinity, and a sum beside its variance is more than it
    can compile for 16-bit floats.
    """
    tensor, dims, keep = _operand(f, call, opmath(call.dtype))
    deviation = tensor - _record_mean(f, tensor, dims, True)
    return _record_mean(f, deviation * deviation, dims, keep, correction(call.args))


def _standard_deviation(f: Fusion, call: Call) -> FusionTensor:
    return f.pointwise("sqrt", _variance(f, call))


# The column -----------------------------------------------------------------------------------------------------------

_REDUCTION_ENTRIES: dict[str, RecordOp] = {
    "sum": _reduction("sum"), "prod": _reduction("prod"), "mean": _mean, "max": _extreme("max"), "min": _extreme("min"),
    "any": _any_or_all("max"), "all": _any_or_all("min"), "var": _variance, "std": _standard_deviation,
}
_ENTRIES: dict[str, tuple[RecordOp, Accepts | None]] = {
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
    "aten.alias.default aten.detach.default": (_alias, None),
    "aten.cat.default prims.cat.default": (_cat, _accepts_pieces),
    "aten.stack.default": (_stack, None),
    "aten.constant_pad_nd.default": (_pad, None),
    "aten.triu.default": (_triangle("ge"), None),
    "aten.tril.default": (_triangle("le"), None),
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


def _fill_column() -> None:
    """Register the rows of all ops with entries again, with these."""
    for row in table.rows():
        if row.kind is Kind.REDUCTION and row.reduction in _REDUCTION_ENTRIES:
            register(dataclasses.replace(row, nvfuser=NvfuserRow(_REDUCTION_ENTRIES[row.reduction])))
    for names, (build, accepts) in _ENTRIES.items():
        for target in overloads(names):
            own_row = lookup(target)
            assert own_row is not None, target
            register(dataclasses.replace(own_row, nvfuser=NvfuserRow(build, accepts)))


_fill_column()


# Refusals -------------------------------------------------------------------------------------------------------------


def refusal(row: Row, call: Call, tensors: Sequence[TensorLike]) -> str:
    """Return why nvFuser cannot do a call of a fusible op, or "".

    Args:
        row: The op's row.
        call: The call, which ``ops.refusal`` does not refuse: it is not asked again here.
        tensors: The call's tensor arguments in order, those in lists included.
    """
    reason = row.reason or _refuse_dtypes_and_ranks(call, tensors)
    if reason:
        return reason
    if row.nvfuser is None:
        return _refuse_expression(row, call, tensors)
    return row.nvfuser.accepts(call, tensors) if row.nvfuser.accepts else ""


def _refuse_dtypes_and_ranks(call: Call, tensors: Sequence[TensorLike]) -> str:
    unsupported = [dtype for dtype in (call.dtype, *(t.dtype for t in tensors)) if dtype not in DTYPES]
    if unsupported:
        return f"nvFuser has no {unsupported[0]}"
    rank = max(map(len, (call.shape, *(t.shape for t in tensors))))
    return f"{rank} dimensions: nvFuser has at most {MAX_RANK}" if rank > MAX_RANK else ""


def _refuse_expression(row: Row, call: Call, tensors: Sequence[TensorLike]) -> str:
    """Return what an op without an entry needs and nvFuser lacks: functions of its expression, or the op itself."""
    if row.kind is not Kind.POINTWISE or row.emit is None:
        return f"nvFuser has no {call.target._schema.name.split('::')[1]}"
    names = ", ".join(missing(_expression_text(row, call, tensors)))
    return f"nvFuser has no {names}" if names else ""


def _expression_text(row: Row, call: Call, tensors: Sequence[TensorLike]) -> str:
    """Return a pointwise call's expression over operands ``x0``, ``x1`` …, by their positions."""
    remaining = iter(tensors)
    schema = {argument.name: argument for argument in call.target._schema.arguments}
    kinds = [_kind(arg, next(remaining) if _is_tensor(schema[name], arg) else None) for name, arg in call.args.items()]
    dtype = compute_dtype(row, call, [kind for i, kind in enumerate(kinds) if kind is not None and i not in row.raw])
    context = Context(opmath(dtype or call.dtype), call.dtype, tuple(t.dtype for t in tensors))
    return expression(row, context, [f"x{i}" if isinstance(kind, tuple) or _is_size(arg) else arg
                                     for i, (kind, arg) in enumerate(zip(kinds, call.args.values(), strict=True))])


def _is_tensor(argument: torch.Argument, value: Any) -> bool:
    """Return whether the value of an argument is a tensor: schemas let numbers stand for tensors."""
    is_number = value is None or isinstance(value, (bool, int, float)) or _is_size(value)
    return "Tensor" in str(argument.type) and not is_number


def _kind(arg: Any, tensor: TensorLike | None) -> Operand | None:
    """Return an argument as type promotion sees it; None if it has no part in that."""
    if tensor is not None:
        return tensor.dtype, len(tensor.shape) == 0
    if isinstance(arg, (bool, int, float)):
        return type(arg)
    return int if _is_size(arg) else None


def _is_size(arg: Any) -> bool:
    """Return whether an argument is an integer that is known at run time."""
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return isinstance(value, (sympy.Expr, torch.SymInt))


def expression(row: Row, context: Context, operands: Sequence[Any]) -> str:
    """Return a pointwise row's expression over operands.

    Args:
        row: The row.
        context: The dtypes that the expression may depend on.
        operands: Names of values, and numbers, which become literals.
    """
    if callable(row.emit):
        return row.emit(context, *operands)
    assert row.emit is not None
    return row.emit.format(*(literal(o, context.dtype) if isinstance(o, (bool, int, float)) else o for o in operands))


def _int_or_expr(size: Any) -> Any:
    expr = as_expr(size)
    return int(expr) if expr.is_Integer else expr
