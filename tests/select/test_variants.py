"""Variants of kernels: when they are timed, which wins, what is kept, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse import backend
from dynafuse.config import Config, resolve
from dynafuse.lowering.triton.executor import TRITON
from dynafuse.lowering.triton.schedule import candidates, choose_schedule
from dynafuse.select import MEASUREMENTS, Tuner, variants
from dynafuse.select.clock import Refused
from dynafuse.select.variants import MOST_TIMED
from tests.support import graphs

X, Y = torch.randn(96, 80), torch.randn(80, 96).t()
SLOW, FAST = 10.0, 4.0


class Clock:
    """Times one candidate after the other as it is told to; an error is raised."""

    def __init__(self, *us: float | Exception) -> None:
        self.us, self.timed = list(us), 0

    def device(self, run: Any, calls: int) -> float:
        run()
        return 1.0

    def host(self, run: Any, calls: int) -> float:
        return 1.0

    def replay(self, run: Any, calls: int = 1, replays: int = 1, rounds: int = 1) -> float:
        told = self.us[self.timed]
        self.timed += 1
        if isinstance(told, Exception):
            raise told
        return told


@pytest.fixture(autouse=True)
def _nothing_measured() -> Iterator[None]:
    backend.reset()
    MEASUREMENTS.clear()
    yield
    backend.reset()
    MEASUREMENTS.clear()


def turned(build: graphs.Builder, x: Node, y: Node) -> Node:
    return build.op("aten.add.Tensor", build.op("aten.sin.default", x), y)


def summed(build: graphs.Builder, x: Node, y: Node) -> Node:
    return build.op("aten.sum.dim_IntList", build.op("aten.mul.Tensor", x, y), [1])


def options(tune: str = "always", **more: Any) -> Config:
    return resolve(options={"executors": "triton", "tune": tune, "workers": 0, **more})


def compiled(monkeypatch: pytest.MonkeyPatch, clock: Clock, write: Any = turned, config: Config | None = None) -> graphs.Run:
    """A graph through the pipeline, on a device that can be measured on."""
    monkeypatch.setattr(variants, "Tuner", partial(
        Tuner, clock=clock, obstacle=lambda device: "", free=lambda device: 1 << 30, cache=lambda device: 1))
    return graphs.compiled(graphs.built(write, X, Y), [X, Y], config or options())


def region_of(run: graphs.Run) -> Any:
    (region,) = run.bounds.values()
    return region


def test_the_kernel_is_made_under_the_fastest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = region_of(compiled(monkeypatch, Clock(), config=options("never")))
    clock = Clock(SLOW, SLOW, FAST, SLOW)
    run = compiled(monkeypatch, clock)
    region = region_of(run)
    assert clock.timed == MOST_TIMED
    assert choose_schedule(region.code) == candidates(usual.code)[2] != choose_schedule(usual.code)
    assert region.key != usual.key
    torch.testing.assert_close(run.call([X, Y])[0], X.sin() + Y)


def test_the_report_says_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    region = region_of(compiled(monkeypatch, Clock(SLOW, FAST, SLOW, SLOW))).region
    chosen = f"triton {candidates(region_of(compiled(monkeypatch, Clock(), config=options('never'))).code)[1]}"
    assert f"{chosen}, of {MOST_TIMED} that were timed" in region.reasons
    assert region.decision.measured[chosen] == FAST and len(region.decision.measured) == MOST_TIMED


def test_the_usual_schedule_stays_if_no_other_is_faster_by_more_than_timings_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = region_of(compiled(monkeypatch, Clock(), config=options("never")))
    region = region_of(compiled(monkeypatch, Clock(SLOW, 0.99 * SLOW, SLOW, SLOW)))
    assert region.key == usual.key


@pytest.mark.parametrize("tune", ["never", "unsure"])
def test_nothing_is_timed_unless_it_is_asked_for(tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert not region_of(compiled(monkeypatch, clock, config=options(tune))).region.decision.measured
    assert clock.timed == 0


def test_nothing_is_timed_where_the_same_choice_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    compiled(monkeypatch, clock)
    assert clock.timed == 0


def test_what_decides_the_order_of_a_sum_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    region = region_of(compiled(monkeypatch, clock, summed))
    assert TRITON.variants(region) == () and clock.timed == 0


def test_a_variant_that_fails_is_dropped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(monkeypatch, Clock(SLOW, Refused("0.0 µs cannot be"), FAST, SLOW))
    region = region_of(run)
    assert any("was not considered: 0.0 µs cannot be" in reason for reason in region.region.reasons)
    assert any(f"of {MOST_TIMED - 1} that were timed" in reason for reason in region.region.reasons)
    torch.testing.assert_close(run.call([X, Y])[0], X.sin() + Y)


def test_what_was_timed_once_is_not_timed_again_by_later_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    first = region_of(compiled(monkeypatch, Clock(SLOW, SLOW, FAST, SLOW), config=options(cache=True)))
    backend.reset()
    MEASUREMENTS.clear()  # as another process has nothing but the disk
    clock = Clock()
    again = region_of(compiled(monkeypatch, clock, config=options(cache=True)))
    assert clock.timed == 0
    assert again.key == first.key
    assert backend.stats()["compiled"] == 0


@pytest.mark.gpu
def test_a_variant_computes_the_same_bits() -> None:
    x, y = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda").t()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + y

    results = []
    for tune in ("never", "always"):
        torch._dynamo.reset()
        results.append(torch.compile(function, backend="dynafuse", options={"tune": tune})(x, y))
    assert torch.equal(*results)
