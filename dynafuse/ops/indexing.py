"""Rows of ops that move data by an index rewrite, under masks where the operand does not cover the output.

A cat of ``a`` (3 columns) and ``b`` is, at column ``j``: ``a[j]`` where ``j < 3``, else ``b[j - 3]``, each loaded
under its own mask. A piece that the index cannot reach is left out, so a slice of a cat costs what it reads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import sympy
import torch
from sympy import S

from dynafuse.ops.indexing_math import (
    as_expr,
    flatten,
    floordiv,
    known_less,
    known_nonnegative,
    mod,
    product,
    unflatten,
)
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Value, by_strides, eager, register, rewrite
from dynafuse.ops.views import clamped_bound, dim_of, dims_of, from_end, replaced, source, without

Body = Callable[[], Value]
Bounds = tuple[sympy.Expr, str, sympy.Expr]
"""A condition on index expressions: left, operator, right."""


# Masks ----------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def inside(at: sympy.Expr, low: sympy.Expr, high: sympy.Expr) -> tuple[Bounds, ...]:
    """Return the conditions of ``low <= at < high`` that are not known to hold.

    Args:
        at: An index expression.
        low, high: The range, of which ``high`` is not a part.
    """
    begins = () if known_nonnegative(at - low) else ((at, ">=", low),)
    ends = () if known_less(at, high) else ((at, "<", high),)
    return (*begins, *ends)


def _all(build: Builder, bounds: Sequence[Bounds]) -> Value:
    checks = [build.compare(*check) for check in bounds]
    never = next((check for check in checks if check.name == "False"), None)
    open_checks = [check for check in checks if check.name != "True"] or checks[:1]
    return never or functools.reduce(lambda left, right: build.expression("{0} & {1}", torch.bool, left, right), open_checks)


def under(build: Builder, bounds: Sequence[Bounds], body: Body, other: bool | int | float) -> Value:
    """Return ``body()`` where all bounds hold, else a number.

    Args:
        build: Builds it.
        bounds: Conditions on index expressions; none always hold.
        body: Makes the value; it loads only where the bounds hold.
        other: The number.
    """
    return build.masked(_all(build, bounds), body, other) if bounds else body()


def _overlaid(build: Builder, bounds: Sequence[Bounds], over: Body, under: Body) -> Value:
    """Return ``over`` where the bounds hold, else ``under``."""
    return build.choose(_all(build, bounds), over, under) if bounds else over()


# Concatenation and padding --------------------------------------------------------------------------------------------


def _cat(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    pieces = [piece for piece in call["tensors"] if len(build.shape(piece)) == len(index)]  # legacy: 1-d empties
    ends = list(itertools.accumulate(build.shape(piece)[dim] for piece in pieces))
    spans = list(zip(pieces, (S.Zero, *ends), ends, strict=False))
    reached = [span for span in spans if not _misses(index[dim], *span[1:])] or spans[:1]
    bodies = [_piece(build, call, piece, replaced(index, dim, index[dim] - start)) for piece, start, _ in reached]
    return _one_of(build, index[dim], bodies, [end for _, _, end in reached])


def _misses(at: sympy.Expr, start: sympy.Expr, end: sympy.Expr) -> bool:
    """Return whether ``at`` is known to lie outside of ``[start, end)``."""
    return known_less(at, start) or known_nonnegative(at - end) or start == end


def _one_of(build: Builder, at: sympy.Expr, pieces: Sequence[Body], ends: Sequence[sympy.Expr]) -> Value:
    """Return the first piece before whose end ``at`` lies, searched by halves: branches nest no deeper than needed."""
    if len(pieces) == 1:
        return pieces[0]()
    half = len(pieces) // 2
    return build.choose(build.compare(at, "<", ends[half - 1]), lambda: _one_of(build, at, pieces[:half], ends[:half]),
                        lambda: _one_of(build, at, pieces[half:], ends[half:]))


def _piece(build: Builder, call: Call, piece: object, index: Index) -> Body:
    return lambda: build.cast(build.operand(piece, index), call.dtype)


def _stack(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    pieces = [_piece(build, call, tensor, without(index, dim)) for tensor in call["tensors"]]
    return _one_of(build, index[dim], pieces, [sympy.Integer(k + 1) for k in range(len(pieces))])


def _pad(build: Builder, call: Call, index: Index) -> Value:
    shape, pads = build.shape(call["self"]), [as_expr(pad) for pad in call["pad"]]
    before = [S.Zero] * len(shape)
    for k in range(len(pads) // 2):
        before[len(shape) - 1 - k] = pads[2 * k]
    at = tuple(position - pad for position, pad in zip(index, before, strict=True))
    bounds = [check for position, size in zip(at, shape, strict=True) for check in inside(position, S.Zero, size)]
    return under(build, bounds, lambda: build.operand(call["self"], at), call["value"])


# Reordering -----------------------------------------------------------------------------------------------------------


def _flip(build: Builder, call: Call, index: Index) -> Value:
    shape, dims = build.shape(source(call)), dims_of(call["dims"], len(index))
    at = tuple(size - 1 - position if dim in dims else position
               for dim, (position, size) in enumerate(zip(index, shape, strict=True)))
    return build.operand(source(call), at)


def _roll(build: Builder, call: Call, index: Index) -> Value:
    shape = build.shape(call["self"])
    if not call["dims"]:
        total = product(shape)
        at = mod(flatten(index, shape) + mod(-as_expr(call["shifts"][0]), total), total)
        return build.operand(call["self"], unflatten(at, shape))
    for shift, dim in zip(call["shifts"], dims_of(call["dims"], len(index)), strict=True):
        index = replaced(index, dim, mod(index[dim] + mod(-as_expr(shift), shape[dim]), shape[dim]))
    return build.operand(call["self"], index)


def _accepts_roll(call: Call) -> str:
    fixed = all(size.is_Integer for size in call.shape) and all(isinstance(shift, int) for shift in call["shifts"])
    return "" if fixed else "roll of a symbolic size"


def _repeat(build: Builder, call: Call, index: Index) -> Value:
    shape = build.shape(call["self"])
    tail = index[len(index) - len(shape) :]
    return build.operand(call["self"], tuple(mod(at, size) for at, size in zip(tail, shape, strict=True)))


# Scatters into fixed places -------------------------------------------------------------------------------------------


def _slice_scatter(build: Builder, call: Call, index: Index) -> Value:
    dim, size = dim_of(call["dim"], len(index)), call.shape[dim_of(call["dim"], len(index))]
    start, end = clamped_bound(call["start"], size, S.Zero), clamped_bound(call["end"], size, size)
    step, at = as_expr(call["step"]), index[dim] - start
    bounds = list(inside(index[dim], start, end))
    if step != 1:
        bounds.append((mod(at, step), "==", S.Zero))
    inner = replaced(index, dim, floordiv(at, step))
    return _overlaid(
        build, bounds, _piece(build, call, call["src"], inner), lambda: build.operand(call["self"], index)
    )


def _select_scatter(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    at = from_end(as_expr(call["index"]), call.shape[dim])
    assert at is not None  # _accepts_select_scatter has refused it
    return _overlaid(build, [(index[dim], "==", at)], _piece(build, call, call["src"], without(index, dim)),
                     lambda: build.operand(call["self"], index))


def _accepts_select_scatter(call: Call) -> str:
    known = from_end(as_expr(call["index"]), S.One) is not None
    return "" if known else "select_scatter: an index whose sign is not known"


def _tri(operator: str) -> Callable[[Builder, Call, Index], Value]:
    def lower(build: Builder, call: Call, index: Index) -> Value:
        is_inside = build.compare(index[-1] - index[-2], operator, as_expr(call["diagonal"]))
        return build.masked(is_inside, lambda: build.operand(call["self"], index), 0)

    return lower


def _glu(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    value = build.operand(call["self"], index)
    gate = build.operand(call["self"], replaced(index, dim, index[dim] + call.shape[dim]))
    return build.expression("{0} * lm.sigmoid({1})", call.dtype, value, gate)


_REWRITES = {
    "aten.cat.default prims.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.flip.default prims.rev.default": _flip,
    "aten.repeat.default": _repeat,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.triu.default": _tri(">="),
    "aten.tril.default": _tri("<="),
}
_EAGER = {
    "aten.diagonal_scatter.default": "diagonal_scatter: rare",
    "aten.upsample_nearest1d_backward.default aten.upsample_nearest2d_backward.default "
    "aten.upsample_nearest3d_backward.default aten._upsample_nearest_exact1d_backward.default "
    "aten._upsample_nearest_exact2d_backward.default aten._upsample_nearest_exact3d_backward.default "
    "aten.upsample_bilinear2d_backward.default aten.upsample_linear1d_backward.default "
    "aten.upsample_trilinear3d_backward.default aten.upsample_bicubic2d_backward.default":
        "upsampling backward: a scatter",
    "aten.upsample_trilinear3d.default aten.upsample_bilinear2d.default aten.upsample_bicubic2d.default":
        "upsampling that Inductor's table leaves whole",
    "aten.replication_pad1d_backward.default aten.replication_pad2d_backward.default "
    "aten.replication_pad3d_backward.default aten.reflection_pad1d_backward.default "
    "aten.reflection_pad2d_backward.default aten.reflection_pad3d_backward.default": "padding backward: a scatter",
    "prims.inductor_force_stride_order.default": "fixes strides for another op",
}

for _names, _lower in _REWRITES.items():
    for _target in overloads(_names):
        register(rewrite(_target, Kind.INDEX, _lower))
for _target in overloads("aten.roll.default"):
    register(rewrite(_target, Kind.INDEX, _roll, accepts=_accepts_roll))
for _target in overloads("aten.select_scatter.default"):
    register(rewrite(_target, Kind.INDEX, _select_scatter, accepts=_accepts_select_scatter))
for _target in overloads("aten.glu.default"):
    register(rewrite(_target, Kind.INDEX, _glu, flops=10.0))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
for _target in overloads("aten.as_strided_scatter.default prims.as_strided_scatter.default"):
    register(by_strides(_target))
