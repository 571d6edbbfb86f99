"""Rows of convolutions that keep channels apart: an element of the result is a weighted sum of its window.

Each channel of the result is made of one of the operand's, of which it has one or a few for each. Libraries have quick
kernels for few of these, and no kernel at all for others, which they run group by group. Whether a graph's convolutions
become these ops, says ``passes/depthwise.py``.

Beyond the operand there are zeros, which weights multiply: those that are not finite make NaN of them, in gradients as well.

Worked example: ``depthwise_convolution(x[1, 4, 9], w[4, 1, 3], [1], [2], [1])`` is causal where what is behind its ninth
element is left out: the element ``i`` is ``w[c, 0, 0] x[i - 2] + w[c, 0, 1] x[i - 1] + w[c, 0, 2] x[i]``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import S
from torch._ops import OpOverload

from dynafuse.ops.indexing import under
from dynafuse.ops.indexing_math import floordiv
from dynafuse.ops.literals import opmath
from dynafuse.ops.table import Builder, Call, Index, Kind, Loop, Shape, Value, register, rewrite
from dynafuse.ops.windows import (
    MAX_WINDOW,
    Window,
    covers,
    element,
    reduced,
    refusal,
    shares,
    sizes_of,
    too_long,
    windows,
    within,
)

MOST_TAPS = 49
"""The most elements of a window that are written out one by one: 7 × 7."""

_LIBRARY = torch.library.Library("dynafuse", "FRAGMENT")
_LIBRARY.define("depthwise_convolution(Tensor self, Tensor weight, int[] stride, int[] padding, int[] dilation) -> Tensor")
_LIBRARY.define("depthwise_convolution_backward(Tensor grad_output, Tensor weight, SymInt[] input_size, int[] stride, "
                "int[] padding, int[] dilation) -> Tensor")


def _convolution(self: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int],
                 dilation: Sequence[int]) -> torch.Tensor:
    """Return the convolution, by torch's op."""
    channels, whole = self.shape[1], [0] * len(stride)
    result: torch.Tensor = torch.ops.aten.convolution(self, weight, None, stride, padding, dilation, False, whole, channels)
    return result.contiguous(memory_format=_layout(self))


def _convolution_like(self: torch.Tensor, weight: torch.Tensor, *numbers: Sequence[int]) -> torch.Tensor:
    """Return a result without values, in the operand's layout."""
    of = windows(weight.shape[2:], *numbers)
    counts = [(size + 2 * window.padding - window.span) // window.stride + 1
              for size, window in zip(self.shape[2:], of, strict=True)]
    return self.new_empty((self.shape[0], weight.shape[0], *counts)).contiguous(memory_format=_layout(self))


def _gradient(grad_output: torch.Tensor, weight: torch.Tensor, input_size: Sequence[int], stride: Sequence[int],
              padding: Sequence[int], dilation: Sequence[int]) -> torch.Tensor:
    """Return the gradient with respect to what is convolved, by torch's op."""
    like, whole = grad_output.new_empty(input_size).contiguous(memory_format=_layout(grad_output)), [0] * len(stride)
    result: torch.Tensor = torch.ops.aten.convolution_backward(
        grad_output, like, weight, None, stride, padding, dilation, False, whole, input_size[1], [True, False, False])[0]
    return result.contiguous(memory_format=_layout(grad_output))


def _gradient_like(grad_output: torch.Tensor, weight: torch.Tensor, input_size: Sequence[int], *_: Any) -> torch.Tensor:
    """Return a result without values, in the gradient's layout."""
    return grad_output.new_empty(input_size).contiguous(memory_format=_layout(grad_output))


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    """Return the layout of an operand, which a result has, too."""
    return torch._prims_common.suggest_memory_format(tensor)


_LIBRARY.impl("depthwise_convolution", _convolution, "CompositeExplicitAutograd")
_LIBRARY.impl("depthwise_convolution", _convolution_like, "Meta")
_LIBRARY.impl("depthwise_convolution_backward", _gradient, "CompositeExplicitAutograd")
_LIBRARY.impl("depthwise_convolution_backward", _gradient_like, "Meta")
DEPTHWISE: OpOverload = torch.ops.dynafuse.depthwise_convolution.default
"""A convolution whose weight has a single channel for each of the result's."""

