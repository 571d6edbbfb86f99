"""The demo's phases, a process each: :func:`native` plans and trains, :func:`interpreted` runs Triton's kernels on the CPU.

Worked example: ``native(Console())`` prints the plan and three checked steps, and is False if one of them was off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.syntax import Syntax
from torch import Tensor

from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.lowering.inductor import availability
from dynafuse.lowering.registry import executor
from dynafuse.lowering.triton.executor import TRITON
from dynafuse.lowering.triton.lower import lower
from dynafuse.report import explain
from dynafuse.runtime.observers import Compiled, listening
from dynafuse.tools.demo import speed
from dynafuse.tools.demo.model import INTERPRETED, ON_CPU, ON_GPU, Batch, Sizes, Transformer, build
from dynafuse.tools.demo.training import trained, verdict


def native(console: Console, page: str | None = None) -> bool:
    """Plan, then train: on the GPU if there is one, else on the CPU if something can compile for it.

    ``page`` is where to write the plan as HTML.
    """
    if torch.cuda.is_available():
        console.rule("the plan")
        plan(console, ON_GPU, "cuda", None, page)
        return _on_gpu(console)
    console.rule("the plan for an H200")
    plan(console, ON_CPU, "cpu", "h200", page)
    return _on_cpu(console)


def _on_gpu(console: Console) -> bool:
    """Train on the GPU, and measure steps."""
    console.rule("training, checked against eager")
    run = Run(console, ON_GPU, "cuda")
    console.rule("speed")
    speed.on_gpu(console, run.model, run.batch, run.compiled, run.first_s)
    run.show_kernel()
    return run.conclude()


def _on_cpu(console: Console) -> bool:
    """Train on the CPU in kernels that Inductor's C++ compiler makes; nothing is wrong where there is none."""
    console.rule("training on the CPU, checked against eager")
    compiler = availability.find("cpu")
    if not compiler.available:
        console.print(f"left out: {compiler}", markup=False)
        return True
    console.print(f"Regions of CPU tensors run as C++ kernels, compiled by {compiler.reason}.", markup=False)
    run = Run(console, ON_CPU, "cpu")
    speed.on_cpu(console, run.model, run.batch, run.compiled)
    return run.conclude()


def interpreted(console: Console, page: str | None = None) -> bool:
    """Train a tiny model in the Triton kernels that a GPU would run, in Triton's interpreter; no ``page`` is written."""
    console.rule("the Triton kernels of a tiny model, in Triton's interpreter")
    run = Run(console, INTERPRETED, "cpu")
    run.show_kernel()
    return run.conclude()


PHASES: Mapping[str, Callable[..., bool]] = {"native": native, "interpreted": interpreted}


def plan(console: Console, sizes: Sizes, device: str, described: str | None, page: str | None) -> None:
    """Print what dynafuse decides for the model, and write it as HTML.

    Args:
        console: Where it is printed.
        sizes: The sizes of the model and of its batch.
        device: Where the tensors are.
        described: The name of a described GPU to plan for; None: ``device``.
        page: The file of the HTML; None: none is written.
    """
    model, batch = build(sizes, device)
    console.print(str(sizes))
    report = explain(model, *batch, device=described)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(report.refusals)} merges were rejected, for example:")
    for refusal in report.refusals[:3]:
        console.print(f"  {refusal}", markup=False, highlight=False, soft_wrap=True)
    if page is not None:
        console.print(f"the plan as a page: {report.save(page)}", markup=False, highlight=False, soft_wrap=True)


class Run:
    """A model that was trained through dynafuse, with what was compiled for it. ``first_s`` is the step that compiled."""

    model: Transformer
    batch: Batch
    compiled: Callable[..., Tensor]

    def __init__(self, console: Console, sizes: Sizes, device: str) -> None:
        """Make the model and train it, printing each step."""
        self.console = console
        console.print(str(sizes))
        self.graphs: list[Compiled] = []
        self.model, self.batch = build(sizes, device)
        self.compiled = torch.compile(self.model, backend=_backend())
        with listening(self.graphs.append, plan_only=False):
            self.right, self.first_s = trained(console, self.model, self.batch, self.compiled)
        console.print(ran(self.graphs))

    def show_kernel(self) -> None:
        """Print the source of a Triton kernel, if one was made."""
        if shared := example(self.graphs):
            source, regions = shared
            self.console.rule(f"a generated kernel, which {regions} regions share")
            self.console.print(Syntax(source, "python", background_color="default", word_wrap=True))

    def conclude(self) -> bool:
        """Print and return whether all steps were right."""
        agree = "agree" if self.right else "do not agree"
        self.console.print(f"{verdict(self.right)}: losses and gradients {agree} with eager's")
        return self.right


def ran(compiled: Sequence[Compiled]) -> str:
    """Describe how many regions ran on which executor, and how many kernels that took."""
    bounds = _bounds(compiled)
    executors = Counter(bound.region.executor for bound in bounds)
    where = ", ".join(f"{number} on {name}" for name, number in executors.items()) or "none"
    return f"Fused regions: {where}; distinct kernels: {len({bound.key for bound in bounds})}."


def example(compiled: Sequence[Compiled]) -> tuple[str, int] | None:
    """Return the Triton kernel that most regions share, of several the one of most ops, and how many share it."""
    bounds = [bound for bound in _bounds(compiled) if executor(bound.region.executor) is TRITON]
    if not bounds:
        return None
    shared = Counter(bound.key for bound in bounds)
    chosen = max(bounds, key=lambda bound: (shared[bound.key], len(bound.spec.ops)))
    return lower(chosen.code).source, shared[chosen.key]


def _bounds(compiled: Sequence[Compiled]) -> list[CanonicalRegion]:
    return [bound for graph in compiled for bound in graph.bounds.values()]


def _backend() -> Any:
    """Return the backend's name, or the backend itself if the package runs without being installed."""
    return "dynafuse" if "dynafuse" in torch._dynamo.list_backends() else backend.dynafuse
