"""What regions move and cost, on which executor, and which are not priced at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.cost.device import Device, describe
from dynafuse.cost.model import Prediction
from dynafuse.ir import MAX_TENSORS, Plan, Region
from dynafuse.partition import work
from dynafuse.partition.executors import Executors
from dynafuse.partition.pricing import Pricing
from dynafuse.partition.search import partition
from dynafuse.partition.units import Units
from dynafuse.partition.work import torch_work
from tests.support import graphs

H200 = describe("h200")
BF16 = torch.bfloat16
X, ROW = torch.empty(64, 512), torch.empty(512)


def plan_of(write: Any, *inputs: torch.Tensor, executors: tuple[str, ...] = ("triton",), **options: Any) -> Plan:
    annotated = graphs.annotated(graphs.built(write, *inputs))
    return partition(annotated, H200, Executors(annotated.facts, executors), **options)


def region_of(write: Any, *inputs: torch.Tensor, **options: Any) -> Region:
    (region,) = plan_of(write, *inputs, **options).regions
    return region


def softmax(g: graphs.Builder, x: Node) -> Node:
    wave = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
    return g.op("aten.div.Tensor", wave, g.op("aten.sum.dim_IntList", wave, [1], True))


def between_products(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.mm.default", softmax(g, g.op("aten.mm.default", x, x)), x)


# Arithmetic -----------------------------------------------------------------------------------------------------------

IMAGE, AT = torch.empty(8, 64, 64, 64), torch.zeros(128, dtype=torch.int64)


def corners(g: graphs.Builder, x: Node, rows: Node, columns: Node, *, count: int) -> Node:
    """Read what is costly to compute at ``count`` places for each element."""
    costly = g.op("aten.sigmoid.default", g.op("aten.exp.default", x))
    below, right = (g.op("aten.add.Tensor", at, 1) for at in (rows, columns))
    places = [(rows, columns), (rows, right), (below, columns), (below, right)][:count]
    values = [g.op("aten.index.Tensor", costly, [None, None, g.op("aten.unsqueeze.default", r, -1), c]) for r, c in places]
    total, *others = values
    for value in others:
        total = g.op("aten.add.Tensor", total, value)
    return total


def test_what_several_gathers_read_is_computed_once() -> None:
    """One gather may compute what it reads; four would each compute it again, at every element of a larger result."""
    plans = [plan_of(lambda g, *inputs, n=count: corners(g, *inputs, count=n), IMAGE, AT, AT) for count in (1, 4)]
    assert [len(plan.regions) for plan in plans] == [1, 2]


def test_what_is_spared_while_the_host_bounds_is_worth_it_when_the_device_does() -> None:
    """Before small units are merged, the host bounds the graph: computing costly values again would spare it a launch."""
    def write(g: graphs.Builder, x: Node, rows: Node, columns: Node, *small: Node) -> list[Node]:
        total, *others = small
        for other in others:
            total = g.op("aten.add.Tensor", total, other)
        return [corners(g, x, rows, columns, count=4), total]

    small = [torch.empty(4) for _ in range(40)]
    assert sum(len(region.outputs) for region in plan_of(write, IMAGE, AT, AT, *small).regions) == 3


SLOW_UNITS = H200.overridden({"flops_tflops": 0.1})


def predicted(write: Any, *inputs: torch.Tensor) -> float:
    """The microseconds of a graph in one kernel, on a device whose arithmetic takes longer than anything else."""
    annotated = graphs.annotated(graphs.built(write, *inputs))
    (region,) = partition(annotated, SLOW_UNITS, Executors(annotated.facts, ("triton",))).regions
    return region.predicted_us


def test_what_is_known_per_row_is_computed_once_for_each() -> None:
    """Whether a value of its own or computed where it is read."""
    def write(g: graphs.Builder, x: Node, *, ops: list[str]) -> Node:
        total = g.op("aten.sum.dim_IntList", g.op("aten.exp.default", x), [1])
        for op in ops:
            total = g.op(f"aten.{op}.default", total)
        return total

    few, many = (predicted(lambda g, x, ops=ops: write(g, x, ops=ops), X) for ops in (["neg"], ["log", "neg", "log", "neg"]))
    assert few < many < 1.1 * few


def test_a_single_element_is_computed_once() -> None:
    """By each program, which is nothing beside what it computes of all elements."""
    def write(g: graphs.Builder, x: Node, scale: Node, *, ops: list[str]) -> Node:
        for op in ops:
            scale = g.op(f"aten.{op}.default", scale)
        return g.op("aten.mul.Tensor", g.op("aten.exp.default", x), scale)

    few, many = (predicted(lambda g, x, s, ops=ops: write(g, x, s, ops=ops), X, torch.empty(()))
                 for ops in (["neg"], ["log", "neg", "log", "neg"]))
    assert few == pytest.approx(many, rel=1e-3)


def test_what_only_becomes_a_part_is_computed_there() -> None:
    """Such as the gradients of heads that share a key, which are added up where they are put beside those of queries."""
    def write(g: graphs.Builder, queries: Node, shared: Node) -> Node:
        wide = g.op("aten.tanh.default", g.op("aten.exp.default", shared))
        return g.op("aten.cat.default", [queries, g.op("aten.sum.dim_IntList", wide, [2], True)], 2)

    inputs = (torch.empty(2, 1 << 15, heads, 128, dtype=BF16) for heads in (31, 4))
    assert len(plan_of(write, *inputs).regions) == 1


SMALL, LARGE = torch.empty(4, 64, 16, 16, dtype=BF16), torch.empty(4, 64, 64, 64, dtype=BF16)


def gradient_of_averages(g: graphs.Builder, large: Node, *small: Node) -> Node:
    total = g.op("aten.exp.default", small[0])
    for term in small[1:]:
        total = g.op("aten.add.Tensor", total, term)
    return g.op("aten.avg_pool2d_backward.default", total, large, [4, 4], [4, 4], [0, 0], False, True, None)


def test_what_is_spread_is_computed_for_each_element() -> None:
    """So are its operands loaded: many are rather added up before."""
    plans = [plan_of(gradient_of_averages, LARGE, *[SMALL] * count, captured=True) for count in (2, 40)]
    assert [len(plan.regions) for plan in plans] == [1, 2]


def test_what_is_read_at_several_offsets_is_computed_no_more_often_than_it_is_read() -> None:
    """Keys that are repeated and rotated are read at three offsets, but at two of these by a half of each row."""
    def write(g: graphs.Builder, projected: Node, *, rotates: bool) -> Node:
        keys = g.op("aten.slice.Tensor", g.op("aten.permute.default", projected, [0, 2, 3, 1, 4]), 2, 4, 5)
        spread = g.op("aten.expand.default", keys, [2, 8, 4, 4096, 128])
        repeated = g.op("aten.view.default", g.op("aten.clone.default", spread, memory_format=torch.contiguous_format), [2, 32, 4096, 128])
        if not rotates:
            return g.op("aten.neg.default", repeated)
        left, right = (g.op("aten.slice.Tensor", repeated, 3, 64 * half, 64 * half + 64) for half in (0, 1))
        turned = g.op("aten.cat.default", [g.op("aten.neg.default", right), left], 3)
        return g.op("aten.add.Tensor", repeated, turned)

    projected = torch.empty(2, 4096, 8, 6, 128, dtype=BF16)
    plans = (region_of(lambda g, x, r=rotates: write(g, x, rotates=r), projected) for rotates in (False, True))
    copied, turned = (region.predicted_us for region in plans)
    assert copied <= turned < 1.1 * copied


def test_windows_are_computed_before_what_reduces_them() -> None:
    """Lanes that hold rows have no registers for windows of each element; two windows side by side stay in one kernel."""
    def write(g: graphs.Builder, x: Node, *, reduces: bool) -> Node:
        pooled = g.op("aten.avg_pool2d.default", x, [3, 3], [1, 1], [1, 1], False, False)
        return g.op("aten.sum.dim_IntList", pooled, [1, 2, 3]) if reduces else g.op("aten.exp.default", pooled)

    images = torch.empty(128, 64, 56, 56, dtype=BF16)
    counts = [len(plan_of(lambda g, x, r=reduces: write(g, x, reduces=r), images).regions) for reduces in (False, True)]
    assert counts == [1, 2]


def test_few_programs_wait_for_those_that_have_the_costly_part() -> None:
    """Of channels beside one another in a sum over images, a few are gradients of a pooling."""
    def write(g: graphs.Builder, wide: Node, small: Node, large: Node) -> list[Node]:
        pooled = g.op("aten.avg_pool2d_backward.default", small, large, [3, 3], [2, 2], [1, 1], False, True, None)
        both = g.op("aten.cat.default", [wide, pooled], 1)
        total = g.op("aten.sum.dim_IntList", both, [0, 2, 3], True)
        return [g.op("aten.mul.Tensor", both, total)]

    def inputs(channels: int) -> list[torch.Tensor]:
        sizes = ((7 * channels, 56), (channels, 28), (channels, 56))
        return [torch.empty(64, count, size, size, dtype=BF16) for count, size in sizes]

    spaces = [plan_of(write, *inputs(channels)) for channels in (28, 256)]
    pooled = [[region for region in plan.regions if region.decision.kernel_class == "pointwise"] for plan in spaces]
    assert [bool(regions) for regions in pooled] == [True, False]


# Bytes ----------------------------------------------------------------------------------------------------------------

TABLE, PLACES = torch.empty(50000, 64), torch.zeros(10, dtype=torch.int64)
FULL = 64 * 512 * 4

MOVED: dict[str, tuple[Any, tuple[torch.Tensor, ...], int]] = {
    "in and out": (lambda g, x: g.op("aten.sin.default", x), (X,), 2 * FULL),
    "read twice": (lambda g, x: g.op("aten.mul.Tensor", x, g.op("aten.sin.default", x)), (X,), 2 * FULL),
    "in two bytes": (lambda g, x: g.op("aten.sin.default", x), (X.to(BF16),), FULL),
    "a row for all": (lambda g, x, w: g.op("aten.add.Tensor", x, w), (X, ROW), 2 * FULL + 512 * 4),
    "an expanded row": (lambda g, x, w: g.op("aten.add.Tensor", x, w), (X, ROW.expand(64, 512)), 2 * FULL + 512 * 4),
    "two results": (lambda g, x: [g.op("aten.sin.default", x), g.op("aten.cos.default", x)], (X,), 3 * FULL),
    "a sum": (lambda g, x: g.op("aten.sum.dim_IntList", x, [1]), (X,), FULL + 64 * 4),
    "a part": (lambda g, x: g.op("aten.sin.default", g.op("aten.slice.Tensor", x, 0, 1, 4)), (X,), 2 * 3 * 512 * 4),
    "two halves": (
        lambda g, x: g.op("aten.mul.Tensor", g.op("aten.slice.Tensor", x, 1, 0, 256), g.op("aten.slice.Tensor", x, 1, 256, 512)),
        (X,), FULL + FULL // 2),
    "a part twice": (
        lambda g, x: g.op("aten.mul.Tensor", *[g.op("aten.slice.Tensor", x, 1, 0, 256)] * 2), (X,), FULL),
    "two halves, side by side": (
        lambda g, x: g.op("aten.cat.default", [g.op("aten.slice.Tensor", x, 1, 256, 512), g.op("aten.slice.Tensor", x, 1, 0, 256)], 1),
        (X,), 2 * FULL),
    "overlapping parts": (
        lambda g, x: g.op("aten.add.Tensor", g.op("aten.slice.Tensor", x, 1, 0, 511), g.op("aten.slice.Tensor", x, 1, 1, 512)),
        (X,), FULL + 64 * 511 * 4),
    "rows of a table": (
        lambda g, w, i: g.op("aten.embedding.default", w, i), (TABLE, PLACES), 10 * 8 + 2 * 10 * 64 * 4),
    "more rows than there are": (
        lambda g, w, i: g.op("aten.embedding.default", w, i), (ROW[:128].reshape(2, 64), PLACES),
        10 * 8 + 2 * 64 * 4 + 10 * 64 * 4),
}


def test_what_is_picked_from_is_loaded_where_it_is_picked() -> None:
    """The elements of ``log_softmax(x)`` at one label a row are computed there: nothing of the size of ``x`` is stored or loaded."""
    def write(g: graphs.Builder, x: Node, labels: Node) -> Node:
        shifted = g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True))
        total = g.op("aten.sum.dim_IntList", g.op("aten.exp.default", shifted), [1], True)
        return g.op("aten.gather.default", g.op("aten.sub.Tensor", shifted, g.op("aten.log.default", total)), 1, labels)

    x, labels = torch.empty(8192, 32000), torch.zeros(8192, 1, dtype=torch.int64)
    plan = plan_of(write, x, labels)
    moved = sum(region.bytes for region in plan.regions)
    assert x.nbytes < moved < 1.01 * x.nbytes


@pytest.mark.parametrize("swapped", [False, True])
def test_the_class_is_that_of_most_bytes(swapped: bool) -> None:
    """Of as many across rows as along them neighbouring rows go to a program, in whatever order the tensors are stored."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        row = g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))
        turned = g.op("aten.clone.default", g.op("aten.permute.default", row, [1, 0]), memory_format=torch.contiguous_format)
        return [turned, row] if swapped else [row, turned]

    (region,) = plan_of(write, torch.empty(8192, 1024)).regions
    assert region.decision.kernel_class == "column"


