"""Rows of scatters: ops that write values at loaded places of a tensor that is there already.

A scatter runs along its values, not along its result: of ``index_put(base, [i], values, accumulate=True)`` with values of
``[32, 512, 768]`` a kernel has a point per value, and adds each to the element of ``base`` that its index says, atomically.
So nothing of the result is known before the kernel has ended, and the base has to be in memory before it begins: its
memory becomes the result's. ``dynafuse/passes/scatters.py`` gives every scatter a base that nothing else reads.

A scatter along a dimension in which its index has one element writes each element at most once: ``dynafuse/ops/gathers.py``
computes it from the other side, without a base in memory. The rows here are what such ops are otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from dynafuse.ops.creation import number
from dynafuse.ops.gathers import accepts_index, indexed_dim, indexed_dims, operand_index, placement, shape_of
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import (
    Builder,
    Call,
    Combine,
    Index,
    Kind,
    Row,
    Scatter,
    Value,
    Write,
    lookup,
    register,
)
from dynafuse.ops.views import aligned, dim_of, replaced

_SCATTER_FLOPS = 4.0

ADDED = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes that a GPU adds to memory atomically. Those of 16 bits it adds as well, but rounds after each term."""

COMPARED = frozenset({torch.int32, torch.int64})
"""Dtypes of which a GPU keeps the largest atomically, as eager does: of floats it would not keep a NaN."""

Points = tuple[sympy.Expr, ...]


# index_put ------------------------------------------------------------------------------------------------------------


def _put(build: Builder, call: Call, index: Index) -> Write:
    trusted = call.target is torch.ops.aten._unsafe_index_put.default
    return Write(operand_index(build, call, index, trusted=trusted), _value_at(build, call, "values", index))


def _masked_put(build: Builder, call: Call, index: Index) -> Write:
    """Write where the mask is on; eager takes what is out of range there for the nearest element."""
    mask = build.cast(build.operand(call["mask"], aligned(index, build.shape(call["mask"]))), torch.bool)
    places = operand_index(build, call, index, trusted=True, clamps=True)
    return Write(places, _value_at(build, call, "values", index), mask)


def _value_at(build: Builder, call: Call, name: str, index: Index) -> Value:
    """Return the value for a point, of an operand that is broadcast to the points."""
    return build.cast(build.operand(call[name], aligned(index, build.shape(call[name]))), call.dtype)


def _put_points(call: Call) -> Points:
    """Return the sizes of what ``base[indices]`` has, to which the values are broadcast."""
    shape = shape_of(call["self"])
    indices = [*call["indices"], *[None] * (len(shape) - len(call["indices"]))]
    shapes = [shape_of(at) for at in indices if at is not None]
    start, _ = placement(indices, [len(sizes) for sizes in shapes])
    whole = [size for at, size in zip(indices, shape, strict=True) if at is None]
    return (*whole[:start], *_broadcast(shapes), *whole[start:])


def _broadcast(shapes: Sequence[Points]) -> Points:
    """Return the sizes that tensors of some shapes are broadcast to, none of them empty."""
    rank = max(map(len, shapes))
    padded = [(sympy.S.One,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), sympy.S.One) for sizes in zip(*padded, strict=True))


# Along one dimension --------------------------------------------------------------------------------------------------


def _along(source: str) -> Callable[[Builder, Call, Index], Write]:
    """Return the writes of an op with an index of the values' rank; ``source`` names its values."""
    def write(build: Builder, call: Call, index: Index) -> Write:
        dim = dim_of(call["dim"], len(index))
        size = build.shape(call["self"])[dim]
        at = build.indirect(build.loaded_index(call["index"], index, size), size)
        return Write(replaced(index, dim, at), _source(build, call, source, index))

    return write


def _rows(source: str, wraps: bool = False) -> Callable[[Builder, Call, Index], Write]:
    """Return the writes of an op with an index of one dimension, which says where whole slices go.

    With ``wraps`` negative indices count from the end.
    """
    def write(build: Builder, call: Call, index: Index) -> Write:
        dim = dim_of(call["dim"], len(index))
        size = build.shape(call["self"])[dim]
        place = index[dim : dim + len(build.shape(call["index"]))]
        at = build.indirect(build.loaded_index(call["index"], place, size, wraps=wraps), size)
        return Write(replaced(index, dim, at), _source(build, call, source, index))

    return write


def _source(build: Builder, call: Call, name: str, index: Index) -> Value:
    """Return the value for a point: of a tensor of the points' rank, times ``alpha``, or a number."""
    if name == "value":
        return number(build, call[name], call.dtype)
    value = build.cast(build.operand(call[name], index), call.dtype)
    alpha = call.args.get("alpha", 1)
    if alpha == 1:
        return value
    return build.expression("{0} * {1}", call.dtype, value, number(build, alpha, call.dtype))


