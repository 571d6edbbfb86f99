"""All entries of a cache as one file, and back: an entry whose blobs are entries, with the checks of one.

Worked example: ``export(disk, Path("kernels.dynafuse"))`` on one machine, ``take_in(disk, Path("kernels.dynafuse"))`` on
another of the same GPU and versions; entries for anything else are taken in as well, and never asked for.
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
class Taken:
    """What became of an archive's entries: how many were ``written``, were ``there``, could ``not`` be used or kept."""

    written: int
    there: int
    unusable: int

    def __str__(self) -> str:
        return f"{self.written} taken in, {self.there} were there, {self.unusable} could not be used or kept"


def export(disk: Disk, path: Path) -> int:
    """Write all undamaged entries to a file; how many. Raises CacheError."""
    blobs = {held.key: pack(entry) for held, entry in disk.entries() if isinstance(entry, Entry)}
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


def take_in(disk: Disk, path: Path) -> Taken:
    """Keep the entries of an exported file that are not there yet. Raises CacheError for a file that is none."""
    try:
        archive = unpack(path.read_bytes(), "")
    except OSError as error:
        raise CacheError(f"cannot import {path}: {error}") from None
    except Damaged as error:
        raise CacheError(f"cannot import {path}: {error}") from None
    if archive.kind != "archive":
        raise CacheError(f"cannot import {path}: it is an entry, not an exported cache")
    there = {held.key for held, entry in disk.entries() if isinstance(entry, Entry)}
    new = {key: packed for key, packed in archive.blobs.items() if key not in there}
    written = sum(_taken(disk, key, packed) for key, packed in new.items())
    return Taken(written, len(archive.blobs) - len(new), len(new) - written)


def _taken(disk: Disk, key: str, packed: bytes) -> bool:
    """Keep one entry; whether it is sound and kept."""
    if not KEY.fullmatch(key):
        return False
    try:
        unpack(packed, key)
    except Damaged:
        return False
    return disk.put(key, packed)
