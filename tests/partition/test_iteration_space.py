"""Axes of units, what is cheap enough to be computed again, and along which axes units read each other."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.fx import GraphModule, Node

from dynafuse.partition.axes import leaves
from dynafuse.partition.iteration_space import (
    LEAST_FOR_LANES,
    NEAR,
    UNROLL,
    UNROLL_BACK,
    UNROLL_NEAR,
    Read,
    Spaces,
)
from dynafuse.partition.kernel_class import LANES
from dynafuse.partition.places import FEW_LANES, Operand
from tests.support import graphs

X = torch.randn(8, 6)
FULL, WIDE = torch.empty(64, 512), torch.empty(64, 512, dtype=torch.bfloat16)


def spaces_of(module: GraphModule, recompute: bool = True) -> Spaces:
    return Spaces(graphs.annotated(module), recompute)


def named(spaces: Spaces, name: str) -> Node:
    return next(node for node in spaces.graph.nodes if node.name == name)


def units(spaces: Spaces) -> list[str]:
    return [node.name for node in spaces.dims]


def cheap(spaces: Spaces) -> set[str]:
    return {node.name for node in spaces.cheap}


def places(spaces: Spaces, unit: Node, read: Read) -> Any:
    """The axes of a read as places in those of its unit; None where there are no whole axes."""
    own = leaves(axis for dim in spaces.dims[unit] for axis in dim)
    return None if read.dims is None else [[own.index(axis) for axis in leaves(dim)] for dim in read.dims]


def reads_of(write: Any, *inputs: torch.Tensor) -> list[tuple[str, Any, int]]:
    """What the last unit of a graph reads: the source, along which of its axes, and how many elements."""
    spaces = spaces_of(graphs.built(write, *inputs))
    unit = list(spaces.dims)[-1]
    return [(read.source.name, places(spaces, unit, read), read.elements) for read in spaces.reads(unit)]


# Where operands are read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "inputs", "expected"), [
    (lambda g, x: g.op("aten.exp.default", x), [X], [("arg0", [[0], [1]], 48)]),
    (lambda g, x: g.op("aten.exp.default", g.op("aten.permute.default", x, [1, 0])), [X], [("arg0", [[1], [0]], 48)]),
    (lambda g, x: g.op("aten.exp.default", g.op("aten.permute.default", x, [2, 0, 1])), [torch.randn(2, 3, 4)],
     [("arg0", [[1], [2], [0]], 24)]),
    (lambda g, x, y: g.op("aten.add.Tensor", x, y), [X, X[0]], [("arg0", [[0], [1]], 48), ("arg1", [[1]], 48)]),
    (lambda g, x, y: g.op("aten.add.Tensor", x, y), [X, X[:, :1].clone()], [("arg0", [[0], [1]], 48), ("arg1", [[0], []], 48)]),
    (lambda g, x, y: g.op("aten.mul.Tensor", x, g.op("aten.expand.default", y, [8, 6])), [X, X[:, :1].clone()],
     [("arg0", [[0], [1]], 48), ("arg1", [[0], []], 8)]),  # what is repeated is loaded once
    (lambda g, x: g.op("aten.exp.default", g.op("aten.view.default", x, [8, 2, 3])), [X], [("arg0", [[0], [1, 2]], 48)]),
    (lambda g, x: g.op("aten.exp.default", g.op("aten.view.default", x, [48])), [X], [("arg0", [[0], [1]], 48)]),
    (lambda g, x: g.op("aten.exp.default", g.op("aten.slice.Tensor", x, 0, 1, 4)), [X], [("arg0", None, 18)]),
    (lambda g, x: g.op("aten.flip.default", x, [1]), [X], [("arg0", None, 48)]),
    (lambda g, x: g.op("aten.amax.default", x, [1]), [torch.randn(8, 60)], [("arg0", [[0], [1]], 480)]),
], ids=["pointwise", "transposed", "permuted", "row", "column", "expanded", "split", "flattened", "slice", "flip", "reduction"])
def test_a_unit_reads_along_its_own_axes(write: Any, inputs: list[torch.Tensor], expected: Any) -> None:
    assert reads_of(write, *inputs) == expected


IMAGE = torch.randn(2, 64, 8, 8)
PARTS: dict[str, tuple[Any, torch.Tensor, Operand]] = {
    "a quarter of each row": (
        lambda g, x: g.op("aten.constant_pad_nd.default", x, [64, 128], 0.0), torch.randn(8, 64), Operand(share=0.25)),
    "the first rows": (
        lambda g, x: g.op("aten.constant_pad_nd.default", x, [0, 0, 0, 8], 0.0), torch.randn(8, 16), Operand(share=0.5)),
    "a few of each row": (
        lambda g, x: g.op("aten.constant_pad_nd.default", x, [0, 16], 0.0), torch.randn(8, 16), Operand(share=0.5, is_mixed=True)),
    "a few rows of images": (
        lambda g, x: g.op("aten.constant_pad_nd.default", x, [0, 0, 0, 8], 0.0), IMAGE, Operand(share=0.5)),
    "a few rows of images, channels last": (
        lambda g, x: g.op("aten.constant_pad_nd.default", x, [0, 8], 0.0), IMAGE.to(memory_format=torch.channels_last),
        Operand(share=0.5)),
    "repeated": (lambda g, x: g.op("aten.repeat.default", x, [2, 1]), torch.randn(8, 64), Operand()),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_result_are_computed_alone_if_they_are_long_enough(name: str) -> None:
    """What is repeated is computed for all of the result, and so is what lanes beside one another need only in part."""
    write, x, expected = PARTS[name]
    spaces = spaces_of(graphs.built(write, x))
    (unit,) = spaces.dims
    assert list(spaces.operands[unit].values()) == [expected]


@pytest.mark.parametrize(("operand", "computed", "loaded"), [
    (Operand(), 1.0, 1.0), (Operand(share=0.25), 0.25, 0.25), (Operand(share=0.5, is_mixed=True), 1.0, 0.5),
    (Operand(share=0.05, is_mixed=True), 1.0, FEW_LANES),
])
def test_lanes_that_need_nothing_compute_but_load_nothing(operand: Operand, computed: float, loaded: float) -> None:
    assert (operand.computed, operand.loaded) == (computed, loaded)


def test_views_in_a_row_are_looked_through_together() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        split = g.op("aten.view.default", x, [8, 2, 3])
        return g.op("aten.exp.default", g.op("aten.permute.default", split, [1, 0, 2]))

    assert reads_of(write, X) == [("arg0", [[1], [0, 2]], 48)]


def test_a_reduction_has_the_axes_of_what_it_reduces() -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.sum.dim_IntList", x, [0, 2], True)]

    spaces = spaces_of(graphs.built(write, torch.randn(20, 30, 40)))
    short, kept = spaces.dims
    assert [[axis.size for axis in dim] for dim in spaces.dims[short]] == [[20], [30], [40]]
    assert spaces.reduced_axes(short) == (spaces.dims[short][1],)
    assert spaces.out_dims(short) == (spaces.dims[short][0], spaces.dims[short][2])
    assert spaces.reduced_axes(kept) == (spaces.dims[kept][0], spaces.dims[kept][2])
    assert spaces.out_dims(kept) == ((), spaces.dims[kept][1], ())


@settings(max_examples=60, deadline=None)
@given(st.permutations([2, 3, 5, 7]), st.permutations(range(4)), st.integers(0, 3))
def test_permutations_keep_the_size_of_every_dimension(shape: list[int], order: list[int], cut: int) -> None:
    """Through a permutation and a view that joins two neighbours, what is read along an axis has that axis' size."""
    def write(g: graphs.Builder, x: Node) -> Node:
        moved = g.op("aten.permute.default", x, order)
        sizes = [shape[d] for d in order]
        joined = [*sizes[:cut], math.prod(sizes[cut:cut + 2]), *sizes[cut + 2:]]
        made = g.op("aten.clone.default", moved, memory_format=torch.contiguous_format)
        return g.op("aten.exp.default", g.op("aten.view.default", made, joined))

    spaces = spaces_of(graphs.built(write, torch.randn(shape)))
    for unit in spaces.dims:
        for read in spaces.reads(unit):
            assert read.dims is not None
            sizes = [math.prod(axis.size for axis in leaves(dim)) for dim in read.dims]
            assert sizes == list(spaces.tensor(read.source).shape)


