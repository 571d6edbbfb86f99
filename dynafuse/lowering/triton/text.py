"""How sizes and values are written in a kernel's source.

Worked example: ``size_text(4 * s0)`` is ``4*s0``; ``wrap("-1.0")`` is ``(-1.0)``, which can stand anywhere in an expression.
"""

from __future__ import annotations

import sympy
from torch.utils._sympy.printers import PythonPrinter

from dynafuse.ir import Size
from dynafuse.ops import Value

_printer = PythonPrinter()


def size_text(size: Size) -> str:
    """A size as Python or Triton source."""
    return str(size) if isinstance(size, int) else _printer.doprint(size)


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
