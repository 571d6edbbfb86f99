"""Channels-last: what is copied, what only gets other strides, and which strides the caller sees."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from dynafuse.passes import channels_last as layout
from dynafuse.passes import strides
from tests.support import graphs

aten = torch.ops.aten
X, WEIGHT, POINT = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(4, 8, 1, 1)
GEOMETRY = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def conv(g: graphs.Builder, x: Node, weight: Node) -> Node:
    return g.op("aten.convolution.default", x, weight, None, *GEOMETRY)


def moved(module: GraphModule, *inputs: torch.Tensor) -> GraphModule:
    """The graph in channels-last; it computes what it did, in the strides that it says and its caller had."""
    before, outputs, expected = strides.strides_of(module), module.graph.output_node().args[0], module(*inputs)
    layout.to_channels_last(module, before)
    strides.restore_outputs("inference", module, before)
    module.recompile()
    module.graph.lint()
    for found, want, output in zip(module(*inputs), expected, outputs, strict=True):
        torch.testing.assert_close(found, want)
        assert found.stride() == before[output]
    return module


def test_the_heuristic_is_asked_for_the_sizes_of_the_examples() -> None:
    module = graphs.built(lambda g, x, w: conv(g, x, w), X, WEIGHT, dynamic=True)
    asked = layout.with_examples(module)
    (static,) = layout.convolutions(asked)
    for operand, example in zip(static.args[:2], (X, WEIGHT), strict=True):
        value = operand.meta["val"]
        assert (value.shape, value.stride(), value.dtype) == (example.shape, example.stride(), example.dtype)
    (dynamic,) = layout.convolutions(module)
    assert all(isinstance(size, torch.SymInt) for operand in dynamic.args[:2] for size in operand.meta["val"].shape)
    known = graphs.built(lambda g, x, w: conv(g, x, w), X, WEIGHT)
    assert layout.with_examples(known) is known


@pytest.mark.parametrize("kind", ["inference", "forward"])
@pytest.mark.parametrize(("groups", "expected"), [((1,), True), ((96,), False), ((96, 1), True)])
def test_convolutions_that_are_written_out_are_not_moved_by_themselves(
        kind: str, groups: tuple[int, ...], expected: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 96, 6, 6, device="cuda")
        weights = [torch.empty(96, 96 // number, 3, 3, device="cuda") for number in groups]

    def write(g: graphs.Builder, x: Node, *weights: Node) -> Node:
        for weight, number in zip(weights, groups, strict=True):
            x = g.op("aten.convolution.default", x, weight, None, *GEOMETRY[:-1], number)
        return x

    assert layout.pays(kind, graphs.built(write, x, *weights)) is expected


@pytest.mark.parametrize("dynamic", [False, True])
def test_which_tensors_have_their_channels_innermost(dynamic: bool) -> None:
    last, point = (torch.empty(shape).to(memory_format=torch.channels_last) for shape in ((2, 4, 6, 5), (2, 4, 1, 1)))
    module = graphs.built(lambda g, *xs: xs, X, last, X[:, :, 1:], last[:, 1:], point, last.flatten(1), dynamic=dynamic)
    found = [layout.has_channels_innermost(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
    assert found == [False, True, False, True, False, False]


def read_by(module: GraphModule, target: Any) -> set[str]:
    """The names of what calls of an op read."""
    return {node.args[0].name for node in module.graph.nodes if node.target is target}


def test_a_weight_of_one_by_one_is_not_copied() -> None:
    module = graphs.built(lambda g, x, w, p: conv(g, conv(g, x, w), p), X, WEIGHT, POINT)
    moved(module, X, WEIGHT, POINT)
    assert read_by(module, aten.clone.default) == {"arg0", "arg1", "convolution_default_1"}
    assert "arg2" in read_by(module, aten.view.default)
    reading = [node for node in module.graph.nodes if node.target is aten.convolution.default]
    assert all(a.meta["val"].stride()[1] == 1 for node in reading for a in node.args[:2])


@pytest.mark.parametrize("size", [6, 1])
def test_attention_reads_dense_rows(size: int) -> None:
    def write(g: graphs.Builder, x: Node, weight: Node) -> Node:
        made = conv(g, x, weight)
        scaled = g.op("aten.mul.Tensor", made, 0.5)
        both = g.op("aten._scaled_dot_product_flash_attention_for_cpu.default", scaled, made, g.op("aten.view.default", made, made_shape))
        return g.op(operator.getitem, both, 0)

    x = torch.randn(2, 4, size + 2, size + 2)
    made_shape = [2, 8, size, size]
    module = moved(graphs.built(write, x, WEIGHT), x, WEIGHT)
    attention, = module.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert {operand.meta["val"].stride()[-1] for operand in attention.all_input_nodes} == {1}


@pytest.mark.parametrize(("padding", "innermost"), [(0, 8), (1, 1)])
def test_eager_takes_no_gradients_of_padded_averages_in_channels_last(padding: int, innermost: int) -> None:
    def write(g: graphs.Builder, x: Node, weight: Node) -> Node:
        image = conv(g, x, weight)
        window = [[3, 3], [1, 1], [padding, padding], False, True]
        averages = g.op("aten.avg_pool2d.default", image, *window)
        return g.op("aten.avg_pool2d_backward.default", averages, image, *window, None)

    module = moved(graphs.built(write, X, WEIGHT), X, WEIGHT)
    node, = module.graph.find_nodes(op="call_function", target=aten.avg_pool2d_backward.default)
    assert {operand.meta["val"].stride()[-1] for operand in node.all_input_nodes} == {innermost}


def backward(g: graphs.Builder, grad: Node, x: Node, weight: Node) -> list[Node]:
    both = g.op("aten.convolution_backward.default", grad, x, weight, [0], *GEOMETRY, [True, True, False])
    return [g.op(operator.getitem, both, k) for k in (0, 1)]


GRAD, IMAGE = torch.randn(2, 4, 6, 6), torch.randn(2, 8, 6, 6)


def test_a_gradient_of_one_by_one_is_not_copied_back() -> None:
    module = graphs.built(backward, GRAD, IMAGE, POINT)
    moved(module, GRAD, IMAGE, POINT)
    assert read_by(module, aten.clone.default) == {"arg0", "arg1", "getitem"}  # the gradient of the image is
    assert {"arg2", "getitem_1"} < read_by(module, aten.view.default)


def test_memory_that_others_can_reach_is_copied_back() -> None:
    def write(g: graphs.Builder, grad: Node, x: Node, weight: Node) -> list[Node]:
        of_weight = backward(g, grad, x, weight)[1]
        return [of_weight, g.op("aten.relu.default", of_weight)]

    module = moved(graphs.built(write, GRAD, IMAGE, POINT), GRAD, IMAGE, POINT)
    assert "getitem_1" in read_by(module, aten.clone.default)


def test_views_look_at_what_is_copied_back() -> None:
    def write(g: graphs.Builder, x: Node, weight: Node) -> list[Node]:
        made = conv(g, x, weight)
        turned = g.op("aten.permute.default", made, [1, 0, 3, 2])
        return [turned, made, g.op("aten.view.default", made, [2, 128]), g.op("aten.slice.Tensor", turned, 0, 3, 5)]

    module = moved(graphs.built(write, X, WEIGHT), X, WEIGHT)
    found = module(X, WEIGHT)
    assert len({result.untyped_storage().data_ptr() for result in found}) == 1
    assert found[3].storage_offset() == 3 * 16


def test_a_result_in_another_order_of_dimensions_gets_its_strides() -> None:
    def write(g: graphs.Builder, x: Node, weight: Node) -> Node:
        return g.op("aten.exp.default", g.op("aten.permute.default", conv(g, x, weight), [1, 0, 3, 2]))

    moved(graphs.built(write, X, WEIGHT), X, WEIGHT)


@pytest.mark.parametrize(("tags", "strides"), [
    ((), (128, 16, 4, 1)), ((torch.Tag.needs_fixed_stride_order,), (128, 16, 4, 1)), ((torch.Tag.flexible_layout,), (128, 1, 32, 8)),
], ids=["untagged", "fixed", "flexible"])
def test_ops_of_others_see_eagers_strides_unless_they_take_any(tags: tuple[torch.Tag, ...], strides: tuple[int, ...]) -> None:
    seen: list[tuple[int, ...]] = []

    def look(values: list[torch.Tensor], scale: int) -> torch.Tensor:
        seen.extend(value.stride() for value in values if type(value) is torch.Tensor)
        return values[0] * scale

    with torch.library._scoped_library("layouts", "FRAGMENT") as library:
        library.define("look(Tensor[] values, int scale) -> Tensor", tags=tags)
        library.impl("look", look, "CompositeExplicitAutograd")
        module = graphs.built(
            lambda g, x, w: g.op("aten.relu.default", g.op("layouts.look.default", [conv(g, x, w)], 2)), X, WEIGHT)
        moved(module, X, WEIGHT)
    assert seen == [(128, 16, 4, 1), strides]


def test_what_calls_graphs_sees_eagers_strides() -> None:
    def write(g: graphs.Builder, x: Node, weight: Node) -> Node:
        return g.op(operator.getitem, g.op(identity, conv(g, x, weight)), 0)

    seen: list[tuple[int, ...]] = []

    class Identity(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("layouts_identity")

        def __call__(self, value: torch.Tensor) -> tuple[torch.Tensor]:
            if type(value) is torch.Tensor:
                seen.append(value.stride())
            return (value * 1,)

    identity = Identity()
    moved(graphs.built(write, X, WEIGHT), X, WEIGHT)
    assert seen == [(128, 16, 4, 1)] * 2


def test_a_gradient_that_is_part_of_a_sequence_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a vision transformer's patches lies between those of class tokens."""
    def write(g: graphs.Builder, rows: Node, x: Node, weight: Node) -> list[Node]:
        patches = g.op("aten.slice.Tensor", rows, 1, 1, 37)
        grad = g.op("aten.view.default", g.op("aten.permute.default", patches, [0, 2, 1]), [2, 4, 6, 6])
        return backward(g, grad, x, weight)

    monkeypatch.setattr(layout, "_may_move", lambda node, kind: True)
    assert layout.pays("backward", graphs.built(write, torch.randn(2, 37, 4), IMAGE, POINT))
    assert not layout.pays("backward", graphs.built(backward, GRAD, IMAGE, POINT))
