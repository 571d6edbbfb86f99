"""Rows of gathers: an index that holds loaded values; and the scatters, which run eager.

``x[:, i, :, j]`` is ``aten.index.Tensor(x, [None, i, None, j])``: the index tensors broadcast against each other; their
dimensions stand where the first of them stood if all were adjacent, else in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Value, eager, register, rewrite
from dynafuse.ops.views import aligned, dim_of, replaced

_GATHER_FLOPS = 2.0


def _embedding(build: Builder, call: Call, index: Index) -> Value:
    weight = call["weight"]
    row = build.indirect(build.operand(call["indices"], index[:-1]), build.shape(weight)[0])
    return build.operand(weight, (row, index[-1]))


def _gather(build: Builder, call: Call, index: Index) -> Value:
    operand, shape = call["self"], build.shape(call["self"])
    if not shape:
        return build.operand(operand, ())
    dim = dim_of(call["dim"], len(shape))
    picked = build.operand(call["index"], index if len(build.shape(call["index"])) else ())
    return build.operand(operand, replaced(index, dim, build.indirect(picked, shape[dim])))


def _index_select(build: Builder, call: Call, index: Index) -> Value:
    operand, shape = call["self"], build.shape(call["self"])
    if not shape:
        return build.operand(operand, ())
    dim = dim_of(call["dim"], len(shape))
    picked = build.operand(call["index"], index[dim : dim + len(build.shape(call["index"]))])
    return build.operand(operand, replaced(index, dim, build.indirect(picked, shape[dim])))


def _index(build: Builder, call: Call, index: Index) -> Value:
    return build.operand(call["self"], _advanced(build, call, index))


def _masked_index(build: Builder, call: Call, index: Index) -> Value:
    mask = build.operand(call["mask"], aligned(index, build.shape(call["mask"])))
    return build.masked(build.cast(mask, torch.bool), lambda: _index(build, call, index), call["fill"])


def _advanced(build: Builder, call: Call, index: Index) -> Index:
    """The operand's index for one with index tensors."""
    shape = build.shape(call["self"])
    indices = [*call["indices"], *[None] * (len(shape) - len(call["indices"]))]
    start, rank = placement(indices, [len(build.shape(at)) for at in indices if at is not None])
    picked, kept = index[start : start + rank], iter((*index[:start], *index[start + rank :]))
    return tuple(next(kept) if at is None else _loaded(build, at, picked, size)
                 for at, size in zip(indices, shape, strict=True))


def _loaded(build: Builder, at: Any, picked: Index, size: sympy.Expr) -> sympy.Expr:
    return build.indirect(build.operand(at, aligned(picked, build.shape(at))), size)


def placement(indices: Sequence[Any], ranks: Sequence[int]) -> tuple[int, int]:
    """Where in the result the index tensors' broadcast dimensions start, and how many they are."""
    used = [dim for dim, at in enumerate(indices) if at is not None]
    adjacent = used[-1] - used[0] + 1 == len(used)
    return (used[0] if adjacent else 0), max(ranks)


def _accepts_index(call: Call) -> str:
    tensors = [at for at in call["indices"] if at is not None]
    if not tensors:
        return "index without index tensors"
    masks = any(_dtype(at) in (torch.bool, torch.uint8) for at in tensors)
    return "index by a mask: the result's size depends on data" if masks else ""


def _dtype(arg: Any) -> torch.dtype | None:
    """The dtype of a tensor argument: an FX node, or a tensor itself."""
    value = arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg
    return getattr(value, "dtype", None)


_GATHERS = {
    "aten.embedding.default": _embedding,
    "aten.gather.default": _gather,
    "aten.index_select.default": _index_select,
}
_EAGER = {
    "aten.take.default": "take: an index into the flattened tensor",
    "aten.masked_select.default aten.nonzero.default aten.nonzero_static.default": "the result's size depends on data",
    "aten.scatter.src aten.scatter.value aten.scatter.reduce aten.scatter.value_reduce aten.scatter_add.default "
    "aten.scatter_reduce.two": "scatter: writes at loaded indices",
    "aten.index_put.default aten._unsafe_index_put.default aten._index_put_impl.default aten.index_add.default "
    "aten.index_copy.default aten.index_fill.int_Scalar aten.index_fill.int_Tensor aten.index_reduce.default "
    "aten._unsafe_masked_index_put_accumulate.default aten.masked_scatter.default aten.put.default "
    "aten.index_put_.default "
    "aten._index_put_impl_.default": "index_put: writes at loaded indices",
    "aten.embedding_dense_backward.default aten._embedding_bag.default aten._embedding_bag_forward_only.default "
    "aten._embedding_bag_backward.default": "embedding backward: adds rows at loaded indices",
    "aten.gather_backward.default aten.masked_scatter_backward.default": "scatter: writes at loaded indices",
    "aten.grid_sampler_2d_backward.default aten.grid_sampler_3d.default aten.grid_sampler_3d_backward.default":
        "grid sampling stays whole",
}

for _names, _lower in _GATHERS.items():
    for _target in overloads(_names):
        register(rewrite(_target, Kind.GATHER, _lower, flops=_GATHER_FLOPS))
for _target in overloads("aten.index.Tensor aten._unsafe_index.Tensor"):
    register(rewrite(_target, Kind.GATHER, _index, accepts=_accepts_index, flops=_GATHER_FLOPS))
for _target in overloads("aten._unsafe_masked_index.default"):
    register(rewrite(_target, Kind.GATHER, _masked_index, accepts=_accepts_index, flops=_GATHER_FLOPS))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
