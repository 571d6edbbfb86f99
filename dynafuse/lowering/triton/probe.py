"""A dry run of the emitter: what a spec's kernel reads, writes and computes, and along which axes each of that varies.

Worked example: of ``x * rsqrt(v[:, None])`` over axes 0 and 1 the probe notes that ``rsqrt`` varies along axis 0 alone and
``mul`` along both: where a tile has several columns, ``rsqrt`` is computed once for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import sympy
import torch

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import names_of
from dynafuse.lowering.triton.draws import OF_FOURS
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.ops import Index, Value
from dynafuse.ops.literals import opmath

FUNCTION = 12.0  # instructions of a function of the math library outside of an op
BRANCH = 16.0  # the least of one that branches
QUICK_SHARE = 0.5  # of an op's instructions, which it takes with functions of ``libm_quick``
DRAW = 80.0  # of a random number: products of 32 bits with 64 count twice
SHARED_DRAW = 25.0  # the same where four neighbours share a block of words
SINGLE = ("lm.maximum(", "lm.minimum(", "lm.neg(")  # functions that are one instruction
WIDE = 2.0  # instructions of 32 bits for one of 64
WIDE_DIVISION = 16.0
NAME = re.compile(r"[A-Za-z_]\w*")
CALLED = re.compile(r"\blm\.(\w+)\(")
# Functions of which ptxas makes branches, so that it computes them for each of neighbours that load the same.
BRANCHING = frozenset({"acosh", "asinh", "atan", "atan2", "cos", "erf", "erfinv", "floor_div", "fmod",
                       "gelu_tanh_slope", "lgamma", "logit", "mish_slope", "pow", "reciprocal", "remainder", "sigmoid",
                       "silu_slope", "sin", "sinc", "sinh", "sqrt", "tan", "tanh"})
DIVISION = 3.0  # a multiplication, shifts and corrections


@dataclass(frozen=True)
class Work:
    """Something that is computed: instructions per element, the axes that it varies along, the conditions under which it
    is needed, and whether each of neighbours computes it though they have loaded the same."""

    instructions: float
    axes: frozenset[int]
    masks: tuple[str, ...]
    is_apart: bool
    times: int = 1  # how often it is computed, of one line: in a loop


class Condition(NamedTuple):
    """A comparison of indices: the axes that decide it, and the bound where one is compared with a number.

    It holds below that, else from there on.
    """

    axes: frozenset[int]
    bound: int | None = None
    is_below: bool = True


class Probe(Emitter):
    """An emitter whose tile dimensions are the axes, one each, and which notes what is computed."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec, [str(k) for k in range(len(spec.axes))])
        self.lanes = tuple(self.axes)  # as they lie in memory most often
        self.work: list[Work] = []
        self.from_memory: set[str] = set()  # names of what is loaded, or computed from that
        self.places: dict[str, frozenset[int]] = {}  # axes whose own indices a value is computed with: compared, say
        self._apart: set[str] = set()  # names of these that neighbours compute each, or from what they compute so
        self._floats: set[str] = set()  # names of those
        self.by_floats: set[str] = set()  # names of integers that come of floats: Triton does not know which are the same

    def define(self, text: str, dtype: torch.dtype, tiles: frozenset[str], *exprs: sympy.Expr, comment: str = "") -> Value:
        """Return a variable that holds an expression, and note what it takes to compute.

        Args:
            text, dtype, tiles, exprs: As for :meth:`Scopes.define`.
            comment: A comment for the line; one with a comment is an op's own.
        """
        names_before = self._name_count
        value = super().define(text, dtype, tiles, *exprs, comment=comment)
        names = {*NAME.findall(text), *(symbol.name for expr in exprs for symbol in expr.free_symbols)}
        is_loaded = text.startswith("tl.load(")
        places = frozenset(k for k, axis in enumerate(self.axes) if axis.name in names)
        if places and not is_loaded:
            self.places[value.name] = places
        if is_loaded or not self.from_memory.isdisjoint(names):
            self.from_memory.add(value.name)
            if not is_loaded and (_branches(text) or not self._apart.isdisjoint(names)):
                self._apart.add(value.name)
        is_of_floats = not (is_loaded or self._floats.isdisjoint(names))
        if dtype.is_floating_point:
            self._floats.add(value.name)
        elif is_of_floats or not self.by_floats.isdisjoint(names):
            self.by_floats.add(value.name)
        if self._name_count > names_before:
            instructions = self._instructions(text, dtype, bool(comment))
            if instructions:
                is_apart = value.name in self._apart
                self.work.append(Work(instructions, axes_of(tiles), names_of(self.masks), is_apart, self.times))
        return value

    def _looped(self, position: int, index: Index, steps: int) -> Value:
        """Return the value of an op that a loop adds up: of its steps one is written, which counts as often as there are."""
        row, call = self.calls[position]
        assert row.loop is not None, row
        outer, self.times = self.times, steps
        start = self.constant(0, opmath(call.dtype))
        value = row.loop.step(self, call, index, sympy.Integer(steps // 2), start)
        self.times = outer
        return self._round_result(position, self.cast(value, call.dtype))

    def _instructions(self, text: str, dtype: torch.dtype, is_op: bool) -> float:
        """Return about how many instructions a line takes. Loads are priced as accesses, other names cost nothing."""
        if text.isidentifier() or text.startswith(("tl.load(", "tl.full(")):
            return 0.0
        if "lm.rand" in text:
            return SHARED_DRAW if f"{OF_FOURS}(" in text else DRAW
        if dtype is torch.int64:
            return WIDE_DIVISION if "%" in text or "//" in text else WIDE
        least = BRANCH if _branches(text) else 0.0
        if is_op and self._current_op is not None:
            row, call = self.calls[self._current_op]
            return max(least, row.flops_in(call) * (QUICK_SHARE if "lq." in text else 1.0))
        return max(least, FUNCTION if "lm." in text and not text.startswith(SINGLE) else 1.0)

    def conditions(self) -> dict[str, Condition]:
        """Return comparisons of indices, by name."""
        return {name: self._condition(left - right, op) for name, (left, op, right) in self.comparisons.items()}

    def _condition(self, difference: sympy.Expr, op: str) -> Condition:
        axes = self.axes_along(difference)
        symbols = difference.free_symbols
        if len(symbols) == len(axes) == 1 and op in ("<", ">="):
            bound = sympy.expand(next(iter(symbols)) - difference)
            return Condition(axes, int(bound) if bound.is_Integer else None, op == "<")
        return Condition(axes)

    def axes_along(self, expr: sympy.Expr) -> frozenset[int]:
        """Return the axes that an index expression varies along, by way of loaded indices too."""
        return axes_of(self.tiles(expr))


def _branches(text: str) -> bool:
    """Return whether a line calls a function that branches."""
    return not BRANCHING.isdisjoint(CALLED.findall(text))


def axes_of(tiles: Iterable[str]) -> frozenset[int]:
    """Return the axes that a probe's tile dimensions stand for."""
    return frozenset(int(tile) for tile in tiles if tile.isdigit())
