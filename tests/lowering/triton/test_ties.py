"""Where lanes lie in tiles whose addresses do not tell: in the dimension that the compiler takes; kernels are right either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynafuse.ir import Spec
from dynafuse.lowering.triton import lower, ties
from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.schedule import candidates, choose_schedule
from dynafuse.lowering.triton.tiles import Schedule, probe
from tests.lowering.triton.test_candidates import CASES as ROWS
from tests.lowering.triton.test_pointwise_schedule import CASES as POINTS
from tests.support.differential import check
from tests.support.representative import spec_of


@pytest.fixture(params=[True, False], ids=["first", "last"])
def first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the compiler has lanes walk the first dimension of a tile where nothing tells which one is better."""
    monkeypatch.setattr(ties, "_ties_go_first", lambda: request.param)
    return bool(request.param)


def halved(x: torch.Tensor) -> torch.Tensor:
    """Pairs of neighbours, of which the first half of a row is made."""
    return x[:, torch.arange(x.shape[1]) // 2] * torch.arange(x.shape[0], device=x.device)[:, None].sqrt()


def resized(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=1.5, mode="bilinear") * 2


@pytest.mark.parametrize(("function", "inputs"), [
    (halved, [torch.empty(512, 768)]), (resized, [torch.empty(8, 16, 64, 96)]),
])
def test_lanes_walk_columns_whose_index_is_not_followed(function: Any, inputs: list[torch.Tensor], first: bool) -> None:
    spec = spec_of(function, *inputs)
    tiled = [schedule for schedule in candidates(spec) if schedule.schedule_class == "tiled"]
    assert tiled and {schedule.lanes_first for schedule in tiled} == {first}


def test_lanes_walk_rows_of_odd_length_that_lie_side_by_side(first: bool) -> None:
    """Of what is stored at 197 positions an image, nothing is told to be neighbours: the next image begins at an odd place."""
    spec = spec_of(lambda x: x.view(64, 197, 384).permute(0, 2, 1).contiguous(), torch.empty(64 * 197, 384, dtype=torch.bfloat16))
    assert [axis.size for axis in spec.axes] == [64, 384, 197]
    tiled = Schedule("tiled", {"y": (0, 2), "x": (1,)}, {"y": 128, "x": 32}, 8)
    assert ties.Ties(spec, probe(spec)).lanes_first(tiled) == (not first)


def test_lanes_that_move_vectors_are_as_far_apart_in_everything_along_them(first: bool) -> None:
    """A bias whose heads are neighbours has a line of memory for each of eight scores; one after the other they share them."""
    spec = spec_of(lambda x, bias: (x + bias.permute(2, 0, 1)).softmax(-1),
                   torch.empty(16, 12, 512, 512, dtype=torch.bfloat16), torch.empty(512, 512, 12))
    rows = Schedule("persistent", {"x": (0, 1, 2), "r": (3,)}, {"x": 2, "r": 512}, 1)
    assert ties.Ties(spec, probe(spec)).lanes_first(rows) == (not first)


@pytest.mark.parametrize("name", ["transpose", "heads", "batch norm", "cat of channels", "slices"])
def test_tiles_whose_addresses_tell_stay_as_they_are(name: str, first: bool) -> None:
    assert not any(schedule.lanes_first for schedule in candidates(spec_of(POINTS[name][0], *POINTS[name][1])))


def test_the_dimension_of_lanes_is_the_one_that_is_taken(first: bool) -> None:
    spec = spec_of(halved, torch.empty(512, 768))
    tiled = next(schedule for schedule in candidates(spec) if schedule.schedule_class == "tiled")
    source = write_kernels(spec, tiled, False).source
    assert f"tl.arange(0, XBLOCK){'[:, None]' if first else '[None, :]'}" in source
    assert f"tl.arange(0, YBLOCK){'[None, :]' if first else '[:, None]'}" in source


def turned(spec: Spec) -> Schedule:
    """The schedule that is chosen, with its lanes in the other dimension."""
    chosen = choose_schedule(spec)
    return replace(chosen, lanes_first=len(chosen.order) == 2 and not chosen.lanes_first)


TURNED = ["columns", "infinite_columns", "statistics_of_columns", "statistics_of_rows", "columns_with_positions", "statistics",
          "mean_of_channels", "channels_of_two", "columns_of_two", "both_orders", "gated_channels", "whole", "rows", "long_rows",
          "softmax_of_columns", "scans", "scans_of_columns", "rows_and_columns", "batch norm", "heads", "three orders",
          "cat of channels", "padded columns", "gathered", "by rows", "rotated heads", "rotated pairs", "pooled back"]
"""Cases of every class of kernels."""


@pytest.mark.parametrize("name", TURNED)
def test_kernels_are_right_with_lanes_in_the_other_dimension(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, columns, both, parts of them, scans, and of tiles without reductions."""
    function: Callable[..., Any]
    function, inputs = (ROWS | POINTS)[name]
    monkeypatch.setattr(lower, "choose_schedule", turned)
    torch.manual_seed(0)
    check(function, *(x if name in ROWS else filled(x) for x in inputs))


def filled(x: torch.Tensor) -> torch.Tensor:
    """Random numbers in a tensor's layout; of integers, zeros, which are in range wherever they index."""
    return torch.zeros_like(x) if x.dtype is torch.int64 else torch.randn_like(x)
