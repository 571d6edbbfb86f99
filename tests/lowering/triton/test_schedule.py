"""Schedules: the class of a kernel, which tile dimension walks which axes, and that tiles fit what they walk."""

from __future__ import annotations

import functools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch.fx import Node

from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.ir import Spec
from dynafuse.lowering.triton.reduced_rows import MOST_SPLITS, SHARED_BYTES, full_reads, splittable
from dynafuse.lowering.triton.room import roomier
from dynafuse.lowering.triton.row_schedule import LONGEST_HELD, LONGEST_HELD_APART, LONGEST_PERSISTENT
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.tiles import Schedule, power_of_two, probe, reduced_axes
from dynafuse.partition.kernel_class import PROCESSORS, SPLIT_ABOVE, estimate
from tests.support import graphs

BF16, F32 = torch.bfloat16, torch.float32


def specs_of(write: Any, *inputs: torch.Tensor, dynamic: bool = False) -> list[Spec]:
    plan = graphs.planned(graphs.built(write, *inputs, dynamic=dynamic))
    return [canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").spec for region in plan.regions]


def scheduled(write: Any, *inputs: torch.Tensor, dynamic: bool = False) -> Schedule:
    """The schedule of a graph that is one region."""
    (spec,) = specs_of(write, *inputs, dynamic=dynamic)
    return choose_schedule(spec)


def wave(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sin.default", x)


def total(*dims: int) -> Any:
    return lambda g, x: g.op("aten.sum.dim_IntList", x, list(dims))


def softmax(g: graphs.Builder, x: Node) -> Node:
    raised = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
    return g.op("aten.div.Tensor", raised, g.op("aten.sum.dim_IntList", raised, [1], True))


def normalized(g: graphs.Builder, x: Node) -> Node:
    centred = g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))
    return g.op("aten.div.Tensor", centred, g.op("aten.mean.dim", g.op("aten.mul.Tensor", centred, centred), [1], True))


def added(g: graphs.Builder, x: Node, y: Node) -> Node:
    return g.op("aten.add.Tensor", x, y)


def both_sums(g: graphs.Builder, x: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.sum.dim_IntList", x, [0])]


def sums_of_product(g: graphs.Builder, *factors: Node) -> list[Node]:
    return both_sums(g, functools.reduce(lambda x, y: g.op("aten.mul.Tensor", x, y), factors))


# Classes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "inputs", "expected"), [
    (wave, [torch.empty(100, 100)], "flat"),
    (added, [torch.empty(512, 1024), torch.empty(512, 1024)], "flat"),
    (added, [torch.empty(512, 1024), torch.empty(1024, 512).t()], "tiled"),
    (added, [torch.empty(32, 64), torch.empty(64, 32).t()], "flat"),  # too small for tiles to matter
    (added, [torch.empty(512, 1024), torch.empty(4, 512).t()[:, :1]], "flat"),  # what lies across is small
    (softmax, [torch.empty(8192, 4096, dtype=BF16)], "persistent"),
    (softmax, [torch.empty(8192, LONGEST_HELD, dtype=BF16)], "persistent"),
    (softmax, [torch.empty(8192, LONGEST_HELD_APART + 1, dtype=BF16)], "looped"),  # its maximum and sum in one pass
    (total(1), [torch.empty(8192, LONGEST_HELD)], "persistent"),
    (total(1), [torch.empty(8192, LONGEST_HELD + 1)], "looped"),
    (normalized, [torch.empty(8192, LONGEST_PERSISTENT)], "persistent"),  # three times along a row is too often
    (normalized, [torch.empty(8192, LONGEST_PERSISTENT + 1)], "looped"),
    (total(0), [torch.empty(100, 1 << 17)], "looped"),
    (total(1), [torch.empty(64, SPLIT_ABOVE - 1)], "persistent"),
    (total(1), [torch.empty(64, 2 * SPLIT_ABOVE)], "split"),
    (total(1), [torch.empty(2 * PROCESSORS, 2 * SPLIT_ABOVE)], "persistent"),  # enough rows for all processors
    (total(0), [torch.empty(8192, 64)], "split"),
    (softmax, [torch.empty(4, 4096, dtype=BF16)], "persistent"),  # few rows, but all of a row is needed
    (both_sums, [torch.empty(8192, 1024)], "rowcol"),
])
def test_classes(write: Any, inputs: list[torch.Tensor], expected: str) -> None:
    assert scheduled(write, *inputs).schedule_class == expected


