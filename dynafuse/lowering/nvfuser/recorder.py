"""Records a fusion step by step (implements :class:`dynafuse.ops.nvfuser_parts.Fusion`).

Every step's dtype and sizes are known here, so that nothing is left to nvFuser's own promotion: the operands of a pointwise
op have one dtype and one rank when they are recorded. Equal steps are recorded once.

Worked example: ``pointwise("add", x, y)`` with ``x`` of sizes [8, 4] and ``y`` of sizes [4] records
``t2 = broadcast(t1, [True, False])`` and ``t3 = add(t0, t2)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from dynafuse.errors import LoweringError
from dynafuse.ir import Layout, Ref
from dynafuse.lowering.nvfuser.layout import described
from dynafuse.lowering.nvfuser.recipe import Argument, Output, Recipe, Step, Var
from dynafuse.ops.indexing_math import known_nonnegative
from dynafuse.ops.literals import opmath
from dynafuse.ops.nvfuser_parts import Number, Operand, Part, Shape
from dynafuse.ops.symbols import symbol_of

TRUTHS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "signbit"})
"""Pointwise ops whose result is bool."""

MOVES_ONLY = frozenset({"broadcast", "squeeze", "permute", "reshape", "expand", "slice", "select"})
"""Ops after which nvFuser may hand out the input's own memory."""

RELABELS = MOVES_ONLY - {"reshape"} | {"stride_order"}
"""Moves that leave expanded dimensions expanded."""


