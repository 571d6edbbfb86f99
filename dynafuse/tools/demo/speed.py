"""Times of warm steps: dynafuse beside eager and, on a GPU, beside Inductor.

Worked example: ``step_ms(model, model, batch)`` is eager's median of a forward and a backward, in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dynafuse.tools.demo.model import Batch, Transformer
from dynafuse.tools.demo.training import Pass

TIMED = 20  # steps per measurement, after warm-up
WARM_UP = 5
LEAST_ON_CPU, MOST_S_ON_CPU = 4, 3.0  # steps, the first of which does not count; seconds


def step_ms(call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> float:
    """Return the median time of a forward and a backward, warm, in milliseconds.

    Args:
        call: The model, or what was compiled from it.
        model: The model.
        batch: What it is called with.
    """
    return median([_timed_ms(call, model, batch) for _ in range(WARM_UP + TIMED)][WARM_UP:])


def _timed_ms(call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> float:
    """Time one forward and backward, in milliseconds."""
    _wait(batch)
    began = time.perf_counter()
    model.zero_grad()
    call(*batch).backward()
    _wait(batch)
    return 1e3 * (time.perf_counter() - began)


def _wait(batch: Batch) -> None:
    """Wait until the device is done."""
    if batch[0].is_cuda:
        torch.cuda.synchronize()


def on_cpu(console: Console, model: Transformer, batch: Batch, ours: Callable[..., Tensor]) -> None:
    """Print the step times of dynafuse and eager, measured by turns, and not for long: others use the CPU as well.

    Args:
        console: Where they are printed.
        model: The model.
        batch: What it is called with.
        ours: The model, compiled by dynafuse.
    """
    pairs: list[tuple[float, float]] = []
    until = time.perf_counter() + MOST_S_ON_CPU
    while len(pairs) < LEAST_ON_CPU or time.perf_counter() < until:
        pairs.append((_timed_ms(ours, model, batch), _timed_ms(model, model, batch)))
    ours_ms, eager_ms = (median(times) for times in zip(*pairs[1:], strict=True))
    console.print(f"A warm step takes {ours_ms:.0f} ms, eager's {eager_ms:.0f} ms (medians of {len(pairs) - 1}).")


def on_gpu(console: Console, model: Transformer, batch: Batch, ours: Callable[..., Tensor], ours_s: float) -> None:
    """Print a table of step and compile times: dynafuse, eager, Inductor.

    Args:
        console: Where it is printed.
        model: The model.
        batch: What it is called with.
        ours: The model, compiled by dynafuse.
        ours_s: The seconds of its first step.
    """
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
