"""What the elements of a tensor are that depends on sizes alone, as functions of their place, for all sizes.

The calls that make the tensor run once, on fake tensors, and are noted as ops of torch. Then the op table is asked for the
element at a place, as it is for kernels: views, concatenations and gathers rewrite the place until it comes to a range or a
constant. Values that differ by place are told by cases.

Worked example: of ``arange(n)[None] <= arange(n)[:, None]`` the element at ``(i, j)`` is true where ``i - j`` is not
negative, else false.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from sympy import S
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from dynafuse.fx import arguments_of
from dynafuse.ops import Builder, Call, Index, Kind, Value, lookup, refusal, row_of
from dynafuse.ops.creation import COUNTED
from dynafuse.ops.indexing_math import as_expr, known_nonnegative, symbol
from dynafuse.ops.table import op_name
from dynafuse.ops.views import aligned, dim_of
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.masks.cases import Cases, NotKnownError, both, chosen, combined, compared, without_remainders
from dynafuse.passes.masks.pointwise_cases import RULES, Told, cast, integer, number, told
from dynafuse.passes.masks.size_checks import SizeChecks

REWRITES = (Kind.VIEW, Kind.INDEX, Kind.GATHER, Kind.CREATION)
"""Ops whose rows make an element of others, or of nothing."""

ARGUMENTS = (Tensor, torch.SymInt, bool, int, float)
"""What a pointwise op computes with."""


def element(recipe: GraphModule, sizes: Sequence[Any], checks: SizeChecks) -> tuple[Index, Cases]:
    """Return any place in the tensor that a graph computes, and what is there.

    Args:
        recipe: The graph. It takes sizes, and its calls have no effects.
        sizes: The sizes, symbolic ones of the fake mode that is active.
        checks: Decides what is taken to hold of sizes.

    Raises:
        NotKnownError: The elements are not known as functions of their place.
    """
    with torch.no_grad(), Recorder() as recorder:
        tensor = recipe(*sizes)
    shape = enumerate(map(as_expr, tensor.shape))
    place = tuple(S.Zero if size == 1 else symbol(f"d{dim}", size) for dim, size in shape)
    return place, Elements(recorder, checks).at(tensor, place).cases


class Recorder(TorchDispatchMode):
    """Notes by which call of the op table each tensor was made, while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[Tensor, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if lookup(func) is None and (decomposed := decompositions().get(func)) is not None:
            with self:
                return decomposed(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            call = Call(func, arguments_of(func, args, kwargs), _shape(result), result.dtype)
            self.made[id(result)] = result, call
        return result


class Elements(Builder):
    """The elements of recorded tensors."""

    def __init__(self, recorder: Recorder, checks: SizeChecks) -> None:
        self._made = recorder.made
        self._checks = checks
        self._known: dict[tuple[int, Index], Told] = {}

    def at(self, tensor: Tensor, index: Index) -> Told:
        """Return the element at an index; raise NotKnownError where nothing tells."""
        key = id(tensor), index
        if key not in self._known:
            self._known[key] = self._element(tensor, index)
        return self._known[key]

    def _element(self, tensor: Tensor, index: Index) -> Told:
        if id(tensor) not in self._made:
            raise NotKnownError("a tensor that no op has made")
        call = self._made[id(tensor)][1]
        row = lookup(call.target)
        row = row and row_of(row, call)
        if row is None or refusal(row, call):
            raise NotKnownError(f"{call.target} has no row for this call")
        if row.kind in REWRITES and row.lower is not None:
            return _told(row.lower(self, call, index))
        if row.kind is Kind.POINTWISE and op_name(call) in RULES:
            operands = (self._argument(arg, index) for arg in call.args.values() if isinstance(arg, ARGUMENTS))
            return RULES[op_name(call)](call, self._checks.holds, *operands)
        if row.kind is Kind.SCAN and row.reduction == "cumsum":
            return self._sum_up_to(call, index)
        raise NotKnownError(f"no rule for {call.target}")

    def _argument(self, arg: Any, index: Index) -> Told:
        return self.at(arg, aligned(index, _shape(arg))) if isinstance(arg, Tensor) else number(arg)

    def _sum_up_to(self, call: Call, index: Index) -> Told:
        """Return the element of a sum over what is the same everywhere."""
        same = cast(self.at(call["self"], index), torch.int64)
        if len(same.cases) > 1 or not same.cases[0].value.is_Integer:
            raise NotKnownError("a sum of values that differ")
        count = index[dim_of(call["dim"], len(index))] + 1 if index else 1
        return cast(integer(lambda value: value * count, same), call.dtype)

    # ------------------------------------------------------------------ what rows ask for

    def operand(self, arg: Any, index: Index) -> Value:
        return self.at(arg, index)

    def rounded(self, arg: Any, index: Index) -> Value:
        return self.at(arg, index)

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        return _shape(arg)

    def dtype(self, arg: Any) -> torch.dtype:
        dtype: torch.dtype = arg.dtype
        return dtype

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        return cast(number(value), dtype)

    def index_value(self, expr: sympy.Expr) -> Value:
        return told(without_remainders(expr, self._checks.holds), torch.int64)

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        """Return an integer as an index.

        Args:
            value: The integer.
            size: The size of the dimension, which nothing checks: what runs has checked it already, or will.

        Raises:
            NotKnownError: It differs by cases.
        """
        known, *others = _told(value).cases
        if others:
            raise NotKnownError("an index that differs by cases")
        return known.value

    def loaded_index(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False, trusted: bool = False) -> Value:
        """Return an element of an index tensor.

        Args:
            arg: The tensor.
            index: The element's index.
            size, wraps, trusted: As for the base class.

        Raises:
            NotKnownError: It may be negative.
        """
        value = self.at(arg, index)
        if not all(known_nonnegative(case.value) for case in value.cases):
            raise NotKnownError("an index that may count from the end")
        return value

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        """Return the outcome of a comparison.

        Args:
            left, right: The index expressions.
            op: One of ``< <= > >= ==``.
        """
        return told(compared(op, left, right, self._checks.holds), torch.bool)

    def drawn(self, mode: str, seed: Value, position: sympy.Expr) -> Value:
        """Refuse: no place tells a random number.

        Args:
            mode, seed, position: As for the base class.

        Raises:
            NotKnownError: Always.
        """
        raise NotKnownError("a random number")

    def masked(self, condition: Value, body: Callable[[], Value], other: bool | int | float) -> Value:
        """Return a value where a condition holds, else a number.

        Args:
            condition: A bool.
            body: Makes the value.
            other: The number.
        """
        return self.choose(condition, body, lambda: cast(number(other), body().dtype))

    def choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        """Return one of two values.

        Args:
            condition: A bool.
            if_true, if_false: Make the values.
        """
        dtypes: list[torch.dtype] = []

        def cases(make: Callable[[], Value]) -> Cases:
            value = _told(make())
            dtypes.append(value.dtype)
            return value.cases

        return told(chosen(_told(condition).cases, lambda: cases(if_true), lambda: cases(if_false)), dtypes[0])

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        """Return what a text of Triton means, for the few that rows of ops on indices have.

        Args:
            text: The text.
            dtype: The dtype of the value.
            *operands: The operands.

        Raises:
            NotKnownError: It is another text.
        """
        known = [_told(operand) for operand in operands]
        if text == "{0} & {1}" and dtype is torch.bool:
            return told(combined(both, *(operand.cases for operand in known)), dtype)
        if text == COUNTED:
            return integer(lambda at, step, start: start + step * at, *known)
        raise NotKnownError(text)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        return cast(_told(value), dtype)


def _shape(tensor: Tensor) -> tuple[sympy.Expr, ...]:
    return tuple(map(as_expr, tensor.shape))


def _told(value: Value) -> Told:
    assert isinstance(value, Told)
    return value
