"""Kernels of dynamic sizes in two forms: which sizes are asked for, and that both forms compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F

from dynafuse.lowering.triton.aligned_sizes import ANY, in_two_forms, multiples_of
from dynafuse.lowering.triton.lower import lower
from dynafuse.ops.indexing_math import symbol
from dynafuse.ops.symbols import symbol_of
from tests.support import representative

S0, S1, S2 = map(symbol_of, ("s0", "s1", "s2"))
X, Y = symbol("x", S0), symbol("y", S1)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# Which sizes are asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offsets", "totals", "examples", "expected"), [
    ([S1 * X + Y], [], (64, 64), {"s1": 8}),
    ([S1 * X + Y], [], (64, 36), {"s1": 4}),
    ([S1 * X + Y], [], (64, 33), {}),
    ([S1**2 * X + Y], [], (64, 28), {"s1": 4}),
    ([768 * X + Y], [S0 * 768], (64, 64), {}),
    ([X], [S0 * S1], (64, 64), {"s1": 8}),
    ([X], [S0 * S1], (64, 33), {"s0": 8}),
    ([X], [S0 * S1], (4, 6), {"s0": 4, "s1": 2}),
    ([S1 * X + Y], [S0 * S1], (64, 64), {"s1": 8}),
    ([S1 * X + Y + S0], [], (64, 64), {"s0": 8, "s1": 8}),
    ([S1 * X + 2 * S1], [], (64, 64), {}),
    ([S1 * X + Y + 1], [], (64, 64), {}),
    ([S1 * X + 3 * symbol("z", 9) + Y], [], (64, 64), {}),
    ([2 * S1 * X + 2 * Y], [], (64, 64), {}),
    ([4 * S1 * X + Y], [], (64, 6), {"s1": 2}),
], ids=str)
def test_multiples(offsets: list[sympy.Expr], totals: list[sympy.Expr], examples: tuple[int, ...], expected: dict[str, int]) -> None:
    assert multiples_of(offsets, totals, dict(zip(("s0", "s1"), examples, strict=True))) == expected


def test_the_text() -> None:
    text = in_two_forms("k", ["in0", "s0", "s1", "XBLOCK: tl.constexpr"], {"s0": 8, "s1": 4}, ["wait()"])
    assert text.splitlines()[1:] == [
        "def k(in0, s0, s1, XBLOCK: tl.constexpr):", "    wait()", "    if s0 % 8 == 0 and s1 % 4 == 0:",
        "        k_any(in0, s0 // 8 * 8, s1 // 4 * 4, XBLOCK)", "    else:", "        k_any(in0, s0, s1, XBLOCK)"]


# Both forms -----------------------------------------------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "pointwise": (lambda x: torch.relu(x) + 1, ((64, 128),)),
    "rows": (lambda x: (x.softmax(-1), x.amax(-1)), ((16, 64),)),
    "columns": (lambda x: x.sum(0), ((512, 64),)),
    "images": (lambda x, w: torch.relu(x * w[:, None, None]), ((4, 16, 28, 28), (16,))),
    "statistics of images": (lambda x: torch.var_mean(x, (0, 2, 3)), ((8, 16, 28, 28),)),
    "put together": (lambda x, y: torch.cat([x, y], -1) * 2, ((64, 32), (64, 64))),
    "padded": (lambda x: F.pad(x, (0, 8)) * 2, ((64, 32),)),
    "in another order": (lambda x: x.transpose(1, 2).contiguous() * 2, ((4, 64, 64),)),
    "of one column": (lambda x: x[:, 3] * 2 + x.sum(-1), ((64, 64),)),
}


def other_sizes(shapes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The same shapes with sizes that are no multiples of 2, in all dimensions but few channels, and in the last alone."""
    yield tuple(tuple(size - 3 if size > 16 else size for size in shape) for shape in shapes)
    last = {shape[-1] for shape in shapes if shape[-1] > 16}
    yield tuple(tuple(size + 3 if size in last else size for size in shape) for shape in shapes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_forms_compute_the_same(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    compiled = torch.compile(function, backend="dynafuse", dynamic=True, options={"device": "h200", "specialize_after": 0})
    for sizes in (shapes, *other_sizes(shapes), shapes):
        made = [torch.randn(size) for size in sizes]
        torch.testing.assert_close(compiled(*made), function(*made))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kernel_has_two_forms(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    case = representative.Case(function, tuple((shape, BF16) for shape in shapes), dynamic=True)
    assert all(f"{ANY}(" in lower(bound.code).source for bound in representative.bounds_of(case))


def test_known_sizes_have_one_form() -> None:
    spec = representative.spec_of(lambda x: torch.relu(x) + 1, torch.randn(64, 128))
    assert ANY not in lower(spec).source
