"""From the disk, or made and then kept there: by one process, however many ask.

Worked example: sixteen processes want the kernel of one key from an empty cache. One takes the key's lock and compiles;
the others look every few milliseconds, and have it as soon as it is there. If that one dies, another compiles.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.lock import Lock
from dynafuse.errors import told
from dynafuse.fallback import STRICT, Guard, attempted
from dynafuse.forks import Lock as Mutex

log = logging.getLogger(__name__)
K = TypeVar("K")
T = TypeVar("T")

POLL_S = 0.02
PATIENCE_S = 120.0
"""A process that holds a lock for longer hangs: the kernel is then compiled without it."""


@dataclass
class Traffic:
    """What the disk has been asked for by this process, and what was made instead."""

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    _lock: Mutex = field(default_factory=Mutex, repr=False)

    def count(self, what: str) -> None:
        """One more hit, miss or compiled kernel."""
        with self._lock:
            setattr(self, what, getattr(self, what) + 1)

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self.hits = self.misses = self.compiled = 0


@dataclass(frozen=True)
class Codec(Generic[K]):
    """How a kernel becomes an entry and back. ``encode`` is None for a kernel that no entry can describe."""

    encode: Callable[[K], Entry | None]
    decode: Callable[[Entry], K]


@dataclass(frozen=True)
class _Place(Generic[K]):
    """Where a kernel is kept, as a disk whose failures are misses."""

    disk: Disk
    key: str
    codec: Codec[K]
    guard: Guard

    def _stage(self, run: Callable[[], T], instead: Callable[[], T]) -> T:
        return self.guard.stage("kernels on disk", run, instead)

    def read(self) -> K | None:
        """The kernel, or None."""
        return self._stage(lambda: read(self.disk, self.key, self.codec.decode), lambda: None)

    def read_again(self) -> K | None:
        """The kernel if somebody has kept it meanwhile."""
        there = self._stage(lambda: self.disk.path(self.key).exists(), lambda: False)
        return self.read() if there else None

    def lock(self) -> Lock | None:
        """The lock of the key, None while another has it."""
        return self._stage(lambda: self.disk.lock(self.key), lambda: Lock.none(Path(self.key)))

    def keep(self, kernel: K) -> None:
        """Keep a kernel; one that cannot be kept is a kernel all the same."""
        def keep() -> None:
            entry = self.codec.encode(kernel)
            if entry is not None:
                self.disk.write(entry)

        attempted(keep, lambda error: log.warning("a kernel is not kept in the cache: %s", told(error)))


def once(disk: Disk, key: str, codec: Codec[K], make: Callable[[], Future[K]], traffic: Traffic,
         guard: Guard = STRICT) -> Future[K]:
    """The kernel under ``key``. ``make`` is called by one process at a time, and only if there is no entry."""
    place = _Place(disk, key, codec, guard)
    found = place.read()
    if found is not None:
        return _hit(found, traffic)
    lock = place.lock()
    if lock is not None:
        return _locked(lock, place, make, traffic)
    later: Future[K] = Future()
    threading.Thread(target=_wait, args=(later, place, make, traffic), daemon=True).start()
    return later


def read(disk: Disk, key: str, decode: Callable[[Entry], K]) -> K | None:
    """What an entry describes; None without an entry and, with a line of log, if it does not describe that."""
    entry = disk.read(key)
    if entry is None:
        return None
    # Whatever a loader raises: what it should have been is made instead.
    return attempted(lambda: decode(entry),
                     lambda error: log.warning("ignored %s in the kernel cache: %s", disk.path(key), told(error)))


def _hit(kernel: K, traffic: Traffic) -> Future[K]:
    traffic.count("hits")
    done: Future[K] = Future()
    done.set_result(kernel)
    return done


def _locked(lock: Lock, place: _Place[K], make: Callable[[], Future[K]], traffic: Traffic) -> Future[K]:
    """Make the kernel under a lock, unless somebody has done it meanwhile."""
    found = place.read_again()
    if found is not None:
        lock.release()
        return _hit(found, traffic)
    traffic.count("misses")
    kept: Future[K] = Future()

    def keep(made: Future[K]) -> None:
        error = made.exception()
        if error is None:
            place.keep(made.result())
        lock.release()
        if error is not None:
            kept.set_exception(error)
        else:
            kept.set_result(made.result())

    try:
        making = make()
    except BaseException:
        lock.release()
        raise
    making.add_done_callback(keep)
    return kept


def _wait(later: Future[K], place: _Place[K], make: Callable[[], Future[K]], traffic: Traffic) -> None:
    """Wait until the kernel is there, or until whoever makes it has given up."""
    try:
        lock, began = place.lock(), time.monotonic()
        while lock is None:
            if time.monotonic() - began > PATIENCE_S:
                log.warning("compiled without waiting any longer for another process: %s", place.key)
                lock = Lock.none(Path(place.key))
                break
            time.sleep(POLL_S)
            lock = place.lock()
        made = _locked(lock, place, make, traffic).result()
    except BaseException as error:  # handed to whoever waits for the kernel
        with contextlib.suppress(Exception):
            later.set_exception(error)
    else:
        later.set_result(made)
