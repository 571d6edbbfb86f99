"""Loads of one element under several conditions: one load where one serves, and never one more than eager would make."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.ir import Layout
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.scopes import Line
from dynafuse.ops import Value
from tests.support.differential import check
from tests.support.representative import spec_of

FLOATS = Layout(torch.float32, (64,), (1,))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding of the first features."""
    n = cos.size(-1)
    first, second = x[..., :n].chunk(2, -1)
    return torch.cat((x[..., :n] * cos + torch.cat((-second, first), -1) * sin, x[..., n:]), -1)


def halved(x: Tensor) -> Tensor:
    """One half changed by what it was, the other kept."""
    return torch.where(torch.arange(x.size(-1), device=x.device) < 24, x * 2, x)


def beside_itself(x: Tensor) -> Tensor:
    return torch.tril(x) + x


def after_itself(x: Tensor) -> Tensor:
    return x * torch.tril(x)


def changed_twice(x: Tensor) -> Tensor:
    """The same part of a tensor, by what it was before: one condition inside of another that is the same."""
    once = torch.slice_scatter(x, x[..., 24:] + 1, -1, 24, x.size(-1))
    return torch.slice_scatter(once, once[..., 24:] * 2, -1, 24, x.size(-1))


def changed_in_place(x: Tensor) -> Tensor:
    once = x.clone()
    once[:, 2:] = once[:, 2:] + 1
    twice = once.clone()
    twice[:, 2:] = once[:, 2:] * 2
    return twice


def padded(x: Tensor) -> Tensor:
    """Under two conditions that have nothing in common: one load may not stand for both."""
    return F.pad(x, (3, 0)) + F.pad(x, (0, 3))


def rolled(x: Tensor) -> Tensor:
    """A step back at the begin, one of many elements at the end."""
    return torch.cat((x[..., -24:], x[..., :-24]), -1)


def rolled_twice(x: Tensor) -> Tensor:
    """Two places under each of two conditions."""
    return rolled(x) * torch.cat((x[..., -16:], x[..., :-16]), -1) + rolled(x + 1)


def turned(x: Tensor) -> Tensor:
    """The gradient of a rotation of the first features: sums of what slices are scattered to."""
    first, second = x[..., :8], x[..., 8:16]
    zeros = torch.zeros_like(x)
    return torch.slice_scatter(zeros, second, -1, 0, 8) + torch.slice_scatter(zeros, -first, -1, 8, 16) + x * 2


def of_three(x: Tensor) -> Tensor:
    """Three places, of which two conditions tell."""
    return torch.cat((x[..., -16:], x[..., 8:24], x[..., 16:-16]), -1)


def halves_swapped_below_another(x: Tensor) -> Tensor:
    """Two places for a part of the points alone, beside the whole."""
    n = x.size(-1) // 2
    return torch.cat((torch.cat((x[..., 8:16], x[..., :8]), -1) * 3, x[..., 16:]), -1) - x[..., n:].repeat(1, 1, 2)


def picked_or_shifted(x: Tensor) -> Tensor:
    """A condition that is loaded tells: its opposite is no comparison of indices."""
    return torch.where(x.roll(3, -1) > 0, x, rolled(x))


def loads_of(function: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, str]]:
    """The places that the one kernel of a function loads, each with its mask."""
    source = lower(spec_of(function, *inputs)).source
    return re.findall(r"tl\.load\((in\d \+ \((?:tl\.where\([^)]*\))?[^,]*\))(?:, (?!evict)([^,)]*))?", source)


X = torch.empty(64, 64)


@pytest.mark.parametrize(("function", "inputs", "places"), [
    (rotated, (torch.empty(2, 8, 64, 80), torch.empty(64, 20), torch.empty(64, 20)), 4),
    (halved, (X,), 1), (beside_itself, (X,), 1), (after_itself, (X,), 1), (changed_twice, (X,), 1),
    (padded, (X,), 2),
])
def test_a_place_is_loaded_once(function: Callable[..., Any], inputs: tuple[Tensor, ...], places: int) -> None:
    found = loads_of(function, *inputs)
    assert len(found) == len(dict(found)) == places
    assert all(mask for _, mask in found) is (function is padded)


@pytest.mark.parametrize(("function", "places"), [
    (rolled, 1), (rolled_twice, 2), (turned, 2), (of_three, 2), (halves_swapped_below_another, 3), (picked_or_shifted, 3),
])
def test_places_under_opposite_conditions_are_one_load(function: Callable[..., Any], places: int) -> None:
    found = loads_of(function, torch.empty(3, 5, 64))
    assert len(found) == places
    assert any("tl.where" in place for place, _ in found)


def test_what_is_loaded_elsewhere_is_not_overwritten() -> None:
    """Another thread may still have to read what is where a result is stored."""
    launch, = lower(spec_of(rolled, torch.empty(64, 64))).launches
    assert launch.overwrites == ()


SHIFTED = [rolled, rolled_twice, turned, of_three, halves_swapped_below_another, picked_or_shifted]


@pytest.mark.parametrize("function", SHIFTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_of_either_place_are_those_of_eager(function: Callable[..., Any], dtype: torch.dtype, dynamic: bool) -> None:
    x = torch.randint(-50, 50, (3, 5, 80)).to(dtype)
    check(function, x, grad=dtype.is_floating_point, dynamic=dynamic)


@pytest.mark.parametrize("function", [rolled, turned, of_three])
def test_nan_and_inf_stay_where_they_belong(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 6, 64)
    x[0, :, ::7], x[1, :, 5] = float("nan"), float("inf")
    check(function, x)


def test_a_tensor_is_rolled_in_its_own_memory() -> None:
    def write(x: Tensor) -> Tensor:
        x.copy_(rolled(x) + 1)
        return x * 2

    check(write, torch.randn(4, 6, 64))


@pytest.mark.parametrize("function", [rotated, halved, beside_itself, after_itself, changed_twice, changed_in_place, padded])
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_are_those_of_eager(function: Callable[..., Any], dynamic: bool) -> None:
    more = (torch.randn(5, 20), torch.randn(5, 20)) if function is rotated else ()
    check(function, torch.randn(3, 5, 80), *more, grad=True, dynamic=dynamic)


def test_a_branch_changes_nothing_outside() -> None:
    """What it loads may lie beyond the tensor where it is not taken."""
    made = Emitter(spec_of(torch.tanh, torch.empty(64)), ["x"])
    (axis,) = made.axes

    def load() -> Value:
        return made.load("in0", FLOATS, (axis,))

    def line() -> str:
        """The one load outside of branches."""
        (found,) = [line.text for line in made.top.lines if isinstance(line, Line) and "tl.load" in line.text]
        return found

    mask = made.compare(axis, "<", sympy.Integer(24))
    made.masks = (mask,)
    outside = load()
    made.masks = ()
    _, inside = made._in_branch(Line("if something:"), load, None)
    assert inside.name != outside.name and mask.name in line()
    beside = load()
    assert beside.name == outside.name and mask.name not in line()
    _, inside = made._in_branch(Line("if something:"), load, None)
    assert inside.name == outside.name
