"""Reductions over a handful of elements, written out: then they can be computed at any index, like a pointwise op.

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


def unrolled(emitter: Emitter, op: int, index: Index) -> Value:
    """The value of a short reduction at ``index``."""
    call = emitter.calls[op][1]
    row = lookup(call.target)
    assert row is not None and row.reduction is not None
    operand = next(iter(call.args.values()))
    shape = emitter.shape(operand)
    reduced = reduced_dims(call.args, len(shape))
    dtype = torch.bool if row.reduction in ("any", "all") else opmath(call.dtype)
    total: Value | None = None
    for point in itertools.product(*(range(int(shape[d])) for d in reduced)):
        at = _at(index, len(shape), dict(zip(reduced, point, strict=True)), keepdim(call.args))
        value = emitter.element(op, at, dtype)
        total = value if total is None else emitter.expression(STEPS[row.reduction], dtype, total, value)
    assert total is not None, "an empty reduction"
    if row.reduction == "mean":
        elements = sympy.prod([shape[d] for d in reduced])
        total = emitter.expression(f"{{0}} / {float(elements)}", dtype, total)
    return Value(total.name, call.dtype, total.tiles)


def _at(index: Index, rank: int, point: dict[int, int], kept: bool) -> Index:
    """The operand's index: the output's, with the reduced dimensions filled in."""
    rest = iter(i for d, i in enumerate(index) if d not in point) if kept else iter(index)
    return tuple(sympy.Integer(point[d]) if d in point else next(rest) for d in range(rank))
