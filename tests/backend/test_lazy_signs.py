"""Tensors that torch marks as conjugated or negated instead of computing them: whoever reads their memory has to do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.differential import check

NUMBERS = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def parts(x: Tensor) -> list[Tensor]:
    y = x.conj().imag
    return [y, y * 1, y.sum(0), y[1:] + 1, y.t().softmax(1), torch.cat([y, y]), y.contiguous().sin()]


def copied(x: Tensor) -> list[Tensor]:
    """The copies are the same numbers in the same strides, but others in memory."""
    return [torch.view_as_real(x.conj().clone()) * 2, torch.view_as_real((x * 2).conj().resolve_conj()) + 1]


def gathered(x: Tensor) -> list[Tensor]:
    y, at = x.conj().imag, torch.tensor([2, 0])
    return [y[at] * 2, y.index_select(1, at).sin(), torch.zeros(4, 4).index_put((at,), y[:2], accumulate=True) + 1]


def written(x: Tensor) -> Tensor:
    y = x.conj().imag
    y.mul_(3)
    return x * 2


@pytest.mark.parametrize("fn", [parts, copied, gathered, written])
def test_what_is_marked_inside(fn: Callable[..., Any]) -> None:
    check(fn, NUMBERS, executors="triton")


def test_gradients_of_parts() -> None:
    check(lambda x: [(x.conj().imag ** 2).sum(0), x.conj().imag.sin()], NUMBERS.clone().requires_grad_(), executors="triton")


def marked() -> Tensor:
    """Return a view of new numbers."""
    return NUMBERS.clone().conj().imag


def test_inputs_that_are_marked() -> None:
    def written_too(x: Tensor) -> Tensor:
        y = x.softmax(1)
        x.add_(1)
        return y

    torch._dynamo.reset()
    eager, ours = marked(), marked()
    compiled = torch.compile(written_too, backend="dynafuse", options={"executors": "triton"})
    torch.testing.assert_close(compiled(ours), written_too(eager))
    torch.testing.assert_close(ours, eager)
    assert ours.is_neg()
