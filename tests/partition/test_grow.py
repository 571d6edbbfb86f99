"""Plans of small graphs: which nodes share a region, what a region is made of, and why others stay apart."""

from __future__ import annotations

import cProfile
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import describe
from dynafuse.ir import Annotated, Plan, Region
from dynafuse.partition.executors import Executors
from dynafuse.partition.search import partition
from tests.support import graphs

H200 = describe("h200")
X, SQUARE = torch.empty(4096, 512), torch.empty(512, 512)


def planned(module: GraphModule, executors: tuple[str, ...] = ("triton",), **options: Any) -> Plan:
    annotated = graphs.annotated(module)
    return partition(annotated, H200, Executors(annotated.facts, executors), **options)


def plan_of(write: Any, *inputs: torch.Tensor, **options: Any) -> Plan:
    return planned(graphs.built(write, *inputs), **options)


def steps(plan: Plan) -> list[list[str] | str]:
    """The names of each region's nodes, and of the other steps."""
    return [[n.name for n in step.nodes] if isinstance(step, Region) else step.name for step in plan.steps]


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def refusals(plan: Plan) -> list[str]:
    return [str(refusal) for refusal in plan.refusals]


def waves(count: int) -> Any:
    def write(g: graphs.Builder, x: Node) -> Node:
        for _ in range(count):
            x = g.op("aten.sin.default", x)
        return x

    return write


# What shares a region -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "images", "classes"), [
    (32, 3136, ["split", "pointwise"]), (96, 3136, ["row"]), (32, 784, ["row"]), (512, 3136, ["row"]),
    (256, 5625, ["split", "pointwise"])])
