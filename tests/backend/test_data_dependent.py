"""Sizes and numbers that only data tell: the same results as eager, also where the user's code asks for them twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dynafuse.lowering.inductor import availability
from tests.support.differential import check

IDS = torch.tensor([3, 1, 3, 2, 0, 1])


@pytest.fixture(autouse=True)
def _captured() -> Iterator[None]:
    """What depends on data does not break graphs."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


def routed(x: torch.Tensor, gates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A mixture of experts: each takes the rows that chose it."""
    chosen = gates.argmax(-1)
    out = torch.zeros_like(x)
    for number, weight in enumerate(weights):
        rows = torch.nonzero(chosen == number).squeeze(-1)
        out = out.index_add(0, rows, (x[rows] @ weight).relu() * gates.softmax(-1)[rows, number, None])
    return out


def scattered(x: torch.Tensor, gates: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same with masks."""
    chosen = gates.argmax(-1)
    out = torch.zeros_like(x)
    for number, weight in enumerate(weights):
        mask = chosen == number
        out = out + torch.zeros_like(x).masked_scatter(mask[:, None].expand_as(x), x[mask] @ weight)
    return out


def numbers(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = count.item(), (count * 1).item()
    torch._check(first >= 0)
    torch._check(second >= 0)
    return x.new_zeros(first) + 1, x.new_ones(second) * 2, x + first * second


def folded(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """As many rows as data tell have as many elements as ``x``, which no example of all the sizes need have."""
    return x.new_ones(count.item(), 4).mul(2).add(x[0, 0]).view(x.shape) * x


def from_there(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sizes that hold the number in sums only: the gradient of what is sliced has ``x.size(0) - u0`` rows, and knows no other."""
    start = count.item()
    torch._check(start >= 0)
    torch._check(start <= x.shape[0])
    return (x[start:] * 2).exp(), torch.nn.functional.pad(x, (start, 0)).sin()


def after_writing(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = x[x > 1].sum()
    x.add_(1)
    return before, x[x > 1] * 2


def rows(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).mul(2).requires_grad_(grad)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mask twice": (lambda x: (x[x > 1] * 2, x[x > 1] + 1, x[x > 1] + x[x > 1]), lambda: (rows(12),)),
    "mask and its size": (lambda x: (x[x > 1] * 2, x.new_zeros(x[x > 1].size(0)) + 1), lambda: (rows(12),)),
    "masks of masks": (lambda x: (x[x > 0][x[x > 0] > 1] * 2, x[x > 0].exp()), lambda: (rows(12),)),
    "masks beside each other": (lambda x: torch.cat([x[x > 1], x[x > 1], x[x < 0]]) * 2, lambda: (rows(12),)),
    "outer product of masks": (lambda x: x[x > 1].view(-1, 1) * x[x > 1].view(1, -1), lambda: (rows(12),)),
    "sorted twice": (lambda x: x[x > 1].sort()[0] * 2 + x[x > 1].sort()[0], lambda: (rows(12),)),
    "sums of masks": (lambda x: x[x > 1].sum() * x[x > 1].exp().mean(), lambda: (rows(12),)),
    "no row": (lambda x: (x[x > 99] * 2, x[x > 99] + 1), lambda: (rows(12),)),
    "nonzero twice": (lambda x: (torch.nonzero(x > 0) * 2, torch.nonzero(x > 0).sum(), torch.where(x > 0)[0] + 1), lambda: (rows(12),)),
    "masked_select twice": (lambda x: (x.masked_select(x > 0) * 2, x.masked_select(x > 0).cos()), lambda: (rows(12),)),
    "unique twice": (lambda t: (torch.unique(t) * 2, torch.unique(t) + 1, torch.unique(t, return_counts=True)[1] * 2), lambda: (IDS,)),
    "repeat_interleave twice": (lambda x, n: (x.repeat_interleave(n, 0) * 2, x.repeat_interleave(n, 0).sum(0)), lambda: (rows(6, 5), IDS)),
    "bincount twice": (lambda t: (torch.bincount(t) * 2, torch.bincount(t) + 1), lambda: (IDS,)),
    "number twice": (numbers, lambda: (rows(12), torch.tensor(3))),
    "weight of a number": (lambda x, n: x.sin().lerp(x.exp(), n.item()) + 1, lambda: (rows(12, grad=False), torch.tensor(0.7))),
    "rows from a number on": (from_there, lambda: (rows(5, 8), torch.tensor(3))),
    "rows of a size": (folded, lambda: (rows(3, 8), torch.tensor(6))),
    "written to in between": (after_writing, lambda: (rows(12, grad=False),)),
    "experts by rows": (routed, lambda: (rows(6, 5), rows(6, 4), rows(4, 5, 5))),
    "experts by masks": (scattered, lambda: (rows(6, 5), rows(6, 4), rows(4, 5, 5))),
}
IN_CPP = ("mask twice", "repeat_interleave twice", "weight of a number", "rows of a size")
needs_compiler = pytest.mark.skipif(not availability.find("cpu").available, reason="Inductor has no C++ compiler")
CASES = [*(pytest.param(name, "triton", id=name) for name in FUNCTIONS),
         *(pytest.param(name, "inductor", id=f"{name} in C++", marks=needs_compiler) for name in IN_CPP)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("name", "executor"), CASES)
def test_results_and_gradients_are_eagers(name: str, executor: str, dynamic: bool) -> None:
    function, make = FUNCTIONS[name]
    check(function, *make(), dynamic=dynamic, executors=executor, precise=False)


@pytest.mark.parametrize("fallback_random", [False, True])
def test_random_numbers_of_equal_calls_differ(fallback_random: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = (x.clone().exponential_() for _ in range(2))
        return (torch.randn_like(x) - torch.randn_like(x)).abs() + (first - second).abs()

    found = torch.compile(function, backend="dynafuse", options={"fallback_random": fallback_random})(torch.ones(130))
    assert (found > 0).all()
