"""Which regions share a launch, and what they become."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from dynafuse.cache.canonical import canonical
from dynafuse.cost.device import describe
from dynafuse.cost.model import Work, predict, predict_together
from dynafuse.ir import MAX_TENSORS, Nest, nests_apart
from dynafuse.partition.joins import MOST_NESTS
from tests.partition.test_grow import plan_of, steps
from tests.support import graphs

SMALL, OTHER = torch.empty(300), torch.empty(20, 50)


def pair(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
    return [g.op("aten.sin.default", x), g.op("aten.cos.default", y)]


def test_what_has_nothing_in_common_is_one_region_of_two_nests() -> None:
    (region,) = plan_of(pair, SMALL, OTHER).regions
    assert [axis.size for axis in region.axes] == [300, 20, 50]
    assert region.nests == (Nest((0,), (0,)), Nest((1, 2), (1,)))
    assert region.decision.kernel_class == "side by side"
    assert region.reasons == ("2 loops that have nothing in common share the launch",)
    assert region.bytes == 8 * (300 + 1000)


@pytest.mark.parametrize(("first", "second", "regions"), [
    (1 << 26, 1 << 25, 2), (1 << 24, 3 << 22, 2), (1 << 24, 1 << 21, 1)])
def test_what_takes_long_stays_apart(first: int, second: int, regions: int) -> None:
    """As one launch of two that take 34 and 26 µs has registers for both, it takes longer than two."""
    assert len(plan_of(pair, torch.empty(first), torch.empty(second)).regions) == regions


def test_what_needs_the_other_stays_apart() -> None:
    def through_a_product(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sin.default", g.op("aten.mm.default", g.op("aten.cos.default", x), x))

    def overwritten(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        begin = g.op("aten.slice.Tensor", x, 0, 0, 100)
        return [g.op("aten.cos.default", begin), g.op("aten.copy_.default", x, g.op("aten.sin.default", y))]

    assert len(plan_of(through_a_product, torch.empty(64, 64)).regions) == 2
    apart = plan_of(overwritten, torch.empty(4096), torch.empty(4096))
    assert steps(apart) == [["slice_tensor", "cos_default"], ["sin_default", "copy__default"]]


def test_what_a_collective_takes_waits_for_nothing() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        sent = g.op("_c10d_functional.all_reduce.default", g.op("aten.sin.default", x), "sum", "0")
        return [sent, g.op("aten.cos.default", y)]

    assert steps(plan_of(write, SMALL, OTHER))[:2] == [["sin_default"], "all_reduce_default"]


@pytest.mark.parametrize(("count", "regions"), [(1 << 10, 1), (1 << 23, 2)])
def test_large_zeros_stay_apart(count: int, regions: int) -> None:
    """Beside something early they would take memory until what they are for."""
    def write(g: graphs.Builder, x: Node, at: Node) -> list[Node]:
        zeros = g.op("aten.full.default", [count], 0.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
        early = g.op("aten.sin.default", x)
        return [early, g.op("aten.mm.default", g.op("aten.view.default", zeros, [32, -1]), at)]

    assert len(plan_of(write, SMALL, torch.empty(count // 32, 4)).regions) == regions


@pytest.mark.parametrize(("rows", "between", "regions"), [(1 << 10, True, 1), (1 << 14, True, 2), (1 << 14, False, 1)])
def test_what_frees_much_waits_for_no_library(rows: int, between: bool, regions: int) -> None:
    """Sums of rows of a product, of 2 or 32 MB, share a launch with others, but not with those of a product that follows."""
    def write(g: graphs.Builder, x: Node, y: Node, w: Node) -> list[Node]:
        first = g.op("aten.mm.default", x, w)
        second = g.op("aten.mm.default", y, w) if between else y
        return [g.op("aten.sum.dim_IntList", first, [1]), g.op("aten.amax.default", second, [1])]

    assert len(plan_of(write, torch.empty(rows, 512), torch.empty(96, 512), torch.empty(512, 512)).regions) == regions


@pytest.mark.parametrize(("size", "between", "regions"), [(512, True, 1), (1200, True, 2), (1200, False, 1)])
def test_weights_in_another_layout_are_not_made_long_before_they_are_read(size: int, between: bool, regions: int) -> None:
    """Of 1 and of 6 MB. Beside one that is read earlier the other would take memory while products run."""
    def write(g: graphs.Builder, x: Node, first: Node, second: Node) -> Node:
        first, second = (g.op("aten.clone.default", g.op("aten.permute.default", weight, [1, 0]),
                              memory_format=torch.contiguous_format) for weight in (first, second))
        return g.op("aten.mm.default", g.op("aten.mm.default", x, first) if between else first, second)

    assert len(plan_of(write, *(torch.empty(size, size) for _ in range(3))).regions) == regions


def test_columns_that_are_split_stay_apart() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        return [g.op("aten.sum.dim_IntList", x, [0]), g.op("aten.cos.default", y)]

    assert len(plan_of(write, torch.empty(8192, 256), SMALL).regions) == 2


def test_dynamic_sizes_stay_apart() -> None:
    assert len(plan_of(pair, SMALL, OTHER, joins=False).regions) == 2
    assert len(graphs.planned(graphs.built(pair, SMALL, OTHER, dynamic=True)).regions) == 2


@pytest.mark.parametrize("count", [MOST_NESTS, MOST_NESTS + 1, 120])
def test_no_launch_is_too_large(count: int) -> None:
    def write(g: graphs.Builder, *inputs: Node) -> list[Node]:
        return [g.op("aten.sin.default", x) for x in inputs]

    plan = plan_of(write, *(torch.empty(n) for n in range(100, 100 + count)))
    assert len(plan.regions) == -(-count // MOST_NESTS)
    for region in plan.regions:
        assert len(region.inputs) + len(region.outputs) <= MAX_TENSORS


def test_side_by_side_takes_no_longer_than_one_after_the_other() -> None:
    device = describe("h200")
    small, large = Work(1 << 16, 1e5, 16, "pointwise"), Work(1 << 28, 1e8, 1 << 20, "pointwise")
    for works in ([small, small], [small, large], [large, large], [small] * 30):
        together, apart = predict_together(works, device), [predict(work, device) for work in works]
        assert max(each.device_us for each in apart) <= together.device_us < sum(each.device_us for each in apart)
        assert together.host_us < sum(each.host_us for each in apart)


def test_nests_are_specs_of_their_own() -> None:
    """Those that compute the same are equal, whatever their tensors and numbers are called in the whole."""
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        def step(x: Node) -> Node:
            return g.op("aten.add.Tensor", g.op("aten.mul.Tensor", x, 0.3), 0.7)

        return [step(x), step(y)]

    plan = plan_of(write, torch.empty(20), torch.empty(30))
    spec = canonical(plan.annotated, plan.regions[0], (), "sm90").spec
    first, second = nests_apart(spec)
    assert (first.inputs, first.stores, second.inputs, second.stores) == ((0,), (0,), (1,), (1,))
    assert first.spec.ops[0].args == second.spec.ops[0].args
    assert [axis.size for axis in second.spec.axes] == [30]
    assert not second.spec.nests
    assert second.names()["in0"] == "in1"
