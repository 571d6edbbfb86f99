"""Values that are one thing or another: masks, and branches where a whole tile takes the same side.

A choice between two values loads each only where it is needed. If its condition comes out alike all over a program's tile,
the program branches, and what is not chosen is not computed either; otherwise both are computed under masks, and one is
selected.

Worked example: in blocks of 1024 elements of ``cat([x, y])`` over ``[2048, 128]`` each, every block lies in ``x`` or in
``y``: ``if x1_first < 2048:`` begins the first branch, which loads ``x`` without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sympy
import torch

from dynafuse.lowering.triton.scopes import Line, Scope, Scopes
from dynafuse.lowering.triton.text import escape, is_literal, wrap
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import limits
from dynafuse.ops.literals import literal, opmath, triton_type

OPPOSITES = {"<": ">=", ">=": "<", "<=": ">", ">": "<="}


class Choices(Scopes):
    """Comparisons of index expressions, and what depends on them."""

    def __init__(self, loop: str | None = None) -> None:
        super().__init__(loop)
        self.tile_of: dict[sympy.Symbol, frozenset[str]] = {}  # the tile dimensions that an index symbol varies along
        self.grain: dict[sympy.Symbol, int] = {}  # values of an axis in a tile, where tiles begin at multiples of that many
        self.masks: tuple[Value, ...] = ()
        self._comparisons: dict[str, tuple[sympy.Expr, str, sympy.Expr]] = {}  # of index expressions, by name
        self._conditions: dict[str, Line] = {}  # bool values that are equal all over a program's tile, by name

    def tiles(self, expr: sympy.Expr) -> frozenset[str]:
        """The tile dimensions that an index expression varies along."""
        found: frozenset[str] = frozenset()
        for s in expr.free_symbols:
            found |= self.tile_of.get(s, frozenset())
        return found

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        """A literal."""
        return Value(literal(value, dtype), dtype)

    def held(self, value: Value) -> Value:
        """A literal as a tensor: Triton takes a bare number for float32, and a bare number has no methods."""
        if not is_literal(value):
            return value
        return self.define(f"tl.full([], {value}, {triton_type(opmath(value.dtype))})", value.dtype, value.tiles)

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        """A comparison of index expressions."""
        left, right = sympy.sympify(left), sympy.sympify(right)
        decided = _decide(left, op, right)
        if decided is not None:
            return Value(str(decided), torch.bool)
        text = f"{{0}} {op} {{1}}"
        made = self.define(text, torch.bool, self.tiles(left) | self.tiles(right), left, right)
        self._comparisons[made.name] = left, op, right
        if self._uniform(left - right, op):
            self._conditions[made.name] = Line(text, (left, right))
        return made

    def _uniform(self, difference: sympy.Expr, op: str) -> bool:
        """Whether a comparison with 0 comes out alike all over a tile: then its first element tells."""
        grains = [self.grain.get(s, 0) for s in difference.free_symbols]
        if all(grain == 1 for grain in grains):
            return True
        axis = next(iter(difference.free_symbols))
        start = sympy.expand(axis - difference)
        return bool(len(grains) == 1 and grains[0] and op in ("<", ">=") and start.is_Integer and start % grains[0] == 0)

    def masked(self, condition: Value, body: Callable[[], Value], other: bool | int | float) -> Value:
        """``body()`` under a mask, ``other`` elsewhere."""
        return self._choose(condition, body, lambda dtype: self.constant(other, dtype))

    def choose(self, condition: Value, over: Callable[[], Value], under: Callable[[], Value]) -> Value:
        """``over()`` under a mask, ``under()`` under its opposite."""
        if condition.name == "False":
            return under()
        return self._choose(condition, over, lambda _: under())

    def _choose(self, condition: Value, over: Callable[[], Value], under: Callable[[torch.dtype], Value]) -> Value:
        if condition.name == "True":
            return over()
        if condition.name in self._conditions:
            return self._branched(self._conditions[condition.name], over, under)
        left = self._under(condition, over)
        right = self._under(self._opposite(condition), lambda: under(left.dtype))
        if left.name == right.name:
            return left
        tiles = condition.tiles | left.tiles | right.tiles
        return self.define(f"tl.where({condition}, {left}, {right})", left.dtype, tiles)

    def _under(self, condition: Value, body: Callable[[], Value]) -> Value:
        outer, self.masks = self.masks, (*(m for m in self.masks if not self._implies(condition, m)), condition)
        made = body()
        self.masks = outer
        return made

    def _implies(self, condition: Value, other: Value) -> bool:
        """Whether a condition says all that another does: a bound of the same expression that is as tight."""
        if condition.name not in self._comparisons or other.name not in self._comparisons:
            return False
        (left, op, bound), (same, operator, looser) = self._comparisons[condition.name], self._comparisons[other.name]
        return bool((left, op) == (same, operator) and bound.is_Integer and looser.is_Integer
                    and (bound >= looser if op in (">", ">=") else bound <= looser if op in ("<", "<=") else False))

    def _opposite(self, condition: Value) -> Value:
        if condition.name in self._comparisons:
            left, op, right = self._comparisons[condition.name]
            if op in OPPOSITES:
                return self.compare(left, OPPOSITES[op], right)
        return self.expression("{0} == 0", torch.bool, condition)

    def _branched(self, condition: Line, over: Callable[[], Value], under: Callable[[torch.dtype], Value]) -> Value:
        """A choice that a program makes once for its whole tile: what is not chosen is neither loaded nor computed."""
        first, left = self._branch(Line(f"if {condition.text}:", condition.exprs), over)
        second, right = self._branch(Line("else:"), lambda: under(left.dtype))
        made = Value(self.name(), left.dtype, self._everywhere)
        for scope, value in ((first, left), (second, right)):
            scope.lines.append(Line(f"{made.name} = {self._spread(value, left.dtype)}"))
        self.scope(made.tiles).lines.extend((first, second))
        return made

    def _branch(self, header: Line, body: Callable[[], Value]) -> tuple[Scope, Value]:
        scope = Scope(header=header, branch=True)
        self.branches.append(scope)
        made = body()
        self.branches.pop()
        return scope, made

    @property
    def _everywhere(self) -> frozenset[str]:
        return frozenset[str]().union(*self.tile_of.values())

    def _spread(self, value: Value, dtype: torch.dtype) -> str:
        """A value over the whole tile."""
        shape = "[" + ", ".join(f"{tile.upper()}BLOCK" for tile in sorted(self._everywhere, reverse=True)) + "]"
        if is_literal(value):
            return f"tl.full({shape}, {value}, {triton_type(opmath(dtype))})"
        return value.name if value.tiles == self._everywhere else f"tl.broadcast_to({value}, {shape})"

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        """A value from a Triton expression over operands. A literal of float64 is held: Triton takes it for float32."""
        operands = tuple(self.held(v) if v.dtype is torch.float64 else v for v in operands)
        tiles = frozenset[str]().union(*(v.tiles for v in operands))
        made = self.define(escape(text.format(*(wrap(v.name) for v in operands))), dtype, tiles)
        if dtype is torch.bool and operands and all(v.name in self._conditions for v in operands):
            self._conditions[made.name] = _combined(text, [self._conditions[v.name] for v in operands])
        return made


def _combined(text: str, conditions: Sequence[Line]) -> Line:
    """Conditions in one: ``{0} & {1}`` of ``{0} < {1}`` and ``{0} >= {1}`` is ``({0} < {1}) & ({2} >= {3})``."""
    parts: list[str] = []
    exprs: tuple[sympy.Expr, ...] = ()
    for condition in conditions:
        places = (f"{{{k}}}" for k in range(len(exprs), len(exprs) + len(condition.exprs)))
        parts.append(f"({condition.text.format(*places)})")
        exprs += condition.exprs
    return Line(text.format(*parts), exprs)


def _decide(left: sympy.Expr, op: str, right: sympy.Expr) -> bool | None:
    """The outcome of a comparison that the ranges of the index symbols decide."""
    low, high = limits(sympy.expand(left - right))
    if op == "==" and (left - right).is_number:
        return bool(left == right)
    if op not in ("<", ">="):
        return None
    if low is not None and low.is_nonnegative:
        return op == ">="
    return op == "<" if high is not None and high.is_negative else None
