"""Models whose batch has another size in every call, beside one whose size is known: step, device time, cold start.

Example:
    python -m bench.batches --systems inductor,dynafuse --out batches.json
    python -m bench.batches --cases bert/infer/changing --scale tiny --device cpu --systems eager,aot_eager --out tiny.json

A case is MODEL/MODE/same or MODEL/MODE/changing, with the models of `models.py` and of the zoo. Under `changing` the first
dimension of every input is marked as dynamic, and batches of three quarters, all and five quarters of `--batch` take turns;
only steps of the whole size are timed. Every system has a process of its own for each case, with empty caches.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench import systems, zoo_models
from bench.apart import parsed, run
from bench.measure import Metrics, clear_gradients, device_profile, timed_once
from bench.models import CASES as MODELS
from bench.models import Build, Workload
from bench.run import split, unknown_cases

PASSED = ("scale", "dtype", "device", "steps", "batch")
"""Options that a process for one case and system is given."""

SUITE = "batches"
KNOWN = {**zoo_models.CASES, **MODELS}
WAYS = ("same", "changing")
CASES = tuple(f"{model}/{mode}/{way}" for model in ("resnet50", "vit_b") for mode in zoo_models.MODES for way in WAYS)

Inputs = tuple[Tensor, ...]


def of_size(inputs: Sequence[Tensor], count: int) -> Inputs:
    """Return a batch of some size: the first examples, or all and some of them again."""
    return tuple(torch.cat([tensor] * (-(-count // len(tensor))))[:count].contiguous() for tensor in inputs)


def batches(work: Workload, count: int, is_changing: bool) -> list[Inputs]:
    """Return the batches that take turns, the one that is timed first; its size is marked if it changes."""
    whole = of_size(work.inputs, count)
    if not is_changing:
        return [whole]
    for tensor in whole:
        torch._dynamo.mark_dynamic(tensor, 0)
    return [whole, of_size(whole, count * 3 // 4), of_size(whole, count * 5 // 4)]


def step_of(work: Workload, runner: Callable[..., Tensor], train: bool) -> Callable[[Inputs], object]:
    """Return a step on a batch."""
    def step(inputs: Inputs) -> object:
        clear_gradients(work.module)
        with torch.set_grad_enabled(train):
            result = runner(*inputs)
        return result.backward() if train else result

    return step


def measured(system: systems.System, options: argparse.Namespace) -> Metrics:
    """Measure a case under a system, in this process."""
    model, mode, way = options.cases.split("/")
    train = mode == "train"
    work = KNOWN[model].build(Build(options.device, options.scale, None, train, getattr(torch, options.dtype)))
    step = step_of(work, system.compile(work.module), train)
    whole, *others = batches(work, options.batch, way == "changing")
    cold = timed_once(lambda: step(whole), options.device)
    for other in (*others, whole, *others, whole):
        step(other)
    samples = []
    for _ in range(options.steps):
        for other in others:
            step(other)
        samples.append(1e3 * timed_once(lambda: step(whole), options.device))
    profile = device_profile(lambda: step(whole), lambda: None, options.device, 2)
    return {"batch": options.batch, "cold_s": cold, "step_ms": statistics.median(samples),
            **{name: profile[name] for name in ("device_ms", "convolution_ms", "triton_ms", "launches") if name in profile}}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description="Batches whose size changes.")
    parser.add_argument("--cases", default=",".join(CASES), help="names of MODEL/MODE/WAY, comma-separated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=32, help="examples in a batch that is timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    return parsed(parser, arguments, SUITE, limit=300)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 unless a system failed."""
    options = parse(arguments)
    wanted = split(options.cases)
    known = [f"{model}/{mode}/{way}" for model in KNOWN for mode in zoo_models.MODES for way in WAYS]
    if unknown := [name for name in wanted if name not in known]:
        raise unknown_cases(unknown, known)
    return int(any("error" in row for row in run(SUITE, wanted, options, PASSED, measured)))


if __name__ == "__main__":
    sys.exit(main())
