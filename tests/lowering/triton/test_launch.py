"""Launches bound to a device: what torch's launcher is given, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynafuse.errors import IndexOutOfRange
from dynafuse.ir import Launch
from dynafuse.lowering.triton.header import PLACE_WIDTH
from dynafuse.lowering.triton.launch import Kernel, located

LAUNCH = Launch("k", (("in0", "*bf16"), ("out0", "*fp32"), ("s0", "i64")), (4, 1, 1), (("XBLOCK", 64),), warps=8)
CUBIN = b"\x7fELF of k"


class Api:
    """torch's launcher, without a GPU: keeps what it is asked for."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.current = 0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """Make a device current."""
        before, self.current = self.current, index
        yield
        self.current = before

    def _load_kernel(self, path: str, name: str, shared: int, device: int) -> tuple[int, int, int]:
        assert device == self.current, "the driver loads a binary for the device that is current"
        self.loaded.append((Path(path).read_bytes(), name, shared, device))
        return 1000 + device, 32, 0

    def _launch_kernel(self, *given: Any) -> None:
        self.launched.append(given)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    found = Api()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", found, raising=False)
    monkeypatch.setattr(torch.cuda, "device", found.device)
    return found


def kernel(arch: int = 80, **scratch: int) -> Kernel:
    """A kernel of one launch, compiled by a Triton that passes pointers to scratch memory of these sizes."""
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=512, target=SimpleNamespace(arch=arch), **scratch), asm={"cubin": CUBIN})
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


# ---------------------------------------------------------------------- checks of indices

TOLD = b"index out of range: aten.gather.default: 0 <= index < 9"
ASSERTING = b"\x7fELF" + TOLD + b" " * PLACE_WIDTH + b"\0kernel.py\0"


def asserting() -> Kernel:
    """A kernel that checks indices."""
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=0, target=SimpleNamespace(arch=80)), asm={"cubin": ASSERTING})
    return Kernel("key", "", (replace(LAUNCH, asserts=True),), (), (compiled,), False)


@pytest.mark.parametrize("place", ["", "model.py:12", "a.py:1; b.py:2", "/long" * PLACE_WIDTH + "/model.py:12"])
def test_an_assert_names_the_users_line_in_the_room_that_it_has(place: str) -> None:
    made = located(ASSERTING, {"aten.gather.default": place, "aten.index.Tensor": "other.py:1"})
    message, _, rest = made.removeprefix(b"\x7fELF").partition(b"\0")
    assert len(made) == len(ASSERTING) and rest.lstrip(b"\0") == b"kernel.py\0"
    assert message.startswith(TOLD) and len(message) <= len(TOLD) + PLACE_WIDTH
    assert message.endswith(place[-12:].encode()) and b"other" not in message


def test_a_binary_with_asserts_is_loaded_once_per_place(api: Api) -> None:
    bound = asserting()
    lines = [{"aten.gather.default": f"model.py:{line}"} for line in (1, 2)]
    first, second, again = (bound.bound(0, places) for places in (*lines, dict(lines[0])))
    assert first is again and second is not first
    assert [b"at model.py:1\0" in api.loaded[0][0], b"at model.py:2\0" in api.loaded[1][0]] == [True, True]


def test_places_do_not_matter_to_a_binary_without_asserts(api: Api) -> None:
    bound = kernel()
    assert bound.bound(0, {"aten.gather.default": "a.py:1"}) is bound.bound(0, {"aten.gather.default": "b.py:1"})


@pytest.mark.parametrize("cause", [IndexOutOfRange(TOLD.decode()), ValueError("another")])
def test_an_interpreted_kernel_raises_with_the_users_line(cause: Exception) -> None:
    class Function:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def run(*arguments: Any, **constants: Any) -> None:
                raise RuntimeError("interpreter") from cause
            return run

    (launch,) = Kernel("key", "", (LAUNCH,), (), (Function(),), True).bound(None, {"aten.gather.default": "model.py:12"})
    expected = (IndexOutOfRange, "< 9, at model.py:12$") if isinstance(cause, IndexError) else (RuntimeError, "^interpreter$")
    with pytest.raises(expected[0], match=expected[1]):
        launch(None, 1, 1, 1)
