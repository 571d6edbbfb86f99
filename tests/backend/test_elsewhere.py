"""Rows that are read elsewhere than where they are computed: slices of an input, and normalized rows turned and shifted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynafuse
from tests.support.differential import compiled

LENGTHS = (6, 300, 5000)  # written out or in registers, in registers, looped over


def normalized_then_rotated(x: Tensor) -> Tensor:
    """Rotary embedding of what is normalized: every element needs two of its row."""
    rows = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    half = x.shape[-1] // 2
    return rows * x.cos() + torch.cat([-rows[..., half:], rows[..., :half]], -1) * x.sin()


def mirrored_beside(x: Tensor) -> Tensor:
    rows = x.softmax(-1)
    return rows + 2 * rows.flip(-1)


def summed_again(x: Tensor) -> Tensor:
    rows = x - x.mean(-1, keepdim=True)
    return (rows * rows.roll(3, -1)).sum(-1)


def other_rows(x: Tensor) -> Tensor:
    rows = x.softmax(-1)
    return rows + 2 * rows.flip(0)


def columns_shifted(x: Tensor) -> Tensor:
    columns = x.t() - x.t().amax(0)
    return columns.roll(1, 0) * columns


def overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.softmax(-1)
    mirrored = rows + rows.flip(-1)
    x.copy_(rows.roll(1, -1))
    return mirrored, rows


def neighbours(x: Tensor) -> Tensor:
    return x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll((2, -3), (0, 1)) - 4 * x


FUNCTIONS: list[Callable[[Tensor], object]] = [
    normalized_then_rotated, mirrored_beside, summed_again, other_rows, columns_shifted, overwritten, neighbours]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rows_read_elsewhere(function: Callable[[Tensor], object], length: int) -> None:
    expected = torch.randn(5, length)
    actual = expected.clone()
    torch.testing.assert_close(compiled(function, executors="triton")(actual), function(expected))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", [
    lambda x: F.log_softmax(x[:, 3:-2], -1),
    lambda x: F.softmax(x[1:3, ::2].t(), 0),
    lambda x: F.normalize(x[:, x.shape[1] // 2:], dim=0),
    lambda x: (x[:2, 1:] / x[:2, 1:].norm(dim=1, keepdim=True), x[:2, 1:].sum(1), x.amax(1)),
])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_a_slice(function: Callable[[Tensor], object], length: int) -> None:
    x = torch.randn(5, length)
    torch.testing.assert_close(compiled(function, executors="triton")(x), function(x))


def kernels(function: Callable[[Tensor], object], x: Tensor) -> int:
    graphs = dynafuse.explain(function, x, device="h200").to_dict()["graphs"]
    return sum(len(graph["steps"]) for graph in graphs)


def test_one_kernel_reads_along_the_row_that_it_reduces() -> None:
    x = torch.randn(64, 128)
    assert [kernels(f, x) for f in (normalized_then_rotated, mirrored_beside, summed_again, other_rows)] == [1, 1, 1, 2]
    assert kernels(lambda x: F.softmax(x[:, 1:], -1), x) == 1
