"""Steps that drop values at random, compared as draws: systems draw different numbers, but from one distribution.

Example:
    >>> rows = [(1.0, 9.9), (1.1, 10.1), (0.9, 10.0), (1.05, 10.0)]
    >>> compare_draws([Draw(*row) for row in rows], [Draw(2 - loss, norm) for loss, norm in rows])["right"]
    True
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.measure import Metrics

DRAWS = 16
"""Steps of each system that are compared."""

MOST_ERRORS = 5.0
"""How many standard errors means may be apart."""

NO_SPREAD = 1e-4
"""The spread of eager's gradients, relative to their mean, below which a model drops nothing: rounding has some."""

MOST_SPREAD = 4.0
"""How many times as wide as eager's the spread of 16 draws may be, or the reverse: by luck it is one time in 10**6."""

ROUNDING = {"loss": 5e-3, "gradient": 3e-2}
"""What bfloat16 leaves of a mean, relative to it: all draws of a system may round the same way."""


@dataclass(frozen=True)
class Draw:
    """What one step came to: the loss, and the norm of all gradients as one vector."""

    loss: float
    gradient: float


def draws(step: Callable[[], Tensor], before: Callable[[], None], module: nn.Module, count: int = DRAWS) -> list[Draw]:
    """Return what steps come to that each draw anew."""
    drawn = []
    for _ in range(count):
        before()
        loss = float(step().detach())
        gradients = (parameter.grad for parameter in module.parameters() if parameter.grad is not None)
        drawn.append(Draw(loss, math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients))))
    return drawn


def compare_draws(got: Sequence[Draw], eager: Sequence[Draw]) -> Metrics:
    """Return mean and spread of both, how many standard errors the means are apart, and the verdict, `right`.

    Right means, for the loss and for the norm of the gradients: means within `MOST_ERRORS` standard errors of their
    difference (Welch, "The generalization of Student's problem …", 1947) or within `ROUNDING`; and of the gradients,
    spreads within `MOST_SPREAD` of one another, which no system has that drops the same values in every step, or none.
    """
    rows: Metrics = {"draws": len(got)}
    verdicts = []
    for kind, rounding in ROUNDING.items():
        (mean, spread), (expected, usual) = (_mean_and_spread(drawn, kind) for drawn in (got, eager))
        error = math.hypot(spread / math.sqrt(len(got)), usual / math.sqrt(len(eager)))
        verdicts.append(abs(mean - expected) <= max(MOST_ERRORS * error, rounding * abs(expected)))
        if kind == "gradient" and usual > NO_SPREAD * expected:  # a loss of bfloat16 may round to the same number each time
            verdicts.append(usual / MOST_SPREAD <= spread <= usual * MOST_SPREAD)
        rows |= {f"{kind}_mean": mean, f"eager_{kind}_mean": expected}
        rows |= {f"{kind}_spread": spread, f"eager_{kind}_spread": usual}
    return {**rows, "right": all(verdicts)}


def _mean_and_spread(drawn: Sequence[Draw], kind: str) -> tuple[float, float]:
    values = torch.tensor([getattr(draw, kind) for draw in drawn], dtype=torch.float64)
    return float(values.mean()), float(values.std())
