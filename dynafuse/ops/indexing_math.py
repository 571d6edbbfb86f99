"""Integer arithmetic on index expressions, simplified by what is known of the index symbols' ranges.

    >>> i, j = symbol("i", 8), symbol("j", 128)
    >>> floordiv(128 * i + j, 128), mod(128 * i + j, 128)
    (i, j)
    >>> floordiv(64 * i + j, 64), mod(64 * i + symbol("k", 64), 128)
    (i + ((j//64)), k + 64*(Mod(i, 2)))

Index symbols are non-negative integers below a size that the symbol itself carries, so nothing has to be passed along.
Other symbols are integers of the sign that their assumptions tell: sizes, which are not negative, and the user's numbers.
``FloorDiv`` and ``Mod`` round down whatever the sign of the dividend, as Python does: whoever writes them in a language that
divides like C asks ``known_nonnegative`` first. Divisors are positive. No call of ``sympy.simplify`` anywhere: these run
for every load of every candidate kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from sympy import S
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from dynafuse.fx import is_whole

Size: TypeAlias = "int | sympy.Expr"
Limits: TypeAlias = "tuple[sympy.Expr | None, sympy.Expr | None]"
"""The lowest and the highest value that an expression can take; None where it is not known."""


class IndexSymbol(sympy.Symbol):  # type: ignore[misc]
    """A non-negative integer below ``size``. Symbols of one name and different sizes are different symbols."""

    __slots__ = ("size",)
    size: sympy.Expr

    def __new__(cls, name: str, size: Size) -> IndexSymbol:
        return _index_symbol(name, sympy.sympify(size))

    def _hashable_content(self) -> tuple[Any, ...]:
        return (*super()._hashable_content(), self.size)

    def __getnewargs_ex__(self) -> tuple[tuple[str, sympy.Expr], dict[str, Any]]:
        return (self.name, self.size), {}


@functools.cache
def _index_symbol(name: str, size: sympy.Expr) -> IndexSymbol:
    index: IndexSymbol = sympy.Symbol.__xnew__(IndexSymbol, name, integer=True, nonnegative=True)
    index.size = size
    return index


def symbol(name: str, size: Size) -> IndexSymbol:
    """Return the index symbol ``name`` with ``0 <= name < size``; the same symbol for the same name and size."""
    return IndexSymbol(name, size)


def as_expr(value: Any) -> sympy.Expr:
    """Return a size or index argument (int, SymInt, sympy expression, or FX node of one) as a sympy expression."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, torch.fx.Node):
        return as_expr(value.meta["val"])
    return sympy.sympify(value)


def bound(expr: sympy.Expr) -> sympy.Expr | None:
    """Return an exclusive upper bound of ``expr``, or None."""
    high = limits(expr)[1]
    return None if high is None else high + 1


def known_less(expr: sympy.Expr, size: Size) -> bool:
    """Return whether ``expr < size`` holds for every value of the symbols."""
    high = limits(expr)[1]
    return high is not None and _nonnegative(sympy.sympify(size) - 1 - high)


def known_nonnegative(expr: sympy.Expr) -> bool:
    """Return whether ``expr >= 0`` holds for every value of the symbols."""
    low = limits(expr)[0]
    return low is not None and _nonnegative(low)


def known_equal(left: Size, right: Size) -> bool:
    """Return whether two sizes are the same expression, products and sums multiplied out."""
    return bool(left == right) or bool(expanded(sympy.sympify(left) - sympy.sympify(right)) == 0)


@functools.lru_cache(maxsize=65536)
def decide(left: sympy.Expr, op: str, right: sympy.Expr) -> bool | None:
    """Return the outcome of a comparison if it is the same for every value of the symbols, else None.

    Args:
        left, right: The index expressions.
        op: One of ``< <= > >= ==``; of these ``<``, ``>=`` and, of numbers, ``==`` are decided.
    """
    low, high = limits(expanded(left - right))
    if op == "==" and (left - right).is_number:
        return bool(left == right)
    if op not in ("<", ">="):
        return None
    if low is not None and low.is_nonnegative:
        return op == ">="
    return op == "<" if high is not None and high.is_negative else None


