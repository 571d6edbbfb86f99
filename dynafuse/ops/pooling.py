"""Rows of pooling and of its gradients: an element of the result is made of the operand's elements in its window.

A window is written out: its elements are loaded one by one, under masks where it reaches beyond the operand. Of
``max_pool1d`` with windows of 3, 2 apart, on ``x[9]``, the element ``i`` is ``max(max(x[2i], x[2i + 1]), x[2i + 2])``. A
gradient is asked from the other side: an element of it is made of the few windows that cover it.

The maxima and their places in the windows are two ops. In one kernel they share loads and comparisons, line by line.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._ops import OpOverload

from dynafuse.ops.indexing_math import as_expr, floordiv, known_less, known_nonnegative
from dynafuse.ops.literals import literal, opmath, reciprocal_parts
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Lower, Value, eager, register, rewrite
from dynafuse.ops.windows import (
    Share,
    Window,
    elements,
    per_dim,
    reduced,
    refusal,
    shares,
    sizes_of,
    too_long,
    windows,
    within,
)

LEAST_WIDE = 1 << 30
"""The least size in which places may take more than 32 bits."""

MOST_COUNTS = 8
"""The most numbers of elements that windows count of which the reciprocal is chosen rather than computed."""

OFFSET_WINDOW = 127
"""The most elements of a window whose places int8 holds."""


# The places of a window in the operand, as an op of its own -----------------------------------------------------------

_LIBRARY = torch.library.Library("dynafuse", "FRAGMENT")
_LIBRARY.define("max_pool_offsets(Tensor self, SymInt[] kernel_size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
                "bool ceil_mode) -> Tensor")
_LIBRARY.define("max_pool_offsets_backward(Tensor grad_output, Tensor offsets, SymInt[] input_size, SymInt[] kernel_size, "
                "SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor")


def _offsets(self: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], ceil_mode: bool) -> torch.Tensor:
    """Return the second result of torch's op, of which there is no other op."""
    offsets: torch.Tensor = torch.ops.prims._low_memory_max_pool_with_offsets(
        self, kernel_size, stride, padding, dilation, ceil_mode)[1]
    return offsets


def _offsets_like(self: torch.Tensor, *window: Any) -> torch.Tensor:
    """Return a result without values."""
    pool = {2: torch.ops.aten.max_pool2d_with_indices, 3: torch.ops.aten.max_pool3d_with_indices}[len(window[0])]
    return torch.empty_like(pool(self, *window)[0], dtype=torch.int8)


def _offsets_backward(grad_output: torch.Tensor, offsets: torch.Tensor, input_size: Sequence[int],
                      kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
                      dilation: Sequence[int]) -> torch.Tensor:
    """Return the gradient of maxima with respect to what was pooled, by torch's op."""
    indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices(
        offsets, kernel_size, input_size, stride, padding, dilation)
    ceil_mode = _last_one_is_cut(offsets.shape[-len(kernel_size):], input_size, kernel_size, stride, padding, dilation)
    backward = {2: torch.ops.aten.max_pool2d_with_indices_backward, 3: torch.ops.aten.max_pool3d_with_indices_backward}
    pooled = _gradient_like(grad_output, offsets, input_size)
    gradient: torch.Tensor = backward[len(kernel_size)](
        grad_output, pooled, kernel_size, stride, padding, dilation, ceil_mode, indices)
    return gradient


def _last_one_is_cut(counts: Sequence[int], sizes: Sequence[int], *windows: Sequence[int]) -> bool:
    """Return whether there are more windows than without ``ceil_mode``."""
    whole = ((size + 2 * padding - dilation * (length - 1) - 1) // stride + 1
             for size, length, stride, padding, dilation in zip(sizes, *windows, strict=True))
    return any(count != expected for count, expected in zip(counts, whole, strict=True))


def _gradient_like(grad_output: torch.Tensor, offsets: torch.Tensor, input_size: Sequence[int], *_: Any) -> torch.Tensor:
    """Return a result without values: its layout is that of what was pooled, which the offsets have, too."""
    layout = torch._prims_common.suggest_memory_format(offsets)
    shape = (*offsets.shape[:-len(input_size)], *input_size)
    return torch.empty(shape, dtype=grad_output.dtype, device=grad_output.device, memory_format=layout)


