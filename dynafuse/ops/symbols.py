"""The integers that a kernel takes as arguments, as symbols whose names say what is known of their sign.

    >>> s0, z1, n2 = map(symbol_of, ("s0", "z1", "n2"))
    >>> s0.is_positive, z1.is_nonnegative, z1.is_positive, n2.is_nonnegative
    (True, True, None, None)
    >>> place_of(n2)
    2

``s`` is at least 1 (a size that torch has seen to be so), ``z`` at least 0 (a size that may depend on data), ``n`` is any
integer (an argument of the user's function). The number is the symbol's place among the symbols of its spec. Since the sign
is in the name, it is in keys, in files and in generated code, and all of them agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import sympy

POSITIVE, NONNEGATIVE, ANY = "s", "z", "n"

_ASSUMPTIONS: Mapping[str, Mapping[str, bool]] = {POSITIVE: {"positive": True}, NONNEGATIVE: {"nonnegative": True}, ANY: {}}
_NAME = re.compile(rf"[{''.join(_ASSUMPTIONS)}]\d+")


def is_name(text: str) -> bool:
    """Return whether a text is the name of such a symbol."""
    return _NAME.fullmatch(text) is not None


@cache
def symbol_of(name: str) -> sympy.Symbol:
    """Return the symbol of a name; its first letter tells the sign of its values.

    Raises:
        ValueError: The text is no such name.
    """
    if not is_name(name):
        raise ValueError(f"{name!r} is no size symbol")
    return sympy.Symbol(name, integer=True, **_ASSUMPTIONS[name[0]])


def place_of(symbol: sympy.Symbol | str) -> int:
    """Return the place of a symbol, or of one of that name, among those of its spec."""
    return int(str(symbol)[1:])


def with_symbols_at(size: int | sympy.Expr, value: int) -> int:
    """Return a size with one value in the place of every symbol, to compare sizes that are not known yet.

    Args:
        size: The size.
        value: What every symbol counts as, in elements.
    """
    if not isinstance(size, sympy.Expr):
        return size
    return int(size.xreplace({symbol: sympy.Integer(value) for symbol in size.free_symbols}))
