"""Windows that lanes share: prices count the loads of the tile that the kernel's schedule has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.lowering.triton.tiles import point_count
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.windows import LEAST_STEPS, Window, best_tile, overlapping, points_of, tiles_of
from tests.lowering.triton.test_pointwise_schedule import channels_last
from tests.lowering.triton.test_register_tiles import plainly, weights
from tests.support import graphs
from tests.support.representative import scheduled, spec_of

BF16 = torch.bfloat16


def loads(function: Callable[..., Any], *inputs: Tensor) -> list[float | None]:
    """The loads of a point that the last node of a function takes of each operand, None where each point takes its own."""
    spaces = Spaces(graphs.annotated(graphs.traced(function, *inputs)), True)
    (node,) = spaces.graph.output_node().all_input_nodes
    return [operand.shared for operand in spaces.operands[node].values()]


CASES: dict[str, tuple[Callable[..., Any], list[Tensor], list[float | None]]] = {
    "3 x 3 of channels": (plainly, [channels_last(16, 64, 56, 56, dtype=BF16), weights(64, 3, BF16)], [24 / 8, 9 / 8]),
    "5 x 5 of channels": (plainly, [channels_last(16, 64, 56, 56, dtype=BF16), weights(64, 5, BF16)], [48 / 8, 25 / 8]),
    "7 x 7 of channels": (plainly, [channels_last(16, 64, 56, 56, dtype=BF16), weights(64, 7, BF16)], [7 * 14 / 8, 49 / 8]),
    "7 x 7 in float32": (plainly, [channels_last(16, 64, 56, 56), weights(64, 7)], [7 * 14 / 8, 49 / 8]),
    "3 x 3 of planes": (plainly, [torch.empty(16, 64, 56, 56), torch.empty(64, 1, 3, 3)], [30 / 8, 9 / 8]),
    "means": (lambda x: F.avg_pool2d(x, 3, 1, 1), [channels_last(16, 64, 56, 56)], [24 / 8]),
    "means 2 apart": (lambda x: F.avg_pool2d(x, 3, 2, 1), [channels_last(16, 64, 112, 112)], [45 / 8]),
    "that share nothing": (lambda x: F.avg_pool2d(x, 2, 2), [channels_last(16, 64, 112, 112)], [None]),
    "along memory": (lambda x: F.avg_pool1d(x, 4, 1), [torch.empty(4, 4096, 1027)], [None]),
    "of few points": (lambda x: F.avg_pool2d(x, 3, 1, 1), [channels_last(1, 64, 32, 32)], [None]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_point_takes_as_many_loads_as_its_share_of_a_register_tile(name: str) -> None:
    function, inputs, expected = CASES[name]
    assert loads(function, *inputs) == expected


@pytest.mark.parametrize("name", CASES)
def test_prices_count_the_tile_that_the_schedule_has(name: str) -> None:
    function, inputs, expected = CASES[name]
    tile = scheduled(function, *inputs).register_tile
    assert bool(tile) == any(share is not None for share in expected)
    spec = spec_of(function, *inputs)
    if tile:
        assert point_count(spec, range(len(spec.axes))) >= points_of(tile) * LEAST_STEPS
        assert all(share * points_of(tile) == round(share * points_of(tile)) for share in expected if share is not None)


def test_views_between_are_looked_through() -> None:
    images, weight = channels_last(16, 64, 56, 56, dtype=BF16), torch.empty(64, 1, 7, 7, dtype=BF16)

    def write(x: Tensor, weight: Tensor) -> Tensor:
        behind = weight.permute(1, 2, 3, 0).clone(memory_format=torch.contiguous_format)
        return plainly(x, behind.permute(3, 0, 1, 2))

    copied = graphs.planned(graphs.traced(write, images, weight)).regions[-1]
    given = graphs.planned(graphs.traced(plainly, images, weights(64, 7, BF16))).regions[-1]
    assert given.predicted_us <= copied.predicted_us < 1.25 * given.predicted_us


@pytest.mark.parametrize("reduced", [(1,), (0, 2, 3)])
def test_windows_of_many_elements_are_computed_before_what_reduces_them(reduced: tuple[int, ...]) -> None:
    """Where rows are reduced lanes take one point each, and load each window by itself."""
    def write(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = plainly(x, weight)
        return y, (y * y).sum(reduced)

    regions = graphs.planned(graphs.traced(write, channels_last(32, 96, 56, 56, dtype=BF16), weights(96, 7, BF16))).regions
    assert [len(region.reductions) for region in regions] == [0, 1]


def test_no_tile_where_little_is_shared() -> None:
    window = Window((0, 64, 1), frozenset({0, 64, 128}), 4)
    assert overlapping([window], [0, 1]) == [1]
    assert best_tile([window], [1], tiles_of({1: 8}, [1], 8)) == ((1, 8),)
    assert best_tile([window], [1], tiles_of({1: 7}, [1], 6)) == ()
    assert best_tile([Window((0, 64, 1), frozenset({0, 64, 128}), 100)], [1], tiles_of({1: 8}, [1], 8)) == ()
