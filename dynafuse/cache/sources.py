"""Digests of the sources that make kernels and plans: a changed checkout must not read what the old one has stored.

Worked example: ``digest()`` enters the key of every kernel on disk, ``digest(PLANNERS)`` that of every plan.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITERS = ("ir", "ops", "lowering", "cache", "runtime")
"""Folders of the package that decide a kernel's text and launches, and how its entry is read."""

PLANNERS = ("ir", "ops", "cost", "partition", "passes", "cache")
"""Folders of the package that decide a plan, and how its entry is read."""


@cache
def digest(parts: tuple[str, ...] = WRITERS) -> str:
    """Return the digest of some parts of this package, as they were at the first call."""
    return digest_of(ROOT, parts)


def digest_of(root: Path, parts: tuple[str, ...] = WRITERS) -> str:
    """Return the digest of some files and folders below ``root``: of the names and contents of all Python files."""
    sha = hashlib.sha256()
    for part in parts:
        path = root / part
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = source.read_bytes()
            sha.update(f"{source.relative_to(root).as_posix()} {len(content)}\n".encode())
            sha.update(content)
    return sha.hexdigest()
