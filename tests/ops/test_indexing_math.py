"""Index arithmetic against Python's integers, over every value of the symbols."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from dynafuse.ops.indexing_math import (
    IndexSymbol,
    bound,
    coarsened,
    decide,
    flatten,
    floordiv,
    known_less,
    known_nonnegative,
    limits,
    mod,
    symbol,
    unflatten,
)
from dynafuse.ops.views import reshaped

S0, S1 = sympy.symbols("s0 s1", positive=True, integer=True)
I, J, K = symbol("i", 3), symbol("j", 8), symbol("k", 4)  # noqa: E741


def assignments(symbols: Sequence[IndexSymbol]) -> Iterator[dict[sympy.Symbol, int]]:
    for values in itertools.product(*(range(int(s.size)) for s in symbols)):
        yield dict(zip(symbols, values, strict=True))


coefficients = st.sampled_from([-8, -1, 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32])


@settings(max_examples=300, deadline=None)
@given(coefficients, coefficients, coefficients, st.integers(-20, 40), st.sampled_from([1, 2, 3, 4, 8, 12, 24, 32]),
       st.sampled_from([1, 2, 4, 8]))
def test_quotients_and_remainders(a: int, b: int, c: int, constant: int, size: int, outer: int) -> None:
    expr = a * I + b * J + c * K + constant
    quotient, rest = floordiv(expr, size), mod(expr, size)
    nested, inner = mod(quotient, outer), floordiv(rest, outer)
    for values in assignments((I, J, K)):
        at = a * values[I] + b * values[J] + c * values[K] + constant
        assert quotient.xreplace(values) == at // size
        if at >= 0:  # torch's Mod is defined for non-negative values
            assert rest.xreplace(values) == at % size
            assert nested.xreplace(values) == at // size % outer
            assert inner.xreplace(values) == at % size // outer


@settings(max_examples=200, deadline=None)
@given(coefficients, coefficients, st.integers(-20, 40), st.sampled_from([1, 3, 4, 8]))
def test_limits_contain_every_value(a: int, b: int, constant: int, size: int) -> None:
    for expr in (a * I + b * J + constant, floordiv(a * I + b * J + constant, size), mod(J * a, size) * b):
        low, high = limits(sympy.expand(expr))
        for values in assignments((I, J, K)):
            at = expr.xreplace(values)
            assert (low is None or low <= at) and (high is None or at <= high)


@pytest.mark.parametrize(
    ("expr", "size", "quotient", "rest"),
    [
        (8 * I + J, 8, I, J),
        (8 * I + J, 4, 2 * I + floordiv(J, 4), mod(J, 4)),
        (4 * J + K, 8, floordiv(J, 2), 4 * mod(J, 2) + K),
        (J, 8, sympy.S.Zero, J),
        (J + 8, 8, sympy.S.One, J),
        (symbol("a", S0) * S1 + symbol("b", S1), S1, symbol("a", S0), symbol("b", S1)),
        (symbol("a", S0) * 4 * S1 + symbol("c", 4 * S1), 4 * S1, symbol("a", S0), symbol("c", 4 * S1)),
    ],
)
def test_simple_forms(expr: sympy.Expr, size: sympy.Expr, quotient: sympy.Expr, rest: sympy.Expr) -> None:
    assert floordiv(expr, size) == quotient
    assert mod(expr, size) == rest


@pytest.mark.parametrize("shape", [(24,), (2, 3, 4), (S0, 4), (4, S0), (S0, S1, 8)], ids=str)
def test_unflatten_then_flatten_is_the_identity(shape: tuple[sympy.Expr, ...]) -> None:
    flat = symbol("x", sympy.prod(shape))
    assert flatten(unflatten(flat, shape), shape) == flat


@pytest.mark.parametrize(
    ("shape", "operand"),
    [((6, 4), (2, 3, 4)), ((2, 12), (24,)), ((4, 6), (3, 8)), ((1, 6, 1), (2, 3)), ((2, 1, 3), (6, 1)), ((), (1, 1)),
     ((2, 3, 4), (4, 3, 2)), ((12, 2), (2, 3, 1, 4))],
)
def test_reshape_is_row_major(shape: tuple[int, ...], operand: tuple[int, ...]) -> None:
    symbols = tuple(symbol(f"i{k}", size) for k, size in enumerate(shape))
    index = reshaped(symbols, [sympy.Integer(s) for s in shape], [sympy.Integer(s) for s in operand])
    for values in assignments(symbols):
        expected = flatten([sympy.Integer(values[s]) for s in symbols], shape)
        assert flatten([at.xreplace(values) for at in index], operand) == expected


def test_a_reshape_leaves_other_dimensions_alone() -> None:
    b, s, c = symbol("b", S0), symbol("s", S1), symbol("c", 512)
    one = sympy.S.One
    assert reshaped((b, s, c), (S0, S1, 512 * one), (S0, S1, 8 * one, 64 * one)) == (b, s, floordiv(c, 64), mod(c, 64))
    assert reshaped((symbol("r", S0 * S1), c), (S0 * S1, 512 * one), (S0, S1, 512 * one))[2] == c


def test_symbols_carry_their_size() -> None:
    assert symbol("i", 4) is symbol("i", 4) and symbol("i", 4) != symbol("i", 5)
    assert pickle.loads(pickle.dumps(symbol("i", S0))) == symbol("i", S0)
    assert bound(3 * I + J) == 14 and bound(symbol("a", S0)) == S0
    assert known_less(8 * I + J, 24) and not known_less(8 * I + J, 23)
    assert known_nonnegative(J - 0) and not known_nonnegative(J - 1)
    assert known_less(symbol("a", S0), S0 + 3) and not known_less(symbol("a", S0), S1)


@settings(max_examples=300, deadline=None)
@given(coefficients, coefficients, coefficients, st.integers(-70, 70))
def test_coarser_comparisons_have_the_same_outcomes(a: int, b: int, c: int, constant: int) -> None:
    left, right = a * I + b * J + c * K, sympy.Integer(constant)
    coarse = coarsened(left, right)
    for values in assignments([I, J, K]):
        assert (left.xreplace(values) < right) == (coarse[0].xreplace(values) < coarse[1])


@pytest.mark.parametrize(("left", "right", "expected"), [
    (K + 4 * J, 8, (J, 2)), (K + 4 * J + 32 * I, 32, (I, 1)), (K + 3 * J, 9, (K + 3 * J, 9)), (4 * J - 1, 7, (4 * J - 1, 7)), (4 * J + K - 1, 7, (J, 2)),
    (symbol("b", S0) + S0 * I, 2 * S0, (I, 2)), (symbol("b", S0) + S0 * I, S1, (symbol("b", S0) + S0 * I, S1)),
])
def test_what_never_decides_a_comparison_is_left_out(left: sympy.Expr, right: Any, expected: tuple[Any, Any]) -> None:
    assert coarsened(left, sympy.sympify(right)) == expected


@settings(max_examples=300, deadline=None)
@given(coefficients, coefficients, coefficients, st.integers(-70, 70), st.sampled_from(["<", ">=", "=="]))
def test_what_is_decided_is_the_outcome_everywhere(a: int, b: int, c: int, constant: int, op: str) -> None:
    left, right = a * I + b * J + c * K, sympy.Integer(constant)
    outcome = decide(left, op, right)
    outcomes = {sympy.Rel(left.xreplace(values), right, op) == sympy.true for values in assignments([I, J, K])}
    assert outcome is None or outcomes == {outcome}


@pytest.mark.parametrize(("left", "op", "right", "expected"), [
    (K, "<", 4, True), (K - 4, ">=", 0, False), (K, "<", 3, None), (sympy.Integer(2), "==", 2, True), (sympy.Integer(2), "==", 0, False),
    (J, "==", 0, None), (symbol("b", S0), "<", S0, True), (K + 1, ">=", S0, None),
])
def test_ranges_decide_comparisons(left: sympy.Expr, op: str, right: Any, expected: bool | None) -> None:
    assert decide(left, op, sympy.sympify(right)) is expected
