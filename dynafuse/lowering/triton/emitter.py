"""Emits the body of one kernel: values on demand, each once, in the scope where what it depends on is known.

Index expressions stay symbolic until the text is printed: only then is it known which axes every access treats as one,
and such axes are merged, so that a kernel over contiguous tensors has no division in it.

Worked example, ``x + y.t()`` over ``[i, j]``: the value of ``add`` at ``(i, j)`` asks ``x`` at ``(i, j)`` and ``y`` at
``(j, i)``; the lines are ``v0 = tl.load(in0 + (8*i + j))``, ``v1 = tl.load(in1 + (8*j + i))``, ``v2 = v0 + v1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ir import COUNT, Dims, Layout, Ref, Spec
from dynafuse.lowering.rounding import Rounding
from dynafuse.lowering.triton.control_flow import Choices
from dynafuse.lowering.triton.guards import guarded_inputs
from dynafuse.lowering.triton.promotion import compute_dtype
from dynafuse.lowering.triton.ranges import Range, Ranges
from dynafuse.lowering.triton.text import escape, is_literal, size_text, wrap
from dynafuse.lowering.triton.unrolled import unrolled
from dynafuse.ops import Call, Context, Index, Kind, Row, Value
from dynafuse.ops.indexing_math import symbol
from dynafuse.ops.literals import Number, Scalar, conversion, literal, number, opmath, triton_type
from dynafuse.ops.promotion import comparand


@dataclass(frozen=True)
class Access:
    """A load or store: which tensor, its layout, the offset in elements, the name of its line."""

    tensor: str
    layout: Layout
    offset: sympy.Expr
    store: bool


class Emitter(Choices):
    """Builds values for one kernel of a spec (implements :class:`dynafuse.ops.table.Builder`).

    ``tile_of`` maps every axis to the tile dimension that walks it (``x``, ``y`` or ``r``); ``loop`` is the tile
    dimension that a loop walks, if any: a value that varies along it lives in the loop, any other outside.
    """

    def __init__(self, spec: Spec, tile_of: Sequence[str], loop: str | None = None, round_like_eager: bool = False):
        super().__init__(loop)
        self.spec = spec
        self.rounding = Rounding(spec, round_like_eager)
        self.narrow: dict[tuple[str, torch.dtype], str] = {}  # what rounded values were before they were widened again
        self.axes = [symbol(f"i{k}", axis.size) for k, axis in enumerate(spec.axes)]
        self.tile_of.update({axis: frozenset({tile}) for axis, tile in zip(self.axes, tile_of, strict=True)})
        self.accesses: list[Access] = []
        self.numbers: set[str] = set()  # arguments of the kernel that it uses
        self.reduced: dict[int, Value] = {}  # reductions whose result is known
        self.replaced: dict[int, Value] = {}  # ops that stand for something else, at any index
        self.on_reduction: Callable[[int], Value] | None = None
        self.single = frozenset("xyr") - frozenset(tile_of)  # tile dimensions that walk no axis: one point
        self.exact: frozenset[str] = frozenset()  # tile dimensions that never reach beyond their end: no mask
        self.calls = self.rounding.calls
        self.guards = guarded_inputs(spec)
        self.position: int | None = None  # the op that is being lowered
        self.checks = bool(dict(spec.options).get("check_indices", True))
        self.asserts = False  # whether something is checked on the device
        self.ranges = Ranges(spec, self.calls)

    # ------------------------------------------------------------------ indices

    def index(self, dims: Dims) -> Index:
        """The index of a tensor whose dimensions run over ``dims``."""
        return tuple(self._flat(axes) for axes in dims)

    def _flat(self, axes: Iterable[int]) -> sympy.Expr:
        flat: sympy.Expr = sympy.S.Zero
        for k in axes:
            flat = flat * self.spec.axes[k].size + self.axes[k]
        return sympy.expand(flat)

    # ------------------------------------------------------------------ values (the Builder protocol)

    def operand(self, arg: Any, index: Index) -> Value:
        """The value of an input or op at an index."""
        assert isinstance(arg, Ref), arg
        if arg.kind == "in":
            return self._input(arg.position, index)
        return self.value(arg.position, index)

    def _input(self, position: int, index: Index) -> Value:
        """An input, where it belongs to a term of a fold only if the fold has that term."""
        outer, guard = self.masks, self.guards.get(position)
        self.masks = outer if guard is None else (*outer, self._counted(guard))
        made = self.load(f"in{position}", self.spec.inputs[position], index)
        self.masks = outer
        return made

    def _counted(self, guard: int) -> Value:
        """Whether the fold has a term, alike everywhere."""
        self.numbers.add(COUNT)
        return self.define(f"{COUNT} > {guard}", torch.bool, frozenset())

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """The sizes of a tensor argument."""
        assert isinstance(arg, Ref), arg
        sizes = (self.spec.inputs if arg.kind == "in" else self.spec.ops)[arg.position].shape
        return tuple(sympy.sympify(s) for s in sizes)

    def dtype(self, arg: Any) -> torch.dtype:
        """The dtype of a tensor argument."""
        found: torch.dtype = (self.spec.inputs if arg.kind == "in" else self.spec.ops)[arg.position].dtype
        return found

    def index_value(self, expr: sympy.Expr) -> Value:
        """An index expression as an int64 value."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return Value(str(expr), torch.int64)
        text = "{0}" if self._holds_tensor(expr) else "{0} + 0"
        return self.define(f"({text}).to(tl.int64)", torch.int64, self.tiles(expr), expr)

    def _holds_tensor(self, expr: sympy.Expr) -> bool:
        return bool(self.tiles(expr)) or any(str(s) in self.spec.symbols for s in expr.free_symbols)

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        """An integer that is in range as an index."""
        index = symbol(value.name, size)
        self.tile_of[index] = value.tiles
        return index

    def picked(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False, trusted: bool = False) -> Value:
        """A loaded integer that is in range: what is not proven to be is checked where it is used."""
        value = self.held(self.cast(self.operand(arg, index), torch.int64))
        found = self.ranges.of(arg)
        if wraps and not found.at_least(sympy.S.Zero):
            value = self.define(f"tl.where({value} < 0, {value} + {{0}}, {value})", torch.int64, value.tiles, size)
        if self.checks and not trusted:
            self._check(value, size, wraps, found)
        return value

    def _check(self, value: Value, size: sympy.Expr, wraps: bool, found: Range) -> None:
        """Have a kernel stop where an index is out of range, but for what is masked off."""
        above = [] if found.at_least(-size if wraps else sympy.S.Zero) else [f"({value} >= 0)"]
        below = [] if found.below(size) else [f"({value} < {{0}})"]
        if not above + below:
            return
        assert self.position is not None
        tiles = value.tiles.union(*(mask.tiles for mask in self.masks))
        names = [mask.name for mask in self.masks] + [f"{tile}_mask" for tile in sorted(tiles - self.exact)]
        masked = f" | ~({' & '.join(names)})" if names else ""
        least, most = size_text(-size) if wraps else "0", size_text(size)
        told = f"{self.calls[self.position][1].target}: {least} <= index < {most}"
        self.once(f'lm.device_assert(({" & ".join(above + below)}){masked}, "index out of range: {told}")', tiles, size)
        self.asserts = True

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """A value in another dtype."""
        if opmath(value.dtype) is opmath(dtype):
            return Value(value.name, dtype, value.tiles)
        if is_literal(value):
            return self.constant(number(value.name, value.dtype), dtype)
        return self.define(escape(conversion(value.name, value.dtype, dtype)), dtype, value.tiles)

    # ------------------------------------------------------------------ ops

    def value(self, position: int, index: Index) -> Value:
        """The value of op ``position`` at ``index``."""
        if position in self.replaced:
            return self.replaced[position]
        key = (position, index, self.masks)
        for scope in self.visible():
            if key in scope.known:
                return scope.known[key]
        made = self._compute(position, index)
        self.scope(made.tiles).known[key] = made
        return made

    def _compute(self, position: int, index: Index) -> Value:
        outer, self.position = self.position, position
        made = self._lowered(position, index)
        self.position = outer
        return made

    def _lowered(self, position: int, index: Index) -> Value:
        row, call = self.calls[position]
        if row.kind is Kind.POINTWISE:
            return self._result(position, self._pointwise(position, row, call, index))
        if row.kind is Kind.REDUCTION:
            return self._reduction(position, index)
        assert row.lower is not None, row
        self.numbers |= {arg.name for arg in call.args.values() if isinstance(arg, Number)}
        made = row.lower(self, call, index)
        return made if row.kind is Kind.VIEW else self._result(position, Value(made.name, call.dtype, made.tiles))

    def _result(self, position: int, value: Value) -> Value:
        return self._rounded(value, value.dtype) if self.rounding.result(position) else value

    def element(self, op: int, index: Index, dtype: torch.dtype) -> Value:
        """What a reduction takes in of its operand, in a dtype."""
        arg = next(iter(self.calls[op][1].args.values()))
        value = self._rounded(self.operand(arg, index), self.rounding.operand(op, 0, arg))
        return self.cast(value, dtype)

    def _rounded(self, value: Value, dtype: torch.dtype | None) -> Value:
        """A value as a dtype has it, if one is given; a literal is rounded already."""
        if dtype is None or is_literal(value):
            return value
        narrow = f"{value}.to({triton_type(dtype)})"
        made = self.define(f"{narrow}.to({triton_type(opmath(value.dtype))})", value.dtype, value.tiles)
        self.narrow[made.name, dtype] = narrow
        return made

    def _pointwise(self, position: int, row: Row, call: Call, index: Index) -> Value:
        dtype = compute_dtype(row, call, self)
        operands: list[Any] = []
        tiles: frozenset[str] = frozenset()
        for i, arg in enumerate(call.args.values()):
            if isinstance(arg, Ref):
                target = None if i in row.raw else dtype
                value = self.broadcast(arg, index, target, self.rounding.operand(position, i, arg)) if row.uses(i) else None
                tiles |= value.tiles if value else frozenset()
                operands.append(wrap(value.name) if value else "None")
            elif isinstance(arg, sympy.Expr) and not arg.is_number:
                value = self.cast(self.index_value(arg), dtype or call.dtype)
                tiles |= value.tiles
                operands.append(value.name)
            else:
                self.numbers |= {arg.name} if isinstance(arg, Number) else set()
                operands.append(comparand(row, arg, dtype))
        context = Context(opmath(dtype or call.dtype), call.dtype,
                          tuple(self.dtype(a) for a in call.args.values() if isinstance(a, Ref)))
        text = _format(row, context, operands)
        made = self.define(escape(text), call.dtype, tiles, comment=f"%{position} {call.target}")
        guard = self.spec.ops[position].guard
        if not guard:
            return made
        return self.define(f"tl.where({self._counted(guard)}, {made}, {operands[0]})", call.dtype, tiles)

    def broadcast(self, arg: Ref, index: Index, dtype: torch.dtype | None, narrow: torch.dtype | None = None) -> Value:
        """The value of an operand, rounded to ``narrow``, at an index of a shape that it broadcasts to."""
        shape = self.shape(arg)
        kept = index[len(index) - len(shape):]
        at = tuple(sympy.S.Zero if size == 1 else i for i, size in zip(kept, shape, strict=True))
        value = self._rounded(self.operand(arg, at), narrow)
        return self.held(value if dtype is None else self.cast(value, dtype))

    def _reduction(self, position: int, index: Index) -> Value:
        if position in self.reduced:
            return self.reduced[position]
        if any(op == position for op, _ in self.spec.reductions):
            if self.on_reduction is None:
                raise LoweringError(self.spec.ops[position].target, "its result is needed before it is complete")
            outer, self.masks = self.masks, ()  # it takes in its whole row, whatever of its result is wanted
            made = self.on_reduction(position)
            self.masks = outer
            return made
        return unrolled(self, position, index)

    # ------------------------------------------------------------------ memory

    def load(self, tensor: str, layout: Layout, index: Index) -> Value:
        """Load an element of a tensor; a value of a 16-bit float arrives in float32."""
        offset = sympy.expand(sum((i * s for i, s in zip(index, layout.stride, strict=True)), sympy.S.Zero))
        tiles = self.tiles(offset)
        pointer, mask, tiles = self._pointer(tensor, offset, tiles)
        if not any(a.tensor == tensor and a.offset == offset for a in self.accesses):
            self.accesses.append(Access(tensor, layout, offset, False))
        # What every row reads again stays in the cache longest.
        hint = ', eviction_policy="evict_last"' if tiles == {"r"} and "x" not in self.single else ""
        text = f"tl.load({pointer}{mask}{hint})"
        if layout.dtype is torch.bool:
            text += ".to(tl.int1)"
        elif opmath(layout.dtype) is not layout.dtype:
            text += ".to(tl.float32)"
        return self.define(text, layout.dtype, tiles, offset)

    def _pointer(
        self, tensor: str, offset: sympy.Expr, tiles: frozenset[str], along: frozenset[str] = frozenset()
    ) -> tuple[str, str, frozenset[str]]:
        """Pointer text with ``{0}`` for the offset, mask argument text, the tile dimensions of the access.

        A mask must not vary along more dimensions than the pointer, so a pointer is widened to its masks.
        """
        masks = [m.name for m in self.masks]
        wide = tiles.union(along, *(m.tiles for m in self.masks))
        widen = "".join(f" + {tile}_zero" for tile in sorted(wide - tiles))
        masks += [f"{tile}_mask" for tile in sorted(wide - self.exact)]
        mask = f", {' & '.join(masks)}" if masks else ""
        return f"{tensor} + ({{0}}{widen})", mask, wide

    def store(self, tensor: str, layout: Layout, index: Index, value: Value, every: frozenset[str], barrier: bool) -> None:
        """Store a value, converted to the tensor's dtype, at an index."""
        offset = sympy.expand(sum((i * s for i, s in zip(index, layout.stride, strict=True)), sympy.S.Zero))
        tiles = self.tiles(offset)
        tiles |= value.tiles & self.single
        if not value.tiles <= tiles:
            detail = f"stored along {sorted(tiles)}, varies along {sorted(value.tiles)}"
            raise LoweringError(f"the store of {tensor}", detail)
        widen = value.tiles & self.single
        pointer, mask, tiles = self._pointer(tensor, offset, tiles - widen, widen)
        self.accesses.append(Access(tensor, layout, offset, True))
        text = self._stored(value, layout.dtype)
        if barrier:  # other threads may still have to read what is overwritten
            self.line("tl.debug_barrier()", tiles)
        self.line(f"tl.store({pointer}, {escape(text)}{mask})", tiles, offset)

    def _stored(self, value: Value, dtype: torch.dtype) -> str:
        converted = self.cast(value, dtype)
        if is_literal(converted):
            return self.held(converted).name if dtype is torch.float64 else converted.name
        if opmath(dtype) is dtype:
            return converted.name
        return self.narrow.get((converted.name, dtype)) or f"{converted}.to({triton_type(dtype)})"


def _format(row: Row, context: Context, operands: list[Any]) -> str:
    if isinstance(row.emit, str):
        return row.emit.format(*(literal(o, context.dtype) if isinstance(o, Scalar) else o for o in operands))
    assert row.emit is not None
    return row.emit(context, *operands)
