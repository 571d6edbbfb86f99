"""Register tiles: lanes that compute several points of windows compute all of them right, and load what these share once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dynafuse.lowering.calls import terms_in_code
from dynafuse.lowering.triton import filled_loads, register_tiles
from dynafuse.lowering.triton import lower as lowering
from dynafuse.lowering.triton.register_tiles import in_steps
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.lowering.triton.tiles import Schedule
from tests.lowering.triton.test_pointwise_schedule import channels_last
from tests.support.differential import check
from tests.support.representative import scheduled, spec_of

BF16 = torch.bfloat16


def convolved(x: torch.Tensor, weight: torch.Tensor, stride: int = 1) -> torch.Tensor:
    numbers = [[stride] * 2, [weight.shape[-1] // 2] * 2, [1] * 2]
    result: torch.Tensor = torch.ops.dynafuse.depthwise_convolution(x, weight, *numbers)
    return result


def plainly(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return convolved(x, weight)


def gradient(grad: torch.Tensor, weight: torch.Tensor, stride: int = 1) -> torch.Tensor:
    sizes, numbers = [size * stride for size in grad.shape[2:]], [[stride] * 2, [weight.shape[-1] // 2] * 2, [1] * 2]
    result: torch.Tensor = torch.ops.dynafuse.depthwise_convolution_backward(
        grad, weight, [*grad.shape[:2], *sizes], *numbers)
    return result


def average_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.avg_pool2d_backward(grad, x, [3, 3], [2, 2], [1, 1], False, True, None)


def largest_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    where = F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]
    return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, where)


def weights(channels: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(length, length, 1, channels, dtype=dtype).permute(3, 2, 0, 1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """A stencil that is written out, beside something that is not shifted."""
    inner = x[1:-1, 1:-1]
    return (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * inner) * torch.sigmoid(inner)


def two_outputs(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = F.avg_pool2d(x.relu(), 3, 1, 1)
    return mean + residual, (mean > residual).to(torch.uint8)


def overwritten(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y.add_(F.avg_pool2d(x, 3, 1, 1))
    return y * 2, (y > 0).to(torch.uint8)


def two_overwritten(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> None:
    c.add_(F.avg_pool2d(a, 3, 1, 1))
    d.mul_(F.avg_pool2d(b, 3, 1, 1))


def beside_others(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution with a producer, of which another result is made, and with consumers, one of which masks it."""
    y = convolved(x.relu(), weight)
    return torch.sigmoid(y) + x, F.pad(y, (1, 1))[..., 1:-1].tanh()


