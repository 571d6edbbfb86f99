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
from typing import Generic, TypeVar

from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.lock import Lock
from dynafuse.forks import Lock as Guard

log = logging.getLogger(__name__)
K = TypeVar("K")

POLL_S = 0.02
PATIENCE_S = 120.0
"""A process that holds a lock for longer hangs: the kernel is then compiled without it."""


@dataclass
class Traffic:
    """What the disk has been asked for by this process, and what was made instead."""

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    _lock: Guard = field(default_factory=Guard, repr=False)

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


def once(disk: Disk, key: str, codec: Codec[K], make: Callable[[], Future[K]], traffic: Traffic) -> Future[K]:
    """The kernel under ``key``. ``make`` is called by one process at a time, and only if there is no entry."""
    found = read(disk, key, codec.decode)
    if found is not None:
        return _hit(found, traffic)
    lock = disk.lock(key)
    if lock is not None:
        return _locked(lock, disk, key, codec, make, traffic)
    later: Future[K] = Future()
    threading.Thread(target=_wait, args=(later, disk, key, codec, make, traffic), daemon=True).start()
    return later


def read(disk: Disk, key: str, decode: Callable[[Entry], K]) -> K | None:
    """What an entry describes; None without an entry and, with a line of log, if it does not describe that."""
    entry = disk.read(key)
    if entry is None:
        return None
    try:
        return decode(entry)
    except Exception as error:  # whatever a loader raises: what it should have been is made instead
        log.warning("ignored %s in the kernel cache: %s: %s", disk.path(key), type(error).__name__, error)
        return None


def _hit(kernel: K, traffic: Traffic) -> Future[K]:
    traffic.count("hits")
    done: Future[K] = Future()
    done.set_result(kernel)
    return done


def _locked(lock: Lock, disk: Disk, key: str, codec: Codec[K], make: Callable[[], Future[K]],
            traffic: Traffic) -> Future[K]:
    """Make the kernel under a lock, unless somebody has done it meanwhile."""
    found = read(disk, key, codec.decode) if disk.path(key).exists() else None
    if found is not None:
        lock.release()
        return _hit(found, traffic)
    traffic.count("misses")
    kept: Future[K] = Future()

    def keep(made: Future[K]) -> None:
        error = made.exception()
        if error is None:
            _keep(disk, made.result(), codec)
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


def _keep(disk: Disk, kernel: K, codec: Codec[K]) -> None:
    try:
        entry = codec.encode(kernel)
        if entry is not None:
            disk.write(entry)
    except Exception as error:  # a kernel that cannot be kept is a kernel all the same
        log.warning("a kernel is not kept in the cache: %s: %s", type(error).__name__, error)


def _wait(later: Future[K], disk: Disk, key: str, codec: Codec[K], make: Callable[[], Future[K]],
          traffic: Traffic) -> None:
    """Wait until the kernel is there, or until whoever makes it has given up."""
    try:
        lock, began = disk.lock(key), time.monotonic()
        while lock is None:
            if time.monotonic() - began > PATIENCE_S:
                log.warning("compiled without waiting any longer for another process: %s", disk.path(key))
                lock = Lock.none(disk.path(key))
                break
            time.sleep(POLL_S)
            lock = disk.lock(key)
        made = _locked(lock, disk, key, codec, make, traffic).result()
    except BaseException as error:  # handed to whoever waits for the kernel
        with contextlib.suppress(Exception):
            later.set_exception(error)
    else:
        later.set_result(made)