_LIBRARY.impl("max_pool_offsets", _offsets, "CompositeExplicitAutograd")
_LIBRARY.impl("max_pool_offsets", _offsets_like, "Meta")
_LIBRARY.impl("max_pool_offsets_backward", _offsets_backward, "CompositeExplicitAutograd")
_LIBRARY.impl("max_pool_offsets_backward", _gradient_like, "Meta")
MAX_POOL_OFFSETS: OpOverload = torch.ops.dynafuse.max_pool_offsets.default
"""Where in its window each maximum is, row by row, in int8: the first of several, the last that is NaN."""

MAX_POOL_OFFSETS_BACKWARD: OpOverload = torch.ops.dynafuse.max_pool_offsets_backward.default
"""The gradient with respect to what was pooled: to each maximum what its window's is."""


def maxima_and_offsets(args: dict[str, Any], dtype: torch.dtype) -> tuple[OpOverload, OpOverload] | None:
    """Return the two ops that stand for ``_low_memory_max_pool_with_offsets``, each of which can be fused; else None."""
    rank = len(args["kernel_size"])
    if rank not in (2, 3) or refusal(_windows(args, rank)) or not dtype.is_floating_point:
        return None
    return {2: torch.ops.aten.max_pool2d.default, 3: torch.ops.aten.max_pool3d.default}[rank], MAX_POOL_OFFSETS


# Windows --------------------------------------------------------------------------------------------------------------


def _rank(call: Call) -> int:
    """Return the number of dimensions that a call pools."""
    return 3 if "3d" in call.target.name() else 2 if "2d" in call.target.name() else len(call["kernel_size"])


def _windows(args: dict[str, Any], rank: int) -> list[Window]:
    """Return the windows of a call's arguments, a dimension each; without strides they lie side by side."""
    size = args["kernel_size"]
    given = (size, args["stride"] or size, args["padding"], args.get("dilation", 1))
    return windows(*(per_dim(value, rank) for value in given))


def _of(call: Call) -> list[Window]:
    return _windows(call.args, _rank(call))


def _window_values(build: Builder, call: Call, index: Index, outside: float, rounded: bool = False) -> list[Value]:
    """Return the operand's values in the window of an element; ``outside`` where it reaches beyond the operand."""
    of, operand = _of(call), build.rounded if rounded else build.operand
    start, sizes = index[:-len(of)], build.shape(call["self"])[-len(of):]

    def read(at: Index) -> Value:
        return operand(call["self"], (*start, *at))

    return [within(build, sizes, at, read, outside) for _, at in elements(of, index[-len(of):])]


def _over_windows(build: Builder, call: Call, index: Index, share: Share) -> Value:
    """Return the sum of what each window that covers an element of the operand gives it."""
    counts = build.shape(call["grad_output"])
    return reduced(build, "{0} + {1}", shares(build, _of(call), index, counts, share), call.dtype)


def _accepts(call: Call) -> str:
    return refusal(_of(call))


def _accepts_maxima(call: Call) -> str:
    floats = call.dtype.is_floating_point or call.target is MAX_POOL_OFFSETS
    return _accepts(call) if floats else f"max pooling of {str(call.dtype)[6:]}"


def _accepts_offsets(call: Call) -> str:
    return refusal(_of(call), OFFSET_WINDOW)


def _accepts_gradient(call: Call) -> str:
    return _accepts(call) or too_long(math.prod(window.overlaps for window in _of(call)))


# Maxima ---------------------------------------------------------------------------------------------------------------


def _max_pool(build: Builder, call: Call, index: Index) -> Value:
    values = _window_values(build, call, index, -math.inf, rounded=True)
    return reduced(build, "lm.maximum({0}, {1})", values, build.dtype(call["self"]))


