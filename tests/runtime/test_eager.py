"""Graphs that run node by node: in the layouts that were planned, boxed, and overwriting what they are to overwrite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.runtime.eager import eager
from tests.support import graphs


def wrong_about_strides(g: graphs.Builder, x: Node) -> Node:
    """A view of a result of which tracing says that its columns lie together."""
    made = g.op("aten.mul.Tensor", x, 2.0)
    planned = made.meta["val"]
    made.meta["val"] = planned.new_empty_strided(planned.shape, (1, planned.shape[0]))
    return g.op("aten.view.default", g.op("aten.t.default", made), [-1])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_are_laid_out_as_was_planned(dynamic: bool) -> None:
    x = torch.randn(4, 6)
    call = eager(graphs.built(wrong_about_strides, x, dynamic=dynamic))
    for given in [x, torch.randn(5, 7)] if dynamic else [x]:
        arguments = [given]
        (found,) = call(arguments)
        torch.testing.assert_close(found, (given * 2).t().reshape(-1))
        assert arguments == [], "boxed"


def test_inputs_are_overwritten_and_outputs_alias_them() -> None:
    def write(g: graphs.Builder, x: Node) -> Any:
        new = g.op("aten.add.Tensor", x, 1.0)
        copy = g.op("aten.copy_.default", x, new)
        return copy, g.op("aten.t.default", x)

    x = torch.randn(3, 4)
    before = x.clone()
    copy, view = eager(graphs.built(write, x))([x])
    torch.testing.assert_close(x, before + 1)
    assert copy.data_ptr() == view.data_ptr() == x.data_ptr() and view.stride() == (1, 4)


def test_what_torch_returns_in_other_sizes_is_no_result() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        made = g.op("aten.mul.Tensor", x, 2.0)
        made.meta["val"] = made.meta["val"].new_empty(9, 9)
        return made

    with pytest.raises(RuntimeError, match="compiled for"):
        eager(graphs.built(write, torch.randn(3, 4)))([torch.randn(3, 4)])
