"""Windows of outputs that read an element: every output once, with the weight that the forward gives it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from dynafuse.ops.upsampling import NEGLIGIBLE, Sampling, windows_of

MODES = ("nearest", "nearest-exact", "linear", "cubic")
SIZES = (1, 2, 3, 4, 5, 8, 13)


def weights(sampling: Sampling) -> torch.Tensor:
    """What the windows say of each output (a row) and each element, in float64; NaN where that is computed in the kernel."""
    found = torch.zeros(sampling.count, sampling.size, dtype=torch.float64)
    windows = windows_of(sampling)
    for i, place in itertools.product(range(sampling.size), windows.places):
        output = (windows.step * i + windows.shift) // windows.divisor + place.offset
        if 0 <= output < sampling.count:
            found[output, i] = torch.nan if place.weight is None else dict(place.ends).get(i, place.weight)
    return found


def forward(sampling: Sampling) -> torch.Tensor:
    """The same by torch, of images that are 1 at one element each."""
    if sampling.mode == "cubic":
        ones = torch.eye(sampling.size, dtype=torch.float64)[:, None, :, None].expand(-1, -1, -1, 3)
        out = F.interpolate(ones, (sampling.count, 3), mode="bicubic", align_corners=sampling.aligned)[:, 0, :, 1]
        return out.T
    aligned = {"align_corners": sampling.aligned} if sampling.mode == "linear" else {}
    ones = torch.eye(sampling.size, dtype=torch.float64)[:, None]
    return F.interpolate(ones, sampling.count, mode=sampling.mode, **aligned)[:, 0].T


def sampled(mode: str, size: int, count: int, aligned: bool = False) -> Sampling:
    distance = (size - 1) / max(count - 1, 1) if aligned else size / count
    return Sampling(mode, size, count, distance, aligned)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aligned", [False, True])
def test_windows_have_all_readers_and_their_weights(mode: str, aligned: bool) -> None:
    if aligned and mode.startswith("nearest"):
        return
    for size, count in itertools.product(SIZES, (*SIZES, 26, 39)):
        sampling = sampled(mode, size, count, aligned)
        truth, found = forward(sampling), weights(sampling)
        known = ~found.isnan()
        torch.testing.assert_close(found[known], truth[known], rtol=0, atol=1e-7 if mode == "cubic" else 10 * NEGLIGIBLE)


@pytest.mark.parametrize(("sampling", "length", "known"), [
    (sampled("nearest", 16, 32), 2, True),
    (sampled("nearest", 16, 8), 1, False),  # half of the elements are not read
    (sampled("nearest", 16, 40), 3, False),
    (sampled("nearest", 16, 16), 1, True),
    (sampled("linear", 16, 32), 4, True),
    (sampled("linear", 16, 48), 5, True),
    (sampled("linear", 16, 8), 1, True),
    (sampled("linear", 16, 32, aligned=True), 4, False),
    (sampled("linear", 16, 16, aligned=True), 1, True),
    (sampled("cubic", 16, 32), 8, True),
    (sampled("linear", 1, 5), 5, True),
])
def test_windows_are_short_and_weights_known_where_they_repeat(sampling: Sampling, length: int, known: bool) -> None:
    places = windows_of(sampling).places
    assert len(places) == length and all(place.weight is not None for place in places) is known


def test_positions_of_nearest_are_rounded_to_float32_as_torch_does() -> None:
    """In exact arithmetic some of these outputs read the element before."""
    different = 0
    for size, count in itertools.product(range(1, 60), range(1, 60)):
        sampling = sampled("nearest", size, count)
        read = [element for output in range(count) for element, _ in sampling.taps(output)]
        expected = F.interpolate(torch.arange(size).float()[None, None], count, mode="nearest")[0, 0].int().tolist()
        assert read == expected, sampling
        different += read != [output * size // count for output in range(count)]
    assert different
