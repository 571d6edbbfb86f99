"""Sizes as the function of a graph computes them: what Python computed when torch traced it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dynafuse.runtime.sizes import MATH, size_text

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda s, n: 3 * s - n * n + 7,
    "power": lambda s, n: n**3 + 2**s,
    "floor_divide": lambda s, n: n // 3 + (s - 2 * n) // 4 + n // -2,
    "remainder": lambda s, n: n % 3 + (7 * s) % 5 + n % -4,
    "divide": lambda s, n: n // s + n % s,
    "extrema": lambda s, n: torch.sym_max(n, s) * 2 - torch.sym_min(n, 1),
    "abs": lambda s, n: abs(n) + abs(s - 5),
    "ceil": lambda s, n: math.ceil(s * 1.5) + math.ceil(n / 2),
    "floor": lambda s, n: math.floor(s * 0.7) - math.floor(n / 3),
    "trunc": lambda s, n: math.trunc(n / 2) + math.trunc(n * 0.7),
    "round": lambda s, n: round(n / 2) + round(s / 4),
    "of_sums": lambda s, n: math.ceil((s + n) * 0.5) + math.floor((s * n) / 4) // 2,
    "of_floats": lambda s, n: math.ceil(torch.sym_float(n) * 0.5) + math.trunc(s**0.5),
    "square_root": lambda s, n: math.floor(torch._sym_sqrt(s)) * n,
    "shift": lambda s, n: (n << 2) + (n >> 1),
    "bits": lambda s, n: (n & 3) + (n | 4) * (n ^ 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_written_is_what_python_computes(name: str) -> None:
    env = ShapeEnv()
    s, n = (env.create_symintnode(make(5, ConstantSource(which), DimDynamic.DYNAMIC), hint=5, source=ConstantSource(which))
            for make, which in ((env.create_symbol, "s"), (env.create_unspecified_symbol, "n")))
    expr = FUNCTIONS[name](s, n).node.expr
    text = size_text(expr, {s.node.expr: "size", n.node.expr: "number"})
    for size in (2, 3, 7, 100):
        for number in (-7, -3, -1, 0, 1, 4, 50):
            assert eval(text, {MATH: math, "size": size, "number": number}) == FUNCTIONS[name](size, number), text


def test_what_a_step_has_computed_is_not_computed_again() -> None:
    s = sympy.Symbol("s", integer=True)
    assert size_text(2 * s**2 + 1, {s: "a", s**2: "square"}) == "1 + 2*square"


def test_a_function_that_python_has_not_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="Mystery"):
        size_text(sympy.Function("Mystery")(sympy.Symbol("s")), {})
