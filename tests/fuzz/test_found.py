"""Programs that failed once, as the fuzzer shrank them (``found/*.py``): they stay right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.fuzz.subject import examine

FOUND = sorted((Path(__file__).parent / "found").glob("*.py"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_WORKERS", "0")
    verdict = examine(path.read_text(encoding="utf-8"), "cpu" if not torch.cuda.is_available() else "cuda")
    assert verdict.status == "ok", f"{verdict.status} {verdict.where}\n{verdict.detail}"


def test_there_are_some() -> None:
    assert FOUND and os.environ["DYNAFUSE_STRICT"] == "1"
