"""Tiles of pointwise kernels: whichever is chosen, the kernel is right; and what is chosen for typical layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

from dynafuse.cache.canonical import CanonicalRegion, canonical
from dynafuse.lowering.interpret import eager
from dynafuse.lowering.triton.compiler import load
from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.pointwise_schedule import WIDEST_UNKNOWN
from dynafuse.lowering.triton.schedule import MOST_CANDIDATES, candidates, choose_schedule
from dynafuse.lowering.triton.tile_cost import TileCost
from dynafuse.lowering.triton.tiles import Schedule, point_count, probe
from dynafuse.partition.kernel_class import LANES
from dynafuse.select.data import inputs_for
from dynafuse.select.runners import runner
from tests.support import graphs
from tests.support.representative import spec_of

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def bounds_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[CanonicalRegion]:
    """The regions of a function, all of them pointwise."""
    plan = graphs.planned(graphs.traced(function, *inputs))
    found = [canonical(plan.annotated, region, (), "sm90") for region in plan.regions]
    assert found and not any(bound.spec.reductions for bound in found)
    return found


def batch_norm(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, 1, 1)
    return F.relu((x - mean.view(shape)) * (1 / (variance.abs() + 1e-5).sqrt()).view(shape))


def quick_batch_norm(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, 1, 1)
    return F.relu((x - mean.view(shape)) * (variance.abs() + 1e-5).rsqrt().view(shape))


def channels_last(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype).to(memory_format=torch.channels_last)


def windows(x: torch.Tensor) -> torch.Tensor:
    batch, height, width, channels = x.shape
    parts = torch.roll(x, (-2, -1), (1, 2)).view(batch, height // 5, 5, width // 3, 3, channels)
    return parts.permute(0, 1, 3, 2, 4, 5).contiguous()


def per_row(x: torch.Tensor, label: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    hit = torch.arange(x.shape[1])[None] == label[:, None]
    return torch.where(hit, -1.0, 0.0) * scale[:, None] - x.exp()


def rotated_heads(x: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of three projections by head, rotated by halves; the second by columns."""
    batch, length, _ = x.shape
    first, second, _ = x.view(batch, length, 3, -1, cos.shape[-1]).unbind(2)

    def rotated(part: torch.Tensor) -> torch.Tensor:
        part = part.transpose(1, 2).float()
        left, right = part.chunk(2, -1)
        return part * cos + torch.cat([-right, left], -1) * cos

    return rotated(first).contiguous(), rotated(second).transpose(2, 3).contiguous()


