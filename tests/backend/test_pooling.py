"""Pooling and its gradients against float64, by every executor that takes them: windows, paddings, what is divided by."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dynafuse.lowering.inductor import availability
from tests.support.differential import check

EXECUTORS = [
    "triton",
    pytest.param("inductor", marks=pytest.mark.skipif(
        not availability.find("cpu").available, reason=str(availability.find("cpu")))),
]
WINDOWS: list[tuple[list[int], list[int], list[int]]] = [
    ([3], [2], [1]), ([2], [3], [0]), ([3, 2], [2, 1], [1, 0]), ([2, 3], [], [0]), ([3], [1], [1]), ([4, 3], [3], [2, 1]),
]
"""Sizes, strides and paddings, by dimension or for both."""


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_averages(executor: str, ceil_mode: bool) -> None:
    """Every window with and without padding in the divisor, and with a divisor of its own.

    Windows one apart leave nothing to round up, and are the dearest to compile, for their overlaps: they run once. C++ takes
    long to compile: Inductor gets a third of the windows.
    """
    divisors = [(True, None), (False, None), (True, 5)]
    windows = [window for window in WINDOWS[::3 if executor == "inductor" else 1] if not (ceil_mode and window[1] == [1])]

    def averages(x: Tensor) -> list[Tensor]:
        return [torch.ops.aten.avg_pool2d(x, *window, ceil_mode, *divisor)
                for window, divisor in itertools.product(windows, divisors)]

    check(averages, image(), executors=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_maxima_and_adaptive_averages(executor: str) -> None:
    def pooled(x: Tensor) -> list[Tensor]:
        maxima: list[Any] = [torch.ops.aten.max_pool2d(x, *window, [1], ceil_mode)
                             for window, ceil_mode in itertools.product(WINDOWS, (False, True))]
        return [*maxima, *(torch.ops.aten._adaptive_avg_pool2d(x, size) for size in ([3, 2], [6, 7], [1, 7], [4, 5]))]

    with torch.no_grad():
        check(pooled, image(), executors=executor)
    check(lambda x: pooled(x)[-4:], image(), executors=executor)


def image() -> Tensor:
    return torch.randn(2, 2, 6, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
