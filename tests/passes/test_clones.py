"""Copies go where nobody can tell them from what they copy, and stay where somebody can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynafuse import backend
from dynafuse.passes.clones import COPIES
from dynafuse.runtime.observers import Compiled
from tests.support.differential import check, compiled

Function = Callable[[Tensor], object]


def attention(x: Tensor) -> Tensor:
    probabilities = F.dropout(torch.softmax(x @ x.mT, -1), p=0.0, training=True)
    return probabilities @ x


class Written(nn.Module):
    """Keeps a copy of its buffer, and changes it afterwards."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.state.clone()
        self.state.mul_(2)
        return x * before * self.state


GONE: dict[str, Function] = {
    "dropout of nothing": attention,
    "between products": lambda x: (x @ x).clone() @ x,
    "of a view": lambda x: (x @ x).t()[1:3].t().contiguous().clone() @ x[:2],
    "viewed": lambda x: (x @ x).clone().view(-1)[3:7].clone().exp(),
    "of a copy": lambda x: (x @ x).clone().clone() @ x,
    "padded by nothing": lambda x: F.pad(x @ x, (0, 0, 0, 0)).clone() @ x,
    "a concatenation of one": lambda x: torch.cat([x @ x]) @ x,
    "repeated once": lambda x: (x @ x).repeat(1, 1) @ x,
}
STAYS: dict[str, Function] = {
    "of an input": lambda x: x.clone(),
    "both returned": lambda x: (lambda y: (y, y.clone()))(x @ x),
    "a view returned": lambda x: (lambda y: (y[0], y.clone() @ x))(x @ x),
    "the view of a copy returned": lambda x: (lambda y: (y @ x, y.clone()[1:]))(x @ x),
    "an input padded by nothing": lambda x: F.pad(x, (0, 0)),
    "repeated with another dimension": lambda x: (x @ x).repeat(1, 1, 1) @ x,
    "in other strides": lambda x: (x @ x).t().contiguous().clone(memory_format=torch.contiguous_format) @ x,
}


def clones(function: Function, grad: bool) -> int:
    """How many copies all graphs of a function make."""
    graphs: list[Compiled] = []
    torch._dynamo.reset()
    with backend.listening(graphs.append, plan_only=False):
        compiled(function)(torch.randn(4, 4, requires_grad=grad))
    return sum(node.target in COPIES for graph in graphs for node in graph.plan.annotated.graph.nodes)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", GONE)
def test_what_nobody_can_tell_from_its_original_is_not_copied(name: str, grad: bool) -> None:
    check(GONE[name], torch.randn(4, 4, requires_grad=grad))
    assert clones(GONE[name], grad) == (name == "of a view")  # which makes rows of columns


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STAYS)
def test_what_the_caller_can_tell_is_copied(name: str, grad: bool) -> None:
    check(STAYS[name], torch.randn(4, 4, requires_grad=grad))
    assert clones(STAYS[name], grad) >= 1


def test_a_state_is_copied_before_it_changes() -> None:
    ours, eager, x = Written(), Written(), torch.randn(4, 4, requires_grad=True)
    call = compiled(ours)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x), torch.autograd.grad(eager(x).sum(), x))


def test_the_backward_keeps_one_of_both() -> None:
    graphs: list[Compiled] = []
    with backend.listening(graphs.append, plan_only=False):
        compiled(attention)(torch.randn(64, 8, requires_grad=True))
    (forward,) = (graph.plan.annotated.graph for graph in graphs if graph.kind == "forward")
    saved = [node for node in forward.output_node().all_input_nodes if node.meta["val"].numel() == 64 * 64]
    assert len(saved) == 1
