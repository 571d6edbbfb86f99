"""Threads that compile and call at once, and processes forked off after or while something was compiled."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dynafuse import backend
from dynafuse.cache.kernels import STORE
from dynafuse.cache.lock import Lock as FileLock
from dynafuse.forks import Lock
from dynafuse.lowering.triton import pool
from dynafuse.runtime.deferred import deferred
from dynafuse.select import compile as compiling

THREADS = 4
PATIENCE_S = 60.0


@pytest.fixture(params=["triton", "inductor"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"executors": request.param, "strict": True}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    backend.reset()
    yield
    backend.reset()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """A region with a grid of several programs."""
    return torch.softmax(x * 2, -1) + x.sum(-1, keepdim=True)


def at_once(work: Callable[[int], None]) -> None:
    """``work`` in several threads that begin together; what one raises is raised."""
    barrier, errors = threading.Barrier(THREADS), list[BaseException]()

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize(("executor", "dynamic"), [("triton", False), ("triton", True), ("inductor", False)])
def test_threads_call_one_function_while_it_is_compiled_and_after(executor: str, dynamic: bool) -> None:
    options = {"executors": executor, "strict": True}
    compiled = torch.compile(softmax, backend="dynafuse", options=options, dynamic=dynamic)

    def work(number: int) -> None:
        for step in range(2):
            x = torch.randn(6 + (number + step) * dynamic, 8, dtype=torch.float64, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            found, expected = compiled(x), softmax(y)
            torch.testing.assert_close(found, expected)
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)

    at_once(work)


def test_threads_compile_different_functions_at_once(options: dict[str, Any]) -> None:
    # Torch's registry of backends is not made for threads that are the first to name one: this thread is.
    torch.compile(softmax, backend="dynafuse")

    def work(number: int) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * (number + 1.5)).sum(number % 2, keepdim=True) + x.mean() + x.exp() * number

        compiled = torch.compile(function, backend="dynafuse", options=options)
        for _ in range(2):
            x = torch.randn(8, 6, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), function(x))

    at_once(work)


def test_a_thread_that_plans_does_not_keep_others_from_running(options: dict[str, Any]) -> None:
    planning, done = threading.Event(), threading.Event()
    planned: list[backend.Compiled] = []

    def plan() -> None:
        with backend.listening(planned.append, plan_only=True):
            planning.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=plan)
    thread.start()
    planning.wait(PATIENCE_S)
    x = torch.randn(8, 16)
    with backend.listening((run := list[backend.Compiled]()).append, plan_only=False):
        torch.testing.assert_close(torch.compile(softmax, backend="dynafuse", options=options)(x), softmax(x))
    done.set()
    thread.join()
    assert len(run) == 1 and planned == [] and backend.stats()["launch_sites"] > 0


# Forks ----------------------------------------------------------------------------------------------------------------


def child_passes(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a process that is forked off here; False too where that raises or hangs, and it says where."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(0.9 * PATIENCE_S)
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    for _ in range(int(PATIENCE_S / 0.05)):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """A lock that another thread has meanwhile."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_calls_what_was_compiled_and_compiles_more(options: dict[str, Any], monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is there that need not be compiled
    before = torch.compile(softmax, backend="dynafuse", options=options)
    after = torch.compile(lambda x: torch.sin(x) + x.mean(), backend="dynafuse", options=options)
    x = torch.randn(8, 16)
    before(x)

    def work() -> bool:
        return torch.allclose(before(x), softmax(x), atol=1e-5) and torch.allclose(after(x), x.sin() + x.mean(), atol=1e-5)

    with held(compiling._LOWERING), held(STORE._lock):
        assert child_passes(work)
    assert torch.allclose(after(x), x.sin() + x.mean(), atol=1e-5)


class Softmaxes(Dataset[torch.Tensor]):
    """Items that a compiled function makes."""

    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.call = call

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.call(torch.full((4, 8), float(index)))


def test_workers_of_a_data_loader_call_what_was_compiled(options: dict[str, Any]) -> None:
    compiled = torch.compile(softmax, backend="dynafuse", options=options)
    items = Softmaxes(compiled)
    expected = [items[index] for index in range(4)]
    found = list(DataLoader(items, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE_S))
    torch.testing.assert_close(found, expected)


def test_what_a_thread_had_begun_is_begun_anew_in_a_forked_process() -> None:
    store: Any = STORE
    done: Future[str] = Future()
    done.set_result("kernel")
    store.request("there", lambda: done)
    pending = store.request("pending", Future)
    assert child_passes(lambda: store.asked("pending") is None and store.asked("there") is not None)
    assert store.asked("pending") is pending
    store.clear()
    first = pool._threads()
    assert child_passes(lambda: pool._threads() is not first and pool._threads().submit(int, "7").result(5) == 7)


def test_a_lock_is_free_in_a_forked_process_and_keeps_others_out_here() -> None:
    lock = Lock()

    def free() -> bool:
        with lock:
            return True

    with held(lock):
        assert child_passes(free)
        assert not lock._held.acquire(blocking=False)
    with lock:
        assert child_passes(free)
        with lock:
            pass


def test_a_forked_process_does_not_wait_for_what_only_its_parent_is_told() -> None:
    """An interim function is not for ever where nobody is left to end what is pending."""
    run = deferred(lambda: lambda args: "own", [Future()], lambda args: "interim")
    assert run([]) == "interim" and child_passes(lambda: run([]) == "own") and run([]) == "interim"


def test_a_forked_process_holds_none_of_its_parents_locks(tmp_path: Path) -> None:
    """The parent's end frees them, though a child lives on."""
    lock = FileLock.take(tmp_path / "held.lock")
    assert lock is not None
    descriptor = lock.descriptor

    def closed() -> bool:
        with suppress(OSError):
            os.fstat(descriptor)
            return False
        return lock.descriptor == -1

    assert child_passes(closed)
    assert FileLock.take(tmp_path / "held.lock") is None, "it is the parent's as before"
    lock.release()
    assert not (tmp_path / "held.lock").exists()
