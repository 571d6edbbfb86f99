"""Each clean-up of an ATen graph, before and after."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from dynafuse.fx import arguments
from dynafuse.passes.normalize import normalize
from tests.support import graphs
from tests.support.differential import compiled
from tests.support.normalized import after, text

X = torch.randn(6, 8)


def item(build: graphs.Builder, node: Node, position: int) -> Node:
    return build.op(operator.getitem, node, position)


def test_zeros_without_memory_are_stored() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        zeros = build.op("aten._efficientzerotensor.default", [8], dtype=torch.float64, device=torch.device("cpu"))
        return [zeros, build.op("aten.expand.default", zeros, [6, 8])]

    module = normalize(graphs.built(write, X))
    assert text(module) == (
        "full_default = aten.full.default([8], 0, dtype=torch.float64, device=cpu)\n"
        "expand_default = aten.expand.default(full_default, [6, 8])\n"
        "return full_default, expand_default")
    module.recompile()
    for zeros in module(X):
        assert zeros.dtype is torch.float64 and not zeros._is_zerotensor() and not zeros.any()
    assert not any(node.meta["val"]._is_zerotensor() for node in module.graph.nodes if node.op != "output")


def test_a_piece_of_a_split_is_a_slice() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.relu.default", item(build, build.op("aten.split.Tensor", x, 3, -1), 2))

    assert after(write, X) == (
        "slice_tensor = aten.slice.Tensor(arg0, -1, 6, 8)\n"
        "relu_default = aten.relu.default(slice_tensor)\n"
        "return relu_default")


def test_a_piece_of_given_size_is_a_slice() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return item(build, build.op("aten.split_with_sizes.default", x, [1, 2, 3]), 1)

    assert after(write, X) == "slice_tensor = aten.slice.Tensor(arg0, 0, 1, 3)\nreturn slice_tensor"


def test_a_piece_of_unbind_is_a_select() -> None:
    assert after(lambda b, x: item(b, b.op("aten.unbind.int", x, 1), 5), X) == (
        "select_int = aten.select.int(arg0, 1, 5)\nreturn select_int")


def test_var_mean_is_two_reductions() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        both = build.op("aten.var_mean.correction", x, [1], correction=0, keepdim=True)
        return [item(build, both, 0), item(build, both, 1)]

    assert after(write, X) == (
        "var_correction = aten.var.correction(arg0, [1], correction=0, keepdim=True)\n"
        "mean_dim = aten.mean.dim(arg0, [1], True)\n"
        "return var_correction, mean_dim")


def test_a_maximum_and_its_position_are_two_reductions() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        both = build.op("aten.max.dim", x, 1)
        return [item(build, both, 0), item(build, both, 1)]

    assert after(write, X) == (
        "amax_default = aten.amax.default(arg0, [1], False)\n"
        "argmax_default = aten.argmax.default(arg0, 1, False)\n"
        "return amax_default, argmax_default")


def test_the_position_of_a_bool_comes_with_the_maximum() -> None:
    """Whatever a graph holds has to run eager, and eager has no ``argmax`` of bools."""
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        both = build.op("aten.max.dim", build.op("aten.gt.Scalar", x, 0), 1)
        return [item(build, both, 0), item(build, both, 1)]

    assert after(write, X) == (
        "gt_scalar = aten.gt.Scalar(arg0, 0)\n"
        "max_dim = aten.max.dim(gt_scalar, 1)\n"
        "amax_default = aten.amax.default(gt_scalar, [1], False)\n"
        "getitem_1 = getitem(max_dim, 1)\n"
        "return amax_default, getitem_1")


def test_pooling_whose_indices_nobody_reads_has_one_output() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return item(build, build.op("aten.max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1]), 0)

    assert after(write, X[None]) == (
        "max_pool2d_default = aten.max_pool2d.default(arg0, [3, 3], [2, 2], [1, 1], [1, 1], False)\nreturn max_pool2d_default")

    def read(build: graphs.Builder, x: Node) -> list[Node]:
        both = build.op("aten.max_pool2d_with_indices.default", x, [2, 2])
        return [item(build, both, 0), item(build, both, 1)]

    assert "aten.max_pool2d.default" not in after(read, X[None])


def test_other_outputs_stay_as_they_are() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return item(build, build.op("aten.sort.default", x), 0)

    assert after(write, X) == (
        "sort_default = aten.sort.default(arg0)\ngetitem = getitem(sort_default, 0)\nreturn getitem")


def test_ops_that_do_nothing_go() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.alias.default", build.op("aten.relu.default", x))
        made = build.op("aten.view.default", made, [6, 8])
        made = build.op("aten.expand.default", made, [6, 8])
        made = build.op("prims.convert_element_type.default", made, torch.float32)
        return build.op("aten.neg.default", build.op("aten.detach.default", made))

    assert after(write, X) == (
        "relu_default = aten.relu.default(arg0)\nneg_default = aten.neg.default(relu_default)\nreturn neg_default")


def test_strides_that_a_call_asks_for_are_kept() -> None:
    def overlapping(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_strided((5, 5, 5), (2, 0, 1)), x.new_empty_strided((4, 3), (0, 1))

    found = compiled(overlapping)(torch.ones(2))
    assert [result.stride() for result in found] == [(2, 0, 1), (0, 1)]


def test_strides_that_tracing_got_wrong_are_settled_with_those_of_views() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        filled = build.op("aten.slice_scatter.default", x, x, 0, 0, 6)
        filled.meta["val"] = x.meta["val"]  # what older torch reports: the strides of what is written into
        return build.op("aten.select.int", build.op("aten.slice.Tensor", filled, 0, 1, 4), 1, 2)

    module = normalize(graphs.built(write, X[:1].expand(6, 8)))
    strides = {node.name: node.meta["val"].stride() for node in module.graph.nodes if node.op == "call_function"}
    assert strides == {"slice_scatter_default": (8, 1), "slice_tensor": (8, 1), "select_int": (8,)}


def test_views_that_undo_each_other_go() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.permute.default", build.op("aten.unsqueeze.default", x, 0), [2, 1, 0])
        made = build.op("aten.squeeze.dim", build.op("aten.permute.default", made, [2, 1, 0]), 0)
        return build.op("aten.neg.default", made)

    assert after(write, X) == "neg_default = aten.neg.default(arg0)\nreturn neg_default"


def test_views_of_the_same_sizes_at_another_place_stay() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        pieces = [build.op("aten.slice.Tensor", build.op("aten.slice.Tensor", x, 0, a, a + 4), 0, b, b + 2)
                  for a, b in ((0, 2), (2, 0), (2, 2))]
        return build.op("aten.cat.default", pieces)

    assert after(write, X).count("slice") > 6


def test_the_conjugate_of_a_complex_view_stays() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.view.default", build.op("aten._conj.default", x), [48])
        return build.op("aten.neg.default", build.op("aten.view.default", made, [6, 8]))

    assert "_conj" in after(write, torch.complex(X, X))


def test_a_batch_of_one_product_is_that_product() -> None:
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        return build.op("aten.neg.default", build.op("aten.bmm.default", x, y))

    assert after(write, X[None], X.t()[None]) == (
        "squeeze_dim = aten.squeeze.dim(arg0, 0)\nsqueeze_dim_1 = aten.squeeze.dim(arg1, 0)\n"
        "mm_default = aten.mm.default(squeeze_dim, squeeze_dim_1)\nunsqueeze_default = aten.unsqueeze.default(mm_default, 0)\n"
        "neg_default = aten.neg.default(unsqueeze_default)\nreturn neg_default")


def test_nothing_scattered_and_everything_scattered_go() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        wide = build.op("aten.neg.default", x)
        none = build.op("aten.slice.Tensor", wide, 1, 8, 9)
        wide = build.op("aten.slice_scatter.default", wide, none, 1, 8, 9)
        return build.op("aten.relu.default", build.op("aten.slice_scatter.default", x, wide, 1, 0, 8))

    assert after(write, X) == (
        "neg_default = aten.neg.default(arg0)\nrelu_default = aten.relu.default(neg_default)\nreturn relu_default")


def test_a_returned_scatter_has_memory_of_its_own() -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, Node]:
        wide = build.op("aten.neg.default", x)
        return wide, build.op("aten.slice_scatter.default", wide, build.op("aten.slice.Tensor", wide, 1, 8, 9), 1, 8, 9)

    assert "slice_scatter" in after(write, X)


def test_views_and_casts_that_do_something_stay() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.view.default", x, [8, 6])
        return build.op("prims.convert_element_type.default", made, torch.float64)

    assert after(write, X) == (
        "view_default = aten.view.default(arg0, [8, 6])\n"
        "convert_element_type_default = prims.convert_element_type.default(view_default, torch.float64)\n"
        "return convert_element_type_default")


def test_a_returned_view_of_an_input_stays() -> None:
    assert after(lambda b, x: b.op("aten.alias.default", x), X) == (
        "alias_default = aten.alias.default(arg0)\nreturn alias_default")


def test_two_outputs_stay_two() -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, ...]:
        made = build.op("aten.relu.default", x)
        return build.op("aten.detach.default", made), build.op("aten.alias.default", made), build.op("aten.neg.default", made)

    assert after(write, X) == (
        "relu_default = aten.relu.default(arg0)\nalias_default = aten.alias.default(relu_default)\n"
        "neg_default = aten.neg.default(relu_default)\nreturn relu_default, alias_default, neg_default")


def test_equal_calls_are_merged() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.mul.Tensor", build.op("aten.exp.default", x), build.op("aten.exp.default", x))

    assert after(write, X) == (
        "exp_default = aten.exp.default(arg0)\n"
        "mul_tensor = aten.mul.Tensor(exp_default, exp_default)\n"
        "return mul_tensor")


def test_random_calls_are_not_merged() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        return [build.op("aten.bernoulli.p", x, 0.5), build.op("aten.bernoulli.p", x, 0.5)]

    assert text(normalize(graphs.built(write, X))).count("bernoulli.p(") == 2


def test_dead_code_goes() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        build.op("aten.exp.default", x)
        return build.op("aten.neg.default", x)

    assert after(write, X) == "neg_default = aten.neg.default(arg0)\nreturn neg_default"


def test_writes_to_inputs_are_not_dead() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        made = build.op("aten.neg.default", x)
        build.op("aten.copy_.default", x, made)
        return made

    assert "aten.copy_.default(arg0, neg_default)" in text(normalize(graphs.built(write, X)))


def test_arguments_have_their_schema_names_and_defaults() -> None:
    module = graphs.built(lambda b, x: b.op("aten.sum.dim_IntList", x, [0]), X)
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    assert {k: v for k, v in arguments(node).items() if k != "self"} == {"dim": [0], "keepdim": False, "dtype": None}


@pytest.mark.parametrize(("target", "sizes", "expected"), [
    ("aten.split.Tensor", lambda build, n: n,
     "mul = mul(2, arg1)\nslice_tensor = aten.slice.Tensor(arg0, 0, arg1, mul)\nreturn slice_tensor"),
    ("aten.split_with_sizes.default", lambda build, n: [n, 1, build.op(operator.sub, 11, n)],
     "add = add(arg1, 1)\nslice_tensor = aten.slice.Tensor(arg0, 0, arg1, add)\nreturn slice_tensor"),
    ("aten.split_with_sizes.default", lambda build, n: [1, n, build.op(operator.sub, 11, n)],
     "add = add(1, arg1)\nslice_tensor = aten.slice.Tensor(arg0, 0, 1, add)\nreturn slice_tensor"),
], ids=["equal", "first", "second"])
def test_where_pieces_end_is_computed_by_nodes(target: str, sizes: Any, expected: str) -> None:
    environment, source = ShapeEnv(), ConstantSource("n")
    symbol = environment.create_unspecified_symbol(5, source, DimDynamic.DYNAMIC)
    number = environment.create_symintnode(symbol, hint=5, source=source)

    def write(build: graphs.Builder, x: Node, n: Node) -> Node:
        return item(build, build.op(target, x, sizes(build, n), 0), 1)

    module = normalize(graphs.built(write, torch.randn(12, 2), number))
    assert text(module) == expected
    assert all("val" in node.meta for node in module.graph.nodes if node.op != "output")