def test_few_rows_that_are_stored_across_move_whole_sectors() -> None:
    """A program of a row stores two bytes of each sector: the transposed copy is better made by a kernel of its own."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        row = g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))
        return [row, g.op("aten.clone.default", g.op("aten.permute.default", row, [1, 0]), memory_format=torch.contiguous_format)]

    assert len(plan_of(write, torch.empty(128, 12544, dtype=torch.bfloat16)).regions) == 2
    assert len(plan_of(write, torch.empty(8192, 512, dtype=torch.bfloat16)).regions) == 1


@pytest.mark.parametrize("name", MOVED)
def test_each_byte_is_moved_once(name: str) -> None:
    write, inputs, expected = MOVED[name]
    assert region_of(write, *inputs).bytes == expected


# Classes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dims", "expected"), [
    ((8192, 512), [1], "row"),
    ((64, 1024), [1], "row"),
    ((64, 4096), [1], "row"),
    ((64, 4097), [1], "split"),  # few rows, and each long enough for several programs
    ((4, 1 << 20), [1], "split"),
    ((1024, 2048), [1], "row"),  # as long, but enough of them
    ((64, 512), [0], "column"),
    ((8192, 8192), [0], "split"),
    ((100,), [0], "row"),
])
def test_reductions_by_shape(shape: tuple[int, ...], dims: list[int], expected: str) -> None:
    region = region_of(lambda g, x: g.op("aten.sum.dim_IntList", x, dims), torch.empty(shape))
    assert region.decision.kernel_class == expected


def test_what_reads_a_slice_along_its_rows_reduces_rows() -> None:
    region = region_of(lambda g, x: g.op("aten.sum.dim_IntList", g.op("aten.slice.Tensor", x, 1, 0, 500), [1]), torch.empty(4096, 512))
    assert region.decision.kernel_class == "row"


def test_rows_are_not_split_where_all_of_a_row_is_needed() -> None:
    """A softmax is one kernel however few its rows are; its sum alone would be two."""
    assert region_of(softmax, torch.empty(4, 1 << 14)).decision.kernel_class == "row"


def scan(g: graphs.Builder, x: Node, dim: int = 1) -> Node:
    return g.op("aten.cumsum.default", x, dim)


@pytest.mark.parametrize(("shape", "dim", "expected"), [
    ((64, 1 << 16), 1, "row"), ((512, 512), 0, "column"), ((8192, 8192), 0, "column"), ((4096,), 0, "row")])
def test_scans_by_shape(shape: tuple[int, ...], dim: int, expected: str) -> None:
    """Few rows are scanned by few programs, however long they are."""
    region = region_of(lambda g, x: scan(g, x, dim), torch.empty(shape))
    assert region.decision.kernel_class == expected


def test_torch_splits_a_single_row_that_it_scans() -> None:
    works = []
    for rows in (1, 2):
        units = units_of(scan, torch.empty(rows, 1 << 20))
        works.append(torch_work(units.spaces, next(iter(units.reads))))
    assert [(work.kernel_class, work.programs) for work in works] == [("split", 256), ("row", 2)]
    assert plan_of(scan, torch.empty(1, 1 << 20)).regions == () and plan_of(scan, torch.empty(2, 1 << 20)).regions


def test_sums_of_rows_and_columns_are_a_class_of_their_own() -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.sum.dim_IntList", x, [0])]

    assert region_of(write, torch.empty(8192, 1024)).decision.kernel_class == "rowcol"


# Time -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1 << n for n in range(0, 15, 2)])
def test_no_region_is_faster_than_the_memory(rows: int) -> None:
    region = region_of(softmax, torch.empty(rows, 4096, dtype=BF16))
    assert region.predicted_us >= region.bytes / (H200.bandwidth_tbs * 1e6)


def test_more_rows_take_longer() -> None:
    times = [region_of(softmax, torch.empty(1 << n, 4096, dtype=BF16)).predicted_us for n in range(4, 16)]
    assert times == sorted(times) and times[-1] > 20 * times[0]


def test_what_bounds_the_graph_decides_between_executors() -> None:
    """nvFuser's kernel is the faster one, its launch the dearer one: by itself that shows, beside products it does not."""
    executors = ("nvfuser", "triton")
    alone = region_of(softmax, torch.empty(8, 64, dtype=BF16), executors=executors)
    among = region_of(between_products, torch.empty(8192, 8192, dtype=BF16), executors=executors)
    assert (alone.executor, among.executor) == ("triton", "nvfuser")
    hosts = {option.executor: option.host_us for option in alone.decision.options}
    devices = {option.executor: option.device_us for option in among.decision.options}
    assert hosts["triton"] < hosts["nvfuser"] and devices["nvfuser"] < devices["triton"]


