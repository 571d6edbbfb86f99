"""How sizes and values are written in a kernel's source.

Triton divides as C does, expressions as Python does: a quotient or remainder is written with Triton's operator where its
dividend is known not to be negative, else with a function that rounds down.

Worked example: ``size_text(4 * s0)`` is ``4*s0``; with an index ``i`` below 8, ``size_text((i - 3) // 2)`` is
``lm.floor_div_int(i - 3, 2)``; ``wrap("-1.0")`` is ``(-1.0)``, which can stand anywhere in an expression.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import sympy
from torch.utils._sympy.functions import FloorDiv, Mod, ModularIndexing, PythonMod
from torch.utils._sympy.printers import ExprPrinter

from dynafuse.errors import LoweringError
from dynafuse.ir import Size
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import known_nonnegative

Names = Mapping[sympy.Symbol, sympy.Expr]


class _Quotient(sympy.Function):  # type: ignore[misc]
    """A quotient as Triton writes it. Never evaluated: what it is made of has been looked at."""

    precedence = FloorDiv.precedence
    is_integer = True


class _Remainder(_Quotient):
    """A remainder as Triton writes it."""


class _FloorQuotient(_Quotient):
    """A quotient of what may be negative."""


class _FloorRemainder(_Quotient):
    """A remainder of what may be negative."""


class _Printer(ExprPrinter):
    """Writes Triton."""

    def emptyPrinter(self, expr: sympy.Basic) -> str:
        raise LoweringError(f"the size {expr}", f"Triton has no {type(expr).__name__}")

    _print_Function = _print_Rational = emptyPrinter

    def _operation(self, expr: sympy.Expr, sign: str) -> str:
        left, right = (self.parenthesize(arg, sympy.printing.precedence.PRECEDENCE["Atom"] - 0.5) for arg in expr.args)
        return f"{left} {sign} {right}"

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

    def _print_Piecewise(self, expr: sympy.Expr) -> str:
        text: str = self._print(expr.args[-1].expr)
        for piece in expr.args[-2::-1]:
            text = f"tl.where({self._print(piece.cond)}, {self._print(piece.expr)}, {text})"
        return text


_printer = _Printer()


def size_text(size: Size, names: Names | None = None) -> str:
    """A size or index as Triton source, its symbols written as ``names`` says, where that has them."""
    return str(size) if isinstance(size, int) else str(_printer.doprint(_written(size, names or {})))


def _written(expr: sympy.Expr, names: Names) -> sympy.Expr:
    """An expression in Triton's operations, with its symbols renamed.

    Both at once, and without evaluation anew: the ranges of the symbols, which tell what is not negative, end here.
    """
    if not expr.args:
        return names.get(expr, expr)
    parts = [_written(part, names) for part in expr.args]
    if isinstance(expr, ModularIndexing):
        whole, divisor, size = expr.args
        return _written(Mod(FloorDiv(whole, divisor, evaluate=False), size, evaluate=False), names)
    if isinstance(expr, FloorDiv):
        return (_Quotient if known_nonnegative(expr.args[0]) else _FloorQuotient)(*parts)
    if isinstance(expr, (Mod, PythonMod)):
        return (_Remainder if known_nonnegative(expr.args[0]) else _FloorRemainder)(*parts)
    return expr if all(a is b for a, b in zip(parts, expr.args, strict=True)) else expr.func(*parts)


def factor_text(size: Size) -> str:
    """A size as a factor of a product in Triton source."""
    return f"({size_text(size)})" if isinstance(size, sympy.Add) else size_text(size)


def is_literal(value: Value) -> bool:
    """Whether a value is written out, and no variable."""
    return not value.name.isidentifier() or value.name in ("True", "False")


def wrap(name: str) -> str:
    """A negative literal in brackets, so that it can stand anywhere in an expression."""
    return f"({name})" if name.startswith("-") else name


def escape(text: str) -> str:
    """Text that ``str.format`` leaves as it is."""
    return text.replace("{", "{{").replace("}", "}}")
