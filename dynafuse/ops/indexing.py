"""Rows of ops that move data by an index rewrite, under masks where the operand does not cover the output.

A cat of ``a`` (3 columns) and ``b`` is, at column ``j``: ``a[j]`` where ``j < 3``, else ``b[j - 3]``, each loaded
under its own mask. A piece that the index cannot reach is left out, so a slice of a cat costs what it reads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from dynafuse.ops.literals import opmath
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Value, by_strides, eager, register, rewrite
from dynafuse.ops.views import clamped_bound, dim_of, dims_of, from_end, replaced, source, without

MAX_WINDOW = 25
"""The most elements of a pooling window that are written out one by one."""

Body = Callable[[], Value]
Bounds = tuple[sympy.Expr, str, sympy.Expr]
"""A condition on index expressions: left, operator, right."""


# Masks ----------------------------------------------------------------------------------------------------------------


def _inside(at: sympy.Expr, low: sympy.Expr, high: sympy.Expr) -> Iterator[Bounds]:
    """What is left to be checked of ``low <= at < high``."""
    if not known_nonnegative(at - low):
        yield at, ">=", low
    if not known_less(at, high):
        yield at, "<", high


def _all(build: Builder, bounds: Sequence[Bounds]) -> Value:
    checks = [build.compare(*check) for check in bounds]
    return functools.reduce(lambda left, right: build.expression("{0} & {1}", torch.bool, left, right), checks)


def _under(build: Builder, bounds: Sequence[Bounds], body: Body, other: bool | int | float) -> Value:
    return build.masked(_all(build, bounds), body, other) if bounds else body()


def _overlaid(build: Builder, bounds: Sequence[Bounds], over: Body, under: Body) -> Value:
    """``over`` where the bounds hold, else ``under``."""
    return build.choose(_all(build, bounds), over, under) if bounds else over()


# Concatenation and padding --------------------------------------------------------------------------------------------


def _cat(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    pieces = [piece for piece in call["tensors"] if len(build.shape(piece)) == len(index)]  # legacy: 1-d empties
    ends = list(itertools.accumulate(build.shape(piece)[dim] for piece in pieces))
    spans = list(zip(pieces, (S.Zero, *ends), ends, strict=False))
    reached = [span for span in spans if not _misses(index[dim], *span[1:])]
    return _fold(build, call, index, dim, reached or spans[:1])


def _misses(at: sympy.Expr, start: sympy.Expr, end: sympy.Expr) -> bool:
    """Whether ``at`` is never in ``[start, end)``."""
    return known_less(at, start) or known_nonnegative(at - end) or start == end


def _fold(
    build: Builder, call: Call, index: Index, dim: int, spans: Sequence[tuple[object, sympy.Expr, sympy.Expr]]
) -> Value:
    """The first piece where the index lies before its end, elsewhere the others likewise."""
    (piece, start, end), *rest = spans
    first = _piece(build, call, piece, replaced(index, dim, index[dim] - start))
    if not rest:
        return first()
    return build.choose(build.compare(index[dim], "<", end), first, lambda: _fold(build, call, index, dim, rest))


def _piece(build: Builder, call: Call, piece: object, index: Index) -> Body:
    return lambda: build.cast(build.operand(piece, index), call.dtype)


def _stack(build: Builder, call: Call, index: Index) -> Value:
    dim = dim_of(call["dim"], len(index))
    pieces = [_piece(build, call, tensor, without(index, dim)) for tensor in call["tensors"]]

    def piece(k: int) -> Value:
        if k + 1 == len(pieces):
            return pieces[k]()
        return build.choose(build.compare(index[dim], "<", sympy.Integer(k + 1)), pieces[k], lambda: piece(k + 1))

    return piece(0)


def _pad(build: Builder, call: Call, index: Index) -> Value:
    shape, pads = build.shape(call["self"]), [as_expr(pad) for pad in call["pad"]]
    before = [S.Zero] * len(shape)
    for k in range(len(pads) // 2):
        before[len(shape) - 1 - k] = pads[2 * k]
    at = tuple(position - pad for position, pad in zip(index, before, strict=True))
    bounds = [check for position, size in zip(at, shape, strict=True) for check in _inside(position, S.Zero, size)]
    return _under(build, bounds, lambda: build.operand(call["self"], at), call["value"])


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
    bounds = list(_inside(index[dim], start, end))
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
        kept = build.compare(index[-1] - index[-2], operator, as_expr(call["diagonal"]))
        return build.masked(kept, lambda: build.operand(call["self"], index), 0)

    return lower


# Pooling --------------------------------------------------------------------------------------------------------------


def _pair(value: int | Sequence[int], default: Sequence[int] = ()) -> tuple[int, int]:
    given = (value,) if isinstance(value, int) else tuple(value) or tuple(default)
    return (given[0], given[-1])


def _windows(call: Call) -> Iterator[tuple[int, int, int]]:
    """Size, stride and padding of the window in each of the two dimensions."""
    size = _pair(call["kernel_size"])
    return zip(size, _pair(call["stride"], size), _pair(call["padding"]), strict=True)


def _sum(build: Builder, values: Sequence[Value], dtype: torch.dtype) -> Value:
    wide = opmath(dtype)
    return functools.reduce(lambda left, right: build.expression("{0} + {1}", wide, left, right), values)


def _window_values(build: Builder, call: Call, index: Index, outside: float, dilation: Sequence[int] = (1,)) -> list[Value]:
    """The input's values in the window of an output position; ``outside`` where it reaches beyond the input."""
    sizes, places = build.shape(call["self"])[-2:], []
    for at, (length, stride, padding), step in zip(index[-2:], _windows(call), _pair(dilation), strict=True):
        places.append([at * stride - padding + step * k for k in range(length)])

    def value(at: Index) -> Value:
        bounds = [check for position, size in zip(at, sizes, strict=True) for check in _inside(position, S.Zero, size)]
        return _under(build, bounds, lambda: build.operand(call["self"], (*index[:-2], *at)), outside)

    return [value(at) for at in itertools.product(*places)]


