"""Numbers that a graph is given in tensors on the host: which are sent to the device, and how many at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from dynafuse.ir import Role
from dynafuse.passes.given_numbers import send_numbers
from tests.support import graphs
from tests.support.differential import check

aten = torch.ops.aten
Write = Callable[[graphs.Builder, Node, list[Node]], Node]


def sent(write: Write, *numbers: Tensor) -> tuple[GraphModule, Node]:
    """What becomes of a graph with an input of bfloat16 on a GPU, which need not be there, and of numbers on the host."""
    build = graphs.Builder(dynamic=False)
    given = [build.placeholder(number) for number in numbers]
    x = build.graph.placeholder("x")
    with build.mode:
        x.meta["val"] = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
    result = write(build, x, given)
    build.graph.output((result,))
    module = GraphModule(nn.Module(), build.graph)
    send_numbers(module)
    module.graph.eliminate_dead_code()
    return module, result


def calls(module: GraphModule, target: object) -> list[Node]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def on_host(module: GraphModule) -> set[str]:
    """What is computed on the host."""
    return {str(node.target) for node in module.graph.nodes
            if node.op == "call_function" and node.meta["val"].device.type == "cpu"}


def both(build: graphs.Builder, x: Node, given: list[Node]) -> Node:
    a, b = (build.op("prims.convert_element_type.default", number, torch.float32) for number in given)
    return build.op("aten.add.Tensor", build.op("aten.mul.Tensor", x, a), build.op("aten.mul.Tensor", a, b))


def test_numbers_of_a_dtype_are_sent_together() -> None:
    module, result = sent(lambda build, x, given: build.op("aten.mul.Tensor", both(build, x, given[:2]), given[2]),
                          torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64), torch.tensor(4))
    assert on_host(module) == {"aten.stack.default"}
    assert len(calls(module, aten.stack.default)) == 1 and len(calls(module, aten._to_copy.default)) == 2
    assert result.meta["val"].dtype is torch.bfloat16  # a number has no say in it


def test_what_is_computed_of_numbers_is_computed_where_they_are() -> None:
    module, _ = sent(lambda build, x, given: build.op("aten.mul.Tensor", x, build.op("aten.exp.default", given[0])),
                     torch.tensor(2.0))
    assert not on_host(module) and not calls(module, aten.stack.default)
    (exp,) = calls(module, aten.exp.default)
    assert exp.meta["val"].device.type == "cuda"


def test_what_meets_no_tensor_on_a_device_stays() -> None:
    def apart(build: graphs.Builder, x: Node, given: list[Node]) -> Node:
        build.op("aten.add_.Tensor", given[1], build.op("aten.exp.default", given[0]))
        return build.op("aten.mul.Tensor", x, given[1])  # which the graph writes to

    module, _ = sent(apart, torch.tensor(2.0), torch.tensor(3.0))
    assert not calls(module, aten._to_copy.default) and "aten.exp.default" in on_host(module)


def test_more_than_a_number_stays() -> None:
    module, _ = sent(lambda build, x, given: build.op("aten.index.Tensor", x, [None, given[0]]), torch.tensor([1, 2]))
    assert not calls(module, aten._to_copy.default)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.scale = 1e-6, 0.5

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.scale
        return x


@pytest.mark.gpu
def test_norms_with_floats_of_their_own_are_whole() -> None:
    model = Norms()
    for x in (torch.randn(64, 512, device="cuda"), torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)):
        (graph,) = check(model, x, grad=False, dynamic=True)
        assert not [fact.reason for node, fact in graph.plan.annotated.facts.items()
                    if fact.role is Role.EAGER and node.meta["val"].device.type == "cuda" and node.target is not aten._to_copy.default]
        assert len(graph.plan.regions) <= 2