def test_the_worked_example() -> None:
    found = scheduled(softmax, torch.empty(8192, 4096, dtype=BF16))
    assert found == Schedule("persistent", {"x": (0,), "r": (1,)}, {"x": 1, "r": 4096}, 4)
    assert found.tile_of(2) == ["x", "r"]


def test_rows_of_unknown_length_are_not_held() -> None:
    assert scheduled(softmax, torch.empty(512, 64), dynamic=True).schedule_class == "looped"
    assert scheduled(softmax, torch.empty(512, 64)).schedule_class == "persistent"


# Order ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_neighbouring_lanes_touch_neighbouring_elements(order: tuple[int, int, int]) -> None:
    """The innermost axis is that along which memory is contiguous, whatever the dimensions' order."""
    sizes = (30, 50, 70)
    stored = torch.empty([sizes[d] for d in order])
    x = stored.permute([order.index(d) for d in range(3)])
    assert x.shape == sizes and x.stride(order[2]) == 1
    assert scheduled(wave, x).order == {"x": order}


def test_the_largest_tensor_says_which_order() -> None:
    """A transposed operand that is small beside the others is read across."""
    wide, across = torch.empty(64, 1024, 8), torch.empty(8, 1, 64).permute(2, 1, 0)
    assert scheduled(added, wide, across).order == {"x": (0, 1, 2)}


def test_tiles_are_cut_so_that_both_accesses_are_contiguous_in_one() -> None:
    found = scheduled(added, torch.empty(8, 512, 1024), torch.empty(8, 1024, 512).transpose(1, 2))
    assert (found.schedule_class, found.order) == ("tiled", {"y": (0, 1), "x": (2,)}) and min(found.block.values()) >= 32


@pytest.mark.parametrize(("rows", "few"), [(32768, True), (4096, False)])
def test_one_tensor_in_many_long_rows_is_walked_by_a_warp_each(rows: int, few: bool) -> None:
    """Then no warp waits for another at the end of a step; few rows need all warps to keep enough loads under way."""
    def log_sum(g: graphs.Builder, x: Node) -> Node:
        raised = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
        return g.op("aten.log.default", g.op("aten.sum.dim_IntList", raised, [1], True))

    found = scheduled(log_sum, torch.empty(rows, 50257, dtype=BF16))
    assert (found.schedule_class, found.block["x"], found.warps == 1) == ("looped", 1, few)


@pytest.mark.parametrize(("shape", "columns", "vector"), [((4096, 4096), 4096, 8), ((4096, 4100), 4096, 4), ((4096, 4096), 4095, 8),
                                                          ((4096, 4095), 4095, 1), ((4096, 64, 64), 63, 1)])
def test_loops_keep_a_state_for_each_element_that_lanes_move_at_once(
    shape: tuple[int, ...], columns: int, vector: int
) -> None:
    """With a state for each element of a tile the compiler loads one after the other where registers are few."""
    found = scheduled(total(0), torch.empty(shape, dtype=BF16)[..., :columns])
    moved = 32 * found.warps * vector // found.block["x"]
    assert found.lanes == "x" and max(moved, 1) < found.block["r"]
    assert found.running == max(moved, 1)


def test_columns_that_are_loaded_one_by_one_have_all_programs_that_can_run() -> None:
    odd, even = (scheduled(total(0), torch.empty(2048, columns, dtype=BF16)) for columns in (20005, 20008))
    assert odd.splits * odd.warps > 2 * even.splits * even.warps


@pytest.mark.parametrize(("dtype", "stages"), [(BF16, 3), (F32, 1)])
def test_columns_are_taken_by_many_small_programs(dtype: torch.dtype, stages: int) -> None:
    """Of which those of large elements have enough under way without copying ahead."""
    found = scheduled(total(0), torch.empty(4096, 4096, dtype=dtype))
    assert (found.warps, found.splits, found.stages) == (2, 32, stages)


@pytest.mark.parametrize(("images", "stages"), [(16, 3), (256, 1)])
def test_columns_are_loaded_ahead_where_few_programs_run(images: int, stages: int) -> None:
    assert scheduled(total(1), torch.empty(images, 196, 4096)).stages == stages


