"""Windows: what pooling and convolutions read of their operand for an element of their result.

A window is written out: its elements are loaded one by one, under masks where it reaches beyond the operand. A gradient is
asked from the other side: an element of it is made of the few windows that cover it.

Worked example: windows of 3, 2 apart, on an operand of 9 padded by 1 at either end. That of element ``i`` is at ``2i - 1``,
``2i`` and ``2i + 1``; the operand's element ``i`` is in window ``(i + 1) // 2``, and in the one before it if ``i`` is odd.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import S
from torch.fx import Node

from dynafuse.ops.indexing import Bounds, inside, under
from dynafuse.ops.indexing_math import as_expr, decide, floordiv, mod
from dynafuse.ops.literals import opmath
from dynafuse.ops.table import Builder, Index, Value

MAX_WINDOW = 25
"""The most elements of a window that are written out one by one."""


@dataclass(frozen=True)
class Window:
    """The window of an op in one dimension."""

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


def per_dim(value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return an argument's value for each of ``rank`` dimensions, of which it may give one for all."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * rank if len(given) == 1 else given


def sizes_of(argument: Any) -> list[sympy.Expr]:
    """Return the sizes of a tensor argument: an FX node, or a tensor itself."""
    value = argument.meta["val"] if isinstance(argument, Node) else argument
    return [as_expr(size) for size in value.shape]


def windows(*numbers: Sequence[int]) -> list[Window]:
    """Return windows, a dimension each, of their lengths, strides, paddings and dilations."""
    return [Window(*values) for values in zip(*numbers, strict=True)]


def refusal(of: Sequence[Window], limit: int = MAX_WINDOW) -> str:
    """Return why windows cannot be written out, or ""."""
    numbers = (number for window in of for number in (window.length, window.stride, window.padding, window.dilation))
    if not all(isinstance(number, int) for number in numbers):
        return "a window of a symbolic size"
    return too_long(math.prod(window.length for window in of), limit)


def too_long(count: int, limit: int = MAX_WINDOW) -> str:
    """Return why a window of so many elements cannot be written out, or ""."""
    return "" if count <= limit else f"a window of {count} elements, more than {limit}"


# An element's window --------------------------------------------------------------------------------------------------


def elements(of: Sequence[Window], at: Index) -> Iterator[tuple[tuple[int, ...], Index]]:
    """Yield the places of the elements of the window at ``at``: in the window, and in the operand."""
    for steps in itertools.product(*(range(window.length) for window in of)):
        yield steps, element(of, at, steps)


def element(of: Sequence[Window], at: Index, steps: Sequence[int | sympy.Expr]) -> Index:
    """Return the place in the operand of an element of a window.

    Args:
        of: The windows, a dimension each.
        at: The window's number in each.
        steps: The element's place in the window.
    """
    return tuple(position * window.stride - window.padding + window.dilation * step
                 for position, window, step in zip(at, of, steps, strict=True))


def within(build: Builder, sizes: Sequence[sympy.Expr], at: Index, read: Callable[[Index], Value], outside: float) -> Value:
    """Return an operand's value at a place, ``outside`` where that is beyond the operand.

    Args:
        build: What makes values.
        sizes: The operand's sizes, those of the windows' dimensions.
        at: The place in these.
        read: Makes the value at a place.
        outside: The value beyond the operand.
    """
    bounds = [check for position, size in zip(at, sizes, strict=True) for check in inside(position, S.Zero, size)]
    return under(build, bounds, lambda: read(at), outside)


def reduced(build: Builder, text: str, values: Sequence[Value], dtype: torch.dtype) -> Value:
    """Return what is left of values that an expression combines two at a time, in their order.

    Args:
        build: What makes values.
        text: The expression.
        values: The values, one at least.
        dtype: Of the result; it is computed in the type that this is computed in.
    """
    wide = opmath(dtype)
    return functools.reduce(lambda left, right: build.expression(text, wide, left, right), values)


# The windows of an element --------------------------------------------------------------------------------------------

Share = Callable[[Index, Sequence[sympy.Expr]], Value]
"""What a window gives to an element, by the window's index and by how far the element is from the window's first one."""


def shares(build: Builder, of: Sequence[Window], index: Index, counts: Sequence[sympy.Expr], share: Share) -> list[Value]:
    """Return what each window that covers an element of the operand gives it; 0 where there is none.

    Args:
        build: What makes values.
        of: The windows, one for each of the last dimensions.
        index: The element's.
        counts: How many windows there are; of the dimensions before these no matter what.
        share: What a window gives.
    """
    rank = len(of)
    return [under(build, [*cover.reached, *cover.within], lambda cover=cover: share(  # type: ignore[misc]
        (*index[:-rank], *cover.at), cover.places), 0) for cover in covers(of, index, counts)]


@dataclass(frozen=True)
class Cover:
    """A window that may cover an element: its number, how far the element is from its first one, and when it does cover it.

    ``reached`` are the conditions that there is a window of that number, ``within`` those that the element is in it; of
    either those that are not known to hold.
    """

    at: Index
    places: Sequence[sympy.Expr]
    reached: Sequence[Bounds]
    within: Sequence[Bounds]

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the window is known not to cover the element."""
        return any(decide(*check) is False for check in (*self.reached, *self.within))


def covers(of: Sequence[Window], index: Index, counts: Sequence[sympy.Expr]) -> Iterator[Cover]:
    """Yield the windows that may cover an element of the operand; one that does not if none may.

    Args:
        of: The windows, one for each of the last dimensions.
        index: The element's.
        counts: How many windows there are; of the dimensions before these no matter what.
    """
    steps = itertools.product(*(range(window.overlaps) for window in of))
    around = [_cover(of, index, counts, back) for back in steps]
    yield from [cover for cover in around if not cover.is_elsewhere] or around[:1]


def _cover(of: Sequence[Window], index: Index, counts: Sequence[sympy.Expr], back: tuple[int, ...]) -> Cover:
    """Return the window that begins ``back`` windows before the last one that may cover an element."""
    rank, at, places, reached, covered = len(back), list[sympy.Expr](), list[sympy.Expr](), list[Bounds](), list[Bounds]()
    for position, window, steps, count in zip(index[-rank:], of, back, counts[-rank:], strict=True):
        number = floordiv(position + window.padding, window.stride) - steps
        at.append(number)
        places.append(_place(position, window, steps))
        reached += inside(number, S.Zero, count)
        covered += inside(places[-1], S.Zero, sympy.Integer(window.span))
        is_hit = (mod(places[-1], window.dilation), "==", S.Zero)
        covered += [is_hit] if window.dilation > 1 and not decide(*is_hit) else []
    return Cover(tuple(at), places, reached, covered)


def _place(position: sympy.Expr, window: Window, back: int) -> sympy.Expr:
    """Return how far an element is from the first one of the window that begins ``back`` windows before the last one."""
    return mod(position + window.padding, window.stride) + back * window.stride
