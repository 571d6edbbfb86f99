"""Writes a kernel's text from an emitter's lines: merges axes, names tile variables, prints index expressions.

Worked example: if every access reads axes ``i0`` (size 8) and ``i1`` (size 4) as ``4*i0 + i1``, both become the tile
variable ``x`` and the text has no division; otherwise the kernel begins with ``x1 = x % 4`` and ``x0 = x // 4``, and the
accesses that do read them so still are at ``x``. Where tiles are copied ahead, one that reads a few of the innermost axes as
one element after another, across lanes, is at what they are together, ``x1_3 = x % 24``: elements of 16 bits of which Triton
knows no neighbours are not copied ahead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from dynafuse.ir import Size
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.row_parts import part_name
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.lowering.triton.text import factor_text, size_text
from dynafuse.ops.indexing_math import symbol

Variables = dict[sympy.Symbol, sympy.Expr]
"""The variable of each axis in a kernel's text."""


@dataclass
class TileDimension:
    """A dimension of a kernel's tile: its variable, the lines that define it, the axes that it walks (outermost first)."""

    name: str
    define: tuple[str, ...]
    axes: list[sympy.Symbol]
    in_loop: bool = False  # whether it begins anew in every step of the loop
    block: int = 0  # the number of points of which every tile begins at a multiple; 0 if that is not used
    is_joined: bool = False  # whether accesses are at what several of its innermost axes are together
    parts: int = 1  # tiles that lie beside one another; where each begins is its ``_base``

    def is_even(self, inner: Size) -> bool:
        """Return whether an axis has one value all over a tile, given the points of the axes inside it."""
        return divides_evenly(self.block, inner)


def render(emitter: Emitter, tiles: Sequence[TileDimension], name: str, parameters: Sequence[str], docstring: str,
           prologue: Sequence[str]) -> str:
    """Return the text of one kernel, or of a function that one calls.

    Args:
        emitter: What the kernel computes.
        tiles: Its tile dimensions, whose axes are merged here where the text allows it.
        name: Its name.
        parameters: Its parameters, as in a definition.
        docstring: Its docstring.
        prologue: What it does before it touches memory.
    """
    merged_axes = merge_axes(emitter, tiles)
    variables: Variables = {}
    first_variables: Variables = {}
    before_loop: list[str] = []
    in_loop: list[str] = []
    for tile in tiles:
        lines = [*tile.define, *_axis_lines(tile, variables), *_axis_lines(tile, first_variables, "_first")]
        if tile.parts > 1:
            base = f"{tile.name}_base = {{}} * {tile.name.upper()}BLOCK"
            lines = [_of_part(line, part) for part in range(tile.parts) for line in (base.format(part), *lines)]
        (in_loop if tile.in_loop else before_loop).extend(lines)
    writer = _Body(in_loop, merged_axes, tiles, variables, first_variables)
    body = before_loop + list(writer.text(emitter.top, "")) or ["pass"]
    text, signature = "\n".join(f"    {line}" for line in (*prologue, *_without_unused(body))), ", ".join(parameters)
    return f'@triton.jit\ndef {name}({signature}):\n    """{docstring}"""\n{text}\n'


def divides_evenly(block: int, inner: Size) -> bool:
    """Return whether blocks of several points never reach over ``inner`` points and those after."""
    return block > 1 and isinstance(inner, (int, sympy.Integer)) and inner % block == 0


def merge_axes(emitter: Emitter, tiles: Sequence[TileDimension]) -> Variables:
    """Merge neighbouring axes of each tile dimension that every expression reads as one.

    Returns:
        What replaces the axes that are merged, in index expressions.
    """
    exprs = {expr for line in emitter.top.all_lines() for expr in line.exprs}
    replacements: Variables = {}
    for tile in tiles:
        position = 0
        while position + 1 < len(tile.axes):
            outer, inner = tile.axes[position:position + 2]
            axis = symbol(f"{outer.name}_{inner.name}", outer.size * inner.size)
            rewritten = _rewrite_over_one_axis(exprs, outer, inner, axis)
            if rewritten is None:
                position += 1
                continue
            exprs = rewritten
            tile.axes[position:position + 2] = [axis]
            both: Variables = {outer: sympy.S.Zero, inner: axis}
            replacements = {old: expr.xreplace(both) for old, expr in replacements.items()} | both
    return replacements


def _rewrite_over_one_axis(
    exprs: set[sympy.Expr], outer: sympy.Symbol, inner: sympy.Symbol, axis: sympy.Symbol
) -> set[sympy.Expr] | None:
    """Return expressions over ``axis`` instead of two axes; None if some expression tells the two apart."""
    rewritten: set[sympy.Expr] = set()
    for expr in exprs:
        if not (expr.has(outer) or expr.has(inner)):
            rewritten.add(expr)
            continue
        factor = expr.coeff(inner)
        rest = sympy.expand(expr - factor * inner - factor * inner.size * outer)
        if factor == 0 or rest.has(outer) or rest.has(inner):
            return None
        rewritten.add(rest + factor * axis)
    return rewritten


