"""A lock between processes, on a file of its own: it ends with the process that holds it, however that ends.

Worked example::

    held = Lock.take(Path("5f0c.lock"))      # None: another process, or another thread, has it
    if held is not None:
        try: ...
        finally: held.release()              # from any thread

``flock`` belongs to the open file, not to a thread: whoever compiled may release it. The file goes with its lock, so a
lock counts only if its file still has its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Lock:
    """A lock that is held, or one that could not be had and locks nothing (``descriptor`` -1)."""

    path: Path
    descriptor: int

    @classmethod
    def take(cls, path: Path) -> Lock | None:
        """The lock, or None while somebody holds it. Raises OSError where files cannot be locked."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(path, descriptor):
                    return cls(path, descriptor)
                os.close(descriptor)  # its holder has removed it meanwhile: the name is another file's
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise

    @classmethod
    def none(cls, path: Path) -> Lock:
        """A lock that locks nothing, for where there can be none."""
        return cls(path, -1)

    def release(self) -> None:
        """Let others have it. Once is enough; more does no harm."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # while it is held: nobody else can have locked this file
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of a fork may still have the descriptor
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    """Whether the path still names the open file."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))