@pytest.mark.parametrize("shape", [(8, 64), (1024, 1024), (8192, 4096)])
def test_a_decision_has_the_winner_first_and_says_what_would_change_it(shape: tuple[int, ...]) -> None:
    region = region_of(softmax, torch.empty(shape, dtype=BF16), executors=("nvfuser", "triton", "inductor"))
    winner, *losers = region.decision.options
    assert (winner.executor, winner.device_us) == (region.executor, region.predicted_us)
    assert {option.executor for option in losers} == {"nvfuser", "triton", "inductor"} - {region.executor}
    assert (region.decision.margin >= 0 and not region.decision.unsure) or region.executor in region.decision.unsure


def units_of(write: Any, *inputs: torch.Tensor, dynamic: bool = False) -> Units:
    annotated = graphs.annotated(graphs.built(write, *inputs, dynamic=dynamic))
    return Units(annotated, H200, Executors(annotated.facts, ("triton",)))


def test_a_captured_graph_has_no_host_time() -> None:
    plain, captured = (Pricing(H200, captured, Prediction()) for captured in (False, True))
    launch = Prediction(device_us=2.0, host_us=100.0, captured_us=3.0)
    assert plain.adds(launch, plain.total) > 99 and captured.adds(launch, captured.total) < 6


def test_prices_are_beside_what_else_there_is() -> None:
    """Beside work that keeps the device busy, host time counts for little; in place of a part, only the rest counts."""
    pricing = Pricing(H200, False, Prediction())
    own, busy = Prediction(device_us=2.0, host_us=6.0), Prediction(device_us=1000.0, host_us=10.0)
    idle_cost, busy_cost = pricing.adds(own, pricing.total), pricing.adds(own, pricing.total + busy)
    assert idle_cost > 5.9 and 2.0 <= busy_cost < idle_cost
    pricing.replace(Prediction(), busy)
    assert pricing.adds(own, pricing.total) == pytest.approx(busy_cost)
    pricing.replace(busy, Prediction())
    assert pricing.adds(own, pricing.total) == pytest.approx(idle_cost)


