"""Moves loads before the point at which the threads of a program first wait for each other.

To combine what its lanes hold a program waits, and no load is begun before that which is written after it. A kernel of few
programs then does nothing but wait, for one memory access after the other. So what needs no other value is loaded first.

Worked example: the gradient of a batch norm sums ``dy``, then ``dy * (x - mean)``. With ``x``, ``mean`` and weights loaded
beside ``dy`` a program waits for memory once, instead of three times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dynafuse.lowering.triton.scopes import Line, Scope

NAMES = re.compile(r"\b[a-z_]\w*\b")
DEFINITION = re.compile(r"([\w, ]+) = ")
LOAD = re.compile(r"\w+ = (lm\.repeated\()?tl\.load\(")


def load_early(scope: Scope, first_wait: int, *, along_rows: bool) -> None:
    """Move loads that need no other value before a line of a scope.

    Args:
        scope: The kernel's top level.
        first_wait: The number of lines before the first one at which threads wait for each other.
        along_rows: Whether to move loads that vary along the row, too: they take registers for each of a lane's elements.
    """
    defined = defined_names(scope)

    def is_early(item: Line | Scope) -> bool:
        return isinstance(item, Line) and (along_rows or "r" not in item.tiles) and is_free_load(item, defined)

    scope.lines[first_wait:] = sorted(scope.lines[first_wait:], key=is_early, reverse=True)


def is_free_load(line: Line, defined: set[str]) -> bool:
    """Return whether a line loads at a place, under conditions, that no value of a scope decides.

    Args:
        line: The line.
        defined: The names of the scope's values.
    """
    if not LOAD.match(line.text):
        return False
    _, expression = line.text.split(" = ", 1)
    needed = {str(symbol) for expr in line.exprs for symbol in expr.free_symbols}
    return defined.isdisjoint(needed.union(NAMES.findall(expression)))


def defined_names(scope: Scope) -> set[str]:
    """Return the names that the lines of a scope define, and those of its loops and branches."""
    return {name for item in scope.lines for name in _defined(item)}


def _defined(item: Line | Scope) -> Iterator[str]:
    """Yield the names that a line defines, or the lines of a loop or branch."""
    if isinstance(item, Scope):
        for inner in item.lines:
            yield from _defined(inner)
    elif match := DEFINITION.match(item.text):
        yield from match[1].split(", ")
