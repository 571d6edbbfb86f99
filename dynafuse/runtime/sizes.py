"""Sizes as Python source, for the function of a graph.

Worked example: ``size_text(CeilToInt(1.5 * ToFloat(s77)), {s77: "s77"})`` is ``math.ceil(1.5*float(s77))``; where a step of
the graph has computed that already, ``names`` has it too, and the text is the step's variable.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.utils._sympy.printers import PythonPrinter

MATH = "math"
"""The name that the text needs among its globals."""


class _Printer(PythonPrinter):
    """Torch's, which is made for guards over symbolic values, for numbers."""

    def __init__(self, names: Mapping[sympy.Expr, str]) -> None:
        super().__init__()
        self.names = names

    def _print(self, expr: sympy.Basic, **kwargs: object) -> str:
        known = self.names.get(expr)
        return str(super()._print(expr, **kwargs)) if known is None else known

    def _print_Mul(self, expr: sympy.Expr) -> str:
        """A product with a fraction is an integer all the same."""
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
        condition, one, other = map(self._print, expr.args)
        return f"({one} if {condition} else {other})"


def size_text(size: sympy.Expr, names: Mapping[sympy.Expr, str]) -> str:
    """An expression over what has ``names``. Raises NotImplementedError for a function that Python has not."""
    return str(_Printer(names).doprint(size))
