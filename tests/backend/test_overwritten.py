"""Inputs that the forward, the backward or both write into: who gets the old values, who the new ones, who the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.differential import compiled

View = Callable[[Tensor], Tensor]
Outcome = list[Tensor]

VIEWS: dict[str, View] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "sliced": lambda t: t[:, 1:3],
    "selected": lambda t: t[1],
    "split": lambda t: t.split(2, 1)[1],
    "unbound": lambda t: t.unbind(1)[1],
    "diagonal": lambda t: t.diagonal(),
    "expanded": lambda t: t[None].expand(3, *t.shape),
    "windows": lambda t: t.unfold(1, 2, 1),
    "as strided": lambda t: t.as_strided((2, 3), (1, 2)),
    "as integers": lambda t: t.view(torch.int32) & 255,
    "split, then transposed": lambda t: t.t().split(1)[0].t(),
}
LAYOUTS: dict[str, View] = {
    "dense": lambda memory: memory,
    "transposed": lambda memory: memory.t(),
    "every other column": lambda memory: memory[:, ::2],
    "a corner": lambda memory: memory[2:, 4:],
}


def memory() -> Tensor:
    return torch.linspace(1, 2, 64).view(8, 8)


def outcome(call: Callable[[Tensor, Tensor], Tensor], layout: View) -> Outcome:
    """The result, the gradient and what the whole memory holds after the forward and after the backward."""
    x, buffer = torch.linspace(-1, 2, 4).requires_grad_(), memory()
    result = call(x, layout(buffer))
    between = buffer.clone()
    (gradient,) = torch.autograd.grad(result, x, torch.ones_like(result))
    return [result.detach(), gradient, between, buffer]


def same_as_eager(function: Callable[[Tensor, Tensor], Tensor], layout: View, **options: Any) -> None:
    torch._dynamo.reset()
    for ours, eager in zip(outcome(compiled(function, **options), layout), outcome(function, layout), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(("view", "layout"), [
    *((view, "every other column") for view in VIEWS if view != "as strided"),  # of such, torch itself makes others than eager
    *((view, "dense") for view in ("as strided", "as integers", "split")),
    *(("whole", layout) for layout in LAYOUTS if layout != "every other column"),
])
def test_the_backward_has_what_an_input_held_before_it_was_overwritten(view: str, layout: str) -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        y = x.sum() + VIEWS[view](total)
        total += 3.0
        return (y * y * VIEWS[view](total)).mean()  # computes y again in its backward, out of total

    same_as_eager(step, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["transposed", "every other column"])
def test_dynamic_sizes_and_strides(layout: str) -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        y = x.sum() + total.t()
        total += 3.0
        return (y * y * total.t()).mean()

    same_as_eager(step, LAYOUTS[layout], dynamic=True)


@pytest.mark.parametrize("view", ["whole", "transposed"])
def test_what_an_eager_view_shows_is_read_before_it_is_overwritten(view: str) -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        shown = total.as_strided((8, 6), (1, 8)) if view == "transposed" else total.as_strided((8, 6), (8, 1))
        y = x.sum() * shown
        total += y.sum()
        total[:, :6].mul_(shown + 1)
        return y.exp().mean()

    with torch.no_grad():
        torch._dynamo.reset()
        found = []
        for call in (compiled(step), step):
            buffer = memory()
            found.append((call(torch.linspace(-0.1, 0.1, 4), buffer), buffer))
    torch.testing.assert_close(*found)


class Writes(torch.autograd.Function):
    """Writes into a buffer in the passes that a number's bits name, and computes with what it held and holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, passes: int) -> Tensor:
        ctx.buffer, ctx.passes, ctx.before = buffer, passes, buffer.clone()
        out = x.sum() * buffer
        if passes & 1:
            buffer.mul_(2).add_(x.sum())
        ctx.save_for_backward(x)
        return out * buffer.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        slope = (grad * ctx.before).sum() * ctx.buffer.sum()
        if ctx.passes & 2:
            ctx.buffer.add_(grad.sum()).mul_(3)
        if ctx.passes & 4:
            ctx.buffer[1:3].sub_(slope)
        return slope.expand_as(x), None, None


@pytest.mark.parametrize("layout", ["dense", "a corner"])
@pytest.mark.parametrize("passes", range(8))
def test_both_passes_write_as_in_eager(passes: int, layout: str) -> None:
    same_as_eager(lambda x, buffer: Writes.apply(x * 2, buffer, passes), LAYOUTS[layout])  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(("passes", "dynamic"), [(1, False), (2, False), (3, False), (7, False), (3, True)])
def test_step_after_step(passes: int, dynamic: bool) -> None:
    def run(call: Callable[[Tensor, Tensor], Tensor]) -> Outcome:
        buffer, found = torch.zeros(5, 3), []
        for _ in range(3):
            x = torch.linspace(-1, 2, 4).requires_grad_()
            call(x, buffer).sum().backward()
            assert x.grad is not None
            found += [x.grad, buffer.clone()]
        return found

    def function(x: Tensor, buffer: Tensor) -> Tensor:
        return Writes.apply(x.cos(), buffer, passes)  # type: ignore[no-any-return, no-untyped-call]

    for ours, eager in zip(run(compiled(function, dynamic=dynamic)), run(function), strict=True):
        torch.testing.assert_close(ours, eager)


class Counts(torch.autograd.Function):
    """Counts its forwards and backwards in one buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.count.add_(1)
        return grad * 2, None


def test_a_buffer_that_changed_meanwhile_raises_or_is_right() -> None:
    """Two forwards before the backwards: torch traces the second value of the count, which is then no longer true."""
    call = compiled(lambda x, count: Counts.apply(x, count))
    x, count = torch.ones(3, requires_grad=True), torch.zeros(2)
    total = (call(x, count) + call(x, count)).sum()
    torch.testing.assert_close(count, torch.full((2,), 2.0))
    try:
        total.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(count, torch.full((2,), 4.0))


def test_batch_norm_statistics_beside_their_old_values() -> None:
    def step(x: Tensor, statistics: Tensor) -> Tensor:
        mean, variance = statistics[0, :4], statistics[1, :4]
        drift = (x - mean).square()
        out = torch.nn.functional.batch_norm(x[:, None].expand(4, 4) * 1.5, mean, variance, training=True)
        return (out * drift).sum() + mean.sum()

    same_as_eager(step, lambda buffer: buffer[:2, 4:])


def frees(x: Tensor, out: Tensor) -> Tensor:
    y = x.sin()
    x.untyped_storage().resize_(0)
    return y.cos() + out


def fills(x: Tensor, out: Tensor) -> Tensor:
    y = x.sin()
    out.untyped_storage().resize_(x.untyped_storage().size())
    out.copy_(y.cos())
    x.untyped_storage().resize_(0)
    return y.exp() + out


@pytest.mark.parametrize("function", [frees, fills])
def test_storage_is_freed_after_its_last_reader_and_filled_before_the_first(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """As parameters are that several processes share: gathered where they are needed."""
    results = []
    with torch.no_grad():
        for call in (compiled(function, fullgraph=True), function):
            x, out = torch.linspace(-1, 2, 40), torch.linspace(3, 4, 40)
            if function is fills:
                out.untyped_storage().resize_(0)
            result = call(x, out)
            sizes = [tensor.untyped_storage().size() for tensor in (x, out)]
            results.append([result, sizes, *(tensor for tensor, size in zip((x, out), sizes, strict=True) if size)])
    torch.testing.assert_close(*results)