def _max_pool_offsets(build: Builder, call: Call, index: Index) -> Value:
    """Return the maxima's places: each time a value beats those before it, its place replaces theirs."""
    first, *others = _window_values(build, call, index, -math.inf, rounded=True)
    wide, best, offset = opmath(build.dtype(call["self"])), first, _first_offset(build, call, index)
    for k, value in enumerate(others, 1):
        wins = build.expression("({0} > {1}) | ({0} != {0})", torch.bool, value, best)
        offset = build.expression("tl.where({0}, {1}, {2})", torch.int32, wins, build.constant(k, torch.int32), offset)
        best = build.expression("lm.maximum({0}, {1})", wide, best, value)
    return build.cast(offset, call.dtype)


def _first_offset(build: Builder, call: Call, index: Index) -> Value:
    """Return the first place of a window that lies in the operand: the maximum's where all elements are -inf."""
    windows = _of(call)
    offset: Value | None = None
    for at, window in zip(index[-len(windows):], windows, strict=True):
        start = floordiv(at * window.stride - window.padding, window.dilation)
        steps = build.constant(0, torch.int32)
        if window.padding:
            steps = build.expression("tl.maximum({0}, 0)", torch.int32, build.cast(build.index_value(-start), torch.int32))
        offset = steps if offset is None else _int32(build, f"{{0}} * {window.length} + {{1}}", offset, steps)
    assert offset is not None
    return offset if any(window.padding for window in windows) else build.constant(0, torch.int32)


def _int32(build: Builder, text: str, *operands: Value) -> Value:
    return build.expression(text, torch.int32, *operands)


def _max_pool_indices(build: Builder, call: Call, index: Index) -> Value:
    """Return positions in the operand from places in the window."""
    windows = _of(call)
    rest = build.cast(build.operand(call["self"], index), torch.int32)
    steps: list[Value] = []
    for window in reversed(windows[1:]):
        steps.append(_int32(build, f"{{0}} % {window.length}", rest))
        rest = _int32(build, f"{{0}} // {window.length}", rest)
    total: Value | None = None
    for d, (window, step) in enumerate(zip(windows, (rest, *reversed(steps)), strict=True)):
        base = build.index_value(index[len(index) - len(windows) + d] * window.stride - window.padding)
        place = _int64(build, f"{{0}} + {{1}} * {window.dilation}", base, step)
        size = build.index_value(as_expr(call["input_size"][d]))
        total = place if total is None else _int64(build, "{0} * {1} + {2}", total, size, place)
    assert total is not None
    return total


def _int64(build: Builder, text: str, *operands: Value) -> Value:
    return build.expression(text, torch.int64, *operands)


def _max_pool_backward(build: Builder, call: Call, index: Index) -> Value:
    """Return the sum of the gradients of the windows that have their maximum here."""
    rank = _rank(call)
    here = sympy.S.Zero
    for at, size in zip(index[-rank:], call.shape[-rank:], strict=True):
        here = here * size + at
    position = build.index_value(sympy.expand(here))

    def share(at: Index, _: Sequence[sympy.Expr]) -> Value:
        chosen = build.operand(call["indices"], at)
        grad = build.operand(call["grad_output"], at)
        hit = build.expression("{0} == {1}", torch.bool, chosen, position)
        return build.expression("tl.where({0}, {1}, 0.0)", opmath(call.dtype), hit, grad)

    return build.cast(_over_windows(build, call, index, share), call.dtype)


def _max_pool_offsets_backward(build: Builder, call: Call, index: Index) -> Value:
    """Return the sum of the gradients of the windows that have their maximum here."""
    windows = _of(call)

    def share(at: Index, places: Sequence[sympy.Expr]) -> Value:
        here = sympy.S.Zero
        for place, window in zip(places, windows, strict=True):
            here = here * window.length + floordiv(place, window.dilation)
        hit = build.expression("{0} == {1}", torch.bool, build.cast(build.operand(call["offsets"], at), torch.int32),
                               build.cast(build.index_value(sympy.expand(here)), torch.int32))
        grad = build.operand(call["grad_output"], at)
        return build.expression("tl.where({0}, {1}, 0.0)", opmath(call.dtype), hit, grad)

    return build.cast(_over_windows(build, call, index, share), call.dtype)