def _index_points(call: Call) -> Points:
    return shape_of(call["index"])


def _source_points(call: Call) -> Points:
    return shape_of(call["source"])


def _filled_points(call: Call) -> Points:
    shape = shape_of(call["self"])
    count = shape_of(call["index"])
    return replaced(shape, dim_of(call["dim"], len(shape)), count[0] if count else sympy.S.One)


# What becomes of the elements -----------------------------------------------------------------------------------------

_REDUCTIONS = {"sum": Combine.ADD, "add": Combine.ADD, "amax": Combine.MAX, "amin": Combine.MIN}


def _always(combine: Combine) -> Callable[[Mapping[str, Any]], Combine]:
    return lambda args: combine


def _accumulated(args: Mapping[str, Any]) -> Combine:
    return Combine.ADD if args["accumulate"] else Combine.STORE


def _reduced(args: Mapping[str, Any]) -> Combine:
    return _REDUCTIONS[args["reduce"]]


def is_added(combine: Combine, dtype: torch.dtype) -> bool:
    """Return whether a GPU can do in memory (by atomics) what a scatter does to elements of a dtype."""
    if combine is Combine.STORE:
        return True
    return dtype in (ADDED if combine is Combine.ADD else COMPARED)


# Rows -----------------------------------------------------------------------------------------------------------------


def _accepts(scatter: Scatter, further: Callable[[Call], str] | None = None) -> Callable[[Call], str]:
    def accepts(call: Call) -> str:
        if further is not None and (reason := further(call)):
            return reason
        combine = scatter.combine(call.args)
        return "" if is_added(combine, call.dtype) else f"{combine.value} of {str(call.dtype)[6:]} at loaded indices"

    return accepts


def _accepts_rank(call: Call) -> str:
    rank = len(shape_of(call["self"]))
    same = rank and len(shape_of(call["index"])) == rank
    return "" if same else "scatter: its index has another rank than its base, or none"


def _accepts_slices(call: Call) -> str:
    names = [name for name in ("self", "source") if name in call.args]
    return "" if all(shape_of(call[name]) for name in names) else "slices of a tensor without dimensions"


def _accepts_reduce(call: Call) -> str:
    if call["reduce"] not in _REDUCTIONS:
        return f"scatter: {call['reduce']} is not done in memory"
    return _accepts_rank(call) or ("" if call.args.get("include_self", True) else "scatter: without what was there before")


def _row(target: OpOverload, scatter: Scatter, aligned_names: tuple[str, ...], indices: Callable[..., Any],
         further: Callable[[Call], str]) -> Row:
    return Row(target, Kind.SCATTER, scatter=scatter, aligned=aligned_names, indices=indices,
               accepts=_accepts(scatter, further), flops=_SCATTER_FLOPS)


def _register(names: str, scatter: Scatter, aligned_names: tuple[str, ...],
              indices: Callable[[Mapping[str, Any]], Any], further: Callable[[Call], str]) -> None:
    """Register the row of some ops, behind the row of those that have one which accepts other calls."""
    for target in overloads(names):
        row, first = _row(target, scatter, aligned_names, indices, further), lookup(target)
        register(row if first is None or not first.fusible else replace(first, otherwise=row))


_register("aten.index_put.default aten._unsafe_index_put.default",
          Scatter("self", _put_points, _put, _accumulated), ("values",), indexed_dims, accepts_index)
_register("aten._unsafe_masked_index_put_accumulate.default",
          Scatter("self", _put_points, _masked_put, _always(Combine.ADD)), ("values", "mask"), indexed_dims, accepts_index)
_register("aten.scatter.src", Scatter("self", _index_points, _along("src"), _always(Combine.STORE)), ("index", "src"),
          indexed_dim, _accepts_rank)
_register("aten.scatter.value", Scatter("self", _index_points, _along("value"), _always(Combine.STORE)), ("index",),
          indexed_dim, _accepts_rank)
_register("aten.scatter_add.default", Scatter("self", _index_points, _along("src"), _always(Combine.ADD)),
          ("index", "src"), indexed_dim, _accepts_rank)
_register("aten.scatter_reduce.two", Scatter("self", _index_points, _along("src"), _reduced), ("index", "src"),
          indexed_dim, _accepts_reduce)
_register("aten.index_add.default", Scatter("self", _source_points, _rows("source"), _always(Combine.ADD)), ("source",),
          indexed_dim, _accepts_slices)
_register("aten.index_copy.default", Scatter("self", _source_points, _rows("source"), _always(Combine.STORE)), ("source",),
          indexed_dim, _accepts_slices)
_register("aten.index_fill.int_Scalar",
          Scatter("self", _filled_points, _rows("value", wraps=True), _always(Combine.STORE)), (), indexed_dim,
          _accepts_slices)
