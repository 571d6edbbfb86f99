"""Training steps, each checked: the same parameters through float64, through eager and through dynafuse.

Worked example, a line of the table::

    step   loss     loss error: eager, dynafuse   gradient error: eager, dynafuse   verdict
    1      4.6513   1.2e-07     1.3e-08           3.3e-07         3.2e-07           ok
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dynafuse.tools.demo.model import Batch, Transformer

STEPS = 3  # training steps that are checked


@dataclass(frozen=True)
class Pass:
    """The loss and the gradients of one forward and backward."""

    loss: float
    gradients: list[Tensor]

    @classmethod
    def of(cls, call: Callable[..., Tensor], model: nn.Module, batch: Batch) -> Pass:
        """Run a forward and a backward; the gradients stay on the parameters as well.

        Args:
            call: The model, or what was compiled from it.
            model: The model, whose gradients are dropped first.
            batch: What it is called with.
        """
        model.zero_grad()
        loss = call(*batch)
        loss.backward()
        return cls(loss.item(), [p.grad.double() for p in model.parameters() if p.grad is not None])

    def errors(self, exact: Pass) -> tuple[float, float]:
        """Return the relative error of the loss, and the relative RMSE over all gradients."""
        error = sum((a - b).square().sum() for a, b in zip(self.gradients, exact.gradients, strict=True))
        norm = sum(b.square().sum() for b in exact.gradients)
        return abs(self.loss / exact.loss - 1), float(error / norm) ** 0.5


def trained(console: Console, model: Transformer, batch: Batch, compiled: Callable[..., Tensor]) -> tuple[bool, float]:
    """Train, and return whether every step was right, and the seconds of the first one, which compiles.

    A step's parameters are the same for all three: float64, eager and dynafuse, whose gradients the optimiser takes.

    Args:
        console: Where losses and errors are printed.
        model: The model, whose parameters are changed.
        batch: What it is called with, at every step.
        compiled: The model, compiled by dynafuse.
    """
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    table = Table("step", "loss", *_error_titles("loss"), *_error_titles("gradient"), "verdict")
    right, seconds = True, []
    for number in range(1, STEPS + 1):
        if number == 1:
            console.print("step 1 compiles …")
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
        table.add_row(str(number), f"{ours.loss:.4f}", *(f"{e:.1e}" for pair in errors for e in pair), verdict(good))
    console.print(table)
    console.print("Errors are against float64; dynafuse's may be twice eager's and one rounding.")
    return right, seconds[0]


def batch_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes in."""
    return next(model.parameters()).dtype


def _error_titles(what: str) -> tuple[str, str]:
    return f"{what} error,\neager", f"{what} error,\ndynafuse"


def verdict(good: bool) -> str:
    """Return ``ok`` or ``off``, in colour."""
    return "[green]ok[/]" if good else "[red]off[/]"
