"""How many warps fit on a processor, and that kernels of which too few fit are compiled with more warps a tile."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton import pool, room
from dynafuse.lowering.triton.room import roomier, roomiest, side_by_side
from dynafuse.lowering.triton.tiles import Schedule
from tests.support.processes import environment, python

WIDE = Schedule("split", {"x": (0,), "r": (1,)}, {"x": 1, "r": 4096}, 8)


@pytest.mark.parametrize(("warps", "registers", "shared", "expected"), [
    (4, 32, 0, 64), (4, 33, 0, 48), (4, 64, 0, 32), (4, 128, 0, 16), (8, 152, 0, 8), (1, 255, 0, 8), (16, 255, 0, 0),
    (1, 16, 0, 32),  # as many programs as a processor runs
    (4, 32, 60 << 10, 12), (4, 32, 1, 64),
])
def test_as_many_warps_fit_as_there_are_registers_shared_memory_and_places_for(
        warps: int, registers: int, shared: int, expected: int) -> None:
    assert side_by_side(warps, registers, shared) == expected


def test_lanes_that_hold_much_may_hold_half_or_a_quarter() -> None:
    assert [schedule.warps for schedule in roomier(WIDE)] == [16]
    assert [schedule.warps for schedule in roomier(replace(WIDE, warps=4))] == [8, 16]
    assert [schedule.warps for schedule in roomier(replace(WIDE, block={"x": 1, "r": 512}, warps=1))] == [2]
    assert all(schedule.block == WIDE.block for schedule in roomier(WIDE))


@pytest.mark.parametrize(("kind", "stages", "row", "warps", "others"), [
    ("persistent", 1, 16384, 8, [16]), ("persistent", 1, 8192, 8, []), ("rowcol", 2, 8192, 4, [8, 16]), ("rowcol", 1, 4096, 8, []),
    ("split", 3, 2048, 2, [4, 8]), ("looped", 3, 1024, 2, []),
])
def test_what_fills_registers_may_have_many_elements_in_a_lane(
        kind: str, stages: int, row: int, warps: int, others: list[int]) -> None:
    full = replace(WIDE, schedule_class=kind, stages=stages, block={"x": 1, "r": row}, warps=warps)
    assert full.fills_registers and [schedule.warps for schedule in roomier(full)] == others


@pytest.mark.parametrize("schedule", [
    replace(WIDE, warps=16), replace(WIDE, block={"x": 1, "r": 2048}), replace(WIDE, stages=3),
    replace(WIDE, schedule_class="rowcol"), replace(WIDE, schedule_class="persistent"),
])
def test_others_have_one_schedule(schedule: Schedule) -> None:
    assert roomier(schedule) == ()


def test_what_copies_long_rows_ahead_may_do_without() -> None:
    long = replace(WIDE, schedule_class="rowcol", block={"x": 1, "r": 16384}, warps=8, stages=3)
    assert [(schedule.warps, schedule.stages) for schedule in roomier(long)] == [(16, 3), (8, 1)]
    assert [(schedule.warps, schedule.stages) for schedule in roomier(replace(long, warps=16))] == [(16, 1)]


@dataclass
class Compiler:
    """Compiles lowerings whose source says how many registers they take, and with a plus how much memory for want of more."""

    compiled: list[str]
    shared: dict[str, int] = field(default_factory=dict)  # bytes of shared memory that a source takes

    def submit(self, lowered: Lowered, capability: int | None, workers: int | None) -> Future[Any]:
        self.compiled.append(lowered.source)
        future: Future[Any] = Future()
        if lowered.source == "broken":
            future.set_exception(ValueError("broken"))
        else:
            asm = {"cubin": lowered.source.encode()}
            shared = self.shared.get(lowered.source, 0)
            future.set_result((SimpleNamespace(asm=asm, metadata=SimpleNamespace(shared=shared)),))
        return future


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler([])
    monkeypatch.setattr(pool, "submit", compiler.submit)
    monkeypatch.setattr(room, "registers", lambda cubin: int(cubin.decode().split("+")[0]))
    monkeypatch.setattr(room, "frame_bytes", lambda cubin: int((cubin.decode() + "+0").split("+")[1]))
    return compiler


def lowered(source: str, programs: int = 10_000, fills: bool = False) -> Lowered:
    return Lowered(source, (Launch("k", (), (programs, 1, 1), (), 4),), fills_registers=fills)


def chosen(*sources: str, programs: int = 10_000, capability: int | None = 90, fills: bool = False) -> str:
    return roomiest((lowered(source, programs, fills) for source in sources), capability, 0).result(timeout=5)[0].source


def test_a_kernel_with_room_is_compiled_once(compiler: Compiler) -> None:
    """And written under no other schedule."""
    choices = map(lowered, ["64", "32"])
    assert roomiest(choices, 90, 0).result(timeout=5)[0].source == "64"
    assert compiler.compiled == ["64"] and next(choices).source == "32"


def test_a_kernel_of_which_few_warps_fit_gives_way_to_one_of_which_more_do(compiler: Compiler) -> None:
    assert chosen("152", "64", "32") == "64"
    assert compiler.compiled == ["152", "64"]


def test_of_kernels_without_room_the_one_with_clearly_more_is_taken(compiler: Compiler) -> None:
    assert chosen("255", "250") == "255"
    assert chosen("255", "120", "110") == "120"


def test_a_kernel_whose_grid_is_small_has_room(compiler: Compiler) -> None:
    assert chosen("152", "64", programs=132) == "152"
    assert compiler.compiled == ["152"]


def test_a_kernel_that_is_meant_to_takes_all_registers_but_no_memory(compiler: Compiler) -> None:
    assert chosen("255+256", "128", fills=True) == "255+256"
    assert chosen("32+6984", "64+441", "128+9", fills=True) == "128+9"
    assert chosen("32+6984", "broken", fills=True) == "32+6984"


def test_a_kernel_that_keeps_much_in_memory_has_no_room_however_many_warps_fit(compiler: Compiler) -> None:
    assert chosen("32+512", "64", programs=10) == "64"


@pytest.mark.parametrize(("capability", "expected"), [(90, "255"), (80, "255"), (86, "128"), (89, "128"), (999, "128")])
def test_a_kernel_with_more_shared_memory_than_the_device_has_gives_way(
        compiler: Compiler, capability: int, expected: str) -> None:
    compiler.shared["255"] = 128 << 10
    assert chosen("255", "128", fills=True, capability=capability) == expected


def test_what_cannot_be_compiled_is_not_taken_and_the_first_failure_is_told(compiler: Compiler) -> None:
    assert chosen("152", "broken", "64") == "152"
    with pytest.raises(ValueError, match="broken"):
        chosen("broken", "64")


def test_the_first_is_taken_where_nothing_can_be_told(compiler: Compiler) -> None:
    assert chosen("not a number", "64") == "not a number"
    assert chosen("152", "64", capability=None) == "152"


NATIVE = """
import torch, dynafuse
from dynafuse.backend import dynafuse as backend
from dynafuse.lowering.triton.lower import lowerings
from dynafuse.lowering.triton.room import least_room, roomiest
from dynafuse.runtime.observers import listening

