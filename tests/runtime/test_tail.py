"""The last steps of a captured graph, launched behind its replay: which ones, and that results are eager's all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynafuse import explain
from dynafuse.cost.replay import Replay
from dynafuse.errors import DynafuseWarning
from dynafuse.runtime.capture import tail
from dynafuse.runtime.capture.calls import Captured
from dynafuse.runtime.capture.tail import LARGE, MOST_LAUNCHED
from dynafuse.runtime.capture.traffic import Traffic
from tests.runtime.conftest import Machine
from tests.support.differential import compiled

STEPS = 6


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched behind a replay wherever that spares a copy."""
    monkeypatch.setattr(tail, "LARGE", 1)
    monkeypatch.setattr(tail, "replay_of", lambda recorded, copies, device, launched=None: Replay(float(copies.bytes), 0.0))


class Decoder(nn.Module):
    """Logits, and what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(torch.relu(self.inside(x)) + x)
        return self.head(hidden), hidden.mean()


def alike(machine: Machine, model: Callable[..., Any], *calls: tuple[Tensor, ...]) -> None:
    """All results, held to the end, are eager's, and most of the calls are replays with something launched behind."""
    call = machine.compile(model)
    with torch.no_grad():
        found = [call(*args) for args in calls]
        expected = [model(*args) for args in calls]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert machine.recordings == 1 and machine.replayed() >= 3
    assert "launched behind it" in machine.captures[-1]


@pytest.mark.usefixtures("always")
def test_results_that_are_held_stay_as_they_are(machine: Machine) -> None:
    model = Decoder().to(machine.device)
    alike(machine, model, *[(machine.randn(3, 16),) for _ in range(STEPS)])
    (function,) = machine.functions
    assert len(function.layout.saved) == 1, "what only the product reads stays where it is"
    (slot,) = function.slots.values()
    assert slot.recording is not None and slot.recording.outputs.handing.bytes == 0, "all that leaves is launched"


@pytest.mark.usefixtures("always")
def test_a_result_that_a_launched_step_reads(machine: Machine) -> None:
    weight = machine.randn(16, 40)

    def fn(x: Tensor) -> Any:
        hidden = torch.tanh(x) * 2
        return hidden, hidden @ weight, hidden

    alike(machine, fn, *[(machine.randn(3, 16),) for _ in range(STEPS)])


@pytest.mark.usefixtures("always")
def test_launched_steps_read_inputs_and_views_of_them(machine: Machine) -> None:
    """They find them aligned as well, and what the first steps have written to them."""
    def fn(x: Tensor, other: Tensor, state: Tensor) -> Any:
        state.add_(1)
        product = torch.sin(x) @ other.t()[:16]
        return torch.exp(-(product * state[:, :1] + other[0, 0]).abs())

    def arguments() -> tuple[Tensor, ...]:
        return machine.randn(3, 16), machine.randn(40 * 20 + 1)[1:].view(40, 20), torch.ones(3, 5, device=machine.device)

    call, calls = machine.compile(fn), [arguments() for _ in range(STEPS)]
    states = [state.clone() for *_, state in calls]
    with torch.no_grad():
        for (x, other, state), copy in zip(calls, states, strict=True):
            torch.testing.assert_close(call(x, other, state), fn(x, other, copy), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state, copy)


@pytest.mark.usefixtures("always")
def test_views_of_inputs_among_the_results(machine: Machine) -> None:
    weight = machine.randn(16, 40)

    def fn(x: Tensor, other: Tensor) -> Any:
        part = other[1:]
        return part, torch.exp(-x.abs()) @ weight, other[:, 2:]

    alike(machine, fn, *[(machine.randn(3, 16), machine.randn(3, 16)) for _ in range(STEPS)])


@pytest.mark.usefixtures("always")
def test_sizes_that_change_leave_all_to_the_replay(machine: Machine) -> None:
    model = Decoder().to(machine.device)
    call = machine.compile(model, dynamic=True)
    with torch.no_grad():
        for size in (3, 5) * STEPS:
            x = machine.randn(size, 16)
            torch.testing.assert_close(call(x), model(x), rtol=1e-4, atol=1e-5)
    assert machine.replayed() and not any("launched" in said for said in machine.captures)


