"""Sizes as Python source, for the function of a graph.

Worked example: ``size_text(CeilToInt(1.5 * ToFloat(s77)), {s77: "s77"})`` is ``math.ceil(1.5*float(s77))``; where a step of
the graph has computed that already, ``names`` has it too, and the text is the step's variable.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.utils._sympy.printers import PythonPrinter

MATH = "math"
"""The global that the text needs: Python's module ``math``."""


class _Printer(PythonPrinter):
    """Prints sizes for numbers; torch's printer is made for guards over symbolic values."""

    def __init__(self, names: Mapping[sympy.Expr, str]) -> None:
        super().__init__()
        self.names = names

    def _print(self, expr: sympy.Basic, **kwargs: object) -> str:
        known = self.names.get(expr)
        return str(super()._print(expr, **kwargs)) if known is None else known

    def _print_Mul(self, expr: sympy.Expr) -> str:
        """Print a product that holds a fraction: it is an integer all the same."""
        factor, rest = expr.as_coeff_Mul()
        if not factor.is_Rational or factor.is_Integer:
            return str(super()._print_Mul(expr))
        return f"({self._print(factor.p * rest)}) // {factor.q}"

    def _print_Function(self, expr: sympy.Expr) -> str:
        name = type(expr).__name__
        if not name.startswith("OpaqueUnaryFn_"):
            raise NotImplementedError(f"{name} of sizes, in {expr}")
        return f"{MATH}.{name.removeprefix('OpaqueUnaryFn_')}({self._print(expr.args[0])})"

    _print_OpaqueUnaryFn_sqrt = _print_Function

    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_TruncToFloat(self, expr: sympy.Expr) -> str:
        return f"float({MATH}.trunc({self._print(expr.args[0])}))"

    def _print_Where(self, expr: sympy.Expr) -> str:
        condition, if_true, if_false = map(self._print, expr.args)
        return f"({if_true} if {condition} else {if_false})"


def size_text(size: sympy.Expr, names: Mapping[sympy.Expr, str]) -> str:
    """Return a size as Python source over the variables in ``names``.

    Raises:
        NotImplementedError: For a function that Python does not have.
    """
    return str(_Printer(names).doprint(size))


def solution(size: sympy.Expr, value: str, names: Mapping[sympy.Expr, str]) -> tuple[sympy.Symbol, str] | None:
    """Return the one symbol of a size that no variable holds, and its source; None unless the size is a sum that tells it.

    Worked example: ``4 - u0``, which is ``x.size(0)``, tells that ``u0`` is ``(x.size(0) - (4)) // -1``.

    Args:
        size: The size.
        value: Its value, as Python source.
        names: The variables that hold other sizes.
    """
    unknown = [symbol for symbol in size.free_symbols if symbol not in names]
    if len(unknown) != 1:
        return None
    (symbol,) = unknown
    factor = size.coeff(symbol)
    rest = sympy.expand(size - factor * symbol)
    if not factor.is_Integer or factor == 0 or rest.has(symbol):
        return None
    return symbol, f"({value} - ({size_text(rest, names)})) // {factor}"
