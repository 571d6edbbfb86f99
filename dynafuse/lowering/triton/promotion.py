"""The dtype in which a pointwise op of a spec is computed (see :mod:`dynafuse.ops.promotion`)."""

from __future__ import annotations

from typing import Protocol

import sympy
import torch

from dynafuse.ir import Ref
from dynafuse.ops import Call, Row, promotion
from dynafuse.ops.literals import Number


class Tensors(Protocol):
    """Who knows sizes and dtypes of arguments."""

    def shape(self, arg: Ref) -> tuple[sympy.Expr, ...]: ...

    def dtype(self, arg: Ref) -> torch.dtype: ...


def compute_dtype(row: Row, call: Call, tensors: Tensors) -> torch.dtype | None:
    """The dtype to which the operands are cast; None if each stays in its own."""
    operands: list[promotion.Operand] = []
    for i, arg in enumerate(call.args.values()):
        if i in row.raw:
            continue
        if isinstance(arg, Ref):
            operands.append((tensors.dtype(arg), len(tensors.shape(arg)) == 0))
        elif isinstance(arg, (bool, int, float)):
            operands.append(type(arg))
        elif isinstance(arg, Number):
            operands.append(float)
        elif isinstance(arg, sympy.Expr):
            operands.append(int)
    return promotion.compute_dtype(row, call, operands)