@pytest.mark.parametrize(("stored", "stages"), [(1, 3), (2, 3), (6, 1)])
def test_columns_of_which_much_is_stored_are_not_copied_ahead(stored: int, stages: int) -> None:
    """Triton reads what was copied one by one for stores; for few of them that costs less than waiting for loads."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        results = [g.op("aten.sin.default", x)]
        while len(results) < stored:
            results.append(g.op("aten.cos.default", results[-1]))
        return [*results, g.op("aten.sum.dim_IntList", results[-1], [0])]

    found = scheduled(write, torch.empty(1 << 16, 1024, dtype=BF16))
    assert (found.schedule_class, found.stages) == ("split", stages) and (found.running > 0) == (stages == 1)


def test_columns_that_do_not_fill_a_tile_have_taller_ones() -> None:
    """Images of few channels, these last: a third of the lanes is beyond the last of 24."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        copied = g.op("aten.relu.default", x)
        return [copied, g.op("aten.sum.dim_IntList", copied, [0])]

    found = scheduled(write, torch.empty(1 << 19, 24, dtype=BF16))
    assert (found.schedule_class, found.block, found.stages) == ("split", {"x": 32, "r": 64}, 1)


def test_parts_of_what_is_summed_are_not_copied_ahead() -> None:
    """Of a concatenation of which one part lies across: each lane would wait for the copies of both."""
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        joined = g.op("aten.cat.default", [x, y], 1)
        return [joined, g.op("aten.sum.dim_IntList", joined, [0])]

    parts = torch.empty(576, 1 << 13, dtype=BF16).t(), torch.empty(1 << 13, 576, dtype=BF16)
    found = scheduled(write, *parts)
    assert (found.schedule_class, found.stages) == ("split", 1)


def joined_gradients(g: graphs.Builder, q: Node, k: Node) -> list[Node]:
    """Two gradients of 64 sequences of 128 tokens and 192 features, the second one perhaps transposed, as one, and its sums."""
    k = k if k.meta["val"].shape[1] == 128 else g.op("aten.permute.default", k, [0, 2, 1])
    joined = g.op("aten.cat.default", [q, k], 0)
    whole = g.op("aten.permute.default", g.op("aten.view.default", joined, [2, 64, 128, 192]), [2, 1, 0, 3])
    whole = g.op("aten.view.default", g.op("aten.clone.default", whole, memory_format=torch.contiguous_format), [8192, 384])
    return [whole, g.op("aten.sum.dim_IntList", whole, [0])]


def test_columns_of_parts_are_those_of_one_part() -> None:
    """A program computes a single part then, in a branch, of which nothing can be copied ahead."""
    schedule = scheduled(joined_gradients, torch.empty(64, 128, 192), torch.empty(64, 128, 192))
    assert schedule.schedule_class == "split" and schedule.stages == 1 and 192 % schedule.block["x"] == 0


def test_columns_are_walked_along_what_lies_across_them() -> None:
    """Tokens, along which the second gradient is contiguous, and not sequences."""
    (spec,) = specs_of(joined_gradients, torch.empty(64, 128, 192), torch.empty(64, 192, 128))
    schedule = choose_schedule(spec)
    assert estimate(spec.axes[schedule.order["r"][-1]].size) == 128


@pytest.mark.parametrize(("dtype", "elements"), [(torch.bool, 256), (BF16, 512)])
def test_lanes_have_few_elements_where_some_are_of_one_byte(dtype: torch.dtype, elements: int) -> None:
    def masked(g: graphs.Builder, x: Node, mask: Node) -> list[Node]:
        product = g.op("aten.mul.Tensor", x, mask)
        return [product, g.op("aten.sum.dim_IntList", product, [0])]

    schedule = scheduled(masked, torch.empty(8192, 1024), torch.empty(8192, 1024, dtype=dtype))
    assert schedule.block["x"] * schedule.block["r"] // schedule.warps == elements


@pytest.mark.parametrize(("columns", "warps"), [(1216, 16), (8192, 8)])
def test_programs_that_are_alone_on_a_processor_have_more_warps(columns: int, warps: int) -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        computed = g.op("aten.erf.default", x)
        return [computed, g.op("aten.sum.dim_IntList", computed, [0])]

    found = scheduled(write, torch.empty(1024, columns, dtype=BF16))
    assert (found.schedule_class, found.warps) == ("looped", warps)


def test_columns_go_side_by_side() -> None:
    """Down the columns of a row-major matrix, a program takes neighbouring ones."""
    found = scheduled(total(0), torch.empty(100, 8192))
    assert found.order == {"x": (1,), "r": (0,)} and found.block["x"] >= 32


