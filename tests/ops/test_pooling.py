"""How many elements the windows of an average count: as many as torch divides by, wherever edges cut them."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch

from dynafuse.ops.pooling import Window, possible_spans
from tests.support.differential import check

SIZES = range(3, 12)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("with_padding", [False, True])
@pytest.mark.parametrize(("length", "stride", "padding"), [
    (3, 1, 1), (3, 2, 1), (2, 2, 0), (3, 3, 0), (5, 2, 2), (4, 1, 2), (3, 4, 1), (5, 1, 1)])
def test_spans_are_what_averages_of_ones_are_divided_by(
        length: int, stride: int, padding: int, with_padding: bool, ceil_mode: bool) -> None:
    for size in SIZES:
        if size + 2 * padding < length:
            continue
        x = torch.ones(1, 1, size, dtype=torch.float64)
        sums, averages = (torch.nn.functional.avg_pool2d(
            x[:, :, None], (1, length), (1, stride), (0, padding), ceil_mode, with_padding, divisor) for divisor in (1, None))
        expected = {round(float(span)) for span in (sums / averages).flatten()}
        found = possible_spans(Window(length, stride, padding), sympy.Integer(size), sympy.Integer(averages.shape[-1]), with_padding)
        assert found == expected, size


def test_windows_of_unknown_sizes_may_count_any_number() -> None:
    assert possible_spans(Window(3, 1, 1), sympy.Symbol("s"), sympy.Symbol("s"), False) == {1, 2, 3}


@pytest.mark.parametrize("pad_counts", [False, True])
def test_zeros_and_infinities_stay_what_they_are(pad_counts: bool) -> None:
    """Of which a product with a reciprocal in two parts would be zeros of another sign, and NaNs."""
    values = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -3e38, 7.0])
    grid = torch.tensor(list(itertools.islice(itertools.cycle(values.tolist()), 70))).reshape(1, 1, 7, 10)

    def averaged(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(x, 3, 1, 1, True, pad_counts) * 1

    def backward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.avg_pool2d_backward(x, x, [3, 3], [1, 1], [1, 1], True, pad_counts, None) * 1

    check(averaged, grid)
    check(backward, grid)
