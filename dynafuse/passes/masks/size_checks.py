"""Conditions on sizes that hold of the examples: what relies on them has torch check them before each call.

Worked example: with ``n`` of 512 in the examples, ``holds(4096 - n)`` is true, and after ``ask()`` torch compiles anew for
an ``n`` of 5000.
"""

from __future__ import annotations

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynafuse.fx import can_be_checked, hint_of, takes_checks
from dynafuse.ops.indexing_math import IndexSymbol, known_nonnegative, limits


class SizeChecks:
    """What is taken to hold of sizes because it holds of the examples."""

    def __init__(self, environment: ShapeEnv) -> None:
        """Begin with nothing.

        Args:
            environment: What torch knows of the sizes; if it takes no further checks, only what always holds is taken to.
        """
        self.environment = environment
        self._taken: dict[sympy.Expr, None] = {}

    def holds(self, expr: sympy.Expr) -> bool:
        """Return whether an expression is not negative at any place: for all sizes, or for those that pass the checks."""
        if known_nonnegative(expr):
            return True
        low = limits(expr)[0]
        if low is None or low.has(IndexSymbol) or not takes_checks(self.environment):
            return False
        if not can_be_checked(low, self.environment) or hint_of(low, self.environment) < 0:
            return False
        self._taken[low] = None
        return True

    def ask(self) -> None:
        """Have torch check what was taken to hold."""
        for low in self._taken:
            self.environment.evaluate_expr(sympy.Ge(low, 0))
