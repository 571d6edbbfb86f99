"""Specs without the floats that do not change code.

Worked example: of ``%0 = aten.add.Tensor(in0, 1e-05)`` there remains ``%0 = aten.add.Tensor(in0, k0)``, with ``(1e-05,)``.
"""

from __future__ import annotations

from dataclasses import replace

from dynafuse.ir import OpSpec, Spec, references
from dynafuse.ops import hoisted, lookup
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.overloads import overload


def hoist_scalars(spec: Spec) -> tuple[Spec, tuple[float, ...]]:
    """A spec whose kernel takes numbers as arguments, and those numbers. Every one is an argument of its own."""
    values: list[float] = []
    ops = tuple(_op(spec, op, values) for op in spec.ops)
    return replace(spec, ops=ops), tuple(values)


def _op(spec: Spec, op: OpSpec, values: list[float]) -> OpSpec:
    operands = ((spec.inputs if ref.kind == "in" else spec.ops)[ref.position].dtype for ref in references(op.args))
    found = hoisted.hoisted_scalars(lookup(overload(op.target)), dict(op.args), op.dtype, operands)
    args = []
    for name, value in op.args:
        if name in found:
            value = HoistedScalar(len(values), found[name].inverse)
            values.append(found[name].value)
        args.append((name, value))
    return replace(op, args=tuple(args)) if found else op
