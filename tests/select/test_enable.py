"""Which executors a graph may use, and what measurements change in a plan."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynafuse.backend import dynafuse
from dynafuse.config import Config, resolve
from dynafuse.cost import device as devices
from dynafuse.errors import DynafuseWarning, ExecutorError
from dynafuse.fallback import STRICT
from dynafuse.ir import Plan, Region
from dynafuse.lowering.base import Compilation, Use
from dynafuse.lowering.inductor import availability as inductor
from dynafuse.lowering.nvfuser import availability as nvfuser
from dynafuse.lowering.registry import executor
from dynafuse.lowering.triton import compiler
from dynafuse.partition.annotate import annotate
from dynafuse.partition.executors import Executors
from dynafuse.partition.search import partition
from dynafuse.passes.normalize import normalize
from dynafuse.report import explain
from dynafuse.select import Measurement, Timing, enable, measure
from dynafuse.select.place import place
from tests.support import graphs

BOTH = ("triton", "inductor")
X = torch.linspace(0, 1, 8)


class FakeTuner:
    """Says what it is told to have measured; counts its questions."""

    times: Mapping[str, float] = {}
    asked = 0

    def __init__(self, budget_s: float, **_: Any) -> None:
        self.budget_s = budget_s

    def measure(self, bound: Any, candidates: Mapping[str, Any], device: torch.device) -> Measurement:
        type(self).asked += 1
        measured = {name: Timing(us, us) for name, us in self.times.items() if name in candidates}
        return Measurement("key" if measured else "", measured, tuple(candidates))


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> type[FakeTuner]:
    monkeypatch.setattr(measure, "Tuner", FakeTuner)
    monkeypatch.setattr(FakeTuner, "asked", 0)
    return FakeTuner


def config(**options: Any) -> Config:
    return resolve(options={"executors": "triton,inductor", "workers": 0, **options})


def planned() -> Plan:
    """Two regions around a product, which both executors can take."""
    def write(build: graphs.Builder, x: Any, w: Any) -> Any:
        product = build.op("aten.mm.default", build.op("aten.tanh.default", x), w)
        return build.op("aten.exp.default", product)

    module = normalize(graphs.built(write, torch.empty(512, 512), torch.empty(512, 512)))
    annotated = annotate(module, "cpu")
    return partition(annotated, devices.describe("h200"), Executors(annotated.facts, BOTH))


def tuned(plan: Plan, costs: Mapping[str, float] | None = None, **options: Any) -> Plan:
    placed = place(plan, config(**options), None)
    device = devices.describe("h200").overridden(costs or {})
    return measure.measured(placed, device, Compilation(None, config(**options), STRICT)).plan


@pytest.mark.parametrize("winner", BOTH)
def test_what_is_measured_decides(tuner: type[FakeTuner], monkeypatch: pytest.MonkeyPatch, winner: str) -> None:
    monkeypatch.setattr(tuner, "times", {name: 3.0 if name == winner else 300.0 for name in BOTH})
    found = tuned(planned(), tune="always")
    assert [region.executor for region in found.regions] == [winner, winner] and tuner.asked == 2
    for region in found.regions:
        assert region.decision.options[0].executor == winner and region.decision.measured[winner] == 3.0
        assert region.predicted_us == region.decision.options[0].device_us and not region.decision.unsure


@pytest.mark.parametrize(("us", "winner"), [(99.0, "triton"), (90.0, "inductor")])
def test_another_executor_has_to_be_faster_by_more_than_timings_differ(
        tuner: type[FakeTuner], monkeypatch: pytest.MonkeyPatch, us: float, winner: str) -> None:
    monkeypatch.setattr(tuner, "times", {"triton": 100.0, "inductor": us})
    assert {region.executor for region in tuned(planned(), tune="always").regions} == {winner}


@pytest.mark.parametrize(("gain", "asked"), [(0.0, 2), (0.02, 2), (0.2, 0)])
def test_what_can_gain_little_is_not_measured(tuner: type[FakeTuner], gain: float, asked: int) -> None:
    """Each of the two kernels takes about a third of the plan, and may be 15% off."""
    plan = planned()
    plan = replace(plan, steps=tuple(
        replace(step, decision=replace(step.decision, unsure=BOTH, error=0.15)) if isinstance(step, Region) else step
        for step in plan.steps))
    tuned(plan, {"measured_gain": gain}, tune="unsure")
    assert tuner.asked == asked


def test_never_asks_nobody(tuner: type[FakeTuner]) -> None:
    plan = planned()
    assert tuned(plan, tune="never").regions == place(plan, config(), None).plan.regions and tuner.asked == 0


def test_without_a_measurement_the_prediction_stands(tuner: type[FakeTuner]) -> None:
    plan = planned()
    found = tuned(plan, tune="always")
    assert [r.executor for r in found.regions] == [r.executor for r in plan.regions] and tuner.asked == 2
    assert all(not region.decision.measured for region in found.regions)


def test_what_host_time_costs_is_measured_too(tuner: type[FakeTuner], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle most of the time: the faster kernel loses to the cheaper call."""
    def measure(self: FakeTuner, bound: Any, candidates: Mapping[str, Any], device: torch.device) -> Measurement:
        return Measurement("key", {"triton": Timing(4.0, 5.0), "inductor": Timing(2.0, 500.0)}, tuple(candidates))

    monkeypatch.setattr(tuner, "measure", measure)
    assert {region.executor for region in tuned(planned(), tune="always").regions} == {"triton"}


