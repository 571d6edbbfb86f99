"""Convolutions that keep channels apart: by the library, and written out in kernels of ours, whatever the prices say.

Example:
    python -m bench.depthwise --out depthwise.json
    python -m bench.depthwise --case sequence,images --scale tiny --device cpu

A row is a convolution in a layout, with `library_us` and `written_us` of its result, of the gradient of what is convolved
(`input`) and of that of the weight: medians of replays as CUDA graphs that begin with a flushed L2, the replay's own time
among them; elsewhere of calls on the host's clock. What is never written out has no `written_us`. The prices in
`dynafuse/cost/depthwise.py` come from here.
"""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.report import Report, describe_machine, describe_versions
from bench.run import default_device, split, unknown_cases

aten = torch.ops.aten
SUITE = "depthwise"
ALWAYS: dict[str, Any] = {"cost": {"processors": 1}, "tune": "never"}
"""Options with which the library is priced so high that everything is written out that can be."""

TINY = 12


@dataclass(frozen=True)
class Case:
    """A convolution: its operand's sizes, its window's length in each dimension, stride, and channels for each of its."""

    sizes: tuple[int, ...]
    length: int
    stride: int = 1
    copies: int = 1

    @property
    def padding(self) -> int:
        """What keeps images as large as they are, and a sequence causal."""
        return self.length // 2 if len(self.sizes) == 4 else self.length - 1


CASES: dict[str, Case] = {
    "sequence": Case((8, 1536, 1024), 4),
    "wide sequence": Case((2, 5120, 2048), 4),
    "short sequence": Case((1, 1792, 512), 4),
    "sequence of three": Case((4, 2048, 1024), 3),
    "large images": Case((128, 32, 112, 112), 3),
    "images": Case((128, 144, 56, 56), 3),
    "small images": Case((128, 960, 7, 7), 3),
    "one image": Case((1, 144, 56, 56), 3),
    "halved": Case((128, 96, 112, 112), 3, 2),
    "halved small images": Case((64, 576, 14, 14), 3, 2),
    "windows of 25": Case((128, 240, 28, 28), 5),
    "halved windows of 25": Case((64, 144, 56, 56), 5, 2),
    "windows of 49": Case((128, 96, 56, 56), 7),
    "small windows of 49": Case((128, 384, 14, 14), 7),
    "doubled": Case((64, 96, 32, 32), 3, 2, 2),
    "doubled windows of 49": Case((64, 48, 64, 64), 7, 2, 2),
}
LAYOUTS = ("planes", "channels")
"""What lies side by side in memory: an image's elements, or its channels."""


@dataclass(frozen=True)
class Operands:
    """A case's tensors, and the numbers that the ops take behind them."""

    x: Tensor
    weight: Tensor
    grad: Tensor
    numbers: tuple[Any, ...]


def operands(case: Case, layout: str, device: str, tiny: bool) -> Operands:
    """Random tensors of a case."""
    sizes = tuple(min(size, TINY) for size in case.sizes) if tiny else case.sizes
    rank, channels = len(sizes) - 2, sizes[1]
    x = torch.randn(sizes, dtype=torch.bfloat16, device=device)
    weight = torch.randn(case.copies * channels, 1, *[case.length] * rank, dtype=torch.bfloat16, device=device)
    if layout == "channels":
        x, weight = (t.movedim(1, -1).contiguous().movedim(-1, 1) if rank == 1 else
                     t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    numbers = ([case.stride] * rank, [case.padding] * rank, [1] * rank, False, [0] * rank, channels)
    return Operands(x, weight, torch.randn_like(aten.convolution(x, weight, None, *numbers)), numbers)


def functions(of: Operands) -> dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]]:
    """What is measured by name, with its arguments."""
    def gradient(place: int) -> Callable[..., Tensor]:
        mask = [place == 0, place == 1, False]

        def function(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            result: Tensor = aten.convolution_backward(grad, x, weight, None, *of.numbers, mask)[place]
            return result

        return function

    return {
        "result": (lambda x, weight: aten.convolution(x, weight, None, *of.numbers), (of.x, of.weight)),
        "input": (gradient(0), (of.grad, of.x, of.weight)),
        "weight": (gradient(1), (of.grad, of.x, of.weight)),
    }


def measured(case: Case, layout: str, device: str, tiny: bool, samples: int) -> measure.Metrics:
    """The times of a convolution and of its gradients."""
    times: measure.Metrics = {}
    for name, (function, arguments) in functions(operands(case, layout, device, tiny)).items():
        torch.compiler.reset()
        written = torch.compile(function, backend="dynafuse", dynamic=False, options=ALWAYS)
        times[f"{name}_library_us"] = _us(lambda f=function, a=arguments: f(*a), device, samples)  # type: ignore[misc]
        if _is_written(written, arguments):
            times[f"{name}_written_us"] = _us(lambda f=written, a=arguments: f(*a), device, samples)  # type: ignore[misc]
    return times


def _is_written(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> bool:
    """Whether a function is compiled to no call of a library."""
    from dynafuse.runtime.observers import Compiled, listening

    graphs: list[Compiled] = []
    with listening(graphs.append, plan_only=False):
        function(*arguments)
    targets = {node.target for graph in graphs for node in graph.plan.annotated.graph.nodes}
    return targets.isdisjoint((aten.convolution.default, aten.convolution_backward.default))


def _us(call: Callable[[], Any], device: str, samples: int) -> float:
    call()
    if device == "cuda":
        return measure.replayed_us(call, samples)
    return 1e6 * statistics.median(measure.timed_once(call, device) for _ in range(samples))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases that are asked for, and write a row for each layout."""
    parser = argparse.ArgumentParser(prog="bench.depthwise", description="Convolutions that keep channels apart")
    parser.add_argument("--case", default=",".join(CASES), help="names, comma separated")
    parser.add_argument("--layout", default=",".join(LAYOUTS), help="planes, channels, or both")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device())
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if unknown := [name for name in split(options.case) if name not in CASES]:
        raise unknown_cases(unknown, CASES)
    report = Report(options.out, describe_machine(), describe_versions()) if options.out else None
    with torch.no_grad():
        for name in split(options.case):
            for layout in split(options.layout):
                times = measured(CASES[name], layout, options.device, options.scale == "tiny", options.samples)
                print(f"{name + ', ' + layout:36s}", *(f"{key[:-3]} {us:.1f}" for key, us in times.items()), flush=True)
                if report is not None:
                    report.put(SUITE, f"{name}/{layout}", "dynafuse", times)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
