"""Hoisting of scalars: floats that do not change generated code become arguments of the kernel.

Worked example: ``%0 = aten.add.Tensor(in0, 1e-05)`` becomes ``%0 = aten.add.Tensor(in0, k0)``, with the values ``(1e-05,)``.
"""

from __future__ import annotations

from dataclasses import replace

from dynafuse.ir import OpSpec, Spec, references
from dynafuse.ops import hoisted, lookup
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.overloads import overload


def hoist_scalars(spec: Spec) -> tuple[Spec, tuple[float, ...]]:
    """Return the spec with its hoisted scalars as ``k0``, ``k1``…, and their values in that order.

    Every occurrence is an argument of its own, equal values too: a kernel then fits any values.
    """
    values: list[float] = []
    ops = tuple(_hoist(spec, op, values) for op in spec.ops)
    return replace(spec, ops=ops), tuple(values)


def _hoist(spec: Spec, op: OpSpec, values: list[float]) -> OpSpec:
    """Return the op with its hoisted scalars replaced; appends to ``values``."""
    operands = (spec.tensor(ref).dtype for ref in references(op.args))
    scalars = hoisted.hoisted_scalars(lookup(overload(op.target)), dict(op.args), op.dtype, operands)
    args = []
    for name, value in op.args:
        if name in scalars:
            value = HoistedScalar(len(values), scalars[name].inverse)
            values.append(scalars[name].value)
        args.append((name, value))
    return replace(op, args=tuple(args)) if scalars else op
