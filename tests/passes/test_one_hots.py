"""Sums of tensors that are zero but in one place: which are no walk any more, and that they stay the same, NaN and all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from dynafuse.passes.one_hots import sum_one_hots
from tests.support import graphs
from tests.support.differential import compiled

aten = torch.ops.aten
ROWS, CLASSES = 6, 50
LABELS = torch.randint(0, CLASSES, (ROWS, 1), generator=torch.Generator().manual_seed(3))
SCALES = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(4))
X = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(5))


def scattered(labels: Tensor, value: Any = -1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((ROWS, CLASSES), 0.0, dtype=dtype).scatter(1, labels, value)


def selected(labels: Tensor, value: Tensor) -> Tensor:
    return torch.where(torch.arange(CLASSES) == labels, value, 0.0)


def summed(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """The graph of a function after the pass, which returns what it did."""
    module, found, expected = graphs.changed(function, sum_one_hots, *args)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    return module


def sums(module: GraphModule) -> int:
    return len(module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList))


REPLACED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a scatter of a number": lambda labels, scale, x: scattered(labels).sum(1, keepdim=True),
    "of a tensor": lambda labels, scale, x: scattered(labels, scale).sum(1),
    "scaled": lambda labels, scale, x: (scattered(labels) * scale / 3).neg().sum(-1),
    "with the scale first": lambda labels, scale, x: (scale * scattered(labels)).sum(1),
    "in 16 bits, and widened": lambda labels, scale, x: (scattered(labels, dtype=torch.bfloat16) * scale.bfloat16()).float().sum(1),
    "rounded by the user": lambda labels, scale, x: (scattered(labels) * scale).bfloat16().float().sum(1),
    "into another dtype": lambda labels, scale, x: scattered(labels).sum(1, dtype=torch.float64),
    "a choice by position": lambda labels, scale, x: (selected(labels, scale) * 2).sum(1, keepdim=True),
    "by an index that is repeated": lambda labels, scale, x: torch.where(
        torch.arange(CLASSES).view(1, CLASSES) == labels.expand(ROWS, CLASSES), -1.0, 0.0).sum(1),
    "beyond the ends": lambda labels, scale, x: (selected(labels * 3 - 20, scale) * 2).sum(1, keepdim=True),
    "along the first dimension": lambda labels, scale, x: (
        torch.full((CLASSES, ROWS), 0.0).scatter(0, labels.t(), 1.0) * scale.t()).sum(0),
    "times infinity": lambda labels, scale, x: (scattered(labels) * (scale / 0)).sum(1),
    "over zero": lambda labels, scale, x: (scattered(labels) / (scale * 0)).sum(1),
}
KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "times what varies": lambda labels, scale, x: (scattered(labels) * x).sum(1),
    "more added": lambda labels, scale, x: (scattered(labels) + scale).sum(1),
    "into ones": lambda labels, scale, x: torch.full((ROWS, CLASSES), 1.0).scatter(1, labels, 3.0).sum(1),
    "of two places": lambda labels, scale, x: scattered(labels.expand(ROWS, 2)).sum(1),
    "of some rows": lambda labels, scale, x: scattered(labels[:3]).sum(1),
    "along the other dimension": lambda labels, scale, x: scattered(labels).sum(0),
    "of all": lambda labels, scale, x: scattered(labels).sum((0, 1)),
    "of a number": lambda labels, scale, x: scattered(labels)[0, 0].sum(0),
    "divided by": lambda labels, scale, x: (scale / (scattered(labels))).sum(1),
    "from another position on": lambda labels, scale, x: torch.where(torch.arange(2, CLASSES + 2) == labels, scale, 0.0).sum(1),
    "by what is no position": lambda labels, scale, x: torch.where(
        torch.arange(2 * CLASSES)[CLASSES:] == labels, scale, 0.0).sum(1),
}


@pytest.mark.parametrize("name", REPLACED)
def test_one_element_is_no_walk(name: str) -> None:
    assert sums(summed(REPLACED[name], LABELS, SCALES, X)) == 0


@pytest.mark.parametrize("name", KEPT)
def test_others_stay(name: str) -> None:
    assert sums(summed(KEPT[name], LABELS, SCALES, X)) == 1


def test_nan_beside_the_place_is_kept() -> None:
    assert math.isnan(summed(REPLACED["times infinity"], LABELS, SCALES, X)(LABELS, SCALES, X)[0])


def test_dynamic_sizes_and_numbers() -> None:
    def function(labels: Tensor, x: Tensor) -> Tensor:
        hot = torch.zeros_like(x).scatter(1, labels, 2.0 * x.shape[1]) * x.shape[0]
        return hot.sum(1) + x.sum(1) * x.shape[1]

    run = compiled(function, dynamic=True, executors="triton")
    for rows in (6, 4):
        torch.testing.assert_close(run(LABELS[:rows], X[:rows]), function(LABELS[:rows], X[:rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_cross_entropy(dtype: torch.dtype) -> None:
    def gradient(function: Callable[..., Tensor]) -> Tensor:
        x, labels = X.to(dtype, copy=True).requires_grad_(), LABELS[:, 0].clone()
        labels[2] = -100
        function(x, labels).backward()
        assert x.grad is not None
        return x.grad

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), labels)

    torch.testing.assert_close(gradient(compiled(loss, executors="triton")), gradient(loss))