def function(*x):
    parts = [torch.where(t[:, :, :-8] > 0, t[:, :, 8:].exp(), t[:, :, :-8]) * x[0][:, :, :-8] for t in x]
    return torch.cat(parts, 2).sum((0, 2))

graphs = []
with listening(graphs.append, plan_only=True):
    torch.compile(function, backend=backend, options={"device": "h200", "executors": "triton"})(
        *(torch.empty(4, 256, 8000) for _ in range(3)))
choices = list(lowerings(next(iter(graphs[0].bounds.values())).code))
lowered, compiled = roomiest(iter(choices), 90, 0).result()
first, _ = roomiest(iter(choices[:1]), 90, 0).result()
print(choices.index(lowered), lowered.launches[0].warps, first.launches[0].warps, least_room(lowered, compiled, 90))
"""


def test_a_sum_that_reads_many_tensors_is_compiled_with_more_warps() -> None:
    position, warps, usual, side = map(int, python("-c", NATIVE, env=environment(interpreted=False)).split()[-4:])
    assert position > 0 and warps > usual and side >= 16


def test_more_warps_hold_more_running_states_between_them() -> None:
    running = replace(WIDE, schedule_class="split", block={"x": 1, "r": 4096}, warps=4, running=1024)
    assert [(schedule.warps, schedule.running) for schedule in roomier(running)] == [(8, 2048), (16, 4096)]
