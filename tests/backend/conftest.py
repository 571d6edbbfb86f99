"""The backend against eager at large. It still finds faults, so it is run by name: ``pytest -m differential``."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder that is not for a GPU."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.differential)
