"""Tests of the nvFuser lowering run without the library where they can, and are skipped where they cannot."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the real library where there is none."""
    if importlib.util.find_spec("nvfuser_direct") is None:
        for item in items:
            if item.get_closest_marker("nvfuser"):
                item.add_marker(pytest.mark.skip(reason="needs nvfuser_direct (make test-nvfuser)"))
