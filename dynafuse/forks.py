"""What a process that was forked off may rely on: locks are free and threads are gone.

A fork copies locks as they are and no thread that would release them: whoever waits for one in the child waits forever.

Worked example: a ``DataLoader`` forks its workers while a thread compiles; a worker that calls a compiled function takes
:class:`Lock` of its own, and compiles what that thread had begun.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType


class Lock:
    """A lock that one thread may take several times, and that is free in a process that was forked off."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        _LOCKS.add(self)

    def renew(self) -> None:
        """Be free, whoever held it: for a process in which that thread does not exist."""
        self._held = threading.RLock()

    def __enter__(self) -> Lock:
        self._held.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(RuntimeError):  # this is the child of a fork inside the block: nobody holds it
            self._held.release()


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def in_child(renew: Callable[[], object]) -> None:
    """Have something called in every process that is forked off from now on."""
    os.register_at_fork(after_in_child=renew)


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


in_child(_renew_all)
