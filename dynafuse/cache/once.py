"""Kernels from the disk, compiled by one process and stored there if they are missing, however many processes ask.

Worked example: sixteen processes request the kernel of one key from an empty cache. One takes the key's lock and compiles;
the others look every few milliseconds and read the kernel as soon as it is stored. If the first one dies, another compiles.
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
"""How long to wait for a lock: its process is then taken to hang, and the kernel is compiled without the lock."""


@dataclass
class Traffic:
    """Counts of this process's reads from the disk, and of the kernels that it compiled."""

    hits: int = 0
    misses: int = 0
    compiled: int = 0
    _lock: Mutex = field(default_factory=Mutex, repr=False)

    def count(self, name: str) -> None:
        """Add one to ``hits``, ``misses`` or ``compiled``."""
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def clear(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            self.hits = self.misses = self.compiled = 0


@dataclass(frozen=True)
class Codec(Generic[K]):
    """Conversion of kernels to entries and back. ``encode`` returns None for a kernel that no entry can describe."""

    encode: Callable[[K], Entry | None]
    decode: Callable[[Entry], K]


@dataclass(frozen=True)
class _Slot(Generic[K]):
    """The entry of one kernel on disk. Failures of the disk count as misses."""

    disk: Disk
    key: str
    codec: Codec[K]
    guard: Guard

    def _stage(self, run: Callable[[], T], instead: Callable[[], T]) -> T:
        return self.guard.stage("kernels on disk", run, instead)

    def read(self) -> K | None:
        """Return the kernel, or None."""
        return self._stage(lambda: read(self.disk, self.key, self.codec.decode), lambda: None)

    def read_again(self) -> K | None:
        """Return the kernel if another process has stored it meanwhile, else None."""
        exists = self._stage(lambda: self.disk.path(self.key).exists(), lambda: False)
        return self.read() if exists else None

    def lock(self) -> Lock | None:
        """Take the lock of the key; return None while another holds it."""
        return self._stage(lambda: self.disk.lock(self.key), lambda: Lock.none(Path(self.key)))

    def store(self, kernel: K) -> None:
        """Store a kernel; one that cannot be stored can be used all the same."""
        def store() -> None:
            entry = self.codec.encode(kernel)
            if entry is not None:
                self.disk.write(entry)

        attempted(store, lambda error: log.warning("a kernel is not kept in the cache: %s", told(error)))


def once(disk: Disk, key: str, codec: Codec[K], make: Callable[[], Future[K]], traffic: Traffic,
         guard: Guard = STRICT) -> Future[K]:
    """Return the kernel of a key, from the disk or made and stored.

    Args:
        disk: Where kernels are stored.
        key: The kernel's key.
        codec: How the kernel becomes an entry and back.
        make: Compiles the kernel. It is called if there is no entry, by one process at a time.
        traffic: Counts a hit or a miss.
        guard: Says how far a failure of the disk reaches.
    """
    slot = _Slot(disk, key, codec, guard)
    kernel = slot.read()
    if kernel is not None:
        return _hit(kernel, traffic)
    lock = slot.lock()
    if lock is not None:
        return _make_locked(lock, slot, make, traffic)
    awaited: Future[K] = Future()
    threading.Thread(target=_wait, args=(awaited, slot, make, traffic), daemon=True).start()
    return awaited


def read(disk: Disk, key: str, decode: Callable[[Entry], K]) -> K | None:
    """Read and decode an entry; return None if there is none and, with a line of log, if it cannot be decoded.

    Args:
        disk: Where entries are stored.
        key: The entry's key.
        decode: Makes what is returned of an entry; it may raise anything for one that it cannot use.
    """
    entry = disk.read(key)
    if entry is None:
        return None
    # Whatever a loader raises, the caller makes anew what the entry should have described.
    return attempted(lambda: decode(entry),
                     lambda error: log.warning("ignored %s in the kernel cache: %s", disk.path(key), told(error)))


def _hit(kernel: K, traffic: Traffic) -> Future[K]:
    traffic.count("hits")
    result: Future[K] = Future()
    result.set_result(kernel)
    return result


def _make_locked(lock: Lock, slot: _Slot[K], make: Callable[[], Future[K]], traffic: Traffic) -> Future[K]:
    """Make and store the kernel under its lock, unless another process has stored it meanwhile; release the lock."""
    kernel = slot.read_again()
    if kernel is not None:
        lock.release()
        return _hit(kernel, traffic)
    traffic.count("misses")
    stored: Future[K] = Future()

    def store(compiled: Future[K]) -> None:
        error = compiled.exception()
        if error is None:
            slot.store(compiled.result())
        lock.release()
        if error is not None:
            stored.set_exception(error)
        else:
            stored.set_result(compiled.result())

    try:
        compiling = make()
    except BaseException:
        lock.release()
        raise
    compiling.add_done_callback(store)
    return stored


def _wait(awaited: Future[K], slot: _Slot[K], make: Callable[[], Future[K]], traffic: Traffic) -> None:
    """Wait for the lock of the kernel, then read what its holder has stored, or make the kernel."""
    try:
        lock, start = slot.lock(), time.monotonic()
        while lock is None:
            if time.monotonic() - start > PATIENCE_S:
                log.warning("compiled without waiting any longer for another process: %s", slot.key)
                lock = Lock.none(Path(slot.key))
                break
            time.sleep(POLL_S)
            lock = slot.lock()
        kernel = _make_locked(lock, slot, make, traffic).result()
    except BaseException as error:  # raised again where the future is waited for
        with contextlib.suppress(Exception):
            awaited.set_exception(error)
    else:
        awaited.set_result(kernel)
