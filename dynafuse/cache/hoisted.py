"""Hoisting of scalars: floats that do not change generated code become arguments of the kernel.

Worked example: ``%0 = aten.add.Tensor(in0, 1e-05)`` becomes ``%0 = aten.add.Tensor(in0, k0)``, with the values ``(1e-05,)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dynafuse.ir import OpSpec, Spec, references
from dynafuse.ops import hoisted, lookup
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.overloads import overload


def hoist_scalars(spec: Spec) -> tuple[Spec, tuple[float, ...]]:
    """Return the spec with its hoisted scalars as ``k0``, ``k1``…, and their values in that order.

    Every occurrence is an argument of its own, equal values too: a kernel then fits any values. But where several loop nests
    share a launch, as with all the parameters of an optimizer, equal values are one argument.
    """
    values = _Values(shares=bool(spec.nests))
    ops = tuple(_hoist(spec, op, values) for op in spec.ops)
    return replace(spec, ops=ops), tuple(values.held)


@dataclass
class _Values:
    """The values of hoisted scalars."""

    shares: bool
    held: list[float] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # by text, which tells -0.0 from 0.0

    def place(self, value: float) -> int:
        """Return the argument that a value is, which may be a new one."""
        told = repr(value)
        if not self.shares or told not in self.places:
            self.places[told] = len(self.held)
            self.held.append(value)
        return self.places[told]


def _hoist(spec: Spec, op: OpSpec, values: _Values) -> OpSpec:
    """Return the op with its hoisted scalars replaced; adds to ``values``."""
    operands = (spec.tensor(ref).dtype for ref in references(op.args))
    scalars = hoisted.hoisted_scalars(lookup(overload(op.target)), dict(op.args), op.dtype, operands)
    args = []
    for name, value in op.args:
        if name in scalars:
            value = HoistedScalar(values.place(scalars[name].value), scalars[name].inverse)
        args.append((name, value))
    return replace(op, args=tuple(args)) if scalars else op
