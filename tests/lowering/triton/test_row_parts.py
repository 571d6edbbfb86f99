"""Long rows that are held in tiles beside one another, for their variance and for what is stored of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.schedule import choose_schedule
from tests.support.differential import check
from tests.support.representative import spec_of

Function = Callable[..., Any]


def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def with_statistics(x: Tensor) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(x.float(), -1, keepdim=True)
    return ((x - mean) * torch.rsqrt(variance + 1e-5)).to(x.dtype), mean, variance


def under_a_mask(x: Tensor, keep: Tensor) -> Tensor:
    return F.layer_norm(torch.where(keep, x, 0), x.shape[-1:])


def turned(x: Tensor, w: Tensor) -> Tensor:
    """What is read elsewhere along the row, too."""
    return F.layer_norm(x, x.shape[-1:], w) + x.roll(5, -1)


def of_groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 2, w, b).relu()


def centred(x: Tensor) -> Tensor:
    """The largest element beside the variance."""
    return (x - x.amax(-1, keepdim=True)) / x.std(-1, keepdim=True)


CASES: dict[str, tuple[Function, Callable[[int, torch.dtype], list[Tensor]]]] = {
    "norm": (normed, lambda n, dtype: [torch.randn(3, n).to(dtype), torch.randn(n).to(dtype), torch.randn(n).to(dtype)]),
    "statistics": (with_statistics, lambda n, dtype: [torch.randn(3, n).to(dtype) + 7]),
    "masked": (under_a_mask, lambda n, dtype: [torch.randn(3, n).to(dtype), torch.rand(3, n) < 0.7]),
    "turned": (turned, lambda n, dtype: [torch.randn(3, n).to(dtype), torch.randn(n).to(dtype)]),
    "groups": (of_groups, lambda n, dtype: [torch.randn(2, 4, n // 2).to(dtype), torch.randn(4).to(dtype), torch.randn(4).to(dtype)]),
    "centred": (centred, lambda n, dtype: [torch.randn(3, n).to(dtype)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [8202, 12288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_those_of_eager(name: str, length: int, dtype: torch.dtype) -> None:
    function, inputs = CASES[name]
    check(function, *inputs(length, dtype))


@pytest.mark.parametrize("length", [20480, 30001])
def test_longer_rows(length: int) -> None:
    check(normed, torch.randn(2, length), torch.randn(length), torch.randn(length))


def test_what_is_not_finite_stays_in_its_row() -> None:
    x = torch.randn(4, 9000)
    x[1, 8999], x[2, 17] = float("nan"), float("inf")
    check(lambda x: F.layer_norm(x, x.shape[-1:]), x)


def test_an_input_that_is_overwritten_is_read_before() -> None:
    def write(x: Tensor) -> Tensor:
        x.copy_(F.layer_norm(x, x.shape[-1:]) * 2)
        return x + 1

    check(write, torch.randn(3, 10240))


@pytest.mark.parametrize(("rows", "length", "expected"), [
    (4096, 8192, "r=1/8192 w"), (4096, 8200, "r=1/2048x5 w8"), (4096, 11008, "r=1/4096x3 w8"), (4096, 14336, "r=1/2048x7 w8"),
    (4096, 16384, "r=1/4096x4 w8"), (4096, 20480, "r=1/4096x5 w8"), (4096, 30720, "r=1/4096x8 w16"), (200, 16384, "w16"),
])
def test_tiles_reach_little_beyond_the_end(rows: int, length: int, expected: str) -> None:
    x, w = torch.empty(rows, length, dtype=torch.bfloat16), torch.empty(length, dtype=torch.bfloat16)
    chosen = str(choose_schedule(spec_of(normed, x, w, w)))
    assert chosen.startswith("persistent") and expected in chosen


@pytest.mark.parametrize("function", [lambda x: x.float().var(-1), lambda x: torch.softmax(x, -1), lambda x: x.cumsum(-1) - x.std(-1, keepdim=True)],
                         ids=["nothing stored", "no variance", "a scan"])
def test_other_rows_are_not_in_parts(function: Function) -> None:
    assert choose_schedule(spec_of(function, torch.empty(4096, 10240))).parts == 1


def test_each_part_has_variables_of_its_own() -> None:
    """However many there are, and whatever the numbers of axes."""
    spec = spec_of(lambda x: x - x.float().mean((0, 2, 3), keepdim=True), torch.empty(32, 8, 14, 14))
    schedule = replace(choose_schedule(spec), schedule_class="persistent", block={"x": 1, "r": 512}, parts=13)
    source = write_kernels(spec, schedule, round_like_eager=False).source
    defined = re.findall(r"^    (\w+) = ", source, re.M)
    assert len(defined) == len(set(defined)) > 13 * 4
