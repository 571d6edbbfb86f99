"""Steps of optimizers, compiled: time, device time, kernels, cold start and agreement with eager of each system.

Example:
    python -m bench.optimizers --systems eager,inductor,dynafuse --out optimizers.json
    python -m bench.optimizers --cases adamw/resnet50 --systems inductor,dynafuse --out one.json
    python -m bench.optimizers --cases sgd/resnet50 --scale tiny --device cpu --systems eager,aot_eager --out tiny.json

A case is OPTIMIZER/MODEL: the parameters of a model of `models.py`, with random gradients. Every system has a process of its
own for each case, with empty caches. `off` is the largest relative norm of the difference of any parameter from what eager
makes of it in as many steps from the same values.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from bench import systems
from bench.apart import parsed, run
from bench.measure import Metrics, device_profile, step_samples, timed_once
from bench.models import CASES as MODELS
from bench.models import Build
from bench.run import split, unknown_cases

PASSED = ("scale", "dtype", "device", "steps", "layers")
"""Options that a process for one case and system is given."""

SUITE = "optimizers"
RATE = 1e-3
STEPS = 3
"""After which parameters are compared with eager's."""

Step = Callable[[], object]


def nothing() -> None:
    """Do nothing before a step."""


def clipped(parameters: Iterable[nn.Parameter]) -> Step:
    """Return a step of AdamW on gradients whose norm is clipped."""
    held = list(parameters)
    optimizer = torch.optim.AdamW(held, lr=RATE)

    def step() -> None:
        nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()

    return step


OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], Step]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=1e-4).step,
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATE).step,
    "clipped_adamw": clipped,
}
CASES = tuple(f"{optimizer}/{model}" for optimizer in OPTIMIZERS for model in ("resnet50", "llama", "vit_b"))


def parameters_of(model: str, options: argparse.Namespace) -> list[nn.Parameter]:
    """Return the parameters of a model, with random gradients."""
    how = Build(options.device, options.scale, options.layers, True, getattr(torch, options.dtype))
    parameters = list(MODELS[model].build(how).module.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def measured(system: systems.System, options: argparse.Namespace) -> Metrics:
    """Measure a case under a system, in this process."""
    optimizer, model = options.cases.split("/")
    parameters = parameters_of(model, options)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copied, parameter in zip(copies, parameters, strict=True):
        copied.grad = None if parameter.grad is None else parameter.grad.clone()
    expect = OPTIMIZERS[optimizer](copies)
    step = system.compile(OPTIMIZERS[optimizer](parameters))
    first = []
    for _ in range(STEPS):
        first.append(timed_once(step, options.device))
        expect()
    off = max(map(distance, parameters, copies))
    del copies, expect
    for _ in range(5):
        step()
    samples = step_samples(step, nothing, options.device, options.steps)
    profile = device_profile(step, nothing, options.device, 3)
    return {"cold_s": first[0], "off": off, "step_ms": statistics.median(samples["step_ms"]), "parameters": len(parameters),
            **{name: profile[name] for name in ("device_ms", "launches") if name in profile}}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of a difference over that of what was expected."""
    difference, norm = (float(tensor.detach().double().norm()) for tensor in (got - expected, expected))
    return difference / max(norm, 1e-30)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimizers", description="Steps of optimizers.")
    parser.add_argument("--cases", default=",".join(CASES), help="names of OPTIMIZER/MODEL, comma-separated")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--layers", type=int, default=8, help="of models of language")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    return parsed(parser, arguments, SUITE, limit=300)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 unless a system failed."""
    options = parse(arguments)
    wanted, known = split(options.cases), [f"{optimizer}/{model}" for optimizer in OPTIMIZERS for model in MODELS]
    if unknown := [name for name in wanted if name not in known]:
        raise unknown_cases(unknown, known)
    return int(any("error" in row for row in run(SUITE, wanted, options, PASSED, measured)))


if __name__ == "__main__":
    sys.exit(main())
