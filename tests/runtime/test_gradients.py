"""Gradients that a recorded backward hands over: in the same memory each time, and never written while somebody holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dynafuse.runtime.capture import calls
from tests.runtime.conftest import Machine
from tests.runtime.test_capture import STEPS, Block, close, same_parameters, twins


def backwards(machine: Machine) -> list[calls.Recording]:
    """The recordings of backwards that there are."""
    functions = (function for function in dict.fromkeys(machine.functions) if function.kind == "backward")
    return [slot.recording for function in functions for slot in function.slots.values() if slot.recording is not None]


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def places(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]


def compared_step(machine: Machine, call: Callable[[Tensor], Tensor], ours: nn.Module, eager: nn.Module) -> None:
    """One forward and backward of both, whose gradients are the same."""
    x = machine.randn(5, 16)
    for run in (call, eager):
        loss_of(run(x)).backward()
    same_parameters(ours, eager)


class Tied(nn.Module):
    """The gradient of both biases is one tensor, and those of the rows of a weight are views of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(16))
        self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.first + self.second
        out: Tensor = F.linear(y, torch.cat((self.up, self.down))).tanh()
        return out


class UsedTwice(nn.Module):
    """The gradient of the weight is a sum of two products, which is written over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh() @ self.weight.t()


class Convolved(nn.Module):
    """The gradient of the weight is a library's, which cannot be told where to write it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convolution(x.view(-1, 1, 4, 4).tanh())
        return out.tanh()


@pytest.mark.parametrize("make", [Block, Tied, UsedTwice, Convolved])
def test_gradients_are_not_copied(machine: Machine, make: Callable[[], nn.Module]) -> None:
    ours, eager = twins(machine, make)
    call, seen = machine.compile(ours), []
    for _ in range(2 * STEPS):  # without what a forward hands over, ten of them warm up
        x = machine.randn(5, 16)
        for run, model in ((call, ours), (eager, eager)):
            loss_of(run(x)).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3)  # of one alone
        same_parameters(ours, eager)
        seen.append(places(ours))
        for model in (ours, eager):
            model.zero_grad()
    recording, = backwards(machine)
    assert recording.lends and recording.outputs.handing.bytes == 0 and seen[-1] == seen[-2] and machine.replayed("backward") >= 4
    assert len(set(seen[-1])) == len(seen[-1])


def test_a_forward_leaves_gradients_as_they_are(machine: Machine) -> None:
    """Those of the first recording are in its memory: both are recorded anew, once."""
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    for _ in range(2 * STEPS):
        x = machine.randn(5, 16)
        loss, expected = loss_of(call(x)), loss_of(eager(x))
        same_parameters(ours, eager)
        for model in (ours, eager):
            model.zero_grad()
        loss.backward()
        expected.backward()
        same_parameters(ours, eager)
    recording, = backwards(machine)
    assert recording.hands_over and not recording.lends and recording.consumed.positions
    assert machine.recordings == 4 and machine.replayed("backward") >= 2 * STEPS - 6


def test_gradients_that_are_accumulated_are_copied(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    for _ in range(STEPS):
        for _ in range(3):
            x = machine.randn(5, 16)
            loss_of(call(x)).backward()
            loss_of(eager(x)).backward()
        same_parameters(ours, eager)
        for model in (ours, eager):
            model.zero_grad()
    recording, = backwards(machine)
    assert not recording.hands_over and machine.recordings == 4 and machine.replayed("backward") >= 3 * STEPS - 11


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("machine", ["cpu"], indirect=True)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_in_buckets(machine: Machine, group: None, views: bool) -> None:
    """Whoever trains on several devices puts them into memory of its own, and may leave them there."""
    ours, eager = twins(machine, Block)
    call = machine.compile(DistributedDataParallel(ours, gradient_as_bucket_view=views), fullgraph=False)
    for _ in range(2 * STEPS):
        compared_step(machine, call, ours, eager)
        for model in (ours, eager):
            for parameter in model.parameters():
                parameter.data.sub_(0.1 * parameter.grad)
            model.zero_grad()
    assert machine.recordings == 2 and machine.replayed("backward") >= 2 * STEPS - 4


def test_gradients_that_are_held_stay_as_they_are(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call, held, expected = machine.compile(ours), [], []
    for _ in range(STEPS):
        x = machine.randn(5, 16)
        held.append(torch.autograd.grad(loss_of(call(x)), list(ours.parameters())))
        expected.append(torch.autograd.grad(loss_of(eager(x)), list(eager.parameters())))
    close(held, expected)


def test_gradients_that_are_held_for_good_are_recorded_anew(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set to None twice, and filled with zeros from then on: those in the memory of the first recording, and those in their own."""
    monkeypatch.setattr(calls, "MOST_REFUSED", 3)
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    for step in range(5 * STEPS):
        compared_step(machine, call, ours, eager)
        for model in (ours, eager):
            model.zero_grad(set_to_none=step in (STEPS, 2 * STEPS))
    recording, = backwards(machine)
    assert not recording.outputs.gives_away and machine.recordings == 5 and machine.replayed("backward") >= STEPS


def test_gradients_of_inputs_are_copied(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call, held, expected = machine.compile(ours), [], []
    for _ in range(STEPS):
        x = machine.randn(5, 16, grad=True)
        other = x.detach().clone().requires_grad_()
        loss_of(call(x)).backward()
        loss_of(eager(other)).backward()
        held.append(x.grad)
        expected.append(other.grad)
        ours.zero_grad()
    close(held, expected)
    recording, = backwards(machine)
    assert recording.outputs.handing.bytes == 5 * 16 * 4 and recording.hands_over and machine.replayed("backward") >= 4


def test_a_gradient_that_is_also_returned_for_an_input_is_copied(machine: Machine) -> None:
    """What two own is in memory of its own for neither."""
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 16))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.weight).tanh()

    ours, eager = twins(machine, Sum)
    call, held, expected = machine.compile(ours), [], []
    for _ in range(2 * STEPS):
        x = machine.randn(5, 16, grad=True)
        other = x.detach().clone().requires_grad_()
        loss_of(call(x)).backward()
        loss_of(eager(other)).backward()
        same_parameters(ours, eager)
        held.append(x.grad)
        expected.append(other.grad)
        for model in (ours, eager):
            model.zero_grad()
    close(held, expected)
    recording, = backwards(machine)
    assert not recording.outputs.gives_away


def test_copies_of_a_model_and_of_its_gradients(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    copies: list[Any] = []
    for _ in range(STEPS):
        x = machine.randn(5, 16)
        loss_of(call(x)).backward()
        loss_of(eager(x)).backward()
        copies.append((copy.deepcopy(ours), copy.deepcopy(eager)))
        for model in (ours, eager):
            model.zero_grad()
    for a, b in copies:
        same_parameters(a, b)
    assert backwards(machine)[0].hands_over
