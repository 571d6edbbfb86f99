"""A graph's function runs with the device current that its tensors are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.fx import Graph, GraphModule

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


@pytest.mark.parametrize(("where", "expected"), [(["cuda:1", "cuda:1"], 1), (["cuda", "cuda"], 0), (["cuda:0", "cuda:1"], None),
                                                 (["cpu", "cpu"], None), (["cpu", "cuda:1"], None), ([], None)])
def test_the_device_of_a_graph(where: list[str], expected: int | None) -> None:
    from torch._subclasses import FakeTensorMode

    graph = Graph()
    with FakeTensorMode():
        for k, device in enumerate(where):
            graph.placeholder(f"x{k}").meta["val"] = torch.empty(3, device=device)
    graph.output(())
    assert devices.only_cuda_device(GraphModule(torch.nn.Module(), graph)) == expected