def test_channels_are_split_if_that_pays_for_reading_them_again(channels: int, images: int, classes: list[str]) -> None:
    """Whether it does shows once all that may share them does: the mean joins the variance before what needs both."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        numbers = g.op("prims.convert_element_type.default", x, torch.float32)
        variance = g.op("aten.var.correction", numbers, [0, 2], keepdim=True)
        mean = g.op("aten.mean.dim", numbers, [0, 2], True)
        normal = g.op("aten.mul.Tensor", g.op("aten.sub.Tensor", x, mean), g.op("aten.rsqrt.default", variance))
        running = g.op("aten.mul.Tensor", g.op("aten.squeeze.dims", mean, [0, 2]), 0.1)
        return [g.op("prims.convert_element_type.default", normal, torch.bfloat16), running]

    plan = plan_of(write, torch.empty(32, channels, images, dtype=torch.bfloat16))
    assert [region.decision.kernel_class for region in plan.regions] == classes
    assert not any("waits" in refusal or "too long" in refusal for refusal in refusals(plan))


def test_softmax_and_what_follows_is_one_region() -> None:
    def write(g: graphs.Builder, x: Node, mask: Node) -> Node:
        wave = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
        return g.op("aten.mul.Tensor", g.op("aten.div.Tensor", wave, g.op("aten.sum.dim_IntList", wave, [1], True)), mask)

    plan = plan_of(write, X, X)
    (region,) = plan.regions
    assert steps(plan) == [["amax_default", "sub_tensor", "exp_default", "sum_dim_int_list", "div_tensor", "mul_tensor"]]
    assert (names(region.inputs), names(region.outputs)) == (["arg0", "arg1"], ["mul_tensor"])
    assert [(axis.size, axis.reduced) for axis in region.axes] == [(4096, False), (512, True)]
    assert names(sorted(region.reductions, key=lambda n: n.name)) == ["amax_default", "sum_dim_int_list"]
    assert region.dims[region.nodes[0]] == ((0,), (1,)) and dict(region.out_dims) == {region.outputs[0]: ((0,), (1,))}
    assert region.bytes == 3 * X.numel() * 4 and refusals(plan) == []


def test_products_part_regions() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.mm.default", g.op("aten.relu.default", g.op("aten.mm.default", x, x)), x)

    assert steps(plan_of(write, SQUARE)) == ["mm_default", ["relu_default"], "mm_default_1"]


def test_what_both_halves_scale_is_scaled_in_both() -> None:
    """A cheap node belongs to every region that reads it, and is stored by none."""
    def write(g: graphs.Builder, x: Node) -> Node:
        scaled = g.op("aten.mul.Tensor", x, 0.5)
        wave = g.op("aten.sin.default", scaled)
        return g.op("aten.add.Tensor", g.op("aten.mm.default", wave, wave), scaled)

    plan = plan_of(write, SQUARE)
    assert steps(plan) == [["mul_tensor", "sin_default"], "mm_default", ["mul_tensor", "add_tensor"]]
    assert [names(region.outputs) for region in plan.regions] == [["sin_default"], ["add_tensor"]]
    assert [names(region.inputs) for region in plan.regions] == [["arg0"], ["arg0", "mm_default"]]


def test_a_producer_is_computed_where_its_reader_looks() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.flip.default", g.op("aten.sin.default", x), [1])

    (region,) = plan_of(write, X).regions
    assert names(region.nodes) == ["sin_default", "flip_default"]
    assert names(region.dims) == ["flip_default"]  # the other has no place of its own
    assert region.bytes == 2 * X.numel() * 4


def test_readers_of_a_slice_share_a_region() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        part = g.op("aten.slice.Tensor", x, 1, 0, 300)
        wave = g.op("aten.exp.default", g.op("aten.sub.Tensor", part, g.op("aten.amax.default", part, [1], True)))
        return g.op("aten.div.Tensor", wave, g.op("aten.sum.dim_IntList", wave, [1], True))

    plan = plan_of(write, X)
    (region,) = plan.regions
    assert [axis.size for axis in region.axes] == [4096, 300]
    assert not plan.refusals


def test_readers_of_different_slices_stay_apart() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        left, right = g.op("aten.slice.Tensor", x, 1, 0, 200), g.op("aten.slice.Tensor", x, 1, 200, 400)
        most = g.op("aten.amax.default", left, [1], True)
        return g.op("aten.mul.Tensor", g.op("aten.sum.dim_IntList", right, [1], True), most)

    plan = plan_of(write, torch.empty(1 << 16, 512))
    assert any("different places" in refusal for refusal in refusals(plan))


def test_readers_of_a_tensor_share_a_region_though_others_of_its_readers_lie_between_them() -> None:
    def write(g: graphs.Builder, x: Node, y: Node, z: Node) -> tuple[Node, ...]:
        kept = g.op("aten.relu.default", x)
        results = [kept]
        for other in (y, z):
            total = g.op("aten.sum.dim_IntList", g.op("aten.mul.Tensor", kept, other), [0])
            results.append(g.op("aten.sub.Tensor", kept, total))
        return tuple(results)

    first, second = plan_of(write, X, X, X).regions
    assert len(first.reductions) == 2 and not second.reductions
    assert len(second.outputs) == 2


def test_small_loops_over_equally_many_points_share_a_launch() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        return [g.op("aten.sin.default", x), g.op("aten.cos.default", y), g.op("aten.sum.dim_IntList", y, [1])]

    assert steps(plan_of(write, torch.empty(64, 32), torch.empty(64, 32))) == [["sin_default", "cos_default", "sum_dim_int_list"]]
    assert len(plan_of(write, torch.empty(64, 32), torch.empty(32, 64), joins=False).regions) == 2
    assert len(plan_of(write, torch.empty(1 << 14, 1 << 12), torch.empty(1 << 14, 1 << 12)).regions) == 2


def test_results_that_share_an_operand_along_a_dimension_run_along_the_others_together() -> None:
    def write(g: graphs.Builder, x: Node, row: Node) -> list[Node]:
        rows, columns = g.op("aten.unsqueeze.default", row, 1), g.op("aten.unsqueeze.default", row, 0)
        return [g.op("aten.eq.Tensor", rows, columns), g.op("aten.le.Tensor", rows, columns)]

    (region,) = plan_of(write, X, torch.empty(4096)).regions
    assert [axis.size for axis in region.axes] == [4096, 4096]


def test_readers_across_each_other_stay_apart_along_the_rest() -> None:
    """The rows of one result are the columns of the other: no dimension is taken for the other one."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        across = g.op("aten.permute.default", x, [1, 0])
        return [g.op("aten.sin.default", x), g.op("aten.cos.default", across)]

    (region,) = plan_of(write, torch.empty(1024, 1024)).regions
    assert sorted(map(tuple, region.dims.values())) == [((0,), (1,)), ((1,), (0,))]


def test_sums_of_two_kernels_share_their_launches() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        return [g.op("aten.sum.default", x), g.op("aten.sum.default", y)]

    assert len(plan_of(write, torch.empty(1 << 14), torch.empty(1 << 14)).regions) == 1


