"""Schedules of rows: what is chosen where something lies across them, where they are few and long, or take much arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynafuse.partition.kernel_class import FEW_ROWS
from tests.support.differential import check
from tests.support.representative import scheduled

BF16 = torch.bfloat16


def norm_of_sum(x: Tensor, across: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As of patches, to which what a convolution has made is added: a tensor whose rows are columns in memory."""
    total = x + across.transpose(1, 2)
    centred = total - total.mean(2, keepdim=True)
    return total, centred, centred * torch.rsqrt(total.var(2, keepdim=True, correction=0) + 1e-5)


@pytest.mark.parametrize(("images", "points", "length", "dtype", "rows", "warps"), [
    (2, 1568, 768, torch.float32, 8, 8), (8, 1568, 384, torch.float32, 16, 8), (4, 1024, 1024, BF16, 16, 8),
    (32, 3136, 96, BF16, 32, 4),
])
def test_rows_that_little_lies_across_fill_its_sectors(
        images: int, points: int, length: int, dtype: torch.dtype, rows: int, warps: int) -> None:
    x, across = torch.empty(images, points, length, dtype=dtype), torch.empty(images, length, points, dtype=dtype)
    found = scheduled(norm_of_sum, x, across)
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", rows, warps)


@pytest.mark.parametrize(("rows", "tile", "warps"), [(FEW_ROWS, 4096, 16), (FEW_ROWS + 1, 2048, 8)])
def test_few_long_rows_of_one_tensor_have_much_under_way(rows: int, tile: int, warps: int) -> None:
    found = scheduled(lambda x: x.sum((0, 2)), torch.empty(64, rows, 1024, dtype=BF16))
    assert (found.schedule_class, found.block["r"], found.warps) == ("looped", tile, warps)


@pytest.mark.parametrize(("tensors", "warps"), [(1, 8), (2, 4)])
def test_a_few_rows_of_one_tensor_are_held_by_more_warps(tensors: int, warps: int) -> None:
    inputs = [torch.empty(512, 4096, dtype=BF16) for _ in range(tensors)]
    found = scheduled(lambda *given: (product := torch.stack(given).prod(0)) / product.sum(1, keepdim=True), *inputs)
    assert (found.schedule_class, found.block["r"], found.warps) == ("persistent", 4096, warps)


@pytest.mark.parametrize(("function", "warps"), [
    (lambda x: x, 1), (lambda x: x.erf().erf().exp(), 2), (lambda x: x.erf().erf().erf(), 4)])
def test_lanes_hold_fewer_elements_the_more_is_computed(function: Callable[[Tensor], Tensor], warps: int) -> None:
    found = scheduled(lambda x: (y := function(x)) - y.mean(1, keepdim=True), torch.empty(1 << 16, 1024))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", 1, warps)


@pytest.mark.parametrize("points", [48, 50])
def test_rows_that_little_lies_across_are_right(points: int) -> None:
    check(norm_of_sum, torch.randn(3, points, 40), torch.randn(3, 40, points), executors="triton")


@pytest.mark.parametrize(("weighted", "expected"), [(True, (16, 8)), (False, (8, 4))])
def test_rows_of_a_warp_that_share_weights_go_sixteen_to_a_program(weighted: bool, expected: tuple[int, int]) -> None:
    """Of four warps a lane would have one weight: Triton then lays out rows as it does weights, and back."""
    weights = [torch.empty(128, dtype=BF16)] if weighted else []
    found = scheduled(lambda x, *w: ((x - x.mean(1, keepdim=True)) * (w[0] if w else 2)).softmax(1),
                      torch.empty(50176, 128, dtype=BF16), *weights)
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", *expected)


@pytest.mark.parametrize(("length", "expected"), [(49, (8, 1)), (64, (16, 4))])
def test_short_rows_of_much_arithmetic_are_held_by_fewer_lanes_if_these_load_one_by_one(
        length: int, expected: tuple[int, int]) -> None:
    """Lanes of rows of 64 have eight neighbours each; of 49 they have one of every 32, and sum up over all of a warp."""
    found = scheduled(lambda x: x.erf().exp().softmax(1), torch.empty(200704, length))
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", *expected)


@pytest.mark.parametrize(("gathered", "expected"), [(True, (1, 1)), (False, (2, 2))])
def test_rows_that_are_gathered_count_as_loaded_from_memory(gathered: bool, expected: tuple[int, int]) -> None:
    """Of a row that all share only what is stored counts, so that a program takes two."""
    table, at = torch.empty(30522, 768, dtype=BF16), torch.empty(1 << 15, dtype=torch.int64)
    factors, shared = torch.empty(1 << 15, 1, dtype=BF16), torch.empty(768, dtype=BF16)

    def norm(table: Tensor, at: Tensor, factors: Tensor, shared: Tensor) -> Tensor:
        rows = table[at] * factors if gathered else shared * factors
        return (rows - rows.mean(1, keepdim=True)).to(BF16)

    found = scheduled(norm, table, at, factors, shared)
    assert (found.schedule_class, found.block["x"], found.warps) == ("persistent", *expected)