@pytest.mark.parametrize("rows", [2048, 4096, 8192, 16384])
def test_sums_of_columns_take_the_time_of_their_bytes(rows: int) -> None:
    """As many programs run as there are tiles of columns and parts of them, not as there are columns alone."""
    region = region_of(lambda g, x: g.op("aten.sum.dim_IntList", x, [0]), torch.empty(rows, 1024, dtype=BF16))
    memory = region.bytes / (H200.bandwidth_tbs * 1e6)
    launches = 2 * H200.launch_us_triton + H200.combine_us
    assert memory + H200.launch_us_triton < region.predicted_us < 1.2 * memory + launches


@pytest.mark.parametrize(("rows", "is_read_again"), [(2048, True), (512, False)])
def test_columns_that_are_read_again_take_longer(rows: int, is_read_again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed of a column's sum reads the column again, unless a tile has all of it."""
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [0], True))

    x = torch.empty(rows, 192, dtype=BF16)
    region = region_of(write, x)
    monkeypatch.setattr(work, "AGAIN_IN_COLUMNS", 0.0)
    once = region_of(write, x)
    assert region.decision.kernel_class == once.decision.kernel_class == "column"
    assert (region.predicted_us > 1.2 * once.predicted_us) == is_read_again and region.predicted_us >= once.predicted_us