@functools.lru_cache(maxsize=65536)
def symbols_of(expr: sympy.Expr) -> frozenset[sympy.Symbol]:
    """Return the symbols of an index expression; sympy looks for them each time that it is asked."""
    return frozenset(expr.free_symbols)


def expanded(expr: sympy.Expr) -> sympy.Expr:
    """Return ``expr`` as a sum, multiplied out only where a product holds a sum: most index expressions are sums already."""
    return sympy.expand(expr, deep=False) if any(map(_holds_sum, sympy.Add.make_args(expr))) else expr


def _holds_sum(term: sympy.Expr) -> bool:
    nested = (sympy.Add, sympy.Pow)
    return isinstance(term, sympy.Mul | sympy.Pow) and any(isinstance(part, nested) for part in term.args)


@functools.lru_cache(maxsize=65536)
def limits(expr: sympy.Expr) -> Limits:
    """Return the lowest and highest value of ``expr``, as far as its structure shows them."""
    low, high = _limits(expr)
    if (low is None or high is None) and not expr.has(IndexSymbol):  # fixed while the kernel runs: its own limit
        return (expr if low is None else low), (expr if high is None else high)
    return low, high


def _limits(expr: sympy.Expr) -> Limits:
    if expr.is_Symbol or expr.is_Integer:
        return (S.Zero, expr.size - 1) if isinstance(expr, IndexSymbol) else (expr, expr)
    if isinstance(expr, sympy.Add):
        return _sum_limits(limits(term) for term in expr.args)
    if isinstance(expr, sympy.Mul):
        return functools.reduce(_product_limits, map(limits, expr.args))
    if isinstance(expr, FloorDiv):
        return _quotient_limits(*expr.args)
    if isinstance(expr, Mod | PythonMod | ModularIndexing) and expr.args[-1].is_nonnegative:
        return S.Zero, expr.args[-1] - 1
    if isinstance(expr, Max | sympy.Max):
        return _better(limits(part)[0] for part in expr.args), None
    if isinstance(expr, Min | sympy.Min):
        return None, _better(limits(part)[1] for part in expr.args)
    return None, None


def floordiv(expr: sympy.Expr, size: Size) -> sympy.Expr:
    """Return ``expr // size`` (rounded down) for a positive ``size``."""
    return _divmod(sympy.sympify(expr), sympy.sympify(size))[0]


def mod(expr: sympy.Expr, size: Size) -> sympy.Expr:
    """Return ``expr % size`` (never negative) for a positive ``size``."""
    return _divmod(sympy.sympify(expr), sympy.sympify(size))[1]


