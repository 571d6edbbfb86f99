"""Integers of a region that are known only at run time: which its kernel takes as arguments, and their signs.

Kernels compute with sizes where every executor's language agrees with Python: sums, products, extrema, and quotients and
remainders of what is not negative. All else (``n // 2`` of an integer of any sign, ``ceil(1.5 * s)``, ``abs(n)``) is
computed once, by the function around the kernels, which is Python; the kernel takes the result.

Worked example: for ``x[:, : s77 // 2] * (n // 2)``, ``s77`` a size and ``n`` the user's integer, a kernel takes ``s0``,
which is ``s77``, and ``n1``, which is ``n // 2``; in it there is ``s0 // 2``. Where torch has seen that ``n`` is negative,
``x + n`` has a kernel that takes ``s0``, which is ``-n``, and subtracts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from dynafuse.ir import Size
from dynafuse.ops.indexing_math import known_nonnegative
from dynafuse.ops.symbols import ANY, NONNEGATIVE, POSITIVE, symbol_of

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_EXACT = (sympy.Integer, sympy.Symbol, sympy.Add, sympy.Mul, sympy.Max, sympy.Min, Max, Min)
_DIVISIONS = (FloorDiv, Mod, PythonMod, ModularIndexing)


def sign_of_size(size: sympy.Expr, environment: ShapeEnv | None) -> str:
    """Return POSITIVE, NONNEGATIVE or ANY for a size, by its expression and by the range that torch guards.

    Args:
        size: The size.
        environment: What torch knows of its symbols; None: nothing.
    """
    if size.is_positive:
        return POSITIVE
    low = sympy.S.NegativeInfinity if environment is None else environment.bound_sympy(size).lower
    if low >= 1:
        return POSITIVE
    return NONNEGATIVE if low >= 0 or size.is_nonnegative else ANY


def _signed(size: sympy.Expr, environment: ShapeEnv | None) -> tuple[sympy.Expr, str]:
    """Return what a kernel takes for a size, with its sign: the size, or its negation if it is known to be negative."""
    sign, negated_sign = sign_of_size(size, environment), sign_of_size(-size, environment)
    return (-size, negated_sign) if sign == ANY and negated_sign != ANY else (size, sign)


class Integers:
    """Assigns symbols to the integers of a region, numbered in the order of first use."""

    def __init__(self, environment: ShapeEnv | None) -> None:
        self.environment = environment
        self.symbols: dict[sympy.Expr, sympy.Symbol] = {}  # the kernel's arguments, with their symbols
        self._replacements: dict[sympy.Expr, sympy.Expr] = {}  # parts of sizes, over those symbols
        self._sizes: dict[sympy.Expr, sympy.Expr] = {}  # whole sizes, over those symbols

    def named(self, size: Size) -> Size:
        """Return a size over the symbols of the spec."""
        if not isinstance(size, sympy.Expr):
            return size
        if size not in self._sizes:
            self._sizes[size] = self._rename(size)
        return self._sizes[size]

    def _rename(self, size: sympy.Expr) -> sympy.Expr:
        for part in sorted(set(self._arguments(size)), key=str):
            if part not in self._replacements:
                value, sign = _signed(part, self.environment)
                symbol = self.symbols.setdefault(value, symbol_of(f"{sign}{len(self.symbols)}"))
                self._replacements[part] = symbol if value is part else -symbol
        return size.xreplace(self._replacements)

    def _arguments(self, size: sympy.Expr) -> Iterator[sympy.Expr]:
        """Yield the parts of a size that a kernel takes as arguments: symbols, and what it could not compute from them."""
        if isinstance(size, sympy.Symbol) or not self._is_computed(size):
            yield size
            return
        for part in size.args:
            yield from self._arguments(part)

    def _is_computed(self, size: sympy.Expr) -> bool:
        """Return whether kernels can compute an expression from its parts."""
        if isinstance(size, sympy.Pow):
            return bool(size.exp.is_Integer and size.exp > 0)
        if isinstance(size, _DIVISIONS):
            whole, *divisors = size.args
            return self._is_nonnegative(whole) and all(sign_of_size(d, self.environment) == POSITIVE for d in divisors)
        return isinstance(size, _EXACT)

    def _is_nonnegative(self, size: sympy.Expr) -> bool:
        return known_nonnegative(size) or sign_of_size(size, self.environment) != ANY
