"""Host microseconds per call of small graphs, by pytest-benchmark; `bench.run --suite host` compares systems in turns.

Example:
    python -m pytest bench/test_host.py --benchmark-columns=median,iqr --benchmark-group-by=param:graph
    python -m pytest bench/test_host.py -k "einsum and dynafuse" --benchmark-json=host.json

Systems that this machine lacks are skipped.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import host, systems

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SYSTEMS = ("eager", "inductor", "inductor-reduce-overhead", "dynafuse", "dynafuse-reduce-overhead")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("graph", host.GRAPHS)
def test_call(benchmark: Any, graph: str, system: str) -> None:
    """Median host time of a call; the result agrees with eager's first."""
    chosen = systems.find(system)
    if chosen.backend is not None and chosen.backend not in torch.compiler.list_backends(exclude_tags=()):
        pytest.skip(f"{chosen.backend} is not installed here")
    torch.compiler.reset()
    call = host.caller(host.GRAPHS[graph], chosen, DEVICE)
    expected = host.caller(host.GRAPHS[graph], systems.find("eager"), DEVICE)()
    torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3)
    benchmark.pedantic(call, rounds=30, iterations=host.CALLS, warmup_rounds=3)
