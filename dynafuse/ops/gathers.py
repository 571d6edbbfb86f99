"""Rows of gathers: an index that holds loaded values; and of scatters that can be computed like gathers.

A scatter whose index has one element along its dimension writes each output element at most once, so it is asked from the
other side: element ``j`` is the source where the loaded index is ``j``, else what was there. All other scatters are in
``scatters.py``.

``x[:, i, :, j]`` is ``aten.index.Tensor(x, [None, i, None, j])``: the index tensors broadcast against each other; their
dimensions stand where the first of them stood if all were adjacent, else in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Indexed, Kind, Lower, Row, Value, eager, register, rewrite
from dynafuse.ops.views import aligned, dim_of, replaced

_GATHER_FLOPS = 2.0


def _embedding(build: Builder, call: Call, index: Index) -> Value:
    weight = call["weight"]
    row = _loaded(build, call["indices"], index[:-1], build.shape(weight)[0])
    return build.operand(weight, (row, index[-1]))


def _gather(build: Builder, call: Call, index: Index) -> Value:
    return _along(build, call, index, index if build.shape(call["index"]) else ())


def _index_select(build: Builder, call: Call, index: Index) -> Value:
    rank, index_rank = len(build.shape(call["self"])), len(build.shape(call["index"]))
    if not rank:  # an operand without dimensions takes an index of one element
        return _along(build, call, index, (sympy.S.Zero,) * index_rank)
    dim = dim_of(call["dim"], rank)
    return _along(build, call, index, index[dim : dim + index_rank])


def _along(build: Builder, call: Call, index: Index, index_at: Index) -> Value:
    """Return the operand at ``index``, where in one dimension the index tensor's element ``index_at`` says which.

    An operand without dimensions has one element; its index is checked all the same.
    """
    operand, shape = call["self"], build.shape(call["self"])
    if not shape:
        build.loaded_index(call["index"], index_at, sympy.S.One)
        return build.operand(operand, ())
    dim = dim_of(call["dim"], len(shape))
    return build.operand(operand, replaced(index, dim, _loaded(build, call["index"], index_at, shape[dim])))


def _loaded(build: Builder, tensor: Any, index: Index, size: sympy.Expr) -> sympy.Expr:
    """Return the element of an index tensor at ``index`` as an index into a dimension of ``size`` elements."""
    return build.indirect(build.loaded_index(tensor, index, size), size)


def _index(build: Builder, call: Call, index: Index) -> Value:
    trusted = call.target is not torch.ops.aten.index.Tensor
    return build.operand(call["self"], operand_index(build, call, index, trusted=trusted))


def _masked_index(build: Builder, call: Call, index: Index) -> Value:
    mask = build.operand(call["mask"], aligned(index, build.shape(call["mask"])))
    return build.masked(build.cast(mask, torch.bool), lambda: _index(build, call, index), call["fill"])


def operand_index(build: Builder, call: Call, index: Index, *, trusted: bool, clamps: bool = False) -> Index:
    """Return the index into the operand of an op with a list of index tensors, given the index into its result.

    Args:
        build: Loads the index tensors.
        call: The op: ``self`` is the operand, ``indices`` has a tensor or None for each dimension, and may be shorter.
        index: The index into the result.
        trusted: Whether the op promises that all loaded indices are in range.
        clamps: Whether loaded indices out of range stand for the nearest one in range.
    """
    shape = build.shape(call["self"])
    indices = [*call["indices"], *[None] * (len(shape) - len(call["indices"]))]
    start, rank = placement(indices, [len(build.shape(at)) for at in indices if at is not None])
    tensors_at, others = index[start : start + rank], iter((*index[:start], *index[start + rank :]))
    return tuple(next(others) if tensor is None else _wrapped(build, tensor, tensors_at, size, trusted, clamps)
                 for tensor, size in zip(indices, shape, strict=True))


def _wrapped(build: Builder, arg: Any, index: Index, size: sympy.Expr, trusted: bool, clamps: bool) -> sympy.Expr:
    """Return the element of an index tensor, broadcast to ``index``, where negative ones count from the end."""
    at = build.loaded_index(arg, aligned(index, build.shape(arg)), size, wraps=True, trusted=trusted)
    if clamps:
        last = build.index_value(size - 1)
        at = build.expression("tl.minimum(tl.maximum({0}, 0), {1})", torch.int64, at, last)
    return build.indirect(at, size)


def placement(indices: Sequence[Any], ranks: Sequence[int]) -> tuple[int, int]:
    """Return the first dimension that the broadcast index tensors take in the result, and how many they take.

    Args:
        indices: A tensor or None for each dimension of what is indexed; one at least is a tensor.
        ranks: How many dimensions each of the tensors has.
    """
    used = [dim for dim, at in enumerate(indices) if at is not None]
    adjacent = used[-1] - used[0] + 1 == len(used)
    return (used[0] if adjacent else 0), max(ranks)


def _one_row_scatter(build: Builder, call: Call, index: Index) -> Value:
    """Lower a scatter along a dimension in which the index has one element."""
    dim = dim_of(call["dim"], len(index))
    size = build.shape(call["self"])[dim]
    at = replaced(index, dim, sympy.S.Zero)
    before = build.operand(call["self"], index)
    source = _scattered(build, call, at, before.dtype)
    written = build.indirect(build.loaded_index(call["index"], at, size), size)
    is_written = build.compare(written, "==", index[dim])
    if call.target is torch.ops.aten.scatter_add.default:
        # Of bools "+" is a sum modulo 2 on a GPU.
        sum_text = "{0} | {1}" if before.dtype is torch.bool else "{0} + {1}"
        source = build.expression(sum_text, before.dtype, before, source)
    return build.expression("tl.where({0}, {1}, {2})", before.dtype, is_written, source, before)


def _scattered(build: Builder, call: Call, at: Index, dtype: torch.dtype) -> Value:
    if "value" in call.args:
        return build.constant(call["value"], dtype)
    return build.cast(build.operand(call["src"], at), dtype)


def _accepts_scatter(call: Call) -> str:
    shape, index_shape = shape_of(call["self"]), shape_of(call["index"])
    if not shape:
        return "scatter into a 0-d tensor"
    dim = dim_of(call["dim"], len(shape))
    if index_shape[dim] != 1:
        return "scatter: may write one element more than once"
    same = all(known_equal(a, b) for d, (a, b) in enumerate(zip(shape, index_shape, strict=True)) if d != dim)
    return "" if same else "scatter into a part of the tensor"


def shape_of(arg: Any) -> tuple[sympy.Expr, ...]:
    """Return the sizes of an FX node or tensor as expressions: comparing symbolic sizes would add a guard to the graph."""
    return tuple(map(as_expr, arg.meta["val"].shape if isinstance(arg, torch.fx.Node) else arg.shape))


def accepts_index(call: Call) -> str:
    """Return why an op with a list of index tensors cannot be fused, or ""."""
    tensors = [at for at in call["indices"] if at is not None]
    if not tensors:
        return "index without index tensors"
    masks = any(_dtype(at) in (torch.bool, torch.uint8) for at in tensors)
    return "index by a mask: the result's size depends on data" if masks else ""


def _dtype(arg: Any) -> torch.dtype | None:
    """Return the dtype of a tensor argument: an FX node, or a tensor itself."""
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return getattr(value, "dtype", None)


def _of_rows(args: Mapping[str, Any]) -> Iterator[Indexed]:
    yield args["indices"], args["weight"], 0


def indexed_dim(args: Mapping[str, Any]) -> Iterator[Indexed]:
    """Yield the index tensor of an op that has one, for one dimension."""
    yield args["index"], args["self"], args["dim"]


def indexed_dims(args: Mapping[str, Any]) -> Iterator[Indexed]:
    """Yield the index tensors of an op with a list of them."""
    return ((at, args["self"], dim) for dim, at in enumerate(args["indices"]) if at is not None)


_GATHERS = {
    "aten.embedding.default": (_embedding, _of_rows),
    "aten.gather.default": (_gather, indexed_dim),
    "aten.index_select.default": (_index_select, indexed_dim),
}
_EAGER = {
    "aten.take.default": "take: an index into the flattened tensor",
    "aten.masked_select.default aten.nonzero.default aten.nonzero_static.default": "the result's size depends on data",
    "aten.scatter.reduce aten.scatter.value_reduce": "scatter: writes at loaded indices",
    "aten._index_put_impl.default aten.index_fill.int_Tensor aten.index_reduce.default aten.masked_scatter.default "
    "aten.put.default aten.index_put_.default aten._index_put_impl_.default": "index_put: writes at loaded indices",
    "aten.embedding_dense_backward.default aten._embedding_bag.default aten._embedding_bag_forward_only.default "
    "aten._embedding_bag_backward.default": "embedding backward: adds rows at loaded indices",
    "aten.gather_backward.default aten.masked_scatter_backward.default": "scatter: writes at loaded indices",
    "aten.grid_sampler_2d_backward.default aten.grid_sampler_3d.default aten.grid_sampler_3d_backward.default":
        "grid sampling stays whole",
}



def _row(target: OpOverload, lower: Lower, indices: Callable[[Mapping[str, Any]], Iterator[Indexed]],
         accepts: Callable[[Call], str] | None = None) -> Row:
    return replace(rewrite(target, Kind.GATHER, lower, accepts=accepts, flops=_GATHER_FLOPS), indices=indices)


for _names, (_lower, _indices) in _GATHERS.items():
    for _target in overloads(_names):
        register(_row(_target, _lower, _indices))
for _target in overloads("aten.index.Tensor aten._unsafe_index.Tensor"):
    register(_row(_target, _index, indexed_dims, accepts_index))
for _target in overloads("aten._unsafe_masked_index.default"):
    register(_row(_target, _masked_index, indexed_dims, accepts_index))
for _target in overloads("aten.scatter.src aten.scatter.value aten.scatter_add.default"):
    register(replace(_row(_target, _one_row_scatter, indexed_dim, _accepts_scatter), aligned=("self",)))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
