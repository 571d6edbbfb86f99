"""Reductions over a handful of elements, written out, so that they can be computed at any index like a pointwise op.

Worked example: the mean of ``x[n, 2]`` over its last dimension is ``(x[i, 0] + x[i, 1]) / 2``.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import sympy
import torch

from dynafuse.ops import Index, Value, lookup
from dynafuse.ops.literals import opmath
from dynafuse.ops.reductions import keepdim, reduced_dims

if TYPE_CHECKING:
    from dynafuse.lowering.triton.emitter import Emitter

STEPS = {
    "sum": "{0} + {1}", "mean": "{0} + {1}", "prod": "{0} * {1}", "max": "lm.maximum({0}, {1})",
    "min": "lm.minimum({0}, {1})", "any": "{0} | {1}", "all": "{0} & {1}",
}
"""How each reduction takes one more element into what it has."""


def unrolled(emitter: Emitter, op: int, index: Index) -> Value:
    """Return the value of a short reduction, as one expression over its elements.

    Args:
        emitter: The kernel's emitter.
        op: The reduction's position in the spec.
        index: An index of its result.
    """
    call = emitter.calls[op][1]
    row = lookup(call.target)
    assert row is not None and row.reduction is not None
    shape = emitter.shape(next(iter(call.args.values())))
    reduced = reduced_dims(call.args, len(shape))
    dtype = torch.bool if row.reduction in ("any", "all") else opmath(call.dtype)
    total: Value | None = None
    for point in itertools.product(*(range(int(shape[d])) for d in reduced)):
        reduced_index = dict(zip(reduced, point, strict=True))
        operand_index = _operand_index(index, len(shape), reduced_index, keepdim(call.args))
        element = emitter.reduction_element(op, operand_index, dtype)
        total = _first(emitter, row.reduction, element) if total is None else (
            emitter.expression(STEPS[row.reduction], dtype, total, element))
    assert total is not None, "an empty reduction"
    if row.reduction == "mean":
        count = sympy.prod([shape[d] for d in reduced])
        total = emitter.expression(f"{{0}} / {float(count)}", dtype, total)
    return Value(total.name, call.dtype, total.tiles)


def _first(emitter: Emitter, reduction: str, element: Value) -> Value:
    """Return what a reduction has after one element: sums begin with 0, so that those of -0 are 0, as in eager."""
    begins_with_0 = reduction in ("sum", "mean") and element.dtype.is_floating_point
    return emitter.expression("0.0 + {0}", element.dtype, element) if begins_with_0 else element


def _operand_index(index: Index, rank: int, reduced_index: dict[int, int], keeps_dims: bool) -> Index:
    """Return the operand's index: the result's, with the indices of the reduced dimensions filled in."""
    others = iter(i for d, i in enumerate(index) if d not in reduced_index) if keeps_dims else iter(index)
    return tuple(sympy.Integer(reduced_index[d]) if d in reduced_index else next(others) for d in range(rank))