@functools.lru_cache(maxsize=65536)
@functools.lru_cache(maxsize=65536)
def coarsened(left: sympy.Expr, right: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return two sides of ``<`` without symbols that never decide it.

    Worked example: for ``i`` below 32 those of ``i + 32 * k < 64`` are ``k < 2``.
    """
    difference = expanded(left - right)
    for stride in _strides(difference):
        high, low = _split_multiples(difference, stride)
        if low.has(IndexSymbol) and known_nonnegative(low) and known_less(low, stride):
            fixed, varying = high.as_independent(*high.atoms(IndexSymbol), as_Add=True)
            return varying, -fixed
    return left, right


def _strides(expr: sympy.Expr) -> list[sympy.Expr]:
    """Return what index symbols are multiplied by in a sum, the largest numbers first."""
    strides = {term.as_independent(*term.atoms(IndexSymbol), as_Add=False)[0]
               for term in sympy.Add.make_args(expr) if term.has(IndexSymbol)}
    positive = [stride for stride in strides if stride != 1 and stride.is_positive]
    return sorted(positive, key=lambda stride: (-stride if stride.is_Integer else S.NegativeInfinity, str(stride)))


def flatten(index: Sequence[sympy.Expr], shape: Sequence[Size]) -> sympy.Expr:
    """Return the row-major position of ``index`` in ``shape``, with quotients and remainders of one value joined again.

    Args:
        index: The index, outermost dimension first.
        shape: The sizes, as many.
    """
    flat: sympy.Expr = S.Zero
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return rejoin(expanded(flat))


def unflatten(position: sympy.Expr, shape: Sequence[Size]) -> tuple[sympy.Expr, ...]:
    """Return the index in ``shape`` of a row-major ``position``, which must lie inside the shape.

    Args:
        position: The position.
        shape: The sizes, outermost dimension first.
    """
    index: list[sympy.Expr] = []
    for size in reversed(shape[1:]):
        position, rest = _divmod(position, sympy.sympify(size))
        index.append(rest)
    return (position, *reversed(index)) if shape else ()


def product(sizes: Iterable[Size]) -> sympy.Expr:
    """Return the number of elements of a shape."""
    return functools.reduce(lambda total, size: total * size, sizes, S.One)


def rejoin(expr: sympy.Expr) -> sympy.Expr:
    """Rewrite every ``c*k*(x//k) + c*(x%k)`` in ``expr`` as ``c*x``."""
    terms = _terms(expr)
    for part, factor in list(terms.items()):
        if isinstance(part, Mod) and terms.get(part, 0) == factor and _rejoin_one(terms, part, factor):
            return rejoin(expanded(_total(terms)))
    return expr


def _rejoin_one(terms: dict[sympy.Expr, sympy.Expr], part: Mod, factor: sympy.Expr) -> bool:
    whole, size = part.args
    quotient = _terms(expanded(factor * size * floordiv(whole, size)))
    if not quotient or any(terms.get(key) != value for key, value in quotient.items()):
        return False
    for key in (*quotient, part):
        del terms[key]
    terms[whole] = terms.get(whole, S.Zero) + factor
    return True


@functools.lru_cache(maxsize=65536)
def _divmod(expr: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    if size == 1:
        return expr, S.Zero
    expr = expanded(expr)
    quotient, rest = _split_multiples(expr, size)
    if not known_nonnegative(rest):
        quotient, rest = _nonnegative_rest(expr, quotient, rest, size)
    inner_quotient, remainder = _reduced(rest, size) if size.is_Integer else _opaque(rest, size)
    return quotient + inner_quotient, remainder


def _nonnegative_rest(
    expr: sympy.Expr, quotient: sympy.Expr, rest: sympy.Expr, size: sympy.Expr
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return a ``(q, r)`` with an ``r`` that is not negative, which is divided faster; nothing is split if none shows."""
    if known_nonnegative(rest + size):
        return quotient - 1, rest + size
    if not size.is_Integer:
        return S.Zero, expr
    share, left = _split_negatives(rest, size)
    if known_nonnegative(left):
        return quotient + share, left
    low = limits(rest)[0]
    return (quotient + low // size, rest - low // size * size) if low is not None and low.is_Integer else (S.Zero, expr)


def _split_negatives(expr: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return ``(q, r)`` with ``expr == q*size + r`` where every factor in ``r`` is in ``[0, size)``."""
    factors = {part: divmod(int(factor), int(size)) for part, factor in _terms(expr).items()}
    return (sympy.Add(*(part * whole for part, (whole, _) in factors.items())),
            sympy.Add(*(part * left for part, (_, left) in factors.items())))


def _split_multiples(expr: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return ``(q, r)`` with ``expr == q*size + r``: every term that is a multiple of ``size`` goes into ``q``."""
    quotient, rest = S.Zero, S.Zero
    for part, factor in _terms(expr).items():
        share, left = _divide_term(part, factor, size)
        quotient, rest = quotient + share, rest + left
    return quotient, rest


def _divide_term(part: sympy.Expr, factor: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    if size.is_Integer:
        if part == 1:
            return sympy.Integer(int(factor) // int(size)), sympy.Integer(int(factor) % int(size))
        return (part * (factor / size), S.Zero) if factor % size == 0 else (S.Zero, part * factor)
    share = part * factor / size if size.free_symbols <= part.free_symbols else S.Half
    return (share, S.Zero) if is_whole(share) else (S.Zero, part * factor)


def _reduced(rest: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Divide by a constant with a common factor cancelled: ``(g*a + r) // (g*b) == a // b`` while ``0 <= r < g``."""
    for common in _common_factors(rest, int(size)):
        high, low = _split_multiples(rest, sympy.Integer(common))
        if known_nonnegative(low) and known_less(low, common):
            quotient, remainder = _opaque(high, sympy.Integer(int(size) // common))
            return quotient, common * remainder + low
    return _opaque(rest, size)


def _common_factors(expr: sympy.Expr, size: int) -> list[int]:
    factors = {math.gcd(int(factor), size) for factor in _terms(expr).values() if factor.is_Integer}
    return sorted(factors - {1, size}, reverse=True)


def _opaque(expr: sympy.Expr, size: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Return a division that stays a division, after nested remainders are reduced."""
    if size == 1:
        return expr, S.Zero
    if known_nonnegative(expr) and known_less(expr, size):
        return S.Zero, expr
    return _opaque_quotient(expr, size), _opaque_mod(expr, size)


# Evaluated construction spends a millisecond on assumptions; where nothing is left to simplify it is skipped.


def _opaque_quotient(expr: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
    if not (size.is_Integer or isinstance(expr, IndexSymbol)) or expr.is_Integer:
        return FloorDiv(expr, size)
    if isinstance(expr, FloorDiv) and expr.args[1].is_Integer:
        return FloorDiv(expr.args[0], expr.args[1] * size, evaluate=False)
    return FloorDiv(expr, size, evaluate=False)


def _opaque_mod(expr: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
    if isinstance(expr, IndexSymbol):
        return Mod(expr, size, evaluate=False)
    if not size.is_Integer:
        return Mod(expr, size)
    if expr.is_Integer:
        return expr % size
    if isinstance(expr, Mod) and expr.args[1].is_Integer and expr.args[1] % size == 0:
        return mod(expr.args[0], size)
    return Mod(expr, size, evaluate=False)


def _terms(expr: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """Return an expanded sum as ``{part: integer factor}``; the constant term has part 1."""
    factors: dict[sympy.Expr, sympy.Expr] = {}
    for term in sympy.Add.make_args(expr):
        factor, part = term.as_coeff_Mul()
        if factor != 0:
            factors[part] = factors.get(part, S.Zero) + factor
    return factors


def _total(terms: dict[sympy.Expr, sympy.Expr]) -> sympy.Expr:
    return sympy.Add(*(part * factor for part, factor in terms.items()))


def _nonnegative(expr: sympy.Expr) -> bool:
    return bool(expanded(expr).is_nonnegative)


def _sum_limits(parts: Iterable[Limits]) -> Limits:
    lows, highs = zip(*parts, strict=True)
    return (None if None in lows else sympy.Add(*lows)), (None if None in highs else sympy.Add(*highs))


def _product_limits(left: Limits, right: Limits) -> Limits:
    for (low, high), (other, top) in ((left, right), (right, left)):
        if low is not None and low == high and low.is_Integer and low < 0:  # a negative constant swaps the ends
            return (None if top is None else low * top), (None if other is None else low * other)
    if left[0] is None or right[0] is None or not (_nonnegative(left[0]) and _nonnegative(right[0])):
        return None, None
    return left[0] * right[0], (None if left[1] is None or right[1] is None else left[1] * right[1])


def _quotient_limits(whole: sympy.Expr, size: sympy.Expr) -> Limits:
    low, high = limits(whole)
    if size.is_Integer and size > 0 and low is not None and low.is_Integer:
        return low // size, (None if high is None else FloorDiv(high, size))
    if low is None or not _nonnegative(low) or not size.is_nonnegative:
        return None, None
    return S.Zero, (None if high is None else FloorDiv(high, size))


def _better(ends: Iterable[sympy.Expr | None]) -> sympy.Expr | None:
    """Return one of several limits that all hold, preferably one whose sign is known."""
    known = [end for end in ends if end is not None]
    return next((end for end in known if _nonnegative(end)), known[0] if known else None)
