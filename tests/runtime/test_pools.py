"""Recordings that share a pool: what they leave alone, when they are not replayed, and that nothing that is held changes."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynafuse.runtime.capture import calls
from dynafuse.runtime.capture.lending import Loan
from dynafuse.runtime.capture.pools import Pool
from tests.runtime.conftest import Machine
from tests.runtime.test_capture import Block, same_parameters, twins
from tests.support.differential import compiled

STEPS = 5
"""The first two warm up, the third records."""


@dataclass
class Held:
    busy: bool = True
    gives_away: bool = False
    outlives: bool = False


def lending(pool: Pool, *taken: bool) -> tuple[list[Held], list[Loan]]:
    """What recordings of a pool have handed over, and their loans, of which backwards have taken some."""
    handed, loans = [Held() for _ in taken], [Loan(0, {}, each) for each in taken]
    pool.lent.update(enumerate(zip(handed, loans, strict=True)))
    return handed, loans


def test_a_recording_leaves_alone_what_is_held() -> None:
    pool = Pool(None)
    handed, _ = lending(pool, False, False)
    spared = pool.spared()
    assert spared == {0, 1} and pool.takes() and not pool.holders(2, spared)
    handed[0].busy = False
    assert pool.spared() == {1} and set(pool.lent) == {1}


def test_a_recording_waits_for_what_it_was_made_before() -> None:
    pool = Pool(None)
    handed, _ = lending(pool, False, False)
    assert pool.holders(0, frozenset()) == handed[1:], "1 is held"
    handed[1].busy = False
    assert not pool.holders(0, frozenset()), "what it hands over itself is looked at by itself"


def test_what_a_backward_frees_is_left_alone_by_nothing_that_comes() -> None:
    pool = Pool(None)
    handed, loans = lending(pool, False, True)
    assert pool.spared() == {0} and not pool.takes() and pool.holders(2, pool.spared()) == handed[1:]
    assert pool.takes(loans[1]) and pool.spared(loans[1]) == {0, 1}, "but by the backward itself, which only runs where it may"
    handed[1].busy = False
    assert pool.takes() and not pool.holders(2, frozenset({0}))


class Parts:
    """Several models, each compiled by itself, beside their twins."""

    def __init__(self, machine: Machine, count: int) -> None:
        self.machine = machine
        self.pairs = [twins(machine, Block) for _ in range(count)]
        self.calls: list[Any] = [machine.compile(ours) for ours, _ in self.pairs]

    def forward(self, part: int) -> tuple[Tensor, Tensor]:
        """The losses of a part and of its twin."""
        x = self.machine.randn(5, 16)
        ours, theirs = self.calls[part](x), self.pairs[part][1](x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        return ours.square().mean(), theirs.square().mean()

    def chained(self) -> None:
        """One step of all parts, the output of each the input of the next."""
        x = y = self.machine.randn(5, 16)
        for call, (_, other) in zip(self.calls, self.pairs, strict=True):
            x, y = call(x), other(y)
        for out in (x, y):
            out.square().mean().backward()
        self.checked()

    def checked(self) -> None:
        """Compare the gradients, and forget them."""
        for pair in self.pairs:
            same_parameters(*pair)
            for model in pair:
                model.zero_grad()

    def pools(self) -> list[Pool]:
        """The pools of all recordings, each once."""
        recordings = [slot.recording for function in dict.fromkeys(self.machine.functions) for slot in function.slots.values()]
        return list({id(r.pool): r.pool for r in recordings if r is not None}.values())


def test_parts_of_a_model_share_a_pool(machine: Machine) -> None:
    """Two of them, and two: the first two compile, which does not count as a call, so that they are recorded a step later."""
    parts = Parts(machine, 4)
    for _ in range(2 * STEPS):
        parts.chained()
    assert machine.recordings == 8 and len(parts.pools()) == 2
    assert machine.replayed("forward") == machine.replayed("backward") == 2 * (2 * STEPS - 2) + 2 * (2 * STEPS - 3)


def test_models_that_have_nothing_in_common_have_pools_of_their_own(machine: Machine) -> None:
    first, second = Parts(machine, 1), Parts(machine, 1)
    for parts in (first, second):
        for _ in range(STEPS):
            parts.chained()
    assert len({id(pool) for pool in first.pools()}) == 2


def test_a_part_that_comes_later_has_a_pool_of_its_own(machine: Machine) -> None:
    """Where it lies, the backwards of the others have freed what their forwards save."""
    parts = Parts(machine, 3)
    late, pair = parts.calls.pop(), parts.pairs.pop()
    for _ in range(STEPS):
        parts.chained()
    parts.calls.append(late)
    parts.pairs.append(pair)
    for _ in range(2 * STEPS):
        parts.chained()
    assert len(parts.pools()) == 2 and machine.replayed("forward") >= 5 * STEPS


def test_a_backward_that_comes_later_takes_no_memory_where_that_of_others_is_free(machine: Machine) -> None:
    """It would not be replayed as long as these hold what they save, which they do whenever it comes."""
    parts = Parts(machine, 3)
    for step in range(4 * STEPS):
        pairs = [parts.forward(part) for part in range(3)]
        for losses in reversed(pairs[:2 + (step >= STEPS)]):
            for loss in losses:
                loss.backward()
        del pairs, losses, loss
        parts.checked()
    assert machine.replayed("backward") >= 2 * (4 * STEPS - 4) + 2 * STEPS


def test_what_a_later_forward_has_saved_is_not_overwritten(machine: Machine) -> None:
    parts = Parts(machine, 2)
    for _ in range(STEPS):
        parts.chained()
    for _ in range(STEPS):
        held = parts.forward(1)
        for loss in parts.forward(0):
            loss.backward()
        for loss in held:
            loss.backward()
        parts.checked()


@pytest.mark.parametrize("seed", range(6))
def test_any_order(machine: Machine, seed: int) -> None:
    """Forwards in any order, some several times, and backwards whenever they come, or never."""
    draw, parts = random.Random(seed), Parts(machine, 3)
    held: list[Sequence[Tensor]] = []
    for step in range(STEPS + 20):
        if step < STEPS:
            parts.chained()
            continue
        for _ in range(draw.randrange(1, 5)):
            held.append(parts.forward(draw.randrange(3)))
        draw.shuffle(held)
        for _ in range(draw.randrange(len(held) + 1)):
            losses = held.pop()
            if draw.random() < 0.8:
                for loss in losses:
                    loss.backward()
        parts.checked()
    assert machine.replayed("backward") > 3 * (STEPS - 2), "some are replayed in other orders, too"


@pytest.mark.parametrize("seed", range(6))
def test_gradients_that_somebody_keeps(machine: Machine, seed: int) -> None:
    """Some are added up, and some are held for a while by somebody else, while forwards and backwards go on."""
    draw, parts = random.Random(seed), Parts(machine, 3)
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS + 25):
        for losses in reversed([parts.forward(part) for part in range(3)]):
            for loss in losses:
                loss.backward()
        for pair in parts.pairs:
            same_parameters(*pair)
            chance = draw.random() if step >= STEPS else 0.0
            if chance > 0.85:  # added up
                continue
            if chance > 0.7:
                held += [(p.grad, p.grad.clone()) for p in pair[0].parameters() if p.grad is not None]
            for model in pair:
                model.zero_grad()
        for gradient, before in held:
            torch.testing.assert_close(gradient, before, rtol=0, atol=0)
        if draw.random() < 0.5:
            held.clear()
    assert machine.replayed("backward") > 30 and machine.recordings > 6


class Keeping(nn.Module):
    """Returns what its backward needs as well, as a decoder layer does that has a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.tanh(self.up(x))
        return torch.tanh(self.down(kept * kept)), kept