@pytest.mark.parametrize("write", [softmax, scan])
def test_with_dynamic_sizes_work_is_that_of_the_example(write: Any) -> None:
    """What a kernel computes and how it spreads follows the example; only its class has to do without."""
    static, dynamic = (units_of(write, torch.empty(64, 512), dynamic=dynamic) for dynamic in (False, True))
    works = [next(iter(units.alone.values())).work for units in (static, dynamic)]
    assert works[0] == works[1] and (works[0].programs, works[0].length) == (64, 512)


# Eager ----------------------------------------------------------------------------------------------------------------

SLOW = H200.overridden({"efficiency_triton_pointwise": 0.01})


def planned_on(device: Device, write: Any, *inputs: torch.Tensor) -> Plan:
    annotated = graphs.annotated(graphs.built(write, *inputs))
    return partition(annotated, device, Executors(annotated.facts, ("triton",)))


def test_what_is_cheaper_eager_is_not_fused() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sin.default", x)

    wide = torch.empty(8192, 4096)
    assert not planned_on(H200, write, wide).unplaced
    plan = planned_on(SLOW, write, wide)
    ((node, reason),) = plan.unplaced.items()
    assert "sin" in node.name and reason.startswith("cheaper eager: ") and not plan.steps


def test_ops_stay_fused_where_one_by_one_they_take_longer() -> None:
    """Each of them by itself would be as fast eager."""
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.cos.default", g.op("aten.sin.default", x))

    plan = planned_on(H200.overridden({"efficiency_triton_pointwise": 0.6}), write, torch.empty(8192, 4096))
    assert [len(region.nodes) for region in plan.regions] == [2] and not plan.unplaced


