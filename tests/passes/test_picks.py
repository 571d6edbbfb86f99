"""Gathers that move before what computes what they pick from: which do, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from dynafuse.fx import arguments, is_view
from dynafuse.passes.picks import pick_early
from tests.support import graphs

aten = torch.ops.aten
ROWS, CLASSES = 12, 300


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, CLASSES, generator=generator), torch.randint(0, CLASSES, (ROWS, 1), generator=generator)]


def moved(module: GraphModule) -> GraphModule:
    pick_early(module)
    module.graph.lint()
    module.recompile()
    return module


def gathers(module: GraphModule) -> list[torch.fx.Node]:
    return list(module.graph.find_nodes(op="call_function", target=aten.gather.default))


def log_softmax(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    largest = x.amax(1, keepdim=True)
    return ((x - largest) - (x - largest).exp().sum(1, keepdim=True).log()).gather(1, at)


MOVED: dict[str, Callable[..., Any]] = {
    "log softmax": log_softmax,
    "several operands that vary": lambda x, at: (x.exp() * (x + 1)).gather(1, at),
    "one operand of few dimensions": lambda x, at: (x * x[0]).gather(1, at),
    "casts between": lambda x, at: (x.double() * 3).float().gather(-1, at),
    "kept rows, read by a reduction, too": lambda x, at: ((x * 2).sum(), (x * 2).gather(1, at)),
    "along the first dimension": lambda x, at: (x.t() + 1).gather(0, at.t()),
}
KEPT: dict[str, Callable[..., Any]] = {
    "what is returned": lambda x, at: ((y := x.exp()), y.gather(1, at)),
    "a view of what is returned": lambda x, at: ((y := x.exp()).t(), y.gather(1, at)),
    "what a matrix product reads": lambda x, at: ((y := x.exp()) @ x.t(), y.gather(1, at)),
    "many picks": lambda x, at: x.exp().gather(1, at.expand(ROWS, CLASSES)),
    "some rows": lambda x, at: x.exp().gather(1, at[:5]),
    "the same along the dimension": lambda x, at: x[:, :1].exp().expand(ROWS, CLASSES).gather(1, at),
    "an input": lambda x, at: x.gather(1, at),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_picked_is_computed_alone(name: str) -> None:
    module = moved(graphs.traced(MOVED[name], *inputs()))
    assert gathers(module)
    for gather in gathers(module):
        picked_from = arguments(gather)["self"]
        assert picked_from.op == "placeholder" or is_view(picked_from)
    torch.testing.assert_close(module(*inputs()), MOVED[name](*inputs()), rtol=0, atol=0)
    for node in module.graph.find_nodes(op="call_function", target=aten.gather.default):
        assert node.meta["val"].shape == arguments(node)["index"].meta["val"].shape


@pytest.mark.parametrize("name", KEPT)
def test_what_is_stored_anyway_is_read(name: str) -> None:
    module = graphs.traced(KEPT[name], *inputs())
    before = str(module.graph)
    pick_early(module)
    assert str(module.graph) == before


def test_an_index_out_of_range_is_still_told() -> None:
    module = moved(graphs.traced(log_softmax, *inputs()))
    x, _ = inputs()
    with pytest.raises(RuntimeError):
        module(x, torch.full((ROWS, 1), CLASSES))


def test_a_cross_entropy_stores_no_row() -> None:
    """Whatever it stores beside its results is one element per row."""
    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x, labels)

    module = moved(graphs.traced(loss, torch.empty(512, 32000), torch.zeros(512, dtype=torch.int64)))
    plan = graphs.planned(module)
    sizes = [plan.annotated.facts[output].tensor.bytes for region in plan.regions for output in region.outputs]
    assert sizes and max(sizes) <= 512 * 8
