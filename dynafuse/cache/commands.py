"""The subcommands of ``dynafuse cache``: count, check, remove, export and import entries of the kernel cache.

Worked example::

    $ dynafuse cache stats
    folder   ~/.cache/dynafuse/kernels
    entries  132: 114 triton, 8 measurement, 6 plan, 4 nvfuser
    size     3.1 MB of 1024 MB
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dynafuse.cache import archive
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Damaged

COMMANDS: Mapping[str, str] = {
    "stats": "where the cache is, how many entries it has and how large they are",
    "clear": "remove every entry",
    "verify": "check every entry; the exit status is 1 if one is damaged",
    "export": "write all entries to one file",
    "import": "take in the entries of an exported file",
}
WITH_FILE = ("export", "import")


def run(command: str, disk: Disk, file: Path | None = None, say: Callable[[str], None] = print) -> int:
    """Run one of COMMANDS.

    Args:
        command: Its name.
        disk: The cache.
        file: What the commands of WITH_FILE write or read; None for the others.
        say: Takes each line that is printed.

    Returns:
        The exit status: 1 if ``verify`` has come upon a damaged entry, else 0.

    Raises:
        CacheError: The file cannot be read or written.
    """
    if command == "export" and file is not None:
        say(f"{_entries(archive.export_entries(disk, file))} exported to {file}")
        return 0
    if command == "import" and file is not None:
        say(str(archive.import_entries(disk, file)))
        return 0
    return {"stats": _stats, "clear": _clear, "verify": _verify}[command](disk, say)


def _stats(disk: Disk, say: Callable[[str], None]) -> int:
    kinds: Counter[str] = Counter()
    size = 0
    for file, entry in disk.entries():
        kinds["damaged" if isinstance(entry, Damaged) else entry.kind] += 1
        size += file.bytes
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    say(f"folder   {disk.folder}")
    say(f"entries  {kinds.total()}" + (f": {counts}" if counts else ""))
    say(f"size     {size / 1e6:.1f} MB of {disk.limit >> 20} MB")
    return 0


def _clear(disk: Disk, say: Callable[[str], None]) -> int:
    say(f"{_entries(disk.clear())} removed")
    return 0


def _verify(disk: Disk, say: Callable[[str], None]) -> int:
    sound = damaged = 0
    for file, entry in disk.entries():
        if isinstance(entry, Damaged):
            damaged += 1
            say(f"{file.path}: {entry}")
        else:
            sound += 1
    advice = "; a damaged one is compiled anew when it is needed" if damaged else ""
    say(f"{_entries(sound)} sound, {damaged} damaged{advice}")
    return 1 if damaged else 0


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"