DEPTHWISE_BACKWARD: OpOverload = torch.ops.dynafuse.depthwise_convolution_backward.default
"""The gradient with respect to what is convolved."""


Tap = tuple[int | sympy.Expr, ...]
"""The place of an element in its window."""


# Values at an index ---------------------------------------------------------------------------------------------------


def _windows(call: Call, weight: Sequence[sympy.Expr]) -> list[Window]:
    """Return a call's windows, given its weight's sizes."""
    return windows([int(size) for size in weight[2:]], call["stride"], call["padding"], call["dilation"])


def _weight(build: Builder, call: Call, output: sympy.Expr, tap: Iterable[int | sympy.Expr]) -> Value:
    """Return the weight of an element of a window, of a channel of the result."""
    return build.operand(call["weight"], (output, S.Zero, *map(sympy.sympify, tap)))


def _taps(of: Sequence[Window]) -> Iterator[Tap]:
    """Yield the places of a window's elements, by some of its dimensions."""
    return itertools.product(*(range(window.length) for window in of))


def _lower(build: Builder, call: Call, index: Index) -> Value:
    taps = _taps(_windows(call, build.shape(call["weight"])))
    return _sum_of_products(build, call, list(_terms(build, call, index, taps)))


def _add_row(build: Builder, call: Call, index: Index, row: sympy.Expr, total: Value) -> Value:
    """Return a sum with what a row of the window adds to it."""
    taps = ((row, *rest) for rest in _taps(_windows(call, build.shape(call["weight"]))[1:]))
    return _added(build, call, _terms(build, call, index, taps), total)


def _terms(build: Builder, call: Call, index: Index, taps: Iterable[Tap]) -> Iterator[tuple[Value, Value]]:
    """Yield elements of the window, given their places in it, each with its weight."""
    image, channel, *at = index
    _, channels, *sizes = build.shape(call["self"])
    source, of = floordiv(channel, _copies(call.shape[1], channels)), _windows(call, build.shape(call["weight"]))

    def read(place: Index) -> Value:
        return build.operand(call["self"], (image, source, *place))

    for tap in taps:
        weight = _weight(build, call, channel, tap)
        yield within(build, sizes, element(of, tuple(at), tap), read, 0), weight


def _rows(call: Call, shape: Shape) -> int:
    """Return in how many steps a window is walked, a row each; 1 for one that is written out."""
    lengths = [int(size) for size in shape(call["weight"])[2:]]
    return lengths[0] if len(lengths) > 1 and math.prod(lengths) > MAX_WINDOW else 1


def _terms_in_code(rows: Callable[[Call, Shape], int], call: Call, shape: Shape) -> int:
    """Return how many elements of a window the code has, given the function that returns in how many steps it is walked."""
    return math.prod(int(size) for size in shape(call["weight"])[2:]) // rows(call, shape)


def _rows_of_gradient(call: Call, shape: Shape) -> int:
    """Return the same of a gradient; where windows begin apart, a row of them covers few elements."""
    is_plain = shape(call["grad_output"])[1] == call.shape[1] and all(stride == 1 for stride in call["stride"])
    return _rows(call, shape) if is_plain else 1


def _add_row_of_gradient(build: Builder, call: Call, index: Index, row: sympy.Expr, total: Value) -> Value:
    """Return a sum with what the windows add to it that have the element in a row."""
    image, channel, *at = index
    of, counts = _windows(call, build.shape(call["weight"])), build.shape(call["grad_output"])[2:]

    def terms() -> Iterator[tuple[Value, Value]]:
        for rest in _taps(of[1:]):
            tap = (row, *rest)
            number = tuple(position + window.padding - window.dilation * step
                           for position, window, step in zip(at, of, tap, strict=True))
            weight = _weight(build, call, channel, tap)
            yield within(build, counts, number, functools.partial(_grad, build, call, image, channel), 0), weight

    return _added(build, call, terms(), total)


