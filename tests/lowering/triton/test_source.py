"""How axes of a tile are written: those that an access reads as neighbours are one."""

from __future__ import annotations

import re

import pytest
import torch

from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.tiles import Schedule
from tests.support.differential import check
from tests.support.representative import spec_of


def windows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Windows of 7 by 7 of images, put back where they were, beside the images."""
    batch, height, width = y.shape
    parts = x.view(batch, height // 7, width // 7, 7, 7).permute(0, 1, 3, 2, 4).reshape(batch, height, width)
    return parts * 2 + y


def test_axes_that_an_access_reads_as_neighbours_are_one_where_tiles_are_copied_ahead() -> None:
    spec = spec_of(windows, torch.empty(4 * 6 * 2, 7, 7), torch.empty(4, 42, 14))
    assert [axis.size for axis in spec.axes] == [4, 6, 7, 2, 7]
    source = write_kernels(spec, Schedule("flat", {"x": (0, 1, 2, 3, 4)}, {"x": 256}, 4), False).source
    assert "tl.load(in1 + (x)" in source and "tl.store(out0 + (x)" in source
    by_image = write_kernels(spec, Schedule("tiled", {"y": (0,), "x": (1, 2, 3, 4)}, {"y": 2, "x": 128}, 4), False).source
    assert "tl.load(in1 + (x + 588*y)" in by_image
    for stages, joined in ((1, False), (3, True)):
        across = Schedule("tiled", {"y": (0, 1, 3, 4), "x": (2,)}, {"y": 128, "x": 4}, 4, stages)
        source = write_kernels(spec, across, False).source
        assert ("y1_2 = y % 14" in source and "tl.load(in1 + (y1_2 + 14*x + 98*y0)" in source) == joined
    along = Schedule("tiled", {"y": (2,), "x": (0, 1, 3, 4)}, {"y": 4, "x": 128}, 4, 3)
    assert not re.search(r"x\d_\d", write_kernels(spec, along, False).source)  # lanes walk these one by one anyway


def test_axes_are_apart_where_that_says_more() -> None:
    """Of the innermost axis alone, or where neighbours are not beside one another, nothing is known that the axes do not tell."""
    spec = spec_of(lambda x, y: x.permute(2, 0, 1) + y.permute(2, 1, 0), torch.empty(8, 6, 4), torch.empty(6, 8, 4))
    source = write_kernels(spec, Schedule("flat", {"x": (0, 1, 2)}, {"x": 64}, 4), False).source
    assert not re.search(r"x\d_\d", source)


@pytest.mark.parametrize("batch", [1, 3])
def test_windows_beside_images(batch: int) -> None:
    def normed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = windows(x, y)
        return both - both.mean((1, 2), keepdim=True)

    inputs = torch.randn(batch * 6 * 2, 7, 7), torch.randn(batch, 42, 14)
    check(windows, *inputs, executors="triton")
    check(normed, *inputs, executors="triton", dynamic=True)


def centred(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Columns of images, by a factor of each image and channel."""
    return (x - x.mean(1, keepdim=True)) * scale[:, :, None]


@pytest.mark.parametrize(("points", "text"), [(64, "x_first // 64"), (100, "x // 100")])
def test_what_is_one_for_a_program_is_computed_once(points: int, text: str) -> None:
    """Tiles of 32 columns are of one image where their number is a multiple of that."""
    spec = spec_of(centred, torch.empty(3, 8, points), torch.empty(3, 8))
    held = Schedule("persistent", {"x": (0, 2), "r": (1,)}, {"x": 32, "r": 8}, 1, lanes="x")
    assert f"x0 = ({text})" in write_kernels(spec, held, False).source


@pytest.mark.parametrize("points", [4096, 4100])
def test_what_is_one_for_a_program_is_right(points: int) -> None:
    x, scale = torch.randn(3, 8, points), torch.randn(3, 8)
    check(centred, x, scale, executors="triton")
    check(lambda x, scale: x.softmax(2) * scale[:, :, None], x, scale, executors="triton")
    check(lambda x, scale: x.relu() * scale[:, :, None].sigmoid(), x, scale, executors="triton")
    check(lambda x, scale: x.transpose(1, 2).contiguous() * scale[:, None].exp(), x, scale, executors="triton")
