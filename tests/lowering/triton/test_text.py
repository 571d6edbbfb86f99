"""Index expressions as Triton is given them, divided as C divides, against torch's own views of a range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from dynafuse import ops
from dynafuse.errors import LoweringError
from dynafuse.lowering.triton.text import factor_text, size_text
from dynafuse.ops import Call, Index, Value
from dynafuse.ops.indexing_math import flatten, floordiv, mod, symbol
from dynafuse.ops.symbols import symbol_of

aten = torch.ops.aten


class C(int):
    """An integer with C's division, which rounds towards zero, as Triton's has."""

    def __floordiv__(self, other: int) -> C:
        return C(math.trunc(int(self) / int(other)))

    def __mod__(self, other: int) -> C:
        return C(int(self) - int(self // other) * int(other))

    def __add__(self, other: int) -> C:
        return C(int(self) + int(other))

    def __sub__(self, other: int) -> C:
        return C(int(self) - int(other))

    def __mul__(self, other: int) -> C:
        return C(int(self) * int(other))

    def __neg__(self) -> C:
        return C(-int(self))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: int) -> C:
        return C(int(other) - int(self))


LM = SimpleNamespace(floor_div_int=lambda x, y: C(int(x) // int(y)), remainder_int=lambda x, y: C(int(x) % int(y)))
TL = SimpleNamespace(minimum=lambda x, y: C(min(x, y)), maximum=lambda x, y: C(max(x, y)), where=lambda c, x, y: C(x if c else y))


def evaluated(text: str, values: dict[str, int]) -> int:
    """The value of Triton's text."""
    return int(eval(text, {"lm": LM, "tl": TL, **{name: C(value) for name, value in values.items()}}))


# ---------------------------------------------------------------------- chains of views


class Base:
    """A builder that notes where its one tensor is read."""

    def __init__(self, shape: Sequence[sympy.Expr]) -> None:
        self.sizes = tuple(shape)
        self.index: Index = ()

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        return self.sizes

    def operand(self, arg: Any, index: Index) -> Value:
        self.index = index
        return Value("v0", torch.int64)