# Averages -------------------------------------------------------------------------------------------------------------


def _avg_pool(build: Builder, call: Call, index: Index) -> Value:
    values, rank = _window_values(build, call, index, 0), _rank(call)
    total = reduced(build, "{0} + {1}", values, call.dtype)
    return _averaged(build, call, total, index[-rank:], build.shape(call["self"])[-rank:], call.shape[-rank:])


def _averaged(build: Builder, call: Call, total: Value, at: Index, sizes: Sequence[sympy.Expr],
              numbers: Sequence[sympy.Expr]) -> Value:
    """Return ``total`` over the divisor of the window at ``at``, one of so many in each dimension of ``sizes``."""
    common = _common_divisor(call) or _known_count(call, at, sizes)
    if common:
        return _quotient(build, call, total, common)
    count = _count(build, call, at, sizes)
    counts = _possible_counts(call, sizes, numbers)
    parts = {number: (1.0, 0.0) if number == 1 else reciprocal_parts(number) for number in counts}
    known = {number: both for number, both in parts.items() if both is not None}
    if opmath(call.dtype) is torch.float32 and len(known) == len(counts) <= MOST_COUNTS:
        return _quotient_by_one_of(build, call, total, count, known)
    return build.expression("lm.div({0}, {1})", call.dtype, total, build.cast(count, opmath(call.dtype)))


def _possible_counts(call: Call, sizes: Sequence[sympy.Expr], numbers: Sequence[sympy.Expr]) -> list[int]:
    """Return how many elements a window may count, the most first."""
    spans = [possible_spans(window, size, number, call["count_include_pad"])
             for window, size, number in zip(_of(call), sizes, numbers, strict=True)]
    return sorted({math.prod(several) for several in itertools.product(*spans)}, reverse=True)


def possible_spans(window: Window, size: sympy.Expr, number: sympy.Expr, with_padding: bool) -> set[int]:
    """Return how many elements a window may count in one dimension.

    Args:
        window: The window.
        size: How many elements are pooled.
        number: How many windows there are.
        with_padding: Whether padding counts.
    """
    if not (size.is_Integer and number.is_Integer):
        return set(range(1, window.length + 1))
    cut = window.length // window.stride + 1  # windows at either end
    ends = {*range(min(cut, int(number))), *range(max(int(number) - cut - 1, 0), int(number))}
    low, high = (-window.padding, int(size) + window.padding) if with_padding else (0, int(size))
    starts = (at * window.stride - window.padding for at in ends)
    return {min(start + window.length, high) - max(start, low) for start in starts}


def _quotient_by_one_of(build: Builder, call: Call, total: Value, count: Value,
                        parts: Mapping[int, tuple[float, float]]) -> Value:
    """Return ``total`` over a count that is one of those with reciprocals, rounded as a division, which would branch."""
    high, low = (build.expression(_chosen({number: both[k] for number, both in parts.items()}), torch.float32, count)
                 for k in (0, 1))
    return build.expression("lm.div_by({0}, {1}, {2})", call.dtype, total, high, low)


def _chosen(values: Mapping[int, float]) -> str:
    """Return the text of the value that belongs to the key that ``{0}`` is."""
    *others, last = ((key, literal(value, torch.float32)) for key, value in values.items())
    return functools.reduce(lambda text, pair: f"tl.where({{0}} == {pair[0]}, {pair[1]}, {text})",
                            reversed(others), f"tl.full([], {last[1]}, tl.float32)")


def _known_count(call: Call, at: Index, sizes: Sequence[sympy.Expr]) -> int:
    """Return how many elements the window at ``at`` counts, wherever that is; 0 if an edge cuts some."""
    spans = [_known_span(position, window, size, call["count_include_pad"])
             for position, window, size in zip(at, _of(call), sizes, strict=True)]
    return math.prod(spans)


