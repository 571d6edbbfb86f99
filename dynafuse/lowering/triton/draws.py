"""Where four neighbours of a tile draw random numbers that one block of Philox's makes (see :mod:`libm_random`).

Worked example: of a tile whose last dimension walks ``i1`` below 512, the positions ``512*i0 + i1`` count up in fours,
``513*i0 + i1`` do not: every second row begins in the middle of a block.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import sympy

FOUR = 4
"""The numbers that a block makes."""

OF_FOURS = "_of_fours"
"""What the names of functions end in that compute each block once."""


def counts_in_fours(position: sympy.Expr, lanes: Sequence[sympy.Symbol], loaded: Set[sympy.Symbol]) -> bool:
    """Return whether each four neighbours of a tile count a position up from a multiple of four.

    Args:
        position: The position.
        lanes: The axes along the tile's last dimension, outermost first; the tile begins at a multiple of four points.
        loaded: Indices that are loaded: neighbours may have any.
    """
    inner = [axis for axis in lanes if axis.size != 1]
    rest, run, counted = sympy.expand(position), sympy.S.One, set[sympy.Symbol]()
    while inner and rest.coeff(inner[-1]) == run:
        axis = inner.pop()
        rest, run = sympy.expand(rest - run * axis), sympy.expand(run * axis.size)
        counted.add(axis)
    begins_in_fours = rest.free_symbols.isdisjoint(counted | loaded) and _in_fours(rest)
    return bool(counted) and begins_in_fours and (not inner or _in_fours(run))


def _in_fours(expr: sympy.Expr) -> bool:
    """Return whether a sum is of multiples of four."""
    factors = (term.as_coeff_Mul()[0] for term in sympy.Add.make_args(expr))
    return all(factor.is_Integer and factor % FOUR == 0 for factor in factors)
