"""What it costs to check indices: kernels that index by loaded values, with checks and without, in one run.

Example:
    python -m bench.indices --out indices.json
    python -m bench.indices --scale tiny --device cpu

Both are compiled in one process and take turns, round by round, over inputs that go round so that the L2 does not hold
them. `checked_us` and `unchecked_us` are medians over the rounds: device time by the profiler on a GPU, wall time
elsewhere; `ratio` is the first over the second.
"""
from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import measure
from bench.report import Report, describe_machine, describe_versions

Function = Callable[..., Any]
BF16 = torch.bfloat16
ROTATED_BYTES = 400e6


def _table(rows: int, width: int, picked: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width, dtype=BF16), torch.randint(rows, (picked,))


def _along(rows: int, width: int, picked: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width, dtype=BF16), torch.randint(width, (rows, picked))


def _logits(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, classes, dtype=BF16).requires_grad_(), torch.randint(classes, (rows,))


def _put(table: Tensor, at: Tensor) -> Tensor:
    return torch.index_put(table * 2, (at,), table[at] + 1)


CASES: dict[str, tuple[Function, Callable[..., tuple[Tensor, Tensor]], tuple[int, ...]]] = {
    "embedding": (lambda w, i: F.embedding(i, w) * 2, _table, (32000, 4096, 16384)),
    "embedding of short rows": (lambda w, i: F.embedding(i, w) * 2, _table, (1000000, 64, 262144)),
    "index_select": (lambda w, i: w.index_select(0, i) * 2, _table, (32000, 4096, 16384)),
    "index": (lambda w, i: w[i] * 2, _table, (32000, 4096, 16384)),
    "index and softmax": (lambda w, i: w[i].softmax(-1), _table, (32000, 4096, 16384)),
    "index of elements": (lambda w, i: w[:, 0][i] * 2, _table, (1000000, 8, 16777216)),
    "gather": (lambda x, i: x.gather(1, i) * 2, _along, (4096, 4096, 2048)),
    "index_put": (_put, _table, (32000, 4096, 16384)),
    "cross_entropy": (lambda x, t: F.cross_entropy(x.detach().float(), t), _logits, (4096, 32000)),
    "cross_entropy and backward": (lambda x, t: F.cross_entropy(x.float(), t), _logits, (4096, 32000)),
}


def measured(name: str, device: str, tiny: bool, rounds: int, steps: int) -> measure.Metrics:
    """Both times of a case, and their ratio."""
    function, make, sizes = CASES[name]
    sizes = tuple(min(size, 40) for size in sizes) if tiny else sizes
    with torch.device(device):
        first = make(*sizes)
        bytes_of_one = sum(x.nbytes for x in first)
        sets = [first, *(make(*sizes) for _ in range(_copies(bytes_of_one) - 1 if device == "cuda" else 0))]
    compiled = {checks: _compiled(function, checks) for checks in (True, False)}
    turns = {checks: itertools.cycle(sets) for checks in compiled}
    times: dict[bool, list[float]] = {checks: [] for checks in compiled}
    for number, checks in itertools.product(range(rounds + 1), compiled):
        us = _time(lambda c=checks: _step(compiled[c], next(turns[c])), device, steps)  # type: ignore[misc]
        if number:  # the first compiles
            times[checks].append(us)
    checked, unchecked = (statistics.median(times[checks]) for checks in (True, False))
    return {"checked_us": checked, "unchecked_us": unchecked, "ratio": checked / unchecked, "sizes": sizes}


def _copies(bytes_of_one: int) -> int:
    return min(16, max(2, int(ROTATED_BYTES / bytes_of_one) + 1))


def _compiled(function: Function, checks: bool) -> Function:
    def own(*inputs: Tensor) -> Any:  # a code object of its own: Dynamo keeps what it compiled by that
        return function(*inputs)

    own.__code__ = own.__code__.replace(co_name=f"checks_{checks}")
    return torch.compile(own, backend="dynafuse", dynamic=False, options={"check_indices": checks, "tune": "never"})


def _step(compiled: Function, inputs: Sequence[Tensor]) -> None:
    """A call, and the gradient of a loss."""
    out = compiled(*inputs)
    if out.requires_grad:
        torch.autograd.grad(out, inputs[0])


def _time(step: Callable[[], Any], device: str, steps: int) -> float:
    """Microseconds of one step."""
    if device != "cuda":
        return 1e6 * statistics.median(measure.timed_once(step, device) for _ in range(steps))
    step()
    return 1e3 * float(measure.device_profile(step, lambda: None, device, steps)["device_ms"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases that are asked for, and write a row each."""
    parser = argparse.ArgumentParser(prog="bench.indices", description="What checking indices costs")
    parser.add_argument("--case", default=",".join(CASES), help="names, comma separated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    report = Report(options.out, describe_machine(), describe_versions()) if options.out else None
    for name in options.case.split(","):
        torch.compiler.reset()
        torch.manual_seed(0)
        metrics = measured(name, options.device, options.scale == "tiny", options.rounds, options.steps)
        print(f"{name:28s}", *(f"{metrics[key]:10.3f}" for key in ("checked_us", "unchecked_us", "ratio")), flush=True)
        if report is not None:
            report.put("indices", name, "dynafuse", metrics)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