def _known_span(at: sympy.Expr, window: Window, size: sympy.Expr, with_padding: bool) -> int:
    """Return how many elements a window counts in one dimension; 0 if an edge may cut it."""
    start, edge = at * window.stride - window.padding, size + window.padding if with_padding else size
    ends_inside = known_less(start + window.length - 1, edge)
    return window.length if ends_inside and (with_padding or known_nonnegative(start)) else 0


def _quotient(build: Builder, call: Call, total: Value, count: int) -> Value:
    """Return ``total / count``, rounded as a division is; by the parts of the reciprocal where that is faster."""
    wide = opmath(call.dtype)
    if count & (count - 1) == 0:  # the reciprocal is exact
        return build.expression("{0} * {1}", call.dtype, total, build.constant(1 / count, wide))
    parts = reciprocal_parts(count) if wide is torch.float32 else None
    if parts is None:
        return build.expression("lm.div({0}, {1})", call.dtype, total, build.constant(count, wide))
    high, low = (literal(part, wide) for part in parts)
    return build.expression(f"lm.div_by({{0}}, {high}, {low})", call.dtype, total)


def _common_divisor(call: Call) -> int:
    """Return what all windows are divided by; 0 if not all by the same number."""
    windows = _of(call)
    if call["divisor_override"]:
        return int(call["divisor_override"])
    padded = any(window.padding for window in windows)
    whole = not call["ceil_mode"] and (call["count_include_pad"] or not padded)
    return math.prod(window.length for window in windows) if whole else 0


def _count(build: Builder, call: Call, at: Index, sizes: Sequence[sympy.Expr]) -> Value:
    """Return how many elements the window at ``at`` counts."""
    spans = [_span(build, position, window, size, call["count_include_pad"])
             for position, window, size in zip(at, _of(call), sizes, strict=True)]
    return functools.reduce(lambda left, right: build.expression("{0} * {1}", left.dtype, left, right), spans)


def _span(build: Builder, at: sympy.Expr, window: Window, size: sympy.Expr, with_padding: bool) -> Value:
    """Return how many elements a window counts in one dimension: it is cut at the padded edge, or at the data's."""
    start, edge = at * window.stride - window.padding, size + window.padding if with_padding else size
    dtype = torch.int32 if size.is_Integer and size < LEAST_WIDE else torch.int64

    def place(expr: sympy.Expr) -> Value:
        return build.cast(build.index_value(expr), dtype)

    end = build.expression("tl.minimum({0}, {1})", dtype, place(start + window.length), place(edge))
    low = place(start)
    if not with_padding:
        low = build.expression("tl.maximum({0}, {1})", dtype, low, build.constant(0, dtype))
    return build.expression("{0} - {1}", dtype, end, low)


def _avg_pool_backward(build: Builder, call: Call, index: Index) -> Value:
    rank, sizes = _rank(call), call.shape[-_rank(call):]
    if _common_divisor(call):  # one division instead of one for each window
        total = _over_windows(build, call, index, lambda at, _: build.operand(call["grad_output"], at))
        return _averaged(build, call, total, index[-rank:], sizes, sizes)
    numbers = build.shape(call["grad_output"])[-rank:]
    total = _over_windows(build, call, index, lambda at, _: _averaged(
        build, call, build.operand(call["grad_output"], at), at[-rank:], sizes, numbers))
    return build.cast(total, call.dtype)


# Windows of a size that follows from the result's ---------------------------------------------------------------------


def _adaptive_pool(build: Builder, call: Call, index: Index) -> Value:
    rank = _adaptive_rank(call)
    lengths = _lengths(build.shape(call["self"])[-rank:], call.shape[-rank:])
    corner = [at * length for at, length in zip(index[-rank:], lengths, strict=True)]
    values = [build.operand(call["self"], (*index[:-rank], *(at + k for at, k in zip(corner, place, strict=True))))
              for place in itertools.product(*map(range, lengths))]
    return _divided(build, call, reduced(build, "{0} + {1}", values, call.dtype), lengths)


