"""``dynafuse demo``: a small transformer, trained through dynafuse and checked against eager at every step.

With a GPU it trains there, and then measures a step against eager and Inductor. Without one it plans for an H200, and
trains a tiny model with the same generated kernels in Triton's interpreter.

Worked example, a line of its table: a training step with the relative errors, against float64, of eager and dynafuse::

    step   loss     loss error: eager, dynafuse   gradient error: eager, dynafuse   verdict
    1      4.6513   1.2e-07     1.3e-08           3.3e-07         3.2e-07           ok

:func:`main` runs the demo in a process of its own: Triton decides when it is imported whether to interpret, and compile
times only compare when nobody's caches are warm.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from torch import Tensor, nn

from dynafuse import backend
from dynafuse.backend import Compiled
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.lowering.triton.lower import lower
from dynafuse.report import explain

Batch = tuple[Tensor, Tensor]

STEPS = 3  # training steps that are checked
TIMED = 20  # steps per measurement, after warm-up
WARM_UP = 5


@dataclass(frozen=True)
class Sizes:
    """How large the model and its batches are."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, vocabulary {self.vocabulary}, "
            f"batch {self.batch} × {self.length}, {str(self.dtype)[6:]}"
        )


ON_GPU = Sizes(4, 1024, 16, 2816, 8192, 4, 1024, torch.bfloat16)
PLANNED = Sizes(2, 256, 4, 768, 4096, 4, 256, torch.float32)  # CPUs without bfloat16 units run this in a second
INTERPRETED = Sizes(2, 32, 2, 64, 64, 1, 16, torch.float32)


# ---------------------------------------------------------------------- the model


def wide(x: Tensor) -> Tensor:
    """At least float32, as norms and losses want it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Scale every row to a root mean square of one, then by a learnt weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x_ = wide(x)
        return (x_ * torch.rsqrt(x_.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: pairs of channels, half a head apart, turn with their position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and feed-forward network, each behind a norm and beside a residual path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.attention = Attention(sizes.width, sizes.heads)
        self.mlp = SwiGLU(sizes.width, sizes.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder that returns the loss of predicting ``targets`` from ``tokens``; embedding and head share a weight."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        channels = torch.arange(0, sizes.width // sizes.heads, 2) / (sizes.width // sizes.heads)
        angles = torch.arange(sizes.length)[:, None] * 10000.0**-channels
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten())


def made(sizes: Sizes, device: str) -> tuple[Transformer, Batch]:
    """A model with its batch: sequences that count up in steps of their own, each token predicting the next."""
    torch.manual_seed(0)
    model = Transformer(sizes).to(device, sizes.dtype)
    start, step = torch.randint(1, 8, (2, sizes.batch, 1))
    sequence = (start + step * torch.arange(sizes.length + 1)).remainder(sizes.vocabulary).to(device)
    return model, (sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous())


# ---------------------------------------------------------------------- training, checked


@dataclass(frozen=True)
class Pass:
    """The loss and the gradients of one forward and backward."""

    loss: float
    gradients: list[Tensor]

    @classmethod
    def of(cls, call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> Pass:
        """Run ``call``, which is ``model`` in some form, and leave the gradients on the parameters as well."""
        model.zero_grad()
        loss = call(*batch)
        loss.backward()
        return cls(loss.item(), [p.grad.double() for p in model.parameters() if p.grad is not None])

    def errors(self, exact: Pass) -> tuple[float, float]:
        """Relative error of the loss, and relative RMSE over all gradients."""
        wrong = sum((a - b).square().sum() for a, b in zip(self.gradients, exact.gradients, strict=True))
        norm = sum(b.square().sum() for b in exact.gradients)
        return abs(self.loss / exact.loss - 1), float(wrong / norm) ** 0.5


def trained(console: Console, model: Transformer, batch: Batch, compiled: Callable[..., Tensor]) -> tuple[bool, float]:
    """Train; whether every step was right, and the seconds of the first one, which compiles.

    A step's parameters are the same for all three: float64, eager and dynafuse, whose gradients the optimiser takes.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    table = Table("step", "loss", *_error_titles("loss"), *_error_titles("gradient"), "verdict")
    right, seconds = True, []
    for number in range(1, STEPS + 1):
        exact = copy.deepcopy(model).double()
        reference, eager = Pass.of(exact, exact, batch), Pass.of(model, model, batch)
        began = time.perf_counter()
        ours = Pass.of(compiled, model, batch)
        seconds.append(time.perf_counter() - began)
        console.print(f"step {number}: loss {ours.loss:.4f}, eager's {eager.loss:.4f}, in {seconds[-1]:.2f} s")
        optimiser.step()
        errors = list(zip(eager.errors(reference), ours.errors(reference), strict=True))
        good = all(our <= 2 * its + torch.finfo(batch_dtype(model)).eps for its, our in errors)
        right &= good
        table.add_row(str(number), f"{ours.loss:.4f}", *(f"{e:.1e}" for pair in errors for e in pair), _verdict(good))
    console.print(table)
    console.print("Errors are against float64; dynafuse's may be twice eager's and one rounding.")
    return right, seconds[0]


