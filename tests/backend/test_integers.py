"""Integers of dynamic graphs: of any sign, computed from sizes, and where pieces of tensors end.

Each function is compiled for several integers, of which every one may be the first: what is known of the first holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.support.cases_of_integers import (
    ARITHMETIC,
    CALLS,
    CHAINS,
    COMPUTED,
    INDEXING,
    INTEGERS,
    MATRICES,
    PIECES,
    SHAPES,
    Function,
    X,
)
from tests.support.differential import compiled, tensors


def check(function: Function, calls: Sequence[tuple[Any, ...]], dynamic: bool | None, **options: Any) -> None:
    """A compiled function is right for each call in order."""
    torch._dynamo.reset()
    call = compiled(function, dynamic=dynamic, **options)
    for arguments in calls:
        ours, eager = call(*arguments), function(*arguments)
        torch.testing.assert_close(ours, eager, equal_nan=True)
        strides = ([tensor.stride() for tensor in tensors(tree)] for tree in (ours, eager))
        assert next(strides) == next(strides)


def together(functions: Mapping[str, Function]) -> Function:
    """All functions in one, by name: a graph for each takes its time, and compilers of C++ are slow."""
    return lambda *arguments: {name: function(*arguments) for name, function in functions.items()}


# ---------------------------------------------------------------------- integers of any sign

@pytest.mark.parametrize("name", ARITHMETIC | INDEXING)
def test_integers_of_any_sign(name: str) -> None:
    check((ARITHMETIC | INDEXING)[name], [(X, n) for n in INTEGERS], True, executors="triton")


@pytest.mark.parametrize("functions", [ARITHMETIC, INDEXING], ids=["arithmetic", "indexing"])
def test_integers_that_become_dynamic_by_themselves(functions: dict[str, Function]) -> None:
    check(together(functions), [(X, n) for n in INTEGERS], None, executors="triton")


@pytest.mark.parametrize(("functions", "order"), [(ARITHMETIC, INTEGERS), (ARITHMETIC, INTEGERS[::-1]), (INDEXING, (3, -3, 0, 4))],
                         ids=["arithmetic", "backwards", "indexing"])
def test_integers_of_any_sign_on_inductor(functions: dict[str, Function], order: Sequence[int]) -> None:
    check(together(functions), [(X, n) for n in order], True, executors="inductor")


@pytest.mark.parametrize("executors", ["triton", "inductor"])
def test_integers_that_depend_on_data(executors: str) -> None:
    def function(x: torch.Tensor, t: torch.Tensor) -> dict[str, Any]:
        n = t.item()
        wanted = {name: one for name, one in ARITHMETIC.items() if name not in ("of_three", "bits", "shift")}
        return {name: one(x, n) for name, one in wanted.items()} | {"max": x + torch.sym_max(n, 1)}

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(function, [(X, torch.tensor(n)) for n in INTEGERS], None, fullgraph=True, executors=executors)


@pytest.mark.parametrize("executors", ["triton", "inductor"])
def test_sizes_that_depend_on_data_may_be_nothing(executors: str) -> None:
    def function(x: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = x[x > least]
        return x / torch.sym_max(found.numel(), 1), found * 2 + found.numel(), x + found.numel() // 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(function, [(X, torch.tensor(n)) for n in (0.0, 100.0, -100.0, 0.5)], None, executors=executors)


# ---------------------------------------------------------------------- numbers that are computed from sizes

@pytest.mark.parametrize("name", COMPUTED)
def test_numbers_computed_from_sizes(name: str) -> None:
    check(COMPUTED[name], [(torch.randn(shape),) for shape in SHAPES], True, executors="triton")


def test_numbers_computed_from_sizes_that_become_dynamic_by_themselves() -> None:
    check(together(COMPUTED), [(torch.randn(shape),) for shape in SHAPES], None, executors="triton")


def test_numbers_computed_from_sizes_on_inductor() -> None:
    check(together(COMPUTED), [(torch.randn(shape),) for shape in SHAPES], True, executors="inductor")


# ---------------------------------------------------------------------- pieces

@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_dynamic_sizes(name: str) -> None:
    check(PIECES[name], CALLS, True, executors="triton")


def test_pieces_of_sizes_that_become_dynamic_by_themselves() -> None:
    check(together(PIECES), CALLS, None, executors="triton")


def test_pieces_of_dynamic_sizes_on_inductor() -> None:
    check(together(PIECES), CALLS[::3], True, executors="inductor")


@pytest.mark.parametrize("executors", ["triton", "inductor"])
def test_pieces_whose_sizes_depend_on_data(executors: str) -> None:
    def function(x: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        n = sizes.tolist()
        for size in n:
            torch._check(size >= 0)
            torch._check(size <= 6)
        return [piece * 2 + 1 for piece in x.split(n)]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(function, [(X, torch.tensor(n)) for n in ((1, 2, 3), (0, 4, 2))], None, executors=executors)


# ---------------------------------------------------------------------- chains of views

@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_views(name: str) -> None:
    check(CHAINS[name], MATRICES, True, executors="triton")


def test_chains_of_views_of_static_sizes() -> None:
    check(together(CHAINS), MATRICES[1:3], False, executors="triton")


def test_chains_of_views_on_inductor() -> None:
    check(together(CHAINS), MATRICES[1:], True, executors="inductor")


@pytest.mark.gpu
@pytest.mark.parametrize(("functions", "calls"), [
    (ARITHMETIC | INDEXING, [(X, n) for n in INTEGERS]), (COMPUTED, [(torch.randn(shape),) for shape in SHAPES]), (PIECES, CALLS), (CHAINS, MATRICES),
], ids=["integers", "computed", "pieces", "chains"])
def test_on_a_gpu(functions: dict[str, Function], calls: Sequence[tuple[Any, ...]]) -> None:
    on_gpu = [(x.cuda(), *rest) for x, *rest in calls]
    for function in functions.values():
        check(function, on_gpu, True, executors="triton")


# ---------------------------------------------------------------------- integers beyond 32 bits

BEYOND = torch.tensor([0, 5, 31, 32, -1, -100, 2**31 - 1, 2**31, 2**31 + 5, 2**32, 2**32 + 5, -2**31, -2**31 - 1, 2**62, -2**62])


@pytest.mark.parametrize("reduced", [False, True], ids=["pointwise", "reduced"])
def test_numbers_compare_with_indices_whatever_their_size(reduced: bool) -> None:
    """Indices have 32 bits in a kernel; what they are compared with has 64."""
    def compare(x: torch.Tensor) -> list[torch.Tensor]:
        numbers, places = x[:, None], torch.arange(32)[None, :]
        masks = [numbers == places, numbers != places, places < numbers, numbers <= places, places > numbers, numbers >= places]
        return [mask.sum(1) if reduced else mask.float() for mask in masks]

    check(compare, [(BEYOND,)], False, executors="triton")
