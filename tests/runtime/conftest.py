"""A device whose graphs are captured, with what was recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from dynafuse import backend
from dynafuse.runtime.capture import calls
from tests.support.differential import compiled
from tests.support.fake_recorder import FakeRecorder, recording_on_cpu


@dataclass
class Machine:
    """A device whose graphs are captured."""

    device: str
    replays: dict[str, int] = field(default_factory=dict)  # by kind of graph
    recordings: int = 0
    taken: int = 0  # saved tensors that a backward takes the memory of
    functions: list[calls.Captured] = field(default_factory=list)  # of which there are recordings
    fake: FakeRecorder | None = None
    captures: list[str] = field(default_factory=list)  # what the report says of each graph

    def compile(self, fn: Any, capture: str = "always", **more: Any) -> Any:
        """Compile a function whose graphs are captured."""
        dynamic, fullgraph = more.pop("dynamic", False), more.pop("fullgraph", True)
        return compiled(fn, capture=capture, executors="triton", dynamic=dynamic, fullgraph=fullgraph, **more)

    def randn(self, *sizes: int, grad: bool = False) -> Tensor:
        return torch.randn(*sizes, device=self.device).requires_grad_(grad)

    def replayed(self, kind: str = "inference") -> int:
        return self.replays.get(kind, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(request.param)
    run, warm = calls.Captured._replayed, calls.Captured._recorded

    def counted(self: calls.Captured, recording: calls.Recording, args: list[Any]) -> Any:
        results = run(self, recording, args)
        made.replays[self.kind] = made.replayed(self.kind) + (results is not None)
        return results

    def recorded(self: calls.Captured, slot: calls.Slot, args: list[Any]) -> Any:
        recording = warm(self, slot, args)
        if recording is not None:
            made.recordings += 1
            made.taken += len(recording.consumed.positions)
            made.functions.append(self)
        return recording

    monkeypatch.setattr(calls.Captured, "_replayed", counted)
    monkeypatch.setattr(calls.Captured, "_recorded", recorded)
    torch.manual_seed(0)
    with backend.listening(lambda graph: made.captures.append(graph.capture), plan_only=False):
        if request.param == "cuda":
            yield made
        else:
            with recording_on_cpu() as made.fake:
                yield made