def two_of_seven(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return convolved(x, first) * convolved(x, second)


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = convolved(x, weight)
    for number in range(60):
        y = torch.sigmoid(y) * y + number
    return y


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int]] = {
    "convolution of channels": (convolved, [channels_last(2, 24, 12, 8), weights(24, 3)], 8),
    "of five": (convolved, [channels_last(2, 24, 12, 8), weights(24, 5)], 4),
    "of seven": (convolved, [channels_last(1, 24, 8, 12, dtype=BF16), weights(24, 7, BF16)], 6),
    "of seven, in a kernel with others": (beside_others, [channels_last(1, 24, 8, 12), weights(24, 7)], 6),
    "of seven, two for each": (convolved, [channels_last(1, 12, 8, 12), weights(24, 7)], 1),
    "two of seven": (two_of_seven, [channels_last(1, 24, 8, 12), weights(24, 7), weights(24, 7)], 6),
    "in bfloat16": (convolved, [channels_last(2, 24, 8, 8, dtype=BF16), weights(24, 3, BF16)], 8),
    "of planes": (convolved, [torch.empty(2, 6, 14, 9), torch.empty(6, 1, 3, 3)], 7),
    "halved": (lambda x, w: convolved(x, w, 2), [channels_last(2, 24, 16, 16), weights(24, 3)], 8),
    "odd sizes": (convolved, [channels_last(2, 24, 7, 11), weights(24, 3)], 7),
    "gradient of channels": (gradient, [channels_last(2, 24, 12, 8), weights(24, 3)], 8),
    "gradient, of seven": (gradient, [channels_last(1, 24, 8, 12), weights(24, 7)], 6),
    "gradient of planes": (gradient, [torch.empty(2, 6, 14, 9), torch.empty(6, 1, 5, 5)], 7),
    "gradient, halved": (lambda g, w: gradient(g, w, 2), [channels_last(2, 24, 6, 4), weights(24, 3)], 4),
    "gradient, halved, of five": (lambda g, w: gradient(g, w, 2), [channels_last(2, 24, 6, 4), weights(24, 5)], 4),
    "gradient, halved, of planes": (lambda g, w: gradient(g, w, 2), [torch.empty(2, 6, 7, 5), torch.empty(6, 1, 3, 3)], 2),
    "gradient, by three": (lambda g, w: gradient(g, w, 3), [torch.empty(2, 6, 7, 5), torch.empty(6, 1, 5, 5)], 3),
    "gradient of averages": (average_gradient, [channels_last(2, 24, 5, 4), channels_last(2, 24, 10, 8)], 4),
    "gradient of the largest": (largest_gradient, [channels_last(2, 24, 10, 8), channels_last(2, 24, 5, 4)], 4),
    "average": (lambda x: F.avg_pool2d(x, 3, 1, 1), [channels_last(2, 24, 12, 8)], 8),
    "average without padding": (lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) * 2, [channels_last(2, 24, 8, 8)], 8),
    "largest and where": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [channels_last(2, 24, 16, 16)], 8),
    "stencil": (neighbours, [torch.empty(18, 34)], 8),
    "two outputs": (two_outputs, [channels_last(2, 24, 12, 8), channels_last(2, 24, 12, 8)], 8),
    "overwritten": (overwritten, [channels_last(2, 24, 12, 8), channels_last(2, 24, 12, 8)], 8),
    "two overwritten": (two_overwritten, [channels_last(2, 24, 12, 8)] * 4, 8),
}
"""Functions, their inputs, and how many points a lane computes."""


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """The schedules of the kernels that are made, however few points they have."""
    monkeypatch.setattr(register_tiles, "LEAST_STEPS", 1)
    chosen: list[Schedule] = []

    def choose(*arguments: Any) -> Schedule:
        chosen.append(choose_schedule(*arguments))
        return chosen[-1]

    choose_schedule = lowering.choose_schedule
    monkeypatch.setattr(lowering, "choose_schedule", choose)
    return chosen


@pytest.mark.parametrize("name", CASES)
def test_all_points_are_right(name: str, used: list[Schedule]) -> None:
    function, inputs, points = CASES[name]
    torch.manual_seed(0)
    check(function, *(torch.randn_like(x) for x in inputs))
    assert points in [register_tiles.points_of(schedule.register_tile) for schedule in used]


@pytest.mark.parametrize(("function", "length", "terms"), [
    (plainly, 3, 9), (plainly, 5, 25), (plainly, 7, 7), (lambda g, w: gradient(g, w), 7, 7), (lambda g, w: gradient(g, w, 2), 7, 49),
    (lambda x, w: convolved(x, w).sigmoid() + x, 5, 27)])
def test_code_of_windows_has_their_terms(function: Callable[..., Any], length: int, terms: int) -> None:
    assert terms_in_code(spec_of(function, channels_last(2, 24, 12, 8), weights(24, length))) - terms in (0, 1)  # a view


def test_shared_places_are_loaded_once(used: list[Schedule]) -> None:
    spec = spec_of(plainly, *CASES["convolution of channels"][1])
    text = lowering.lower(spec).source
    assert used[-1].register_tile == ((2, 2), (3, 4)) and text.count("tl.load(in0") == 4 * 6
    assert text.count("tl.load(in1") == 9 and text.count("tl.store(") == 8
    assert text.rindex("tl.load(") < text.index("tl.store(")


def test_large_windows_are_walked_row_by_row(used: list[Schedule]) -> None:
    """All points of a tile in one loop, which loads for each step what they share of a row."""
    _, inputs, points = CASES["of seven"]
    text = lowering.lower(spec_of(plainly, *inputs)).source
    before, _, body = text.partition("    for w")
    assert used[-1].register_tile == ((2, points),) and before.count("tl.full(") == points and "tl.load(" not in before
    assert body.count("tl.load(in0") == points + 6 and body.count("tl.load(in1") == 7 and "    for w" not in body
    assert lowering.lower(spec_of(two_of_seven, *CASES["two of seven"][1])).source.count("    for w") == 2