# What is computed again -----------------------------------------------------------------------------------------------


def twice_read(target: str, *more: Any, **keywords: Any) -> Any:
    """A node with two readers, each of which could compute it for itself."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        made = g.op(target, x, *more, **keywords)
        return [g.op("aten.exp.default", made), g.op("aten.sin.default", made)]

    return write


@pytest.mark.parametrize(("target", "more", "value", "expected"), [
    ("aten.add.Tensor", [1.0], FULL, {"add_tensor"}),
    ("prims.convert_element_type.default", [torch.float32], WIDE, {"convert_element_type_default"}),  # reads half of what it makes
    ("prims.convert_element_type.default", [torch.bfloat16], FULL, set()),  # twice of what it makes
    ("aten.tan.default", [], FULL, set()),  # more arithmetic than a read is worth
    ("aten.amax.default", [[1]], FULL, set()),
    ("aten.flip.default", [[1]], FULL, set()),
], ids=["scaling", "cast up", "cast down", "arithmetic", "reduction", "index"])
def test_what_costs_no_more_than_a_read_is_cheap(target: str, more: list[Any], value: torch.Tensor, expected: set[str]) -> None:
    module = graphs.built(twice_read(target, *more), value)
    assert cheap(spaces_of(module)) == expected
    assert cheap(spaces_of(module, recompute=False)) == set()


def test_constants_are_cheap_even_without_recomputation() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        zeros = g.op("aten.full.default", [64, 512], 2.5)
        return g.op("aten.atan2.default", x, zeros)

    spaces = spaces_of(graphs.built(write, FULL), recompute=False)
    assert (cheap(spaces), units(spaces)) == ({"full_default"}, ["atan2_default"])
    assert [read.source.name for read in spaces.reads(named(spaces, "atan2_default"))] == ["arg0"]


def test_arithmetic_adds_up_along_a_chain() -> None:
    """Each step is cheap by itself; from some length on the whole is not."""
    def write(g: graphs.Builder, x: Node) -> Node:
        made = x
        for _ in range(40):
            made = g.op("aten.mul.Tensor", made, 1.5)
        return g.op("aten.exp.default", made)

    spaces = spaces_of(graphs.built(write, FULL))
    chain = [node for node in spaces.graph.nodes if "mul" in node.name]
    assert chain[0] in spaces.cheap
    assert not set(chain) <= spaces.cheap


@pytest.mark.parametrize(("dims", "length", "again"), [((1, 0), 1, True), ((1, 0), 3, False), ((0, 1), 3, True)])
def test_what_windows_read_transposed_is_not_computed_again(dims: tuple[int, int], length: int, again: bool) -> None:
    """Lanes side by side read far from each other then, as often as there are elements in a window."""
    def write(g: graphs.Builder, x: Node) -> Node:
        copied = g.op("aten.clone.default", g.op("aten.permute.default", x, dims), memory_format=torch.contiguous_format)
        return g.op("aten.avg_pool2d.default", g.op("aten.unsqueeze.default", copied, 0), [length] * 2, [1, 1])

    spaces = spaces_of(graphs.built(write, torch.empty(64, 64)))
    assert (named(spaces, "clone_default") in spaces.cheap) == again


@pytest.mark.parametrize(("dtype", "again"), [(torch.int64, True), (torch.int32, True), (torch.float32, False)])
def test_integers_of_places_are_computed_again(dtype: torch.dtype, again: bool) -> None:
    """As where a tensor is rolled: loaded, they would be looked up, checked, and known to be no neighbours."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        place = g.op("prims.iota.default", 6, start=0, step=1, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)
        place = place if dtype is torch.int64 else g.op("prims.convert_element_type.default", place, dtype)
        shifted = g.op("aten.fmod.Scalar", g.op("aten.add.Tensor", place, 2), 6)
        return [g.op("aten.mul.Tensor", x, shifted), g.op("aten.sub.Tensor", x, shifted)]

    assert ("fmod_scalar" in cheap(spaces_of(graphs.built(write, X)))) == again