# Sizes of tiles -------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.sampled_from([1, 2, 3, 7, 16, 60, 100, 512, 1000, 4096, 9000, 40000]), min_size=1, max_size=3)
WRITES: dict[str, Any] = {"wave": wave, "first": total(0), "last": total(-1), "both": total(0, -1)}


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.sampled_from(sorted(WRITES)), st.sampled_from([torch.float32, BF16, torch.float64]), st.randoms())
def test_tiles_fit(shape: list[int], name: str, dtype: torch.dtype, pick: Any) -> None:
    """Every axis is walked once, reductions along ``r``; tiles are powers of two, no larger than what they walk needs."""
    order = list(range(len(shape)))
    pick.shuffle(order)
    assume(math.prod(shape) < 1 << 26 and not (name == "both" and len(shape) == 1))
    assume(name == "wave" or min(shape) > 1)  # else there is nothing to reduce
    x = torch.empty([shape[d] for d in order], dtype=dtype).permute([order.index(d) for d in range(len(shape))])
    (spec,) = specs_of(WRITES[name], x)
    found, sizes = choose_schedule(spec), [estimate(axis.size) for axis in spec.axes]
    assert sorted(axis for axes in found.order.values() for axis in axes) == list(range(len(sizes)))
    assert found.order.keys() == found.block.keys()
    if spec.reductions:
        assert set(found.order["r"]) == reduced_axes(spec, spec.reductions[0][0])
    for tile, block in found.block.items():
        walked = math.prod(sizes[axis] for axis in found.order[tile])
        assert block == power_of_two(block) and block <= power_of_two(walked)
        assert found.schedule_class != "persistent" or tile != "r" or block >= walked
    assert found.warps == power_of_two(found.warps) <= 16
    copied = found.stages * math.prod(found.block.values()) * dtype.itemsize
    assert copied <= SHARED_BYTES or found.stages == 1 or roomier(found)[-1].stages == 1
    if found.schedule_class == "split":
        assert splittable(spec, reduced_axes(spec, spec.reductions[0][0]))
        assert found.deferred == {op for op, _ in spec.reductions}


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("length", [1 << 14, 1 << 17, 1 << 20, 3 << 18])
def test_split_rows_keep_the_device_busy(rows: int, length: int) -> None:
    found = scheduled(total(1), torch.empty(rows, length))
    programs = -(-rows // found.block["x"]) * found.splits
    assert found.schedule_class == "split" and 2 <= found.splits <= MOST_SPLITS
    assert programs >= PROCESSORS or found.splits in (MOST_SPLITS, -(-length // found.block["r"]))


def test_short_rows_go_several_to_a_program_and_long_ones_alone() -> None:
    lengths = [16, 64, 256, 1024, 4096, 16384]
    tiles = [scheduled(softmax, torch.empty(1 << 16, length, dtype=BF16)).block for length in lengths]
    assert [tile["r"] for tile in tiles] == lengths
    rows = [tile["x"] for tile in tiles]
    assert rows == sorted(rows, reverse=True) and rows[0] > 8 and rows[-1] == 1


@pytest.mark.parametrize(("write", "rows", "held"), [(total(1), 1 << 20, 4), (total(1), 1 << 14, 4), (total(1), 1 << 13, 2), (normalized, 1 << 20, 2)])
def test_programs_of_very_many_rows_move_as_much_as_is_started_in_that_time(write: Any, rows: int, held: int) -> None:
    assert scheduled(write, torch.empty(rows, 512, dtype=BF16)).block["x"] == held


@pytest.mark.parametrize(("length", "tile", "warps"), [(110 * 110, 4096, 4), (109 * 109, 1024, 4)])
def test_split_rows_that_are_loaded_one_by_one_have_small_tiles(length: int, tile: int, warps: int) -> None:
    """Images of 109 × 109: a lane would hold the places of 32 elements of each tensor, which takes up to 2.9 of the time."""
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        product = g.op("aten.mul.Tensor", x, y)
        return [product, g.op("aten.sum.dim_IntList", product, [0, 2])]

    images = torch.empty(32, 32, length, dtype=BF16)
    found = scheduled(write, images, images)
    assert (found.schedule_class, found.block["r"], found.warps) == ("split", tile, warps)
    assert PROCESSORS * 11 < 32 * found.splits <= PROCESSORS * 16


@pytest.mark.parametrize(("length", "rows"), [(24, 32), (32, 32), (48, 16)])
def test_a_lane_holds_a_row_that_is_very_short(length: int, rows: int) -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))

    found = scheduled(write, torch.empty(100352, length, dtype=BF16))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", rows, 1)


@pytest.mark.parametrize(("length", "dtype", "errors", "tile"), [
    (1024, torch.float32, 0, (1, 1)), (1024, torch.float32, 1, (1, 4)), (1024, BF16, 1, (1, 2)), (512, torch.float32, 1, (2, 4)),
    (32, torch.float32, 0, (32, 1)), (32, torch.float32, 1, (32, 4)),
])
def test_rows_of_much_arithmetic_have_more_warps(length: int, dtype: torch.dtype, errors: int, tile: tuple[int, int]) -> None:
    """Of several tensors; short ones in programs of several warps."""
    def write(g: graphs.Builder, x: Node, y: Node, z: Node) -> Node:
        for _ in range(errors):
            x = g.op("aten.erf.default", x)
        x = g.op("aten.add.Tensor", g.op("aten.add.Tensor", x, y), z)
        return g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))

    found = scheduled(write, *(torch.empty(1 << 16, length, dtype=dtype) for _ in range(3)))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", *tile)


