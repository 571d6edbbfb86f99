"""Small graphs, where the device always waits for the host: what a call costs there.

Example:
    python -m bench.run --suite host --systems eager,inductor,dynafuse --rounds 10 --out host.json
    python -m bench.run --suite host --case einsum --out einsum.json
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import measure, systems
from bench.measure import Metrics

# Calls between two readings of the clock, which end in a synchronize: a single call is shorter than that.
CALLS = 100


@dataclasses.dataclass(frozen=True)
class Graph:
    """A small function, the shapes of its inputs, and whether a call includes the backward."""

    name: str
    fn: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    backward: bool = False


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
        Graph("residual/1", residual(1), ((10, 10),) * 2, backward=True),
        Graph("residual/16", residual(16), ((10, 10),) * 17, backward=True),
    )
}


def named(wanted: list[str]) -> list[str]:
    """Graphs called one of `wanted`, or beginning so before a slash; all without a wish. An unknown name ends the run."""
    found = [name for name in GRAPHS if not wanted or any(name == w or name.startswith(w + "/") for w in wanted)]
    if not found:
        raise SystemExit(f"bench: no graph is called {', '.join(wanted)}; known: {', '.join(GRAPHS)}")
    return found


def caller(graph: Graph, system: systems.System, device: str) -> Callable[[], Any]:
    """One call as it is repeated."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device, requires_grad=graph.backward) for shape in graph.shapes]
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
        graph = GRAPHS[request["case"]]
        self.expected = caller(graph, systems.find("eager"), self.device)()
        self.call = caller(graph, systems.find(request["system"]), self.device)

    def prepare(self) -> Metrics:
        """Seconds of the first call, and whether the result agrees with eager's."""
        start = time.perf_counter()
        got = self.call()
        measure.synchronize(self.device)
        seconds = time.perf_counter() - start
        pairs = zip(got, self.expected, strict=True) if isinstance(got, tuple) else [(got, self.expected)]
        return {"cold_s": seconds, "right": all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in pairs)}

    def round(self, steps: int, warmup: int) -> Metrics:
        """Microseconds a call on the host's clock: `steps` means over `CALLS` calls each."""
        samples = [1e6 * measure.timed_once(self._calls, self.device) / CALLS for _ in range(warmup + steps)]
        return {"host_us": samples[warmup:]}

    def profile(self, steps: int) -> Metrics:
        """Device time and launches of a call."""
        return measure.device_profile(self.call, lambda: None, self.device, steps)

    def _calls(self) -> None:
        for _ in range(CALLS):
            self.call()