def test_a_softmax_of_long_slices_shares_a_region() -> None:
    """A slice that is read along its rows is contiguous along them, so that its rows are not taken for columns."""
    def write(g: graphs.Builder, x: Node) -> Node:
        part = g.op("aten.slice.Tensor", x, 1, 0, 100_100)
        most = g.op("aten.amax.default", part, [1], True)
        return g.op("aten.sum.dim_IntList", g.op("aten.exp.default", g.op("aten.sub.Tensor", part, most)), [1])

    (region,) = plan_of(write, torch.empty(2048, 100_104)).regions
    assert [axis.size for axis in region.axes] == [2048, 100_100]


def test_a_reshape_splits_axes() -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        return [g.op("aten.sin.default", x), g.op("aten.cos.default", g.op("aten.view.default", x, [512, 4096]))]

    (region,) = plan_of(write, X).regions
    assert [axis.size for axis in region.axes] == [512, 8, 512]
    assert [dims for _, dims in region.dims.items()] == [((0, 1), (2,)), ((0,), (1, 2))]


def test_an_input_that_is_overwritten_is_an_output() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        wave = g.op("aten.sin.default", x)
        g.op("aten.copy_.default", x, wave)
        return wave

    (region,) = plan_of(write, X).regions
    assert names(region.outputs) == ["sin_default", "copy__default"]
    assert {k.name: v.name for k, v in region.copies.items()} == {"copy__default": "arg0"}
    assert region.bytes == 3 * X.numel() * 4


# What stays apart -----------------------------------------------------------------------------------------------------


def beside(first: Any, second: Any) -> Any:
    return lambda g, x: [first(g, x), second(g, x)]


def flipped(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.flip.default", x, [1])


def stored_and_flipped(g: graphs.Builder, x: Node) -> list[Node]:
    wave = g.op("aten.sin.default", x)
    return [wave, flipped(g, wave)]


def centred(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [1], True))