@pytest.mark.usefixtures("always")
def test_a_call_inside_of_another_is_launched(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a replay and what is launched behind it, another call would overwrite what that reads."""
    model, inputs = Decoder().to(machine.device), [machine.randn(3, 16) for _ in range(2 * STEPS)]
    call, found = machine.compile(model), []
    run = Captured.__call__

    def twice(self: Captured, args: list[Any]) -> Any:
        results = run(self, args)
        if len(found) == STEPS:  # of the inner call the number is another one
            found.append(None)
            found[STEPS] = call(inputs[-1])
        return results

    monkeypatch.setattr(Captured, "__call__", twice)
    with torch.no_grad():
        for x in inputs[:-1]:
            found.append(call(x))
        expected = [model(x) for x in [*inputs[:STEPS], inputs[-1], *inputs[STEPS:-1]]]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_fails_on_the_way_to_a_recording_leaves_the_launches(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Traffic) -> tuple[int, ...]:
        raise ZeroDivisionError("no piece")

    monkeypatch.setattr(Traffic, "pieces", failing)
    model, x = Decoder().to(machine.device), machine.randn(3, 16)
    call = machine.compile(model, strict=False)
    with torch.no_grad(), pytest.warns(DynafuseWarning, match="no piece"):
        found = [call(x) for _ in range(STEPS)]
    torch.testing.assert_close(found[-1], model(x), rtol=1e-4, atol=1e-5)
    assert not machine.recordings


# Which steps ----------------------------------------------------------------------------------------------------------


def said(last: Callable[[Tensor, Tensor], Any]) -> str:
    """What is said of a graph of many small steps and a last one, on an H200."""
    def fn(x: Tensor, w: Tensor, vocabulary: Tensor) -> Any:
        for _ in range(12):
            x = torch.nn.functional.layer_norm(torch.relu(x @ w) + x, (256,))
        return last(x, vocabulary)

    x, w, vocabulary = (torch.zeros(*sizes, dtype=torch.bfloat16) for sizes in ((1024, 256), (256, 256), (256, 65536)))
    with torch.no_grad():
        (graph,) = explain(fn, x, w, vocabulary, device="h200", options={"executors": "triton", "capture": "auto"}).graphs
    return graph.capture


def test_a_product_that_makes_large_results_is_launched() -> None:
    assert "captured as a CUDA graph, its last step launched behind it (134 MB of results), saves" in said(torch.matmul)


def test_what_reads_the_product_is_launched_too() -> None:
    assert "its last 2 steps launched behind it (134 MB" in said(lambda x, w: 30 * torch.tanh(x @ w / 30))


def test_small_results_are_copied() -> None:
    assert "launched" not in said(lambda x, w: x @ w[:, :64])
    assert "launched" not in said(lambda x, w: (x @ w).sum())


def test_what_takes_the_host_longer_than_the_copies_is_replayed() -> None:
    def many(x: Tensor, w: Tensor) -> Any:
        large = x[:128] @ w[:, :32768]  # 8 MB, and more steps behind it than are launched
        for _ in range(MOST_LAUNCHED):
            x = torch.relu(x @ w[:, :256])
        return large, x[:4]

    assert LARGE <= 2 * 128 * 32768 and "captured" in said(many) and "launched" not in said(many)


@pytest.mark.gpu
def test_large_results_are_in_memory_once() -> None:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())], nn.Linear(512, 50304))
    model, x = model.cuda().to(torch.bfloat16), torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    call = compiled(model, capture="auto", executors="triton", dynamic=False, fullgraph=True)
    with torch.no_grad():
        for _ in range(STEPS):
            call(x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logits = call(x)
        assert torch.cuda.max_memory_allocated() - before < 1.1 * logits.nbytes
        torch.testing.assert_close(logits, model(x), rtol=2e-2, atol=2e-2)
