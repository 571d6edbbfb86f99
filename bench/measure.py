"""Measuring: step times by two clocks, device time by kernel group, memory, numerics against eager and a wider type.

Example:
    >>> group("triton_per_fused_add_mean_0"), group("nvjet_tst_128x256_64x4"), group("flash_fwd_kernel")
    ('triton', 'gemm', 'attention')

Clocks: `step_ms` is the host's clock around one step that ends in a synchronize: what a user's loop waits for when it
looks at each loss. `event_ms` is the same step between two CUDA events. `pipelined_ms` is N steps without a
synchronize, over N. `device_ms` is the time in which at least one kernel ran, from the profiler: gaps between kernels do not
count, and neither do kernels twice that run at once, as cuDNN's groups of a convolution do in a CUDA graph.
"""
from __future__ import annotations

import functools
import importlib
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

Metrics = dict[str, Any]
Step = Callable[[], Any]

# First match wins. Triton's kernels are told by the prefix that their generator gives them; a Triton template of a
# matrix product counts as one. Convolutions come before products: cuDNN's kernels are implicit GEMMs by name.
GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"^triton_tem_.*(attention|flex)", re.I)),
    ("gemm", re.compile(r"^triton_(tem_|mm)", re.I)),
    ("triton", re.compile(r"^(triton_|dynafuse_)")),
    ("nvfuser", re.compile(r"\bnvfuser_")),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.I)),
    ("convolution", re.compile(r"fprop|dgrad|wgrad|convolv|conv2d|winograd|implicit_?gemm|im2col", re.I)),
    ("convolution", re.compile(r"nchwtonhwc|nhwctonchw", re.I)),  # cuDNN's own changes of layout
    ("gemm", re.compile(r"gemm|gemv|nvjet|cublas|splitk|cutlass|dot_kernel", re.I)),
)
# Above this relative error of eager's gradients, twice of it would pass unrelated ones (whose error is 1.4).
TELLING = 0.5
# More than four times the 60 MB of L2 of an H200: writing them leaves nothing of a call's own in it.
FLUSHED_BYTES = 256 << 20
MORE_KERNELS = 10  # in a graph, beside one, to tell what a kernel adds
LEAST_PHASE_S = 0.01
GROUP_NAMES = ("gemm", "attention", "convolution", "triton", "nvfuser", "other")


def group(kernel: str) -> str:
    """The group of a device kernel by its name."""
    return next((name for name, pattern in GROUPS if pattern.search(kernel)), "other")


def synchronize(device: str) -> None:
    """Wait for the device; the CPU needs no waiting."""
    if device == "cuda":
        torch.cuda.synchronize()


def clear_gradients(module: nn.Module) -> None:
    """Forget gradients, so that the next backward stores instead of adding."""
    for parameter in module.parameters():
        parameter.grad = None


# ------ clocks
def timed_once(step: Step, device: str) -> float:
    """Seconds of one step on the host's clock, with the device idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def step_samples(step: Step, before: Step, device: str, steps: int) -> Metrics:
    """Milliseconds of each of `steps` steps by both clocks; `before` runs outside the clocks."""
    wall, events = [], []
    for _ in range(steps):
        before()
        synchronize(device)
        begin, end = _events(device)
        start = time.perf_counter()
        _record(begin)
        step()
        _record(end)
        synchronize(device)
        wall.append(1e3 * (time.perf_counter() - start))
        if begin is not None and end is not None:
            events.append(begin.elapsed_time(end))
    return {"step_ms": wall, "event_ms": events}


def pipelined_ms(step: Step, before: Step, device: str, steps: int) -> float:
    """Milliseconds a step when the host may run ahead of the device."""
    def run() -> None:
        for _ in range(steps):
            before()
            step()

    return 1e3 * timed_once(run, device) / steps


def replayed_us(call: Step, samples: int) -> float:
    """Microseconds of one call, replayed as a CUDA graph with a cold L2: the median of `samples`, each after a flush.

    It includes what a replay costs the device, :func:`replay_us`. The call must be warm.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # libraries set themselves up by stream, which a capture forbids
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(samples):
        flushed.zero_()
        begin, end = _events("cuda")
        _record(begin)
        graph.replay()
        _record(end)
        torch.cuda.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)))
    return statistics.median(times)


@functools.cache
def replay_us(samples: int = 20) -> float:
    """Microseconds that a replay takes besides its kernels: of a graph of one kernel, less what each of more adds."""
    one = torch.zeros((), device="cuda")

    def kernels(count: int) -> Step:
        def run() -> None:
            for _ in range(count):
                one.add_(1)

        return run

    alone = replayed_us(kernels(1), samples)
    return alone - (replayed_us(kernels(1 + MORE_KERNELS), samples) - alone) / MORE_KERNELS


