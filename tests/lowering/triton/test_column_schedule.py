"""Schedules of columns, and of rows beside them: what is chosen for typical layouts, and that it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.config import resolve
from dynafuse.partition.kernel_class import LANES, PROCESSORS
from tests.lowering.triton.test_pointwise_schedule import channels_last
from tests.support import graphs
from tests.support.representative import scheduled

BF16 = torch.bfloat16
COLUMNS = 2 * PROCESSORS * LANES
"""As many as keep all processors busy with 32 of them in a program."""


def computed(function: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """What a function of several results returns, as compiled."""
    run = graphs.compiled(graphs.traced(function, *inputs), inputs, resolve(options={"strict": True, "executors": "triton"}))
    return list(run.call(list(inputs)))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(1)


def softmax_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data.default(gradient, y, 1, y.dtype)


def centred(x: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True) + 1e-5).rsqrt()


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


def scaled_gradient(gradient: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return softmax_gradient(gradient * scale, y)


def heavy_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    return softmax_gradient(torch.erf(torch.erf(torch.erf(gradient))), y)


HELD = {softmax: 1, softmax_gradient: 2, scaled_gradient: 3, heavy_gradient: 2, centred: 1, unit: 1}
"""How many tensors each has in registers."""


@pytest.mark.parametrize(("function", "length", "dtype", "expected"), [
    (softmax, 21, torch.float32, (32, 32, 1)), (softmax, 21, BF16, (64, 32, 1)), (softmax, 128, BF16, (32, 128, 2)),
    (softmax_gradient, 128, BF16, (32, 128, 4)), (softmax, 512, BF16, (32, 512, 8)), (unit, 100, torch.float32, (32, 128, 2)),
    (centred, 48, torch.float32, (32, 64, 1)), (scaled_gradient, 200, BF16, (32, 256, 8)),
    (heavy_gradient, 64, torch.float32, (32, 64, 4)),
])
def test_columns_that_are_read_again_are_held(function: Callable[..., Tensor], length: int, dtype: torch.dtype,
                                              expected: tuple[int, int, int]) -> None:
    found = scheduled(function, *(torch.empty(2, length, COLUMNS, dtype=dtype) for _ in range(HELD[function])))
    assert (found.schedule_class, found.block["x"], found.block["r"], found.warps) == ("persistent", *expected)


@pytest.mark.parametrize(("function", "length"), [
    (softmax, 2000), (softmax_gradient, 1000), (centred, 96), (lambda x: x.sum(1), 64), (lambda x: x.argmax(1), 3),
])
def test_others_are_walked(function: Callable[..., Tensor], length: int) -> None:
    """Those that are too long, those that are read once, and those whose variance takes two sums over all lanes."""
    inputs = (torch.empty(2, length, COLUMNS) for _ in range(HELD.get(function, 1)))
    assert scheduled(function, *inputs).schedule_class == "looped"


def test_where_a_maximum_is_is_told_by_lanes_that_hold_it() -> None:
    assert scheduled(lambda x: x.argmax(1), torch.empty(2, 21, COLUMNS, dtype=BF16)).schedule_class == "persistent"


@pytest.mark.parametrize("function", [softmax, centred, unit, lambda x: x.argmax(1), lambda x: F.log_softmax(x, 1).amin(1)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_held_columns_are_right(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """Of a length that is no power of two, and rows of which the last program has few."""
    x = torch.randn(3, 21, COLUMNS + 5).to(dtype)
    x[0, 3, 7], x[1, 20, 9], x[2, :, 11] = torch.nan, torch.inf, -torch.inf
    assert scheduled(function, x).schedule_class == "persistent"
    (result,) = computed(lambda x: (function(x),), x)
    torch.testing.assert_close(result, function(x.double()).to(result.dtype), rtol=0.016, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(("run", "columns"), [(16, 16), (64, 64), (24, 128)])
def test_a_program_takes_pieces_of_memory(run: int, columns: int) -> None:
    """Columns of which so many are neighbours, those of others a thousand rows away."""
    found = scheduled(lambda x: x.sum(1), torch.empty(1 << 16, 1000, run))
    assert (found.schedule_class, found.block["x"]) == ("looped", columns)


def test_few_columns_are_scanned_by_more_programs() -> None:
    """As many as half a sector: each program waits for what it has added up."""
    found = scheduled(lambda x: x.cumsum(0), torch.empty(1 << 14, 64, dtype=torch.int64))
    assert (found.schedule_class, found.block["x"]) == ("looped", 2)


# Pairs ------------------------------------------------------------------------------------------------------------------


def kernel_sums(a: Tensor, b: Tensor) -> Tensor:
    return (-(a[:, None] - b[None]) ** 2).exp().sum(1)


def pair_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    pairs = torch.tanh(a[:, None] * b[None] + torch.sigmoid(a[:, None] - b[None]))
    return pairs.sum(0), pairs.sum(1)


@pytest.mark.parametrize("rows", [4096, 1 << 16])
def test_rows_of_pairs_are_taken_whole(rows: int) -> None:
    """What is read of them is nothing beside them, wherever it lies: a program needs no neighbours."""
    found = scheduled(kernel_sums, torch.empty(rows), torch.empty(4096))
    assert (found.schedule_class, found.block["x"], found.lanes) == ("persistent", 1, "r")


@pytest.mark.parametrize(("length", "warps"), [(1024, 4), (2048, 8), (4096, 16)])
def test_sums_of_pairs_both_ways_have_lanes_for_their_arithmetic(length: int, warps: int) -> None:
    found = scheduled(pair_sums, torch.empty(4096), torch.empty(length))
    assert (found.schedule_class, found.warps) == ("rowcol", warps)


def test_sums_of_pairs_are_what_eager_has() -> None:
    a, b = torch.randn(300), torch.randn(2048)
    torch.testing.assert_close(computed(pair_sums, a, b), list(pair_sums(a, b)))


def pooled(x: Tensor) -> Tensor:
    """A mean of each channel of images whose channels are neighbours."""
    return F.silu(x).mean((2, 3))


def gated(x: Tensor, gradient: Tensor) -> Tensor:
    return (x * gradient).sum((2, 3))


def images(count: int, channels: int, side: int) -> Tensor:
    return channels_last(count, channels, side, side, dtype=BF16)


@pytest.mark.parametrize(("function", "sizes", "expected"), [
    (pooled, (64, 576, 18), (64, 32, 4, 3)),  # 288 programs of 128 columns would have two warps each
    (pooled, (128, 672, 14), (128, 16, 4, 3)),
    (gated, (128, 672, 14), (128, 8, 2, 3)),  # two tensors are as many bytes under way
    (gated, (64, 672, 14), (128, 16, 4, 3)),  # but not of as few programs as these
    (pooled, (32, 1536, 14), (128, 16, 4, 3)),  # half as wide tiles would leave too few steps
    (gated, (128, 366, 14), (32, 16, 1, 3)),  # rows of which lanes move four bytes at a time
    (pooled, (64, 1536, 8), (128, 8, 2, 3)),  # too few steps for more
])
def test_few_programs_of_columns_have_more_warps(function: Callable[..., Tensor], sizes: tuple[int, int, int],
                                                 expected: tuple[int, int, int, int]) -> None:
    found = scheduled(function, *(images(*sizes) for _ in range(1 if function is pooled else 2)))
    assert (found.block["x"], found.block["r"], found.warps, found.stages) == expected


@pytest.mark.parametrize(("function", "channels", "stages"), [
    (lambda x: x.float().var((0, 2, 3)), 366, 3), (lambda x: x.float().var((0, 2, 3)), 384, 1), (lambda x: x.sum((0, 2, 3)), 366, 1),
])
def test_variances_of_pairs_are_copied_ahead(function: Callable[..., Tensor], channels: int, stages: int) -> None:
    """Their loads would wait for each other; those of sums do not, and of larger vectors there are fewer."""
    found = scheduled(function, images(128, channels, 14))
    assert (found.schedule_class, found.stages) == ("split", stages)