@pytest.mark.parametrize(("length", "rows", "warps"), [(64, 8, 4), (128, 8, 4), (200, 4, 1)])
def test_warps_that_scan_rows_have_them_alone(length: int, rows: int, warps: int) -> None:
    found = scheduled(lambda g, x: g.op("aten.cumsum.default", x, 1), torch.empty(4096, length))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", rows, warps)


@pytest.mark.parametrize(("channels", "warps"), [(96, 8), (512, 8)])
def test_channels_of_images_are_held_by_eight_warps(channels: int, warps: int) -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
        product = g.op("aten.mul.Tensor", x, y)
        return [g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", product, [0, 2], True))]

    found = scheduled(write, *(torch.empty(32, channels, 196, dtype=BF16) for _ in range(2)))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", 1, warps)


@pytest.mark.parametrize(("channels", "tile", "warps"), [(40, 8192, 16), (400, 4096, 8)])
def test_few_long_rows_with_a_variance_are_walked_by_many_warps(channels: int, tile: int, warps: int) -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> Node:
        total = g.op("aten.add.Tensor", x, y)
        return g.op("aten.sub.Tensor", total, g.op("aten.var.correction", total, [0, 2], keepdim=True))

    found = scheduled(write, *(torch.empty(16, channels, 784, dtype=BF16) for _ in range(2)))
    assert (found.schedule_class, found.block["r"], found.warps) == ("looped", tile, warps)


def test_a_few_columns_of_much_arithmetic_have_few_elements_a_lane() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sum.dim_IntList", functools.reduce(lambda x, _: g.op("aten.erf.default", x), range(3), x), [0])

    found = scheduled(write, torch.empty(32, 512, dtype=BF16))
    assert (found.schedule_class, found.block["x"] * found.block["r"] // found.warps) == ("looped", 64)


@pytest.mark.parametrize(("length", "warps", "per_processor", "stages"), [
    (2560, 4, 2, 3), (4096, 4, 2, 3), (5120, 4, 2, 3), (8192, 8, 1, 3), (12288, 8, 1, 3)])
def test_long_rows_beside_columns_have_few_warps_and_the_next_rows_on_their_way(
        length: int, warps: int, per_processor: int, stages: int) -> None:
    found = scheduled(both_sums, torch.empty(8192, length, dtype=BF16))
    assert (found.warps, found.splits, found.stages) == (warps, per_processor * PROCESSORS, stages)


@pytest.mark.parametrize(("count", "length", "rows", "warps", "per_processor"), [
    (1 << 16, 96, 4, 1, 12), (1 << 16, 192, 2, 1, 12), (1 << 16, 320, 2, 2, 6), (1 << 16, 512, 2, 2, 6), (1 << 16, 40, 8, 1, 12),
    (1 << 13, 96, 2, 1, 6), (1 << 13, 320, 2, 2, 6), (1 << 13, 40, 4, 1, 6), (1568, 192, 2, 1, 2), (2112, 512, 2, 2, 4)])
def test_short_rows_beside_columns_are_held_by_a_warp_or_two(
        count: int, length: int, rows: int, warps: int, per_processor: int) -> None:
    """Four of them would wait for each other at the end of each row. Few rows leave few partial states of columns."""
    found = scheduled(sums_of_product, *(torch.empty(count, length, dtype=BF16) for _ in range(2)))
    assert (found.schedule_class, found.block["x"], found.warps) == ("rowcol", rows, warps)
    assert found.splits == per_processor * PROCESSORS


@pytest.mark.parametrize(("tensors", "length", "warps"), [(3, 192, 1), (3, 512, 4), (2, 512, 2)])
def test_a_warp_alone_holds_a_row_of_many_tensors_if_it_is_short(tensors: int, length: int, warps: int) -> None:
    found = scheduled(sums_of_product, *(torch.empty(2048, length) for _ in range(tensors)))
    assert (found.schedule_class, found.warps) == ("rowcol", warps)


@pytest.mark.parametrize(("count", "length", "rows", "warps", "per_processor"), [
    (8192, 100, 8, 2, 2), (1 << 15, 128, 8, 2, 4), (4096, 256, 16, 4, 4), (8192, 320, 16, 16, 1), (8192, 768, 4, 4, 2),
    (512, 100, 16, 4, 2)])
def test_rows_beside_columns_are_taken_together_where_much_lies_across(
        count: int, length: int, rows: int, warps: int, per_processor: int) -> None:
    found = scheduled(sums_of_product, torch.empty(count, length, dtype=BF16), torch.empty(length, count, dtype=BF16).t())
    assert (found.schedule_class, found.block["x"], found.warps) == ("rowcol", rows, warps)
    assert found.splits == min(per_processor * PROCESSORS, -(-count // rows))


@pytest.mark.parametrize(("length", "kind"), [(192, "persistent"), (256, "persistent"), (300, "looped")])
def test_rows_that_others_lie_across_are_held_while_they_are_short(length: int, kind: str) -> None:
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        copied = g.op("aten.clone.default", x, memory_format=torch.contiguous_format)
        return [copied, g.op("aten.sum.dim_IntList", copied, [1])]

    assert scheduled(write, torch.empty(length, 1 << 16, dtype=BF16).t()).schedule_class == kind


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_long_rows_that_others_lie_across_have_whole_sectors_of_both(dtype: torch.dtype) -> None:
    """Scores with a bias whose heads are neighbours: more is read and stored along rows than across them."""
    def write(g: graphs.Builder, x: Node, bias: Node) -> list[Node]:
        scores = g.op("aten.add.Tensor", x, bias)
        raised = g.op("aten.exp.default", g.op("aten.sub.Tensor", scores, g.op("aten.amax.default", scores, [3], True)))
        weights = g.op("aten.div.Tensor", raised, g.op("aten.sum.dim_IntList", raised, [3], True))
        return [scores, g.op("aten.gt.Scalar", weights, 0.1), weights]

    found = scheduled(write, torch.empty(8, 8, 1024, 1024, dtype=dtype), torch.empty(8, 1024, 1024, 8).permute(0, 3, 1, 2))
    assert (found.schedule_class, found.block, found.warps) == ("looped", {"x": 8, "r": 256}, 8)


def test_rows_that_others_lie_across_are_as_many_as_registers_hold() -> None:
    """Columns whose largest elements scale them, stored as rows: each alone would be read a sector an element."""
    def write(g: graphs.Builder, x: Node) -> Node:
        scaled = g.op("aten.div.Tensor", x, g.op("aten.amax.default", x, [0], True))
        return g.op("aten.clone.default", g.op("aten.permute.default", scaled, [1, 0]), memory_format=torch.contiguous_format)

    found = scheduled(write, torch.empty(8192, 4096, dtype=BF16))
    assert (found.schedule_class, found.block, found.warps) == ("persistent", {"x": 8, "r": 8192}, 16)


@pytest.mark.parametrize(("errors", "warps"), [(0, 2), (3, 8)])
def test_rows_of_much_arithmetic_are_held_by_many_warps(errors: int, warps: int) -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sum.dim_IntList", functools.reduce(lambda x, _: g.op("aten.erf.default", x), range(errors), x), [1])

    found = scheduled(write, torch.empty(4000, 2000))
    assert (found.schedule_class, found.block["r"], found.warps) == ("persistent", 2048, warps)


@pytest.mark.parametrize(("errors", "tile", "warps"), [(0, 4096, 4), (3, 1024, 8)])
def test_all_of_a_tensor_with_much_arithmetic_is_summed_by_many_warps(errors: int, tile: int, warps: int) -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.sum.default", functools.reduce(lambda x, _: g.op("aten.erf.default", x), range(errors), x))

    found = scheduled(write, torch.empty(1 << 24))
    assert (found.schedule_class, found.block["r"], found.warps) == ("split", tile, warps)


@pytest.mark.parametrize(("rows", "warps"), [(512, 4), (1 << 14, 1)])
def test_few_rows_that_are_loaded_one_by_one_have_more_warps(rows: int, warps: int) -> None:
    """Images of 7 × 7: runs of 49 elements, which no lane loads side by side."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        copied = g.op("aten.relu.default", x)
        return [copied, g.op("aten.sum.dim_IntList", copied, [0, 2, 3])]

    found = scheduled(write, torch.empty(16, rows, 7, 7, dtype=BF16))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", 1, warps)


def test_of_a_window_one_place_is_held() -> None:
    """What is made of its nine places is held along a row, not they."""
    def write(g: graphs.Builder, x: Node, y: Node) -> Node:
        pooled = g.op("aten.avg_pool2d.default", x, [3, 3], [1, 1], [1, 1])
        return g.op("aten.sum.dim_IntList", g.op("aten.mul.Tensor", pooled, y), [0, 2, 3])

    (spec,) = specs_of(write, torch.empty(16, 224, 14, 14), torch.empty(16, 224, 14, 14))
    probed = probe(spec)
    assert sum(not access.is_store for access in probed.accesses) == 10 and len(full_reads(spec, probed)) == 2


def test_what_the_cache_holds_is_not_copied_ahead() -> None:
    """Columns of what is repeated along them: each row of it is read from memory once, by whichever program is the first."""
    def write(g: graphs.Builder, x: Node) -> list[Node]:
        repeated = g.op("aten.expand.default", g.op("aten.unsqueeze.default", g.op("aten.sin.default", x), 1), [64, 196, 1000])
        copied = g.op("aten.clone.default", repeated)
        return [copied, g.op("aten.sum.dim_IntList", copied, [0, 1])]

    spec = next(spec for spec in specs_of(write, torch.empty(64, 1000, dtype=BF16)) if spec.reductions)
    assert choose_schedule(spec).stages == 1


@pytest.mark.parametrize(("function", "width"), [("aten.erf.default", 64), ("aten.neg.default", 128)])
def test_columns_of_heavy_arithmetic_with_a_vector_are_narrow(function: str, width: int) -> None:
    """Triton would compute each element twice: beside what is read once a column, and where it is stored."""
    def write(g: graphs.Builder, x: Node, bias: Node) -> list[Node]:
        moved = g.op("aten.add.Tensor", x, bias)
        computed = functools.reduce(lambda value, _: g.op(function, g.op("aten.mul.Tensor", value, moved)), range(4), moved)
        return [computed, g.op("aten.sum.dim_IntList", computed, [0])]

    found = scheduled(write, torch.empty(8192, 8192, dtype=BF16), torch.empty(8192, dtype=BF16))
    assert (found.schedule_class, found.block["x"]) == ("split", width)


@pytest.mark.parametrize(("length", "tensors", "kind"), [(8192, 1, "persistent"), (12288, 2, "looped")])
def test_long_rows_with_a_variance_are_walked_twice(length: int, tensors: int, kind: str) -> None:
    """The states of a variance hold each element until its mean is known; of long rows, reading them again is faster.

    Rows of a single tensor are held in parts (``test_row_parts.py``).
    """
    def write(g: graphs.Builder, *tensors: Node) -> Node:
        x = functools.reduce(lambda total, tensor: g.op("aten.add.Tensor", total, tensor), tensors)
        variance = g.op("aten.var.correction", x, [1], correction=0, keepdim=True)
        return g.op("aten.mul.Tensor", g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True)), variance)

    assert scheduled(write, *[torch.empty(4096, length, dtype=BF16)] * tensors).schedule_class == kind


def squared(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.mul.Tensor", x, g.op("aten.mean.dim", g.op("aten.mul.Tensor", x, x), [1], True))


def total_of_softmax(g: graphs.Builder, x: Node) -> Node:
    share = softmax(g, x)
    return g.op("aten.sum.dim_IntList", g.op("aten.mul.Tensor", share, share), [1])


def centred(g: graphs.Builder, x: Node) -> Node:
    scaled = g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))
    return g.op("aten.mul.Tensor", scaled, g.op("aten.rsqrt.default", g.op("aten.var.correction", x, [1], keepdim=True)))


@pytest.mark.parametrize(("write", "length", "dtype", "expected"), [
    (softmax, 32000, F32, ("persistent", 32768, 16)),
    (softmax, 32000, BF16, ("persistent", 32768, 16)),
    (softmax, 128256, F32, ("looped", 16384, 32)),
    (softmax, 50304, BF16, ("looped", 16384, 32)),
    (total_of_softmax, 128256, F32, ("looped", 16384, 32)),
    (total_of_softmax, 50304, F32, ("looped", 8192, 4)),  # most of the fourth large tile would be idle
    (total_of_softmax, 32000, BF16, ("looped", 8192, 4)),
    (softmax, 45001, F32, ("looped", 16384, 32)),  # not aligned, as the following
    (softmax, 36549, F32, ("looped", 8192, 16)),  # large tiles would be idle for a third
    (softmax, 25001, F32, ("persistent", 32768, 16)),
    (softmax, 26625, BF16, ("looped", 8192, 16)),
    (softmax, 30001, BF16, ("looped", 8192, 16)),
    (total_of_softmax, 50257, F32, ("looped", 8192, 16)),
    (total_of_softmax, 50257, BF16, ("looped", 2048, 8)),
    (squared, 32001, BF16, ("looped", 16384, 32)),
    (centred, 65536, BF16, ("looped", 16384, 32)),
])
def test_long_rows_that_are_read_again_are_held_or_few_are_under_way(
        write: Any, length: int, dtype: torch.dtype, expected: tuple[str, int, int]) -> None:
    schedule = scheduled(write, torch.empty(4096, length, dtype=dtype))
    assert (schedule.schedule_class, schedule.block["r"], schedule.warps) == expected


def test_long_rows_of_two_tensors_that_are_read_again_are_few_under_way() -> None:
    def write(g: graphs.Builder, x: Node, y: Node) -> Node:
        return g.op("aten.mul.Tensor", x, g.op("aten.sum.dim_IntList", g.op("aten.mul.Tensor", x, y), [1], True))

    schedule = scheduled(write, *[torch.empty(1024, 65536, dtype=BF16)] * 2)
    assert (schedule.schedule_class, schedule.block["r"], schedule.warps) == ("looped", 16384, 32)


def two_sums(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", value, [1]) for value in (x, g.op("aten.mul.Tensor", x, y))]


@pytest.mark.parametrize(("length", "expected"), [(8192, "persistent"), (16384, "looped"), (20480, "looped")])
def test_long_rows_of_several_tensors_that_are_read_once_are_walked(length: int, expected: str) -> None:
    inputs = [torch.empty(4096, length, dtype=BF16) for _ in range(2)]
    schedule = scheduled(two_sums, *inputs)
    assert schedule.schedule_class == expected
    if expected == "looped":
        assert (schedule.block["r"], schedule.warps) == (4096, 8)


def test_rows_that_leave_many_lanes_idle_are_held_by_half_as_many_warps() -> None:
    held = [scheduled(normalized, torch.empty(8192, length, dtype=BF16)).warps for length in (4096, 5120, 6144, 8192)]
    assert held == [4, 4, 4, 8]


@pytest.mark.parametrize(("length", "hoisted"), [(1024, True), (8192, True), (8193, False)])
def test_what_all_rows_share_is_held_where_there_are_registers(length: int, hoisted: bool) -> None:
    """Of rows and columns in one kernel: as many programs as the device has room for, each over several rows."""
    found = scheduled(both_sums, torch.empty(8192, length))
    assert (found.schedule_class, found.hoist_invariants) == ("rowcol", hoisted)
    assert found.splits in [count * PROCESSORS for count in (1, 2, 4)] and found.deferred


# What may be split ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "expected"), [
    (total(1), True),
    (lambda g, x: g.op("aten.sum.dim_IntList", g.op("aten.sin.default", x), [1]), True),
    (lambda g, x: g.op("aten.sin.default", g.op("aten.sum.dim_IntList", x, [1])), True),  # once a row, by whoever is last
    (softmax, False),
    (lambda g, x: g.op("aten.sum.dim_IntList", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)), [1]), False),
])
def test_rows_may_be_split_where_nothing_needs_all_of_one(write: Any, expected: bool) -> None:
    (spec,) = specs_of(write, torch.empty(8192, 512))
    assert splittable(spec, reduced_axes(spec, spec.reductions[0][0])) == expected
