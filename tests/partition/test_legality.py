"""Which nodes one kernel can compute together: the class of their iteration space, or what stands against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.fx import UNKNOWN_SIZE
from dynafuse.ir import Refusal
from dynafuse.partition.axes import Axis
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.legality import Shape, after, classify, computes_anywhere, members_of, product
from tests.support import graphs

X, ROW, COLUMN = torch.empty(64, 512), torch.empty(512), torch.empty(64, 1)
DEEP = torch.empty(20, 30, 40)


def joined(write: Any, *inputs: torch.Tensor, dynamic: bool = False) -> Spaces:
    """The spaces of a graph whose units run along each other's axes, as if all were to share a kernel."""
    spaces = Spaces(graphs.annotated(graphs.built(write, *inputs, dynamic=dynamic)), recompute=False)
    first: dict[Node, Any] = {}
    for unit in spaces.dims:
        for read in spaces.reads(unit):
            shared = spaces.out_dims(read.source) if read.source in spaces.dims else first.setdefault(read.source, read.dims)
            assert read.dims is not None and spaces.unifier.unify_dims(shared, read.dims)
    return spaces


def classified(spaces: Spaces, inlined: frozenset[Node] = frozenset()) -> Shape | Refusal:
    """The class of all units of a graph, of which those are stored that the graph returns."""
    return classify(spaces, members_of(spaces, list(spaces.dims), inlined, spaces.needed))


def sizes(axes: Sequence[Axis] | frozenset[Axis]) -> list[Any]:
    return sorted(axis.size for axis in axes)


def described(shape: Shape | Refusal) -> str:
    """The class with its sizes: all, of the rows' axes, of the columns'."""
    if isinstance(shape, Refusal):
        return str(shape)
    return f"{shape.kind} {sizes(shape.axes)} {sizes(shape.reduced)} {sizes(shape.columns)}"


def softmax(g: graphs.Builder, x: Node, dim: int = 1) -> Node:
    shifted = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [dim], True)))
    return g.op("aten.div.Tensor", shifted, g.op("aten.sum.dim_IntList", shifted, [dim], True))


def normalized(g: graphs.Builder, x: Node) -> list[Node]:
    """A value that needs its row's sum, and the sum of it over all rows."""
    scaled = g.op("aten.mul.Tensor", x, g.op("aten.sum.dim_IntList", x, [1], True))
    return [scaled, g.op("aten.sum.dim_IntList", scaled, [0])]


FITTING: dict[str, tuple[Any, tuple[torch.Tensor, ...], str]] = {
    "pointwise": (lambda g, x: g.op("aten.exp.default", g.op("aten.sin.default", x)), (X,), "pointwise [64, 512] [] []"),
    "smaller, not stored": (
        lambda g, x, w: g.op("aten.add.Tensor", x, g.op("aten.exp.default", w)), (X, ROW), "pointwise [64, 512] [] []"),
    "reshaped": (
        lambda g, x: g.op("aten.exp.default", g.op("aten.view.default", g.op("aten.sin.default", x), [64, 8, 64])), (X,),
        "pointwise [8, 64, 64] [] []"),
    "softmax": (softmax, (X,), "row [64, 512] [512] []"),
    "softmax of columns": (lambda g, x: softmax(g, x, 0), (X,), "row [64, 512] [64] []"),
    "everything": (lambda g, x: g.op("aten.sum.default", g.op("aten.exp.default", x)), (X,), "row [64, 512] [64, 512] []"),
    "two dimensions": (lambda g, x: g.op("aten.sum.dim_IntList", x, [0, 2]), (DEEP,), "row [20, 30, 40] [20, 40] []"),
    "row and column": (normalized, (X,), "rowcol [64, 512] [512] [64]"),
}


@pytest.mark.parametrize("name", FITTING)
def test_classes(name: str) -> None:
    write, inputs, expected = FITTING[name]
    assert described(classified(joined(write, *inputs))) == expected


def returned_twice(g: graphs.Builder, x: Node, w: Node) -> list[Node]:
    small = g.op("aten.exp.default", w)
    return [small, g.op("aten.add.Tensor", x, small)]


def beside_softmax(g: graphs.Builder, x: Node, w: Node) -> list[Node]:
    small = g.op("aten.exp.default", w)
    return [small, softmax(g, g.op("aten.add.Tensor", x, small))]


def fewer_rows(g: graphs.Builder, x: Node, w: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", g.op("aten.add.Tensor", x, w), [1]), g.op("aten.sum.dim_IntList", w, [0])]


def sums_of(*dims: list[int]) -> Any:
    return lambda g, x: [g.op("aten.sum.dim_IntList", x, dim) for dim in dims]


def early(g: graphs.Builder, x: Node) -> Node:
    centred = g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [0], True))
    return g.op("aten.sum.dim_IntList", centred, [1])


