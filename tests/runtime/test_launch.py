"""Launches bound to a device: what torch's launcher is given, and how often."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynafuse.ir import Launch
from dynafuse.runtime.launch import Kernel

LAUNCH = Launch("k", (("in0", "*bf16"), ("out0", "*fp32"), ("s0", "i64")), (4, 1, 1), (("XBLOCK", 64),), warps=8)
CUBIN = b"\x7fELF of k"


class Api:
    """torch's launcher, without a GPU: keeps what it is asked for."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def _load_kernel(self, path: str, name: str, shared: int, device: int) -> tuple[int, int, int]:
        self.loaded.append((Path(path).read_bytes(), name, shared, device))
        return 1000 + device, 32, 0

    def _launch_kernel(self, *given: Any) -> None:
        self.launched.append(given)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", found, raising=False)
    return found


def kernel(**scratch: int) -> Kernel:
    """A kernel of one launch, compiled by a Triton that passes pointers to scratch memory of these sizes."""
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=512, **scratch), asm={"cubin": CUBIN})
    return Kernel("key", "", (LAUNCH,), (), (compiled,), False)


@pytest.mark.parametrize(("scratch", "unused"), [({}, 0), ({"global_scratch_size": 0, "profile_scratch_size": 0}, 2)])
def test_a_launch_is_one_call_with_the_types_of_its_arguments(api: Api, scratch: dict[str, int], unused: int) -> None:
    (launch,) = kernel(**scratch).bound(1)
    launch(77, 4, 1, 1, "in", "out", 5)
    assert api.loaded == [(CUBIN, "k", 512, 1)]
    assert api.launched == [(1001, 4, 1, 1, 8, 512, "OOl" + "O" * unused, ("in", "out", 5) + (None,) * unused, 77)]


def test_a_binary_is_loaded_once_per_device(api: Api) -> None:
    bound = kernel()
    assert bound.bound(0) is bound.bound(0) and bound.bound(1) is not bound.bound(0)
    assert [device for *_, device in api.loaded] == [0, 1]
