"""Tests of the nvFuser lowering see the samples and representative regions of the tests beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real library where there is none."""
    if importlib.util.find_spec("nvfuser_direct") is None:
        for item in items:
            if item.get_closest_marker("nvfuser"):
                item.add_marker(pytest.mark.skip(reason="needs nvfuser_direct (make test-nvfuser)"))
