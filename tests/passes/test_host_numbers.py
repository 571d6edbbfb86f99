"""Numbers in tensors on the host: which become constants on the device, with their dtypes, and which stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.ir import Role
from dynafuse.passes.host_numbers import move_numbers
from tests.support import graphs
from tests.support.differential import check

aten = torch.ops.aten
Write = Callable[[graphs.Builder, Node], Node]


def moved(write: Write, constant: torch.Tensor | None = None) -> tuple[GraphModule, Node]:
    """What becomes of a graph with an input of bfloat16 on a GPU, which need not be there, and a constant on the host."""
    build = graphs.Builder(dynamic=False)
    x = build.graph.placeholder("x")
    with build.mode:
        x.meta["val"] = torch.empty(4, 8, dtype=torch.bfloat16, device="cuda")
    root = torch.nn.Module()
    if constant is not None:
        root.constant = constant
        held = build.graph.get_attr("constant")
        held.meta["val"] = build.mode.from_tensor(constant)
    result = write(build, x)
    build.graph.output((result,))
    module = GraphModule(root, build.graph)
    move_numbers(module)
    module.graph.eliminate_dead_code()
    return module, result


def constants(graph: Graph) -> list[tuple[Any, torch.dtype, str]]:
    """The numbers that are on a device, with their dtypes."""
    return [(node.args[1], node.meta["val"].dtype, node.meta["val"].device.type)
            for node in graph.find_nodes(op="call_function", target=aten.full.default)]


def held(build: graphs.Builder) -> Node:
    return build.op("aten.lift_fresh_copy.default", next(iter(build.graph.find_nodes(op="get_attr"))))


WRITTEN: dict[str, tuple[Write, torch.Tensor | None, float]] = {
    "a constant": (lambda build, x: build.op("aten.mul.Tensor", x, held(build)), torch.tensor(0.5), 0.5),
    "a literal": (lambda build, x: build.op("aten.where.self", build.op("aten.gt.Scalar", x, 0), x,
                                            build.op("aten.scalar_tensor.default", -math.inf)), None, -math.inf),
    "computed": (lambda build, x: build.op("aten.sub.Tensor", x, build.op("aten.neg.default", build.op(
        "aten.exp.default", held(build)))), torch.tensor(0.0), -1.0),
    "copied": (lambda build, x: build.op("aten.copy.default", x, build.op("aten.full.default", [], 2.0)), None, 2.0),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_known_number_is_a_constant_on_the_device(name: str) -> None:
    write, constant, number = WRITTEN[name]
    module, result = moved(write, constant)
    assert constants(module.graph) == [(number, torch.float32, "cuda")]
    assert result.meta["val"].dtype is torch.bfloat16  # a number has no say in it
    assert all(node.meta["val"].device.type == "cuda" for node in module.graph.nodes if node.op != "output")


def test_a_number_that_is_sent_to_the_device_is_there() -> None:
    module, _ = moved(lambda build, x: build.op("aten.add.Tensor", x, build.op(
        "aten._to_copy.default", held(build), device="cuda", dtype=torch.float16)), torch.tensor(1 / 3, dtype=torch.float64))
    assert constants(module.graph) == [(torch.tensor(1 / 3).half().item(), torch.float16, "cuda")]
    assert "_to_copy" not in str(module.graph)


def test_a_number_that_is_not_known_stays() -> None:
    def random(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.mul.Tensor", x, build.op("aten.rand.default", []))

    def given(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.mul.Tensor", x, build.placeholder(torch.tensor(2.0)))

    def changed(build: graphs.Builder, x: Node) -> Node:
        constant = next(iter(build.graph.find_nodes(op="get_attr")))
        build.op("aten.add_.Scalar", constant, 1)
        return build.op("aten.mul.Tensor", x, constant)

    assert not constants(moved(random)[0].graph)
    assert not constants(moved(given)[0].graph)
    assert not constants(moved(changed, torch.tensor(2.0))[0].graph)


def test_more_than_a_number_stays() -> None:
    module, _ = moved(lambda build, x: build.op("aten.index_put.default", x, [None, held(build)], x), torch.tensor([1, 2]))
    assert not constants(module.graph)


def test_a_graph_on_the_host_is_as_it_was() -> None:
    module = graphs.built(lambda build, x: build.op("aten.mul.Tensor", x, build.op("aten.full.default", [], 2.0)), torch.ones(3))
    before = str(module.graph)
    move_numbers(module)
    assert str(module.graph) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_numbers_on_the_host_in_a_kernel(dtype: torch.dtype) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        y = torch.where(x > 1, x, torch.tensor(3.0)) * torch.tensor(0.5, dtype=torch.float64)
        y[:, 0] = 7
        return y + torch.tensor(1.5).exp().cuda()

    x = (torch.randn(64, 65, device="cuda") * 3).to(dtype)
    (graph,) = check(compute, x, grad=False)
    assert len(graph.plan.regions) == 1
    assert not [fact.reason for fact in graph.plan.annotated.facts.values() if fact.role is Role.EAGER]
