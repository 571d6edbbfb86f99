"""Decides where kernels round values of 16-bit floats, which they hold in float32: at stores, and where it would show.

A sum that is off by less than a rounding is as good as eager's, or better. A comparison is not: of two kernels that compute
``x`` again and compare it with its stored maximum, no element may be equal. So what is compared, stepped at (``floor``) or
turned into an integer is rounded to its own dtype first, and what the user casts is rounded before and after. Ops that the
spec wants rounded are (``partition/accuracy.py``).

Worked example, in bfloat16: of ``eq(mul(x, y), m)`` the product is rounded; ``m`` is not, since it is loaded, nor is ``y``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynafuse.ir import Accuracy, Ref, Spec, references
from dynafuse.lowering.calls import row_and_call
from dynafuse.ops import Call, Cast, Kind, Row
from dynafuse.ops.literals import opmath
from dynafuse.ops.overloads import overloads
from dynafuse.ops.promotion import promoted

_MOVING_KINDS = frozenset({Kind.VIEW, Kind.GATHER})
"""Kinds of ops whose elements are elements of an operand."""

PRODUCTS = frozenset(overloads("aten.mul.Tensor aten.mul.Scalar aten.square.default aten.pow.Tensor_Scalar"))
"""Ops whose results are products."""


class Rounding:
    """The roundings of one spec.

    Args:
        spec: The region.
        everywhere: Whether each op's result is rounded, as in eager.
    """

    def __init__(self, spec: Spec, everywhere: bool = False) -> None:
        self.spec = spec
        self.everywhere = everywhere
        self.calls = list(map(row_and_call, spec.ops))
        self._exact: set[int] = set()  # ops whose values, of 16-bit floats, kernels hold as eager has them
        for position, (row, call) in enumerate(self.calls):
            if self.rounds_result(position) or self._moves_exact(row, call):
                self._exact.add(position)

    def operand_dtype(self, op: int, position: int, ref: Ref) -> torch.dtype | None:
        """Return the dtype to which an op's operand is rounded first; None if it is taken as it is held.

        Args:
            op: The op's position in the spec.
            position: The operand's position among the op's arguments.
            ref: The operand.
        """
        row, call = self.calls[op]
        shows = row.rounds or position in row.steps or not call.dtype.is_floating_point
        return self._common_dtype(row, call, ref) or self.narrow_dtype(ref) if shows else None

    def _common_dtype(self, row: Row, call: Call, ref: Ref) -> torch.dtype | None:
        """Return the 16-bit float that eager casts a wider operand to, because what it is compared with has that dtype.

        Return None if nothing is cast. Worked example: ``eq(bfloat16[8], float32[])``.
        """
        if row.cast is not Cast.PROMOTED:
            return None
        tensors = map(self.spec.tensor, references(_args(call)))
        dtype = promoted(tuple((tensor.dtype, not tensor.shape) for tensor in tensors))
        return dtype if _is_narrow(dtype) and _narrows(self.dtype(ref), dtype) else None

    def rounds_result(self, op: int) -> bool:
        """Return whether an op's result is rounded to its dtype."""
        row, call = self.calls[op]
        if not _is_narrow(call.dtype) or row.kind is Kind.VIEW:
            return False
        operands = references(_args(call))
        if self.everywhere or self.spec.ops[op].accuracy is Accuracy.ROUNDED:
            return True
        return row.rounds and any(_narrows(self.dtype(ref), call.dtype) for ref in operands)

    def is_narrow_product(self, op: int) -> bool:
        """Return whether an op's result is a product of 16-bit floats, or one that is cast."""
        source = self._behind_casts(Ref("op", op))
        if source.kind != "op":
            return False
        row, call = self.calls[source.position]
        operands = map(self._behind_casts, references(_args(call)))
        return row.target in PRODUCTS and all(_is_narrow(self.dtype(ref)) for ref in operands)

    def _behind_casts(self, ref: Ref) -> Ref:
        """Return what a value is cast from."""
        while ref.kind == "op" and self.calls[ref.position][0].casts:
            ref = next(references(_args(self.calls[ref.position][1])))
        return ref

    def dtype(self, ref: Ref) -> torch.dtype:
        """Return the dtype of an input or op."""
        return self.spec.tensor(ref).dtype

    def narrow_dtype(self, ref: Ref) -> torch.dtype | None:
        """Return the 16-bit float that a value, or what a decomposition has widened to it, is in eager.

        Return None if kernels hold the value as eager has it.
        """
        while ref.kind == "op" and self.dtype(ref).is_floating_point:
            row, call = self.calls[ref.position]
            if _is_narrow(call.dtype):
                return None if ref.position in self._exact else call.dtype
            if (not row.casts or row.rounds) and row.kind is not Kind.VIEW:
                return None
            ref = next(references(_args(call)))
        return None

    def _moves_exact(self, row: Row, call: Call) -> bool:
        """Return whether an op's elements are elements of operands that kernels hold as eager has them."""
        operands = list(references(_args(call)))
        moves = row.kind in _MOVING_KINDS or (row.picks and len(operands) == len(call.args))  # numbers may need rounding
        return moves and not any(_narrows(self.dtype(ref), call.dtype) or self.narrow_dtype(ref) for ref in operands)


def _args(call: Call) -> Sequence[object]:
    return tuple(call.args.values())


def _is_narrow(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are held in a wider one."""
    return opmath(dtype) is not dtype


def _narrows(source: torch.dtype, dest: torch.dtype) -> bool:
    """Return whether converting a value to a 16-bit float may change it; bools and integers of 8 bits stay as they are."""
    return source is not dest and (source.is_floating_point or source.itemsize > 1)
