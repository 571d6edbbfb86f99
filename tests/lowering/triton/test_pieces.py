"""Tiles that begin anew where pieces of a concatenation do: every point is in one tile, of one piece, and computed right."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynafuse.ir import Spec
from dynafuse.lowering.triton import lower as lowering
from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.pieces import end_text, pieces_of, start_text, tile_count
from dynafuse.lowering.triton.pointwise_schedule import pointwise_schedules
from dynafuse.lowering.triton.schedule import candidates, choose_schedule
from dynafuse.lowering.triton.tile_cost import TileCost
from dynafuse.lowering.triton.tiles import Schedule, probe
from tests.lowering.triton.test_pointwise_schedule import channels_last
from tests.support.differential import check, compiled
from tests.support.representative import spec_of


class Numbers:
    """What the texts call, of numbers."""

    @staticmethod
    def where(condition: bool, left: int, right: int) -> int:
        return left if condition else right


def evaluated(text: str, **names: int) -> int:
    return int(eval(text, {"tl": Numbers, **names}))


@pytest.mark.parametrize("seed", range(20))
def test_every_point_is_in_one_tile(seed: int) -> None:
    generator = random.Random(seed)
    total, block = generator.randrange(40, 2000), 2 ** generator.randrange(3, 9)
    cuts = tuple(sorted(generator.sample(range(1, total), generator.randrange(1, 6))))
    pieces, points = pieces_of(total, cuts, block), []
    for program in range(tile_count(total, cuts, block)):
        start = evaluated(start_text("x", "program", pieces, block), program=program, XBLOCK=block)
        end = evaluated(end_text("x", pieces), x_first=start)
        assert any(piece.begin <= start < piece.end == end for piece in pieces)
        points += range(start, min(start + block, end))
    assert points == list(range(total))
    assert all(piece.is_exact(block) for piece in pieces) == (total == tile_count(total, cuts, block) * block)


def joined(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Pieces of which each takes some arithmetic, of its neighbours too."""
    return torch.cat([F.max_pool2d(x, 3, 1, 1) + x, y, torch.sigmoid(z) * scale[:z.shape[1], None, None]], 1).relu()


def nested(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Pieces of pieces, of which one is there twice."""
    return torch.cat([torch.cat([x.exp(), y * 2], 1), x.sigmoid()], 1) * scale


INPUTS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "three": (joined, [channels_last(2, 40, 5, 7), channels_last(2, 33, 5, 7), channels_last(2, 71, 5, 7), torch.empty(80)]),
    "even": (joined, [channels_last(2, 64, 5, 7), channels_last(2, 96, 5, 7), channels_last(2, 32, 5, 7), torch.empty(32)]),
    "nested": (nested, [channels_last(2, 48, 9, 4, dtype=torch.bfloat16), channels_last(2, 37, 9, 4, dtype=torch.bfloat16),
                        torch.empty(133, 1, 1)]),
    "bytes": (lambda x, y: torch.cat([x > 0, y < 1], 1), [channels_last(2, 50, 9, 4), channels_last(2, 70, 9, 4)]),
}


def cut(function: Callable[..., Any], *inputs: torch.Tensor) -> Schedule:
    """The cheapest schedule whose tiles begin anew."""
    spec = spec_of(function, *inputs)
    return next(schedule for schedule in candidates(spec) if schedule.cuts)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Schedule | None]:
    """The schedules of the kernels that are made: the cheapest whose tiles begin anew, or None for one without such."""
    found: list[Schedule | None] = []

    def chosen(spec: Spec) -> Schedule:
        found.append(next((schedule for schedule in candidates(spec) if schedule.cuts), None))
        return found[-1] or choose_schedule(spec)

    monkeypatch.setattr(lowering, "choose_schedule", chosen)
    return found


@pytest.mark.parametrize("name", INPUTS)
def test_kernels_with_tiles_of_one_piece_are_right(name: str, used: list[Schedule | None]) -> None:
    function, inputs = INPUTS[name]
    torch.manual_seed(0)
    check(function, *map(torch.randn_like, inputs), grad=False)
    assert any(used)


class Features(torch.nn.Module):
    """Features of which there are as many as parameters, of points whose number changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (torch.nn.Parameter(torch.randn(size)) for size in (40, 73))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([(x[:, None] * self.scale).sin(), (x[:, None] + self.shift).tanh()], 1).relu()


def test_pieces_of_known_sizes_are_cut_where_others_change(used: list[Schedule | None]) -> None:
    model = Features().eval()
    function = compiled(model, dynamic=True, strict=True)
    with torch.no_grad():
        for count in (700, 333, 1024):
            x = torch.randn(count)
            torch.testing.assert_close(function(x), model(x))
    assert used and all(schedule is not None and schedule.cuts == (40,) for schedule in used)


def test_a_program_computes_its_own_piece_without_masks_of_others() -> None:
    function, inputs = INPUTS["three"]
    spec, schedule = spec_of(function, *inputs), cut(function, *inputs)
    text = write_kernels(spec, schedule, False).source
    assert "if x_first < 73:" in text and "x_mask = x < tl.where(x_first < 40, 40, tl.where(x_first < 73, 73, 144))" in text
    assert "x < 40" not in text.replace("x_first < 40", "")


def test_heavy_pieces_of_odd_sizes_are_computed_apart() -> None:
    """Of 216 channels, which no power of two divides but eight: in tiles across them every lane would compute all pieces."""
    pieces = [channels_last(16, 216, 42, 42, dtype=torch.bfloat16) for _ in range(4)]
    spec = spec_of(lambda *pieces: torch.cat([F.max_pool2d(x, 3, 1, 1).tanh() for x in pieces], 1), *pieces)
    assert choose_schedule(spec).cuts == (216, 432, 648)


@pytest.mark.parametrize(("function", "inputs", "cuts"), [
    (lambda x: F.pad(x, (1, 1)).exp(), [torch.empty(512, 1022)], ()),
    (lambda x, y: torch.cat([x, y], 1), [channels_last(2, 16, 9, 4), channels_last(2, 80, 9, 4)], ()),
    (lambda x, y: torch.cat([x, y], 1), [channels_last(2, 64, 9, 4), channels_last(2, 64, 9, 4)], (64,)),
])
def test_tiles_are_not_cut_for_few_points(function: Any, inputs: list[torch.Tensor], cuts: tuple[int, ...]) -> None:
    spec = spec_of(function, *inputs)
    assert TileCost(spec, probe(spec)).cuts([1]) == cuts


def test_tiles_that_end_there_anyway_are_not_cut() -> None:
    spec = spec_of(lambda x, y: torch.cat([x, y], 1), channels_last(2, 64, 99, 40), channels_last(2, 64, 99, 40))
    schedules = pointwise_schedules(spec, probe(spec))
    assert {schedule.block["x"] for schedule in schedules if schedule.cuts} == {128}


def test_a_schedule_says_where_it_is_cut() -> None:
    assert str(Schedule("tiled", {"y": (0,), "x": (1,)}, {"y": 8, "x": 64}, 4, cuts=(40, 73))) == (
        "tiled y=0/8 x=1/64|40|73 w4 s1 p1")
