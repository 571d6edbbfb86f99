"""What memory calls take and give back, and with which pieces of memory recordings begin for that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dynafuse.errors import DynafuseWarning
from dynafuse.runtime.capture.pool_size import Life, pool_bytes
from dynafuse.runtime.capture.recorder import recorder_for
from dynafuse.runtime.capture.traffic import Event, Traffic
from tests.runtime.conftest import Machine
from tests.runtime.test_capture import STEPS, Block

A, B, C, D = (address << 30 for address in range(4))
MB = 1 << 20


def taken(address: int, size: int) -> Event:
    return Event(address, size * MB, True)


def given(address: int, size: int) -> Event:
    return Event(address, size * MB, False)


FORWARD = [taken(B, 12), taken(A, 12), taken(D, 12), given(A, 12), given(D, 12), taken(C, 24), given(C, 24)]
BACKWARD = [taken(A, 16), given(B, 12), taken(C, 3), given(C, 3)]
"""The forward saves what is at B, and the backward returns what is at A."""


def noted(*calls: tuple[str, Sequence[Event]], apart: Sequence[int] = ()) -> Traffic:
    traffic = Traffic()
    for kind, events in calls:
        traffic.note(kind, events, apart)
    return traffic


@pytest.mark.parametrize(("apart", "end"), [([], [Life(16 * MB, 7, 11)]), ([16 * MB], [])])
def test_a_backward_gives_back_what_its_forward_saves(apart: Sequence[int], end: list[Life]) -> None:
    traffic = noted(("forward", FORWARD), ("backward", BACKWARD), apart=apart)
    assert traffic.lives() == [
        Life(12 * MB, 1, 3), Life(12 * MB, 2, 4), Life(24 * MB, 5, 6), Life(12 * MB, 0, 8), Life(3 * MB, 9, 10), *end]


def test_what_is_given_back_between_ends_where_it_is_taken_again() -> None:
    traffic = noted(("forward", [taken(A, 5)]), ("backward", [taken(A, 3), given(A, 3), given(B, 7)]))
    assert traffic.lives() == [Life(5 * MB, 0, 1), Life(3 * MB, 1, 2)]


def test_results_last() -> None:
    assert noted(("inference", [taken(A, 5), taken(B, 3), given(A, 5)])).lives() == [Life(5 * MB, 0, 2), Life(3 * MB, 1, 3)]


def test_which_calls_are_awaited() -> None:
    """The last that warms up, and the backward behind it, whichever call of it that is."""
    traffic = Traffic()
    assert traffic.is_awaited("forward", True) and not traffic.is_awaited("forward", False)
    assert traffic.is_awaited("backward", True) and not traffic.is_awaited("backward", False), "of a forward that is not recorded"
    traffic.note("forward", FORWARD)
    assert traffic.is_awaited("backward", False)
    traffic.note("backward", BACKWARD)
    assert not traffic.is_awaited("backward", True)


def step(call: nn.Module, x: Tensor) -> None:
    call(x).square().mean().backward()
    call.zero_grad()


def test_recordings_begin_with_pieces_that_leave_few_gaps(machine: Machine) -> None:
    if machine.fake is None:
        pytest.skip("on a GPU the allocator says what is taken")
    machine.fake.traffic = [[], FORWARD, BACKWARD]  # the backward's first calls are before the forward's last that warms up
    call = machine.compile(Block())
    for _ in range(STEPS):
        step(call, machine.randn(5, 16))
    lives = noted(("forward", FORWARD), ("backward", BACKWARD)).lives()
    first, later = machine.fake.pieces
    assert not later, "the backward lies in the pool of its forward"
    assert first == noted(("forward", FORWARD), ("backward", BACKWARD)).pieces() and pool_bytes(lives, first) < pool_bytes(lives)


def test_an_inference_graph_begins_with_pieces_of_its_own(machine: Machine) -> None:
    if machine.fake is None:
        pytest.skip("on a GPU the allocator says what is taken")
    machine.fake.traffic = [FORWARD]
    call, other = machine.compile(lambda x: x.tanh() * 2), machine.compile(lambda x: (x @ x.t()).sum(0) * 2)
    with torch.no_grad():
        for _ in range(STEPS):
            call(machine.randn(8, 16))
            other(machine.randn(8, 16))
    first, later = machine.fake.pieces
    assert first and not later, "the pool has some by then"


def test_what_cannot_be_watched_runs_all_the_same(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object) -> None:
        raise ZeroDivisionError("nobody looks")

    monkeypatch.setattr(type(machine.fake or recorder_for(torch.device("cuda", 0))), "watch", failing)
    call, x = machine.compile(lambda x: x.tanh() * 2, strict=False), machine.randn(8, 16)
    with torch.no_grad(), pytest.warns(DynafuseWarning, match="nobody looks"):
        for _ in range(STEPS):
            torch.testing.assert_close(call(x), x.tanh() * 2)
    assert machine.recordings == 1


@pytest.mark.gpu
def test_the_allocator_is_watched() -> None:
    recorder = recorder_for(torch.device("cuda", 0))
    assert recorder is not None

    def call() -> Tensor:
        first = torch.empty(3 * MB, dtype=torch.uint8, device="cuda")
        second = torch.empty(5 * MB, dtype=torch.uint8, device="cuda")
        del first
        return second

    told = recorder.watch()
    result, events = call(), told()
    assert [(event.bytes, event.is_taken) for event in events] == [(3 * MB, True), (5 * MB, True), (3 * MB, False)]
    assert events[1].address == result.data_ptr() and events[0].address == events[2].address
    torch.cuda.memory._record_memory_history(context=None)
    try:
        told = recorder.watch()
        call()
        assert told() == [], "the user looks"
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)
