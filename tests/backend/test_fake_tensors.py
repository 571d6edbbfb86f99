"""Calls with fake tensors, which say what a model would return and how much memory it would take: there is nothing to compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from tests.support.differential import compiled


def rows(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().softmax(-1)


@pytest.mark.parametrize("executors", ["triton", None])
def test_results_and_gradients_are_fake(executors: str | None) -> None:
    torch._dynamo.reset()
    function = compiled(rows, dynamic=None, **{"executors": executors} if executors else {})
    with FakeTensorMode():
        x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
        result = function(x, weight)
        result.sum().backward()
    assert isinstance(result, FakeTensor) and result.shape == (5, 6)
    assert isinstance(weight.grad, FakeTensor) and weight.grad.shape == (4, 6)
    x, weight = torch.randn(5, 4), torch.randn(4, 6)
    torch.testing.assert_close(function(x, weight), rows(x, weight))


def test_fake_tensors_of_symbolic_sizes_after_real_ones() -> None:
    torch._dynamo.reset()
    function, real = compiled(rows, dynamic=None, executors="triton"), (torch.randn(5, 4), torch.randn(4, 6))
    torch.testing.assert_close(function(*real), rows(*real))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
        result = function(mode.from_tensor(real[0], symbolic_context=dynamic), mode.from_tensor(real[1]))
    assert isinstance(result, FakeTensor) and isinstance(result.shape[0], torch.SymInt)