def _avg_pool(build: Builder, call: Call, index: Index) -> Value:
    values, sizes = _window_values(build, call, index, 0), build.shape(call["self"])[-2:]
    return _averaged(build, call, _sum(build, values, call.dtype), index[-2:], sizes)


def _max_pool(build: Builder, call: Call, index: Index) -> Value:
    values, wide = _window_values(build, call, index, -math.inf, call["dilation"]), opmath(call.dtype)
    return functools.reduce(lambda left, right: build.expression("lm.maximum({0}, {1})", wide, left, right), values)


def _averaged(build: Builder, call: Call, total: Value, at: Index, sizes: Sequence[sympy.Expr]) -> Value:
    """``total`` over the divisor of the output position ``at``."""
    count, wide = _divisor(build, call, at, sizes), opmath(call.dtype)
    if isinstance(count, int):
        return build.expression("lm.div({0}, {1})", call.dtype, total, build.constant(count, wide))
    return build.expression("lm.div({0}, {1})", call.dtype, total, build.cast(count, wide))


def _divisor(build: Builder, call: Call, at: Index, sizes: Sequence[sympy.Expr]) -> int | Value:
    windows = list(_windows(call))
    if call["divisor_override"]:
        return int(call["divisor_override"])
    padded = any(padding for _, _, padding in windows)
    if not call["ceil_mode"] and (call["count_include_pad"] or not padded):
        return windows[0][0] * windows[1][0]
    spans = [_span(build, position, window, size, call["count_include_pad"])
             for position, window, size in zip(at, windows, sizes, strict=True)]
    return build.expression("{0} * {1}", torch.int64, *spans)


