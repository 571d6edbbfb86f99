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
    """Return the dtype to which the operands are cast; None if each stays in its own.

    Args:
        row: The op's row, which says by which rule.
        call: The op; its output's dtype is that of the rule for outputs.
        operands: What its arguments are, without the row's raw ones.
    """
    if row.cast is Cast.NONE:
        return None
    return call.dtype if row.cast is Cast.OUTPUT else promoted(tuple(operands))


def comparand(row: Row, value: Any, dtype: torch.dtype | None) -> Any:
    """Round an argument that is a number, and is compared, to the operands' dtype first, as eager does.

    Args:
        row: The op's row, which says whether it compares.
        value: The argument; whatever is no number is returned as it is.
        dtype: The dtype of the tensors among the arguments; None if they have several, or if there are none.
    """
    narrow = row.cast is Cast.PROMOTED and dtype is not None and opmath(dtype) is not dtype
    return rounded(value, dtype) if narrow and dtype is not None and isinstance(value, (bool, int, float)) else value


def comparands(row: Row, args: Mapping[str, Any], operands: Collection[torch.dtype]) -> dict[str, Any]:
    """Apply :func:`comparand` to a call's numbers.

    Args:
        row: The op's row.
        args: The call's arguments by name.
        operands: The dtypes of its tensors.
    """
    dtype = next(iter(operands)) if len(set(operands)) == 1 else None
    return {name: comparand(row, value, dtype) for name, value in args.items()}


def _tensor_of(dtype: torch.dtype, is_0d: bool) -> torch.Tensor:
    return torch.empty(() if is_0d else (1,), dtype=dtype, device="meta")


@cache
def promoted(operands: tuple[Operand, ...]) -> torch.dtype:
    """Return the dtype of torch's own promotion, with 0-d tensors and Python scalars ranking as they do in eager."""
    examples = [operand(1) if isinstance(operand, type) else _tensor_of(*operand) for operand in operands]
    first = examples[0]
    if len(examples) == 1:
        return first.dtype if isinstance(first, torch.Tensor) else torch.get_default_dtype()
    dtype = torch.result_type(examples[0], examples[1])
    for example in examples[2:]:
        dtype = torch.promote_types(dtype, example.dtype) if isinstance(example, torch.Tensor) else dtype
    return dtype
