"""Integers and bools that differ by cases, under linear conditions on indices and sizes.

A condition is an expression that is not negative. The cases of a number exclude one another and leave none out, but for
those that are seen to be impossible, by a sum of conditions that is negative.

Worked example: with ``i`` and ``j`` below ``n``, ``j <= i`` is true where ``i - j`` is not negative and false where
``j - i - 1`` is not; ``j < i + n`` is true, without a condition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy.functions import Mod

from dynafuse.ops.indexing_math import expanded, known_nonnegative

MOST_CASES = 32
"""Of a number; what has more is not known."""

MOST_SUMMED = 3
"""How many conditions are added up to see whether they exclude one another."""


class NotKnownError(Exception):
    """Raised where a value is not told by sizes, or has too many cases."""


@dataclass(frozen=True)
class Case:
    """A value, and the expressions of which none is negative where it is taken: an integer expression, or a bool."""

    conditions: frozenset[sympy.Expr]
    value: Any


Cases: TypeAlias = tuple[Case, ...]

Holds: TypeAlias = Callable[[sympy.Expr], bool]
"""Whether an expression is known not to be negative."""


def always(value: Any) -> Cases:
    """Return a value that does not depend on anything."""
    return (Case(frozenset(), value),)


def not_negative(expr: sympy.Expr, holds: Holds) -> Cases:
    """Return whether an integer expression is not negative.

    Args:
        expr: The expression.
        holds: What is known.
    """
    expr = _tightened(expr)
    otherwise = _tightened(-expr - 1)
    if holds(expr):
        return always(True)
    if holds(otherwise):
        return always(False)
    return Case(frozenset([expr]), True), Case(frozenset([otherwise]), False)


def compared(op: str, left: sympy.Expr, right: sympy.Expr, holds: Holds) -> Cases:
    """Return the outcome of a comparison of integer expressions.

    Args:
        op: One of ``< <= > >= == !=``.
        left, right: The expressions.
        holds: What is known.
    """
    if op in ("<", ">"):
        return not_negative((right - left if op == "<" else left - right) - 1, holds)
    if op in ("<=", ">="):
        return not_negative(right - left if op == "<=" else left - right, holds)
    is_equal = combined(both, not_negative(right - left, holds), not_negative(left - right, holds))
    return is_equal if op == "==" else combined(opposite, is_equal)


def both(left: bool, right: bool) -> Cases:
    """Return whether two bools are true."""
    return always(left and right)


def opposite(value: bool) -> Cases:
    """Return whether a bool is false."""
    return always(not value)


def without_remainders(expr: sympy.Expr, holds: Holds) -> Cases:
    """Return an integer expression in cases without remainders.

    Args:
        expr: The expression; what it has remainders of wraps around once at most, as rolled places do.
        holds: What is known.

    Raises:
        NotKnownError: Something might wrap around more often.
    """
    remainder = next(iter(expr.atoms(Mod)), None)
    if remainder is None:
        return always(expanded(expr))
    dividend, divisor = remainder.args
    if not (known_nonnegative(dividend) and known_nonnegative(expanded(2 * divisor - dividend - 1))):
        raise NotKnownError(f"{remainder}")

    def with_rest(rest: sympy.Expr) -> Cases:
        return without_remainders(expr.xreplace({remainder: rest}), holds)

    wraps = compared(">=", dividend, divisor, holds)
    return chosen(wraps, lambda: with_rest(dividend - divisor), lambda: with_rest(dividend))


def combined(rule: Callable[..., Cases], *operands: Cases) -> Cases:
    """Return what a rule makes of values, in each case that is possible.

    Args:
        rule: From a value of each operand to the cases of the result.
        operands: The operands' cases.

    Raises:
        NotKnownError: There are too many.
    """
    groups = (group for group in itertools.product(*operands) if is_possible(_conditions(group)))
    results = ((group, result) for group in groups for result in rule(*(case.value for case in group)))
    cases = (Case(_conditions((*group, result)), result.value) for group, result in results)
    return _merged(case for case in cases if is_possible(case.conditions))


def chosen(condition: Cases, if_true: Callable[[], Cases], if_false: Callable[[], Cases]) -> Cases:
    """Return one of two numbers by a bool.

    Args:
        condition: The bool.
        if_true, if_false: The numbers; each is only asked for if it can be chosen.

    Raises:
        NotKnownError: There are too many cases.
    """
    return combined(lambda value: if_true() if value else if_false(), condition)


def is_possible(conditions: Iterable[sympy.Expr]) -> bool:
    """Return whether conditions are not seen to exclude one another."""
    known = tuple(conditions)
    some = itertools.chain.from_iterable(itertools.combinations(known, count) for count in range(1, MOST_SUMMED + 1))
    return not any(known_nonnegative(expanded(-sum(group) - 1)) for group in some)


def is_everywhere(cases: Cases, value: bool, *where: sympy.Expr) -> bool:
    """Return whether a bool has a value wherever some conditions hold: those under which it has another exclude them.

    Args:
        cases: The bool.
        value: The value.
        where: The conditions; none: everywhere.
    """
    return not any(is_possible(case.conditions.union(where)) for case in cases if case.value is not value)


def _tightened(expr: sympy.Expr) -> sympy.Expr:
    """Return the condition with the smallest factors: ``2 * i - 3`` is not negative where ``i - 2`` is not."""
    constant, rest = expanded(expr).as_coeff_Add()
    factor, rest = rest.primitive()
    return rest + sympy.floor(constant / factor) if factor.is_Integer and factor > 1 else constant + factor * rest


def _conditions(cases: Iterable[Case]) -> frozenset[sympy.Expr]:
    return frozenset[sympy.Expr]().union(*(case.conditions for case in cases))


def _merged(cases: Iterable[Case]) -> Cases:
    """Return cases, one alone where all have the same value."""
    distinct = tuple(dict.fromkeys(cases))
    if len({case.value for case in distinct}) == 1:
        return always(distinct[0].value)
    if len(distinct) > MOST_CASES:
        raise NotKnownError(f"{len(distinct)} cases")
    return distinct
