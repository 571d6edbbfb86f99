"""Records a fusion step by step (implements :class:`dynafuse.ops.nvfuser_fusion.Fusion`).

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
from dynafuse.lowering.nvfuser.layout import fusion_input
from dynafuse.lowering.nvfuser.recipe import Argument, Output, Recipe, Step, Var
from dynafuse.ops.indexing_math import known_nonnegative
from dynafuse.ops.literals import opmath
from dynafuse.ops.nvfuser_fusion import FusionTensor, Number, Operand, Shape
from dynafuse.ops.symbols import symbol_of

BOOL_RESULTS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "signbit"})
"""Pointwise ops whose result is bool."""

ALIASING_OPS = frozenset({"broadcast", "squeeze", "permute", "reshape", "expand", "slice", "select"})
"""Ops after which nvFuser may hand out the input's own memory."""

KEEPS_EXPANDED = ALIASING_OPS - {"reshape"} | {"stride_order"}
"""Moves that leave expanded dimensions expanded."""


class Recorder:
    """A recipe under construction.

    ``origin`` is the ATen op that is being recorded, ``values`` has the tensors of inputs and of ops.

    Args:
        inputs: The layouts of the inputs.
        symbols: The names of the size symbols.
    """

    def __init__(self, inputs: Sequence[Layout], symbols: Sequence[str]) -> None:
        self.layouts = tuple(inputs)
        self.steps: list[Step] = []
        self.origin = ""
        self.values: dict[Ref, FusionTensor] = {}
        self._numbers: dict[tuple[str, tuple[Argument, ...]], int] = {}  # the result of each step
        self._narrow: dict[int, FusionTensor] = {}  # what widened tensors were before
        self._aliases: set[int] = set(range(len(inputs)))  # tensors that may be an input's own memory
        self._symbols = {symbol_of(name): i for i, name in enumerate(symbols)}
        self._scalars: dict[int, Var] = {}
        self._stored: set[int] = set()
        self._variable_count = len(inputs) + len(symbols)
        for i, layout in enumerate(inputs):
            broadcast = tuple(s == 1 or t == 0 for s, t in zip(layout.shape, layout.stride, strict=True))
            self.values[Ref("in", i)] = FusionTensor(self, i, layout.dtype, layout.shape, broadcast)

    def recipe(self, outputs: Sequence[Output]) -> Recipe:
        """Return the recipe of what was recorded, with these outputs."""
        scalars = tuple((var, symbol) for symbol, var in sorted(self._scalars.items()))
        return Recipe(tuple(map(fusion_input, self.layouts)), scalars, tuple(self.steps), tuple(outputs))

    # ------------------------------------------------------------------ steps

    def _record(self, name: str, args: Sequence[Any], dtype: torch.dtype | None) -> int:
        """Return the number of an op's result; an op that was recorded with equal arguments is not recorded again."""
        arguments = tuple(map(_as_argument, args))
        key = (name, tuple(map(_distinct, arguments)))
        if key not in self._numbers:
            self._numbers[key] = self._append(name, arguments, dtype)
        return self._numbers[key]

    def _append(self, name: str, args: tuple[Argument, ...], dtype: torch.dtype | None) -> int:
        """Add a step; returns the number of its result."""
        number = self._variable_count
        self._variable_count += 1
        self.steps.append(Step(name, args, (number,), dtype, self.origin))
        return number

    def _tensor(self, name: str, args: Sequence[Any], dtype: torch.dtype, shape: Sequence[Any],
                broadcast: Sequence[bool] | None = None) -> FusionTensor:
        """Return the result of an op; its broadcast dimensions, if they are not given, are those of size 1."""
        sizes = tuple(map(_int, shape))
        broadcast = [size == 1 for size in sizes] if broadcast is None else broadcast
        return FusionTensor(self, self._record(name, args, dtype), dtype, sizes, tuple(broadcast))

    # ------------------------------------------------------------------ operands

    def operand(self, arg: Any) -> FusionTensor:
        """Return the tensor of an input or op."""
        return self.values[arg]

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Return the sizes of an input or op."""
        return tuple(map(sympy.sympify, self.values[arg].shape))

    # ------------------------------------------------------------------ pointwise

    def pointwise(self, name: str, *operands: Operand) -> FusionTensor:
        """Record an elementwise op; comparisons of bools with numbers become logic."""
        first = operands[0]
        if (name in ("eq", "ne") and isinstance(first, FusionTensor) and first.dtype is torch.bool
                and not isinstance(operands[1], FusionTensor)):
            return first if bool(operands[1]) is (name == "eq") else self.pointwise("logical_not", first)
        dtype = self._result_dtype(name, operands[1:] if name == "where" else operands)
        rank = max(len(operand.shape) for operand in operands if isinstance(operand, FusionTensor))
        args = [self._with_rank(operand, rank) if isinstance(operand, FusionTensor) else _number(operand, dtype)
                for operand in operands]
        shape, broadcast = _broadcast_shape([arg for arg in args if isinstance(arg, FusionTensor)])
        return self._tensor(name, args, torch.bool if name in BOOL_RESULTS else dtype, shape, broadcast)

    def _result_dtype(self, name: str, operands: Sequence[Operand]) -> torch.dtype:
        """Return the dtype that nvFuser gives the result of an op that keeps its operands' dtype."""
        dtypes = {o.dtype for o in operands if isinstance(o, FusionTensor)}
        if not dtypes:  # a choice between two numbers
            return torch.float64 if any(isinstance(o, float) for o in operands) else torch.int64
        dtype = dtypes.pop()
        if dtypes or opmath(dtype) is not dtype:
            raise LoweringError(self.origin, f"nvFuser's {name} over operands of {dtype} and {dtypes or 'itself'}")
        if name == "where" and dtype is torch.bool and not all(isinstance(o, FusionTensor) for o in operands):
            return torch.int64
        return dtype

    def _with_rank(self, tensor: FusionTensor, rank: int) -> FusionTensor:
        missing = rank - len(tensor.shape)
        return self.unsqueeze(tensor, [True] * missing + [False] * len(tensor.shape)) if missing else tensor

    def cast(self, tensor: FusionTensor, dtype: torch.dtype) -> FusionTensor:
        """Return ``tensor`` in ``dtype``; of a tensor that was only widened, what it was before."""
        if tensor.dtype is dtype:
            return tensor
        narrow = self._narrow.get(tensor.number)
        if narrow is not None and narrow.dtype is dtype:
            return narrow
        if dtype is torch.bool:
            return self.pointwise("ne", tensor, 0)
        converted = self._tensor("cast", (tensor, dtype), dtype, tensor.shape, tensor.broadcast)
        if tensor.dtype in (torch.float16, torch.bfloat16) and dtype.itemsize >= 4:
            self._narrow[converted.number] = tensor
        return converted

    # ------------------------------------------------------------------ reductions

    def reduce(self, name: str, tensor: FusionTensor, dims: Sequence[int], keepdim: bool) -> FusionTensor:
        """Record a reduction; over no dimensions it changes nothing.

        Args:
            name: ``sum``, ``prod``, ``max`` or ``min``.
            tensor: What is reduced.
            dims: The dimensions, none of them negative.
            keepdim: Whether they stay, with size 1.
        """
        if not dims:
            return tensor
        tensor = tensor if name == "sum" else self._materialize(tensor)
        shape, broadcast = _reduced_shape(tensor, dims, keepdim)
        return self._tensor(name, (tensor, tuple(dims), keepdim), tensor.dtype, shape, broadcast)

    # ------------------------------------------------------------------ moves

    def move(self, name: str, tensors: Sequence[FusionTensor], shape: Sequence[Any], *args: Any,
             broadcast: Sequence[bool] | None = None) -> FusionTensor:
        """Record an op that moves elements.

        Args:
            name: The op.
            tensors: Its tensors, which are its first arguments; for ``cat`` they are one list.
            shape: The sizes of the result.
            *args: Its other arguments.
            broadcast: Which dimensions of the result are broadcast; None: those of size 1.
        """
        if name not in KEEPS_EXPANDED:
            tensors = [self._materialize(tensor) for tensor in tensors]
        arguments = (tuple(tensors), *args) if name == "cat" else (*tensors, *args)
        result = self._tensor(name, arguments, tensors[0].dtype, shape, broadcast)
        if name in ALIASING_OPS and tensors[0].number in self._aliases:
            self._aliases.add(result.number)
        return result

    def unsqueeze(self, tensor: FusionTensor, new: Sequence[bool]) -> FusionTensor:
        """Return a tensor with new dimensions of size 1."""
        sizes, broadcast = iter(tensor.shape), iter(tensor.broadcast)
        shape = [1 if flag else next(sizes) for flag in new]
        flags = [True if flag else next(broadcast) for flag in new]
        return self.move("broadcast", [tensor], shape, tuple(new), broadcast=flags)

    def squeeze(self, tensor: FusionTensor, dims: Sequence[int]) -> FusionTensor:
        """Return a tensor without some dimensions of size 1."""
        if not dims:
            return tensor
        remaining = [d for d in range(len(tensor.shape)) if d not in dims]
        return self.move("squeeze", [tensor], [tensor.shape[d] for d in remaining], tuple(dims),
                         broadcast=[tensor.broadcast[d] for d in remaining])

    def expand(self, tensor: FusionTensor, shape: Sequence[Any]) -> FusionTensor:
        """Return a tensor whose dimensions of size 1 are expanded to ``shape``; the others stay as they are."""
        tensor = self._with_rank(tensor, len(shape))
        new_shape = tuple(map(_int, shape))
        if new_shape == tensor.shape:
            return tensor
        args = tuple(self.sizes([new])[0] if is_broadcast and old != new else -1
                     for old, new, is_broadcast in zip(tensor.shape, new_shape, tensor.broadcast, strict=True))
        if set(args) == {-1}:
            return tensor  # the sizes are equal, but written differently
        return self.move("expand", [tensor], new_shape, args, broadcast=tensor.broadcast)

    def full(self, shape: Sequence[Any], value: Any, dtype: torch.dtype) -> FusionTensor:
        """Return a tensor with a constant or a size in every element.

        Args:
            shape: Its sizes.
            value: The constant or the size.
            dtype: Its dtype, to which a constant is converted.
        """
        fill = _number(value, dtype) if isinstance(value, (bool, int, float)) else self.sizes([value])[0]
        return self._tensor("full", (self.sizes(shape), fill, dtype), dtype, shape)

    def iota(self, length: Any, start: Any, step: Any) -> FusionTensor:
        """Return the int64 values ``start + step * i`` for ``i`` below ``length``.

        Args:
            length, start, step: Numbers, or sizes that are known when the kernel runs.
        """
        return self._tensor("iota", (*self.sizes([length, start, step]), torch.int64), torch.int64, [length])

    # ------------------------------------------------------------------ sizes

    def sizes(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """Return sizes as arguments: ints, and scalars for what is known at run time."""
        return tuple(self._size(sympy.sympify(size)) for size in sizes)

    def _size(self, size: sympy.Expr) -> Any:
        if size.is_Integer:
            return int(size)
        if isinstance(size, sympy.Symbol):
            return self._size_symbol(size)
        ops: dict[type, str] = {sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "div", Mod: "mod", PythonMod: "mod"}
        name = next((name for kind, name in ops.items() if isinstance(size, kind)), None)
        if name is None or not all(arg.is_integer for arg in size.args):
            raise LoweringError(self.origin, f"the size {size} has no scalar in nvFuser")
        if name in ("div", "mod") and not known_nonnegative(size.args[0]):
            raise LoweringError(self.origin, f"nvFuser divides as C does, and {size.args[0]} may be negative")
        result, *rest = (self._size(arg) for arg in size.args)
        for arg in rest:
            result = Var(self._record(name, (result, arg), None))
        return result

    def _size_symbol(self, symbol: sympy.Symbol) -> Var:
        """Return a size symbol: the size of an input that has it, else an argument of its own."""
        for i, layout in enumerate(self.layouts):
            for dim, size in enumerate(layout.shape):
                if size == symbol:
                    return Var(self._record("size", (Var(i), dim), None))
        position = self._symbols[symbol]
        return self._scalars.setdefault(position, Var(len(self.layouts) + position))

    # ------------------------------------------------------------------ outputs

    def output(self, tensor: FusionTensor, layout: Layout, order: Sequence[int] | None, into: int | None) -> Output:
        """Store a tensor.

        An input's own elements, or a tensor that is stored already, go through ``segment_set``: nvFuser would otherwise hand
        out the memory that it has.

        Args:
            tensor: The tensor.
            layout: The layout of the output, which has the dtype to which it is cast.
            order: The rank in memory of each dimension; None is row-major, which nvFuser chooses by itself.
            into: The input that it overwrites, if any.
        """
        tensor = self.cast(self._materialize(tensor), layout.dtype)
        copies = tensor.number in self._aliases or tensor.number in self._stored
        if copies:
            number = self._append("segment_set", (Var(tensor.number),), tensor.dtype)
            tensor = FusionTensor(self, number, tensor.dtype, tensor.shape, tensor.broadcast)
        if order is not None:
            tensor = self.move("stride_order", [tensor], tensor.shape, tuple(order), broadcast=tensor.broadcast)
        self._stored.add(tensor.number)
        return Output(Var(tensor.number), into, copies)

    def _materialize(self, tensor: FusionTensor) -> FusionTensor:
        """Return a tensor whose expanded dimensions are written out."""
        if not any(flag and size != 1 for flag, size in zip(tensor.broadcast, tensor.shape, strict=True)):
            return tensor
        wide = self.cast(tensor, opmath(tensor.dtype))
        ones = self.full(tensor.shape, 1, wide.dtype)
        written = self.pointwise("logical_and" if wide.dtype is torch.bool else "mul", ones, wide)
        return self.cast(written, tensor.dtype)


def _as_argument(arg: Any) -> Any:
    """Return an argument as a step has it: tensors by their variables, lists as tuples."""
    if isinstance(arg, FusionTensor):
        return Var(arg.number)
    return tuple(map(_as_argument, arg)) if isinstance(arg, (tuple, list)) else arg


def _distinct(arg: Any) -> Any:
    """Return a key that tells 1, 1.0 and True apart, and the zeros and the NaNs."""
    return tuple(map(_distinct, arg)) if isinstance(arg, tuple) else (type(arg), repr(arg))


def _int(size: Any) -> Any:
    expr = sympy.sympify(size)
    return int(expr) if expr.is_Integer else expr


def _number(value: Number, dtype: torch.dtype) -> Number:
    """Return a number as the dtype has it. Raises LoweringError for an integer dtype that cannot hold it."""
    convert: Callable[[Any], Number] = float if dtype.is_floating_point else (bool if dtype is torch.bool else int)
    if convert is int and value != int(value):
        raise LoweringError(str(value), f"it is no {dtype}")
    return convert(value)


def _broadcast_shape(tensors: Sequence[FusionTensor]) -> tuple[Shape, tuple[bool, ...]]:
    """Return the sizes of a result over operands of one rank, and which of its dimensions are broadcast.

    A size is that of an operand that is not broadcast there, else of an expanded one, else 1.
    """
    shape: list[Any] = []
    broadcast: list[bool] = []
    for dim in range(len(tensors[0].shape)):
        concrete = [p.shape[dim] for p in tensors if not p.broadcast[dim]]
        repeated = [p.shape[dim] for p in tensors if p.broadcast[dim] and p.shape[dim] != 1]
        shape.append((concrete or repeated or [1])[0])
        broadcast.append(not concrete)
    return tuple(shape), tuple(broadcast)


def _reduced_shape(tensor: FusionTensor, dims: Sequence[int], keepdim: bool) -> tuple[Shape, tuple[bool, ...]]:
    """Return the sizes of a reduction's result, and which of its dimensions are broadcast."""
    remaining = [(1, True) if d in dims else (tensor.shape[d], tensor.broadcast[d])
                 for d in range(len(tensor.shape)) if keepdim or d not in dims]
    return tuple(size for size, _ in remaining), tuple(flag for _, flag in remaining)
