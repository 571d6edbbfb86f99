"""Small graphs, where the device always waits for the host: what a call costs there.

Example:
    python -m bench.run --suite host --systems eager,inductor,dynafuse --rounds 10 --out host.json
    python -m bench.run --suite host --case einsum --out einsum.json
    python -m bench.run --suite residual --case residual/128,growing/64 --out residual.json
"""
from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench import measure, systems
from bench.measure import Metrics

# Calls between two readings of the clock, which end in a synchronize: a single call is shorter than that.
CALLS = 100
# Layers that so many calls go through at least, where a call of many layers is long enough for fewer calls.
LAYERS_A_SAMPLE = 400


@dataclasses.dataclass(frozen=True)
class Graph:
    """A small function, the shapes and the scale of its inputs, whether a call includes the backward, calls a sample."""

    name: str
    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    backward: bool = False
    scale: float = 1.0
    calls: int = CALLS


def einsum(equation: str) -> Callable[..., Tensor]:
    """`torch.einsum` of one equation."""
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(equation, a, b)

    return fn


def einsum_name(equation: str, *shapes: tuple[int, ...]) -> str:
    """A name without a comma, which separates names on the command line."""
    return "/".join(["einsum", equation.replace(",", " "), *("x".join(map(str, shape)) for shape in shapes)])


def residual(layers: int) -> Callable[..., Tensor]:
    """Layers of tanh, matrix product and residual add."""
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights[:layers]:
            x = x + torch.tanh(x) @ weight
        return x.sum()

    return fn


def growing(layers: int) -> Callable[..., Tensor]:
    """The same where each layer adds the outputs of all before it: the k-th fusion has k inputs."""
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        outs = [x]
        for weight in weights[:layers]:
            total = outs[-1]
            for out in reversed(outs[:-1]):
                total = total + out
            outs.append(torch.tanh(total) @ weight)
        return outs[-1].sum()

    return fn


def stack(fn: Callable[[int], Callable[..., Tensor]], layers: int) -> Graph:
    """Layers of 10x10 matrices, forward and backward. Larger inputs would blow float32's rounding up from layer to layer."""
    calls = min(CALLS, max(5, LAYERS_A_SAMPLE // layers))
    return Graph(f"{fn.__name__}/{layers}", fn(layers), ((10, 10),) * (layers + 1), True, 0.1, calls)


def pointwise(x: Tensor) -> Tensor:
    return torch.sin(x) * 2 + x


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


EINSUMS = (
    ("bij,jk", (2, 16, 16), (16, 16)),
    ("bij,jk", (2, 16, 1), (16, 16)),
    ("bij,jk", (2, 16, 16), (1, 16)),
    ("bijk,bklj->bli", (2, 8, 16, 16), (2, 16, 8, 16)),
    ("bijk,bklj->bli", (2, 8, 16, 1), (2, 16, 8, 16)),
    ("bijk,bklj->bli", (2, 8, 16, 16), (2, 16, 8, 1)),
)

GRAPHS = {
    graph.name: graph
    for graph in (
        Graph("pointwise", pointwise, ((16, 16),)),
        Graph("softmax", softmax, ((16, 16),)),
        *(Graph(einsum_name(equation, left, right), einsum(equation), (left, right)) for equation, left, right in EINSUMS),
        stack(residual, 1),
        stack(residual, 16),
    )
}

# What compiles anew for every layer takes longer with each; what knows layers again does not, unless they differ.
STACKS = {graph.name: graph for fn in (residual, growing) for graph in (stack(fn, 2**power) for power in range(8))}


def named(wanted: list[str], graphs: Mapping[str, Graph] = GRAPHS) -> list[str]:
    """Graphs called one of `wanted`, or beginning so before a slash; all without a wish. An unknown name ends the run."""
    found = [name for name in graphs if not wanted or any(name == w or name.startswith(w + "/") for w in wanted)]
    if not found:
        raise SystemExit(f"bench: no graph is called {', '.join(wanted)}; known: {', '.join(graphs)}")
    return found


def caller(graph: Graph, system: systems.System, device: str) -> Callable[[], Any]:
    """One call as it is repeated."""
    torch.manual_seed(0)
    inputs = [(graph.scale * torch.randn(shape, device=device)).requires_grad_(graph.backward) for shape in graph.shapes]
    compiled = system.compile(graph.fn)

    def forward() -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    def both() -> Any:
        return torch.autograd.grad(compiled(*inputs), inputs)

    return both if graph.backward else forward


class HostSubject:
    """A small graph under one system, driven as a whole model is: `prepare`, then rounds."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.device = request["device"]
        self.graph = (STACKS | GRAPHS)[request["case"]]
        self.calls = self.graph.calls
        self.system = systems.find(request["system"])
        self.expected = caller(self.graph, systems.find("eager"), self.device)()
        importlib.import_module("torch._dynamo")  # which all backends share

    def prepare(self) -> Metrics:
        """Seconds of `torch.compile` and a call, whether it agrees with eager, and how many kernels were compiled."""
        start = time.perf_counter()
        self.call = caller(self.graph, self.system, self.device)
        got = self.call()
        measure.synchronize(self.device)
        seconds = time.perf_counter() - start
        phases = measure.compile_phases()
        pairs = zip(got, self.expected, strict=True) if isinstance(got, tuple) else [(got, self.expected)]
        right = all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)
        return {"cold_s": seconds, "phases_s": phases, "right": right, **measure.compile_stats()}

    def round(self, steps: int, warmup: int) -> Metrics:
        """Microseconds a call on the host's clock: `steps` means over the graph's number of calls each."""
        samples = [1e6 * measure.timed_once(self._calls, self.device) / self.calls for _ in range(warmup + steps)]
        return {"host_us": samples[warmup:]}

    def profile(self, steps: int) -> Metrics:
        """Device time and launches of a call."""
        return measure.device_profile(self.call, lambda: None, self.device, steps)

    def _calls(self) -> None:
        for _ in range(self.calls):
            self.call()