@pytest.mark.parametrize(("device", "planning", "interprets", "expected"), [
    ("cuda", False, False, ("triton", "eager")), ("cpu", True, False, ("triton", "eager")),
    ("cpu", False, True, ("triton", "eager")), ("cpu", False, False, ("inductor", "eager")),
])
def test_executors_by_default(monkeypatch: pytest.MonkeyPatch, device: str, planning: bool, interprets: bool,
                              expected: tuple[str, ...]) -> None:
    monkeypatch.setattr(compiler, "interpreting", lambda: interprets)
    monkeypatch.setattr(inductor, "find", lambda device: inductor.Availability(True, "g++"))
    assert enable.usable(Use(device, resolve(environ={}), planning)) == (expected, {})


def test_what_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(nvfuser, "find", lambda: nvfuser.Availability(True, "matched"))
    monkeypatch.setattr(inductor, "find", lambda device: inductor.Availability(False, "no C++ compiler"))
    asked = resolve(options={"executors": "triton,nvfuser,inductor"})
    assert enable.usable(Use("cpu", asked)) == (("eager",), {
        "triton": "Triton runs on CUDA devices, and slowly anywhere with TRITON_INTERPRET=1", "nvfuser": "nvFuser runs on CUDA devices",
        "inductor": "Inductor is not available: no C++ compiler"})
    rounding = resolve(options={"executors": "inductor", "round_like_eager": True})
    assert "round_like_eager" in enable.usable(Use("cuda", rounding))[1]["inductor"]


# ---------------------------------------------------------------------- what is not there


@pytest.fixture
def _nothing_told() -> Iterator[None]:
    enable.reset()
    yield
    enable.reset()


