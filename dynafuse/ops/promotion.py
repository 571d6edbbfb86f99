"""The dtype in which a pointwise op is computed, by torch's own rules.

Worked example: ``lt(int64[4], 2.5)`` promotes its operands to float32 and returns bool.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch

from dynafuse.ops.literals import opmath, rounded
from dynafuse.ops.table import Call, Cast, Row

Operand: TypeAlias = "tuple[torch.dtype, bool] | type"
"""An operand as promotion sees it: a tensor's dtype and whether it is 0-dimensional, or a Python number's type."""


def compute_dtype(row: Row, call: Call, operands: Sequence[Operand]) -> torch.dtype | None:
    """The dtype to which the operands are cast; None if each stays in its own.

    ``operands`` leaves out the row's raw ones.
    """
    if row.cast is Cast.NONE:
        return None
    return call.dtype if row.cast is Cast.OUTPUT else promoted(tuple(operands))


def comparand(row: Row, value: Any, dtype: torch.dtype | None) -> Any:
    """An argument that is no tensor: a number that is compared is rounded to the operands' dtype first, as in eager."""
    narrow = row.cast is Cast.PROMOTED and dtype is not None and opmath(dtype) is not dtype
    return rounded(value, dtype) if narrow and dtype is not None and isinstance(value, (bool, int, float)) else value


def comparands(row: Row, args: Mapping[str, Any], operands: Collection[torch.dtype]) -> dict[str, Any]:
    """A call's arguments with :func:`comparand` for its numbers; ``operands`` are the dtypes of its tensors."""
    dtype = next(iter(operands)) if len(set(operands)) == 1 else None
    return {name: comparand(row, value, dtype) for name, value in args.items()}


@cache
def promoted(operands: tuple[Operand, ...]) -> torch.dtype:
    """torch's own promotion, with 0-d tensors and Python scalars ranking as they do in eager."""
    examples = [
        k(1) if isinstance(k, type) else torch.empty(() if k[1] else (1,), dtype=k[0], device="meta") for k in operands
    ]
    result = examples[0]
    if len(examples) == 1:
        return result.dtype if isinstance(result, torch.Tensor) else torch.get_default_dtype()
    found = torch.result_type(examples[0], examples[1])
    for example in examples[2:]:
        found = torch.promote_types(found, example.dtype) if isinstance(example, torch.Tensor) else found
    return found
