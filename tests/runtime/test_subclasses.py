"""Plain tensor subclasses, parameters and buffers as arguments: values, classes, gradients and memory as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


class Plain(torch.Tensor):
    """Says nothing of what it does."""


class Functional(torch.Tensor):
    """Has a torch function, which does what torch's own does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x.as_subclass(Plain),
    "functional": lambda x: x.as_subclass(Functional),
    "parameter": torch.nn.Parameter,
    "buffer": torch.nn.Buffer,
}

def everything(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is fused, what a library computes, the argument itself, views of it, and a class that is given inside."""
    return torch.relu(x) * 2 + y, torch.sin(x @ y), x, x.view(-1), x.t(), y * 2, (x + 1).as_subclass(Plain) * y


def overwriting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Changes its first argument."""
    x.add_(y)
    return x * 2


OPTIONS = {"executors": "triton", "strict": True}

@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_classes_are_eagers(kind: str, dynamic: bool) -> None:
    check(kind, dynamic, {"executors": "triton", "strict": True})


def test_values_and_classes_are_eagers_on_inductor() -> None:
    check("plain", False, {"executors": "inductor", "strict": True})


def check(kind: str, dynamic: bool, options: dict[str, Any]) -> None:
    """Compare with eager."""
    compiled = torch.compile(everything, backend="dynafuse", options=options, dynamic=dynamic)
    for size in (8, 12) if dynamic else (8,):
        x, y = KINDS[kind](torch.randn(size, size)), torch.randn(size, size)
        expected, found = everything(x, y), compiled(x, y)
        torch.testing.assert_close(found, expected)
        assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize("kind", ["plain", "functional", "buffer"])
def test_what_is_overwritten_is_the_callers(kind: str) -> None:
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    mine, other = KINDS[kind](x.clone()), KINDS[kind](x.clone())
    found = torch.compile(overwriting, backend="dynafuse", options=OPTIONS)(mine, y)
    torch.testing.assert_close(found, overwriting(other, y))
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", ["plain", "functional", "parameter"])
def test_gradients_are_eagers(kind: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ y) * x

    compiled = torch.compile(function, backend="dynafuse", options=OPTIONS)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    gradients = []
    for call in (function, compiled, compiled):
        given = KINDS[kind](x.clone()).requires_grad_()
        call(given, y).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])
    assert type(gradients[1]) is type(gradients[0])
