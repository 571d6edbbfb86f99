"""Rows of views: no data moves, the index is rewritten.

    >>> from dynafuse.ops.indexing_math import symbol
    >>> i, j = symbol("i", 4), symbol("j", 6)
    >>> reshaped((i, j), (4, 6), (4, 2, 3))
    (i, (j//3), Mod(j, 3))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import S

from dynafuse.ops.indexing_math import (
    Size,
    as_expr,
    flatten,
    known_equal,
    known_nonnegative,
    unflatten,
)
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Order, Value, View, by_strides, eager, lookup, register, rewrite

Shape = tuple[sympy.Expr, ...]
Rewrite = Callable[[Call, Index, Shape], Index]
"""From a call, an index of its output and its operand's sizes to the operand's index."""


def source(call: Call) -> Any:
    """Return the first argument: ``self`` in ATen, ``a`` in prims."""
    return next(iter(call.args.values()))


def argument(call: Call, *names: str) -> Any:
    """Return the argument that has one of the names."""
    return next(call.args[name] for name in names if name in call.args)


def dim_of(dim: int, rank: int) -> int:
    """Return a dimension counted from the front; 0-d tensors have a dimension 0 in that sense."""
    return dim % max(rank, 1)


def dims_of(dims: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return dimensions counted from the front, in the order given."""
    return tuple(dim_of(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims))


def replaced(index: Index, dim: int, at: sympy.Expr) -> Index:
    """Return an index with another position in one dimension.

    Args:
        index: The index.
        dim: The dimension, not negative.
        at: The position.
    """
    return (*index[:dim], at, *index[dim + 1 :])


def without(index: Index, dim: int) -> Index:
    """Return ``index`` without dimension ``dim``."""
    return (*index[:dim], *index[dim + 1 :])


def aligned(index: Index, shape: Sequence[Size]) -> Index:
    """Return the index into an operand that is broadcast.

    Args:
        index: The index into the broadcast result.
        shape: The sizes of the operand, whose dimensions are the last ones of the result.
    """
    tail = index[len(index) - len(shape) :]
    return tuple(S.Zero if size == 1 else at for at, size in zip(tail, shape, strict=True))


def from_end(position: sympy.Expr, size: sympy.Expr) -> sympy.Expr | None:
    """Return a position that may count from the end as one from the front; None if its sign is not known."""
    if known_nonnegative(position):
        return position
    return size + position if known_nonnegative(-position - 1) else None


def clamped_bound(position: Any, size: sympy.Expr, default: sympy.Expr) -> sympy.Expr:
    """Return a slice's start or end as Python reads it: counted from the end if negative, inside ``[0, size]``.

    Args:
        position: The start or end, a number or a size; None for the default.
        size: The size of the dimension.
        default: What None stands for.
    """
    if position is None:
        return default
    at = from_end(as_expr(position), size)
    if at is None:
        at = sympy.Piecewise((as_expr(position), as_expr(position) >= 0), (size + as_expr(position), True))
    at = at if known_nonnegative(at) else sympy.Max(at, 0)
    return at if known_nonnegative(size - at) else sympy.Min(at, size)


def reshaped(index: Index, shape: Sequence[Size], operand: Sequence[Size]) -> Index:
    """Return the index, in the sizes ``operand``, of the element that is at ``index`` when the same data has ``shape``.

    Runs of dimensions with equal products are matched first, so that dimensions which the reshape leaves alone pass
    through as they are, whatever their sizes.

    Args:
        index: An index into ``shape``.
        shape: Sizes.
        operand: Other sizes of as many elements in all.
    """
    if any(size == 0 for size in shape):
        return tuple(S.Zero for _ in operand)
    result: list[sympy.Expr] = []
    for outer, inner in _groups(shape, operand):
        result += _regrouped(index[outer], shape[outer], operand[inner])
    return tuple(result)


def _regrouped(index: Index, shape: Sequence[Size], operand: Sequence[Size]) -> Iterator[sympy.Expr]:
    """Yield the operand's positions in one group of dimensions; those of size 1 are set aside."""
    varying = [(at, size) for at, size in zip(index, shape, strict=True) if size != 1]
    sizes = [size for size in operand if size != 1]
    flat = flatten([at for at, _ in varying], [size for _, size in varying])
    positions = iter((flat,) if len(sizes) == 1 else unflatten(flat, sizes))
    return (S.Zero if size == 1 else next(positions) for size in operand)


