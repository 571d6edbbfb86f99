"""Digests of what writes kernels and plans: a changed checkout under an unchanged version must not find its old ones."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
WRITERS = ("ir", "ops", "lowering", "cache", "runtime")
"""Files and folders of the package that decide what a kernel's text and its launches are, and how an entry is read."""

PLANNERS = ("ir", "ops", "cost", "partition", "passes", "cache")
"""Those that decide what a plan is, and how its entry is read."""


@cache
def digest(parts: tuple[str, ...] = WRITERS) -> str:
    """Of the sources of this process, as they were when it first asked."""
    return digest_of(ROOT, parts)


def digest_of(root: Path, parts: tuple[str, ...] = WRITERS) -> str:
    """Of the sources in some files and folders of a package folder: their names and their content."""
    made = hashlib.sha256()
    for part in parts:
        path = root / part
        for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content = source.read_bytes()
            made.update(f"{source.relative_to(root).as_posix()} {len(content)}\n".encode())
            made.update(content)
    return made.hexdigest()
