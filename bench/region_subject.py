"""One region under one system: compiled, compared with eager, timed by CUDA-graph replay, and on request kernel by kernel.

Worked example: ``measure_region({"file": "regions.jsonl.xz", "name": "amax_a1b2", "system": "dynafuse", "device": "cuda",
"samples": 20, "profile": False, "turn": "/tmp/turn"})`` returns ``{"cold_s": 1.1, "output_vs_eager": 3e-6,
"predicted_us": 15.6, "steps": 1, "ideal_mb": 55.6, "device_us": 34.1, "tb_per_s": 1.63}``.
"""
from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from bench import measure, systems
from bench.measure import Metrics
from bench.region_file import Region, iter_tensors, read
from bench.region_steps import Watched

Function = Callable[..., Any]

WARM_CALLS = 3
ROUNDS = 3
"""Medians of which the lowest counts: what is compiled beside it runs once on the device, too, whosever turn it is."""

SETTLING_S = 60.0
"""How long a graph may run on an interim plan before it is measured as it is."""

OFTEN_MISPLACED = 1e-4
"""The share of elements that may be infinite or NaN where eager's are not: rounding decides at the edge of a range."""


def measure_region(request: Mapping[str, Any]) -> Metrics:
    """Return the metrics of a region; one that fails has its ``error``, and what was measured before.

    Raises what the device raises if it is of no use afterwards.
    """
    region = _regions(request["file"])[request["name"]]
    measured: Metrics = {}
    with torch.no_grad():
        # Whatever the measured system raises is a result of the benchmark, not an end of it.
        try:
            for metrics in _measured(region, request):
                measured |= metrics
        except Exception as error:
            measured["error"] = f"{type(error).__name__}: {error}"[:600]
    measure.synchronize(request["device"])
    if request["device"] == "cuda":
        torch.cuda.empty_cache()
    return measured


@cache
def _regions(path: str) -> Mapping[str, Region]:
    return {region.name: region for region in read(Path(path))}


def _measured(region: Region, request: Mapping[str, Any]) -> Iterator[Metrics]:
    """Yield what is measured of a region, part by part."""
    device, system = request["device"], systems.find(request["system"])
    turn = FileLock(request["turn"])  # of those that share the device, one computes
    with turn:
        module = region.module(device)
        eager = [tensor.clone() for tensor in iter_tensors(module(*region.inputs(device)))]
        inputs = region.inputs(device)  # anew: a region may write to them
        measure.synchronize(device)
    moved = sum(tensor.nbytes for tensor in (*inputs, *eager))
    watched = Watched() if "dynafuse" in system.name else None
    start = time.perf_counter()
    compiled = system.compile(module)
    with watched or contextlib.nullcontext():
        outputs = compiled(*inputs)
        measure.synchronize(device)
        cold = time.perf_counter() - start
        compared = difference if region.random_op is None else difference_of_norms
        yield {"cold_s": cold, "output_vs_eager": largest_difference(list(iter_tensors(outputs)), eager, compared)}
        del outputs, eager
        _warm(lambda: compiled(*inputs), watched)
    if watched is not None:
        yield watched.predicted()
    with turn:
        yield {"ideal_mb": moved / 1e6, **_timed(lambda: compiled(*inputs), moved, request)}
        if request["profile"] and device == "cuda":
            kernels = measure.launched(lambda: compiled(*inputs))
            yield {"launched": kernels, **({} if watched is None else {"by_step": watched.by_step(kernels)})}


def _warm(call: Function, watched: Watched | None) -> None:
    """Call a few times, and until the graph runs on its own kernels: it may begin with an interim plan."""
    end = time.monotonic() + SETTLING_S
    for _ in range(WARM_CALLS):
        call()
    while watched is not None and watched.is_interim and time.monotonic() < end:
        time.sleep(0.1)
        call()


def _timed(call: Function, moved: int, request: Mapping[str, Any]) -> Metrics:
    """Return the device time of a call, and its rate of ideal traffic; without a device the host's time."""
    if request["device"] != "cuda":
        return {"wall_us": 1e6 * statistics.median(measure.timed_once(call, "cpu") for _ in range(request["samples"]))}
    us = min(measure.replayed_us(call, request["samples"]) for _ in range(ROUNDS))
    return {"device_us": us, "replay_us": measure.replay_us(), "tb_per_s": moved / us / 1e6}


# ------ agreement with eager
def difference_of_norms(output: Tensor, expected: Tensor) -> float:
    """Return by how much the norm of an output's finite elements is another than eager's, relative to that.

    That is what random numbers leave alike; infinite if much more or less is finite.
    """
    if not expected.numel():
        return 0.0
    finite, others = torch.isfinite(output), torch.isfinite(expected)
    if abs(float(finite.double().mean() - others.double().mean())) > OFTEN_MISPLACED:
        return float("inf")
    norm, usual = (float(torch.where(f, x, 0).double().norm()) for f, x in ((finite, output), (others, expected)))
    return abs(norm - usual) / usual if usual else norm


def difference(output: Tensor, expected: Tensor) -> float:
    """Return the difference of one output from eager's, as in :func:`largest_difference`."""
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((output != expected).double().mean())
    if expected.dtype.itemsize == 1:  # torch asks nothing of 8 bits
        output, expected = output.float(), expected.float()
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    misplaced = torch.stack([kind(output) != kind(expected) for kind in kinds]).any(0)
    if float(misplaced.double().mean()) > OFTEN_MISPLACED:
        return float("inf")
    return measure.relative_rmse(torch.where(misplaced, 0, output), torch.where(misplaced, 0, expected))


def largest_difference(
    outputs: Sequence[Tensor], eager: Sequence[Tensor], compared: Callable[[Tensor, Tensor], float] = difference,
) -> float:
    """Return the largest difference of any output from eager's: |output - eager| / |eager|; of integers, how many differ.

    Infinite where a shape or dtype is another, or NaN and Inf are elsewhere.
    """
    if [(x.shape, x.dtype) for x in outputs] != [(x.shape, x.dtype) for x in eager]:
        return float("inf")
    return max((compared(output, expected) for output, expected in zip(outputs, eager, strict=True)), default=0.0)
