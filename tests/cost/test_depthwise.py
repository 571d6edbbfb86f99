"""What convolutions that keep channels apart cost: measured cases, and which are faster written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynafuse.cost import device as devices
from dynafuse.cost.depthwise import Wanted, depthwise_of, library_us, written_us
from dynafuse.cost.library_calls import op_prediction
from dynafuse.ops.depthwise import DEPTHWISE
from tests.lowering.triton.test_pointwise_schedule import channels_last
from tests.lowering.triton.test_register_tiles import weights
from tests.support.representative import scheduled

aten = torch.ops.aten
H200 = devices.describe("h200")

Case = tuple[tuple[int, ...], int, int, int]
"""The operand's sizes, a window's length in each dimension, the stride, the result's channels for each of the operand's."""

SEQUENCE: Case = (8, 1536, 1024), 4, 1, 1
IMAGES: Case = (128, 144, 56, 56), 3, 1, 1
HALVED: Case = (128, 96, 112, 112), 3, 2, 1
WIDE: Case = (128, 96, 56, 56), 7, 1, 1
SMALL: Case = (128, 960, 7, 7), 3, 1, 1
DOUBLED: Case = (64, 48, 64, 64), 7, 2, 2


def call(case: Case, beside: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Any], torch.Tensor]:
    """A convolution's arguments by name, and its result, without values."""
    sizes, length, stride, copies = case
    rank = len(sizes) - 2
    layout = torch.channels_last if beside else torch.contiguous_format
    x = torch.empty(sizes, dtype=dtype, device="meta").to(memory_format=layout)
    weight = torch.empty(copies * sizes[1], 1, *[length] * rank, dtype=dtype, device="meta")
    padding = length // 2 if rank == 2 else length - 1
    given = {"input": x, "weight": weight, "bias": None, "stride": [stride] * rank, "padding": [padding] * rank,
             "dilation": [1] * rank, "transposed": False, "output_padding": [0] * rank, "groups": sizes[1]}
    return given, aten.convolution.default(*given.values()).contiguous(memory_format=layout)


@pytest.mark.parametrize(("case", "beside", "wanted", "library", "written"), [
    (SEQUENCE, False, Wanted.RESULT, 131.6, 38.7), (SEQUENCE, False, Wanted.INPUT, 116.5, 33.4),
    (SEQUENCE, False, Wanted.WEIGHT, 86.4, 58.5), (IMAGES, False, Wanted.RESULT, 541.3, 113.1),
    (IMAGES, False, Wanted.INPUT, 958.6, 108.3), (IMAGES, True, Wanted.RESULT, 105.4, 81.6),
    (IMAGES, True, Wanted.INPUT, 185.0, 81.7), (WIDE, True, Wanted.RESULT, 278.4, 203.3), (WIDE, True, Wanted.INPUT, 658.9, 202.9),
    (WIDE, False, Wanted.RESULT, 1314.1, 718.5), (SMALL, True, Wanted.RESULT, 18.3, 13.1), (SMALL, False, Wanted.INPUT, 103.2, 23.6),
    (IMAGES, True, Wanted.WEIGHT, 130.3, 222.1), (HALVED, False, Wanted.RESULT, 391.2, 174.7),
    (HALVED, True, Wanted.RESULT, 145.3, 120.5), (HALVED, True, Wanted.INPUT, 479.6, 218.9),
    (DOUBLED, True, Wanted.RESULT, 1760.8, 322.5), (DOUBLED, True, Wanted.INPUT, 801.2, 282.6),
])
def test_it_is_decided_as_it_was_measured(case: Case, beside: bool, wanted: Wanted, library: float, written: float) -> None:
    sizes = depthwise_of(*call(case, beside))
    assert sizes is not None
    by_library, by_us = library_us(sizes, wanted, H200), written_us(sizes, wanted, H200)
    assert (by_library > by_us) is (library > written)
    assert 0.4 < by_library / library < 2.4 and 0.4 < by_us / written < 2.4


@pytest.mark.parametrize("wanted", [Wanted.RESULT, Wanted.INPUT])
@pytest.mark.parametrize(("case", "dtype", "is_written"), [
    (((32, 384, 14, 14), 7, 1, 1), torch.bfloat16, True), (((32, 384, 14, 14), 7, 1, 1), torch.float32, True),
    (((32, 768, 7, 7), 7, 1, 1), torch.bfloat16, False), (((32, 768, 7, 7), 3, 1, 1), torch.bfloat16, True),
    (((128, 768, 7, 7), 7, 1, 1), torch.bfloat16, True),
])
def test_large_windows_take_lanes_of_several_points(case: Case, dtype: torch.dtype, is_written: bool, wanted: Wanted) -> None:
    """Of few images of 7 × 7 seven would leave too few steps."""
    sizes = depthwise_of(*call(case, True, dtype))
    assert sizes is not None
    assert (written_us(sizes, wanted, H200) < library_us(sizes, wanted, H200)) is is_written


@pytest.mark.parametrize(("images", "side", "has_them"), [(32, 14, True), (32, 7, False), (128, 7, True), (32, 35, True), (32, 37, False)])
def test_the_schedule_has_such_lanes(images: int, side: int, has_them: bool) -> None:
    x = channels_last(images, 768, side, side, dtype=torch.bfloat16)
    weight = weights(x.shape[1], 7, torch.bfloat16)
    found = scheduled(lambda x, w: DEPTHWISE(x, w, [1, 1], [3, 3], [1, 1]), x, weight)
    sizes = depthwise_of(*call(((images, 768, side, side), 7, 1, 1), True))
    assert sizes is not None and bool(found.register_tile) is has_them
    assert (written_us(sizes, Wanted.RESULT, H200) < library_us(sizes, Wanted.RESULT, H200)) is has_them


def test_more_processors_are_faster() -> None:
    sizes = depthwise_of(*call(IMAGES, False))
    assert sizes is not None
    faster = H200.overridden({"processors": 2 * H200.processors})
    assert library_us(sizes, Wanted.RESULT, faster) == pytest.approx(library_us(sizes, Wanted.RESULT, H200) / 2)


def test_others_are_none() -> None:
    given, result = call(IMAGES, False)
    assert depthwise_of({**given, "groups": 1}, result) is None
    assert depthwise_of({**given, "transposed": True}, result) is None
    assert depthwise_of({**given, "weight": torch.empty(144, 2, 3, 3, device="meta")}, result) is None


def test_calls_that_stay_are_priced_like_that() -> None:
    given, result = call(IMAGES, True)
    sizes = depthwise_of(given, result)
    assert sizes is not None
    moved = given["input"].nbytes + result.nbytes
    predicted = op_prediction(aten.convolution.default, tuple(given.values()), {}, result, moved, H200)
    assert predicted.device_us == pytest.approx(library_us(sizes, Wanted.RESULT, H200) + H200.launch_us_eager)
    gradients = result, *list(given.values())[:2], None, *list(given.values())[3:]
    both = op_prediction(aten.convolution_backward.default, (*gradients, [True, True, False]), {},
                         (given["input"], given["weight"], None), 2 * moved, H200)
    assert both.device_us == pytest.approx(
        library_us(sizes, Wanted.INPUT, H200) + library_us(sizes, Wanted.WEIGHT, H200) + H200.launch_us_eager)
