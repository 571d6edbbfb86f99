"""A builder that evaluates rows element by element in Python, and so catches what a kernel would read out of bounds.

A row is lowered once at symbolic indices; the value it returns is then evaluated for every index of the output. Reads
outside masks must stay inside their tensors.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import sympy
import torch

from dynafuse.ops import Call, Index, Row, Value
from dynafuse.ops.indexing_math import symbol
from dynafuse.runtime.random import floats

Env = dict[sympy.Symbol, int]
Number = bool | int | float
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq}
_TL = SimpleNamespace(where=lambda c, x, y: x if c else y, minimum=min, maximum=max, floor=math.floor,
                      full=lambda shape, value, dtype: value, float64=torch.float64)
_LM = SimpleNamespace(div=operator.truediv, div_by=lambda x, high, low: x * (high + low), maximum=max,
                       sigmoid=lambda x: float(torch.tensor(float(x)).sigmoid()))


class ReferenceBuilder:
    """See the module."""

    def __init__(self) -> None:
        self.values: dict[str, Callable[[Env], Number]] = {}
        self.loaded: dict[sympy.Symbol, Callable[[Env], int]] = {}

    def _new(self, dtype: torch.dtype, compute: Callable[[Env], Number]) -> Value:
        name = f"v{len(self.values)}"
        self.values[name] = compute
        return Value(name, dtype)

    def at(self, expr: sympy.Expr, env: Env) -> int:
        known = {s: self.loaded[s](env) if s in self.loaded else env[s] for s in sympy.sympify(expr).free_symbols}
        return int(sympy.sympify(expr).xreplace(known))

    def operand(self, arg: torch.Tensor, index: Index) -> Value:
        assert len(index) == arg.dim(), (index, arg.shape)

        def compute(env: Env) -> Number:
            where = tuple(self.at(expr, env) for expr in index)
            assert all(0 <= i < size for i, size in zip(where, arg.shape, strict=True)), (where, arg.shape)
            return arg[where].item()

        return self._new(arg.dtype, compute)

    def rounded(self, arg: torch.Tensor, index: Index) -> Value:
        return self.operand(arg, index)

    def shape(self, arg: torch.Tensor) -> tuple[sympy.Expr, ...]:
        return tuple(sympy.Integer(size) for size in arg.shape)

    def dtype(self, arg: torch.Tensor) -> torch.dtype:
        return arg.dtype

    def constant(self, value: Number, dtype: torch.dtype) -> Value:
        return self._new(dtype, lambda env: value)

    def index_value(self, expr: sympy.Expr) -> Value:
        return self._new(torch.int64, lambda env: self.at(expr, env))

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        made = symbol(f"loaded{len(self.loaded)}", size)
        self.loaded[made] = lambda env: int(self.values[value.name](env))
        return made

    def loaded_index(self, arg: torch.Tensor, index: Index, size: sympy.Expr, *, wraps: bool = False,
                     trusted: bool = False) -> Value:
        value = self.operand(arg, index)

        def compute(env: Env) -> int:
            at = int(self.values[value.name](env))
            assert trusted or (-int(size) if wraps else 0) <= at < int(size), (at, size)
            return at + int(size) if wraps and at < 0 else at

        return self._new(torch.int64, compute)

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        return self._new(torch.bool, lambda env: _OPERATORS[op](self.at(left, env), self.at(right, env)))

    def masked(self, condition: Value, body: Callable[[], Value], other: Number) -> Value:
        value = body()
        return self._new(value.dtype, lambda env: self.values[(value if self.values[condition.name](env) else
                                                               self.constant(other, value.dtype)).name](env))

    def choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        left, right = if_true(), if_false()
        return self._new(left.dtype, lambda env: self.values[(left if self.values[condition.name](env) else right).name](env))

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        names = [operand.name for operand in operands]
        code = compile(text.format(*names), "<expression>", "eval")

        def compute(env: Env) -> Number:
            scope = _Lazy({name: self.values[name] for name in names}, env)
            return eval(code, {"tl": _TL, "lm": _LM}, scope)

        return self._new(dtype, compute)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        return self._new(dtype, lambda env: torch.tensor(self.values[value.name](env)).to(dtype).item())

    def drawn(self, mode: str, seed: Value, position: sympy.Expr) -> Value:
        def compute(env: Env) -> Number:
            place = self.at(position, env)
            return floats([place + 1], torch.tensor(self.values[seed.name](env)), mode)[place].item()

        return self._new(torch.float32, compute)


class _Lazy(dict[str, Any]):
    """Names that are computed when an expression asks for them."""

    def __init__(self, values: dict[str, Callable[[Env], Number]], env: Env) -> None:
        super().__init__(values)
        self._env = env

    def __getitem__(self, name: str) -> Number:
        return super().__getitem__(name)(self._env)


def lowered(row: Row, args: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
    """The row's value at every index of ``out``, which gives the sizes and the dtype."""
    build = ReferenceBuilder()
    index = tuple(symbol(f"i{dim}", size) for dim, size in enumerate(out.shape))
    call = Call(row.target, args, tuple(sympy.Integer(size) for size in out.shape), out.dtype)
    assert row.lower is not None
    assert row.accepts is None or not row.accepts(call), row.accepts(call)
    value = row.lower(build, call, index)
    result = torch.empty_like(out)
    for at in itertools.product(*(range(size) for size in out.shape)):
        result[at] = build.values[value.name](dict(zip(index, at, strict=True)))
    return result
