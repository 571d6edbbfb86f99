"""Where the lines of a kernel go: its top level, a loop, a branch; and what is known there already.

Worked example: in a kernel whose loop walks ``r``, ``define("tl.load(...)", dtype, frozenset("r"))`` is a line of the loop,
and the same definition asked for again is the same variable; what does not vary along ``r`` is a line before the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ops import Value
from dynafuse.ops.symbols import is_name


@dataclass
class Line:
    """One line of a kernel: text with ``{i}`` for each of its index expressions; ``name`` is what it defines."""

    text: str
    exprs: tuple[sympy.Expr, ...] = ()
    comment: str = ""


@dataclass
class Scope:
    """Lines of the kernel's top level, of a loop or of a branch, with what has been computed in it."""

    lines: list[Line | Scope] = field(default_factory=list)
    known: dict[Any, Value] = field(default_factory=dict)
    header: Line = field(default_factory=lambda: Line(""))
    branch: bool = False  # its header is a condition, over the first element of a program's tile


class Scopes:
    """The scopes of one kernel. ``loop`` is the tile dimension that a loop walks, if any."""

    def __init__(self, loop: str | None = None) -> None:
        self.loop = loop
        self.rereads = False  # whether values that a loop does not change are made in it all the same
        self.top = Scope()
        self.inner: Scope | None = None
        self.branches: list[Scope] = []  # those that are open, outermost first
        self._count = 0

    def scope(self, tiles: frozenset[str]) -> Scope:
        """Where a value that varies along ``tiles`` is computed."""
        if self.branches:
            return self.branches[-1]
        if self.rereads and self.inner is not None and tiles:
            return self.inner
        if self.loop is None or self.loop not in tiles:
            return self.top
        if self.inner is None:
            raise LoweringError("a value", f"it varies along {self.loop} but is needed outside the loop over it")
        return self.inner

    def visible(self) -> Iterator[Scope]:
        """The scopes whose values can be used here, innermost first."""
        yield from reversed(self.branches)
        yield from (scope for scope in (self.inner, self.top) if scope is not None)

    def open_loop(self, header: str) -> None:
        """Start a loop; values that vary along its tile dimension go into it."""
        self.inner = Scope(header=Line(header))

    def close_loop(self) -> None:
        """End the loop: what it computed per iteration is forgotten."""
        assert self.inner is not None
        self.top.lines.append(self.inner)
        self.inner = None

    def line(self, text: str, tiles: frozenset[str], *exprs: sympy.Expr, comment: str = "") -> None:
        """A line that defines nothing that could be shared."""
        self.scope(tiles).lines.append(Line(text, exprs, comment))

    def once(self, text: str, tiles: frozenset[str], *exprs: sympy.Expr) -> None:
        """A line that defines nothing; the same line in the same scope is written once."""
        key = (text, exprs)
        if not any(key in scope.known for scope in self.visible()):
            self.line(text, tiles, *exprs)
            self.scope(tiles).known[key] = Value("", torch.bool, tiles)

    def name(self, prefix: str = "v") -> str:
        """A new variable, whose name is none of the integers that a kernel takes."""
        self._count += 1
        made = f"{prefix}{self._count - 1}"
        assert not is_name(made), made
        return made

    def define(self, text: str, dtype: torch.dtype, tiles: frozenset[str], *exprs: sympy.Expr, comment: str = "") -> Value:
        """A variable for an expression; the same one in the same scope is computed once, whatever 16-bit float it is."""
        key = (text, exprs)
        for scope in self.visible():
            if key in scope.known:
                return replace(scope.known[key], dtype=dtype)
        scope, value = self.scope(tiles), Value(self.name(), dtype, tiles)
        scope.lines.append(Line(f"{value.name} = {text}", exprs, comment))
        scope.known[key] = value
        return value