def _groups(left: Sequence[Size], right: Sequence[Size]) -> Iterator[tuple[slice, slice]]:
    """Yield the shortest runs of dimensions of both shapes that hold equally many elements."""
    i = j = 0
    while i < len(left) or j < len(right):
        first_i, first_j = i, j
        left_count, right_count = S.One, S.One
        while True:
            if i < len(left) and (j == len(right) or _takes_left(left_count, right_count)):
                left_count, i = left_count * left[i], i + 1
            else:
                right_count, j = right_count * right[j], j + 1
            if known_equal(left_count, right_count) or (i == len(left) and j == len(right)):
                break
        yield slice(first_i, i), slice(first_j, j)


def _takes_left(left_count: sympy.Expr, right_count: sympy.Expr) -> bool:
    """Return whether the left run is to grow: the one with fewer elements, or with fewer symbols where that is not known."""
    if left_count.is_Integer and right_count.is_Integer:
        return bool(left_count <= right_count)
    gap = sympy.expand(right_count - left_count)
    if gap.is_nonnegative or gap.is_nonpositive:
        return bool(gap.is_nonnegative)
    return len(left_count.free_symbols) <= len(right_count.free_symbols)


# The rewrites ---------------------------------------------------------------------------------------------------------


def _reshape(call: Call, index: Index, shape: Shape) -> Index:
    return reshaped(index, call.shape, shape)


def _permuted(order: Order) -> Rewrite:
    def rule(call: Call, index: Index, shape: Shape) -> Index:
        dims = order(call.args, len(shape))
        return tuple(index[dims.index(dim)] for dim in range(len(shape)))

    return rule


