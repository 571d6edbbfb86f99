"""Sizes of which torch has checked the product become equal one by one.

What an earlier graph returned has sizes with symbols of their own, even if another tensor's are the same, and torch checks
only what an op compares. Of ``cross_entropy(logits.view(-1, n), labels.view(-1))`` that is ``s0*s1 == s2*s3``: as many rows
as labels, and no size equal to another, so that no kernel could walk through both. If the examples leave no doubt which
factor is which, torch is asked to check these too; it compiles anew for a call in which products alone are equal.

Worked example: with ``s0`` and ``s2`` of 4 and ``s1`` and ``s3`` of 512, ``s2`` becomes ``s0`` and ``s3`` becomes ``s1``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynafuse.fx import can_be_checked, takes_checks


def equate_factors(environment: ShapeEnv) -> None:
    """Have torch check that sizes are equal of which it has checked that their products are.

    Args:
        environment: What torch knows of the sizes; if it takes no further checks, nothing is done.
    """
    if not takes_checks(environment):
        return
    for checked in tuple(environment.guards):
        if isinstance(checked.expr, sympy.Eq):
            for left, right in _partners(environment, *map(environment.replace, checked.expr.args)):
                if can_be_checked(left * right, environment):
                    environment.evaluate_expr(sympy.Eq(left, right, evaluate=False))


def _partners(environment: ShapeEnv, left: sympy.Expr, right: sympy.Expr) -> Iterator[tuple[sympy.Symbol, sympy.Symbol]]:
    """Return the factors of two equal products of sizes that are equal in the examples, if that is one pairing."""
    common = sympy.gcd(left, right)
    ours, theirs = (_by_example(environment, product / common) for product in (left, right))
    if ours.keys() == theirs.keys():
        yield from ((ours[example], theirs[example]) for example in ours)


def _by_example(environment: ShapeEnv, product: sympy.Expr) -> dict[int, sympy.Symbol]:
    """Return the factors of a product by their examples; none where two have the same, or one has none."""
    factors = sympy.Mul.make_args(product)
    sizes: list[Any] = [environment.create_symintnode(factor, hint=None) for factor in factors if factor.is_Symbol]
    by_example = {size.node.hint: factor for size, factor in zip(sizes, factors, strict=False)}
    return by_example if None not in by_example and len(by_example) == len(factors) else {}
