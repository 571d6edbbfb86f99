"""What a row of the op table is given to record itself for nvFuser (implemented by ``lowering/nvfuser/recorder.py``).

A ``Part`` is a tensor of a fusion under construction. Python's operators record the op of that name, so that a pointwise
row's expression serves nvFuser as it stands.

Worked example: with ``x`` a float32 part, ``1 / (1 + x)`` records ``add(x, 1)`` and then ``div(1, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import sympy
import torch

from dynafuse.ops.table import Call

Number: TypeAlias = bool | int | float
Operand: TypeAlias = "Part | Number"
Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of a fusion: the dtype it has there (float32 where 16-bit floats are computed with) and its sizes.

    ``spread`` says per dimension whether it is a broadcast one in nvFuser's sense: of size 1, or expanded from that.
    """

    fusion: Fusion
    number: int
    dtype: torch.dtype
    shape: Shape
    spread: tuple[bool, ...]

    def to(self, dtype: torch.dtype) -> Part:
        """Converted to ``dtype``."""
        return self.fusion.cast(self, dtype)

    def __neg__(self) -> Part:
        return self.fusion.pointwise("neg", self)

    def __add__(self, other: Operand) -> Part:
        return self.fusion.pointwise("add", self, other)

    def __radd__(self, other: Operand) -> Part:
        return self.fusion.pointwise("add", other, self)

    def __sub__(self, other: Operand) -> Part:
        return self.fusion.pointwise("sub", self, other)

    def __rsub__(self, other: Operand) -> Part:
        return self.fusion.pointwise("sub", other, self)

    def __mul__(self, other: Operand) -> Part:
        return self.fusion.pointwise("mul", self, other)

    def __rmul__(self, other: Operand) -> Part:
        return self.fusion.pointwise("mul", other, self)

    def __truediv__(self, other: Operand) -> Part:
        return self.fusion.pointwise("div", self, other)

    def __rtruediv__(self, other: Operand) -> Part:
        return self.fusion.pointwise("div", other, self)

    def __floordiv__(self, other: Operand) -> Part:
        return self.fusion.pointwise("div", self, other)  # of integers, in Triton as here: towards zero

    def __rfloordiv__(self, other: Operand) -> Part:
        return self.fusion.pointwise("div", other, self)

    def __mod__(self, other: Operand) -> Part:
        return self.fusion.pointwise("mod", self, other)  # C's, in Triton as here

    def __rmod__(self, other: Operand) -> Part:
        return self.fusion.pointwise("mod", other, self)

    def __and__(self, other: Operand) -> Part:
        return self.fusion.pointwise("logical_and" if self.dtype is torch.bool else "bitwise_and", self, other)

    def __or__(self, other: Operand) -> Part:
        return self.fusion.pointwise("logical_or" if self.dtype is torch.bool else "bitwise_or", self, other)

    def __xor__(self, other: Operand) -> Part:
        return self.fusion.pointwise("ne" if self.dtype is torch.bool else "bitwise_xor", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __eq__(self, other: object) -> Part:  # type: ignore[override]
        return self.fusion.pointwise("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> Part:  # type: ignore[override]
        return self.fusion.pointwise("ne", self, other)  # type: ignore[arg-type]

    def __lt__(self, other: Operand) -> Part:
        return self.fusion.pointwise("lt", self, other)

    def __le__(self, other: Operand) -> Part:
        return self.fusion.pointwise("le", self, other)

    def __gt__(self, other: Operand) -> Part:
        return self.fusion.pointwise("gt", self, other)

    def __ge__(self, other: Operand) -> Part:
        return self.fusion.pointwise("ge", self, other)

    __hash__ = object.__hash__


class Fusion(Protocol):
    """A fusion under construction."""

    def operand(self, arg: Any) -> Part:
        """The part of a tensor argument, as it is: a 16-bit float that was only moved is still 16 bits wide."""

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """The sizes of a tensor argument."""

    def pointwise(self, name: str, *operands: Operand) -> Part:
        """An elementwise op of nvFuser over broadcast operands of one dtype, and numbers."""

    def cast(self, part: Part, dtype: torch.dtype) -> Part:
        """``part`` in ``dtype``; itself if it has that dtype."""

    def reduce(self, name: str, part: Part, dims: Sequence[int], keepdim: bool) -> Part:
        """``sum``, ``prod``, ``max`` or ``min`` over ``dims``."""

    def move(self, name: str, parts: Sequence[Part], shape: Sequence[Any], *args: Any,
             spread: Sequence[bool] | None = None) -> Part:
        """An op of nvFuser that moves elements; ``args`` follow the parts. Sizes among them are written by :meth:`sizes`."""

    def unsqueezed(self, part: Part, new: Sequence[bool]) -> Part:
        """``part`` with a dimension of size 1 wherever ``new`` is true."""

    def squeezed(self, part: Part, dims: Sequence[int]) -> Part:
        """``part`` without the dimensions ``dims``, which have size 1."""

    def expanded(self, part: Part, shape: Sequence[Any]) -> Part:
        """``part`` broadcast to ``shape``."""

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> Part:
        """A constant, or a size, in every element."""

    def iota(self, length: Any, start: Any, step: Any) -> Part:
        """The int64 values ``start + step * i`` below ``length``."""

    def sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Sizes as arguments of an op: numbers, or scalars of the fusion."""


Fuse = Callable[[Fusion, Call], Part]