def batch_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that a model computes in."""
    return next(model.parameters()).dtype


def _error_titles(what: str) -> tuple[str, str]:
    return f"{what} error,\neager", f"{what} error,\ndynafuse"


def _verdict(good: bool) -> str:
    return "[green]ok[/]" if good else "[red]off[/]"


# ---------------------------------------------------------------------- speed, on a GPU


def step_ms(call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> float:
    """The median time of a forward and a backward, warm, in milliseconds."""
    times = []
    for _ in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.zero_grad()
        call(*batch).backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[WARM_UP:])


def speed(console: Console, model: Transformer, batch: Batch, ours: Callable[..., Tensor], ours_s: float) -> None:
    """A table of step and compile times: dynafuse, eager, Inductor."""
    console.print("measuring dynafuse and eager …")
    rows = [("eager", step_ms(model, model, batch), 0.0), ("dynafuse", step_ms(ours, model, batch), ours_s)]
    console.print("compiling with Inductor, and measuring …")
    torch._dynamo.reset()
    inductor = torch.compile(model, backend="inductor")
    began = time.perf_counter()
    Pass.of(inductor, model, batch)
    seconds = time.perf_counter() - began
    rows.append(("inductor", step_ms(inductor, model, batch), seconds))
    table = Table("system", "ms per step", "faster than eager", "seconds of the first step")
    for name, ms, first in rows:
        table.add_row(name, f"{ms:.2f}", f"{rows[0][1] / ms:.2f} ×", f"{first:.1f}" if first else "–")
    console.print(table)
    console.print(f"A step is a forward and a backward: medians of {TIMED}, warm. First steps compile, caches empty;")
    console.print("Inductor's comes second, and finds the compile workers running that dynafuse had to start.")


# ---------------------------------------------------------------------- the demo


def example(compiled: Sequence[Compiled]) -> tuple[str, int]:
    """The source of the kernel that most regions share, of the most ops if there are several, and how many share it."""
    bounds = [bound for one in compiled for bound in one.bounds.values()]
    shared = Counter(bound.key for bound in bounds)
    chosen = max(bounds, key=lambda bound: (shared[bound.key], len(bound.spec.ops)))
    return lower(chosen.spec).source, shared[chosen.key]


def plan(console: Console, sizes: Sizes, device: str, described: str | None) -> None:
    """Print what dynafuse decides for the model."""
    model, batch = made(sizes, device)
    console.print(str(sizes))
    report = explain(model, *batch, device=described)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(report.refusals)} merges were turned down, for example:")
    for refusal in report.refusals[:3]:
        console.print(f"  {refusal}", markup=False, highlight=False, soft_wrap=True)


def demo(console: Console) -> int:
    """The whole demo in this process; 1 if a step was off."""
    gpu = torch.cuda.is_available() and not interpreting()
    device, sizes = ("cuda", ON_GPU) if gpu else ("cpu", INTERPRETED)
    console.rule("the plan" if gpu else "the plan for an H200")
    plan(console, sizes if gpu else PLANNED, device, None if gpu else "h200")
    console.rule("training, checked against eager" + ("" if gpu else ", in Triton's interpreter"))
    console.print(str(sizes))
    seen: list[Compiled] = []
    model, batch = made(sizes, device)
    compiled = torch.compile(model, backend=_backend())
    with backend.listening(seen.append, plan_only=False):
        right, seconds = trained(console, model, batch, compiled)
    counted = backend.stats()
    console.print(f"{counted['launch_sites']} fused regions ran, made by {counted['kernels']} distinct kernels.")
    if gpu:
        console.rule("speed")
        speed(console, model, batch, compiled, seconds)
    source, regions = example(seen)
    console.rule(f"a generated kernel, which {regions} regions share")
    console.print(Syntax(source, "python", background_color="default", word_wrap=True))
    console.print(f"{_verdict(right)}: losses and gradients {'agree' if right else 'do not agree'} with eager's")
    return 0 if right else 1


def _backend() -> Any:
    """The backend by its name; itself where the package runs without being installed."""
    return "dynafuse" if "dynafuse" in torch._dynamo.list_backends() else backend.dynafuse


def main() -> int | None:
    """Run the demo in a process of its own, with empty caches; its exit status: 0, or 1 if a step was off."""
    with tempfile.TemporaryDirectory(prefix="dynafuse_demo_") as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        strict = {"DYNAFUSE_STRICT": os.environ.get("DYNAFUSE_STRICT", "1")}
        environment = os.environ | caches | interpret | strict | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.call([sys.executable, "-m", "dynafuse.demo"], env=environment)


if __name__ == "__main__":
    sys.exit(demo(Console()))
