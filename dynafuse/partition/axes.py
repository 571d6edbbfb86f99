"""Axes: how the dimensions of different tensors are recognised as the same loop.

Every node starts with its own axes, one per dimension. Merging two regions *unifies* the axes of what one writes and
the other reads, splitting an axis where a reshape cuts through it. A trail records every change, so a merge that turns
out illegal is taken back.

Worked example, ``x[8, 6].view(8, 2, 3)``: unifying the axis lists ``[8, 6]`` and ``[8, 2, 3]`` makes the first axes
one and splits the second into ``2`` and ``3``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sympy

from dynafuse.ir import Size


def divides(divisor: Size, size: Size) -> Size | None:
    """Return ``size / divisor`` when that is provably a whole number, else None."""
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if size % divisor == 0 else None
    quotient = sympy.sympify(size) / divisor
    if quotient.is_integer and sympy.denom(quotient) == 1:
        return int(quotient) if quotient.is_Integer else quotient
    return None


class Axis:
    """A loop of some size; once unified with a finer list of axes it forwards to them.

    ``rank`` bounds how many forwards lead here (union by rank: Tarjan, van Leeuwen, JACM 31(2), 1984), so that a residual
    stream through all layers is followed in a few steps.
    """

    __slots__ = ("parts", "rank", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.rank = 0
        self.parts: tuple[Axis, ...] | None = None

    def __repr__(self) -> str:
        return f"<{self.size}>" if self.parts is None else repr(self.parts)


Axes = tuple[Axis, ...]
AxisDims = tuple[Axes, ...]


def fresh(shape: Sequence[Size]) -> AxisDims:
    """Return new axes for a shape: one per dimension, none for a dimension of size one."""
    return tuple(() if size == 1 else (Axis(size),) for size in shape)


def leaves(axes: Iterable[Axis]) -> list[Axis]:
    """Return the axes that a list of axes stands for now."""
    loops: list[Axis] = []
    for axis in axes:
        while (parts := axis.parts) is not None and len(parts) == 1:
            (axis,) = parts
        if parts is None:
            loops.append(axis)
        else:  # no deeper than an axis can be split
            loops.extend(leaves(parts))
    return loops


class Unifier:
    """Unifies axes and can take back what it did."""

    def __init__(self) -> None:
        self._trail: list[Axis] = []

    def mark(self) -> int:
        """Return a point to which :meth:`undo` returns."""
        return len(self._trail)

    def undo(self, mark: int) -> None:
        """Forget every change since ``mark``."""
        while len(self._trail) > mark:
            self._trail.pop().parts = None

    def _forward(self, axis: Axis, parts: tuple[Axis, ...]) -> None:
        axis.parts = parts
        self._trail.append(axis)

    def split(self, axis: Axis, outer: Size, inner: Size) -> tuple[Axis, Axis]:
        """Split a leaf into an outer and an inner axis.

        Args:
            axis: The leaf; whoever asks for its leaves gets the two from now on.
            outer: The size of the outer axis.
            inner: The size of the inner one; their product is that of the leaf.
        """
        parts = (Axis(outer), Axis(inner))
        self._forward(axis, parts)
        return parts

    def unify(self, left: Iterable[Axis], right: Iterable[Axis]) -> bool:
        """Make two axis lists the same loops, in the same order. False (and possibly half done) if they cannot be.

        Args:
            left: Axes, outermost first.
            right: The other axes, outermost first.
        """
        a, b = leaves(left)[::-1], leaves(right)[::-1]
        while a and b:
            x, y = a.pop(), b.pop()
            if x is y:
                continue
            if x.size == y.size:
                self._join(*((x, y) if x.rank <= y.rank else (y, x)))
            elif not self._refine(x, y, a, b):
                return False
        return not a and not b

    def _join(self, lower: Axis, upper: Axis) -> None:
        upper.rank = max(upper.rank, lower.rank + 1)  # stays when this is undone: it is a bound
        self._forward(lower, (upper,))

    def _refine(self, x: Axis, y: Axis, a: list[Axis], b: list[Axis]) -> bool:
        """Split the larger of two axes so that its outer part is the smaller."""
        for big, small, rest in ((x, y, a), (y, x, b)):
            inner = divides(small.size, big.size)
            if inner is not None:
                inner_axis = Axis(inner)
                self._forward(big, (small, inner_axis))
                rest.append(inner_axis)
                return True
        return False

    def unify_dims(self, left: AxisDims, right: AxisDims) -> bool:
        """Unify two tensors' axes dimension by dimension."""
        return len(left) == len(right) and all(self.unify(x, y) for x, y in zip(left, right, strict=True))

    def regroup(self, dims: AxisDims, shape: Sequence[Size]) -> AxisDims | None:
        """Return the axes of ``dims``, row by row, as the dimensions of ``shape``; None if a cut is not provable."""
        rest = leaves(axis for dim in dims for axis in dim)[::-1]
        grouped = []
        for size in shape:
            group = self._take(rest, size)
            if group is None:
                return None
            grouped.append(group)
        return None if rest else tuple(grouped)

    def _take(self, rest: list[Axis], size: Size) -> tuple[Axis, ...] | None:
        """Pop axes off ``rest`` (its end is outermost) until they make up ``size``, splitting the last if needed."""
        taken: list[Axis] = []
        while size != 1:
            if not rest:
                return None
            axis = rest.pop()
            remaining = divides(axis.size, size)
            if remaining is None:
                inner = divides(size, axis.size)
                if inner is None:
                    return None
                axis, inner_axis = self.split(axis, size, inner)
                rest.append(inner_axis)
                remaining = 1
            taken.append(axis)
            size = remaining
        return tuple(taken)
