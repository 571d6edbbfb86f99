"""Locks between processes, each on a file of its own, which are released when their process ends, however it ends.

Worked example::

    lock = Lock.take(Path("5f0c.lock"))      # None: another process, or another thread, has it
    if lock is not None:
        try: ...
        finally: lock.release()              # from any thread

``flock`` belongs to the open file, not to a thread: any thread may release it. Releasing removes the file, so a lock
counts only if its file still has its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

from dynafuse.forks import in_child

_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


@dataclass(eq=False)
class Lock:
    """A lock that this process holds; with ``descriptor`` -1 one without effect."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """Take the lock; return None while somebody holds it.

        Raises:
            OSError: Files cannot be locked there.
        """
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _names(path, descriptor):
                    lock = cls(path, descriptor)
                    _HELD.add(lock)
                    return lock
                os.close(descriptor)  # its holder removed it before we locked it: the path names another file now, or none
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise

    @classmethod
    def none(cls, path: Path) -> Lock:
        """Return a lock without effect, for where files cannot be locked."""
        return cls(path, -1)

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # while it is held: nobody else can have locked this file
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of a fork may still have the descriptor
        os.close(descriptor)


def _let_go() -> None:
    """Give up what a forked process has inherited of its parent's locks: it would hold them after the parent's end."""
    for lock in list(_HELD):
        descriptor, lock.descriptor = lock.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


in_child(_let_go)


def _names(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))
