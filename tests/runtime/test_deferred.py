"""Kernels that worker processes are still compiling when a graph has been planned: only its first call waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from dynafuse import backend, pipeline
from dynafuse.errors import CompileError, DynafuseWarning
from dynafuse.runtime.deferred import deferred
from tests.support.differential import compiled
from tests.support.graphs import recorded


class Late:
    """Hands out futures of kernels that are there, or have failed, only when somebody waits for some of them."""

    def __init__(self) -> None:
        self.request, self.outcome = pipeline.request, pipeline.outcome
        self.waiting: list[tuple[Future[Any], Future[Any]]] = []
        self.asked: list[int] = []  # how many kernels had been asked for whenever somebody waited
        self.failure: Exception | None = None

    def hand_out(self, *args: Any) -> Future[Any]:
        later: Future[Any] = Future()
        self.waiting.append((later, self.request(*args)))
        return later

    def wait(self, futures: Any) -> Any:
        self.asked.append(len(self.waiting))
        for later, real in self.waiting:
            if self.failure is not None:
                later.set_exception(self.failure)
            else:
                later.set_result(real.result())
        self.waiting.clear()
        return self.outcome(futures)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    torch._dynamo.reset()
    backend.reset()
    found = Late()
    monkeypatch.setattr(pipeline, "request", found.hand_out)
    monkeypatch.setattr(pipeline, "outcome", found.wait)
    return found


def step(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * x).softmax(-1).sum()


def gradient(call: Callable[..., torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(-2, 2, 24).reshape(4, 6).requires_grad_()
    return torch.autograd.grad(call(x), x)[0]


def test_both_graphs_are_planned_before_anybody_waits(late: Late) -> None:
    with recorded() as graphs:
        torch.testing.assert_close(gradient(compiled(step)), gradient(step))
    assert [graph.kind for graph in graphs] == ["forward", "backward"]
    assert late.asked == [sum(len(graph.plan.regions) for graph in graphs), 0]


def test_a_late_failure_raises_when_strict(late: Late) -> None:
    late.failure = ValueError("no such instruction")
    with pytest.raises(CompileError, match="no such instruction"):
        gradient(compiled(step))


def test_a_late_failure_runs_eager(late: Late, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late.failure = ValueError("no such instruction")
    monkeypatch.setenv("DYNAFUSE_STRICT", "0")
    with pytest.warns(DynafuseWarning, match="no such instruction"):
        found = gradient(compiled(step, repro_dir=str(tmp_path)))
    torch.testing.assert_close(found, gradient(step))


def test_threads_finish_a_function_once() -> None:
    made: list[int] = []

    def finish() -> Callable[[list[int]], int]:
        time.sleep(0.05)
        made.append(1)
        return lambda args: args[0] + 1

    call = deferred(finish)
    found: list[int] = []
    threads = [threading.Thread(target=lambda i=i: found.append(call([i]))) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 9)) and made == [1]


def test_threads_run_another_function_while_something_is_pending() -> None:
    """Triton's interpreter is not made for threads: these are no kernels."""
    pending: Future[None] = Future()
    made: list[int] = []

    def finish() -> Callable[[list[int]], tuple[str, int]]:
        time.sleep(0.05)
        made.append(1)
        return lambda args: ("own", args[0])

    call = deferred(finish, [pending], lambda args: ("other", args[0]))
    seen: dict[int, list[tuple[str, int]]] = {i: [] for i in range(8)}

    def work(number: int) -> None:
        while ("own", number) not in seen[number]:
            seen[number].append(call([number]))
            time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    assert not made
    pending.set_result(None)
    for thread in threads:
        thread.join(10)
    assert made == [1]
    for number, results in seen.items():
        assert results == [("other", number)] * (len(results) - 1) + [("own", number)] and len(results) > 1


def test_what_is_pending_may_have_failed() -> None:
    pending: Future[None] = Future()
    call = deferred(lambda: lambda args: "own", [pending], lambda args: "other")
    assert call([]) == "other"
    pending.set_exception(ValueError("never"))
    assert call([]) == "own"  # whoever finishes the function sees to it


def test_a_function_that_failed_to_finish_fails_again() -> None:
    def finish() -> Callable[[list[int]], int]:
        raise ValueError("never")

    call = deferred(finish)
    for _ in range(2):
        with pytest.raises(ValueError, match="never"):
            call([1])
