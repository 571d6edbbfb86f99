"""Max pooling with the places of its maxima against eager, bit by bit: layouts, windows, ties, NaN, gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dynafuse import backend
from dynafuse.lowering.triton.lower import lower
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


def sources(graph: backend.Compiled) -> str:
    return "".join(lower(bound.code).source for bound in graph.bounds.values())


def test_what_is_picked_of_loaded_values_is_not_rounded_again() -> None:
    """Of a loaded value in 16 bits, ``relu`` makes one of 16 bits; of a product it does not."""
    def ends(x: Tensor, factor: float = 1) -> Tensor:
        return torch.nn.functional.max_pool2d((x if factor == 1 else x * factor).relu(), 3, 2, 1)

    rounds = "to(tl.bfloat16).to(tl.float32)"
    picked, = check(ends, image("nan", torch.bfloat16), grad=False, precise=False, executors="triton")
    scaled, = check(lambda x: ends(x, 1.7), image("nan", torch.bfloat16), grad=False, precise=False, executors="triton")
    assert rounds not in sources(picked) and rounds in sources(scaled)


def test_gradients_of_windows_side_by_side_have_no_masks() -> None:
    """Every element is in one window, which is there: nothing is left to compare."""
    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(x, 2).sin()

    _, backward = check(loss, torch.randn(2, 4, 8, 16).requires_grad_(), executors="triton")
    assert "tl.where" not in sources(backward) and " >= 0" not in sources(backward)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_keeps_places_in_int8(layout: str, dtype: torch.dtype) -> None:
    """The backward is one kernel: it reads places, and no indices."""
    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d((x * 2).relu(), 3, 2, 1).sin()

    forward, backward = check(loss, LAYOUTS[layout](image("ties", dtype)).requires_grad_(), executors="triton")
    assert len(backward.plan.regions) == 1
    assert all(step in graph.plan.regions for graph in (forward, backward) for step in graph.plan.steps)
    targets = {str(node.target) for graph in (forward, backward) for node in graph.plan.annotated.graph.nodes}
    assert "dynafuse.max_pool_offsets.default" in targets and "dynafuse.max_pool_offsets_backward.default" in targets
    assert not any("indices" in target for target in targets)


def test_pooling_stays_whole_where_no_kernel_keeps_places() -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x * 2, 3, 2, 1).sin()

    forward, _ = check(loss, image("ties").requires_grad_(), executors="inductor")
    assert "aten.max_pool2d_with_indices.default" in {str(node.target) for node in forward.plan.annotated.graph.nodes}


def test_indices_that_are_returned() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.max_pool2d(x * 2, 3, 2, 1, return_indices=True)

    check(both, image("ties").requires_grad_(), executors="triton")
    check(both, image("ties").requires_grad_(), executors="triton", dynamic=True)


def test_gradients_of_dynamic_sizes() -> None:
    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x * 2, 3, 2, 1).sin()

    check(loss, image("ties").requires_grad_(), executors="triton", dynamic=True)


def test_volumes_and_rows() -> None:
    def losses(x: Tensor) -> list[Tensor]:
        volume = torch.nn.functional.max_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0))
        averages = torch.nn.functional.avg_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0), True, False)
        row = torch.nn.functional.max_pool1d(x[0], 3, 2, 1)
        return [volume.sin(), averages.sin(), row.sin()]

    check(losses, image("ties").requires_grad_(), executors="triton")


@pytest.mark.parametrize("executors", ["triton", "eager"])
def test_volumes_need_no_lowerings_of_inductors(monkeypatch: pytest.MonkeyPatch, executors: str) -> None:
    """Whether somebody has imported them by now depends on what ran before."""
    monkeypatch.delattr(torch._inductor, "lowering", raising=False)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.max_pool3d(x * 2, (2, 3, 2), (1, 2, 2), (1, 1, 0), return_indices=True)

    for x in (image("ties"), image("ties").requires_grad_()):
        check(both, x, executors=executors)


def test_a_window_that_is_too_large_runs_whole() -> None:
    def ends(x: Tensor) -> list[Tensor]:
        return list(prims._low_memory_max_pool_with_offsets(x, [6, 6], [2, 2], [3, 3], [1, 1], False))

    graph, = check(ends, image("ties"), grad=False, precise=False, executors="triton")
    assert not graph.plan.regions and math.prod((6, 6)) > 25