def _axis_lines(tile: TileDimension, variables: Variables, suffix: str = "") -> Iterator[str]:
    """Yield lines that take a tile variable apart into its axes, and name these in ``variables``.

    With a suffix the lines are about the tile's first element alone.
    """
    inner: Size = 1
    flat, last = tile.name + suffix, len(tile.axes) - 1
    for k in reversed(range(len(tile.axes))):
        axis = tile.axes[k]
        name = flat if len(tile.axes) == 1 else f"{tile.name}{k}{suffix}"
        variables[axis] = sympy.Symbol(name)
        if len(tile.axes) > 1:
            yield f"{name} = {_axis_text(tile, flat, inner, axis.size, is_outermost=k == 0)}"
        inner = inner * axis.size
        if 0 < k < last and tile.is_joined:
            together = f"{tile.name}{k}_{last}{suffix}"
            variables[_together(tile, k)] = sympy.Symbol(together)
            yield f"{together} = {_axis_text(tile, flat, 1, inner, is_outermost=False)}"
    variables[_together(tile, 0)] = sympy.Symbol(flat)


def _together(tile: TileDimension, begin: int) -> sympy.Symbol:
    """Return the axes of a tile dimension from one on as one."""
    return symbol(f"{tile.name}_from{begin}", sympy.prod([axis.size for axis in tile.axes[begin:]]))


def _over_innermost(expr: sympy.Expr, tile: TileDimension) -> sympy.Expr:
    """Return an index expression over what innermost axes of a tile dimension are together, if it treats them as one.

    If these are all axes nothing is divided. A part of them is worth it if it is read one element after the other, so that
    Triton may copy several of them at once.
    """
    axes, factor = tile.axes, expr.coeff(tile.axes[-1])
    begin, expected = len(axes), factor
    while factor != 0 and begin and sympy.expand(expr.coeff(axes[begin - 1]) - expected) == 0:
        begin -= 1
        expected = expected * axes[begin].size
    if begin > 0 and (factor != 1 or begin > len(axes) - 2 or not tile.is_joined):
        return expr
    rest = sympy.expand(expr - sum(expr.coeff(axis) * axis for axis in axes[begin:]))
    return expr if rest.free_symbols & set(axes[begin:]) else rest + factor * _together(tile, begin)


def _axis_text(tile: TileDimension, flat: str, inner: Size, size: Size, is_outermost: bool) -> str:
    """Return the text of an axis of a tile dimension: once a tile where the tile's first point tells, else per point."""
    if inner == 1 and tile.is_even(size):
        return f"{flat} - {tile.name}_first // {factor_text(size)} * {factor_text(size)}"
    source = f"{tile.name}_first" if tile.is_even(inner) else flat
    text = source if inner == 1 else f"({source} // {factor_text(inner)})"
    return text if is_outermost else f"{text} % {factor_text(size)}"


def _of_next_tile(line: str, tile: str) -> str:
    """Return a line with variables of the next tile in place of those of a tile dimension."""
    return re.sub(rf"\b{tile}(?=[\d_]|\b)", f"{tile}_next", line)


def _of_part(line: str, part: int, along: Collection[str] = ()) -> str:
    """Return a line with the variables of a part of a row in place of those of a tile, ``along`` among them."""
    line = re.sub(r"\br(?:[\d_]\w*)?\b", lambda name: part_name(name[0], part), line)
    return re.sub(r"\b[a-z]+\d+\b", lambda name: part_name(name[0], part) if name[0] in along else name[0], line)


@dataclass
class _Body:
    """Writes the lines of scopes."""

    in_loop: list[str]  # the lines that begin a loop
    merged_axes: Mapping[sympy.Symbol, sympy.Expr]
    tiles: Sequence[TileDimension]
    variables: Variables
    first_variables: Variables  # of the first element of a program's tile

    def text(self, scope: Scope, indent: str) -> Iterator[str]:
        """Yield the lines of a scope."""
        for item in scope.lines:
            if isinstance(item, Scope) and item.part is not None:
                lines = self.text(replace(item, part=None), indent)
                yield from (_of_part(line, item.part, item.along) for line in lines)
            elif isinstance(item, Scope) and item.next_of:
                yield indent + item.header.text
                yield from (indent + _of_next_tile(line, item.next_of) for line in (*self.in_loop, *self.text(item, "")))
            elif isinstance(item, Scope):
                yield indent + self._line(item.header, self.first_variables if item.is_branch else self.variables)
                in_loop = [] if item.is_branch else [item.first, *self.in_loop] if item.first else self.in_loop
                yield from (f"{indent}    {line}" for line in in_loop)
                yield from self.text(item, indent + "    ")
            else:
                yield indent + self._line(item, self.variables)

    def _line(self, line: Line, variables: Variables) -> str:
        exprs = [e if e.is_Integer else size_text(self._merged(e), variables) for e in line.exprs]
        return line.text.format(*exprs) + (f"  # {line.comment}" if line.comment else "")

    def _merged(self, expr: sympy.Expr) -> sympy.Expr:
        """Return an index expression over merged axes, and over what several of a tile dimension are together."""
        expr = expr.xreplace(self.merged_axes)
        for tile in self.tiles:
            if len(tile.axes) > 1 and expr.free_symbols & set(tile.axes):
                expr = _over_innermost(expr, tile)
        return expr


def _without_unused(body: Sequence[str]) -> list[str]:
    """Return the lines of a kernel without the definitions of values, tile variables and masks that nothing uses."""
    used_lines: list[str] = []
    used: set[str] = set()
    for line in reversed(body):
        name, equals, _ = line.strip().partition(" = ")
        is_definition = equals and name.isidentifier() and name.split("_")[0].rstrip("0123456789") in ("v", "x", "y", "r")
        if not is_definition or name in used:
            used_lines.append(line)
            used.update(re.findall(r"\w+", line))
    return used_lines[::-1]