class Recorder:
    """A recipe under construction."""

    def __init__(self, inputs: Sequence[Layout], symbols: Sequence[str]) -> None:
        self.layouts = tuple(inputs)
        self.steps: list[Step] = []
        self.origin = ""
        self.values: dict[Ref, Part] = {}
        self._known: dict[tuple[str, tuple[Argument, ...]], tuple[int, ...]] = {}
        self._casts: dict[int, Part] = {}  # a widened part's number, with what it was widened from
        self._moved: set[int] = set(range(len(inputs)))
        self._symbols = {symbol_of(name): i for i, name in enumerate(symbols)}
        self._scalars: dict[int, Var] = {}
        self._stored: set[int] = set()
        self._count = len(inputs) + len(symbols)
        for i, layout in enumerate(inputs):
            spread = tuple(s == 1 or t == 0 for s, t in zip(layout.shape, layout.stride, strict=True))
            self.values[Ref("in", i)] = Part(self, i, layout.dtype, layout.shape, spread)

    def recipe(self, outputs: Sequence[Output]) -> Recipe:
        """What was recorded, with these outputs."""
        scalars = tuple((var, symbol) for symbol, var in sorted(self._scalars.items()))
        return Recipe(tuple(map(described, self.layouts)), scalars, tuple(self.steps), tuple(outputs))

    # ------------------------------------------------------------------ steps

    def _record(self, name: str, args: Sequence[Any], dtype: torch.dtype | None, results: int = 1) -> tuple[int, ...]:
        plain = tuple(map(_plain, args))
        key = (name, tuple(map(_typed, plain)))
        if key not in self._known:
            self._known[key] = self._append(name, plain, dtype, results)
        return self._known[key]

    def _append(self, name: str, args: tuple[Argument, ...], dtype: torch.dtype | None, results: int) -> tuple[int, ...]:
        numbers = tuple(range(self._count, self._count + results))
        self._count += results
        self.steps.append(Step(name, args, numbers, dtype, self.origin))
        return numbers

    def _part(self, name: str, args: Sequence[Any], dtype: torch.dtype, shape: Sequence[Any],
              spread: Sequence[bool] | None = None) -> Part:
        number, = self._record(name, args, dtype)
        sizes = tuple(map(_int, shape))
        return Part(self, number, dtype, sizes, tuple(s == 1 for s in sizes) if spread is None else tuple(spread))

    # ------------------------------------------------------------------ operands

    def operand(self, arg: Any) -> Part:
        """The part of an input or op."""
        return self.values[arg]

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """The sizes of an input or op."""
        return tuple(map(sympy.sympify, self.values[arg].shape))

    # ------------------------------------------------------------------ pointwise

    def pointwise(self, name: str, *operands: Operand) -> Part:
        """An elementwise op; comparisons of bools with 0 become logic."""
        if name in ("eq", "ne") and _is_truth(operands[0]) and not isinstance(operands[1], Part):
            part: Any = operands[0]
            return part if bool(operands[1]) is (name == "eq") else self.pointwise("logical_not", part)
        parts = [o for o in operands if isinstance(o, Part)]
        chosen = operands[1:] if name == "where" else operands
        dtype = self._common(name, chosen)
        rank = max(len(part.shape) for part in parts)
        args = [self._aligned(o, rank) if isinstance(o, Part) else _number(o, dtype) for o in operands]
        shape, spread = _broadcast([a for a in args if isinstance(a, Part)])
        return self._part(name, args, torch.bool if name in TRUTHS else dtype, shape, spread)

    def _common(self, name: str, operands: Sequence[Operand]) -> torch.dtype:
        """The dtype that nvFuser gives the result of an op that keeps its operands' dtype."""
        dtypes = {o.dtype for o in operands if isinstance(o, Part)}
        if not dtypes:  # a choice between two numbers
            return torch.float64 if any(isinstance(o, float) for o in operands) else torch.int64
        dtype = dtypes.pop()
        if dtypes or opmath(dtype) is not dtype:
            raise LoweringError(self.origin, f"nvFuser's {name} over operands of {dtype} and {dtypes or 'itself'}")
        if name == "where" and dtype is torch.bool and not all(isinstance(o, Part) for o in operands):
            return torch.int64
        return dtype

    def _aligned(self, part: Part, rank: int) -> Part:
        missing = rank - len(part.shape)
        return self.unsqueezed(part, [True] * missing + [False] * len(part.shape)) if missing else part

    def cast(self, part: Part, dtype: torch.dtype) -> Part:
        """``part`` in ``dtype``; what was only widened to it comes back as it was."""
        if part.dtype is dtype:
            return part
        before = self._casts.get(part.number)
        if before is not None and before.dtype is dtype:
            return before
        if dtype is torch.bool:
            return self.pointwise("ne", part, 0)
        made = self._part("cast", (part, dtype), dtype, part.shape, part.spread)
        if part.dtype in (torch.float16, torch.bfloat16) and dtype.itemsize >= 4:
            self._casts[made.number] = part
        return made

    # ------------------------------------------------------------------ reductions

    def reduce(self, name: str, part: Part, dims: Sequence[int], keepdim: bool) -> Part:
        """A reduction; over no dimensions it changes nothing."""
        if not dims:
            return part
        part = part if name == "sum" else self._materialised(part)
        shape, spread = _reduced(part, dims, keepdim)
        return self._part(name, (part, tuple(dims), keepdim), part.dtype, shape, spread)

    # ------------------------------------------------------------------ moves

    def move(self, name: str, parts: Sequence[Part], shape: Sequence[Any], *args: Any,
             spread: Sequence[bool] | None = None) -> Part:
        """An op that moves elements; ``cat`` takes its parts as a list."""
        if name not in RELABELS:
            parts = [self._materialised(part) for part in parts]
        given = (tuple(parts), *args) if name == "cat" else (*parts, *args)
        made = self._part(name, given, parts[0].dtype, shape, spread)
        if name in MOVES_ONLY and parts[0].number in self._moved:
            self._moved.add(made.number)
        return made

    def unsqueezed(self, part: Part, new: Sequence[bool]) -> Part:
        """New dimensions of size 1."""
        sizes, spread = iter(part.shape), iter(part.spread)
        shape = [1 if flag else next(sizes) for flag in new]
        return self.move("broadcast", [part], shape, tuple(new), spread=[True if flag else next(spread) for flag in new])

    def squeezed(self, part: Part, dims: Sequence[int]) -> Part:
        """Fewer dimensions."""
        kept = [d for d in range(len(part.shape)) if d not in dims]
        return self.move("squeeze", [part], [part.shape[d] for d in kept], tuple(dims),
                         spread=[part.spread[d] for d in kept]) if dims else part

    def expanded(self, part: Part, shape: Sequence[Any]) -> Part:
        """Dimensions of size 1 repeated; the others are not touched."""
        part = self._aligned(part, len(shape))
        wanted = tuple(map(_int, shape))
        if wanted == part.shape:
            return part
        args = tuple(self.sizes([want])[0] if flag and have != want else -1
                     for have, want, flag in zip(part.shape, wanted, part.spread, strict=True))
        if set(args) == {-1}:
            return part  # sizes that are equal, written differently
        return self.move("expand", [part], wanted, args, spread=part.spread)

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> Part:
        """A constant or a size."""
        fill = _number(value, dtype) if isinstance(value, (bool, int, float)) else self.sizes([value])[0]
        return self._part("full", (self.sizes(shape), fill, dtype), dtype, shape)

    def iota(self, length: Any, start: Any, step: Any) -> Part:
        """A range."""
        return self._part("iota", (*self.sizes([length, start, step]), torch.int64), torch.int64, [length])

    # ------------------------------------------------------------------ sizes

    def sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Ints, and scalars for what is known at run time."""
        return tuple(self._size(sympy.sympify(size)) for size in sizes)

    def _size(self, size: sympy.Expr) -> Any:
        if size.is_Integer:
            return int(size)
        if isinstance(size, sympy.Symbol):
            return self._symbol(size)
        folds: dict[type, str] = {sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "div", Mod: "mod", PythonMod: "mod"}
        name = next((name for kind, name in folds.items() if isinstance(size, kind)), None)
        if name is None or not all(arg.is_integer for arg in size.args):
            raise LoweringError(self.origin, f"the size {size} has no scalar in nvFuser")
        if name in ("div", "mod") and not known_nonnegative(size.args[0]):
            raise LoweringError(self.origin, f"nvFuser divides as C does, and {size.args[0]} may be negative")
        result, *rest = (self._size(arg) for arg in size.args)
        for arg in rest:
            result = Var(self._record(name, (result, arg), None)[0])
        return result

    def _symbol(self, symbol: sympy.Symbol) -> Var:
        """From an input that has this size, else an argument of its own."""
        for i, layout in enumerate(self.layouts):
            for dim, size in enumerate(layout.shape):
                if size == symbol:
                    return Var(self._record("size", (Var(i), dim), None)[0])
        position = self._symbols[symbol]
        return self._scalars.setdefault(position, Var(len(self.layouts) + position))

    # ------------------------------------------------------------------ outputs

    def output(self, part: Part, layout: Layout, order: Sequence[int] | None, into: int | None) -> Output:
        """Store a part in the layout's dtype, with its dimensions in memory in ``order`` (None: row-major by itself).

        An input's own elements, or a part that is stored already, go through ``segment_set``: nvFuser would otherwise hand
        out the memory that it has.
        """
        part = self.cast(self._materialised(part), layout.dtype)
        copies = part.number in self._moved or part.number in self._stored
        if copies:
            number, = self._append("segment_set", (Var(part.number),), part.dtype, 1)
            part = Part(self, number, part.dtype, part.shape, part.spread)
        if order is not None:
            part = self.move("stride_order", [part], part.shape, tuple(order), spread=part.spread)
        self._stored.add(part.number)
        return Output(Var(part.number), into, copies)

    def _materialised(self, part: Part) -> Part:
        """Expanded dimensions written out."""
        if not any(flag and size != 1 for flag, size in zip(part.spread, part.shape, strict=True)):
            return part
        wide = self.cast(part, opmath(part.dtype))
        every = self.full(part.shape, 1, wide.dtype)
        made = self.pointwise("logical_and" if wide.dtype is torch.bool else "mul", every, wide)
        return self.cast(made, part.dtype)


def _plain(arg: Any) -> Any:
    if isinstance(arg, Part):
        return Var(arg.number)
    return tuple(map(_plain, arg)) if isinstance(arg, (tuple, list)) else arg


def _typed(arg: Any) -> Any:
    """Tells 1, 1.0 and True apart, and the zeros and the NaNs."""
    return tuple(map(_typed, arg)) if isinstance(arg, tuple) else (type(arg), repr(arg))


def _int(size: Any) -> Any:
    expr = sympy.sympify(size)
    return int(expr) if expr.is_Integer else expr


def _is_truth(operand: Operand) -> bool:
    return isinstance(operand, Part) and operand.dtype is torch.bool


def _number(value: Number, dtype: torch.dtype) -> Number:
    """A number as the dtype has it."""
    convert: Callable[[Any], Number] = float if dtype.is_floating_point else (bool if dtype is torch.bool else int)
    if convert is int and value != int(value):
        raise LoweringError(str(value), f"it is no {dtype}")
    return convert(value)


def _broadcast(parts: Sequence[Part]) -> tuple[Shape, tuple[bool, ...]]:
    """Sizes of the result over operands of one rank: of a concrete operand, else of an expanded one, else 1."""
    shape: list[Any] = []
    spread: list[bool] = []
    for dim in range(len(parts[0].shape)):
        concrete = [p.shape[dim] for p in parts if not p.spread[dim]]
        repeated = [p.shape[dim] for p in parts if p.spread[dim] and p.shape[dim] != 1]
        shape.append((concrete or repeated or [1])[0])
        spread.append(not concrete)
    return tuple(shape), tuple(spread)


def _reduced(part: Part, dims: Sequence[int], keepdim: bool) -> tuple[Shape, tuple[bool, ...]]:
    kept = [(1, True) if d in dims else (part.shape[d], part.spread[d])
            for d in range(len(part.shape)) if keepdim or d not in dims]
    return tuple(size for size, _ in kept), tuple(flag for _, flag in kept)
