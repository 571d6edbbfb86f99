"""Max pooling with the places of its maxima against eager, bit by bit: layouts, windows, ties, NaN, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.differential import check

prims = torch.ops.prims

WINDOWS: list[tuple[list[int], list[int], list[int], list[int], bool]] = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([3, 3], [2, 2], [0, 0], [1, 1], True),
    ([2, 2], [2, 2], [0, 0], [1, 1], False),
    ([3, 2], [1, 3], [1, 0], [2, 1], False),
    ([5, 5], [1, 1], [2, 2], [1, 1], False),
    ([1, 1], [2, 2], [0, 0], [1, 1], False),
]
"""Sizes, strides, paddings and dilations of windows, and whether sizes are rounded up."""


def image(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values with what decides which element is the largest."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 3, 9, 7, generator=generator)
    spots = torch.rand(2, 3, 9, 7, generator=generator)
    special = {
        "ties": values.round(), "nan": values.where(spots > 0.3, torch.nan), "inf": values.where(spots > 0.3, torch.inf),
        "mostly -inf": values.where(spots > 0.9, -torch.inf), "all -inf": torch.full_like(values, -torch.inf),
        "zeros": torch.zeros_like(values).copysign(values),
    }
    return special[kind].to(dtype)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a part": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[:, :, 3:-1, 1:-2],
}


def pooled(x: Tensor, windows: Sequence[tuple[list[int], list[int], list[int], list[int], bool]] = WINDOWS) -> list[Tensor]:
    return [result for window in windows for result in prims._low_memory_max_pool_with_offsets(x, *window)]


@pytest.mark.parametrize("kind", ["ties", "nan", "inf", "mostly -inf", "all -inf", "zeros"])
def test_maxima_and_their_places(kind: str) -> None:
    check(pooled, image(kind), grad=False, precise=False, executors="triton")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype) -> None:
    check(lambda x: pooled(x, WINDOWS[:2]), LAYOUTS[layout](image("ties", dtype)), grad=False, precise=False,
          executors="triton")


def test_both_results_come_out_of_one_kernel() -> None:
    """The windows are read once, by whoever wants maxima, places, or what is made of either."""
    def ends(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maxima, offsets = prims._low_memory_max_pool_with_offsets(x, *WINDOWS[0])
        indices = prims._low_memory_max_pool_offsets_to_indices(offsets, [3, 3], x.shape[2:], [2, 2], [1, 1], [1, 1])
        return maxima * 2, offsets, indices

    graph, = check(ends, image("ties"), grad=False, precise=False, executors="triton")
    assert len(graph.plan.regions) == 1
    assert not [step for step in graph.plan.steps if step not in graph.plan.regions]


def test_values_of_16_bits_tie_as_in_eager() -> None:
    """What is pooled is compared as eager rounds it, also where it is computed in the same kernel."""
    def sums(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(prims._low_memory_max_pool_with_offsets(x + 0.001 * x, *WINDOWS[0]))

    check(sums, torch.linspace(1, 1.2, 2 * 3 * 9 * 7).view(2, 3, 9, 7).bfloat16(), grad=False, precise=False,
          executors="triton")


def test_dynamic_sizes() -> None:
    def ends(x: Tensor) -> list[Tensor]:
        return pooled(x.relu(), WINDOWS[:3])

    check(ends, image("nan"), grad=False, precise=False, dynamic=True, executors="triton")


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_gradients(window: tuple[list[int], list[int], list[int], list[int], bool]) -> None:
    """Every window's gradient goes to its maximum: of several to the first."""
    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x * 2, *window).sin()

    check(loss, image("ties").requires_grad_(), executors="triton")
    check(loss, LAYOUTS["channels last"](image("ties")).requires_grad_(), executors="triton")


def test_volumes_and_rows() -> None:
    def losses(x: Tensor) -> list[Tensor]:
        volume = torch.nn.functional.max_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0))
        averages = torch.nn.functional.avg_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0), True, False)
        row = torch.nn.functional.max_pool1d(x[0], 3, 2, 1)
        return [volume.sin(), averages.sin(), row.sin()]

    check(losses, image("ties").requires_grad_(), executors="triton")


def test_a_window_that_is_too_large_runs_whole() -> None:
    def ends(x: Tensor) -> list[Tensor]:
        return list(prims._low_memory_max_pool_with_offsets(x, [6, 6], [2, 2], [3, 3], [1, 1], False))

    graph, = check(ends, image("ties"), grad=False, precise=False, executors="triton")
    assert not graph.plan.regions and math.prod((6, 6)) > 25