def test_a_backward_waits_for_nothing_that_the_user_gets_as_well(machine: Machine) -> None:
    """That is in another place each time."""
    ours, eager = twins(machine, Keeping)
    call = machine.compile(ours)
    for _ in range(STEPS):
        x = machine.randn(5, 16)
        for run in (call, eager):
            out, kept = run(x)
            (out.square().mean() + kept.sum()).backward()
        same_parameters(ours, eager)
        for model in (ours, eager):
            model.zero_grad()
    assert machine.recordings == 2 and machine.replayed("backward") == 2 and machine.taken > 0


@pytest.mark.gpu
def test_what_is_copied_out_takes_no_memory_of_the_pool() -> None:
    call = compiled(lambda x: (x.tanh(), x.sum()), capture="always", executors="triton")
    with torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(4096, 4096, device="cuda")
            torch.testing.assert_close(call(x), (x.tanh(), x.sum()))
    pools = (segment for segment in torch.cuda.memory_snapshot() if any(segment["segment_pool_id"]))
    assert sum(segment["allocated_size"] for segment in pools) < 48 << 20, "there are workspaces, but no result of 64 MB"


@pytest.mark.gpu
def test_parts_that_share_a_pool_take_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved() -> int:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        parts = [nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)).cuda() for _ in range(5)]
        functions = [compiled(part, capture="always", executors="triton") for part in parts]
        x = torch.randn(8192, 512, device="cuda")
        for _ in range(2 * STEPS):
            out = x
            for function in functions:
                out = function(out)
            out.sum().backward()
            for part in parts:
                part.zero_grad()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    together = reserved()
    monkeypatch.setattr(calls, "chain", lambda key, new: new())
    assert together < 0.85 * reserved()