def told(run: Callable[[], Any]) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if issubclass(one.category, DynafuseWarning)]


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A machine without a GPU, without an interpreter and without some executors."""
    nothing = nvfuser.Availability(False, "no module nvfuser_direct")
    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(nvfuser, "find", lambda: nothing)
    if "inductor" in names:
        monkeypatch.setattr(inductor, "find", lambda device: inductor.Availability(False, "no C++ compiler"))


CASES: list[tuple[str | None, str, tuple[str, ...]]] = [
    ("nvfuser", "nvfuser", ()),
    ("triton", "triton", ()),
    ("inductor", "inductor", ("inductor",)),
    (None, "inductor", ("inductor",)),  # the default of CPU tensors
]
each_case = pytest.mark.parametrize(("executors", "name", "without"), CASES, ids=lambda value: str(value))


@each_case
@pytest.mark.usefixtures("_nothing_told")
def test_what_turns_fusion_off_is_told_once(
    executors: str | None, name: str, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent(monkeypatch, *without)
    x, options = X, {"strict": False} | ({"executors": executors} if executors else {})

    def call() -> None:
        for fn in (torch.sin, torch.cos):
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(lambda x, fn=fn: fn(x) + 1, backend=dynafuse, options=options)(x), fn(x) + 1)

    (text,) = told(call)
    assert text.startswith(f"executor '{name}' cannot be used: ") and "Nothing is fused, CPU tensors run eager; " in text
    assert text.endswith(executor(name).remedy)


@each_case
@pytest.mark.usefixtures("_nothing_told")
def test_what_turns_fusion_off_raises_when_strict(
    executors: str | None, name: str, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent(monkeypatch, *without)
    for _ in range(2):
        with pytest.raises(ExecutorError, match=f"executor '{name}' cannot be used"):
            torch.compile(lambda x: x + 1, backend=dynafuse, options={"executors": executors, "strict": True})(torch.ones(8))


@pytest.mark.usefixtures("_nothing_told")
def test_executors_for_other_devices_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list for several kinds of machines names what is not for these tensors."""
    absent(monkeypatch)

    def call() -> None:
        torch.compile(lambda x: x + 1, backend=dynafuse, options={"executors": "triton,nvfuser,inductor", "strict": True})(X)

    assert told(call) == []
    assert told(lambda: explain(torch.sin, X, options={"executors": "triton"})) == [], "a plan says it itself"


@pytest.mark.usefixtures("_nothing_told")
def test_cpu_tensors_beside_a_gpu_are_no_fault_of_executors_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    asked = config(executors="triton", strict=True)
    found = enable.usable(Use("cpu", asked))
    with pytest.raises(ExecutorError):
        enable.tell(Use("cpu", asked), *found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert told(lambda: enable.tell(Use("cpu", asked), *found)) == []


@pytest.mark.usefixtures("_nothing_told")
def test_on_a_gpu_what_is_named_and_not_there_is_told_though_another_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    asked = resolve(options={"executors": "triton,nvfuser", "strict": False})
    found = enable.usable(Use("cuda", asked))
    (text,) = told(lambda: enable.tell(Use("cuda", asked), *found))
    assert text == ("executor 'nvfuser' cannot be used: nvFuser is not available: no module nvfuser_direct. "
                    "Plans for CUDA tensors use triton, eager; install it, or leave it out of `executors`")
    with pytest.raises(ExecutorError):
        enable.tell(Use("cuda", replace(asked, strict=True)), *found)


@pytest.mark.usefixtures("_nothing_told")
def test_options_that_rule_the_only_executor_out_are_told_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch)
    (text,) = told(lambda: torch.compile(lambda x: x + 1, backend=dynafuse, options={"round_like_eager": True})(X))
    assert "round_like_eager" in text


@pytest.mark.usefixtures("_nothing_told")
def test_the_interpreter_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dynafuse"):
        for fn in (torch.sin, torch.cos):
            torch.compile(lambda x, fn=fn: fn(x), backend=dynafuse)(X)
        torch.compile(lambda x: x + 1, backend=dynafuse, options={"executors": "triton"})(X)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "dynafuse.select.enable"]
    assert message.startswith("TRITON_INTERPRET=1: CPU tensors run in Triton's interpreter")


def test_a_compiler_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from dynafuse.lowering.inductor.availability import find; print(find('cpu'))"
    for value, words in (("nope", "'nope', which CXX names, does not run"), ("g++", "g++")):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "CXX": value}, stdout=subprocess.PIPE, text=True)
        assert words in done.stdout
