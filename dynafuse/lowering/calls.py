"""Finds the rows of a spec's ops in the op table, with which every lowering starts.

Worked example: ``row_and_call`` of ``%1 = aten.add.Tensor(%0, 1)`` returns the row of ``add`` and a ``Call`` with those
arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from dynafuse.errors import LoweringError
from dynafuse.ir import OpSpec, Ref, Size, Spec
from dynafuse.ops import Call, Row, lookup
from dynafuse.ops.overloads import overload


def row_and_call(op: OpSpec) -> tuple[Row, Call]:
    """Return the row of an op and the call that it is: its arguments by schema name, its sizes as sympy expressions.

    Raises:
        LoweringError: It has no row in the op table, or torch has no such overload.
    """
    target = overload(op.target)
    row = lookup(target)
    if target is None or row is None:
        raise LoweringError(op.target, "it has no row in the op table")
    return row, Call(target, dict(op.args), tuple(map(sympy.sympify, op.shape)), op.dtype)


def terms_in_code(spec: Spec) -> int:
    """Return about how many terms the code of a spec's kernels has: one an op, and of windows each that is written out.

    Raises:
        LoweringError: As for :func:`row_and_call`.
    """
    def shape(argument: Ref) -> Sequence[Size]:
        return spec.tensor(argument).shape

    return sum(1 if row.terms is None else row.terms(call, shape) for row, call in map(row_and_call, spec.ops))
