"""The cache on disk, of kernels, plans and measurements: one file per entry, in a folder that only its user can enter.

Nothing here raises for a disk's failures: a damaged, truncated or foreign entry is a miss, with a line of log; with a full
disk, a read-only folder or another user's folder the cache stores nothing, with one line of log.

Worked example::

    disk = Disk(Path("~/.cache/dynafuse/kernels").expanduser(), 1 << 30)
    disk.write(Entry("triton", "5f0c", {"shared": 0}, {"source": b"..."}))
    disk.read("5f0c")            # the entry, also in other processes
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
"""Age of partial files from which on their writer counts as dead."""

MOST_BYTES = 1 << 28
"""The largest size of an entry."""

TRIMMED_SHARE = 0.9
"""Share of the limit to which entries are removed, so that not every write has to remove some."""


@dataclass(frozen=True)
class EntryFile:
    """The file of an entry."""

    key: str
    path: Path
    bytes: int
    used: float  # when it was last read or written, in seconds since 1970


@dataclass
class Disk:
    """A folder of entries by key, of at most ``limit`` bytes. ``seen`` is called with every packed entry read or written."""

    folder: Path
    limit: int
    seen: Callable[[str, bytes], None] = lambda key, packed: None
    _logged: set[str] = field(default_factory=set, init=False, repr=False)
    _size: int = field(default=-1, init=False, repr=False)  # in bytes, a lower bound; -1 until the folder is read
    _guard: Guard = field(default_factory=Guard, init=False, repr=False)

    def path(self, key: str) -> Path:
        """Return the path of a key's entry, whether there is one or not.

        Raises:
            ValueError: The key is malformed, and could name a file elsewhere.
        """
        if not KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key")
        return self.folder / key

    # ------------------------------------------------------------------ one entry

    def read(self, key: str) -> Entry | None:
        """Return the entry of a key, or None."""
        path = self.path(key)
        try:
            if not self._is_ours():
                return None
            packed = _content(path)
            entry = unpack(packed, key)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_once("read", f"cannot read {path}: {error}")
            return None
        except Damaged as error:
            log.warning("ignored %s in the kernel cache: %s", path, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used entries are removed first
        self.seen(key, packed)
        return entry

    def has(self, key: str) -> bool:
        """Return whether a key has an entry; only :meth:`read` checks that it is undamaged."""
        return os.path.isfile(self.path(key))

    def write(self, entry: Entry) -> bool:
        """Write an entry; return whether that succeeded."""
        return self.put(entry.key, pack(entry))

    def put(self, key: str, packed: bytes) -> bool:
        """Write an entry that :func:`pack` has packed; return whether that succeeded. Readers see all of it or nothing."""
        path = self.path(key)
        try:
            if len(packed) > min(self.limit, MOST_BYTES) or not self._ensure_folder():
                return False
            _replace(path, packed)
        except OSError as error:
            self._log_once("write", f"cannot write {self.folder}: {error}; kernels are compiled anew by every process")
            return False
        self.seen(key, packed)
        self._count(len(packed))
        return True

    def lock(self, key: str) -> Lock | None:
        """Return the lock of a key, or None while another holds it; where files cannot be locked, a lock without effect."""
        path = self.path(key).with_name(key + LOCK)
        try:
            return Lock.take(path) if self._ensure_folder() else Lock.none(path)
        except OSError as error:
            self._log_once("write", f"cannot write {self.folder}: {error}; kernels are compiled anew by every process")
            return Lock.none(path)

    # ------------------------------------------------------------------ all entries

    def files(self) -> list[EntryFile]:
        """Return the files of all entries, the least recently used first."""
        files = (_entry_file(path) for path in self._paths() if KEY.fullmatch(path.name))
        return sorted((file for file in files if file is not None), key=lambda file: (file.used, file.key))

    def entries(self) -> Iterator[tuple[EntryFile, Entry | Damaged]]:
        """Yield all entries with their files, damaged ones as the error. Does not count as a use of them."""
        for file in self.files():
            try:
                yield file, unpack(_content(file.path), file.key)
            except FileNotFoundError:
                continue
            except (OSError, Damaged) as error:
                yield file, error if isinstance(error, Damaged) else Damaged(str(error))

    def clear(self) -> int:
        """Remove all entries, and the files of interrupted writes; return the number of entries."""
        count = 0
        for path in list(self._paths()):
            is_entry = bool(KEY.fullmatch(path.name))
            if is_entry or path.name.endswith((PARTIAL, LOCK)):
                count += _remove(path) and is_entry
        with self._guard:
            self._size = -1
        return count

    def trim(self) -> int:
        """Remove the least recently used entries, if the limit is exceeded; return how many."""
        files = self.files()
        size, count = sum(file.bytes for file in files), 0
        goal = self.limit if size <= self.limit else int(self.limit * TRIMMED_SHARE)
        for file in files:
            if size <= goal:
                break
            size, count = size - file.bytes, count + _remove(file.path)
        with self._guard:
            self._size = self._measured()
        if count:
            log.info("removed %d entries of the kernel cache: it may have %d MB", count, self.limit >> 20)
        return count

    # ------------------------------------------------------------------ the folder

    def _is_ours(self) -> bool:
        """Return whether the folder belongs to this user. Raises OSError if it does not exist."""
        owner = os.stat(self.folder).st_uid
        if owner == os.getuid():
            return True
        self._log_once("owner", f"not used: {self.folder} belongs to another user (uid {owner})")
        return False

    def _ensure_folder(self) -> bool:
        """Create the folder if it does not exist and close it to others; return whether it belongs to this user."""
        try:
            ours = self._is_ours()
        except FileNotFoundError:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            ours = self._is_ours()
        if ours and os.stat(self.folder).st_mode & 0o077:
            os.chmod(self.folder, 0o700)
        return ours

    def _paths(self) -> Iterator[Path]:
        try:
            with os.scandir(self.folder) as directory:
                yield from [Path(item.path) for item in directory]
        except OSError:
            return

    def _count(self, size: int) -> None:
        """Count the bytes of a write, and trim the folder if it may be full. Other processes' writes are not counted."""
        with self._guard:
            self._size = self._measured() if self._size < 0 else self._size + size
            full = self._size > self.limit
        if full:
            self.trim()

    def _measured(self) -> int:
        """Return the bytes of all entries, and remove what dead writers have left behind: one look at each file."""
        total = 0
        with contextlib.suppress(OSError), os.scandir(self.folder) as directory:
            for item in directory:
                if KEY.fullmatch(item.name):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        total += item.stat(follow_symlinks=False).st_size
                elif item.name.endswith(PARTIAL):
                    _remove_stale(Path(item.path))
        return total

    def _log_once(self, kind: str, text: str) -> None:
        """Log a failure if it is the first of its kind."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("kernel cache: %s", text)


def _content(path: Path) -> bytes:
    """Read a file. Raises OSError for one that is not plain, not this user's, or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path.name} is no plain file")
        if status.st_uid != os.getuid():
            raise OSError(f"{path.name} belongs to another user (uid {status.st_uid})")
        if status.st_size > MOST_BYTES:
            raise OSError(f"{path.name} has {status.st_size} bytes")
        return file.read()


def _replace(path: Path, content: bytes) -> None:
    """Write a file that only this user can read, atomically."""
    descriptor, partial = tempfile.mkstemp(PARTIAL, f".{path.name[:16]}-", path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _entry_file(path: Path) -> EntryFile | None:
    """Return an entry's file; None if it has been removed meanwhile."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return EntryFile(path.name, path, status.st_size, status.st_mtime)


def _remove(path: Path) -> bool:
    """Remove a file; return whether that succeeded."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove a partial file whose writer counts as dead."""
    with contextlib.suppress(OSError):  # the writer has ended meanwhile
        if time.time() - path.lstat().st_mtime > STALE_S:
            _remove(path)