def test_windows_take_torch_longer_than_their_bytes() -> None:
    images = torch.empty(128, 256, 14, 14, dtype=BF16).contiguous(memory_format=torch.channels_last)
    (region,) = plan_of(lambda g, x: g.op("aten.avg_pool2d.default", x, [3, 3], [2, 2], [1, 1]), images).regions
    eager = region.decision.eager
    assert eager is not None and eager.device_us > 4 * region.bytes / (H200.bandwidth_tbs * 1e6)


def test_what_is_forced_is_not_run_eager() -> None:
    annotated = graphs.annotated(graphs.built(lambda g, x: g.op("aten.sin.default", x), torch.empty(8192, 4096)))
    facts = {node: replace(found, forced="triton") if found.is_fused else found for node, found in annotated.facts.items()}
    plan = partition(replace(annotated, facts=facts), SLOW, Executors(facts, ("triton",)))
    assert len(plan.regions) == 1 and not plan.unplaced


def test_a_decision_says_what_eager_would_take() -> None:
    region = region_of(softmax, torch.empty(8192, 4096, dtype=BF16))
    eager = region.decision.eager
    assert eager is not None and eager.device_us > 2 * region.predicted_us and eager.host_us == 5 * H200.host_us_eager


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_kernel_has_a_largest_number_of_tensors() -> None:
    def write(g: graphs.Builder, *inputs: Node) -> Node:
        total = inputs[0]
        for x in inputs[1:]:
            total = g.op("aten.add.Tensor", total, x)
        return total

    assert len(plan_of(write, *(torch.empty(8) for _ in range(MAX_TENSORS - 1))).regions) == 1
    plan = plan_of(write, *(torch.empty(8) for _ in range(MAX_TENSORS)))
    (refusal,) = plan.refusals
    assert "too many tensors (101, at most 100" in str(refusal) and len(plan.regions) == 2
    plan = plan_of(write, *(torch.empty(8) for _ in range(2 * MAX_TENSORS)))
    assert all(len(region.inputs) + len(region.outputs) <= MAX_TENSORS for region in plan.regions) and len(plan.regions) > 1