def variances(g: graphs.Builder, x: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.var.correction", x, [0])]


def diagonal(g: graphs.Builder, x: Node) -> Node:
    wave = g.op("aten.exp.default", x)
    return g.op("aten.add.Tensor", wave, g.op("aten.permute.default", wave, [1, 0]))


REFUSED: dict[str, tuple[Any, tuple[torch.Tensor, ...], str]] = {
    "a smaller output": (returned_twice, (X, ROW), "exp_default | add_tensor: sizes differ (512 against 32768)"),
    "an output along the rows only": (
        beside_softmax, (X, ROW), "exp_default | div_tensor: sizes differ (512 against 32768)"),
    "rows of one operand": (fewer_rows, (X, ROW), "sum_dim_int_list_1 | sum_dim_int_list_1: a reduction over fewer rows"),
    "three sets": (
        sums_of([0], [1], [2]), (DEEP,),
        "sum_dim_int_list | sum_dim_int_list_2: reductions over different dimensions (3 sets)"),
    "two sets that leave an axis": (
        sums_of([0], [1]), (DEEP,), "sum_dim_int_list | sum_dim_int_list_1: reductions over different dimensions"),
    "two sets that share an axis": (
        sums_of([0, 1], [1, 2]), (DEEP,), "sum_dim_int_list | sum_dim_int_list_1: reductions over different dimensions"),
    "a column sum before the rows": (early, (X,), "sum_dim_int_list | sub_tensor: used before it is complete"),
    "a column's variance": (
        variances, (X,), "var_correction | var_correction: a column reduction of several states"),
    "rows with gaps": (
        sums_of([0], [1]), (torch.empty(64, 1024)[:, ::2],),
        "sum_dim_int_list | sum_dim_int_list_1: no contiguous rows"),
    "the diagonal": (diagonal, (torch.empty(64, 64),), "exp_default | exp_default: one axis twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_which_nodes_and_with_which_numbers(name: str) -> None:
    write, inputs, expected = REFUSED[name]
    assert described(classified(joined(write, *inputs))) == expected


def test_rows_of_unknown_length_are_not_held() -> None:
    spaces = joined(normalized, torch.empty(64, 512), dynamic=True)
    assert described(classified(spaces)).endswith("rows of unknown length for one pass")


def test_which_axis_is_the_row_follows_the_memory() -> None:
    """The same sums over a transposed tensor: what lies together in memory is a row."""
    shapes = [classified(joined(sums_of([0], [1]), x)) for x in (X, torch.empty(512, 64).t())]
    assert [described(shape) for shape in shapes] == ["rowcol [64, 512] [512] [64]", "rowcol [64, 512] [64] [512]"]


def test_rows_and_length_multiply_to_all_points() -> None:
    shape = classified(joined(lambda g, x: g.op("aten.sum.dim_IntList", x, [0, 2]), DEEP))
    assert isinstance(shape, Shape) and (shape.rows, shape.length, product(shape.axes)) == (30, 800, 24000)


def test_unknown_sizes_count_as_a_guess() -> None:
    spaces = joined(lambda g, x: g.op("aten.exp.default", x), torch.empty(3, 5), dynamic=True)
    (unit,) = spaces.dims
    assert product([axis for dim in spaces.dims[unit] for axis in dim]) == UNKNOWN_SIZE**2


def test_inlined_nodes_have_no_axes_of_their_own() -> None:
    spaces = joined(returned_twice, X, ROW)
    small, wide = spaces.dims
    assert [member.node for member in members_of(spaces, [small, wide], frozenset({small}), spaces.needed)] == [wide]
    assert described(classified(spaces, frozenset({small}))) == "pointwise [64, 512] [] []"


def test_what_needs_a_reduction_is_found_through_views() -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        total = g.op("aten.sum.dim_IntList", x, [1])
        later = g.op("aten.exp.default", g.op("aten.mul.Tensor", x, g.op("aten.unsqueeze.default", total, 1)))
        return [later, g.op("aten.sin.default", x)]

    spaces = joined(write, X)
    found = members_of(spaces, list(spaces.dims), frozenset(), spaces.needed)
    late = after(spaces, found, frozenset(node for node in spaces.dims if "sum" in node.name))
    assert {node.name for node in late} == {"mul_tensor", "exp_default"}


def test_reductions_and_copies_stay_where_they_are() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        wave = g.op("aten.exp.default", y)
        total = g.op("aten.sum.dim_IntList", wave, [1])
        g.op("aten.copy_.default", x, wave)
        return [total]

    spaces = Spaces(graphs.annotated(graphs.built(write, X, X)), recompute=False)
    wave, total, copy = spaces.dims
    assert [computes_anywhere(spaces, nodes) for nodes in ([wave], [wave, total], [wave, copy])] == [None, total, copy]
