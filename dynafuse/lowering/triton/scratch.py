"""Folders of files that live for a moment: in memory where there is room, else on disk.

Compiling a kernel writes, moves, reads and removes some thirty files, none of which anybody needs afterwards.

Worked example::

    with scratch_folder() as folder:         # /dev/shm/dynafuse-x7f2, which is gone afterwards
        Path(folder, "kernel.cubin").write_bytes(binary)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
LEAST_FREE = 32 << 20  # bytes that must be free there; the files of a large kernel are some megabytes


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, which is removed when its context ends."""
    return tempfile.TemporaryDirectory(prefix="dynafuse-", dir=_place())


def _place() -> Path | None:
    """Return where such folders are made; None for where temporary files are by default."""
    with contextlib.suppress(OSError):
        if os.access(MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(MEMORY).free >= LEAST_FREE:
            return MEMORY
    return None