def rotated_pairs(x: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads rotated by pairs of neighbours, by rows and by columns."""
    batch, length, _ = x.shape
    part = x.view(batch, length, -1, cos.shape[-1]).transpose(1, 2)
    turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).reshape(part.shape)
    result = part * cos + turned * cos
    return result.contiguous(), result.transpose(2, 3).contiguous()


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "batch norm": (batch_norm, [torch.empty(3, 21, 13, 9), torch.empty(21), torch.empty(21)]),
    "batch norm in bf16": (batch_norm, [torch.empty(2, 40, 8, 16, dtype=BF16), torch.empty(40), torch.empty(40)]),
    "batch norm, channels last": (batch_norm, [channels_last(3, 50, 7, 9), torch.empty(50), torch.empty(50)]),
    "transpose": (lambda x: x.t().contiguous() * 2, [torch.empty(130, 67)]),
    "transpose of two": (lambda x, y: x + y.transpose(1, 2), [torch.empty(3, 50, 70), torch.empty(3, 70, 50)]),
    "heads": (lambda x: x.view(5, 33, 4, 17).permute(0, 2, 3, 1).float().contiguous(), [torch.empty(165, 68, dtype=BF16)]),
    "three orders": (lambda x, y: x.permute(2, 0, 1) + y.permute(1, 2, 0), [torch.empty(19, 23, 17), torch.empty(23, 17, 19)]),
    "cat of channels": (
        lambda x, y, z: torch.cat([x, y * 2, z.exp()], 1),
        [torch.empty(2, 16, 9, 13), torch.empty(2, 5, 9, 13), torch.empty(2, 11, 9, 13)]),
    "cat of channels, channels last": (
        lambda x, y: torch.cat([x, y.relu()], 1), [channels_last(3, 32, 7, 9), channels_last(3, 24, 7, 9)]),
    "padded rows": (lambda x: F.pad(x, (0, 3)), [torch.empty(61, 125, dtype=BF16)]),
    "padded columns": (lambda x: F.pad(x.t(), (0, 0, 2, 1)), [torch.empty(61, 125, dtype=BF16)]),
    "padded cat": (lambda x, y: F.pad(torch.cat([x.t(), y]), (0, 6)), [torch.empty(122, 16), torch.empty(30, 122)]),
    "rolled windows": (windows, [torch.empty(2, 20, 12, 24, dtype=BF16)]),
    "slices": (
        lambda x, y: x.slice_scatter(y.view(7, 9, 4, 12).transpose(1, 2), 3, 1, 13), [torch.empty(7, 4, 9, 20), torch.empty(63, 48)]),
    "gathered": (lambda x, i: x[:, i].permute(1, 2, 0) * 2, [torch.empty(16, 31, 33), torch.empty(20, dtype=torch.int64)]),
    "by rows": (per_row, [torch.empty(37, 205), torch.empty(37, dtype=torch.int64), torch.empty(37)]),
    "upsampled": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest") * 2, [torch.empty(2, 9, 15, 11)]),
    "rotated heads": (rotated_heads, [torch.empty(2, 40, 288, dtype=BF16), torch.empty(40, 32)]),
    "rotated pairs": (rotated_pairs, [torch.empty(2, 40, 96), torch.empty(40, 32)]),
    "pooled back": (
        lambda g, x: torch.ops.aten.avg_pool2d_backward(g, x, [3, 3], [2, 2], [1, 1], False, True, None) + x,
        [torch.empty(2, 8, 8, 10), torch.empty(2, 8, 15, 19)]),
}


def kernel(bound: CanonicalRegion, schedule: Schedule) -> Kernel:
    lowered = write_kernels(bound.code, schedule, False)
    return Kernel(bound.key, lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), True)


@pytest.mark.parametrize("name", CASES)
def test_every_candidate_is_right(name: str) -> None:
    tiled = False
    for bound in bounds_of(CASES[name][0], *CASES[name][1]):
        schedules = candidates(bound.code)
        assert schedules[0] == choose_schedule(bound.code)
        assert len(schedules) == len(set(map(str, schedules))) <= MOST_CANDIDATES
        expected = eager(bound.spec, {}, CPU)([t.clone() for t in inputs_for(bound.spec, {}, CPU)])
        for schedule in schedules:
            tiled |= schedule.schedule_class == "tiled"
            found = runner(kernel(bound, schedule), bound.spec, {}, CPU)(inputs_for(bound.spec, {}, CPU))
            for mine, right in zip(found, expected, strict=True):
                assert mine.dtype is right.dtype
                rounding = 1e-2 if mine.dtype is BF16 else 1e-5
                torch.testing.assert_close(mine, right, rtol=rounding, atol=rounding, equal_nan=True, msg=str(schedule))
    assert tiled


@pytest.mark.parametrize("name", CASES)
def test_tiles_fit(name: str) -> None:
    """Every axis is walked once, by tiles of powers of two that are no larger than what they walk."""
    for bound in bounds_of(CASES[name][0], *CASES[name][1]):
        for schedule in candidates(bound.code):
            assert sorted(axis for axes in schedule.order.values() for axis in axes) == list(range(len(bound.code.axes)))
            for tile, block in schedule.block.items():
                assert block & (block - 1) == 0 and block < 2 * point_count(bound.code, schedule.order[tile])


# What is chosen -------------------------------------------------------------------------------------------------------


def test_contiguous_tensors_have_one_tile_dimension() -> None:
    """Their axes are one for every access, so that nothing has to be divided."""
    spec = spec_of(lambda x, y: (x * y).sigmoid(), torch.empty(64, 56, 56, 32), torch.empty(64, 56, 56, 32))
    assert {schedule.schedule_class for schedule in candidates(spec)} == {"flat"}


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_both_sides_of_a_transpose_are_contiguous(dtype: torch.dtype) -> None:
    """Whether what is read or what is written has the wider elements."""
    spec = spec_of(lambda x: x.view(32, 128, 16, 128).permute(0, 2, 3, 1).float().contiguous(),
                   torch.empty(4096, 2048, dtype=dtype))
    found = choose_schedule(spec)
    innermost = {tile: axes[-1] for tile, axes in found.order.items()}
    assert found.schedule_class == "tiled" and min(found.block.values()) >= 32
    assert sorted(spec.axes[axis].size for axis in innermost.values()) == [128, 128]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_what_varies_along_channels_is_computed_once_for_many_positions(dtype: torch.dtype) -> None:
    shapes = [torch.empty(384) for _ in range(2)]
    last = choose_schedule(spec_of(batch_norm, channels_last(128, 384, 14, 14, dtype=dtype), *shapes))
    assert last.schedule_class == "tiled" and last.block["y"] >= 16 and last.block["x"] >= LANES
    first = choose_schedule(spec_of(batch_norm, torch.empty(128, 384, 57, 57, dtype=dtype), *shapes))
    assert first.schedule_class == "tiled" and first.block["x"] >= LANES


def test_what_neighbours_in_a_lane_share_is_computed_once_in_runs_too() -> None:
    """Triton sees that the points which a lane loads at once are of one channel."""
    shapes = [torch.empty(384) for _ in range(2)]
    runs = choose_schedule(spec_of(quick_batch_norm, torch.empty(128, 384, 14, 14, dtype=BF16), *shapes))
    assert runs.schedule_class == "flat"


def test_what_branches_is_computed_by_each_of_neighbours_in_a_lane() -> None:
    """As the slow paths of exact roots and quotients, unless these are of indices alone."""
    shapes = [torch.empty(384) for _ in range(2)]
    tiles = choose_schedule(spec_of(batch_norm, torch.empty(128, 384, 14, 14, dtype=BF16), *shapes))
    assert tiles.schedule_class == "tiled"

    def of_indices(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(384, device=x.device) + 1.5).sqrt().reciprocal().view(1, -1, 1, 1)

    assert choose_schedule(spec_of(of_indices, torch.empty(128, 384, 14, 14, dtype=BF16))).schedule_class == "flat"


def test_places_that_are_compared_are_found_for_each_point() -> None:
    """Of logits the label's is, among those that a lane takes of one row: in tiles of one row nothing is divided."""
    logits, labels = torch.empty(4096, 32000, dtype=BF16), torch.empty(4096, dtype=torch.int64)
    scale = torch.empty(4096)

    def gradient(x: torch.Tensor, label: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hit = torch.where(torch.arange(x.shape[1], device=x.device)[None] == label[:, None], scale[:, None], 0.0)
        return (hit - scale[:, None] * x.float().exp()).to(x.dtype)

    spec = spec_of(gradient, logits, labels, scale)
    cost, asked = TileCost(spec, probe(spec)), TileCost(spec, probe(spec))
    asked.places = {}
    runs = Schedule("flat", {"x": (0, 1)}, {"x": 1024}, 4)
    rows = Schedule("tiled", {"y": (0,), "x": (1,)}, {"y": 1, "x": 2048}, 4)
    assert set(cost.places.values()) == {frozenset({1})}
    assert cost.price(runs) > asked.price(runs) and cost.price(rows) == asked.price(rows)


def test_what_is_read_again_is_read_by_tiles_that_have_it() -> None:
    """Keys of few heads are repeated for the queries of their group: 16 MB, which no cache holds until all have been stored."""
    def repeated(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        keys = x.permute(0, 2, 1, 3)[:, :, None].expand(2, 8, 4, 4096, 128)
        turned = torch.cat([-keys[..., 64:], keys[..., :64]], -1)
        return (keys * cos + turned * cos).contiguous()

    spec = spec_of(repeated, torch.empty(2, 4096, 8, 128, dtype=BF16), torch.empty(4096, 128, dtype=BF16))
    found = choose_schedule(spec)
    assert found.schedule_class == "tiled" and spec.axes[found.order["y"][-1]].size == 4


@pytest.mark.parametrize("is_known", [True, False])
def test_sizes_of_an_example_tell_no_neighbours_of_one_channel(is_known: bool) -> None:
    """As only the kernel's own sizes tell Triton."""
    spec = spec_of(quick_batch_norm, torch.empty(128, 384, 14, 14, dtype=BF16), torch.empty(384), torch.empty(384))
    cost = TileCost(replace(spec, axes=tuple(replace(axis, is_known=is_known) for axis in spec.axes)), probe(spec))
    runs = Schedule("flat", {"x": (0, 1, 2, 3)}, {"x": 1024}, 4)
    tiles = Schedule("tiled", {"y": (0, 1), "x": (2, 3)}, {"y": 8, "x": 256}, 4)
    assert (cost.price(runs) < 1.1 * cost.price(tiles)) == is_known


def test_an_access_that_walks_all_axes_as_one_divides_nothing() -> None:
    """Rows of odd length are read at row and column, but their padded copies are stored at the tile's own variable."""
    spec = spec_of(lambda x: F.pad(x, (0, 3)), torch.empty(4096, 50005, dtype=BF16))
    flat = next(schedule for schedule in candidates(spec) if schedule.schedule_class == "flat")
    assert "tl.store(out0 + (x)," in write_kernels(spec, flat, False).source
    tiled = next(schedule for schedule in candidates(spec) if schedule.schedule_class == "tiled")
    assert "//" not in write_kernels(spec, tiled, False).source


@pytest.mark.parametrize(("function", "columns"), [(rotated_heads, [64]), (rotated_pairs, [32, 2])])
def test_rows_are_walked_as_what_lies_across_is_stored(function: Callable[..., Any], columns: list[int]) -> None:
    """However many reads there are that walk memory in another way, and though pairs are told apart by some of them."""
    heads = 3 if function is rotated_heads else 1
    bounds = bounds_of(function, torch.empty(16, 512, heads * 768, dtype=BF16), torch.empty(512, 64, dtype=BF16))
    spec = max((bound.code for bound in bounds), key=lambda code: len(code.stores))
    found = choose_schedule(spec)
    assert len(spec.stores) == 2 and found.schedule_class == "tiled"
    assert [spec.axes[axis].size for axis in found.order["x"]] == columns
    assert spec.axes[found.order["y"][-1]].size == 512 and found.block["y"] >= 16


def test_places_of_windows_are_no_columns() -> None:
    """Nine of them beside each other would have to be divided among lanes."""
    spec = spec_of(lambda x: F.pad(x, (0, 0, 4, 4)).unfold(0, 9, 1).contiguous(), torch.empty(8192, 384, dtype=BF16))
    assert all(point_count(spec, schedule.order["x"]) == 9 for schedule in candidates(spec) if schedule.schedule_class == "tiled")


def test_lanes_that_jump_in_memory_take_few_points_each() -> None:
    """Windows of a pooling are two apart: lanes with eight neighbours each would touch eight lines at a time."""
    found = choose_schedule(spec_of(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.empty(8, 64, 112, 112, dtype=BF16)))
    assert math.prod(found.block.values()) <= 4 * LANES * found.warps


@pytest.mark.parametrize(("stride", "points"), [(1, 4), (2, 2)])
def test_lanes_take_fewer_points_of_windows_that_begin_apart(stride: int, points: int) -> None:
    found = choose_schedule(spec_of(lambda x: F.avg_pool2d(x, 3, stride, 1), torch.empty(16, 64, 112, 112, dtype=BF16)))
    assert found.block["x"] == points * LANES * found.warps


def test_lanes_take_four_points_of_windows() -> None:
    """Of images whose rows no access is aligned in, in steps of several rows; where channels lie side by side, of columns too."""
    image = torch.empty(8, 64, 56, 56, dtype=BF16)
    found = choose_schedule(spec_of(lambda x: F.avg_pool2d(x, 3, 1, 1), image))
    assert found.schedule_class == "flat" and found.block["x"] == 4 * LANES * found.warps
    last = choose_schedule(spec_of(lambda x: F.avg_pool2d(x, 3, 1, 1), image.to(memory_format=torch.channels_last)))
    assert last.schedule_class == "flat" and last.block["x"] == 4 * LANES * last.warps
    assert (found.register_tile, last.register_tile) == (((2, 4),), ((2, 2), (3, 2)))


def test_rows_that_lie_far_apart_are_priced_as_conflicts() -> None:
    """What returns to the lines of many rows at distances of powers of two fetches them again."""
    spec = spec_of(lambda x: F.interpolate(x, scale_factor=2, mode="nearest") * 2, torch.empty(64, 16, 64, 32, dtype=BF16))
    cost = TileCost(spec, probe(spec))
    near = Schedule("tiled", {"y": (0, 1, 2), "x": (3,)}, {"y": 32, "x": 64}, 4)
    far = Schedule("tiled", {"y": (0,), "x": (1, 2, 3)}, {"y": 32, "x": 64}, 4)
    assert cost.price(far) > 1.5 * cost.price(near)


@pytest.mark.parametrize(("classes", "expected"), [(50304, "tiled"), (50265, "flat")])
def test_rows_that_begin_within_sectors_are_stored_across_their_ends(classes: int, expected: str) -> None:
    """Of logits with a bias for each class, which a tile of rows reads once: but each warp would store parts of two sectors."""
    spec = spec_of(lambda x, bias: x + bias, torch.empty(1024, classes, dtype=BF16), torch.empty(classes, dtype=BF16))
    assert choose_schedule(spec).schedule_class == expected


def test_sizes_that_are_unknown_are_not_cut_for_little() -> None:
    """A row may be shorter than a tile is wide."""
    build = graphs.built(lambda g, x, y: g.op("aten.add.Tensor", x, y), torch.empty(512, 96), torch.empty(96), dynamic=True)
    plan = graphs.planned(build)
    (region,) = plan.regions
    assert choose_schedule(canonical(plan.annotated, region, (), "sm90").spec).schedule_class == "flat"


def test_tiles_along_sizes_that_are_unknown_are_narrow() -> None:
    """Of what is divided along its rows no size is classed: these have 21 elements, of a tile that was 2048 wide."""
    def write(g: graphs.Builder, gradient: Node, x: Node) -> Node:
        return g.op("aten.avg_pool3d_backward.default", gradient, x, [1, 1, 1], [2, 2, 2], [0, 0, 0], False, False, None)

    plan = graphs.planned(graphs.built(write, torch.empty(1, 20, 11, 11, 11), torch.empty(1, 20, 21, 21, 21), dynamic=True))
    (region,) = plan.regions
    found = choose_schedule(canonical(plan.annotated, region, (), "sm90").spec)
    assert found.schedule_class == "flat" or found.block["x"] <= WIDEST_UNKNOWN


# Index expressions ----------------------------------------------------------------------------------------------------


def kernel_of(function: Callable[..., Any], *inputs: torch.Tensor) -> str:
    spec = spec_of(function, *inputs)
    return write_kernels(spec, choose_schedule(spec), False).source.partition("import libm as lm")[2]


@pytest.mark.parametrize("function", [
    lambda x: x[(torch.arange(28) + 3) % 28] * 2,
    lambda x: x[torch.arange(7)[:, None] * 4 + torch.arange(4)] * 2,
    lambda x: x[27 - torch.arange(28)] * 2,
    lambda x: x[torch.arange(55) // 2] * 2,
    lambda x: x.index_select(0, torch.arange(28).fmod(5)) * 2,
], ids=["rolled", "unfolded", "flipped", "repeated", "fmod"])
def test_what_is_computed_from_indices_alone_needs_no_check(function: Callable[..., Any]) -> None:
    source = kernel_of(function, torch.empty(28, 300))
    assert "device_assert" not in source and "int64" not in source


@pytest.mark.parametrize("compare", [torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne])
def test_positions_are_compared_as_indices(compare: Callable[..., torch.Tensor]) -> None:
    """In the 32 bits that offsets have, and with the same outcome."""
    def masked(x: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(24)[:, None], torch.arange(40)
        return torch.where(compare(rows, columns - 7) & compare(columns, 11), x, -1.0)

    x = torch.randn(24, 40)
    assert "int64" not in kernel_of(masked, x)
    for bound in bounds_of(masked, x):
        inputs = inputs_for(bound.spec, {}, CPU)
        expected = eager(bound.spec, {}, CPU)([t.clone() for t in inputs])
        found = runner(kernel(bound, choose_schedule(bound.code)), bound.spec, {}, CPU)(inputs)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)


def test_an_index_that_might_be_negative_is_checked() -> None:
    source = kernel_of(lambda x: x[torch.arange(28) - 3] * 2, torch.empty(28, 300))
    assert "tl.where" in source  # from the end


@pytest.mark.parametrize("function", [
    lambda x: x[torch.arange(28) * 2**40 % 28], lambda x: x[(torch.arange(28) * 2**61 * 9) % 28],
    lambda x: x * (torch.arange(28) + 2**31)[:, None], lambda x: x * (torch.arange(28) * 2**62 * 4 + 5)[:, None],
    lambda x: x[-(torch.arange(28) + 1)], lambda x: x[(torch.arange(28) - 30) % 28],
    lambda x: x * torch.fmod(torch.arange(28) - 30, 4)[:, None], lambda x: x * ((torch.arange(28) - 30) // 4)[:, None],
])
def test_integers_that_are_large_or_negative(function: Callable[..., Any]) -> None:
    for bound in bounds_of(function, torch.empty(28, 300)):
        inputs = inputs_for(bound.spec, {}, CPU)
        expected = eager(bound.spec, {}, CPU)(inputs)
        found = runner(kernel(bound, choose_schedule(bound.code)), bound.spec, {}, CPU)(inputs)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, right)


def test_what_a_branch_has_decided_is_not_asked_again() -> None:
    """The padding of the second half of a cat is that of its last column alone."""
    source = kernel_of(lambda x, y: torch.cat([x, F.pad(y.exp(), (0, 1))]), torch.empty(256, 1024), torch.empty(256, 1023))
    assert ">= 0" not in source


# Prices ---------------------------------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    """The price of a transpose in runs is that of its bytes and of the lines it touches, in tiles that of its bytes."""
    spec = spec_of(lambda x: x.t().contiguous(), torch.empty(4096, 4096))
    cost = TileCost(spec, probe(spec))
    (order,) = [schedule.order["x"] for schedule in candidates(spec) if schedule.schedule_class == "flat"][:1]
    flat = cost.price(Schedule("flat", {"x": order}, {"x": 1024}, 4))
    tiled = cost.price(Schedule("tiled", {"y": order[:1], "x": order[1:]}, {"y": 64, "x": 64}, 4))
    assert 100 < flat < 130 and 30 < tiled < 45


def test_every_place_of_a_window_is_read_from_memory() -> None:
    """Four places of a pooling that are two apart are all of the image, as are both halves of it; a row read twice is one."""
    image, row = torch.empty(64, 512, 14, 14), torch.empty(14)
    pooled = spec_of(lambda x: F.avg_pool2d(x, 2, 2), image)
    halves = spec_of(lambda x: x[:, :256] + x[:, 256:], image)
    rows = spec_of(lambda x, y: x * y + y.flip(0), image, row)
    for spec, read, stored in ((pooled, image.numel(), image.numel() / 4), (halves, image.numel(), image.numel() / 2),
                               (rows, image.numel() + row.numel(), image.numel())):
        assert TileCost(spec, probe(spec)).bytes_moved == 4 * (read + stored)


def test_scatters_along_columns_walk_one_dimension() -> None:
    """The compiler knows nothing of loaded indices: of two dimensions it may have lanes walk the one that memory jumps along."""
    def scatter(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(torch.zeros(8, 320, 479), [None, rows, columns], x * 2, True)

    inputs = [torch.empty(8, 640, 958), torch.zeros(640, 1, dtype=torch.int64), torch.zeros(958, dtype=torch.int64)]
    classes = [{schedule.schedule_class for schedule in candidates(bound.code)} for bound in bounds_of(scatter, *inputs)]
    assert classes[-1] == {"flat"}


def test_rows_that_are_stored_at_loaded_indices_are_walked_along() -> None:
    """Copies of a row go to rows anywhere: these are as far apart as rows are, though no index of theirs is an axis."""
    def scatter(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        copies = x.unsqueeze(1).expand(512, 8, 2048).reshape(4096, 2048)
        return torch.ops.aten.index_put(torch.zeros(4096, 2048), [rows], copies, True)

    bound = bounds_of(scatter, torch.empty(512, 2048), torch.zeros(4096, dtype=torch.int64))[-1]
    innermost = {bound.code.axes[schedule.order["x"][-1]].size for schedule in candidates(bound.code)}
    assert innermost == {2048}


def test_pixels_at_computed_places_are_rows_of_channels() -> None:
    """In runs of both, Triton would not know that the channels of a pixel are read at one place, nor move several at once."""
    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=1.7, mode="bilinear").contiguous(memory_format=torch.channels_last)

    found = choose_schedule(bounds_of(resize, channels_last(8, 256, 40, 40))[-1].spec)
    assert (found.schedule_class, found.order["x"]) == ("tiled", (1,))


@pytest.mark.parametrize(("dtype", "points"), [(BF16, 4), (torch.float32, 2)])
def test_a_lane_has_few_points_of_windows(dtype: torch.dtype, points: int) -> None:
    """As many as fill eight bytes: the places of all of them are in registers at once."""
    (bound,) = bounds_of(lambda x: sum(x[:, i:i + 1000] * (i + 1) for i in range(9)), torch.empty(4096, 1008, dtype=dtype))
    found = choose_schedule(bound.spec)
    assert (found.schedule_class, found.block["x"]) == ("flat", points * LANES * found.warps)


def test_rows_are_not_walked_along_pairs_that_lie_in_memory() -> None:
    """Of an image whose pixels become channels by fours, Triton would let lanes load two neighbours of other rows each."""
    (bound,) = bounds_of(lambda x: F.silu(F.pixel_unshuffle(x, 2)), torch.empty(32, 128, 64, 64, dtype=BF16))
    found = choose_schedule(bound.spec)
    cost = TileCost(bound.spec, probe(bound.spec))
    (read,) = (walk for walk in cost.walks if not walk.is_store)
    assert found.schedule_class == "tiled" and read.strides[found.order["y"][-1]] != 1


def test_pieces_that_tiles_end_with_are_each_a_programs_own() -> None:
    """Of three pieces of 64 channels tiles of 64 load one each; wider ones load all three, under masks."""
    pieces = [channels_last(128, 64, 56, 56, dtype=BF16) for _ in range(3)]
    channels = [torch.empty(192, 1, 1) for _ in range(2)]
    spec = spec_of(lambda m, v, *pieces: batch_norm(torch.cat(pieces, 1), m, v).to(BF16), *channels, *pieces)
    assert choose_schedule(spec).block["x"] == 64
    cost = TileCost(spec, probe(spec))
    shares = [access.share for access in cost.accesses if access.masks]
    assert shares == pytest.approx([1 / 3] * 3)
