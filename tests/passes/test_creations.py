"""Which constants are made again, for whom, and that nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.passes.creations import make_again
from tests.support.differential import check
from tests.support.planned import Planned

aten = torch.ops.aten
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def looked_up(x: Tensor) -> Any:
    rows = torch.zeros(5, dtype=torch.long)
    return rows, x[rows] * 2


AGAIN: dict[str, tuple[Callable[[Tensor], Any], int]] = {  # how many constants there are afterwards
    "returned and looked up": (looked_up, 2),
    "two readers share one": (lambda x: ((c := torch.full((3,), 0.5)), x + c, x * c), 2),
    "a reader of as many elements": (lambda x: ((c := torch.full((4, 3), 0.5)), x + c), 2),
    "by way of a view": (lambda x: ((c := torch.full((3,), 0.5)), x + c[None]), 2),
    "read by what no kernel computes": (lambda x: ((c := torch.ones(3, dtype=x.dtype)) @ x.t(), x + c), 2),
    "a view that is returned": (lambda x: ((c := torch.full((3,), 0.5))[None], x + c), 2),
    "nothing computes with it": (lambda x: (torch.full((3,), 0.5), x + 1), 1),
    "not in memory for anyone": (lambda x: x + torch.full((3,), 0.5), 1),
    "only views that are returned": (lambda x: ((c := torch.full((3,), 0.5)), c[None], x + 1), 1),
}


@pytest.mark.parametrize("name", AGAIN)
def test_constants(name: str) -> None:
    function, count = AGAIN[name]
    module = make_fx(function, tracing_mode="fake")(X)
    expected = module(X)
    make_again(module)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(X), expected)
    fills = {aten.full.default, aten.zeros.default, aten.ones.default}
    assert sum(node.target in fills for node in module.graph.nodes) == count


@pytest.mark.parametrize("name", AGAIN)
def test_results_are_eagers(name: str) -> None:
    check(AGAIN[name][0], X, executors="triton")


def test_a_lookup_at_constants_loads_no_index() -> None:
    module = make_fx(looked_up, tracing_mode="fake")(X)
    make_again(module)
    reading = [bound for bound in Planned(module).bounds.values() if bound.spec.inputs]
    assert len(reading) == 1 and [layout.dtype for layout in reading[0].spec.inputs] == [torch.float32]