def _grad(build: Builder, call: Call, image: sympy.Expr, output: sympy.Expr, at: Index) -> Value:
    """Return the gradient of an element of the result."""
    return build.operand(call["grad_output"], (image, output, *at))


def _lower_gradient(build: Builder, call: Call, index: Index) -> Value:
    image, channel, *_ = index
    of, counts = _windows(call, build.shape(call["weight"])), build.shape(call["grad_output"])
    copies = _copies(counts[1], call.shape[1])
    outputs, around = [channel * copies + copy for copy in range(copies)], list(covers(of, index, counts))

    grad = functools.partial(_grad, build, call, image)

    def weight(output: sympy.Expr, places: Sequence[sympy.Expr]) -> Value:
        tap = (floordiv(place, window.dilation) for place, window in zip(places, of, strict=True))
        return _weight(build, call, output, tap)

    if not any(cover.within for cover in around):
        return _sum_of_products(build, call, [
            (under(build, cover.reached, functools.partial(grad, output, cover.at), 0), weight(output, cover.places))
            for output, cover in itertools.product(outputs, around)])

    def product(output: sympy.Expr, at: Index, places: Sequence[sympy.Expr]) -> Value:
        return build.expression("{0} * {1}", opmath(call.dtype), grad(output, at[2:]), weight(output, places))

    products = [shared for output in outputs
                for shared in shares(build, of, index, counts, functools.partial(product, output))]
    return build.cast(reduced(build, "{0} + {1}", products, call.dtype), call.dtype)


def _sum_of_products(build: Builder, call: Call, terms: Sequence[tuple[Value, Value]]) -> Value:
    """Return the sum of products in the order of the terms, rounded once."""
    first = build.expression("{0} * {1}", opmath(call.dtype), *terms[0])
    return build.cast(_added(build, call, terms[1:], first), call.dtype)


def _added(build: Builder, call: Call, terms: Iterable[tuple[Value, Value]], total: Value) -> Value:
    """Return a sum with products added to it, in the order of the terms."""
    for term in terms:
        total = build.expression("{0} * {1} + {2}", opmath(call.dtype), *term, total)
    return total


def _copies(outputs: sympy.Expr, channels: sympy.Expr) -> int:
    """Return how many channels of the result each of the operand's has."""
    return int(outputs) // int(channels)


# The table ------------------------------------------------------------------------------------------------------------


def _accepts(call: Call) -> str:
    return _refusal(call, sizes_of(call["self"])[1]) or refusal(_windows(call, sizes_of(call["weight"])), MOST_TAPS)


def _accepts_gradient(call: Call) -> str:
    outputs = sizes_of(call["grad_output"])[1]
    if reason := _refusal(call, outputs):
        return reason
    of = _windows(call, sizes_of(call["weight"]))
    count = math.prod([_copies(outputs, call.shape[1]), *(window.overlaps for window in of)])
    return refusal(of, MOST_TAPS) or too_long(count, MOST_TAPS)


def _refusal(call: Call, channels: sympy.Expr) -> str:
    """Return why there are no windows of a known size, or ""."""
    numbers = (*sizes_of(call["weight"]), channels, call.shape[1])
    if not call.dtype.is_floating_point:
        return f"a convolution of {str(call.dtype)[6:]}"
    return "" if all(number.is_Integer for number in numbers) else "a convolution of symbolic channels or windows"


FIRST_SIDE = 2
"""The dimension, of images, of results and of weights, along which windows are walked row by row."""

register(replace(rewrite(DEPTHWISE, Kind.INDEX, _lower, accepts=_accepts, flops=2.0),
                 loop=Loop(_rows, _add_row, FIRST_SIDE), terms=functools.partial(_terms_in_code, _rows)))
register(replace(rewrite(DEPTHWISE_BACKWARD, Kind.INDEX, _lower_gradient, accepts=_accepts_gradient, flops=2.0),
                 loop=Loop(_rows_of_gradient, _add_row_of_gradient, FIRST_SIDE),
                 terms=functools.partial(_terms_in_code, _rows_of_gradient)))
