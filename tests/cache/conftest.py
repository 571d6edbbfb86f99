"""What tests of the cache share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache is on, and empty."""
    monkeypatch.setenv("DYNAFUSE_CACHE", "1")
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"