def _adaptive_pool_backward(build: Builder, call: Call, index: Index) -> Value:
    rank = _adaptive_rank(call)
    lengths = _lengths(call.shape[-rank:], build.shape(call["grad_output"])[-rank:])
    places = (floordiv(at, length) for at, length in zip(index[-rank:], lengths, strict=True))
    return _divided(build, call, build.operand(call["grad_output"], (*index[:-rank], *places)), lengths)


def _divided(build: Builder, call: Call, total: Value, lengths: Sequence[int]) -> Value:
    return _quotient(build, call, total, math.prod(lengths))


def _adaptive_rank(call: Call) -> int:
    return 3 if "3d" in call.target.name() else 2


def _lengths(sizes: Sequence[sympy.Expr], pooled: Sequence[sympy.Expr]) -> list[int]:
    """Return the lengths of windows that lie side by side."""
    return [int(size) // int(count) for size, count in zip(sizes, pooled, strict=True)]


def _accepts_adaptive(call: Call) -> str:
    rank = _adaptive_rank(call)
    sizes, pooled = sizes_of(call["self"])[-rank:], call.shape[-rank:]
    return _uneven(sizes, pooled) or too_long(math.prod(_lengths(sizes, pooled)))


def _accepts_adaptive_backward(call: Call) -> str:
    rank = _adaptive_rank(call)
    return _uneven(call.shape[-rank:], sizes_of(call["grad_output"])[-rank:])


def _uneven(sizes: Sequence[sympy.Expr], pooled: Sequence[sympy.Expr]) -> str:
    """Return why windows are not all of one size, which they are when each output size divides its input size."""
    if not all(size.is_Integer for size in (*sizes, *pooled)):
        return "adaptive pooling of a symbolic size"
    several = any(count == 0 or size % count for size, count in zip(sizes, pooled, strict=True))
    return "adaptive pooling with windows of several sizes" if several else ""


# The table ------------------------------------------------------------------------------------------------------------


_ROWS: dict[str, tuple[Lower, Callable[[Call], str], float]] = {  # with the arithmetic per element of a window
    "aten.max_pool2d.default aten.max_pool3d.default": (_max_pool, _accepts_maxima, 1.0),
    "dynafuse.max_pool_offsets.default": (_max_pool_offsets, _accepts_maxima, 4.0),
    "aten.max_pool2d_with_indices_backward.default aten.max_pool3d_with_indices_backward.default":
        (_max_pool_backward, _accepts_gradient, 16.0),
    "dynafuse.max_pool_offsets_backward.default": (_max_pool_offsets_backward, _accepts_gradient, 16.0),
    "aten.avg_pool2d.default aten.avg_pool3d.default": (_avg_pool, _accepts, 1.0),
    "aten.avg_pool2d_backward.default aten.avg_pool3d_backward.default": (_avg_pool_backward, _accepts_gradient, 16.0),
    "aten._adaptive_avg_pool2d.default aten._adaptive_avg_pool3d.default": (_adaptive_pool, _accepts_adaptive, 1.0),
    "aten._adaptive_avg_pool2d_backward.default aten._adaptive_avg_pool3d_backward.default":
        (_adaptive_pool_backward, _accepts_adaptive_backward, 1.0),
}
_EAGER = {
    "prims._low_memory_max_pool_with_offsets.default": "two results, one of which cannot be fused",
    "aten.max_pool2d_with_indices.default "
    "aten.max_pool3d_with_indices.default aten.adaptive_max_pool2d.default aten.adaptive_max_pool3d.default":
        "max pooling with indices, which the backward reads",
    "aten.adaptive_max_pool2d_backward.default aten.adaptive_max_pool3d_backward.default "
    "aten.max_pool2d_backward.default": "max pooling backward: adds at loaded indices",
}

for _names, (_lower, _accept, _flops) in _ROWS.items():
    for _target in overloads(_names):
        register(rewrite(_target, Kind.INDEX, _lower, accepts=_accept, flops=_flops))
for _target in overloads("prims._low_memory_max_pool_offsets_to_indices.default"):
    register(replace(rewrite(_target, Kind.INDEX, _max_pool_indices, accepts=_accepts_offsets), aligned=("self",)))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))
