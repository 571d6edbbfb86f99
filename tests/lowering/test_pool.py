"""Who compiles kernels: workers that are ready, this process while they start, and workers worth waiting for."""

from __future__ import annotations

import importlib
import re
import sys
from concurrent.futures import Future
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from dynafuse import backend
from dynafuse.ir import Lowered
from dynafuse.lowering.triton import pool

NOTHING = Lowered("", (), ())
HERE = ("compiled here",)


class Workers:
    """Stands for torch's pool: remembers what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def submit(self, *call: Any) -> Future[Any]:
        self.given.append(call)
        done: Future[Any] = Future()
        done.set_result(None)
        return done


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    """A pool that is not ready, and a process that has compiled nothing; what it compiles takes half its patience."""
    found = Workers()
    clock = iter(range(1000))
    monkeypatch.setattr(pool, "load", lambda lowered, capability: HERE)
    monkeypatch.setattr(pool.time, "perf_counter", lambda: next(clock) * pool.PATIENCE_S / 2)
    monkeypatch.setattr(pool._Here, "spent", 0.0)
    monkeypatch.setattr(AsyncCompile, "process_pool", lambda: found)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: False)
    monkeypatch.setattr(AsyncCompile, "_ready_future", Future())
    return found


def given(workers: Workers, kernels: int, count: int | None = None) -> list[int]:
    """How many kernels the workers have after each."""
    found = []
    for _ in range(kernels):
        assert pool.submit(NOTHING, 90, count).result() == HERE
        found.append(len(workers.given))
    return found


def test_a_small_graph_does_not_wait_for_workers_that_start(workers: Workers) -> None:
    assert given(workers, 3) == [0, 0, 0]


def test_a_large_graph_does(workers: Workers) -> None:
    assert given(workers, 6) == [0, 0, 0, 1, 2, 3]


def test_workers_that_are_ready_get_all(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: True)
    assert given(workers, 3) == [1, 2, 3]


def test_without_workers_all_is_compiled_here(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(workers, 6, count=0) == [0] * 6
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)  # torch may have none: one thread, or a daemon
    assert given(workers, 6) == [0] * 6


def test_the_interpreter_needs_no_workers(workers: Workers) -> None:
    assert [pool.submit(NOTHING, None, None).result() for _ in range(6)] == [HERE] * 6
    assert not workers.given


@pytest.mark.parametrize("there_is_a_gpu", [False, True])
def test_workers_start_when_torch_loads_the_backend(there_is_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_a_gpu)
    monkeypatch.setattr(pool, "warm", started.append)
    monkeypatch.setenv("DYNAFUSE_WORKERS", "3")
    monkeypatch.delitem(sys.modules, "dynafuse.entry", raising=False)
    assert importlib.import_module("dynafuse.entry").dynafuse is backend.dynafuse
    assert started == ([3] if there_is_a_gpu else [])


def test_the_entry_point_is_there() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    given = re.search(r'torch_dynamo_backends\]\ndynafuse = "(.+)"', project)
    assert given is not None
    assert EntryPoint("dynafuse", given[1], "torch_dynamo_backends").load().__name__ == "dynafuse"
