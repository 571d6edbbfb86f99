"""A model compiled beside the same model eager: whatever it leaves, by each way of running it.

Worked example: ``check("transformers/causal/llama", "train", "cpu")`` is ``Verdict("right", "", 1.2e-7)``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dynafuse.passes.strides import is_spread
from tests.architectures.catalog import Skipped, Subject, build
from tests.architectures.modes import MODES, Results, Run


@dataclass(frozen=True)
class Verdict:
    """What came of an architecture: ``right``, ``wrong``, ``raises`` or ``skipped``; why; the largest relative error."""

    status: str
    detail: str = ""
    error: float = 0.0


def check(name: str, mode: str, device: str) -> Verdict:
    """Compile an architecture strictly and compare it with eager.

    Args:
        name: Its name in the catalog.
        mode: One of :data:`MODES`.
        device: Where it runs.
    """
    way = MODES[mode]
    judge, run = partial(_worst, allowed=way.allowed), way.run
    try:
        subject = build(name, device)
        expected, again = (_eager(run, copy.deepcopy(subject)) for _ in range(2))
    except Skipped as reason:
        return Verdict("skipped", str(reason)[:300])
    except Exception as error:  # eager does not run it: nothing to compare with
        return Verdict("skipped", f"eager: {type(error).__name__}: {error}"[:300])
    if judge(again, expected, expected)[0] > way.allowed:
        return Verdict("skipped", "eager computes something else every time")
    reference = _in_float64(way.exact, subject) or _eager(way.exact, copy.deepcopy(subject))
    try:
        found = _compiled(run, copy.deepcopy(subject), backend="dynafuse", options={"strict": True})
    except Exception as error:
        return Verdict("skipped" if _traced(run, subject) is None else "raises", f"{type(error).__name__}: {error}"[-1500:])
    error, detail = judge(found, expected, reference)
    if not detail:
        return Verdict("right", "", error)
    traced, exact = _traced(run, subject), _traced(way.exact, subject)
    if traced and exact and judge(traced, expected, reference)[1] and not judge(found, traced, exact)[1]:
        return Verdict("skipped", f"traced by torch it computes something else: {detail}", error)
    return Verdict("wrong", detail, error)


def _eager(run: Run, subject: Subject) -> Results:
    """Return what a model leaves as it is."""
    return run(subject, lambda call: call)


def _compiled(run: Run, subject: Subject, **how: Any) -> Results:
    """Return what a compiled model leaves. ``how``: what ``torch.compile`` is given."""
    torch._dynamo.reset()
    return run(subject, lambda call: torch.compile(call, **how))


def _traced(run: Run, subject: Subject) -> Results | None:
    """Return what a model leaves that torch has traced and run eager; None if torch does not take it either."""
    for backend in ("aot_eager", "eager"):
        try:
            return _compiled(run, copy.deepcopy(subject), backend=backend)
        except Exception:  # whatever torch raises
            continue
    return None


def _in_float64(run: Run, subject: Subject) -> Results | None:
    """Return what a model leaves in float64; None where it has no such arithmetic."""
    wide = copy.deepcopy(subject)
    wide = Subject(wide.module.double(), tree_map(lambda x: x.double() if x.is_floating_point() else x, dict(wide.inputs)))
    try:
        return _eager(run, wide)
    except Exception:  # casts to float32 in the model's own code meet weights in float64
        return None


def _worst(found: Results, expected: Results, reference: Results, allowed: float) -> tuple[float, str]:
    """Return the largest relative error, and what is wrong, or ""."""
    if found.keys() != expected.keys():
        return float("inf"), f"returned {sorted(found.keys() ^ expected.keys())[:5]} in one of the two alone"
    worst, wrong = 0.0, ""
    for name, ours in found.items():
        eager, wide = expected[name], reference.get(name)
        facts = _facts(ours, eager)
        if facts:
            return float("inf"), f"{name}: {facts}"
        if not ours.is_floating_point():
            if not torch.equal(ours, eager):
                return float("inf"), f"{name}: other integers"
            continue
        error, eagers = _error(ours, eager, wide), _error(eager, eager, wide)
        worst = max(worst, error)
        if error > 2 * eagers + allowed and not wrong:
            wrong = f"{name}: error {error:.2g}, eager's {eagers:.2g}"
    return worst, wrong


def _facts(ours: torch.Tensor, eager: torch.Tensor) -> str:
    """Return which facts of a tensor differ, or ""."""
    pairs = {fact: (getattr(ours, fact), getattr(eager, fact)) for fact in ("dtype", "shape", "device")}
    pairs |= {"strides": (ours.stride(), eager.stride())} if not is_spread(ours, eager.stride()) else {}
    return ", ".join(f"{fact} {a} for {b}" for fact, (a, b) in pairs.items() if a != b)


def _error(value: torch.Tensor, eager: torch.Tensor, wide: torch.Tensor | None) -> float:
    """Return the relative root mean square error; infinite where NaN or Inf is in other places than eager's."""
    finite = eager.isfinite()
    if not torch.equal(finite, value.isfinite()):
        return float("inf")
    reference = (eager if wide is None or wide.shape != eager.shape else wide).double()
    difference, size = (value.double() - reference)[finite], reference[finite]
    return float(difference.norm() / size.norm().clamp_min(1e-6 * max(1, size.numel()) ** 0.5))
