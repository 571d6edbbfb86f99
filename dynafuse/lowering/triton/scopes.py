"""Scopes of a kernel: its top level, a loop or a branch, each with its lines and the values computed in it.

Worked example: in a kernel whose loop walks ``r``, ``define("tl.load(...)", dtype, frozenset("r"))`` adds a line to the
loop, and the same definition asked for again returns the same variable. What does not vary along ``r`` is a line before
the loop.
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

PER_STEP = frozenset("s")
"""Stands among tile dimensions for the steps of a loop: a value that varies along it alone is one for a whole tile."""

PER_PROGRAM = frozenset[str]()
"""The tile dimensions of a value that is one for a whole program."""


@dataclass
class Line:
    """One line of a kernel: text with ``{i}`` for each of its index expressions, a comment at its end, and the tile
    dimensions that it varies along."""

    text: str
    exprs: tuple[sympy.Expr, ...] = ()
    comment: str = ""
    tiles: frozenset[str] = frozenset()


@dataclass
class Scope:
    """The lines of a kernel's top level, of a loop or of a branch, and the values that they compute."""

    lines: list[Line | Scope] = field(default_factory=list)
    values: dict[Any, Value] = field(default_factory=dict)
    header: Line = field(default_factory=lambda: Line(""))
    first: str | None = None  # the line of a loop that its tile dimensions need
    is_branch: bool = False  # its header is a condition, over the first element of a program's tile
    next_of: str = ""  # the tile dimension whose next tile its lines are about; its header says where that begins
    part: int | None = None  # which part of a row its lines are about, if it is one of several
    along: frozenset[str] = frozenset()  # the names that each part has for itself

    def all_lines(self) -> Iterator[Line]:
        """Yield the lines of the scope, and of its loops and branches with their headers."""
        for item in self.lines:
            if isinstance(item, Scope):
                yield item.header
                yield from item.all_lines()
            else:
                yield item


class Scopes:
    """The scopes of one kernel while it is written.

    ``loop`` is the tile dimension that the kernel's loop walks, or None if it has no loop.
    """

    def __init__(self, loop: str | None = None) -> None:
        self.loop = loop
        self.hoist_invariants = True  # whether values that a loop does not change are computed before it
        self.top = Scope()
        self.open_loop_scope: Scope | None = None
        self.open_branches: list[Scope] = []  # outermost first
        self.first_wait: int | None = None  # lines of the top level before threads first wait for each other there
        self.last_wait = 0  # lines of the loop up to that at which they last do
        self._name_count = 0

    def scope(self, tiles: frozenset[str]) -> Scope:
        """Return the scope in which a value is computed that varies along some tile dimensions.

        Raises:
            LoweringError: It varies along the loop, and no loop is open.
        """
        if self.open_branches:
            return self.open_branches[-1]
        if not self.hoist_invariants and self.open_loop_scope is not None and tiles:
            return self.open_loop_scope
        if self.loop is None or (self.loop not in tiles and not tiles >= PER_STEP):
            return self.top
        if self.open_loop_scope is None:
            raise LoweringError("a value", f"it varies along {self.loop} but is needed outside the loop over it")
        return self.open_loop_scope

    def visible_scopes(self) -> Iterator[Scope]:
        """Yield the scopes whose values can be used here, innermost first."""
        yield from reversed(self.open_branches)
        if self.open_loop_scope is not None:
            yield self.open_loop_scope
        yield self.top

    def open_loop(self, header: str, first: str | None = None) -> None:
        """Open a loop: values that vary along its tile dimension are computed in it from here on."""
        self.open_loop_scope = Scope(header=Line(header), first=first)
        self.last_wait = 0

    def close_loop(self) -> None:
        """Close the loop: the values of its iterations can no longer be used."""
        assert self.open_loop_scope is not None
        self.top.lines.append(self.open_loop_scope)
        self.open_loop_scope = None

    def forget(self, tile: str) -> None:
        """Let values of the open loop that vary along a tile dimension be computed anew when they are asked for again."""
        assert self.open_loop_scope is not None
        values = self.open_loop_scope.values
        self.open_loop_scope.values = {key: value for key, value in values.items() if tile not in value.tiles}

    def add_line(self, text: str, tiles: frozenset[str], *exprs: sympy.Expr, comment: str = "") -> None:
        """Add a line that defines no value.

        Args:
            text: Triton text with ``{i}`` for each of ``exprs``.
            tiles: The tile dimensions that it depends on, which tell its scope.
            *exprs: Index expressions of the text.
            comment: A comment for the line.
        """
        self.scope(tiles).lines.append(Line(text, exprs, comment, tiles))

    def add_line_once(self, text: str, tiles: frozenset[str], *exprs: sympy.Expr) -> None:
        """Add a line that defines no value, unless it can be found in a visible scope.

        Args:
            text: Triton text with ``{i}`` for each of ``exprs``.
            tiles: The tile dimensions that it depends on, which tell its scope.
            *exprs: Index expressions of the text.
        """
        key = (text, exprs)
        if not any(key in scope.values for scope in self.visible_scopes()):
            self.add_line(text, tiles, *exprs)
            self.scope(tiles).values[key] = Value("", torch.bool, tiles)

    def wait(self) -> None:
        """Note that threads wait for each other in what is written next."""
        if self.first_wait is None:
            self.first_wait = len(self.top.lines)
        if self.open_loop_scope is not None:
            self.last_wait = len(self.open_loop_scope.lines) + 1

    def new_name(self, prefix: str = "v") -> str:
        """Return the name of a new variable, which is none of the integers that a kernel takes."""
        name = f"{prefix}{self._name_count}"
        self._name_count += 1
        assert not is_name(name), name
        return name

    def define(self, text: str, dtype: torch.dtype, tiles: frozenset[str], *exprs: sympy.Expr, comment: str = "") -> Value:
        """Return a variable that holds an expression; an expression that is visible already is not computed again.

        Args:
            text: Triton text with ``{i}`` for each of ``exprs``.
            dtype: The dtype of the value. 16-bit floats are all held in float32, so one variable can serve two of them.
            tiles: The tile dimensions that the value varies along.
            exprs: Index expressions of the text.
            comment: A comment for the line.
        """
        key = (text, exprs)
        for scope in self.visible_scopes():
            if key in scope.values:
                return replace(scope.values[key], dtype=dtype)
        value = Value(self.new_name(), dtype, tiles)
        scope = self.scope(tiles)
        scope.lines.append(Line(f"{value.name} = {text}", exprs, comment, tiles))
        scope.values[key] = value
        return value
