"""The store of compiled kernels: equal keys compile once per process.

``request`` returns at once with what has to be waited for; misses are compiled together, in worker processes when there
are several and the workers are ready.

Worked example: a model of 32 equal layers asks for some 300 kernels; the store compiles a dozen.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynafuse.forks import Lock
from dynafuse.futures import follow

K = TypeVar("K")


@dataclass
class Counters:
    """What the store has been asked for since the process began (or since :meth:`Store.clear`)."""

    hits: int = 0
    misses: int = 0


@dataclass
class Store(Generic[K]):
    """Kernels by key. A kernel that failed is kept as its exception: it would fail again."""

    counters: Counters = field(default_factory=Counters)
    _held: dict[str, Future[K]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __len__(self) -> int:
        return sum(f.done() and f.exception() is None for f in self._held.values())

    def request(self, key: str, start: Callable[[], Future[K]]) -> Future[K]:
        """Return the kernel under ``key``; ``start`` begins to make it if nobody has."""
        with self._lock:
            if key in self._held:
                self.counters.hits += 1
                return self._held[key]
            self.counters.misses += 1
            future = self._held[key] = Future()
        try:
            follow(start(), future)
        except Exception as error:  # kept for every later request of the same key
            future.set_exception(error)
        return future

    def asked(self, key: str) -> Future[K] | None:
        """Return the kernel under ``key`` if it has been asked for; nobody is counted as asking for it now."""
        with self._lock:
            return self._held.get(key)

    def forget_pending(self) -> None:
        """Forget the kernels that are not there yet: for a process that has none of the threads that make them."""
        with self._lock:
            self._held = {key: future for key, future in self._held.items() if future.done()}

    def clear(self) -> None:
        """Forget every kernel."""
        with self._lock:
            self._held.clear()
            self.counters = Counters()
