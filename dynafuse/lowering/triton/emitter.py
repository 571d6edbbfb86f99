"""Emits the body of one kernel: each value once, when it is asked for, in the scope where its operands are known.

Index expressions stay symbolic until the text is printed. Only then is it known which axes every access treats as one;
these are merged, so that a kernel over contiguous tensors has no division in it.

Worked example, ``x + y.t()`` over ``[i, j]``: the value of ``add`` at ``(i, j)`` asks for ``x`` at ``(i, j)`` and for ``y``
at ``(j, i)``; the lines are ``v0 = tl.load(in0 + (8*i + j))``, ``v1 = tl.load(in1 + (8*j + i))``, ``v2 = v0 + v1``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ir import COUNT, Accuracy, Dims, Layout, Ref, Spec, Store
from dynafuse.lowering.rounding import Rounding
from dynafuse.lowering.triton import sums_in_tiles as sums
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.draws import OF_FOURS, counts_in_fours
from dynafuse.lowering.triton.guards import input_guards
from dynafuse.lowering.triton.memory import Memory
from dynafuse.lowering.triton.promotion import compute_dtype
from dynafuse.lowering.triton.propagation import MOST, argument, compares_with_index, comparison, propagated
from dynafuse.lowering.triton.ranges import FLOATS, Range, Ranges
from dynafuse.lowering.triton.scopes import PER_STEP, Line
from dynafuse.lowering.triton.text import escape, is_literal, quick, size_text, wrap
from dynafuse.lowering.triton.unrolled import unrolled
from dynafuse.ops import Call, Combine, Context, Index, Kind, Row, Scatter, Value, Write
from dynafuse.ops.indexing_math import known_less, known_nonnegative, symbol
from dynafuse.ops.literals import HoistedScalar, Scalar, conversion, literal, narrowed, number, opmath, triton_type
from dynafuse.ops.promotion import comparand

ROUNDING = {torch.float16: "lm.to_float16", torch.bfloat16: "lm.to_bfloat16"}
"""Functions that round a product before it goes into a sum, which LLVM would make one instruction of otherwise."""


class Emitter(Memory):
    """Builds the values of one kernel of a spec (implements :class:`dynafuse.ops.table.Builder`).

    Args:
        spec: The region.
        tile_of: For each axis of the spec, the tile dimension that walks it: ``x``, ``y`` or ``r``.
        loop: The tile dimension that the kernel's loop walks, if it has one. A value that varies along it is computed in
            the loop, any other outside.
        round_like_eager: Whether every op's result is rounded to its dtype, as in eager.
    """

    def __init__(self, spec: Spec, tile_of: Sequence[str], loop: str | None = None, round_like_eager: bool = False):
        super().__init__(spec, tile_of, loop)
        self.rounding = Rounding(spec, round_like_eager)
        self.calls = self.rounding.calls
        self.input_guards = input_guards(spec)
        self.ranges = Ranges(spec, self.calls)
        self.check_indices = bool(dict(spec.options).get("check_indices", True))
        self.lanes: tuple[sympy.Symbol, ...] = ()  # axes along a tile's last dimension of a multiple of four points
        self.register_tile: dict[int, int] = {}  # of axes of which a lane computes several points, how many
        self.register_point: dict[int, int] = {}  # which of them is computed at the moment
        self.loops = False  # whether values are added up in loops that are not written out
        self.awaited: dict[int, list[Index]] = {}  # of such ops, at which indices points of a register tile want them
        self.used_scalars: set[str] = set()  # the kernel's scalar arguments that its body uses, but for sizes
        self.substitutes: dict[int, Value] = {}  # values that stand for ops, at any index
        self.index_exprs: dict[str, sympy.Expr] = {}  # integers that are index expressions, by the names of their values
        self.on_reduction: Callable[[int], Value] | None = None  # computes a reduction when its result is asked for
        self.on_scan: Callable[[int], Value] | None = None  # computes a scan of the tile's rows, the same
        self._rounded_texts: dict[tuple[str, torch.dtype], str] = {}  # rounded values before they were widened again
        self._current_op: int | None = None  # the op that is being lowered

    # ------------------------------------------------------------------ indices

    def index(self, dims: Dims) -> Index:
        """Return the index of a tensor whose dimensions run over ``dims``."""
        return tuple(self._flat_index(axes) for axes in dims)

    def _flat_index(self, axes: Iterable[int]) -> sympy.Expr:
        flat: sympy.Expr = sympy.S.Zero
        for k in axes:
            points = self.register_tile.get(k, 1)
            flat = flat * self.spec.axes[k].size * points + self.axes[k] * points + self.register_point.get(k, 0)
        return sympy.expand(flat)

    def register_points(self) -> Iterator[None]:
        """Let values be those of each point of the register tile in turn."""
        for point in itertools.product(*map(range, self.register_tile.values())):
            self.register_point = dict(zip(self.register_tile, point, strict=True))
            yield

    # ------------------------------------------------------------------ values (the Builder protocol)

    def operand(self, arg: Any, index: Index) -> Value:
        """Return the value of an input or op at an index."""
        assert isinstance(arg, Ref), arg
        if arg.kind == "in":
            return self._load_input(arg.position, index)
        return self.value(arg.position, index)

    def drawn(self, mode: str, seed: Value, position: sympy.Expr) -> Value:
        """Return the random float32 at a position, as ``libm_random`` draws it.

        Args:
            mode: "rand" or "randn".
            seed: An integer.
            position: The position in the tensor that is drawn.
        """
        assert self._current_op is not None
        shared = not seed.tiles and counts_in_fours(position, self.lanes, self.tile_of.keys() - set(self.axes))
        comment = f"%{self._current_op} {self.calls[self._current_op][1].target}"
        return self.define(f"lm.{mode}{OF_FOURS * shared}({seed}, {{0}})", torch.float32, seed.tiles | self.tiles(position),
                           position, comment=comment)

    def rounded(self, arg: Any, index: Index) -> Value:
        """Return the value of an input or op at an index as eager has it: a 16-bit float is rounded to its dtype."""
        return self._round(self.operand(arg, index), self.rounding.narrow_dtype(arg))

    def _load_input(self, position: int, index: Index) -> Value:
        """Load an input; one that belongs to a term of a fold is loaded only if the fold has that term."""
        outer, guard = self.masks, self.input_guards.get(position)
        if guard is not None:
            self.masks = (*outer, self._fold_has_term(guard))
        value = self.load(f"in{position}", self.spec.inputs[position], index)
        self.masks = outer
        return value

    def _fold_has_term(self, guard: int) -> Value:
        """Return the condition that the fold has more than ``guard`` terms; it has one outcome for the whole launch."""
        self.used_scalars.add(COUNT)
        return self.define(f"{COUNT} > {guard}", torch.bool, frozenset())

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a tensor argument."""
        assert isinstance(arg, Ref), arg
        sizes = self.spec.tensor(arg).shape
        return tuple(sympy.sympify(size) for size in sizes)

    def dtype(self, arg: Any) -> torch.dtype:
        """Return the dtype of a tensor argument."""
        return self.spec.tensor(arg).dtype

    def index_value(self, expr: sympy.Expr) -> Value:
        """Return an index expression as an int64 value."""
        expr = sympy.sympify(expr)
        if expr.is_Integer:
            return Value(str(expr), torch.int64)
        value = self._index_as(expr, torch.int64)
        self.index_exprs[value.name] = expr
        return value

    def _index_as(self, expr: sympy.Expr, dtype: torch.dtype) -> Value:
        """Return an index expression as a value of a dtype."""
        text = "{0}" if self._is_tensor(expr) else "{0} + 0"
        return self.define(f"({text}).to({triton_type(opmath(dtype))})", dtype, self.tiles(expr), expr)

    def _is_tensor(self, expr: sympy.Expr) -> bool:
        """Return whether the text of an index expression is a Triton tensor rather than a Python number."""
        return bool(self.tiles(expr)) or any(str(s) in self.spec.symbols for s in expr.free_symbols)

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        """Return an integer that is in ``[0, size)`` as an index expression."""
        expr = self._proven_index(value, size)
        if expr is not None:
            return expr
        if value.dtype is torch.int64 and value.tiles and not self.spec.wide:  # offsets have 32 bits, and it is in range
            value = self.define(f"{value}.to(tl.int32)", torch.int64, value.tiles)
        index = symbol(value.name, size)
        self.tile_of[index] = value.tiles
        return index

    def loaded_index(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False,
                     trusted: bool = False) -> Value:
        """Return the integer that ``arg`` holds at an index, in range; what is not proven to be is checked in the kernel.

        Args:
            arg: The index tensor.
            index: The element's index in it.
            size: The size of the dimension that it indexes.
            wraps: Whether negative elements count from the end.
            trusted: Whether the op promises that all are in range, so that nothing is checked.
        """
        value = self.cast(self.operand(arg, index), torch.int64)
        if self._proven_index(value, size) is not None:
            return value
        value = self.as_tensor(value)
        value_range = self.ranges.of(arg)
        if wraps and not value_range.at_least(sympy.S.Zero):
            value = self.define(f"tl.where({value} < 0, {value} + {{0}}, {value})", torch.int64, value.tiles, size)
        if self.check_indices and not trusted:
            self._assert_in_range(value, size, wraps, value_range)
        return value

    def _proven_index(self, value: Value, size: sympy.Expr) -> sympy.Expr | None:
        """Return the index expression that an integer is, if it is one in ``[0, size)``."""
        expr = sympy.Integer(value.name) if value.name.isdigit() else self.index_exprs.get(value.name)
        return expr if expr is not None and known_nonnegative(expr) and known_less(expr, size) else None

    def _assert_in_range(self, value: Value, size: sympy.Expr, wraps: bool, value_range: Range) -> None:
        """Let the kernel stop where an index is out of range, unless the element is masked off."""
        checks = [] if value_range.at_least(-size if wraps else sympy.S.Zero) else [f"({value} >= 0)"]
        checks += [] if value_range.below(size) else [f"({value} < {{0}})"]
        if not checks:
            return
        assert self._current_op is not None
        conditions = self.masks_at(value.tiles)
        tiles = value.tiles.union(*(mask.tiles for mask in conditions))
        masks = [mask.name for mask in conditions] + [f"{tile}_mask" for tile in sorted(tiles - self.exact_tiles)]
        masked_off = f" | ~({' & '.join(masks)})" if masks else ""
        lowest, end = size_text(-size) if wraps else "0", size_text(size)
        message = f"index out of range: {self.calls[self._current_op][1].target}: {lowest} <= index < {end}"
        self.add_line_once(f'lm.device_assert(({" & ".join(checks)}){masked_off}, "{message}")', tiles, size)
        self.has_asserts = True

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a value converted to a dtype, held in that dtype's opmath type."""
        if opmath(value.dtype) is opmath(dtype):
            return Value(value.name, dtype, value.tiles)
        if is_literal(value):
            return self.constant(number(value.name, value.dtype), dtype)
        if value.name in self.index_exprs and dtype in (torch.float32, torch.float64):
            return self._index_as(self.index_exprs[value.name], dtype)
        return self.define(escape(conversion(value.name, value.dtype, dtype)), dtype, value.tiles)

    # ------------------------------------------------------------------ ops

    def value(self, position: int, index: Index) -> Value:
        """Return the value of op ``position`` at ``index``, computed unless it is visible already."""
        if position in self.substitutes:
            return self.substitutes[position]
        key = (position, index, self.masks)
        for scope in self.visible_scopes():
            if key in scope.values:
                return scope.values[key]
        outer, self._current_op = self._current_op, position
        value = self._compute(position, index)
        self._current_op = outer
        self.scope(value.tiles).values[key] = value
        return value

    def _compute(self, position: int, index: Index) -> Value:
        """Return a new value of op ``position`` at ``index``, as its row says."""
        row, call = self.calls[position]
        if row.kind is Kind.POINTWISE:
            return self._round_result(position, self._pointwise(position, row, call, index))
        if row.kind is Kind.REDUCTION:
            return self._round_result(position, self._reduction(position, index))
        if row.kind is Kind.SCAN:
            return self._round_result(position, self._scan(position, index))
        steps = row.loop.count(call, self.shape) if self.loops and row.loop is not None and not self.masks else 1
        if steps > 1 and not self.open_branches:
            return self._looped(position, index, steps)
        assert row.lower is not None, row
        self.used_scalars |= {arg.name for arg in call.args.values() if isinstance(arg, HoistedScalar)}
        value = row.lower(self, call, index)
        return value if row.kind is Kind.VIEW else self._round_result(position, Value(value.name, call.dtype, value.tiles))

    def _looped(self, position: int, index: Index, steps: int) -> Value:
        """Return the value of an op that a loop adds up; the same loop does so for all points of a register tile."""
        row, call = self.calls[position]
        loop = row.loop
        assert loop is not None, row
        awaited = self.awaited.get(position, [])
        indices = awaited if index in awaited else [index]
        tiles, number = self._all_tiles - PER_STEP, symbol(self.new_name("w"), steps)
        sums = [Value(self.new_name("sum"), opmath(call.dtype), tiles) for _ in indices]
        for total in sums:
            zero = self._broadcast_text(self.constant(0, total.dtype), total.dtype)
            self.add_line(f"{total} = {zero}", tiles)

        def step() -> Value:
            for total, at in zip(sums, indices, strict=True):
                self.add_line(f"{total} = {loop.step(self, call, at, number, total)}", tiles)
            return sums[0]

        body, _ = self._in_branch(Line(f"for {number} in range({steps}):"), step, None)
        self.scope(tiles).lines.append(body)
        results = {at: self._round_result(position, self.cast(total, call.dtype))
                   for total, at in zip(sums, indices, strict=True)}
        self.scope(tiles).values.update({(position, at, self.masks): value for at, value in results.items()})
        return results[index]

    def _round_result(self, position: int, value: Value) -> Value:
        if not self.rounding.rounds_result(position):
            return value
        return self._round(value, value.dtype, self.rounding.is_narrow_product(position))

    def reduction_element(self, op: int, index: Index, dtype: torch.dtype) -> Value:
        """Return the element of its operand that a reduction takes in.

        Args:
            op: The reduction's position in the spec.
            index: The element's index in the operand.
            dtype: The dtype that it is returned in, after it has been rounded where eager rounds.
        """
        arg = next(iter(self.calls[op][1].args.values()))
        value = self._round(self.operand(arg, index), self.rounding.operand_dtype(op, 0, arg))
        return self.cast(value, dtype)

    def _round(self, value: Value, dtype: torch.dtype | None, is_product: bool = False) -> Value:
        """Return a value rounded to a 16-bit float, if one is given; literals are rounded already."""
        if dtype is None or is_literal(value):
            return value
        held = self.cast(value, opmath(dtype))  # float64 is rounded to float32 first, as in eager
        narrow = narrowed(str(held), dtype)
        if is_product and dtype in ROUNDING:
            narrow = self.define(f"{ROUNDING[dtype]}({held})", dtype, value.tiles).name
        rounded = self.define(f"{narrow}.to({triton_type(opmath(value.dtype))})", value.dtype, value.tiles)
        self._rounded_texts[rounded.name, dtype] = narrow
        return rounded

    def _pointwise(self, position: int, row: Row, call: Call, index: Index) -> Value:
        """Return the value of a row's expression, over operands that are cast and rounded as the row says."""
        dtype = compute_dtype(row, call, self)
        operands: list[Any] = []
        exprs: list[sympy.Expr | None] = []
        loaded: dict[int, Value] = {}  # operands that are no index expressions
        tiles: frozenset[str] = frozenset()
        for i, arg in enumerate(call.args.values()):
            if isinstance(arg, Ref):
                if not row.uses(i):
                    operands.append("None")
                    continue
                narrow = self.rounding.operand_dtype(position, i, arg)
                value = self.broadcast(arg, index, None if i in row.raw else dtype, narrow)
                tiles |= value.tiles
                operands.append(wrap(value.name))
                exprs.append(self.index_exprs.get(value.name))
                if exprs[-1] is None:
                    loaded[i] = value
            elif isinstance(arg, sympy.Expr) and not arg.is_number:
                value = self.cast(self.index_value(arg), dtype or call.dtype)
                tiles |= value.tiles
                operands.append(value.name)
                exprs.append(argument(arg))
            else:
                exprs.append(argument(arg))
                self.used_scalars |= {arg.name} if isinstance(arg, HoistedScalar) else set()
                operands.append(comparand(row, arg, dtype))
        guard = self.spec.ops[position].guard
        expr = None if guard else propagated(call, exprs, self.spec.wide)
        if expr is not None:
            return self.index_value(expr)
        if not guard and compares_with_index(call, exprs, self.spec.wide):
            exprs = [self._saturated(loaded[i], tiles) if i in loaded else expr for i, expr in enumerate(exprs)]
        operator = None if guard else comparison(call, exprs, self.spec.wide)
        if operator is not None and tiles:
            comment = f"%{position} {call.target}"
            return self.define(f"{{0}} {operator} {{1}}", torch.bool, tiles, *exprs, comment=comment)
        dtypes = tuple(self.dtype(a) for a in call.args.values() if isinstance(a, Ref))
        is_wide_cast = row.casts and torch.int64 in (call.dtype, *dtypes)
        is_narrow = is_wide_cast and self.ranges.fit(Ref("op", position), torch.int32)
        context = Context(opmath(dtype or call.dtype), call.dtype, dtypes, is_narrow)
        text = escape(_expression_text(row, context, operands))
        is_quick = self.spec.ops[position].accuracy is Accuracy.QUICK and not self.rounding.everywhere
        if row.smooth and is_quick and context.dtype is torch.float32:
            text = quick(text)
        result = self.define(text, call.dtype, tiles, comment=f"%{position} {call.target}")
        if not guard:
            return result
        return self.define(f"tl.where({self._fold_has_term(guard)}, {result}, {operands[0]})", call.dtype, tiles)

    def _saturated(self, value: Value, tiles: frozenset[str]) -> sympy.Expr | None:
        """Return an integer of 64 bits as an index of 32, to be compared with some along ``tiles``; None if that costs more.

        What is beyond 32 bits becomes the largest or smallest of these, which compares with an index as the number does.
        """
        if value.dtype is not torch.int64 or is_literal(value) or not value.tiles < tiles:
            return None
        text = f"tl.minimum(tl.maximum({value}, -2147483648), 2147483647).to(tl.int32)"
        index = symbol(self.define(text, torch.int64, value.tiles).name, MOST)
        self.tile_of[index] = value.tiles
        return index

    def broadcast(self, arg: Ref, index: Index, dtype: torch.dtype | None, narrow: torch.dtype | None = None) -> Value:
        """Return the value of an operand at an index of a shape that it broadcasts to.

        Args:
            arg: The operand.
            index: The index, of a rank not below the operand's.
            dtype: The dtype to which it is cast; None leaves it as it is.
            narrow: The 16-bit float to which it is rounded first, if any.
        """
        shape = self.shape(arg)
        own = zip(index[len(index) - len(shape):], shape, strict=True)
        value = self._round(self.operand(arg, tuple(sympy.S.Zero if size == 1 else i for i, size in own)), narrow)
        if value.dtype is torch.int64 and dtype in FLOATS and self.ranges.fit(arg, torch.int32):
            value = self.cast(value, torch.int32)
        return self.as_tensor(value if dtype is None else self.cast(value, dtype))

    def _reduction(self, position: int, index: Index) -> Value:
        """Return the result of a reduction: of a whole row, or written out where its row is short."""
        if any(op == position for op, _ in self.spec.reductions):
            return self.of_whole_row(position, self.spec.ops[position].target, self.on_reduction)
        return unrolled(self, position, index)

    def _scan(self, position: int, index: Index) -> Value:
        """Return the value of a scan, which its kernel knows nowhere but where it walks the row.

        A dimension of size 1 has one place, also where that is loaded or rolled.
        """
        op, walked = self.spec.ops[position], self.index(dict(self.spec.scans)[position])
        places = zip(index, walked, op.shape, strict=True)
        if any(size != 1 and sympy.expand(here - at) != 0 for here, at, size in places):
            raise LoweringError(op.target, "its value is needed elsewhere than its kernel walks")
        return self.of_whole_row(position, op.target, self.on_scan)

    # ------------------------------------------------------------------ what is written

    def stored(self, store: Store) -> Value | Write:
        """Return what an output of the spec stores at a point: a value, or what a scatter writes there, and where."""
        index = self.index(store.dims)
        if store.scatters:
            row, call = self.calls[store.op]
            outer, self._current_op = self._current_op, store.op
            write = _scatter(row).write(self, call, index)
            self._current_op = outer
            return write
        rank = len(self.spec.ops[store.op].shape)  # a copy may store into a larger one
        return self.value(store.op, index[len(index) - rank:])

    def store_op(self, tensor: str, store: Store, barrier: bool = False) -> None:
        """Store an output of the spec to a tensor.

        Args:
            tensor: The name of the kernel's argument.
            store: The output.
            barrier: Whether the program's threads wait for each other first, as in :meth:`store`; a scatter never does.
        """
        stored = self.stored(store)
        if isinstance(stored, Value):
            self.store(tensor, store.layout, self.index(store.dims), stored, barrier)
        else:
            row, call = self.calls[store.op]
            combine = _scatter(row).combine(call.args)
            points = frozenset[str]().union(*(self.tiles(axis) for axis in self.index(store.dims)))
            self.scatter(tensor, store.layout, stored, combine, points)

    def scatter(self, tensor: str, layout: Layout, write: Write, combine: Combine, points: frozenset[str]) -> None:
        """Combine a value with what a tensor holds.

        What a tile adds to one address is added up before, if one of its dimensions, or few places in all, tell the address.

        Args:
            tensor: The name of the kernel's argument.
            layout: The tensor's layout.
            write: Where which value is written, and if at all.
            combine: What becomes of what is there.
            points: The tile dimensions of the scatter's iteration space: each point of them writes once.
        """
        offset = self.offset(layout, write.index)
        outer = self.masks
        if write.condition is not None:
            self.masks = (*outer, self.as_tensor(write.condition))
        value = self.as_tensor(write.value)
        text = escape(self.stored_text(value, layout.dtype))
        along = points | value.tiles
        summed = sums.summed_tiles(self, offset, along) if combine is Combine.ADD else frozenset[str]()
        pointer, mask, tiles = self.pointer_and_mask(tensor, offset, self.tiles(offset), along - summed)
        places = sums.few_places(self, offset) if combine is Combine.ADD and not summed else None
        if places is not None:
            sums.add_at(self, places, tensor, layout.dtype, offset, value, along)
        self.masks = outer
        self.accesses.append(Access(tensor, layout, offset, True))
        if places is not None:
            return
        if combine is Combine.STORE:
            self.add_line(f"tl.store({pointer}, {text}{mask})", tiles, offset)
            return
        if summed:
            text = sums.sum_in_tile(self, text, layout.dtype, value.tiles, along, summed)
        self.add_line(f'tl.atomic_{combine.value}({pointer}, {text}{mask}, sem="relaxed")', tiles | summed, offset)

    def store(self, tensor: str, layout: Layout, index: Index, value: Value, barrier: bool = False) -> None:
        """Store a value, converted to the tensor's dtype, at an index.

        Args:
            tensor: The name of the kernel's argument.
            layout: The tensor's layout.
            index: The element's index.
            value: The value.
            barrier: Whether the program's threads wait for each other first: others may still have to read what is
                overwritten.

        Raises:
            LoweringError: The value varies along a tile dimension that the index does not walk.
        """
        offset = self.offset(layout, index)
        unit_tiles = value.tiles & self.unit_tiles
        tiles = self.tiles(offset) | unit_tiles
        if not value.tiles <= tiles:
            detail = f"stored along {sorted(tiles)}, varies along {sorted(value.tiles)}"
            raise LoweringError(f"the store of {tensor}", detail)
        pointer, mask, tiles = self.pointer_and_mask(tensor, offset, tiles - unit_tiles, unit_tiles)
        self.accesses.append(Access(tensor, layout, offset, True))
        text = self.stored_text(value, layout.dtype)
        if barrier:
            self.add_line("tl.debug_barrier()", tiles)
        self.add_line(f"tl.store({pointer}, {escape(text)}{mask})", tiles, offset)

    def stored_text(self, value: Value, dtype: torch.dtype) -> str:
        """Return the text of a value as a tensor of ``dtype`` stores it."""
        converted = self.cast(value, dtype)
        if is_literal(converted):
            return self.as_tensor(converted).name if dtype is torch.float64 else converted.name
        if opmath(dtype) is dtype:
            return converted.name
        return self._rounded_texts.get((converted.name, dtype)) or narrowed(str(converted), dtype)


def _scatter(row: Row) -> Scatter:
    """Return what an op scatters."""
    scatter = row.scatter or (row.otherwise.scatter if row.otherwise else None)
    assert scatter is not None, row.target
    return scatter


def _expression_text(row: Row, context: Context, operands: list[Any]) -> str:
    """Return the text of a pointwise row's expression over operands."""
    if isinstance(row.emit, str):
        return row.emit.format(*(literal(o, context.dtype) if isinstance(o, Scalar) else o for o in operands))
    assert row.emit is not None
    return row.emit(context, *operands)