@st.composite
def steps(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """A view or flip of a tensor of a shape."""
    dim = draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    kind = draw(st.sampled_from(["flip", "slice", "permute", "flatten", "split"]))
    if kind == "flip":
        return aten.flip.default, {"self": None, "dims": [dim]}
    if kind == "slice":
        start = draw(st.integers(0, max(size - 1, 0)))
        end = draw(st.integers(start + 1, size + 1))
        return aten.slice.Tensor, {"self": None, "dim": dim, "start": start, "end": end, "step": draw(st.integers(1, 3))}
    if kind == "permute":
        return aten.permute.default, {"self": None, "dims": draw(st.permutations(range(len(shape))))}
    if kind == "split" and len(shape) < 4:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        factor = draw(st.sampled_from(divisors))
        return aten.view.default, {"self": None, "size": [*shape[:dim], factor, size // factor, *shape[dim + 1:]]}
    return aten.view.default, {"self": None, "size": [math.prod(shape)]}


def applied(target: Any, args: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    given = {name: tensor if name == "self" else value for name, value in args.items()}
    return aten.reshape(tensor, args["size"]) if target is aten.view.default else target(**given)  # type: ignore[no-any-return]


def read_at(target: Any, args: dict[str, Any], before: Sequence[int], after: Sequence[int], index: Index) -> Index:
    """Where a step reads its operand."""
    row, base = ops.lookup(target), Base([sympy.Integer(size) for size in before])
    assert row is not None and row.lower is not None
    row.lower(base, Call(target, args, tuple(map(sympy.Integer, after)), torch.int64), index)  # type: ignore[arg-type]
    return base.index


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([(2, 2), (4, 3), (3, 4, 2), (6,), (2, 3, 2, 2)]))
def test_chains_of_views_read_what_torch_reads(data: st.DataObject, shape: tuple[int, ...]) -> None:
    tensors, chain = [torch.arange(math.prod(shape)).view(shape)], []
    for _ in range(data.draw(st.integers(1, 6))):
        target, args = data.draw(steps(tuple(tensors[-1].shape)))
        chain.append((target, args))
        tensors.append(applied(target, args, tensors[-1]))
    last = tensors[-1]
    axes = [symbol(f"i{k}", size) for k, size in enumerate(last.shape)]
    index: Index = tuple(axes)
    for (target, args), before, after in zip(reversed(chain), tensors[-2::-1], tensors[:0:-1], strict=True):
        index = read_at(target, args, before.shape, after.shape, index)
    offset = sympy.expand(flatten(index, shape))
    text = size_text(offset, {axis: sympy.Symbol(f"x{k}") for k, axis in enumerate(axes)})
    assert "floor" not in text, text
    for place in itertools.product(*map(range, last.shape)):
        values = {f"x{k}": at for k, at in enumerate(place)}
        assert evaluated(text, values) == int(last[place])
        assert offset.xreplace(dict(zip(axes, map(sympy.Integer, place), strict=True))) == int(last[place])


# ---------------------------------------------------------------------- arithmetic with integers of any sign

S0, Z1, N2 = map(symbol_of, ("s0", "z1", "n2"))
I, J = symbol("i", S0), symbol("j", 6)  # noqa: E741
NAMES = {I: sympy.Symbol("x0"), J: sympy.Symbol("x1")}
terms = st.sampled_from([I, J, S0, Z1, N2, I * N2, J * S0, FloorDiv(N2, 2), Mod(J, 4), Max(N2, 0), Min(N2, J), sympy.S.One])
factors = st.sampled_from([-7, -3, -1, 1, 2, 4, 6])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(terms, factors), min_size=1, max_size=4), st.sampled_from([2, 3, 4, 6, S0, 4 * S0]),
       st.sampled_from([1, 2, 5, S0]))
def test_divisions_round_down_whatever_the_sign(parts: list[tuple[sympy.Expr, int]], size: Any, outer: Any) -> None:
    expr = sympy.Add(*(part * factor for part, factor in parts))
    quotient, rest = floordiv(expr, size), mod(expr, size)
    wholes = [quotient, rest, quotient + rest, floordiv(quotient - 3, outer), mod(quotient - 3, outer)]
    texts = [size_text(sympy.expand(whole), NAMES) for whole in wholes]
    for s0, z1, n2 in ((1, 0, -3), (3, 2, -1), (2, 0, 0), (3, 1, 4)):
        known = {"s0": s0, "z1": z1, "n2": n2}
        for x0, x1 in itertools.product(range(s0), (0, 1, 5)):
            values = {**known, "x0": x0, "x1": x1}
            at, by, over = (python(one, values) for one in (expr, sympy.sympify(size), sympy.sympify(outer)))
            expected = [at // by, at % by, at // by + at % by, (at // by - 3) // over, (at // by - 3) % over]
            assert [evaluated(text, values) for text in texts] == expected, (expr, size, outer, values, texts)


@pytest.mark.parametrize("size", [7, S0, S0 + 1, 3 * S0, FloorDiv(S0, 2), 3 * FloorDiv(S0, 2), Mod(S0, 4), FloorDiv(S0 + 3, 4) * Z1,
                                  Max(S0, 4), -S0], ids=str)
def test_sizes_are_factors_and_divisors_as_a_whole(size: Any) -> None:
    values = {"s0": 13, "z1": 3, "place": 29}
    amount = python(sympy.sympify(size), values)
    found = [evaluated(text.format(factor_text(size)), values) for text in ("place * {}", "place - {} * place")]
    assert found == [29 * amount, 29 - amount * 29]
    if amount > 0:
        assert evaluated(f"place // {factor_text(size)}", values) == 29 // amount
        assert evaluated(f"place % {factor_text(size)}", values) == 29 % amount


def python(expr: sympy.Expr, values: dict[str, int]) -> int:
    """The value of an expression, divided as Python divides."""
    if expr.is_Symbol:
        return values[str(NAMES.get(expr, expr))]
    if expr.is_Integer:
        return int(expr)
    parts = [python(part, values) for part in expr.args]
    functions = {sympy.Add: sum, sympy.Mul: math.prod, Max: max, Min: min}
    for kind, function in functions.items():
        if isinstance(expr, kind):
            return int(function(parts))
    assert isinstance(expr, (FloorDiv, Mod, sympy.Pow)), expr
    return int(parts[0] // parts[1] if isinstance(expr, FloorDiv) else parts[0] % parts[1] if isinstance(expr, Mod)
               else parts[0] ** parts[1])


@pytest.mark.parametrize(("expr", "text"), [
    (FloorDiv(S0, 2), "s0 // 2"), (FloorDiv(N2, 2), "lm.floor_div_int(n2, 2)"), (PythonMod(N2, 3), "lm.remainder_int(n2, 3)"),
    (PythonMod(Z1, 3), "z1 % 3"), (1 + 2 * FloorDiv(S0 + 1, 2), "1 + 2*((1 + s0) // 2)"), (Max(N2, Z1, 3), None),
    (FloorDiv(S0 - 1 - I, 3), "((-1) + s0 + ((-1)*x0)) // 3"), (ModularIndexing(I, 3, 4), "(x0 // 3) % 4"), (S0**2, "s0*s0"),
    (sympy.Piecewise((N2, N2 >= 0), (S0 + N2, True)), "tl.where(n2 >= 0, n2, n2 + s0)"),
    (sympy.Piecewise((2 * N2 - 5, 2 * N2 - 5 >= 0), (N2, True)), "tl.where(2*n2 >= 5, (-5) + 2*n2, n2)"),
])
def test_text(expr: sympy.Expr, text: str | None) -> None:
    made = size_text(expr, NAMES)
    assert text is None or made == text
    for n2 in (-4, -1, 0, 5):
        known = {"s0": 4, "z1": 2, "n2": n2, "x0": 1}
        symbols = {S0: 4, Z1: 2, N2: n2, I: 1}
        assert evaluated(made, known) == int(expr.xreplace({s: sympy.Integer(v) for s, v in symbols.items()}))


@pytest.mark.parametrize("expr", [sympy.sin(S0), S0 / 3, sympy.Function("f")(S0)], ids=str)
def test_what_triton_has_not_is_refused(expr: sympy.Expr) -> None:
    with pytest.raises(LoweringError):
        size_text(expr)