def test_integers_of_places_and_data_are_not() -> None:
    module = graphs.built(twice_read("aten.fmod.Scalar", 6), torch.ones(64, 512, dtype=torch.int64))
    assert "fmod_scalar" not in cheap(spaces_of(module))


@pytest.mark.parametrize(("starts", "length", "again"), [
    ((0, 1, 2, 3, 4), 508, False), ((0, 1), 508, True), ((0, 128, 256, 384), 128, True)])
def test_what_overlapping_slices_have_is_computed_for_each(starts: tuple[int, ...], length: int, again: bool) -> None:
    """A filter along rows of what a filter along columns returns; pieces beside one another have each element once."""
    def write(g: graphs.Builder, x: Node) -> Node:
        value = g.op("aten.add.Tensor", g.op("aten.mul.Tensor", x, 2.0), g.op("aten.mul.Tensor", g.op("aten.neg.default", x), 3.0))
        parts = [g.op("aten.slice.Tensor", value, 1, start, start + length) for start in starts]
        return functools.reduce(lambda a, b: g.op("aten.add.Tensor", a, b), parts)

    assert ("add_tensor" in cheap(spaces_of(graphs.built(write, FULL)))) == again


def test_what_the_caller_gets_is_not_cheap() -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        scaled, returned = g.op("aten.mul.Tensor", x, 2.0), g.op("aten.mul.Tensor", x, 3.0)
        return [g.op("aten.exp.default", g.op("aten.add.Tensor", scaled, returned)), g.op("aten.view.default", returned, [512, 64])]

    spaces = spaces_of(graphs.built(write, FULL))
    assert "mul_tensor" in cheap(spaces)
    assert "mul_tensor_1" in {node.name for node in spaces.needed} - cheap(spaces)


