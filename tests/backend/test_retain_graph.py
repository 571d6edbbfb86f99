"""Backwards that run more than once: gradients stay the same bits, and what the forward saved stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dynafuse.lowering.inductor import availability
from tests.support.differential import compiled

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Scaled(torch.autograd.Function):
    """Twice the sine, with a tensor of its own for the backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin() * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (slope,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * slope * 2


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + F.gelu(x @ w) @ w.t(), (16,))


FUNCTIONS: dict[str, Function] = {
    "softmax": lambda x, w: x.softmax(-1) * w[0],
    "product and relu": lambda x, w: (x @ w).relu(),
    "gelu and product": lambda x, w: F.gelu(x) @ w,
    "layer norm": lambda x, w: F.layer_norm(x @ w, (16,)).sigmoid(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], (x @ w)[None, None], x[None, None]),
    "attention by hand": lambda x, w: ((x @ w) @ x.t() / 4).softmax(-1) @ x,
    "dropout": lambda x, w: F.dropout((x @ w).tanh(), 0.5) * x,
    "checkpointed": lambda x, w: checkpoint(block, x, w, use_reentrant=False) * 2,  # type: ignore[no-any-return]
    "checkpointed dropout": lambda x, w: checkpoint(  # type: ignore[no-any-return]
        lambda x, w: F.dropout(block(x, w), 0.5), x, w, use_reentrant=False) * 2,
    "autograd function": lambda x, w: Scaled.apply(x @ w).exp(),  # type: ignore[no-any-return, no-untyped-call]
    "embedding": lambda x, w: F.embedding(torch.arange(8) % 3, w).tanh() * x,
    "two layers": lambda x, w: block(block(x, w), w),
}
IN_CPP = ("gelu and product", "layer norm", "dropout")
needs_compiler = pytest.mark.skipif(not availability.find("cpu").available, reason="Inductor has no C++ compiler")
CASES = [*(pytest.param(name, "triton", id=name) for name in FUNCTIONS),
         *(pytest.param(name, "inductor", id=f"{name} in C++", marks=needs_compiler) for name in IN_CPP)]


def operands(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16, requires_grad=True), torch.randn(16, 16).div(4).requires_grad_()


def gradients(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], retain: bool) -> tuple[torch.Tensor | None, ...]:
    return torch.autograd.grad(out, inputs, torch.ones_like(out).mul_(0.5), retain_graph=retain, allow_unused=True)


@pytest.mark.parametrize(("name", "executor"), CASES)
def test_every_backward_of_one_forward_gives_the_same(name: str, executor: str) -> None:
    function, inputs = FUNCTIONS[name], operands()
    call = compiled(function, executors=executor)
    for times in (3, 1, 2):  # retained only sometimes
        torch.manual_seed(0)
        out = call(*inputs)
        assert out.grad_fn is not None
        saved = [tensor for tensor in out.grad_fn.saved_tensors if tensor is not None]  # type: ignore[attr-defined]
        before = [tensor.clone() for tensor in saved]
        found = []
        for k in range(times):
            found.append(gradients(out, inputs, retain=k < times - 1))
            assert all(map(torch.equal, saved, before)), "a backward overwrote what was saved"
        for again in found[1:]:
            assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[0], again, strict=True))  # type: ignore[arg-type]
    if "dropout" not in name:
        for ours, eager in zip(found[0], gradients(function(*inputs), inputs, retain=False), strict=True):
            torch.testing.assert_close(ours, eager)
    else:  # the mask that the result shows is the one of every gradient
        expected = gradients(function(*inputs), inputs, retain=False)
        assert [g is None for g in found[0]] == [g is None for g in expected]


def test_a_dropped_element_has_no_gradient_in_any_backward() -> None:
    x = torch.randn(40, 16, requires_grad=True)
    out = compiled(lambda x: F.dropout(x.exp(), 0.5))(x)
    for retain in (True, True, False):
        (gradient,) = gradients(out, (x,), retain)
        assert gradient is not None
        torch.testing.assert_close(gradient, out.detach() * 0.5)


def test_dynamic_shapes() -> None:
    call = compiled(block, dynamic=True)
    for rows in (8, 5, 12):
        inputs = operands(rows)
        out = call(*inputs)
        for retain in (True, False):
            torch.testing.assert_close(gradients(out, inputs, retain), gradients(block(*inputs), inputs, False))


def test_two_losses_of_one_forward_accumulate() -> None:
    def step(call: Function) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        inputs = operands()
        out = call(*inputs)
        (out.sum() * 2).backward(retain_graph=True)
        out.square().sum().backward()
        return [tensor.grad for tensor in inputs]

    torch.testing.assert_close(step(compiled(block)), step(block))


@needs_compiler
def test_a_tensor_subclass_among_the_arguments() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = torch.randn(8, 16)
    inputs = (TwoTensor(x, x.clone()).requires_grad_(), torch.randn(16, 16, requires_grad=True))
    call = compiled(lambda x, w: F.gelu(x @ w) @ w, executors="inductor")
    out = call(*inputs).sum()
    first = torch.autograd.grad(out, inputs[1], retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(out, inputs[1])[0], first)


def test_a_gradient_of_a_gradient_raises_torchs_own_error() -> None:
    inputs = operands()
    out = compiled(block)(*inputs)
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()
