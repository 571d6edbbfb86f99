"""A graph's function runs with the device current that its tensors are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynafuse.runtime import devices


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The current device, as torch would change it: device 0 at first."""
    now = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        now.append(index)
        yield
        now.pop()

    monkeypatch.setattr(devices, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    yield now


@pytest.mark.parametrize("index", [0, 1])
def test_a_function_runs_on_its_device(made_current: list[int], index: int) -> None:
    call = devices.on_device(lambda args: (*args, made_current[-1]), index)
    assert call([7]) == (7, index) and call._boxed_call  # type: ignore[attr-defined]
    assert made_current == [0], "the caller's device is current again"


@pytest.mark.parametrize(("where", "expected"), [(["cuda:1", "cuda:1"], (1,)), (["cuda", "cuda"], (0,)), (["cpu", "cuda:1"], (1,)),
                                                 (["cuda:1", "cuda:0"], (0, 1)), (["cpu", "cpu"], ()), ([], ())])
def test_the_devices_of_a_plan(where: list[str], expected: tuple[int, ...]) -> None:
    """Those of its kernels: a number on the CPU, or what is copied elsewhere by an eager op, does not count."""
    facts = {name: SimpleNamespace(tensor=SimpleNamespace(device=torch.device(name))) for name in where}
    regions = [SimpleNamespace(outputs=(name,)) for name in where]
    plan: Any = SimpleNamespace(annotated=SimpleNamespace(facts=facts), regions=regions)
    assert devices.cuda_devices(plan) == expected
