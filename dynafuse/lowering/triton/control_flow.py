"""Values that depend on a condition: masks, and branches where a program's whole tile takes the same side.

A choice between two values loads each only where it is needed. If its condition has one outcome all over a program's tile,
the program branches and computes only the side that is taken. Otherwise both sides are computed under masks, and one is
selected for every element.

Worked example: in blocks of 1024 elements of ``cat([x, y])`` over ``[2048, 128]`` each, every block lies in ``x`` or in
``y``: ``if x1_first < 2048:`` begins the first branch, which loads ``x`` without a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.lowering.triton.pieces import is_begin
from dynafuse.lowering.triton.scopes import PER_STEP, Line, Scope, Scopes
from dynafuse.lowering.triton.text import escape, is_literal, wrap
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import coarsened, decide, expanded, known_nonnegative, symbols_of
from dynafuse.ops.literals import literal, opmath, triton_type

Comparison = tuple[sympy.Expr, str, sympy.Expr]
"""Left, operator, right."""

REDUCED = "reduced"
"""Begins the keys of what ops have made of whole rows among a scope's values; an op follows."""

OPPOSITES = {"<": ">=", ">=": "<", "<=": ">", ">": "<="}


class ControlFlow(Scopes):
    """Comparisons of index expressions, and the masks and branches that are made from them."""

    def __init__(self, loop: str | None = None) -> None:
        super().__init__(loop)
        self.tile_of: dict[sympy.Symbol, frozenset[str]] = {}  # the tile dimensions that an index symbol varies along
        self.tile_dims: Mapping[str, int] = {}  # which dimension of a tile that has two each tile dimension is
        # How many values of an axis a tile holds, for axes of which every tile begins at a multiple of that many.
        self.values_per_tile: dict[sympy.Symbol, int] = {}
        self.cuts: Mapping[sympy.Symbol, frozenset[int]] = {}  # where tiles along an axis begin anew
        self.has_asserts = False  # whether the kernel checks something on the device
        self.masks: tuple[Value, ...] = ()  # the conditions under which loads are made now
        self.comparisons: dict[str, Comparison] = {}  # comparisons of index expressions by name
        self._names: dict[Comparison, str] = {}  # the same the other way round
        self._opposites: dict[str, str] = {}  # conditions by name, each with the name of its opposite
        self._joined: dict[str, tuple[Value, ...]] = {}  # comparisons that hold together, by the name of their conjunction
        self._branch_comparisons: tuple[Comparison, ...] = ()  # what holds in the open branches
        self._uniform_conditions: dict[str, Line] = {}  # bool values with one outcome all over a tile, by name

    def tiles(self, expr: sympy.Expr) -> frozenset[str]:
        """Return the tile dimensions that an index expression varies along."""
        return frozenset[str]().union(*(self.tile_of.get(symbol, frozenset()) for symbol in symbols_of(expr)))

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        """Return a literal of a dtype."""
        return Value(literal(value, dtype), dtype)

    def as_tensor(self, value: Value) -> Value:
        """Return a value as a Triton tensor: a bare number has no methods, and Triton takes it for float32."""
        if not is_literal(value):
            return value
        return self.define(f"tl.full([], {value}, {triton_type(opmath(value.dtype))})", value.dtype, value.tiles)

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        """Return the outcome of a comparison of index expressions: a literal where their ranges decide it.

        Args:
            left, right: The index expressions.
            op: One of ``< <= > >= ==``.
        """
        left, right = sympy.sympify(left), sympy.sympify(right)
        if op in ("<", ">="):
            left, right = coarsened(left, right)
        outcome = decide(left, op, right)
        if outcome is None:
            outcome = self._follows(left, op, right)
        if outcome is not None:
            return Value(str(outcome), torch.bool)
        text = f"{{0}} {op} {{1}}"
        condition = self.define(text, torch.bool, self.tiles(left) | self.tiles(right), left, right)
        self.comparisons[condition.name] = left, op, right
        self._names[left, op, right] = condition.name
        opposite = self._names.get((left, OPPOSITES.get(op, ""), right))
        if opposite:
            self._note_opposites(condition.name, opposite)
        if self._is_uniform(left - right, op):
            self._uniform_conditions[condition.name] = Line(text, (left, right))
        return condition

    def _follows(self, left: sympy.Expr, op: str, right: sympy.Expr) -> bool | None:
        """Return the outcome of a comparison if the masks and branches around it decide it, else None."""
        around = [self.comparisons[mask.name] for mask in self.masks if mask.name in self.comparisons]
        around += self._branch_comparisons
        if op not in ("<", ">=") or not around:
            return None
        difference = expanded(left - right)
        for known_left, known_op, known_right in around:
            known = expanded(known_left - known_right)
            if known_op in ("<", ">=") and known.free_symbols == difference.free_symbols:
                gap = difference - known if known_op == ">=" else known - difference
                if known_nonnegative(sympy.expand(gap)):
                    return op == known_op
        return None

    def _is_uniform(self, difference: sympy.Expr, op: str) -> bool:
        """Return whether ``difference`` compares with 0 alike all over a tile: then its first element tells."""
        extents = [self.values_per_tile.get(symbol, 0) for symbol in difference.free_symbols]
        if all(extent == 1 for extent in extents):
            return True
        axis = next(iter(difference.free_symbols))
        bound = sympy.expand(axis - difference)
        if len(extents) > 1 or op not in ("<", ">=") or not bound.is_Integer:
            return False
        return is_begin(int(bound), self.cuts.get(axis, ()), extents[0])

    def masks_at(self, tiles: frozenset[str], expr: sympy.Expr = sympy.S.Zero) -> tuple[Value, ...]:
        """Return the masks that decide whether what varies along tile dimensions, at an index expression, is needed.

        A bound of another axis does not: some element within it needs the same. So a value of a row is loaded and computed
        once a row, though only the first of its elements need it.
        """
        def is_of_others(mask: Value) -> bool:
            left, _, right = self.comparisons[mask.name]
            axes = (left.free_symbols | right.free_symbols) & self.tile_of.keys()
            return bool(axes.isdisjoint(expr.free_symbols))

        return tuple(mask for mask in self.masks
                     if mask.tiles <= tiles or mask.name not in self.comparisons or not is_of_others(mask))

    def of_whole_row(self, op: int, target: str, compute: Callable[[int], Value] | None) -> Value:
        """Return the result of an op that takes in whole rows, whichever elements are asked for: what was kept, if it was.

        Args:
            op: The op's position in the spec.
            target: Its name.
            compute: Computes and keeps it; None where it cannot be known yet.

        Raises:
            LoweringError: It cannot be known yet.
        """
        for scope in self.visible_scopes():
            if (REDUCED, op) in scope.values:
                return scope.values[REDUCED, op]
        if compute is None:
            raise LoweringError(target, "its result is needed before it is complete")
        outer, self.masks = self.masks, ()
        value = compute(op)
        self.masks = outer
        return value

    def keep_reduced(self, op: int, value: Value) -> Value:
        """Keep what an op has made of whole rows for whoever asks where its scope is visible, and return it."""
        self.scope(value.tiles).values[REDUCED, op] = value
        return value

    def masked(self, condition: Value, body: Callable[[], Value], other: bool | int | float) -> Value:
        """Return ``body()`` where a condition holds, else a number.

        Args:
            condition: A bool.
            body: Makes the value; it loads under the condition as a mask.
            other: The number, in the dtype of that value.
        """
        return self._choose(condition, body, lambda dtype: self.constant(other, dtype))

    def choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        """Return ``if_true()`` where a condition holds, else ``if_false()``.

        Args:
            condition: A bool.
            if_true, if_false: Make the values; each loads only where it is needed.
        """
        if condition.name == "False":
            return if_false()
        return self._choose(condition, if_true, lambda _: if_false())

    def _choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[torch.dtype], Value]) -> Value:
        """Return one of two values; ``if_false`` is given the dtype of the other one."""
        if condition.name == "True":
            return if_true()
        if condition.name == "False":
            return if_false(self._dtype_of(if_true))
        if condition.name in self._uniform_conditions and (self.loop is None or self.open_loop_scope is not None):
            chosen = self._branch_on(condition, if_true, if_false)
            if chosen is not None:
                return chosen
        left = self._under_mask(condition, if_true)
        right = self._under_mask(self._negate(condition), lambda: if_false(left.dtype))
        if left.name == right.name:
            return left
        tiles = condition.tiles | left.tiles | right.tiles
        if is_literal(left) and is_literal(right):  # one of them says the dtype
            left = self.as_tensor(left)
        return self.define(f"tl.where({condition}, {left}, {right})", left.dtype, tiles)

    def _dtype_of(self, body: Callable[[], Value]) -> torch.dtype:
        """Return the dtype of a value that nothing computes: its lines are dropped, and what they check."""
        asserts = self.has_asserts
        _, value = self._in_branch(Line("if False:"), body, None)
        self.has_asserts = asserts
        return value.dtype

    def _under_mask(self, condition: Value, body: Callable[[], Value]) -> Value:
        """Return ``body()``, whose loads are masked by ``condition`` and by the masks that it does not imply."""
        outer, self.masks = self.masks, (*(mask for mask in self.masks if not self._implies(condition, mask)), condition)
        value = body()
        self.masks = outer
        return value

    def _implies(self, condition: Value, other: Value) -> bool:
        """Return whether ``condition`` bounds the same expression as ``other``, at least as tightly."""
        if condition.name not in self.comparisons or other.name not in self.comparisons:
            return False
        expr, op, bound = self.comparisons[condition.name]
        other_expr, other_op, other_bound = self.comparisons[other.name]
        if (expr, op) != (other_expr, other_op) or not (bound.is_Integer and other_bound.is_Integer):
            return False
        if op in (">", ">="):
            return bool(bound >= other_bound)
        return op in ("<", "<=") and bool(bound <= other_bound)

    def _negate(self, condition: Value) -> Value:
        """Return the opposite of a condition, as a comparison where the condition is one."""
        left, op, right = self.comparisons.get(condition.name, (sympy.S.Zero, "", sympy.S.Zero))
        if op in OPPOSITES:
            opposite = self.compare(left, OPPOSITES[op], right)
        else:
            opposite = self.expression("{0} == 0", torch.bool, condition)
            self._note_opposites(condition.name, opposite.name)
        return opposite

    def _note_opposites(self, condition: str, other: str) -> None:
        """Note that always one of two conditions holds, given by their names."""
        self._opposites |= {condition: other, other: condition}

    def common(self, masks: tuple[Value, ...], others: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Return those of ``masks`` under which something is needed that either all of them ask for or all ``others``.

        None if it is needed under fewer conditions than any of ``masks`` tell.
        """
        names, other_names = {mask.name for mask in masks}, {mask.name for mask in others}
        if all(mask.name in other_names or any(self._implies(other, mask) for other in others) for mask in masks):
            return masks
        if other_names <= names:
            return tuple(mask for mask in masks if mask.name in other_names)
        for mask in masks:
            opposite = self._opposites.get(mask.name)
            if opposite in other_names and names - {mask.name} == other_names - {opposite}:
                return tuple(other for other in masks if other.name != mask.name)  # which may be there twice
        return None

    def either(self, masks: Sequence[Value], others: Sequence[Value]) -> tuple[Value, tuple[Value, ...]] | None:
        """Return what tells which of two things is needed, of which never both are, and the masks under which one is.

        None if no comparison of indices tells that alone.

        Args:
            masks: The conditions under which the first is needed; the one that tells is among these.
            others: Those of the second.
        """
        masks, others = self._parts(masks), self._parts(others)
        by_opposite = {self._opposites.get(other.name): other for other in others}
        for mask in masks:
            opposite = by_opposite.get(mask.name)
            if opposite is None or mask.name not in self.comparisons:
                continue
            rest = tuple(m for m in masks if m is not mask)
            other_rest = tuple(m for m in others if m is not opposite)
            if self._alike(rest, other_rest, opposite):
                return mask, rest
            if self._alike(rest, other_rest, mask):
                return mask, other_rest
        return None

    def has_opposite(self, masks: Sequence[Value]) -> bool:
        """Return whether something may be needed exactly where one of some masks does not hold."""
        return any(mask.name in self._opposites for mask in self._parts(masks))

    def _parts(self, masks: Sequence[Value]) -> list[Value]:
        """Return masks with comparisons in place of what these make together."""
        return [part for mask in masks for part in self._joined.get(mask.name, (mask,))]

    def _alike(self, masks: tuple[Value, ...], others: tuple[Value, ...], condition: Value) -> bool:
        """Return whether masks let the same through as others do, where a condition holds."""
        names, other_names = ({mask.name for mask in group} for group in (masks, others))
        return all(mask.name in names & other_names or self._implies(condition, mask) for mask in (*masks, *others))

    def _branch_on(
        self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[torch.dtype], Value]
    ) -> Value | None:
        """Return the value of an ``if`` that a program evaluates once for its whole tile; the other side is not computed.

        None in a loop that neither side varies along: then it is better computed before the loop.
        """
        line, comparison = self._uniform_conditions[condition.name], self.comparisons.get(condition.name)
        opposite = None
        if comparison and comparison[1] in OPPOSITES:
            opposite = (comparison[0], OPPOSITES[comparison[1]], comparison[2])
        true_scope, left = self._in_branch(Line(f"if {line.text}:", line.exprs), if_true, comparison)
        false_scope, right = self._in_branch(Line("else:"), lambda: if_false(left.dtype), opposite)
        if self.loop is not None and self.loop not in left.tiles | right.tiles:
            return None
        chosen = Value(self.new_name(), left.dtype, self._all_tiles - PER_STEP)
        for scope, value in ((true_scope, left), (false_scope, right)):
            scope.lines.append(Line(f"{chosen.name} = {self._broadcast_text(value, left.dtype)}"))
        self.scope(chosen.tiles).lines.extend((true_scope, false_scope))
        return chosen

    def _in_branch(self, header: Line, body: Callable[[], Value], holds: Comparison | None) -> tuple[Scope, Value]:
        """Return a new branch with ``body()``, which is computed in it; ``holds`` is a comparison that is true there."""
        scope = Scope(header=header, is_branch=True)
        outer = self._branch_comparisons
        self._branch_comparisons = (*outer, holds) if holds else outer
        self.open_branches.append(scope)
        value = body()
        self.open_branches.pop()
        self._branch_comparisons = outer
        return scope, value

    @property
    def _all_tiles(self) -> frozenset[str]:
        return frozenset[str]().union(*self.tile_of.values())

    def _broadcast_text(self, value: Value, dtype: torch.dtype) -> str:
        """Return the text of a value in the shape of the whole tile."""
        tiles = sorted(self._all_tiles - PER_STEP, key=lambda tile: self.tile_dims.get(tile, 0))
        shape = "[" + ", ".join(f"{tile.upper()}BLOCK" for tile in tiles) + "]"
        if is_literal(value):
            return f"tl.full({shape}, {value}, {triton_type(opmath(dtype))})"
        return value.name if value.tiles >= set(tiles) else f"tl.broadcast_to({value}, {shape})"

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        """Return the value of a Triton expression over operands.

        Args:
            text: The expression, with ``{0}``, ``{1}`` … for the operands.
            dtype: The dtype of the value.
            *operands: The operands.
        """
        takes_tensors = "lm." in text or all(map(is_literal, operands))  # device functions do, and so does what is done next
        operands = tuple(self.as_tensor(v) if takes_tensors or v.dtype is torch.float64 else v for v in operands)
        tiles = frozenset[str]().union(*(v.tiles for v in operands))
        result = self.define(escape(text.format(*(wrap(v.name) for v in operands))), dtype, tiles)
        if dtype is torch.bool and operands and all(v.name in self._uniform_conditions for v in operands):
            self._uniform_conditions[result.name] = _combine(text, [self._uniform_conditions[v.name] for v in operands])
        if text == "{0} & {1}" and all(v.name in self.comparisons or v.name in self._joined for v in operands):
            self._joined[result.name] = tuple(part for v in operands for part in self._joined.get(v.name, (v,)))
        return result


def _combine(text: str, conditions: Sequence[Line]) -> Line:
    """Return conditions as one: ``{0} & {1}`` of ``{0} < {1}`` and ``{0} >= {1}`` is ``({0} < {1}) & ({2} >= {3})``."""
    operands: list[str] = []
    exprs: tuple[sympy.Expr, ...] = ()
    for condition in conditions:
        places = (f"{{{k}}}" for k in range(len(exprs), len(exprs) + len(condition.exprs)))
        operands.append(f"({condition.text.format(*places)})")
        exprs += condition.exprs
    return Line(text.format(*operands), exprs)
