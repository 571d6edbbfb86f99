"""From an emitter's lines to a kernel's text: merges axes, names tile variables, prints index expressions.

Worked example: if every access reads axes ``i0`` (size 8) and ``i1`` (size 4) as ``4*i0 + i1``, both become the tile
variable ``x`` and the text has no division; otherwise the kernel begins with ``x1 = x % 4`` and ``x0 = x // 4``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.ir import Size
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops.indexing_math import symbol

HEADER = """\
import triton
import triton.language as tl

from dynafuse.lowering.triton import libm as lm
"""


@dataclass
class Tile:
    """A tile dimension: its variable, the lines that define it, the axes that it walks (outermost first)."""

    name: str
    define: tuple[str, ...]
    axes: list[sympy.Symbol]
    in_loop: bool = False


def lines_of(scope: Scope) -> Iterator[Line]:
    """All lines of a scope, its loops and its branches."""
    for item in scope.lines:
        if isinstance(item, Scope):
            yield item.header
            yield from lines_of(item)
        else:
            yield item


def merge_axes(emitter: Emitter, tiles: Sequence[Tile]) -> dict[sympy.Symbol, sympy.Expr]:
    """Make one axis of neighbours that every expression reads as one; returns what replaces the old axes."""
    exprs = {e for line in lines_of(emitter.top) for e in line.exprs}
    replaced: dict[sympy.Symbol, sympy.Expr] = {}
    for tile in tiles:
        position = 0
        while position + 1 < len(tile.axes):
            merged = _merged(tile.axes[position], tile.axes[position + 1], exprs)
            if merged is None:
                position += 1
                continue
            exprs, new, both = merged
            tile.axes[position:position + 2] = [new]
            replaced = {axis: expr.xreplace(both) for axis, expr in replaced.items()} | both
    return replaced


def _merged(outer: sympy.Symbol, inner: sympy.Symbol, exprs: set[sympy.Expr]):  # type: ignore[no-untyped-def]
    """The expressions over one axis instead of two; None if some expression tells the two apart."""
    new = symbol(f"{outer.name}_{inner.name}", outer.size * inner.size)
    rewritten: set[sympy.Expr] = set()
    for expr in exprs:
        if not (expr.has(outer) or expr.has(inner)):
            rewritten.add(expr)
            continue
        factor = expr.coeff(inner)
        rest = sympy.expand(expr - factor * inner - factor * inner.size * outer)
        if factor == 0 or rest.has(outer) or rest.has(inner):
            return None
        rewritten.add(rest + factor * new)
    return rewritten, new, {outer: sympy.S.Zero, inner: new}


def render(emitter: Emitter, tiles: Sequence[Tile], name: str, parameters: Sequence[str], constants: Sequence[str],
           docstring: str) -> str:
    """The text of one kernel."""
    replaced = merge_axes(emitter, tiles)
    names: dict[sympy.Symbol, sympy.Expr] = {}
    firsts: dict[sympy.Symbol, sympy.Expr] = {}
    before: list[str] = []
    inside: list[str] = []
    for tile in tiles:
        lines = [*tile.define, *_axis_lines(tile, names), *_axis_lines(tile, firsts, "_first")]
        (inside if tile.in_loop else before).extend(lines)
    body = before + list(_Body(inside, replaced, names, firsts).text(emitter.top, "")) or ["pass"]
    body = _used(body)
    signature = ", ".join([*parameters, *(f"{c}: tl.constexpr" for c in constants)])
    text = "\n".join(f"    {line}" for line in body)
    return f'@triton.jit\ndef {name}({signature}):\n    """{docstring}"""\n{text}\n'


def _axis_lines(tile: Tile, names: dict[sympy.Symbol, sympy.Expr], suffix: str = "") -> Iterator[str]:
    """Lines that take a tile variable apart into its axes; with a suffix, those of the first element alone."""
    inner: Size = 1
    whole = tile.name + suffix
    for k in reversed(range(len(tile.axes))):
        axis = tile.axes[k]
        variable = whole if len(tile.axes) == 1 else f"{tile.name}{k}{suffix}"
        names[axis] = sympy.Symbol(variable)
        if len(tile.axes) > 1:
            text = whole if inner == 1 else f"({whole} // {_size(inner)})"
            yield f"{variable} = {text}" + (f" % {_size(axis.size)}" if k else "")
        inner = inner * axis.size


def _size(size: Size) -> str:
    text = size_text(size if isinstance(size, int) else sympy.sympify(size))
    return text if text.isidentifier() or text.isdigit() else f"({text})"


@dataclass
class _Body:
    """Prints scopes. ``inside`` are the lines that begin a loop; ``names`` and ``firsts`` are the variables of the axes."""

    inside: list[str]
    replaced: dict[sympy.Symbol, sympy.Expr]
    names: dict[sympy.Symbol, sympy.Expr]
    firsts: dict[sympy.Symbol, sympy.Expr]

    def text(self, scope: Scope, indent: str) -> Iterator[str]:
        """The lines of a scope."""
        for item in scope.lines:
            if isinstance(item, Scope):
                yield indent + self._line(item.header, self.firsts if item.branch else self.names)
                yield from (f"{indent}    {line}" for line in ([] if item.branch else self.inside))
                yield from self.text(item, indent + "    ")
            else:
                yield indent + self._line(item, self.names)

    def _line(self, line: Line, names: dict[sympy.Symbol, sympy.Expr]) -> str:
        exprs = [e if e.is_Integer else size_text(e.xreplace(self.replaced), names) for e in line.exprs]
        return line.text.format(*exprs) + (f"  # {line.comment}" if line.comment else "")


def _used(body: Sequence[str]) -> list[str]:
    """Drop definitions of values, tile variables and masks that nothing uses."""
    kept: list[str] = []
    text = ""
    for line in reversed(body):
        name, equals, _ = line.strip().partition(" = ")
        generated = equals and name.isidentifier() and name.split("_")[0].rstrip("0123456789") in ("v", "x", "y", "r")
        if generated and not _mentions(text, name):
            continue
        kept.append(line)
        text += line + "\n"
    return kept[::-1]


def _mentions(text: str, name: str) -> bool:
    import re

    return re.search(rf"\b{name}\b", text) is not None