def _events(device: str) -> tuple[Any, Any]:
    if device != "cuda":
        return None, None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _record(event: Any) -> None:
    if event is not None:
        event.record()


# ------ kernels
def device_profile(step: Step, before: Step, device: str, steps: int) -> Metrics:
    """Device time, launches and kernel names of one step, from the profiler's CUDA activity; empty on a CPU."""
    if device != "cuda":
        return {}
    def run() -> None:
        for _ in range(steps):
            before()
            step()

    torch.cuda.synchronize()
    return summarize(kernels_of(run), steps)


class Ran(NamedTuple):
    """A kernel that ran, with its begin on the profiler's clock and its time, in microseconds."""

    name: str
    begin: float
    us: float


def kernels_of(run: Step) -> list[Ran]:
    """The kernels that a function launches, in the order in which they began, from the profiler's CUDA activity."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_device = (event for event in profile.events() if event.device_type == DeviceType.CUDA)
    # Annotations span kernels that have events of their own.
    kernels = (event for event in on_device if not event.is_user_annotation and event.device_time > 0)
    return sorted((Ran(event.name, float(event.time_range.start), float(event.device_time)) for event in kernels),
                  key=lambda ran: ran.begin)


def launched(call: Step) -> list[tuple[str, float]]:
    """The kernels of one call and their microseconds, in the order in which they ran, from the profiler; with a cold L2."""
    torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda").zero_()
    torch.cuda.synchronize()
    return [(ran.name, ran.us) for ran in kernels_of(call)]


def summarize(kernels: Sequence[Ran], steps: int) -> Metrics:
    """Totals a step: the time at least one kernel ran, by group the sum of times, launches, the twenty longest kernels."""
    by_name: dict[str, list[float]] = defaultdict(list)
    by_group: dict[str, float] = defaultdict(float)
    for name, _, us in kernels:
        by_name[name].append(us)
        by_group[group(name)] += us / steps / 1e3
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:20]
    return {
        "device_ms": busy_us(kernels) / steps / 1e3,
        **{f"{name}_ms": by_group[name] for name in GROUP_NAMES},
        "launches": len(kernels) / steps,
        "triton_kernels": sum(group(name) == "triton" for name in by_name),
        "top_kernels": [_kernel_row(name, sum(times) / steps, len(times) / steps) for name, times in longest],
    }


def busy_us(kernels: Sequence[Ran]) -> float:
    """Microseconds in which at least one of some kernels ran, given in the order in which they began."""
    total, end = 0.0, -math.inf
    for _, begin, us in kernels:
        total += max(begin + us - max(begin, end), 0.0)
        end = max(end, begin + us)
    return total


def _kernel_row(name: str, us: float, count: float) -> Metrics:
    return {"name": name[:160], "us": us, "count": count, "group": group(name)}


def peak_gb(step: Step, before: Step, device: str) -> float | None:
    """Peak of device memory during a warm step, in GB (1e9 bytes): what is allocated, and what captured graphs keep."""
    if device != "cuda":
        return None
    before()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() + idle_in_pools(torch.cuda.memory_snapshot())) / 1e9


def reserved_gb(step: Step, before: Step, device: str) -> float | None:
    """Most of the device's memory that is taken during a warm step, in GB (1e9 bytes), if none of it was idle before.

    Beside what is allocated that has the gaps in between, and what captured graphs keep: what others cannot have.
    """
    if device != "cuda":
        return None
    before()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / 1e9


def idle_in_pools(snapshot: Sequence[Mapping[str, Any]]) -> int:
    """Bytes of segments of the allocator that captured graphs use at each replay, but that are not allocated meanwhile."""
    private = (segment for segment in snapshot if any(segment["segment_pool_id"]))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


# ------ compiled kernels
def compile_stats() -> Metrics:
    """How many kernels were compiled so far in this process, as far as the system that was used says so."""
    found: Metrics = {}
    inductor = sys.modules.get("torch._inductor.metrics")
    if inductor is not None and inductor.generated_kernel_count:
        found["kernels"] = int(inductor.generated_kernel_count)
        # It compiles those of a graph with equal source once; a source met again is a miss and a hit.
        counted = importlib.import_module("torch._dynamo.utils").counters["inductor"]
        if sources := counted["async_compile_cache_miss"] - counted["async_compile_cache_hit"]:
            found["sources"] = int(sources)
    if "dynafuse.backend" in sys.modules:
        # A table that lacks a column is better than a run that dies over it: the numbers are dynafuse's to offer.
        stats: dict[str, Any] = getattr(importlib.import_module("dynafuse.backend"), "stats", dict)()
        found |= {key: value for key, value in stats.items() if isinstance(value, (int, float))}
    return found


def compile_phases() -> dict[str, float]:
    """Seconds of this process's compile phases that torch's clock knows, backends' among them; some lie in others."""
    from torch._dynamo.utils import compilation_time_metrics

    totals = {name: sum(times) for name, times in compilation_time_metrics.items()}
    return {name: seconds for name, seconds in sorted(totals.items(), key=lambda item: -item[1]) if seconds >= LEAST_PHASE_S}


