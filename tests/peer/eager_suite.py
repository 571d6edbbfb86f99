"""PyTorch's tests of eager, each of them compiled: a plugin of pytest.

Dynamo compiles the code of every test, as with PyTorch's own ``PYTORCH_TEST_WITH_INDUCTOR``, but by ``PEER_BACKEND``: dynafuse
unless it is set. Some tests fail however they are compiled, so that what says something is which of them Inductor passes.

Worked example, of PyTorch's ``test`` folder, 200 tests of each file for GPUs::

    export PYTHONPATH=/path/to/dynafuse PEER_LIMIT=200 DYNAFUSE_STRICT=1
    python -m pytest -p tests.peer.eager_suite --noconftest -n 16 -k cuda test_torch.py test_reductions.py
    PEER_BACKEND=inductor python -m pytest -p tests.peer.eager_suite --noconftest --lf test_torch.py test_reductions.py
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ["PYTORCH_TEST_WITH_INDUCTOR"] = "1"  # which torch reads when it is imported

import pytest
import torch
from torch.testing._internal import common_utils

import dynafuse.backend  # noqa: F401 (registers it)
from tests.peer import shims


def pytest_configure() -> None:
    """Have all tests compiled by the backend."""
    shims.install()
    backend = os.environ.get("PEER_BACKEND", "dynafuse")

    def compiled(_: Any, run: Callable[..., Any], __: str, nopython: bool) -> Any:
        return torch._dynamo.optimize(backend, nopython=nopython)(run)

    common_utils.TestCase.compile_fn = compiled


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep ``PEER_LIMIT`` tests of each file, picked by their names: every process picks the same."""
    limit = int(os.environ.get("PEER_LIMIT", "0"))
    kept: Counter[str] = Counter()

    def is_kept(item: pytest.Item) -> bool:
        kept[item.location[0]] += 1
        return not limit or kept[item.location[0]] <= limit

    items[:] = filter(is_kept, sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).hexdigest()))
