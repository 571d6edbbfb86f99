"""Writes sizes, indices and values as Triton source.

Triton divides as C does, index expressions as Python does: a quotient or remainder is written with Triton's operator where
its dividend is known not to be negative, else with a function that rounds down.

Worked example: ``size_text(4 * s0)`` is ``4*s0``; with an index ``i`` below 8, ``size_text((i - 3) // 2)`` is
``lm.floor_div_int(i - 3, 2)``; ``wrap("-1.0")`` is ``(-1.0)``, which can stand anywhere in an expression.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod
from torch.utils._sympy.printers import ExprPrinter

from dynafuse.errors import LoweringError
from dynafuse.ir import Size
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import known_nonnegative

Names = Mapping[sympy.Symbol, sympy.Expr]

HAVE_QUICK = re.compile(r"\blm\.(exp|div|reciprocal|sqrt|sigmoid|silu_slope)\(")
"""Calls of functions that ``libm_quick`` has as well."""


class _Quotient(sympy.Function):  # type: ignore[misc]
    """A quotient by Triton's operator. It is never evaluated: sympy has simplified its operands before."""

    precedence = FloorDiv.precedence
    is_integer = True


class _Remainder(_Quotient):
    """A remainder by Triton's operator."""


class _FloorQuotient(_Quotient):
    """A quotient of a dividend that may be negative."""


class _FloorRemainder(_Quotient):
    """A remainder of a dividend that may be negative."""


class _Printer(ExprPrinter):
    """Writes sympy expressions as Triton source."""

    def emptyPrinter(self, expr: sympy.Basic) -> str:
        raise LoweringError(f"the size {expr}", f"Triton has no {type(expr).__name__}")

    _print_Function = _print_Rational = emptyPrinter

    def _operation(self, expr: sympy.Expr, operator: str) -> str:
        left, right = (self.parenthesize(arg, sympy.printing.precedence.PRECEDENCE["Atom"] - 0.5) for arg in expr.args)
        return f"{left} {operator} {right}"

    def _call(self, name: str, *args: sympy.Expr) -> str:
        return f"{name}({', '.join(map(self._print, args))})"

    def _print__Quotient(self, expr: sympy.Expr) -> str:
        return self._operation(expr, "//")

    def _print__Remainder(self, expr: sympy.Expr) -> str:
        return self._operation(expr, "%")

    def _print__FloorQuotient(self, expr: sympy.Expr) -> str:
        return self._call("lm.floor_div_int", *expr.args)

    def _print__FloorRemainder(self, expr: sympy.Expr) -> str:
        return self._call("lm.remainder_int", *expr.args)

    def _print_Max(self, expr: sympy.Expr) -> str:
        return self._extremum("tl.maximum", expr)

    def _print_Min(self, expr: sympy.Expr) -> str:
        return self._extremum("tl.minimum", expr)

    def _extremum(self, name: str, expr: sympy.Expr) -> str:
        texts: list[str] = [self._print(arg) for arg in expr.args]
        return functools.reduce(lambda left, right: f"{name}({left}, {right})", texts)

    def _print_Relational(self, expr: sympy.core.relational.Relational) -> str:
        """Write a comparison in integers: sympy makes ``s0 >= 5/2`` of ``2*s0 - 5 >= 0``."""
        denominator = sympy.ilcm(1, *(number.q for number in expr.atoms(sympy.Rational)))
        sides = expr.args if denominator == 1 else [sympy.expand(side * denominator) for side in expr.args]
        return str(self.stringify(sides, f" {expr.rel_op} ", sympy.printing.precedence.precedence(expr)))

    def _print_Piecewise(self, expr: sympy.Expr) -> str:
        text: str = self._print(expr.args[-1].expr)
        for piece in expr.args[-2::-1]:
            text = f"tl.where({self._print(piece.cond)}, {self._print(piece.expr)}, {text})"
        return text


_printer = _Printer()


def size_text(size: Size, names: Names | None = None) -> str:
    """Return a size or index expression as Triton source.

    Args:
        size: The size.
        names: What its symbols are called there; None: by their own names.

    Raises:
        LoweringError: It has a function that Triton lacks.
    """
    return str(size) if isinstance(size, int) else str(_printer.doprint(_in_triton_operations(size, names or {})))


def _in_triton_operations(expr: sympy.Expr, names: Names) -> sympy.Expr:
    """Return an expression in Triton's operations, with its symbols renamed.

    Renaming loses the ranges of the symbols, which tell what is not negative, so both are done at once; for the same
    reason nothing is evaluated again.
    """
    if not expr.args:
        return names.get(expr, expr)
    args = [_in_triton_operations(arg, names) for arg in expr.args]
    if isinstance(expr, ModularIndexing):
        dividend, divisor, size = expr.args
        return _in_triton_operations(Mod(FloorDiv(dividend, divisor, evaluate=False), size, evaluate=False), names)
    if isinstance(expr, FloorDiv):
        return (_Quotient if known_nonnegative(expr.args[0]) else _FloorQuotient)(*args)
    if isinstance(expr, (Mod, PythonMod)):
        return (_Remainder if known_nonnegative(expr.args[0]) else _FloorRemainder)(*args)
    return expr if all(new is old for new, old in zip(args, expr.args, strict=True)) else expr.func(*args)


def factor_text(size: Size) -> str:
    """Return a size as Triton source that can be a factor or a divisor beside others."""
    text = size_text(size)
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def is_literal(value: Value) -> bool:
    """Return whether a value is a literal rather than a variable."""
    return not value.name.isidentifier() or value.name in ("True", "False")


def wrap(name: str) -> str:
    """Return a name or literal as it can stand anywhere in an expression: negative literals in brackets."""
    return f"({name})" if name.startswith("-") else name


def escape(text: str) -> str:
    """Return text that ``str.format`` turns back into ``text``."""
    return text.replace("{", "{{").replace("}", "}}")


def quick(text: str) -> str:
    """Return an expression of float32 with the quicker functions of ``libm_quick``, where that has them."""
    return HAVE_QUICK.sub(r"lq.\1(", text)
