"""Signs of zeros, infinities and NaNs through whole graphs, against eager, in the interpreter and in C++.

Every expression of a table is exact, or has a result that is, so that eager's bits are expected. One graph holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from differential import compiled
from torch.nn import functional as F

from dynafuse.lowering.inductor import availability

INF, NAN = math.inf, math.nan
EXECUTORS = ["triton", pytest.param("inductor", marks=pytest.mark.skipif(
    not availability.find("cpu").available, reason=str(availability.find("cpu"))))]

SPECIALS = [0.0, -0.0, 1.5, -1.5, INF, -INF, NAN, 2.0, 2.0**-17, -(2.0**-17), 3.0, -0.25]
OTHERS = [-0.0, 0.0, 0.0, -0.0, 1.0, 2.0, 0.0, -0.0, INF, -INF, -INF, INF]

LITERALS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "neg": lambda x, y: -x,
    "divided by": lambda x, y: x / -0.0,
    "times": lambda x, y: x * -0.0,
    "plus": lambda x, y: x + -0.0,
    "plus zero": lambda x, y: x + 0.0,
    "minus": lambda x, y: x - -0.0,
    "minus zero": lambda x, y: x - 0.0,
    "taken from": lambda x, y: -0.0 - x,
    "taken from zero": lambda x, y: 0.0 - x,
    "two literals": lambda x, y: torch.stack([1 / (x * 0.0), 1 / (x * -0.0)]),
    "two literals by name": lambda x, y: torch.stack([torch.add(x, y, alpha=0.0), torch.add(x, y, alpha=-0.0)]),
    "full": lambda x, y: torch.full_like(x, -0.0) * (x > 0),
    "where": lambda x, y: torch.where(x > 0, x, -0.0),
    "where of two": lambda x, y: torch.where(x > 0, 0.0, -0.0),
    "addcmul": lambda x, y: torch.addcmul(y, x, y, value=-0.0),
    "pad": lambda x, y: F.pad(x, (1, 1), value=-0.0) * 1.0,
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -0.0),
    "copysign": lambda x, y: torch.copysign(x, -0.0),
    "nan_to_num": lambda x, y: torch.nan_to_num(x, nan=-0.0),
    "threshold": lambda x, y: F.threshold(x, 0.5, -0.0),
    "cat": lambda x, y: torch.cat([torch.full((2,), -0.0, dtype=x.dtype), x]) * 1.0,
}

EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copysign": torch.copysign, "sign": lambda x, y: torch.sign(x), "abs": lambda x, y: x.abs(),
    "round": lambda x, y: torch.round(x * 0.25), "ceil": lambda x, y: torch.ceil(x * 0.25),
    "trunc": lambda x, y: torch.trunc(x * 0.25), "floor": lambda x, y: torch.floor(x * 0.25),
    "reciprocal": lambda x, y: 1 / x, "sqrt": lambda x, y: torch.sqrt(x), "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y, "sum": lambda x, y: x + y, "difference": lambda x, y: x - y,
    "rsub": torch.rsub, "square": lambda x, y: x.square(), "cube": lambda x, y: x ** 3, "inverse": lambda x, y: x ** -1,
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.5), "hardshrink": lambda x, y: F.hardshrink(x),
    "fmod": torch.fmod, "sgn": lambda x, y: torch.sgn(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table", [LITERALS, EXACT], ids=["literals", "exact"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_bits_are_eagers(executor: str, table: dict[str, Callable[..., torch.Tensor]], dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in table.values()]

    x, y = torch.tensor(SPECIALS, dtype=dtype), torch.tensor(OTHERS, dtype=dtype)
    expected, actual = every(x, y), compiled(every, executors=executor)(x, y)
    wrong = {name: (ours, eager) for name, ours, eager in zip(table, actual, expected, strict=True) if not same(ours, eager)}
    assert not wrong


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether values are equal, the signs of zeros too; one NaN is as good as another."""
    left, right = left.double(), right.double()
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        torch.where(left.isnan(), 0, left).view(torch.int64), torch.where(right.isnan(), 0, right).view(torch.int64))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_equal_literals_of_two_signs_stay_two_in_training(executor: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([1 / (x.sin() * 0.0), 1 / (x.sin() * -0.0)])

    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    assert same(compiled(function, executors=executor)(x).detach(), function(x).detach())
