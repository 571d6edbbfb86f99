"""What dynamic sizes are in the example inputs, and what kernels may take for granted of them because torch checks it.

Worked example: a graph that was traced with ``x[s0, 768]`` of 4096 rows is tiled for 4096 of them, and runs with any number.
Its offsets have 32 bits: torch calls it as long as ``768*s0`` is below 2**31, and compiles anew for more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from dynafuse.fx import UNKNOWN_SIZE, can_be_checked, takes_checks

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def example_of(expr: sympy.Expr, environment: ShapeEnv | None) -> int | None:
    """Return the value of a size in the example inputs; None where only data tell.

    Args:
        expr: The size, over the graph's symbols.
        environment: What torch knows of these; None: nothing.
    """
    if environment is None:
        return None
    size = _of_torch(expr, environment)
    known = size.node.hint if isinstance(size, torch.SymInt) else size
    return None if known is None else int(known)


def hint_of(expr: sympy.Expr, environment: ShapeEnv | None) -> int:
    """Return the value of a size in the example inputs, or one that it may have.

    Args:
        expr: The size, over the graph's symbols.
        environment: What torch knows of these; None: nothing.
    """
    known = example_of(expr, environment)
    if known is not None:
        return known
    return UNKNOWN_SIZE if environment is None else _possible(environment.bound_sympy(expr))


def checked_at_most(exprs: Iterable[sympy.Expr], limit: int, environment: ShapeEnv | None) -> bool:
    """Return whether sizes are at most ``limit`` wherever the graph is called, because torch checks it from now on.

    If one is larger in the example inputs, or if torch takes no further checks, nothing is checked.

    Args:
        exprs: The sizes, over the graph's symbols.
        limit: The largest value.
        environment: What torch knows of the symbols; None: nothing.
    """
    if environment is None:
        return False
    checked = _CHECKED.setdefault(environment, set())
    asked = [expr for expr in _largest(exprs) if (expr, limit) not in checked]  # layers repeat themselves
    examples = [example_of(expr, environment) for expr in asked]
    if any(example is None or example > limit for example in examples):
        return False
    if not all(can_be_checked(expr, environment) for expr in asked):
        return False
    conditions = [_of_torch(expr, environment) <= limit for expr in asked]
    if not all(map(guard_or_false if takes_checks(environment) else statically_known_true, conditions)):
        return False
    checked.update((expr, limit) for expr in asked)
    return True


_CHECKED: weakref.WeakKeyDictionary[ShapeEnv, set[tuple[sympy.Expr, int]]] = weakref.WeakKeyDictionary()
"""What is checked, or known, of the symbols of each graph that is being compiled: sizes with the largest they may be."""


def _largest(exprs: Iterable[sympy.Expr]) -> list[sympy.Expr]:
    """Return those of some sizes that are not another one times a smaller factor."""
    factors: dict[sympy.Expr, sympy.Expr] = {}
    for expr in exprs:
        factor, rest = sympy.expand(expr).as_coeff_Mul()
        factors[rest] = max(factors.get(rest, factor), factor)
    return [factor * rest for rest, factor in factors.items()]


def _of_torch(expr: sympy.Expr, environment: ShapeEnv) -> int | torch.SymInt:
    return environment.create_symintnode(environment.replace(expr), hint=None)


def _possible(values: object) -> int:
    """Return a value in a range, which may have no ends."""
    return int(min(max(UNKNOWN_SIZE, values.lower), values.upper))  # type: ignore[attr-defined]