def test_what_is_overwritten_is_not_read_again_later() -> None:
    """Computed again by a reader, it would have to be before the overwriting."""
    def write(g: graphs.Builder, x: Node, y: Node) -> Node:
        scaled = g.op("aten.mul.Tensor", x, 2.0)
        result = g.op("aten.exp.default", scaled)
        g.op("aten.copy_.default", x, y)
        return result

    spaces = spaces_of(graphs.built(write, FULL, FULL))
    assert {node.name for node in spaces.overwritten} == {"arg0"}
    assert cheap(spaces) == set()


# Short reductions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "length", "target", "expected"), [
    (LANES, UNROLL, "aten.sum.dim_IntList", True),
    (LANES, UNROLL + 1, "aten.sum.dim_IntList", False),
    (LANES - 1, LEAST_FOR_LANES - 1, "aten.sum.dim_IntList", True),
    (LANES - 1, LEAST_FOR_LANES, "aten.sum.dim_IntList", False),  # lanes would have nothing to do
    (NEAR, UNROLL, "aten.amax.default", True),
    (NEAR, UNROLL + 1, "aten.amax.default", False),  # what it reads is too large to stay in a first cache
    (LANES, UNROLL, "aten.var.correction", False),  # carries several states
])
def test_short_reductions_are_written_out(rows: int, length: int, target: str, expected: bool) -> None:
    spaces = spaces_of(graphs.built(lambda g, x: g.op(target, x, [1]), torch.empty(rows, length)))
    (unit,) = spaces.dims
    assert (spaces.is_unrolled(unit), spaces.is_reduction(unit)) == (expected, not expected)
    sizes = [axis.size for dim in spaces.dims[unit] for axis in dim]
    assert sizes == ([rows] if expected else [rows, length])


@pytest.mark.parametrize(("length", "columns", "expected"), [
    (UNROLL_BACK, UNROLL_BACK, True),
    (UNROLL_BACK + 1, UNROLL_BACK + 1, False),  # a row computes it once for all of its elements
    (UNROLL, 2 * UNROLL, True),
    (UNROLL_NEAR, UNROLL_NEAR, False),
    (UNROLL_NEAR, 2 * UNROLL_NEAR, True),
    (UNROLL_NEAR + 1, 2 * UNROLL_NEAR, False),
])
def test_longer_ones_are_written_out_where_other_elements_need_them(length: int, columns: int, expected: bool) -> None:
    def norms(g: graphs.Graph, x: Node, y: Node) -> Node:
        total = g.op("aten.sum.dim_IntList", x, [1], True)
        return g.op("aten.mul.Tensor", y, g.op("aten.rsqrt.default", total))

    spaces = spaces_of(graphs.built(norms, torch.empty(LANES, length), torch.empty(LANES, columns)))
    unit = next(node for node in spaces.dims if "sum" in node.name)
    assert (spaces.is_unrolled(unit), spaces.is_reduction(unit)) == (expected, not expected)


def test_reductions_of_unknown_length_are_not_written_out() -> None:
    spaces = spaces_of(graphs.built(lambda g, x: g.op("aten.sum.dim_IntList", x, [1]), torch.randn(6, 4), dynamic=True))
    (unit,) = spaces.dims
    assert spaces.is_reduction(unit)
