"""Pointwise ops on integers and bools that are told by cases.

Worked example: ``ne(a, 0)`` of an ``a`` that is -1 where ``-i`` is not negative, else ``i - 1``, is true where ``-i`` is not
negative or ``i - 2`` is not, and false for an ``i`` of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy import S

from dynafuse.ops import Call, Value
from dynafuse.ops.indexing_math import as_expr, expanded, known_nonnegative
from dynafuse.ops.table import COMPARISONS, op_name
from dynafuse.passes.masks.cases import Cases, Holds, NotKnownError, always, chosen, combined, compared

MOST_FACTOR = 2**16
"""By which an index or a size is multiplied at most: 64 bits hold all sums of a few such products."""

MOST_IN_ANY_DTYPE = 127
"""From 0 to this, all integers are numbers of every dtype but bool."""


@dataclass(frozen=True)
class Told(Value):
    """A value of the op table with its cases: bools, or integers whatever the dtype."""

    cases: Cases = ()


Rule: TypeAlias = Callable[..., Told]
"""From a call, what is known, and the call's tensors and numbers to its result."""


def told(cases: Cases, dtype: torch.dtype) -> Told:
    """Return a value of some cases; its name is what it is, where that does not depend on the place."""
    return Told(str(cases[0].value) if len(cases) == 1 else "by cases", dtype, cases=cases)


def number(value: Any) -> Told:
    """Return an argument that is a number or a size.

    Args:
        value: The argument.

    Raises:
        NotKnownError: It is a fraction.
    """
    if isinstance(value, bool):
        return told(always(value), torch.bool)
    if isinstance(value, float):
        if not value.is_integer():
            raise NotKnownError(f"{value}")
        value = int(value)
    return told(always(as_expr(value)), torch.int64)


def cast(value: Told, dtype: torch.dtype) -> Told:
    """Return a value in another dtype.

    Args:
        value: The value.
        dtype: The dtype.

    Raises:
        NotKnownError: The dtype might not hold it.
    """
    if dtype is value.dtype:
        return value
    if dtype is torch.bool:
        return told(combined(_is_not_zero, value.cases), dtype)
    if value.dtype is torch.bool:
        return told(combined(lambda v: always(S.One if v else S.Zero), value.cases), dtype)
    if dtype is not torch.int64 and not all(_is_in_any_dtype(case.value) for case in value.cases):
        raise NotKnownError(f"numbers that {dtype} may not hold")
    return told(value.cases, dtype)


def _is_not_zero(value: sympy.Expr) -> Cases:
    return compared("!=", value, S.Zero, known_nonnegative)


def _is_in_any_dtype(value: sympy.Expr) -> bool:
    return bool(value.is_Integer and 0 <= value <= MOST_IN_ANY_DTYPE)


def integer(of: Callable[..., sympy.Expr], *operands: Told) -> Told:
    """Return what is computed of integers in 64 bits.

    Args:
        of: Computes it, from an expression of each operand.
        operands: The integers.

    Raises:
        NotKnownError: 64 bits might not hold it.
    """
    return told(combined(lambda *values: _checked(of(*values)), *(cast(operand, torch.int64).cases for operand in operands)),
                torch.int64)


def _checked(value: sympy.Expr) -> Cases:
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expanded(value))]
    if not all(abs(factor) <= MOST_FACTOR and (rest == 1 or rest.is_Symbol) for factor, rest in terms):
        raise NotKnownError(f"{value} is no sum of places and sizes")
    return always(expanded(value))


def _comparison(op: str) -> Rule:
    def rule(call: Call, holds: Holds, left: Told, right: Told) -> Told:
        operands = (cast(operand, torch.int64).cases for operand in (left, right))
        return told(combined(lambda a, b: compared(op, a, b, holds), *operands), torch.bool)

    return rule


def _of_bools(of: Callable[..., bool]) -> Rule:
    """Return the rule of an op on bools; bitwise ones of integers are none."""
    def rule(call: Call, holds: Holds, *operands: Told) -> Told:
        if "bitwise" in op_name(call) and any(operand.dtype is not torch.bool for operand in operands):
            raise NotKnownError(f"{call.target} of integers")
        cases = (cast(operand, torch.bool).cases for operand in operands)
        return told(combined(lambda *values: always(of(*values)), *cases), torch.bool)

    return rule


def _of_integers(of: Callable[..., sympy.Expr]) -> Rule:
    def rule(call: Call, holds: Holds, *operands: Told) -> Told:
        if call.dtype is not torch.int64:
            raise NotKnownError(f"{call.target} in {call.dtype}")
        return integer(of, *operands)

    return rule


def _absolute(call: Call, holds: Holds, value: Told) -> Told:
    def result(v: sympy.Expr) -> Cases:
        return chosen(compared(">=", v, S.Zero, holds), lambda: always(v), lambda: always(expanded(-v)))

    return told(combined(result, value.cases), call.dtype)


def _where(call: Call, holds: Holds, condition: Told, if_true: Told, if_false: Told) -> Told:
    values = [cast(value, call.dtype).cases for value in (if_true, if_false)]
    return told(chosen(cast(condition, torch.bool).cases, lambda: values[0], lambda: values[1]), call.dtype)


def _converted(call: Call, holds: Holds, value: Told, *others: Told) -> Told:
    return cast(value, call.dtype)


BOOLEAN: Mapping[str, Callable[..., bool]] = {
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a is not b, "not": lambda a: not a,
}

RULES: Mapping[str, Rule] = {
    **{name: _comparison(op) for name, op in COMPARISONS.items()},
    **{f"{kind}_{name}": _of_bools(of) for kind in ("logical", "bitwise") for name, of in BOOLEAN.items()},
    "add": _of_integers(lambda a, b, alpha=1: a + b * alpha), "sub": _of_integers(lambda a, b, alpha=1: a - b * alpha),
    "mul": _of_integers(lambda a, b: a * b), "neg": _of_integers(lambda a: -a), "abs": _absolute, "where": _where,
    **dict.fromkeys(("_to_copy", "convert_element_type", "clone", "alias", "lift_fresh_copy"), _converted),
}
"""Rules by the names of ops. They take tensors and numbers in the order of the op's arguments."""