@pytest.mark.parametrize(("function", "inputs"), [
    (plainly, CASES["of five"][1]), (lambda g, w: gradient(g, w, 2), [channels_last(1, 24, 6, 4), weights(24, 7)]),
    (lambda x, w: convolved(x, w).sum((2, 3)), CASES["of seven"][1]),  # in a kernel that walks rows
    (lambda x, w: F.pad(convolved(x, w), (1, 1)), CASES["of seven"][1])])  # under a condition
def test_other_windows_are_written_out(function: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
    assert "    for w" not in lowering.lower(spec_of(function, *inputs)).source


@pytest.mark.parametrize("case", [
    (lambda x: F.avg_pool2d(x, 3, 3), [channels_last(4, 64, 192, 192)]),  # windows that share nothing
    (lambda x, y: x + y, [torch.empty(4096, 4096), torch.empty(4096)]),
    (lambda x: x[..., :-3] + x[..., 1:-2] + x[..., 2:-1] + x[..., 3:], [torch.empty(4096, 4099)]),  # along memory
    (lambda x: F.avg_pool2d(x, 3, 1, 1), [channels_last(1, 64, 32, 32)]),  # too few points
    (chain, [channels_last(16, 64, 56, 56, dtype=BF16), weights(64, 3, BF16)]),  # much else to compute
])
def test_other_lanes_compute_a_point_each(case: tuple[Callable[..., Any], list[torch.Tensor]]) -> None:
    function, inputs = case
    assert scheduled(function, *inputs).register_tile == ()


def test_large_images_have_register_tiles() -> None:
    schedule = scheduled(plainly, channels_last(16, 64, 56, 56, dtype=BF16), weights(64, 3, BF16))
    assert str(schedule) == "flat x=0,2*2,3*4,1/512 w4 s1 p1" and schedule.fills_registers


@pytest.mark.parametrize(("write", "stores"), [
    (lambda a, b: (F.avg_pool2d(a, 3, 1, 1), F.avg_pool2d(b, 3, 1, 1)), {8}),
    (lambda a, b: (F.avg_pool2d(a, 3, 1, 1), b * 2), {1})])
def test_nests_of_a_launch_have_register_tiles_if_all_have(
        write: Callable[..., Any], stores: set[int], used: list[Schedule]) -> None:
    text = lowering.lower(spec_of(write, channels_last(2, 24, 12, 8), channels_last(2, 24, 8, 12))).source
    nests = [part for part in text.split("@triton.jit") if "dynafuse_nest" in part and "side by side" not in part]
    assert nests and {nest.count("tl.store(") for nest in nests} == stores


def test_axes_are_walked_in_steps() -> None:
    spec = spec_of(plainly, *CASES["convolution of channels"][1])
    sizes = [axis.size for axis in in_steps(spec, ((1, 2), (2, 4))).axes]
    assert sizes == [axis.size // count for axis, count in zip(spec.axes, (1, 2, 4, 1), strict=True)]
    assert in_steps(spec, ()) is spec


def test_a_selected_zero_is_loaded() -> None:
    def filled(*texts: str) -> list[str]:
        scope = Scope(lines=[Line(text) for text in texts])
        filled_loads.fill_loads(scope)
        return [line.text for line in scope.all_lines()]

    load, selection = "v1 = tl.load(in0 + ({0}), v0 & x_mask).to(tl.float32)", "v2 = tl.where(v0, v1, 0.0)"
    assert filled(load, selection) == ["v1 = tl.load(in0 + ({0}), v0 & x_mask, other=0.0).to(tl.float32)", "v2 = v1"]
    hinted = 'v1 = tl.load(in0 + ({0}), v0, eviction_policy="evict_last")'
    assert filled(hinted, selection)[0] == 'v1 = tl.load(in0 + ({0}), v0, other=0.0, eviction_policy="evict_last")'
    for other in ("v2 = tl.where(v3, v1, 0.0)", "v2 = tl.where(v0, v1, 1.0)", "v2 = tl.where(v0, v4, 0.0)"):
        assert filled(load, other) == [load, other]