def symmetric(g: graphs.Builder, x: Node) -> Node:
    wave = g.op("aten.sin.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
    return g.op("aten.add.Tensor", wave, g.op("aten.permute.default", wave, [1, 0]))


def around_a_product(g: graphs.Builder, x: Node) -> Node:
    wave = g.op("aten.sin.default", x)
    return g.op("aten.add.Tensor", wave, g.op("aten.mm.default", wave, wave))


def overwritten_by_its_mirror(g: graphs.Builder, x: Node) -> Node:
    mirrored = flipped(g, g.op("aten.sin.default", x))
    g.op("aten.copy_.default", x, mirrored)
    return mirrored


def viewed(*shape: int) -> Any:
    return lambda g, x: g.op("aten.cos.default", g.op("aten.view.default", x, list(shape)))


def sums(g: graphs.Builder, x: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.sum.dim_IntList", x, [0])]


APART: dict[str, tuple[Any, torch.Tensor, str]] = {
    "places": (beside(lambda g, x: g.op("aten.sin.default", x), flipped), X,
               "sin_default | flip_default: reads at different places"),
    "sizes": (beside(viewed(1536, 1024), viewed(1024, 1536)), torch.empty(1536 * 1024),
              "cos_default | cos_default_1: dimensions do not line up"),
    "stored": (stored_and_flipped, X, "sin_default | flip_default: stored, and read at another index (sin_default)"),
    "reduced": (lambda g, x: g.op("aten.flip.default", g.op("aten.amax.default", x, [1], True), [0]), X,
                "amax_default | flip_default: cannot be computed at another index (amax_default)"),
    "elsewhere": (symmetric, SQUARE, "amax_default | sin_default: known at one place, read at another (sin_default)"),
    "overwritten": (overwritten_by_its_mirror, X, "flip_default | copy__default: reads what the other overwrites (arg0)"),
    "path": (around_a_product, SQUARE, "sin_default | add_tensor: a path outside runs from one to the other"),
    "held": (sums, torch.empty(64, 1 << 15),
             "sum_dim_int_list | sum_dim_int_list_1: rows too long for one pass (32768 elements beside states of columns)"),
}


@pytest.mark.parametrize("name", APART)
def test_refusals(name: str) -> None:
    """The pair is in two regions, and the plan says why with names and numbers."""
    write, value, expected = APART[name]
    plan = plan_of(write, value, joins=False)
    assert refusals(plan) == refusals(plan_of(write, value)) == [expected]
    first, second = (next(r for r in plan.regions if n in names(r.nodes)) for n in expected.split(":")[0].split(" | "))
    assert first is not second


def test_few_rows_are_summed_by_many_programs_first() -> None:
    """The refusal is that of the merge that would have saved the most, with what it costs."""
    plan = plan_of(centred, torch.empty(4, 1 << 20))
    assert steps(plan) == [["sum_dim_int_list"], ["sub_tensor"]]
    (refusal,) = plan.refusals
    assert str(refusal).startswith("sum_dim_int_list | sub_tensor: does not pay (")
    together, apart = (float(words.split()[0]) for words in refusal.detail.split(", "))
    assert together > 10 * apart
    assert steps(plan_of(centred, torch.empty(4096, 1024))) == [["sum_dim_int_list", "sub_tensor"]]


def test_regions_have_a_largest_size() -> None:
    plan = plan_of(waves(5), X, max_ops=2)
    assert [len(region.nodes) for region in plan.regions] == [2, 2, 1]
    assert refusals(plan) == ["sin_default_1 | sin_default_2: region too large (2 + 2 ops)",
                              "sin_default_3 | sin_default_4: region too large (2 + 1 ops)"]


def test_what_is_forced_apart_stays_apart() -> None:
    annotated = graphs.annotated(graphs.built(waves(2), X))
    first, second = (node for node in annotated.graph.nodes if node.op == "call_function")
    facts = dict(annotated.facts)
    for node, executor in ((first, "triton"), (second, "inductor")):
        facts[node] = replace(facts[node], forced=executor)
    plan = partition(Annotated(annotated.graph, facts), H200, Executors(facts, ("triton", "inductor")))
    assert [region.executor for region in plan.regions] == ["triton", "inductor"]
    assert refusals(plan) == ["sin_default | sin_default_1: forced to different executors (inductor, triton)"]


def test_tensors_on_two_devices_share_no_kernel() -> None:
    annotated = graphs.annotated(graphs.built(lambda g, x: [g.op("aten.sin.default", x), g.op("aten.cos.default", x)], X))
    facts = dict(annotated.facts)
    moved = next(node for node in facts if node.name == "cos_default")
    tensor = facts[moved].tensor
    assert tensor is not None
    facts[moved] = replace(facts[moved], tensor=replace(tensor, device=torch.device("cuda", 1)))
    plan = partition(Annotated(annotated.graph, facts), H200)
    assert refusals(plan) == ["sin_default | cos_default: different devices"]


def test_without_an_executor_there_are_no_steps() -> None:
    plan = plan_of(lambda g, x: flipped(g, g.op("aten.sin.default", x)), X, executors=("nvfuser",))
    assert plan.steps == () and {n.name: why for n, why in plan.unplaced.items()} == {
        "flip_default": "no executor takes it (nvfuser: nvFuser has no flip)"}


# Random graphs --------------------------------------------------------------------------------------------------------


def random_graph(seed: int) -> GraphModule:
    """A dozen ops over large square matrices: waves, sums of two, transposes, mirrors, row sums, here and there a product."""
    pick = random.Random(seed)

    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        values = [x, y]
        for _ in range(12):
            a, b = pick.choice(values[-5:]), pick.choice(values)
            values.append(pick.choice([
                lambda a=a: g.op("aten.sin.default", a),
                lambda a=a, b=b: g.op("aten.add.Tensor", a, b),
                lambda a=a, b=b: g.op("aten.mul.Tensor", a, g.op("aten.permute.default", b, [1, 0])),
                lambda a=a: g.op("aten.flip.default", a, [0]),
                lambda a=a, b=b: g.op("aten.sub.Tensor", a, g.op("aten.sum.dim_IntList", b, [pick.randrange(2)], True)),
                lambda a=a, b=b: g.op("aten.mm.default", a, b),
            ])())
        return [value for value in values if not value.users and value.op != "placeholder"]

    return graphs.built(write, torch.empty(4096, 4096), torch.empty(4096, 4096))


@pytest.mark.parametrize("seed", range(20))
def test_merging_costs_nothing(seed: int) -> None:
    """Regions that the device bounds take no longer than their nodes one by one, however they were merged."""
    together, alone = (planned(random_graph(seed), max_ops=most) for most in (200, 1))
    assert sum(r.predicted_us for r in together.regions) <= sum(r.predicted_us for r in alone.regions) * (1 + 1e-9)
    assert len(together.regions) <= len(alone.regions)


@pytest.mark.parametrize("seed", range(20))
def test_regions_store_what_others_read(seed: int) -> None:
    """Every value is stored once at most, and refusals are about pairs that are apart."""
    plan = planned(random_graph(seed))
    stored = [node for region in plan.regions for node in region.outputs]
    assert len(stored) == len(set(stored))
    eager = {step for step in plan.steps if isinstance(step, Node)}
    for region in plan.regions:
        assert set(region.outputs) <= set(region.nodes) and not set(region.inputs) & set(region.nodes)
        assert set(region.inputs) <= {*stored, *eager, *(n for n in plan.annotated.graph.nodes if n.op == "placeholder")}
    place = {node.name: region.name for region in plan.regions for node in region.dims}
    assert all(place.get(refusal.first) != place.get(refusal.second) for refusal in plan.refusals
               if refusal.first in place and refusal.second in place)


@pytest.mark.parametrize("seed", range(4))
def test_plans_are_the_same_every_time(seed: int) -> None:
    first, second = (planned(random_graph(seed)) for _ in range(2))
    assert str(first) == str(second) and refusals(first) == refusals(second)


def test_planning_takes_no_longer_where_a_value_is_read_by_many_ways() -> None:
    """Each of 24 flips doubles the ways from the softmax back to ``x``."""
    def write(g: graphs.Builder, x: Node) -> Node:
        for _ in range(24):
            x = g.op("aten.sin.default", g.op("aten.add.Tensor", x, g.op("aten.flip.default", x, [1])))
        return g.op("aten._softmax.default", g.op("aten.flip.default", x, [1]), 1, False)

    start = time.perf_counter()
    plan_of(write, X)
    assert time.perf_counter() - start < 10


def test_prices_do_not_depend_on_where_nodes_lie_in_memory() -> None:
    """Two stores of equal size: which one tells whether rows are contiguous is not left to the order of a set."""
    def write(g: graphs.Builder, x: Node, y: Node) -> tuple[Node, ...]:
        both = g.op("aten.add.Tensor", x, g.op("aten.permute.default", y, [1, 0]))
        other = g.op("aten.clone.default", g.op("aten.permute.default", both, [1, 0]), memory_format=torch.contiguous_format)
        return both, other, g.op("aten.sum.dim_IntList", both, [1])

    plans = [plan_of(write, torch.empty(70, 65), torch.empty(65, 70)) for _ in range(16)]  # all are kept: nothing is reused
    assert len({tuple(region.decision.kernel_class for region in plan.regions) for plan in plans}) == 1
    assert len({str(plan) for plan in plans}) == 1


def layers(count: int) -> Any:
    """Norms, products, slices and sums on a residual stream, and a gradient that reads all of it."""
    def write(g: graphs.Builder, x: Node, w: Node) -> Node:
        start = x
        for _ in range(count):
            scale = g.op("aten.rsqrt.default", g.op("aten.mean.dim", g.op("aten.mul.Tensor", x, x), [1], True))
            y = g.op("aten.mm.default", g.op("aten.mul.Tensor", x, scale), w)
            halves = [g.op("aten.slice.Tensor", y, 1, at, at + 256) for at in (0, 256)]
            y = g.op("aten.cat.default", [g.op("aten.neg.default", halves[1]), halves[0]], 1)
            x = g.op("aten.add.Tensor", x, g.op("aten.add.Tensor", g.op("aten.relu.default", y), start))
        return x

    return write


def test_planning_takes_time_in_proportion_to_the_layers() -> None:
    """Counted in calls of Python functions, which are the same on every machine."""
    def calls(count: int) -> int:
        annotated = graphs.annotated(graphs.built(layers(count), X, SQUARE))
        profile = cProfile.Profile()
        profile.runcall(partition, annotated, H200)
        return sum(entry.callcount for entry in profile.getstats())

    calls(4)  # what is computed once in a process
    assert calls(64) < 2.2 * calls(32)


@pytest.mark.parametrize(("images", "regions"), [(256, 2), (1, 1)])
def test_a_weight_is_transposed_ahead_of_many_windows(images: int, regions: int) -> None:
    def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        beside = weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        result: torch.Tensor = torch.ops.dynafuse.depthwise_convolution(x, beside, [1, 1], [1, 1], [1, 1])
        return result

    x = torch.empty(images, 16, 16, 64).permute(0, 3, 1, 2)
    assert len(planned(graphs.traced(convolved, x, torch.empty(64, 1, 3, 3))).regions) == regions
