"""Host microseconds per call of small graphs, where the device does not matter.

Example:
    python -m pytest bench/test_host.py --benchmark-columns=median,iqr --benchmark-group-by=param:graph
    python -m pytest bench/test_host.py -k "einsum and dynafuse" --benchmark-json=host.json

Inputs are so small that the device always waits for the host. Systems that this machine lacks are skipped.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import systems

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SYSTEMS = ("eager", "inductor", "inductor-reduce-overhead", "dynafuse", "dynafuse-reduce-overhead")


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
        *(Graph(f"einsum {equation} {left} {right}", einsum(equation), (left, right)) for equation, left, right in EINSUMS),
        Graph("residual 1", residual(1), ((10, 10),) * 2, backward=True),
        Graph("residual 16", residual(16), ((10, 10),) * 17, backward=True),
    )
}


def caller(graph: Graph, system: systems.System) -> Callable[[], Any]:
    """One call as the benchmark repeats it."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=DEVICE, requires_grad=graph.backward) for shape in graph.shapes]
    compiled = system.compile(graph.fn)

    def forward() -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    def both() -> Any:
        return torch.autograd.grad(compiled(*inputs), inputs)

    return both if graph.backward else forward


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_call(benchmark: Any, graph: str, system: str) -> None:
    """Median host time of a call; the result agrees with eager's first."""
    chosen = systems.find(system)
    if chosen.backend is not None and chosen.backend not in torch.compiler.list_backends(exclude_tags=()):
        pytest.skip(f"{chosen.backend} is not installed here")
    torch.compiler.reset()
    call, expected = caller(GRAPHS[graph], chosen), caller(GRAPHS[graph], systems.find("eager"))()
    torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3)
    benchmark.pedantic(call, rounds=30, iterations=100, warmup_rounds=3)