def _span(build: Builder, at: sympy.Expr, window: tuple[int, int, int], size: sympy.Expr, with_padding: bool) -> Value:
    """How many elements a window counts in one dimension: it is cut at the padded edge, or at the data's."""
    length, stride, padding = window
    start, edge = at * stride - padding, size + padding if with_padding else size
    end = build.expression(
        "tl.minimum({0}, {1})", torch.int64, build.index_value(start + length), build.index_value(edge)
    )
    low = build.index_value(start)
    low = (
        low
        if with_padding
        else build.expression("tl.maximum({0}, {1})", torch.int64, low, build.constant(0, torch.int64))
    )
    return build.expression("{0} - {1}", torch.int64, end, low)


def _avg_pool_backward(build: Builder, call: Call, index: Index) -> Value:
    """The sum over the few windows that cover an input element."""
    windows = list(_windows(call))
    reach = [range(-(-length // stride)) for length, stride, _ in windows]
    values = [_window_share(build, call, index, windows, back) for back in itertools.product(*reach)]
    return build.cast(_sum(build, values, call.dtype), call.dtype)


def _window_share(build: Builder, call: Call, index: Index, windows: Sequence[tuple[int, int, int]],
                  back: tuple[int, ...]) -> Value:
    sizes, grads = build.shape(call["self"])[-2:], build.shape(call["grad_output"])[-2:]
    at: list[sympy.Expr] = []
    bounds: list[Bounds] = []
    for position, (length, stride, padding), steps, count in zip(index[-2:], windows, back, grads, strict=True):
        window = floordiv(position + padding, stride) - steps
        at.append(window)
        bounds += _inside(window, S.Zero, count)
        bounds += _inside(position + padding - window * stride, S.Zero, sympy.Integer(length))

    def share() -> Value:
        return _averaged(build, call, build.operand(call["grad_output"], (*index[:-2], *at)), tuple(at), sizes)

    return _under(build, bounds, share, 0)


def _accepts_pool(call: Call) -> str:
    height, width = _pair(call["kernel_size"])
    return "" if height * width <= MAX_WINDOW else f"a window of {height * width} elements, more than {MAX_WINDOW}"


def _accepts_max_pool(call: Call) -> str:
    return _accepts_pool(call) if call.dtype.is_floating_point else f"max pooling of {str(call.dtype)[6:]}"


def _adaptive_pool(build: Builder, call: Call, index: Index) -> Value:
    sizes = build.shape(call["self"])[-2:]
    rows, columns = (int(size) // int(out) for size, out in zip(sizes, call.shape[-2:], strict=True))
    values = [build.operand(call["self"], (*index[:-2], index[-2] * rows + row, index[-1] * columns + column))
              for row, column in itertools.product(range(rows), range(columns))]
    total = _sum(build, values, call.dtype)
    return build.expression("lm.div({0}, {1})", call.dtype, total, build.constant(rows * columns, opmath(call.dtype)))


def _adaptive_pool_backward(build: Builder, call: Call, index: Index) -> Value:
    grads = build.shape(call["grad_output"])[-2:]
    rows, columns = (int(size) // int(out) for size, out in zip(call.shape[-2:], grads, strict=True))
    grad = build.operand(call["grad_output"], (*index[:-2], floordiv(index[-2], rows), floordiv(index[-1], columns)))
    return build.expression("lm.div({0}, {1})", call.dtype, grad, build.constant(rows * columns, opmath(call.dtype)))


def _accepts_adaptive(operand: str, limit: int) -> Callable[[Call], str]:
    """Windows of one size, which is when each output size divides its input size; at most ``limit`` elements."""

    def accepts(call: Call) -> str:
        pairs = list(zip(_sizes(call[operand]), map(as_expr, call.shape[-2:]), strict=True))
        if not all(left.is_Integer and right.is_Integer for left, right in pairs):
            return "adaptive pooling of a symbolic size"
        # The forward's operand is what is pooled, the backward's is the gradient of the result.
        windows = [(int(left), int(right)) if operand == "self" else (int(right), int(left)) for left, right in pairs]
        if any(pooled == 0 or size % pooled for size, pooled in windows):
            return "adaptive pooling with windows of several sizes"
        window = math.prod(size // pooled for size, pooled in windows)
        return "" if window <= limit else f"a window of {window} elements, more than {limit}"

    return accepts


def _sizes(arg: Any) -> Sequence[sympy.Expr]:
    """The last two sizes of a tensor argument: an FX node, or a tensor itself."""
    value = arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg
    return [as_expr(size) for size in value.shape[-2:]]


def _max_pool_indices(build: Builder, call: Call, index: Index) -> Value:
    """Positions in the input plane from positions in the window."""
    rank = len(call["kernel_size"])
    rest = build.cast(build.operand(call["self"], index), torch.int64)
    steps: list[Value] = []
    for size in reversed(call["kernel_size"][1:]):
        steps.append(_int(build, "{0} % {1}", rest, build.constant(int(size), torch.int64)))
        rest = _int(build, "{0} // {1}", rest, build.constant(int(size), torch.int64))
    total: Value | None = None
    for d, step in enumerate((rest, *reversed(steps))):
        base = index[len(index) - rank + d] * as_expr(call["stride"][d]) - as_expr(call["padding"][d])
        place = _int(
            build,
            "{0} + {1} * {2}",
            build.index_value(base),
            step,
            build.constant(int(call["dilation"][d]), torch.int64),
        )
        size = build.index_value(as_expr(call["input_size"][d]))
        total = place if total is None else _int(build, "{0} * {1} + {2}", total, size, place)
    assert total is not None
    return total


def _int(build: Builder, text: str, *operands: Value) -> Value:
    return build.expression(text, torch.int64, *operands)


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
    "prims._low_memory_max_pool_offsets_to_indices.default": _max_pool_indices,
}
_EAGER = {
    "aten.diagonal_scatter.default": "diagonal_scatter: rare",
    "prims._low_memory_max_pool_with_offsets.default aten.max_pool2d_with_indices.default "
    "aten.max_pool3d_with_indices.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default":
        "max pooling with indices, which the backward reads",
    "aten.max_pool2d_with_indices_backward.default aten.max_pool3d_with_indices_backward.default "
    "aten.adaptive_max_pool2d_backward.default aten.adaptive_max_pool3d_backward.default "
    "aten.max_pool2d_backward.default": "max pooling backward: adds at loaded indices",
    "aten.avg_pool3d.default aten.avg_pool3d_backward.default aten._adaptive_avg_pool3d.default "
    "aten._adaptive_avg_pool3d_backward.default": "three-dimensional pooling stays whole",
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
for _target in overloads("aten.avg_pool2d.default"):
    register(rewrite(_target, Kind.INDEX, _avg_pool, accepts=_accepts_pool, flops=9.0))
for _target in overloads("aten.max_pool2d.default"):
    register(rewrite(_target, Kind.INDEX, _max_pool, accepts=_accepts_max_pool, flops=9.0))
for _target in overloads("aten.avg_pool2d_backward.default"):
    register(rewrite(_target, Kind.INDEX, _avg_pool_backward, accepts=_accepts_pool, flops=9.0))
for _target in overloads("aten._adaptive_avg_pool2d.default"):
    register(rewrite(_target, Kind.INDEX, _adaptive_pool, accepts=_accepts_adaptive("self", MAX_WINDOW), flops=9.0))
for _target in overloads("aten._adaptive_avg_pool2d_backward.default"):
    register(rewrite(_target, Kind.INDEX, _adaptive_pool_backward, accepts=_accepts_adaptive("grad_output", 1 << 30)))
for _target in overloads("aten.glu.default"):
    register(rewrite(_target, Kind.INDEX, _glu, flops=10.0))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
for _target in overloads("aten.as_strided_scatter.default prims.as_strided_scatter.default"):
    register(by_strides(_target))
