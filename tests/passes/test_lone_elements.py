"""Reductions of one element each are copies: which are, and that values, dtypes and strides stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dynafuse.passes.lone_elements import REDUCTIONS, copy_lone_elements
from tests.support import graphs
from tests.support.differential import compiled

X = torch.tensor([[[1.5], [-2.0], [float("nan")]], [[float("inf")], [-0.0], [3.25]]])

COPIED: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: x.sum(2),
    "with the dimension kept": lambda x: x.sum(-1, keepdim=True),
    "a mean": lambda x: x.mean(2),
    "a product": lambda x: x.prod(2),
    "a maximum": lambda x: x.amax((2,)),
    "of all there is": lambda x: x[:1, :1].sum(),
    "of a number": lambda x: x[0, 0, 0].max(),
    "into another dtype": lambda x: x.sum(2, dtype=torch.float64),
    "of bools": lambda x: (x > 0).sum(2),
    "of integers": lambda x: x.isnan().int().sum(2, dtype=torch.int32),
}

LEFT: dict[str, Callable[[Tensor], Tensor]] = {
    "of several elements": lambda x: x.sum(1),
    "of a dimension of one and another": lambda x: x.sum((1, 2)),
    "whose result lies otherwise than a copy": lambda x: x.transpose(0, 1).sum(2),
    "a variance": lambda x: x.var(2, correction=0),
}


def reductions(module: GraphModule) -> int:
    return sum(node.target in (*REDUCTIONS, torch.ops.aten.var.correction) for node in module.graph.nodes)


def copied(function: Callable[[Tensor], Tensor], x: Tensor) -> GraphModule:
    """The graph of a function after the pass, which returns what it did."""
    module, found, expected = graphs.changed(function, copy_lone_elements, x)
    assert torch.equal(found.signbit(), expected.signbit())
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    return module


@pytest.mark.parametrize("function", COPIED.values(), ids=COPIED)
def test_reductions_of_one_element_are_copies(function: Callable[[Tensor], Tensor]) -> None:
    assert reductions(copied(function, X)) == 0


@pytest.mark.parametrize("function", LEFT.values(), ids=LEFT)
def test_other_reductions_stay(function: Callable[[Tensor], Tensor]) -> None:
    assert reductions(copied(function, X)) == 1


def test_a_result_is_no_view_of_what_it_copies() -> None:
    x = X.clone()
    result = compiled(lambda x: x.sum(2))(x)
    result.zero_()
    torch.testing.assert_close(x, X, equal_nan=True)
