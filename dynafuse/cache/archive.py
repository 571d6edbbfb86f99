"""Export of a cache to one file, and import: the file is an entry whose blobs are entries, checked like any other.

Worked example: ``export_entries(disk, Path("kernels.dynafuse"))`` on one machine, and
``import_entries(disk, Path("kernels.dynafuse"))`` on another with the same GPU and versions. Entries for other machines are
imported too, and never read.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynafuse.cache.disk import KEY, Disk
from dynafuse.cache.entry import Damaged, Entry, pack, unpack
from dynafuse.errors import CacheError


@dataclass(frozen=True)
class Imported:
    """Counts of an archive's entries: ``written`` ones, those ``present`` before, and damaged or unwritable ones."""

    written: int
    present: int
    unusable: int

    def __str__(self) -> str:
        return f"{self.written} taken in, {self.present} were there, {self.unusable} could not be used or kept"


def export_entries(disk: Disk, path: Path) -> int:
    """Write all undamaged entries to a file; return how many.

    Args:
        disk: The cache.
        path: The file. It is replaced only once all is written, by way of one beside it.

    Raises:
        CacheError: The file cannot be written.
    """
    blobs = {file.key: pack(entry) for file, entry in disk.entries() if isinstance(entry, Entry)}
    packed = pack(Entry("archive", "", {}, blobs))
    try:
        descriptor, partial = tempfile.mkstemp(".partial", f".{path.name[:64]}-", path.absolute().parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(packed)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
    except OSError as error:
        raise CacheError(f"cannot export to {path}: {error}") from None
    return len(blobs)


def import_entries(disk: Disk, path: Path) -> Imported:
    """Write the entries of an exported file that the cache lacks; one that is damaged there counts as lacking.

    Args:
        disk: The cache.
        path: A file that :func:`export_entries` wrote.

    Raises:
        CacheError: The file cannot be read, is damaged, or is no exported cache.
    """
    try:
        archive = unpack(path.read_bytes(), "")
    except (OSError, Damaged) as error:
        raise CacheError(f"cannot import {path}: {error}") from None
    if archive.kind != "archive":
        raise CacheError(f"cannot import {path}: it is an entry, not an exported cache")
    present = {file.key for file, entry in disk.entries() if isinstance(entry, Entry)}
    new = {key: packed for key, packed in archive.blobs.items() if key not in present}
    written = sum(_write(disk, key, packed) for key, packed in new.items())
    return Imported(written, len(archive.blobs) - len(new), len(new) - written)


def _write(disk: Disk, key: str, packed: bytes) -> bool:
    """Write one entry if it is undamaged; return whether it was written."""
    if not KEY.fullmatch(key):
        return False
    try:
        unpack(packed, key)
    except Damaged:
        return False
    return disk.put(key, packed)
