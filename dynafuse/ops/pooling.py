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
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from sympy import S
from torch._ops import OpOverload

from dynafuse.ops.indexing import Bounds, inside, under
from dynafuse.ops.indexing_math import as_expr, floordiv, known_less, known_nonnegative, mod
from dynafuse.ops.literals import literal, opmath, reciprocal_parts
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Builder, Call, Index, Kind, Lower, Value, eager, register, rewrite

MAX_WINDOW = 25
"""The most elements of a window that are written out one by one."""

LEAST_WIDE = 1 << 30
"""The least size in which places may take more than 32 bits."""

MOST_COUNTS = 8
"""The most numbers of elements that windows count of which the reciprocal is chosen rather than computed."""

OFFSET_WINDOW = 127
"""The most elements of a window whose places int8 holds."""


@dataclass(frozen=True)
class Window:
    """The window of a pooling op in one dimension."""

    length: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def span(self) -> int:
        """Return the elements from its first to its last."""
        return self.dilation * (self.length - 1) + 1

    @property
    def overlaps(self) -> int:
        """Return the most windows that an element is in, or lies between elements of."""
        return -(-self.span // self.stride)


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
    if rank not in (2, 3) or _window_refusal(args, rank) or not dtype.is_floating_point:
        return None
    return {2: torch.ops.aten.max_pool2d.default, 3: torch.ops.aten.max_pool3d.default}[rank], MAX_POOL_OFFSETS


# Windows --------------------------------------------------------------------------------------------------------------


def _rank(call: Call) -> int:
    """Return the number of dimensions that a call pools."""
    return 3 if "3d" in call.target.name() else 2 if "2d" in call.target.name() else len(call["kernel_size"])


def _per_dim(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def _windows(args: dict[str, Any], rank: int) -> list[Window]:
    """Return the windows of a call's arguments, a dimension each; without strides they lie side by side."""
    size = args["kernel_size"]
    given = (size, args["stride"] or size, args["padding"], args.get("dilation", 1))
    return [Window(*values) for values in zip(*(_per_dim(value, rank) for value in given), strict=True)]


def _of(call: Call) -> list[Window]:
    return _windows(call.args, _rank(call))


def _window_refusal(args: dict[str, Any], rank: int, limit: int = MAX_WINDOW) -> str:
    """Return why windows cannot be written out, or ""."""
    windows = _windows(args, rank)
    numbers = (number for window in windows for number in (window.length, window.stride, window.padding, window.dilation))
    if not all(isinstance(number, int) for number in numbers):
        return "a window of a symbolic size"
    count = math.prod(window.length for window in windows)
    return "" if count <= limit else f"a window of {count} elements, more than {limit}"


def _accepts(call: Call) -> str:
    return _window_refusal(call.args, _rank(call))


def _accepts_maxima(call: Call) -> str:
    floats = call.dtype.is_floating_point or call.target is MAX_POOL_OFFSETS
    return _accepts(call) if floats else f"max pooling of {str(call.dtype)[6:]}"


def _accepts_offsets(call: Call) -> str:
    return _window_refusal(call.args, _rank(call), OFFSET_WINDOW)


def _accepts_gradient(call: Call) -> str:
    return _accepts(call) or _too_long(math.prod(window.overlaps for window in _of(call)))


def _reduced(build: Builder, text: str, values: Sequence[Value], dtype: torch.dtype) -> Value:
    wide = opmath(dtype)
    return functools.reduce(lambda left, right: build.expression(text, wide, left, right), values)


def _window_values(build: Builder, call: Call, index: Index, outside: float, rounded: bool = False) -> list[Value]:
    """Return the operand's values in the window of an element; ``outside`` where it reaches beyond the operand."""
    windows, operand = _of(call), build.rounded if rounded else build.operand
    rank = len(windows)
    sizes, start = build.shape(call["self"])[-rank:], index[:-rank]
    places = [[at * window.stride - window.padding + window.dilation * k for k in range(window.length)]
              for at, window in zip(index[-rank:], windows, strict=True)]

    def value(at: Index) -> Value:
        bounds = [check for position, size in zip(at, sizes, strict=True) for check in inside(position, S.Zero, size)]
        return under(build, bounds, lambda: operand(call["self"], (*start, *at)), outside)

    return [value(at) for at in itertools.product(*places)]


# Maxima ---------------------------------------------------------------------------------------------------------------


def _max_pool(build: Builder, call: Call, index: Index) -> Value:
    values = _window_values(build, call, index, -math.inf, rounded=True)
    return _reduced(build, "lm.maximum({0}, {1})", values, build.dtype(call["self"]))


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
    total = _reduced(build, "{0} + {1}", values, call.dtype)
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


Share = Callable[[Index, Sequence[sympy.Expr]], Value]
"""What a window gives to an element, by the window's index and by how far the element is from the window's first one."""


def _over_windows(build: Builder, call: Call, index: Index, share: Share) -> Value:
    """Return the sum of what each window that covers an element of the operand gives it."""
    reach = [range(window.overlaps) for window in _of(call)]
    shares = [_share(build, call, index, back, share) for back in itertools.product(*reach)]
    return _reduced(build, "{0} + {1}", shares, call.dtype)


def _share(build: Builder, call: Call, index: Index, back: tuple[int, ...], share: Share) -> Value:
    """Return what the window gives that begins ``back`` windows before the last one that covers an element; 0 if none."""
    rank, at, places, bounds = len(back), list[sympy.Expr](), list[sympy.Expr](), list[Bounds]()
    grads = build.shape(call["grad_output"])[-rank:]
    for position, window, steps, count in zip(index[-rank:], _of(call), back, grads, strict=True):
        number = floordiv(position + window.padding, window.stride) - steps
        at.append(number)
        places.append(_place(position, window, steps))
        bounds += inside(number, S.Zero, count)
        bounds += inside(places[-1], S.Zero, sympy.Integer(window.span))
        bounds += [(mod(places[-1], window.dilation), "==", S.Zero)] if window.dilation > 1 else []
    return under(build, bounds, lambda: share((*index[:-rank], *at), places), 0)


def _place(position: sympy.Expr, window: Window, back: int) -> sympy.Expr:
    """Return how far an element is from the first one of the window that begins ``back`` windows before the last one."""
    return mod(position + window.padding, window.stride) + back * window.stride


# Windows of a size that follows from the result's ---------------------------------------------------------------------


def _adaptive_pool(build: Builder, call: Call, index: Index) -> Value:
    rank = _adaptive_rank(call)
    lengths = _lengths(build.shape(call["self"])[-rank:], call.shape[-rank:])
    corner = [at * length for at, length in zip(index[-rank:], lengths, strict=True)]
    values = [build.operand(call["self"], (*index[:-rank], *(at + k for at, k in zip(corner, place, strict=True))))
              for place in itertools.product(*map(range, lengths))]
    return _divided(build, call, _reduced(build, "{0} + {1}", values, call.dtype), lengths)


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
    uneven = _uneven(_pooled_sizes(call["self"], call), call.shape[-_adaptive_rank(call):])
    return uneven or _too_long(math.prod(_lengths(_pooled_sizes(call["self"], call), call.shape[-_adaptive_rank(call):])))


def _accepts_adaptive_backward(call: Call) -> str:
    return _uneven(call.shape[-_adaptive_rank(call):], _pooled_sizes(call["grad_output"], call))


def _uneven(sizes: Sequence[sympy.Expr], pooled: Sequence[sympy.Expr]) -> str:
    """Return why windows are not all of one size, which they are when each output size divides its input size."""
    if not all(size.is_Integer for size in (*sizes, *pooled)):
        return "adaptive pooling of a symbolic size"
    several = any(count == 0 or size % count for size, count in zip(sizes, pooled, strict=True))
    return "adaptive pooling with windows of several sizes" if several else ""


def _too_long(count: int) -> str:
    return "" if count <= MAX_WINDOW else f"a window of {count} elements, more than {MAX_WINDOW}"


def _pooled_sizes(arg: Any, call: Call) -> Sequence[sympy.Expr]:
    """Return the last sizes of a tensor argument: an FX node, or a tensor itself."""
    value = arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg
    return [as_expr(size) for size in value.shape[-_adaptive_rank(call):]]


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
