"""Tensors that are made on the host: which are made on the device that reads them, and which stay."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dynafuse.passes import host_tensors
from tests.support import graphs
from tests.support.differential import check

aten = torch.ops.aten
Write = Callable[[graphs.Builder, Node], Node]


def moved(write: Write, constant: Tensor | None = None) -> GraphModule:
    """What becomes of a graph with an input on a GPU, which need not be there."""
    build = graphs.Builder(dynamic=False)
    x = build.graph.placeholder("x")
    with build.mode:
        x.meta["val"] = torch.empty(4, 8, device="cuda")
    root = torch.nn.Module()
    if constant is not None:
        root.constant = constant
        held = build.graph.get_attr("constant")
        held.meta["val"] = build.mode.from_tensor(constant)
    build.graph.output((write(build, x),))
    module = GraphModule(root, build.graph)
    with patch.object(host_tensors, "copy_on", lambda device, constant: constant):
        host_tensors.make_on_device(module)
    module.graph.eliminate_dead_code()
    return module


def held(build: graphs.Builder) -> Node:
    return build.op("aten.lift_fresh_copy.default", next(iter(build.graph.find_nodes(op="get_attr"))))


def places(build: graphs.Builder, x: Node) -> Node:
    """Indices that are computed on the host, by way of floats and a view."""
    scaled = build.op("aten.mul.Tensor", build.op("aten.arange.default", 6), 0.5)
    return build.op("aten.view.default", build.op("aten._to_copy.default", scaled, dtype=torch.int64), [2, 3])


def sent(build: graphs.Builder, x: Node) -> Node:
    return build.op("aten.add.Tensor", x, build.op("prims.device_put.default", build.op("aten.arange.default", 8), torch.device("cuda")))


MADE: dict[str, tuple[Write, Tensor | None]] = {
    "indices": (lambda build, x: build.op("aten.index.Tensor", x, [places(build, x)]), None),
    "places to write to": (lambda build, x: build.op(
        "aten.index_put.default", x, [build.op("aten.arange.default", 4)], build.op("aten.neg.default", x)), None),
    "sent": (sent, None),
    "sent and cast": (lambda build, x: build.op("aten.mul.Tensor", x, build.op(
        "aten._to_copy.default", build.op("aten.ones.default", [4, 8]), dtype=torch.float16, device="cuda")), None),
    "copied": (lambda build, x: build.op("aten.copy.default", x, build.op("aten.full.default", [4, 8], 2.0)), None),
    "literals": (lambda build, x: build.op("aten.index.Tensor", x, [held(build)]), torch.tensor([1, 0, 3])),
    "with a number": (lambda build, x: build.op("aten.copy.default", x, build.op(
        "aten.mul.Tensor", build.op("aten.ones.default", [4, 8]), build.op("aten.scalar_tensor.default", 3.0))), None),
}


@pytest.mark.parametrize("name", MADE)
def test_what_depends_on_nothing_is_made_where_it_is_read(name: str) -> None:
    module = moved(*MADE[name])
    assert {node.meta["val"].device.type for node in module.graph.nodes if node.op != "output"} == {"cuda"}
    assert not list(module.graph.find_nodes(op="call_function", target=torch.ops.prims.device_put.default))


def test_a_literal_is_sent_once() -> None:
    module = moved(*MADE["literals"])
    (constant,) = module.graph.find_nodes(op="get_attr")
    assert constant.target == "sent_constant0"
    torch.testing.assert_close(module.sent_constant0, torch.tensor([1, 0, 3]))


def random(build: graphs.Builder, x: Node) -> Node:
    return build.op("aten.copy.default", x, build.op("aten.rand.default", [4, 8]))


def given(build: graphs.Builder, x: Node) -> Node:
    return build.op("aten.index.Tensor", x, [build.placeholder(torch.tensor([1, 2]))])


def written(build: graphs.Builder, x: Node) -> Node:
    places = build.op("aten.arange.default", 4)
    build.op("aten.add_.Tensor", build.op("aten.slice.Tensor", places, 0, 1, 2), 1)
    return build.op("aten.index.Tensor", x, [places])


def changed(build: graphs.Builder, x: Node) -> Node:
    constant = next(iter(build.graph.find_nodes(op="get_attr")))
    build.op("aten.add_.Scalar", constant, 1)
    return build.op("aten.index.Tensor", x, [constant])


STAYS: dict[str, tuple[Write, Tensor | None]] = {
    "random": (random, None), "given": (given, None), "written": (written, None), "changed": (changed, torch.tensor([1, 2]))}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_not_known_stays(name: str) -> None:
    (result,) = moved(*STAYS[name]).graph.output_node().args[0]
    assert any(node.meta["val"].device.type == "cpu" for node in result.all_input_nodes)


def test_who_reads_it_on_the_host_keeps_it() -> None:
    build = graphs.Builder(dynamic=False)
    host = build.op("aten.arange.default", 4)
    x = build.graph.placeholder("x")
    with build.mode:
        x.meta["val"] = torch.empty(4, device="cuda")
    build.graph.output((host, build.op("aten.index.Tensor", x, [host])))
    module = GraphModule(torch.nn.Module(), build.graph)
    host_tensors.make_on_device(module)
    returned, read = module.graph.output_node().args[0]
    assert returned is host
    assert read.args[1][0].meta["val"].device.type == "cuda"


@pytest.mark.gpu
def test_constants_on_the_host_in_a_kernel() -> None:
    def compute(x: Tensor, table: Tensor) -> Tensor:
        rows = torch.arange(64)
        near = ((rows[:, None] - rows[None, :]) * 1.0 + 63).long()
        scales = torch.tensor([0.5, 2.0, 1.5]).to(x.device)
        return (table[near] * x).view(64, 64, -1, 3).mul(scales) + torch.arange(3, device="cpu").cuda()

    (forward, backward) = check(compute, torch.randn(64, 64, 12, device="cuda", requires_grad=True),
                                torch.randn(127, 12, device="cuda", requires_grad=True))
    for graph in (forward, backward):
        values = [node.meta.get("val") for node in graph.plan.annotated.graph.nodes]
        assert {value.device.type for value in values if isinstance(value, Tensor)} == {"cuda"}
