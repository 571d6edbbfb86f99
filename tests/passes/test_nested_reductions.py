"""Reductions over more dimensions than others of the same: made of these, with eager's values, dtypes and strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dynafuse.passes import nested_reductions
from dynafuse.passes.nested_reductions import nest_reductions
from dynafuse.passes.staged_reductions import STAGED
from tests.support import graphs
from tests.support.differential import compiled

Function = Callable[[Tensor], Any]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_reductions, "LEAST_BYTES", 0)


NESTED: dict[str, Function] = {
    "all of rows": lambda x: (x.sum(-1), x.sum()),
    "all before rows": lambda x: (x.sum(), x.sum(-1)),
    "kept": lambda x: (x.sum(-1, keepdim=True), x.sum((1, 2), keepdim=True)),
    "kept of dropped": lambda x: (x.sum(1), x.sum((1, 2), keepdim=True)),
    "dropped of kept": lambda x: (x.sum(1, keepdim=True), x.sum((0, 1))),
    "means": lambda x: (x.mean((0, 2)), x.mean()),
    "extremes": lambda x: (x.amax(2), x.amax((0, 2), keepdim=True)),
    "extremes of 16 bits": lambda x: ((y := x.bfloat16()).amin(2), y.amin((0, 2))),
    "an extreme of all": lambda x: (x.amin(1), x.min()),
    "counts": lambda x: ((y := x > 0).sum(2), y.sum()),
    "into float32": lambda x: ((y := x.half()).sum(2, dtype=torch.float32), y.sum(dtype=torch.float32)),
}

APART: dict[str, Function] = {
    "other dimensions": lambda x: (x.sum(1), x.sum((0, 2))),
    "other kinds": lambda x: (x.sum(1), x.mean()),
    "other operands": lambda x: (x.sum(1), x.sin().sum()),
    "other dtypes": lambda x: (x.sum(1), x.sum(dtype=torch.float64)),
    "16 bits": lambda x: ((y := x.bfloat16()).sum(1), y.sum()),
    "8 bits": lambda x: ((y := x.to(torch.int8)).sum(1, dtype=torch.int8), y.sum(dtype=torch.int8)),
}


def wide(module: GraphModule) -> int:
    """How many reductions read tensors of three dimensions of more than one element."""
    reductions = [node for node in module.graph.nodes if node.target in STAGED]
    shapes = [node.args[0].meta["val"].shape for node in reductions]
    return sum(len(shape) == 3 and all(size > 1 for size in shape) for shape in shapes)


def nested(function: Function, x: Tensor) -> GraphModule:
    """The graph of a function after the pass, which returns what it did."""
    module, found, expected = graphs.changed(function, nest_reductions, x)
    for result, wanted in zip(found, expected, strict=True):
        assert (result.dtype, result.stride()) == (wanted.dtype, wanted.stride())
    return module


@pytest.mark.parametrize("function", NESTED.values(), ids=NESTED)
def test_reductions_are_made_of_smaller_results(function: Function) -> None:
    assert wide(nested(function, torch.randn(3, 4, 5))) == 1


@pytest.mark.parametrize("function", APART.values(), ids=APART)
def test_others_stay(function: Function) -> None:
    assert wide(nested(function, torch.randn(3, 4, 5))) == 2


def test_each_is_made_of_the_smallest_result() -> None:
    module = nested(lambda x: (x.sum((1, 2)), x.sum(2), x.sum()), torch.randn(3, 4, 5))
    assert wide(module) == 1
    operands = [node.args[0] for node in module.graph.nodes if node.target in STAGED]
    assert len(set(operands)) == 3


@pytest.mark.parametrize(("columns", "reading"), [(1 << 10, 1), ((1 << 10) - 1, 2)])
def test_what_is_read_again_is_large(monkeypatch: pytest.MonkeyPatch, columns: int, reading: int) -> None:
    monkeypatch.setattr(nested_reductions, "LEAST_BYTES", 2 * 3 * 4 << 10)
    assert wide(nested(lambda x: (x.sum(2), x.sum()), torch.randn(2, 3, columns))) == reading


def test_a_dimension_of_one_makes_no_difference() -> None:
    """Both are in one kernel."""
    module = nested(lambda x: ((y := x.sin()[:, :1]).sum(2), y.sum((1, 2))), torch.randn(3, 4, 5))
    assert len({node.args[0] for node in module.graph.nodes if node.target in STAGED}) == 1


@pytest.mark.parametrize("order", itertools.permutations([(2,), (1, 2), (0, 1, 2)]))
def test_in_any_order(order: Sequence[tuple[int, ...]]) -> None:
    assert wide(nested(lambda x: tuple(x.sum(dims) for dims in order), torch.randn(3, 4, 5))) <= 2


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 1)])
def test_sizes_of_none_and_one(shape: tuple[int, ...]) -> None:
    def sums(x: Tensor) -> Any:
        return x.sum(2), x.sum((1, 2)), x.mean(1), x.mean((0, 1))

    x = torch.randn(shape)
    torch.testing.assert_close(compiled(sums)(x), sums(x), equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_corrected_contact_map(dynamic: bool) -> None:
    def corrected(x: Tensor) -> Tensor:
        y = x + x.transpose(1, 2)
        return y - y.sum(-1, keepdim=True) * y.sum(-2, keepdim=True) / y.sum((1, 2), keepdim=True)

    x = torch.rand(2, 37, 37).requires_grad_()
    torch.testing.assert_close(compiled(corrected, dynamic=dynamic)(x), corrected(x))
    gradients = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled(corrected, dynamic=dynamic), corrected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", NESTED.values(), ids=NESTED)
def test_nan_and_infinity(function: Function) -> None:
    x = torch.randn(3, 4, 5)
    x[0, 1, 2], x[2, 3, 4] = torch.nan, torch.inf
    torch.testing.assert_close(compiled(function)(x), function(x), equal_nan=True)
