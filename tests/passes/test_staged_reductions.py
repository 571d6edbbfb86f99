"""Reductions of all of what rows are reduced for: that they read nothing again, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dynafuse
from dynafuse.ops import Kind, lookup
from dynafuse.passes.normalize import normalize
from dynafuse.passes.staged_reductions import stage_reductions
from tests.support import graphs
from tests.support.differential import check

PROCESSORS = 3
ROWS, LENGTH = 12, 40
X = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(1))


def deviation(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


STAGED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.log_softmax(1).sum(),
    "mean": lambda x: x.log_softmax(1).mean(),
    "largest": lambda x: (x - x.mean(1, keepdim=True)).max(),
    "smallest": lambda x: (x - x.mean(1, keepdim=True)).amin((0, 1), keepdim=True),
    "of all dimensions, kept": lambda x: x.softmax(1).square().sum((0, 1), keepdim=True),
    "16 bits": lambda x: x.bfloat16().log_softmax(1).sum(),
    "16 bits, into float32": lambda x: deviation(x.bfloat16()).sum(dtype=torch.float32),
    "float32, into 16 bits": lambda x: deviation(x).mean(dtype=torch.float16),
    "float64": lambda x: deviation(x.double()).mean(),
    "of some dimensions": lambda x: deviation(x.view(2, 6, 1, 40)).exp().sum((1, 3)),
    "rows that were reshaped": lambda x: deviation(x.view(3, 4, 40)).view(12, 40).exp().mean(),
    "rows of two dimensions": lambda x: (x.view(12, 5, 8) - x.view(12, 5, 8).amax((1, 2), keepdim=True)).exp().sum(),
    "columns": lambda x: x.t().softmax(0).square().sum(),
    "few short rows": lambda x: x.view(4, 120).softmax(1).square().sum(),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "no rows are reduced": lambda x: x.exp().sum(),
    "only rows are": lambda x: x.softmax(1).square().sum(1),
    "other rows are reduced": lambda x: x.view(3, 4, 40).softmax(1).square().sum((0, 2)),
    "rows and columns are": lambda x: (x.softmax(1) * x.softmax(0)).sum(),
    "few long rows are": lambda x: x.view(4, 120).repeat(1, 40).softmax(1).square().sum(),
    "scanned rows": lambda x: x.cumsum(1).exp().sum(),
    "a library computes with the rows before": lambda x: (x.softmax(1) * (x.softmax(1) @ x.t() @ x)).sum(),
    "integers": lambda x: (x.softmax(1) > 0.5).sum(),
}


def before(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The graph of a function as the pass gets it."""
    return normalize(graphs.traced(function, *args))


def staged(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The graph of a function after the pass, which returns what it did."""
    module = before(function, *args)
    module.recompile()
    expected = module(*args)
    stage_reductions(module, PROCESSORS, ())
    module.graph.lint()
    module.recompile()
    actual = module(*args)
    torch.testing.assert_close(actual, expected)
    assert actual.stride() == expected.stride()
    return module


def reductions(module: GraphModule) -> int:
    rows = [lookup(node.target) for node in module.graph.nodes]
    return sum(row is not None and row.kind is Kind.REDUCTION for row in rows)


@pytest.mark.parametrize("name", STAGED)
def test_rows_are_reduced_first(name: str) -> None:
    assert reductions(staged(STAGED[name], X)) == reductions(before(STAGED[name], X)) + 1


def test_what_depends_on_a_reduction_by_rows_goes_by_rows_too() -> None:
    def both(x: Tensor) -> Tensor:
        return x.softmax(1).logsumexp((0, 1))

    assert reductions(staged(both, X)) == reductions(before(both, X)) + 2


@pytest.mark.parametrize("name", WHOLE)
def test_others_are_reduced_at_once(name: str) -> None:
    assert reductions(staged(WHOLE[name], X)) == reductions(before(WHOLE[name], X))


def test_what_is_forced_to_eager_stays() -> None:
    module = before(STAGED["sum"], X)
    (whole,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.sum.default)
    stage_reductions(module, PROCESSORS, {whole})
    assert whole in module.graph.nodes


def test_nothing_is_read_again() -> None:
    """A kernel for the rows, and one for what is left of them."""
    x = torch.empty(4096, 1024)
    (graph,) = dynafuse.explain(lambda x: (x.log_softmax(-1) * x).mean(), x, device="h200").to_dict()["graphs"]
    assert [step["bytes"] // 2**20 for step in graph["steps"]] == [16, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(dtype: torch.dtype) -> None:
    x = torch.randn(600, 40, dtype=dtype)
    check(lambda x: (x.log_softmax(1).sum(), deviation(x).exp().mean(), (x - x.mean(1, keepdim=True)).max(), x.softmax(1).amin()), x)


def test_gradients() -> None:
    check(lambda x: (x.log_softmax(1) * x.sigmoid()).mean(), torch.randn(600, 40, requires_grad=True))
