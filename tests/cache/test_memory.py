"""The store of kernels: one compile per key, whoever asks and however it ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from dynafuse.cache.memory import Store
from dynafuse.futures import outcome


def done(value: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[str]:
    future: Future[str] = Future()
    future.set_exception(error)
    return future


def test_a_second_request_is_a_hit() -> None:
    store: Store[str] = Store()
    first = store.request("a", lambda: done("kernel"))
    second = store.request("a", lambda: pytest.fail("compiled twice"))
    assert first is second and second.result() == "kernel"
    assert (store.counters.hits, store.counters.misses, len(store)) == (1, 1, 1)


def test_threads_compile_a_key_once() -> None:
    store: Store[str] = Store()
    started: Counter[str] = Counter()
    together = threading.Barrier(8)

    def ask(number: int) -> list[str]:
        together.wait()
        return [store.request(key, lambda key=key: start(key)).result(10) for key in "abcabc"]

    def start(key: str) -> Future[str]:
        started[key] += 1
        time.sleep(0.01)
        future: Future[str] = Future()
        threading.Timer(0.01, future.set_result, [f"kernel {key}"]).start()
        return future

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert started == {"a": 1, "b": 1, "c": 1}
    assert all(answer == [f"kernel {key}" for key in "abcabc"] for answer in answers)
    assert (store.counters.hits, store.counters.misses) == (45, 3)


def test_requests_do_not_wait_for_each_other() -> None:
    store: Store[str] = Store()
    slow: Future[str] = Future()
    waiting = store.request("slow", lambda: slow)
    assert store.request("quick", lambda: done("kernel")).result(1) == "kernel"
    assert not waiting.done() and len(store) == 1
    slow.set_result("kernel")
    assert waiting.result(1) == "kernel" and len(store) == 2


@pytest.mark.parametrize("when", ["starting", "compiling"])
def test_a_failure_is_kept(when: str) -> None:
    store: Store[str] = Store()
    calls = []

    def start() -> Future[str]:
        calls.append(1)
        if when == "starting":
            raise ValueError("no such op")
        return failed(ValueError("no such op"))

    for _ in range(3):
        with pytest.raises(ValueError, match="no such op"):
            store.request("a", start).result()
    assert len(calls) == 1 and len(store) == 0


def test_outcome_tells_kernels_from_errors() -> None:
    error = ValueError("too large")
    assert outcome({"r0": done("kernel"), "r1": failed(error)}) == ({"r0": "kernel"}, {"r1": error})


def test_clear_forgets_kernels_and_counters() -> None:
    store: Store[str] = Store()
    store.request("a", lambda: done("old"))
    store.clear()
    assert store.request("a", lambda: done("new")).result() == "new"
    assert (store.counters.hits, store.counters.misses) == (0, 1)


def test_looking_is_no_request() -> None:
    store: Store[str] = Store()
    assert store.asked("a") is None
    made = store.request("a", lambda: done("kernel"))
    assert store.asked("a") is made and (store.counters.hits, store.counters.misses) == (0, 1)


def test_clear_while_compiling_leaves_the_waiter_its_kernel() -> None:
    store: Store[str] = Store()
    slow: Future[str] = Future()
    waiting = store.request("a", lambda: slow)
    store.clear()
    slow.set_result("kernel")
    assert waiting.result(1) == "kernel"