def _permute(args: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    return dims_of(next(args[name] for name in ("dims", "permutation") if name in args), rank)


def _transpose(args: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    order = list(range(rank))
    if order:
        first, second = dims_of((args["dim0"], args["dim1"]), rank)
        order[first], order[second] = second, first
    return tuple(order)


def _t(args: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    return tuple(reversed(range(rank)))


def _expand(call: Call, index: Index, shape: Shape) -> Index:
    return aligned(index, shape)


def _broadcast_in_dim(call: Call, index: Index, shape: Shape) -> Index:
    return aligned(tuple(index[dim] for dim in call["broadcast_dimensions"]), shape)


def _squeeze(call: Call, index: Index, shape: Shape) -> Index:
    dims = next((call.args[name] for name in ("dim", "dimensions") if name in call.args), tuple(range(len(shape))))
    gone = set(dims_of(dims, len(shape))) if shape else set()
    if len(gone) != len(shape) - len(index):  # else all go, also those whose size is 1 by a guard alone
        gone = {dim for dim in gone if shape[dim] == 1}
    rest = iter(index)
    return tuple(S.Zero if dim in gone else next(rest) for dim in range(len(shape)))


def _unsqueeze(call: Call, index: Index, shape: Shape) -> Index:
    return without(index, dim_of(call["dim"], len(index)))


def _slice(call: Call, index: Index, shape: Shape) -> Index:
    dim = dim_of(call["dim"], len(shape))
    start = clamped_bound(call["start"], shape[dim], S.Zero)
    return replaced(index, dim, start + index[dim] * as_expr(call["step"]))


def _select(call: Call, index: Index, shape: Shape) -> Index:
    dim = dim_of(call["dim"], len(shape))
    at = from_end(as_expr(call["index"]), shape[dim])
    assert at is not None  # _accepts_select has refused it
    return (*index[:dim], at, *index[dim:])


def _accepts_select(call: Call) -> str:
    """Refuse an index of unknown sign. The size does not matter."""
    known = from_end(as_expr(call["index"]), S.One) is not None
    return "" if known else "select: an index whose sign is not known"


def _diagonal(call: Call, index: Index, shape: Shape) -> Index:
    first, second = dims_of((call["dim1"], call["dim2"]), len(shape))
    offset = as_expr(call["offset"])
    rest = iter(index[:-1])
    at = {first: index[-1] + sympy.Max(-offset, 0), second: index[-1] + sympy.Max(offset, 0)}
    return tuple(at[dim] if dim in at else next(rest) for dim in range(len(shape)))


def _unfold(call: Call, index: Index, shape: Shape) -> Index:
    if not shape:
        return ()
    dim = dim_of(call["dimension"], len(shape))
    return replaced(index[:-1], dim, index[dim] * as_expr(call["step"]) + index[-1])


def _same(call: Call, index: Index, shape: Shape) -> Index:
    return index


_REWRITES: dict[str, Rewrite] = {
    "aten.view.default aten._unsafe_view.default aten.reshape.default aten._reshape_alias.default "
    "aten.flatten.using_ints "
    "aten.unflatten.int aten.view_as.default aten.view_copy.default prims.reshape.default prims.collapse_view.default "
    "prims.collapse.default "
    "prims.split_dim.default": _reshape,
    "aten.expand.default aten.expand_copy.default aten.broadcast_to.default": _expand,
    "prims.broadcast_in_dim.default": _broadcast_in_dim,
    "aten.squeeze.default aten.squeeze.dim aten.squeeze.dims aten.squeeze_copy.default aten.squeeze_copy.dim "
    "aten.squeeze_copy.dims prims.squeeze.default": _squeeze,
    "aten.unsqueeze.default aten.unsqueeze_copy.default": _unsqueeze,
    "aten.slice.Tensor aten.slice_copy.Tensor": _slice,
    "aten.diagonal.default aten.diagonal_copy.default": _diagonal,
    "aten.unfold.default aten.unfold_copy.default": _unfold,
    "aten.alias.default aten.detach.default": _same,
}
_ORDERS: dict[str, Order] = {
    "aten.permute.default aten.permute_copy.default prims.transpose.default": _permute,
    "aten.transpose.int aten.transpose_copy.int": _transpose,
    "aten.t.default aten.t_copy.default": _t,
}
_VIEWS = {
    View.RESHAPE: "aten.view.default aten._unsafe_view.default aten.reshape.default aten.unsqueeze.default "
                  "aten.squeeze.default aten.squeeze.dim aten.squeeze.dims aten.alias.default aten.detach.default",
    View.EXPAND: "aten.expand.default",
}
"""Of the views that functional graphs have, what they do to dimensions; others are decomposed before they come here."""


@functools.cache
def lowered(rule: Rewrite) -> Callable[[Builder, Call, Index], Value]:
    """Return a row's ``lower`` from a rewrite of the index."""

    def lower(build: Builder, call: Call, index: Index) -> Value:
        operand = source(call)
        return build.operand(operand, rule(call, index, tuple(build.shape(operand))))

    return lower


def _kind(target: torch._ops.OpOverload) -> Kind:
    """Return VIEW for a view by its schema, INDEX for a copy of one in memory of its own.

    ``_unsafe_view`` is a view whose schema denies it.
    """
    return Kind.VIEW if target.is_view or target is torch.ops.aten._unsafe_view.default else Kind.INDEX


for _names, _rule in _REWRITES.items():
    for _target in overloads(_names):
        register(rewrite(_target, _kind(_target), lowered(_rule)))
for _view, _names in _VIEWS.items():
    for _target in overloads(_names):
        _row = lookup(_target)
        assert _row is not None
        register(replace(_row, view=_view))
for _names, _order in _ORDERS.items():
    _rule = _permuted(_order)
    for _target in overloads(_names):
        register(replace(rewrite(_target, _kind(_target), lowered(_rule)), view=View.PERMUTE, order=_order))

for _target in overloads("aten.select.int aten.select_copy.int"):
    register(rewrite(_target, _kind(_target), lowered(_select), accepts=_accepts_select))

_SPLITS = ("aten.split.Tensor aten.split_with_sizes.default aten.unbind.int aten.chunk.default aten.split_copy.Tensor "
           "aten.split_with_sizes_copy.default aten.unbind_copy.int aten.split.sizes")

_EAGER = {
    _SPLITS: "returns a list: its pieces are taken as slices",
    "aten.view_as_real.default aten.view_as_complex.default aten.real.default aten.imag.default prims.real.default "
    "prims.imag.default aten.view_as_real_copy.default aten.view_as_complex_copy.default aten._neg_view.default":
        "complex stays whole",
    "aten.view.dtype prims.view_of_dtype.default aten.view_copy.dtype": "reinterprets bits",
}

for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
for _target in overloads("aten.as_strided.default aten.as_strided_copy.default prims.as_strided.default"):
    register(by_strides(_target))