def test_long_columns_are_computed_again_where_they_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pass that reduces them, and in that which needs the result."""
    def write(g: graphs.Builder, x: Node) -> Node:
        for _ in range(2):
            x = g.op("aten.erf.default", x)
        return g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [0], True))

    monkeypatch.setattr(work, "AGAIN_IN_COLUMNS", 0.0)
    x = torch.empty(1024, 4096, dtype=BF16)
    twice = region_of(write, x)
    monkeypatch.setattr(work, "LONGEST_NEAR", 1024)
    assert twice.decision.kernel_class == "column"
    assert 1.5 * region_of(write, x).predicted_us < twice.predicted_us


def test_long_columns_that_are_scanned_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        for _ in range(6):
            x = g.op("aten.erf.default", x)
        return g.op("aten.cumsum.default", x, 0)

    x = torch.empty(1024, 1 << 14, dtype=BF16)
    region = region_of(write, x)
    monkeypatch.setattr(work, "LONGEST_NEAR", 1024)
    assert region.decision.kernel_class == "column" and region.predicted_us == region_of(write, x).predicted_us


@pytest.mark.parametrize(("result", "regions"), [(torch.channels_last, 1), (torch.contiguous_format, 2)])
def test_few_columns_are_reduced_apart_from_what_lies_along_them(result: torch.memory_format, regions: int) -> None:
    """A program would lay out what it computes of its columns anew, with nothing else under way meanwhile."""
    def gradient(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide, slope = x.float(), torch.sigmoid(x.float()) * grad.float()
        total, product = slope.sum((0, 2, 3), keepdim=True), (slope * wide).sum((0, 2, 3), keepdim=True)
        return (slope - wide * product - total).bfloat16().clone(memory_format=result), total, product

    x, grad = (torch.empty(64, 1536, 7, 7, dtype=BF16).to(memory_format=torch.channels_last) for _ in range(2))
    assert len(graphs.planned(graphs.traced(gradient, x, grad)).regions) == regions


@pytest.mark.parametrize(("dtype", "columns", "longest"), [
    (torch.float32, 1, 25600), (BF16, 1, 34133), (BF16, 2, 20480), (torch.float64, 1, 12800)])
def test_rows_have_a_largest_length_beside_states_of_columns(dtype: torch.dtype, columns: int, longest: int) -> None:
    """Of what is read there is an element each, and of each column's states one of four bytes or eight: 200 KiB at most."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        return [g.op("aten.sum.dim_IntList", x, [1]), *(
            g.op("aten.sum.dim_IntList", value, [0]) for value in (x, g.op("aten.neg.default", x))[:columns])]

    def reasons(length: int) -> set[str]:
        refusals = plan_of(write, torch.empty(512, length, dtype=dtype)).refusals
        return {refusal.detail.split(",")[0] for refusal in refusals if "too long" in str(refusal)}

    assert [reasons(length) for length in (longest, longest + 1)] == [
        set(), {f"{longest + 1} elements beside states of columns"}]


