"""Where views lie, and that none reaches beyond what a kernel makes."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from dynafuse.partition.annotate import annotate
from dynafuse.runtime.views import place_in
from tests.support import graphs


def turned(g: graphs.Builder, x: Node) -> Node:
    """The worked example."""
    made = g.op("aten.mul.Tensor", x, 2.0)
    return g.op("aten.slice.Tensor", g.op("aten.t.default", made), 0, 1, 4)


def placed(module: torch.fx.GraphModule) -> tuple[object, ...]:
    annotated = annotate(module, "cpu")
    (view,) = module.graph.output_node().args[0]  # type: ignore[misc]
    return place_in(view, annotated.base(view), annotated.facts)


def test_the_worked_example() -> None:
    assert placed(graphs.built(turned, torch.randn(8, 4))) == ((3, 8), (1, 4), 1)


def test_a_view_that_reaches_beyond_its_base_is_a_mistake() -> None:
    module = graphs.built(turned, torch.randn(8, 4))
    (view,) = module.graph.output_node().args[0]  # type: ignore[misc]
    view.meta["val"] = torch.randn(16, 8)[::2, ::2].t()[1:]  # of the strides that a base with gaps had
    with pytest.raises(AssertionError, match="reaches beyond mul"):
        placed(module)
