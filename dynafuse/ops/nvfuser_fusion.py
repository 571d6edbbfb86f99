"""The interface by which rows of the op table record ops for nvFuser (implemented by ``lowering/nvfuser/recorder.py``).

A ``FusionTensor`` is a tensor of a fusion under construction. Python's operators record the op of that name, so that a
pointwise row's expression serves nvFuser as it stands.

Worked example: with a float32 tensor ``x``, ``1 / (1 + x)`` records ``add(x, 1)`` and then ``div(1, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import sympy
import torch

from dynafuse.ops.table import Call

Number: TypeAlias = bool | int | float
Operand: TypeAlias = "FusionTensor | Number"
Size: TypeAlias = int | sympy.Expr
Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, eq=False)
class FusionTensor:
    """A tensor of a fusion under construction."""

    fusion: Fusion
    number: int  # of its variable in the recipe
    dtype: torch.dtype  # float32 where 16-bit floats are computed with
    shape: Shape
    broadcast: tuple[bool, ...]  # per dimension, whether it is of size 1 or expanded from that: nvFuser's broadcast domains

    def to(self, dtype: torch.dtype) -> FusionTensor:
        """Return the tensor converted to ``dtype``."""
        return self.fusion.cast(self, dtype)

    def __neg__(self) -> FusionTensor:
        return self.fusion.pointwise("neg", self)

    def __add__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("add", self, other)

    def __radd__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("add", other, self)

    def __sub__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("sub", self, other)

    def __rsub__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("sub", other, self)

    def __mul__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("mul", self, other)

    def __rmul__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("mul", other, self)

    def __truediv__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("div", self, other)

    def __rtruediv__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("div", other, self)

    def __floordiv__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("div", self, other)  # of integers, in Triton as here: towards zero

    def __rfloordiv__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("div", other, self)

    def __mod__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("mod", self, other)  # C's, in Triton as here

    def __rmod__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("mod", other, self)

    def __and__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("logical_and" if self.dtype is torch.bool else "bitwise_and", self, other)

    def __or__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("logical_or" if self.dtype is torch.bool else "bitwise_or", self, other)

    def __xor__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("ne" if self.dtype is torch.bool else "bitwise_xor", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __eq__(self, other: object) -> FusionTensor:  # type: ignore[override]
        return self.fusion.pointwise("eq", self, other)  # type: ignore[arg-type]

    def __ne__(self, other: object) -> FusionTensor:  # type: ignore[override]
        return self.fusion.pointwise("ne", self, other)  # type: ignore[arg-type]

    def __lt__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("lt", self, other)

    def __le__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("le", self, other)

    def __gt__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("gt", self, other)

    def __ge__(self, other: Operand) -> FusionTensor:
        return self.fusion.pointwise("ge", self, other)

    __hash__ = object.__hash__


class Fusion(Protocol):
    """A fusion under construction."""

    def operand(self, arg: Any) -> FusionTensor:
        """Return a tensor argument as it is: a 16-bit float that was only moved is still 16 bits wide."""

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a tensor argument."""

    def pointwise(self, name: str, *operands: Operand) -> FusionTensor:
        """Record an elementwise op of nvFuser over numbers and tensors of one dtype, which are broadcast."""

    def cast(self, tensor: FusionTensor, dtype: torch.dtype) -> FusionTensor:
        """Return ``tensor`` in ``dtype``; itself if it has that dtype."""

    def reduce(self, name: str, tensor: FusionTensor, dims: Sequence[int], keepdim: bool) -> FusionTensor:
        """Record a reduction.

        Args:
            name: ``sum``, ``prod``, ``max`` or ``min``.
            tensor: What is reduced.
            dims: The dimensions, none of them negative.
            keepdim: Whether they stay, with size 1.
        """

    def move(self, name: str, tensors: Sequence[FusionTensor], shape: Sequence[Any], *args: Any,
             broadcast: Sequence[bool] | None = None) -> FusionTensor:
        """Record an op of nvFuser that moves elements.

        Args:
            name: The op.
            tensors: Its tensors, which are its first arguments; for ``cat`` they are one list.
            shape: The sizes of the result.
            args: Its other arguments; sizes among them are written by :meth:`sizes`.
            broadcast: Which dimensions of the result are broadcast, if not those of size 1.
        """

    def unsqueeze(self, tensor: FusionTensor, new: Sequence[bool]) -> FusionTensor:
        """Return ``tensor`` with a dimension of size 1 wherever ``new``, an item per dimension of the result, is true."""

    def squeeze(self, tensor: FusionTensor, dims: Sequence[int]) -> FusionTensor:
        """Return ``tensor`` without the dimensions ``dims``, which have size 1."""

    def expand(self, tensor: FusionTensor, shape: Sequence[Any]) -> FusionTensor:
        """Return ``tensor`` broadcast to ``shape``."""

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> FusionTensor:
        """Return a tensor with a constant, or a size, in every element.

        Args:
            shape: Its sizes.
            value: The constant or the size.
            dtype: Its dtype.
        """

    def iota(self, length: Any, start: Any, step: Any) -> FusionTensor:
        """Return the int64 values ``start + step * i`` for ``i`` below ``length``.

        Args:
            length, start, step: Numbers, or sizes that are known when the kernel runs.
        """

    def sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return sizes as arguments of an op: numbers, or scalars of the fusion."""


RecordOp = Callable[[Fusion, Call], FusionTensor]
"""Records one call of an op, and returns its result."""
