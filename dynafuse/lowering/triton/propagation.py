"""Propagates index expressions through integer ops: what is computed from indices alone stays an index expression.

A gather by such an index reads at an expression of the kernel's axes instead of at a loaded value: it needs no check, its
divisions are simplified, and axes merge as in any other access.

Worked example: rolling ``x[28]`` by 25 gathers at ``(arange(28) + 3) % 28``: element ``i`` is read at
``Mod(i + 3, 28)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from dynafuse.ops import Call
from dynafuse.ops.indexing_math import expanded, floordiv, known_nonnegative, limits, mod
from dynafuse.ops.table import COMPARISONS, op_name

MOST = 2**30
"""The largest number that an index expression may reach: where offsets have 32 bits, so has all of its arithmetic."""

Rule = Callable[..., "sympy.Expr | None"]


def propagated(call: Call, operands: Sequence[sympy.Expr | None], wide: bool) -> sympy.Expr | None:
    """Return the result of an op as an index expression; None if it is none, or might be too large.

    Args:
        call: The op.
        operands: Its arguments in order, as index expressions if they are.
        wide: Whether the kernel's index arithmetic has 64 bits.
    """
    rule = RULES.get(op_name(call))
    if call.args.get("rounding_mode") in ("floor", "trunc"):
        rule, operands = _floor_divide, operands[:2]
    if rule is None or call.dtype is not torch.int64 or any(operand is None for operand in operands):
        return None
    expr = rule(*operands)
    return expr if expr is not None and all(_is_small(limit, wide) for limit in limits(expr)) else None


def comparison(call: Call, operands: Sequence[sympy.Expr | None], wide: bool) -> str | None:
    """Return the operator by which an op compares two index expressions; None if it does not, or they might be too large.

    Args:
        call: The op.
        operands: Its arguments in order, as index expressions if they are.
        wide: Whether the kernel's index arithmetic has 64 bits.
    """
    known = [operand for operand in operands if operand is not None]
    if len(operands) != 2 or len(known) != 2 or all(operand.is_number for operand in known):
        return None
    are_small = all(_is_small(limit, wide) for operand in known for limit in limits(operand))
    return COMPARISONS.get(op_name(call)) if are_small else None


def compares_with_index(call: Call, operands: Sequence[sympy.Expr | None], wide: bool) -> bool:
    """Return whether an op compares something with an index expression of 32 bits.

    Args:
        call, operands, wide: As for :func:`comparison`.
    """
    known = [operand for operand in operands if operand is not None and not operand.is_number]
    is_one_known = len(operands) == 2 and len(known) == 1 and None in operands
    return not wide and is_one_known and op_name(call) in COMPARISONS and all(
        _is_small(limit, wide) for limit in limits(known[0]))


def _is_small(limit: sympy.Expr | None, wide: bool) -> bool:
    """Return whether index arithmetic can hold a limit: a number that is not large, or a sum of few sizes in 64 bits."""
    if limit is None:
        return False
    if limit.is_Integer:
        return bool(abs(limit) <= MOST)
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expanded(limit))]
    return wide and all(abs(factor) <= MOST and (rest == 1 or rest.is_Symbol) for factor, rest in terms)


def argument(value: Any) -> sympy.Expr | None:
    """Return a number or size among an op's arguments as an index expression; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, sympy.Expr)):
        return None
    expr = sympy.sympify(value)
    return expr if expr.is_integer else None


def _add(left: sympy.Expr, right: sympy.Expr, alpha: sympy.Expr = sympy.S.One) -> sympy.Expr:
    return expanded(left + right * alpha)


def _sub(left: sympy.Expr, right: sympy.Expr, alpha: sympy.Expr = sympy.S.One) -> sympy.Expr:
    return expanded(left - right * alpha)


def _mul(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr | None:
    return expanded(left * right) if left.is_Integer or right.is_Integer else None


def _neg(value: sympy.Expr) -> sympy.Expr:
    return -value


def _remainder(value: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    """Return a remainder by a positive number of what is not negative, where all kinds of remainders agree."""
    return mod(value, divisor) if _divides(value, divisor) else None


def _floor_divide(value: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
    return floordiv(value, divisor) if _divides(value, divisor) else None


def _divides(value: sympy.Expr, divisor: sympy.Expr) -> bool:
    return bool(divisor.is_Integer and divisor > 0) and known_nonnegative(value)


RULES: Mapping[str, Rule] = {
    "add": _add, "sub": _sub, "mul": _mul, "neg": _neg, "remainder": _remainder, "fmod": _remainder,
    "floor_divide": _floor_divide,
}
"""The result of an op from its arguments, by its name without the overload."""