# ------ numerics
def relative_rmse(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference| over elements that are finite in both; infinite when NaN or Inf sit elsewhere."""
    out, reference = out.detach().to(torch.float64), reference.detach().to(torch.float64)
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    if not all(torch.equal(kind(out), kind(reference)) for kind in kinds):
        return float("inf")
    finite = torch.isfinite(reference)
    error = torch.where(finite, out - reference, 0).norm()
    size = torch.where(finite, reference, 0).norm()
    return float(error / size) if float(size) > 0 else float(error)


class Outcome:
    """What one step computed: its output (loss or logits) and the gradients of a module's parameters by name."""

    def __init__(self, output: Tensor, module: nn.Module, keep: bool = True) -> None:
        self.output = output.detach().clone() if keep else output.detach()
        named = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
        self.gradients = {name: grad.detach().clone() if keep else grad.detach() for name, grad in named}


def compare(got: Outcome, eager: Outcome, reference: Outcome | None) -> Metrics:
    """Differences of one system from eager, and of both from the wider reference; `right` is the verdict.

    Right means: an error against the reference of at most twice eager's own (over all gradients, or the output in
    inference), or without a reference, all gradient norms within 5% of eager's. None means that this cannot tell:
    eager's own gradients are mostly rounding (a deep batch-normalized net in bfloat16), so twice that admits anything.
    """
    found = {**_output_differences(got, eager), **_norm_differences(got, eager)}
    if reference is not None:
        found |= _errors(got, reference, "") | _errors(eager, reference, "eager_")
    return found | {"right": _verdict(found)}


def _output_differences(got: Outcome, eager: Outcome) -> Metrics:
    if got.output.numel() > 1:
        return {"output_vs_eager": relative_rmse(got.output, eager.output)}
    loss, expected = float(got.output), float(eager.output)
    return {"loss": loss, "eager_loss": expected, "loss_difference": abs(loss - expected)}


def _norm_differences(got: Outcome, eager: Outcome) -> Metrics:
    if not eager.gradients:
        return {}
    if missing := eager.gradients.keys() ^ got.gradients.keys():
        return {"gradients_missing": sorted(missing)}
    norms = {name: float(grad.double().norm()) for name, grad in eager.gradients.items()}
    # A gradient that is zero but for rounding (a key bias under softmax) has a norm of noise: no ratio to speak of.
    floor = 1e-5 * sum(norm**2 for norm in norms.values()) ** 0.5
    kept = {name: norm for name, norm in norms.items() if norm > floor}
    ratios = {name: abs(float(got.gradients[name].double().norm()) / norm - 1) for name, norm in kept.items()}
    if not ratios:  # eager's are all zero, or NaN
        return {"grad_norm_left_out": len(norms)}
    worst = max(ratios, key=lambda name: _nan_last(ratios[name]))
    return {
        "grad_norm_max": ratios[worst],
        "grad_norm_median": statistics.median(ratios.values()),
        "grad_norm_worst": worst,
        "grad_norm_left_out": len(norms) - len(kept),
    }


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def _errors(got: Outcome, reference: Outcome, prefix: str) -> Metrics:
    """Relative RMSE against the reference: of the output, of all gradients as one vector, the median by parameter."""
    found: Metrics = {f"{prefix}output_rmse": relative_rmse(got.output, reference.output)}
    pairs = [(got.gradients[name], grad) for name, grad in reference.gradients.items() if name in got.gradients]
    if pairs:
        found[f"{prefix}grad_rmse"] = _joint_rmse(pairs)
        found[f"{prefix}grad_rmse_median"] = statistics.median(relative_rmse(mine, right) for mine, right in pairs)
    return found


def _joint_rmse(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    error = size = 0.0
    for mine, right in pairs:
        error += float((mine.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    return math.sqrt(error / size) if size else math.sqrt(error)


def _verdict(found: Metrics) -> bool | None:
    if "gradients_missing" in found:
        return False
    if found.get("eager_grad_rmse", 0.0) > TELLING:
        return None if math.isfinite(found["grad_rmse"]) else False
    if "grad_rmse" in found:
        return bool(found["grad_rmse"] <= 2 * found["eager_grad_rmse"])
    if "grad_norm_max" in found:
        return bool(found["grad_norm_max"] <= 0.05)
    # Of a scalar eager may hit the rounded value by luck; of many elements it cannot.
    return bool(found.get("output_rmse", 0.0) <= 2 * found.get("eager_output_rmse", 0.0) + 1e-6)
