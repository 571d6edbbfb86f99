"""The kernel cache on disk: one file per entry, in a folder that only its user can enter.

Nothing here raises for what a disk can do: a damaged, cut or foreign entry is a miss with a line of log; a full disk, a
read-only folder or another user's folder make a cache that holds nothing, with one line of log.

Worked example::

    disk = Disk(Path("~/.cache/dynafuse/kernels").expanduser(), 1 << 30)
    disk.write(Entry("triton", "5f0c", {"shared": 0}, {"source": b"..."}))
    disk.read("5f0c")            # the entry; None in a process that cannot read it
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dynafuse.cache.entry import Damaged, Entry, pack, unpack
from dynafuse.cache.lock import Lock
from dynafuse.forks import Lock as Guard

log = logging.getLogger(__name__)

KERNELS = "kernels"
"""The folder of entries, in the cache folder."""

KEY = re.compile(r"[0-9a-f]{4,64}")
PARTIAL, LOCK = ".partial", ".lock"
STALE_S = 3600.0
"""Partial files that are older belong to nobody any more."""

MOST_BYTES = 1 << 28
"""No entry is larger."""

KEPT = 0.9
"""What is left of the limit when entries have been removed, so that not every write has to remove some."""


@dataclass(frozen=True)
class Held:
    """An entry's file."""

    key: str
    path: Path
    bytes: int
    used: float  # when it was last read or written, in seconds since 1970


@dataclass
class Disk:
    """Entries by key. ``limit`` is in bytes; ``seen`` is told of every entry that is read or written, as packed."""

    folder: Path
    limit: int
    seen: Callable[[str, bytes], None] = lambda key, packed: None
    _told: set[str] = field(default_factory=set, init=False, repr=False)
    _size: int = field(default=-1, init=False, repr=False)  # as far as this process knows; -1: not looked yet
    _guard: Guard = field(default_factory=Guard, init=False, repr=False)

    def path(self, key: str) -> Path:
        """Where a key's entry is. Raises ValueError for what is no key."""
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key")
        return self.folder / key

    # ------------------------------------------------------------------ one entry

    def read(self, key: str) -> Entry | None:
        """The entry under a key, or None."""
        path = self.path(key)
        try:
            if not self._is_ours():
                return None
            packed = _content(path)
            entry = unpack(packed, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell("read", f"cannot read {path}: {error}")
            return None
        except Damaged as error:
            log.warning("ignored %s in the kernel cache: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used go first
        self.seen(key, packed)
        return entry

    def has(self, key: str) -> bool:
        """Whether there is an entry under a key; whether it is sound, only reading it can tell."""
        return os.path.isfile(self.path(key))

    def write(self, entry: Entry) -> bool:
        """Keep an entry; whether it is kept."""
        return self.put(entry.key, pack(entry))

    def put(self, key: str, packed: bytes) -> bool:
        """Keep an entry as :func:`pack` made it. A reader sees it as a whole or not at all."""
        path = self.path(key)
        try:
            if len(packed) > min(self.limit, MOST_BYTES) or not self._made():
                return False
            _replace(path, packed)
        except OSError as error:
            self._tell("write", f"cannot write {self.folder}: {error}; kernels are compiled anew by every process")
            return False
        self.seen(key, packed)
        self._grown(len(packed))
        return True

    def lock(self, key: str) -> Lock | None:
        """The lock of a key, None while another holds it. Where nothing can be locked, a lock that locks nothing."""
        path = self.path(key).with_name(key + LOCK)
        try:
            return Lock.take(path) if self._made() else Lock.none(path)
        except OSError as error:
            self._tell("write", f"cannot write {self.folder}: {error}; kernels are compiled anew by every process")
            return Lock.none(path)

    # ------------------------------------------------------------------ all entries

    def held(self) -> list[Held]:
        """All entries, the least recently used first."""
        found = (_held(path) for path in self._files() if KEY.fullmatch(path.name))
        return sorted((one for one in found if one is not None), key=lambda one: (one.used, one.key))

    def entries(self) -> Iterator[tuple[Held, Entry | Damaged]]:
        """All entries with their content, or with what is wrong with them; nothing counts as used by this."""
        for one in self.held():
            try:
                yield one, unpack(_content(one.path), one.key)
            except FileNotFoundError:
                continue
            except (OSError, Damaged) as error:
                yield one, error if isinstance(error, Damaged) else Damaged(str(error))

    def clear(self) -> int:
        """Remove every entry, and what is left of interrupted writes; how many entries there were."""
        count = 0
        for path in list(self._files()):
            ours = bool(KEY.fullmatch(path.name))
            if ours or path.name.endswith((PARTIAL, LOCK)):
                count += _removed(path) and ours
        with self._guard:
            self._size = -1
        return count

    def trim(self) -> int:
        """Remove the least recently used entries while there is more than the limit; how many."""
        held = self.held()
        size, count = sum(one.bytes for one in held), 0
        goal = self.limit if size <= self.limit else int(self.limit * KEPT)
        for one in held:
            if size <= goal:
                break
            size, count = size - one.bytes, count + _removed(one.path)
        for path in list(self._files()):
            if path.name.endswith(PARTIAL) and _age(path) > STALE_S:
                _removed(path)
        with self._guard:
            self._size = size
        if count:
            log.info("removed %d entries of the kernel cache: it may have %d MB", count, self.limit >> 20)
        return count

    # ------------------------------------------------------------------ the folder

    def _is_ours(self) -> bool:
        """Whether the folder is there and this user's own. Raises OSError for one that is not there."""
        found = os.stat(self.folder)
        if found.st_uid == os.getuid():
            return True
        self._tell("owner", f"not used: {self.folder} belongs to another user (uid {found.st_uid})")
        return False

    def _made(self) -> bool:
        """Whether the folder is this user's own, made if it was not there, and closed to others."""
        try:
            ours = self._is_ours()
        except FileNotFoundError:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            ours = self._is_ours()
        if ours and os.stat(self.folder).st_mode & 0o077:
            os.chmod(self.folder, 0o700)
        return ours

    def _files(self) -> Iterator[Path]:
        try:
            with os.scandir(self.folder) as found:
                yield from [Path(one.path) for one in found]
        except OSError:
            return

    def _grown(self, size: int) -> None:
        """Count what was written. Other processes write as well, so what is known is a lower bound."""
        with self._guard:
            unknown, self._size = self._size < 0, self._size + size
            full = unknown or self._size > self.limit
        if full:
            self.trim()

    def _tell(self, what: str, text: str) -> None:
        """Log what keeps the cache from working, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("kernel cache: %s", text)


def _content(path: Path) -> bytes:
    """A file's bytes. Raises OSError for a file that is not plain, not this user's, or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path.name} is no plain file")
        if found.st_uid != os.getuid():
            raise OSError(f"{path.name} belongs to another user (uid {found.st_uid})")
        if found.st_size > MOST_BYTES:
            raise OSError(f"{path.name} has {found.st_size} bytes")
        return file.read()


def _replace(path: Path, content: bytes) -> None:
    """Write a file that only the user can read, as a whole."""
    descriptor, partial = tempfile.mkstemp(PARTIAL, f".{path.name[:16]}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _held(path: Path) -> Held | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return Held(path.name, path, found.st_size, found.st_mtime)


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0
