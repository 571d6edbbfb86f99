"""Where kernels round values of 16-bit floats, which they hold in float32: at stores, and where it can be told.

A sum that is off by less than a rounding is as good as eager's, or better. A comparison is not: of two kernels that compute
``x`` again and compare it with its stored maximum, no element may be equal. So what is compared, stepped at (``floor``) or
turned into an integer is rounded to its own dtype first; what the user casts is rounded before and after.

Worked example, in bfloat16: of ``eq(mul(x, y), m)`` the product is rounded, and neither ``m``, which is loaded, nor ``y``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynafuse.ir import Ref, Spec, references
from dynafuse.lowering.calls import row_and_call
from dynafuse.ops import Call, Kind, Row
from dynafuse.ops.literals import opmath

_MOVES = frozenset({Kind.VIEW, Kind.GATHER})


class Rounding:
    """The roundings of one spec. ``everywhere`` if each op's result is rounded, as in eager."""

    def __init__(self, spec: Spec, everywhere: bool = False) -> None:
        self.spec = spec
        self.everywhere = everywhere
        self.calls = list(map(row_and_call, spec.ops))
        self._rounded: set[int] = set()  # the ops whose values are 16-bit floats, and are so in kernels
        for position, (row, call) in enumerate(self.calls):
            if self.result(position) or self._moves(row, call):
                self._rounded.add(position)

    def operand(self, op: int, position: int, ref: Ref) -> torch.dtype | None:
        """The dtype to which an op's argument is rounded first, if it is held in more bits than it has in eager."""
        row, call = self.calls[op]
        asks = row.rounds or position in row.steps or not call.dtype.is_floating_point
        return self._narrow(ref) if asks else None

    def result(self, op: int) -> bool:
        """Whether an op's result is rounded."""
        row, call = self.calls[op]
        if not _is_narrow(call.dtype) or row.kind is Kind.VIEW:
            return False
        operands = references(_args(call))
        return self.everywhere or (row.rounds and any(_narrows(self.dtype(ref), call.dtype) for ref in operands))

    def dtype(self, ref: Ref) -> torch.dtype:
        """The dtype of an input or op."""
        held: torch.dtype = (self.spec.inputs if ref.kind == "in" else self.spec.ops)[ref.position].dtype
        return held

    def _narrow(self, ref: Ref) -> torch.dtype | None:
        """The 16-bit float that a value is in eager, itself or before a decomposition widened it; None if it is rounded."""
        while ref.kind == "op" and self.dtype(ref).is_floating_point:
            row, call = self.calls[ref.position]
            if _is_narrow(call.dtype):
                return None if ref.position in self._rounded else call.dtype
            if (not row.casts or row.rounds) and row.kind is not Kind.VIEW:
                return None
            ref = next(references(_args(call)))
        return None

    def _moves(self, row: Row, call: Call) -> bool:
        """Whether an op's elements are elements of what is rounded."""
        operands = references(_args(call))
        return row.kind in _MOVES and not any(_narrows(self.dtype(ref), call.dtype) or self._narrow(ref) for ref in operands)


def _args(call: Call) -> Sequence[object]:
    return tuple(call.args.values())


def _is_narrow(dtype: torch.dtype) -> bool:
    """Whether values of a dtype are held in a wider one."""
    return opmath(dtype) is not dtype


def _narrows(source: torch.dtype, dest: torch.dtype) -> bool:
    """Whether a value may change when it is converted: integers of 8 bits are 16-bit floats, too."""
    return source is not dest and (source.is_floating_point or source.itemsize > 1)
