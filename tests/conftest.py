"""Settings for every test: strict, reproducible, and in Triton's interpreter where there is no CUDA device.

    pytest                # everything that needs no GPU
    pytest -m gpu         # what needs one

No test sees the user's cache: every session has a folder of its own, and no kernel is kept in it unless a test turns that on
(`DYNAFUSE_CACHE=1 pytest` turns it on for all).

Triton decides between compiler and interpreter when a kernel is decorated, its own library's kernels included, so the
variable has to be there before Triton is imported.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["DYNAFUSE_STRICT"] = "1"
os.environ.setdefault("DYNAFUSE_CACHE", "0")
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.support import interpreter, quick_dynamo

HAS_CUDA = torch.cuda.is_available()
if HAS_CUDA:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter.install()
    # torch.manual_seed has them keep each seed for devices that may be there later, with the traceback of where it was given.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda _: None

# pytest captures what does not propagate by a handler of its own, for which torch would write every trace, as JSON.
logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What is there now stays: looking through it for garbage again and again costs a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)


@pytest.fixture(autouse=True, scope="module")
def _what_stays() -> Iterator[None]:
    """So does what a file of tests leaves in caches, of torch's above all: it is never looked through again."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache folder for this session alone, that of the processes it starts included."""
    os.environ["DYNAFUSE_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Same random numbers in every test, and no graphs compiled by the test before."""
    torch.manual_seed(0)
    quick_dynamo.install()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
