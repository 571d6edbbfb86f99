"""The dtype in which a pointwise op is computed.

Worked example: ``lt(int64[4], 2.5)`` promotes its operands to float32 and returns bool.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import sympy
import torch

from dynafuse.ir import Ref
from dynafuse.ops import Call, Cast, Row


class Tensors(Protocol):
    """Who knows sizes and dtypes of arguments."""

    def shape(self, arg: Ref) -> tuple[sympy.Expr, ...]: ...

    def dtype(self, arg: Ref) -> torch.dtype: ...


def compute_dtype(row: Row, call: Call, tensors: Tensors) -> torch.dtype | None:
    """The dtype to which the operands are cast; None if each stays in its own."""
    if row.cast is Cast.NONE:
        return None
    if row.cast is Cast.OUTPUT:
        return call.dtype
    kinds: list[tuple[torch.dtype, bool] | type] = []
    for i, arg in enumerate(call.args.values()):
        if i in row.raw:
            continue
        if isinstance(arg, Ref):
            kinds.append((tensors.dtype(arg), len(tensors.shape(arg)) == 0))
        elif isinstance(arg, (bool, int, float)):
            kinds.append(type(arg))
        elif isinstance(arg, sympy.Expr):
            kinds.append(int)
    return _promoted(tuple(kinds))


@cache
def _promoted(kinds: tuple[tuple[torch.dtype, bool] | type, ...]) -> torch.dtype:
    """torch's own promotion, with 0-d tensors and Python scalars ranking as they do in eager."""
    examples = [k(1) if isinstance(k, type) else torch.empty(() if k[1] else (1,), dtype=k[0], device="meta") for k in kinds]
    result = examples[0]
    if len(examples) == 1:
        return result.dtype if isinstance(result, torch.Tensor) else torch.get_default_dtype()
    promoted = torch.result_type(examples[0], examples[1])
    for example in examples[2:]:
        promoted = torch.promote_types(promoted, example.dtype) if isinstance(example, torch.Tensor) else promoted
    return promoted
