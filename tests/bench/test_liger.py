"""Liger's kernels in the benchmark of kernels: which ones, how they are called, and what a case without one leaves."""
from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import liger, micro, regret, run, systems
from bench.models import Skip

HAND_WRITTEN = [name for name, case in micro.CASES.items() if case.op.name in liger.KERNELS]


def half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Functional:
    """Liger's functions with their signatures, computed by torch."""

    @staticmethod
    def liger_rms_norm(X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True) -> Tensor:
        assert (eps, offset, casting_mode, in_place) == (1e-6, 0.0, "llama", False)
        return torch.nn.functional.rms_norm(X, X.shape[-1:], W, eps)

    @staticmethod
    def liger_fused_add_rms_norm(X: Tensor, R: Tensor, W: Tensor, eps: float, **options: Any) -> tuple[Tensor, Tensor]:
        return Functional.liger_rms_norm(X + R, W, eps, **options), X + R

    @staticmethod
    def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        return torch.nn.functional.layer_norm(X, X.shape[-1:], W, B, eps)

    @staticmethod
    def liger_softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def liger_cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        loss = torch.nn.functional.cross_entropy(input.float(), target, weight)
        return loss.to(input.dtype)

    @staticmethod
    def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.gelu(a) * b

    @staticmethod
    def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        assert q.shape[2] == k.shape[2] == cos.shape[1], "(batch, heads, tokens, width)"
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update({key: value for key, value in vars(Functional).items() if key.startswith("liger_")})
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_kernels_compute_what_the_case_computes(name: str) -> None:
    case = micro.tiny(micro.CASES[name])
    compiled = systems.find("liger").compile(case.op.fn)
    assert compiled is not case.op.fn and micro.errors(case, compiled, micro.inputs_of(case))["right"] is True


def test_kernels_are_those_of_cases() -> None:
    assert liger.KERNELS.keys() <= {op.name for op, _, _ in micro.TABLE}
    assert all(op.name == op.fn.__name__ for op, _, _ in micro.TABLE), "a function finds its kernel by its name"
    assert "liger" in regret.SYSTEMS.split(",")


class InPlaceSoftmax(torch.autograd.Function):
    """A softmax that is right, and whose forward and backward write over what they read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        x.zero_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,), (y,) = grads, ctx.saved_tensors
        dx = torch._softmax_backward_data(grad, y, -1, y.dtype)
        grad.zero_()
        return dx


def test_a_system_may_write_over_what_it_reads() -> None:
    case = micro.tiny(micro.CASES["softmax/8192x4096/bwd"])
    (x,) = inputs = micro.inputs_of(case)
    before = x.detach().clone()
    assert micro.errors(case, InPlaceSoftmax.apply, inputs)["right"] is True
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)


def test_a_loss_of_few_bits_may_be_rounded_once_and_gradients_may_not() -> None:
    case = micro.tiny(micro.CASES["cross_entropy/4096x32000/bwd"])
    inputs = micro.inputs_of(case)

    def rounded(logits: Tensor, target: Tensor) -> Tensor:
        return micro.cross_entropy(logits, target).bfloat16()

    def careless(logits: Tensor, target: Tensor) -> Tensor:
        return micro.cross_entropy(logits * 1.02, target).bfloat16()

    assert micro.errors(case, rounded, inputs)["right"] is True
    assert micro.errors(case, careless, inputs)["right"] is False


def test_a_case_without_a_kernel_is_skipped_and_the_worker_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, started = tmp_path / "out.json", []
    start = run.Runner.start
    monkeypatch.setattr(run.Runner, "start", lambda *args: started.append(args[1]) or start(*args))
    arguments = ["--suite", "micro", "--case", "bias_gelu", "--systems", "liger", "--scale", "tiny", "--device", "cpu"]
    assert run.main([*arguments, "--in-process", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["metrics"] for row in rows] == [{"skipped": "Liger has no kernel for bias_gelu"}] * 2
    assert started == ["liger"] and regret.clock(rows[0]["metrics"]) is None


def test_without_liger_every_case_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(Skip, match="needs liger_kernel, which is not installed here"):
        systems.find("liger").compile(micro.softmax)
    with pytest.raises(Skip, match="no kernel for Linear"):
        systems.find("liger").compile(torch.nn.Linear(2, 2))
