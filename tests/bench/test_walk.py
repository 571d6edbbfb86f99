"""The page that walks a graph through the pipeline shows what the pipeline does now.

``REWRITE_GOLDENS=1`` writes it anew.
"""
from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import walk

PAGE = walk.ROOT / "docs" / "walk.md"
VERSION = re.compile(r"Made with torch ([\d.]+)")


def without_keys(page: str) -> str:
    """A page without keys, which change with every version of Triton."""
    return re.sub(r"\bkey [0-9a-f]{8}\b", "key", page)


def test_page_is_fresh() -> None:
    kept, rewrite = PAGE.read_text(encoding="utf-8"), os.environ.get("REWRITE_GOLDENS") == "1"
    (version,) = VERSION.findall(kept)
    if not rewrite and torch.__version__.split("+")[0] != version:
        pytest.skip(f"made with torch {version}, which may decompose otherwise")
    made = walk.page()
    if rewrite:
        PAGE.write_text(made, encoding="utf-8")
        return
    assert without_keys(kept) == without_keys(made), "write it anew with REWRITE_GOLDENS=1"


@pytest.mark.parametrize(("shown", "expected"), [
    ((), "a b c d e"),
    ((("b", "c"),), "… 1 line b c … 2 lines"),
    ((("a", "a"), ("d", "d")), "a … 2 lines d … 1 line"),
])
def test_what_is_left_out_is_said(shown: tuple[tuple[str, str], ...], expected: str) -> None:
    assert " ".join(walk._shortened("abcde", shown)) == expected