def test_memory_takes_longer_beside_more_states_of_columns_and_if_it_is_read_again() -> None:
    def factor(length: int, columns: int) -> float:
        def write(g: graphs.Builder, x: Node) -> list[Node]:
            rows = g.op("aten.sum.dim_IntList", x, [1], True)
            values = [x, *(g.op(f"aten.{name}.default", x) for name in ("neg", "abs"))]
            return [g.op("aten.mul.Tensor", x, rows), *(g.op("aten.sum.dim_IntList", v, [0]) for v in values[:columns])]

        (region,) = plan_of(write, torch.empty(4096, length)).regions
        return region.bytes / (4096 * length * 8)

    assert [round(factor(length, columns), 2) for length, columns in
            [(4096, 3), (8192, 1), (8192, 2), (8192, 3), (16384, 1), (17000, 1), (17000, 2)]] == [
                1.0, 1.0, 1.2, 1.4, 1.0, 1.3, 1.56]  # of float32: eight bytes are moved, 6.4 would be the least


def test_long_rows_that_are_not_stored_take_as_long_as_those_that_are() -> None:
    """Few loads are under way, so that those alone take 1.6 times as long as memory would."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        return [g.op("aten.sum.dim_IntList", x, [dim]) for dim in (1, 0)]

    (short,), (long,) = (plan_of(write, torch.empty(4096, length, dtype=BF16)).regions for length in (4096, 8192))
    assert (round(short.bytes / 4096**2), round(long.bytes / 4096**2, 1)) == (2, 6.4)


def norm_gradient(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
    """Rows that depend on a sum of theirs, and three sums of columns, one of these rows."""
    product = g.op("aten.mul.Tensor", *(g.op("aten._to_copy.default", value, dtype=torch.float32) for value in (x, y)))
    changed = g.op("aten.sub.Tensor", product, g.op("aten.mul.Tensor", y, g.op("aten.sum.dim_IntList", product, [1], True)))
    return [changed, *(g.op("aten.sum.dim_IntList", value, [0]) for value in (changed, product, y))]


@pytest.mark.parametrize(("length", "classes"), [(4608, ["rowcol"]), (16384, ["row", "split"])])
def test_columns_without_room_for_rows_are_reduced_without_them(length: int, classes: list[str]) -> None:
    """Two of three beside the rows would leave the third one a kernel of its own, which reads all once more."""
    x = torch.empty(4096, length, dtype=BF16)
    assert sorted(region.decision.kernel_class for region in plan_of(norm_gradient, x, x).regions) == classes


def test_units_that_do_not_fit_together_have_no_kernel() -> None:
    """Asked without lining up their axes first: as far as their axes tell, nothing is common to them."""
    units = units_of(lambda g, x, w: [g.op("aten.sin.default", x), g.op("aten.sin.default", w)], X, ROW)
    first, second = units.reads
    assert units.alone[first].work.bytes == 2 * FULL
    together = units.kernels.of([first, second], [*units.reads[first], *units.reads[second]], frozenset())
    assert str(together) == f"sin_default | sin_default_1: sizes differ ({64 * 512} against {64 * 512 * 512})"


# Work -----------------------------------------------------------------------------------------------------------------


def test_a_scatter_beside_a_sum_has_a_class() -> None:
    """What is scattered into has other dimensions than the loop, and says nothing of how rows lie in memory."""
    def write(g: graphs.Builder, base: Node, values: Node, places: Node) -> list[Node]:
        wide = g.op("aten.sin.default", values)
        return [g.op("aten.index_put.default", base, [places], wide, True), g.op("aten.sum.dim_IntList", wide, [1])]

    plan = plan_of(write, torch.empty(1000, 512), X, torch.zeros(64, dtype=torch.int64))
    assert {region.decision.kernel_class for region in plan.regions} <= {"pointwise", "row"}


def test_a_pool_costs_torch_as_many_loads() -> None:
    region = region_of(lambda g, x: g.op("aten.avg_pool2d.default", x, [3, 3], [1, 1], [1, 1]), torch.empty(64, 96, 32, 32))
    eager = region.decision.eager
    assert eager is not None and eager.device_us == pytest.approx(region.predicted_us, rel=0.1)
