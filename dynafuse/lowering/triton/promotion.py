"""Type promotion for the ops of a spec (see :mod:`dynafuse.ops.promotion`).

Worked example: ``eq(float16[4], float32[4])`` compares in float32, the operands' common dtype; ``add(float16[4], 2.5)``
computes in its output's dtype, float16 (which kernels hold in float32).
"""

from __future__ import annotations

from typing import Protocol

import sympy
import torch

from dynafuse.ir import Ref
from dynafuse.ops import Call, Row, promotion
from dynafuse.ops.literals import HoistedScalar


class Tensors(Protocol):
    """Sizes and dtypes of the tensors among a call's arguments."""

    def shape(self, arg: Ref) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a tensor argument."""

    def dtype(self, arg: Ref) -> torch.dtype:
        """Return the dtype of a tensor argument."""


def compute_dtype(row: Row, call: Call, tensors: Tensors) -> torch.dtype | None:
    """Return the dtype to which a pointwise op's operands are cast; None if each stays in its own.

    Args:
        row: The op's row.
        call: The op with its arguments.
        tensors: Tells dtypes and sizes of the tensors among them.
    """
    operands: list[promotion.Operand] = []
    for i, arg in enumerate(call.args.values()):
        if i in row.raw:
            continue
        if isinstance(arg, Ref):
            operands.append((tensors.dtype(arg), len(tensors.shape(arg)) == 0))
        elif isinstance(arg, (bool, int, float)):
            operands.append(type(arg))
        elif isinstance(arg, HoistedScalar):
            operands.append(float)
        elif isinstance(arg, sympy.Expr):
            operands.append(int)
    return promotion.compute_dtype(row, call, operands)
