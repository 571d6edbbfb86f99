"""Measuring: what wins, what is survived, what is measured once; on a GPU, that the times are true."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cost.device import describe
from dynafuse.cost.model import Choice, Prediction, choose
from dynafuse.ir import Decision
from dynafuse.lowering.interpret import eager
from dynafuse.lowering.nvfuser import availability
from dynafuse.select import Measurement, MeasurementStore, Timing, Tuner, contenders, measurement_key, needs_measuring, tuner
from dynafuse.select.clock import CaptureFailed, Gpu, Refused
from tests.support import graphs
from tests.support.tuning_bounds import bounds, native_kernel, softmax

CPU = torch.device("cpu")
HINTS: dict[str, int] = {}


def add_region(*shape: int, dynamic: bool = False) -> CanonicalRegion:
    def write(build: graphs.Builder, x: torch.fx.Node, y: torch.fx.Node) -> torch.fx.Node:
        return build.op("aten.add.Tensor", build.op("aten.relu.default", x), y)

    (bound,) = bounds(graphs.built(write, torch.randn(shape), torch.randn(shape), dynamic=dynamic))
    return bound


class Candidate:
    """A kernel that takes ``us`` of the device and ``host_us`` of the host, by the fake clock."""

    def __init__(self, us: float, host_us: float = 5.0, fails: Exception | None = None) -> None:
        self.us, self.host_us, self.fails = us, host_us, fails
        self.built = self.ran = 0

    def build(self) -> Candidate:
        self.built += 1
        return self

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.ran += 1
        if self.fails is not None:
            raise self.fails
        return inputs[:1]


class Clock:
    """Asks the kernel for its times, and lets time pass."""

    def __init__(self, seconds: float = 0.5, captures: bool = True) -> None:
        self.time, self.seconds, self.captures = 0.0, seconds, captures
        self.calls: list[int] = []

    def _candidate(self, run: Any) -> Candidate:
        run()
        return run.run.__closure__[0].cell_contents  # type: ignore[no-any-return]

    def device(self, run: Any, calls: int) -> float:
        return self._candidate(run).us

    def host(self, run: Any, calls: int) -> float:
        return self._candidate(run).host_us

    def replay(self, run: Any, calls: int = 1, replays: int = 1, rounds: int = 1) -> float:
        self.calls.append(calls)
        self.time += self.seconds
        if not self.captures:
            raise CaptureFailed("not permitted when the stream is capturing")
        return self._candidate(run).us

    def now(self) -> float:
        return self.time


def tuned(budget_s: float = 100.0, clock: Clock | None = None, **more: Any) -> Tuner:
    clock = clock or Clock()
    settings: dict[str, Any] = {"store": MeasurementStore(), "now": clock.now, "obstacle": lambda device: "",
                                "free": lambda device: 1 << 30, "cache": lambda device: 1 << 20, **more}
    return Tuner(budget_s, clock, **settings)


def builds(**candidates: Candidate) -> dict[str, Callable[[], Any]]:
    return {name: candidate.build for name, candidate in candidates.items()}


# ---------------------------------------------------------------------- who wins


@pytest.mark.parametrize(("triton", "nvfuser", "winner"), [(10.0, 12.0, "triton"), (12.0, 10.0, "nvfuser")])
@pytest.mark.parametrize("order", [("triton", "nvfuser"), ("nvfuser", "triton")])
def test_the_faster_wins_whatever_was_predicted(triton: float, nvfuser: float, winner: str, order: tuple[str, ...]) -> None:
    candidates = {"triton": Candidate(triton).build, "nvfuser": Candidate(nvfuser).build}
    measurement = tuned().measure(add_region(8, 4), {name: candidates[name] for name in order}, CPU)
    assert measurement.decided and not measurement.exhausted
    assert measurement.winner == winner
    assert {name: one.device_us for name, one in measurement.timings.items()} == {"triton": triton, "nvfuser": nvfuser}


def test_a_plan_that_the_host_bounds_chooses_by_host_time() -> None:
    measurement = tuned().measure(add_region(8, 4), builds(nvfuser=Candidate(3.0, 12.0), triton=Candidate(4.0, 5.0)), CPU)
    predicted = {"nvfuser": Prediction(1.0, 1.0, 0.3), "triton": Prediction(2.0, 2.0, 0.3)}
    device = describe("h200")
    assert choose(predicted, device).executor == measurement.winner == "nvfuser"
    measured = measurement.predictions(predicted)
    assert measured["nvfuser"] == Prediction(3.0, 12.0, 0.0, 3.0)
    assert choose(measured, device, rest=Prediction(0.0, 100.0)).executor == "triton"
    assert choose(measured, device, rest=Prediction(1000.0, 0.0)).executor == "nvfuser"
    assert choose(measured, device, captured=True).executor == "nvfuser"


def test_what_cannot_be_captured_is_timed_by_events() -> None:
    measurement = tuned(clock=Clock(captures=False)).measure(add_region(8, 4), builds(a=Candidate(9.0), b=Candidate(7.0)), CPU)
    assert measurement.winner == "b"
    assert measurement.timings["b"] == Timing(7.0, 5.0, captured=False)


@pytest.mark.parametrize(("shape", "us", "sets", "calls"), [
    ((1024, 64), 100.0, 4, 20),  # 0.75 MB a set, three others are twice the cache of 1 MB, 2 ms are 20 calls
    ((8, 4), 1e5, 32, 32),  # tiny: as many sets as there may be, each once
    ((1024, 256), 1e5, 2, 2),  # larger than the cache: what is in it at the end is not what is read at the beginning
    ((1024, 64), 0.1, 4, 200),
])
def test_buffers_and_calls(shape: tuple[int, int], us: float, sets: int, calls: int) -> None:
    found, bound = tuned(clock=(clock := Clock())), add_region(*shape)
    found.measure(bound, builds(a=Candidate(us), b=Candidate(us)), CPU)
    assert clock.calls == [calls, calls]
    made = found._input_sets(bound.spec, HINTS, CPU)
    assert len(made) == sets and len({tensor.data_ptr() for one in made for tensor in one}) == 2 * sets
    assert all(torch.equal(x, y) for one in made for x, y in zip(one, made[0], strict=True))


# ---------------------------------------------------------------------- what fails


FAILURES = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "out of memory", True),
    (RuntimeError("INTERNAL ASSERT FAILED\nlong story"), "RuntimeError: INTERNAL ASSERT FAILED", False),
    (IndexError(), "IndexError", False),
    (Refused("the host did not get ahead of the device"), "the host did not get ahead of the device", True),
]


@pytest.mark.parametrize(("error", "reason", "transient"), FAILURES, ids=lambda value: str(value)[:20])
def test_a_candidate_that_fails_to_run_is_survived(
    error: Exception, reason: str, transient: bool, caplog: pytest.LogCaptureFixture
) -> None:
    found = tuned()
    broken, sound = Candidate(1.0, fails=error), Candidate(20.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            measurement = found.measure(add_region(8, 4), builds(nvfuser=broken, triton=sound), CPU)
    assert measurement.winner == "triton" and measurement.decided
    assert measurement.failures == {"nvfuser": reason}
    assert broken.built == sound.built == 1
    assert [record.getMessage() for record in caplog.records] == [f"nvfuser is not considered for a region: {reason}"]
    kept = found.store.durable(measurement.key)
    assert kept is not None and set(kept.timings) == ({"triton"} if transient else {"triton", "nvfuser"})


def test_a_candidate_that_fails_to_compile_is_survived() -> None:
    def cannot() -> Any:
        raise ValueError("no such instruction")

    measurement = tuned().measure(add_region(8, 4), {"nvfuser": cannot, "triton": Candidate(3.0).build}, CPU)
    assert measurement.winner == "triton" and measurement.failures == {"nvfuser": "ValueError: no such instruction"}
    assert set(measurement.predictions({"triton": Prediction(), "nvfuser": Prediction()})) == {"triton"}


def test_if_all_fail_the_prediction_stands() -> None:
    broken = builds(nvfuser=Candidate(1.0, fails=RuntimeError("a")), triton=Candidate(1.0, fails=RuntimeError("b")))
    measurement = tuned().measure(add_region(8, 4), broken, CPU)
    assert not measurement.decided and measurement.winner == "nvfuser"
    predicted = {"nvfuser": Prediction(1.0), "triton": Prediction(2.0)}
    assert measurement.predictions(predicted) == predicted


def test_a_time_that_cannot_be_is_no_time() -> None:
    measurement = tuned().measure(add_region(8, 4), builds(a=Candidate(float("nan")), b=Candidate(2.0)), CPU)
    assert measurement.winner == "b" and measurement.failures == {"a": "nan µs cannot be"}


def test_a_device_that_fails_afterwards_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    found, second = tuned(), Candidate(2.0)
    monkeypatch.setattr(tuner, "_synchronize", dead)
    measurement = found.measure(add_region(8, 4), builds(a=Candidate(1.0), b=second), CPU)
    assert second.built == 0 and "illegal memory access" in measurement.reason and measurement.winner == "b"
    assert "illegal memory access" in found.measure(add_region(8, 8), builds(a=second, b=second), CPU).reason


def test_too_large_a_region_is_not_measured() -> None:
    one = Candidate(1.0)
    measurement = tuned(free=lambda device: 3 << 20).measure(add_region(1024, 128), builds(a=one, b=one), CPU)
    assert measurement.reason == "not measured: its data take 2 MB, and 1 MB may be taken"
    assert measurement.winner == "a" and one.built == 0 and not measurement.exhausted


def test_mistakes_outside_the_candidates_are_not_swallowed() -> None:
    def wrong(device: torch.device) -> int:
        raise AssertionError

    with pytest.raises(AssertionError):
        tuned(free=wrong).measure(add_region(8, 4), builds(a=Candidate(1.0), b=Candidate(1.0)), CPU)


# ---------------------------------------------------------------------- budget, reuse


def test_when_the_budget_is_used_up_the_prediction_stands() -> None:
    found = tuned(budget_s=0.7)
    first = found.measure(add_region(8, 4), builds(a=Candidate(2.0), b=Candidate(1.0)), CPU)
    assert first.winner == "b"
    late = Candidate(1.0)
    second = found.measure(add_region(8, 8), builds(a=late, b=late), CPU)
    assert second.exhausted and not second.decided and second.winner == "a" and late.built == 0
    assert found.spent_s == 1.0 and found.regions == 1
    again = found.measure(add_region(8, 4), builds(a=late, b=late), CPU)
    assert again.winner == "b" and again.decided, "what is known costs nothing"
    assert str(found) == "tuned 1 region in 1.0 s of 0.7 s, 1 known from before"


def test_half_a_measurement_decides_nothing_and_is_completed_later() -> None:
    store = MeasurementStore()
    slow, fast = Candidate(9.0), Candidate(1.0)
    half = tuned(budget_s=0.5, store=store).measure(add_region(8, 4), builds(a=slow, b=fast), CPU)
    assert half.exhausted and half.winner == "a" and set(half.timings) == {"a"}
    predicted = {"a": Prediction(1.0), "b": Prediction(2.0)}
    assert half.predictions(predicted) == predicted
    whole = tuned(store=store).measure(add_region(8, 4), builds(a=slow, b=fast), CPU)
    assert whole.decided and whole.winner == "b" and slow.built == fast.built == 1


def test_no_budget_measures_nothing() -> None:
    one = Candidate(1.0)
    assert tuned(budget_s=0.0).measure(add_region(8, 4), builds(a=one, b=one), CPU).exhausted
    assert one.built == 0


def test_equal_regions_are_measured_once_and_new_candidates_added(caplog: pytest.LogCaptureFixture) -> None:
    found, a, b, c = tuned(), Candidate(2.0), Candidate(3.0), Candidate(1.0)
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert found.measure(add_region(8, 4), builds(a=a, b=b), CPU).winner == "a"
        assert found.measure(add_region(8, 4), builds(a=a, b=b, c=c), CPU).winner == "c"
    assert found.measure(add_region(8, 4), builds(a=a, b=b), CPU).winner == "a", "only those that are asked for"
    assert a.built == b.built == c.built == 1
    assert found.reused == 5
    assert [record.getMessage() for record in caplog.records] == [
        "tuned r0: a 2.0 µs, b 3.0 µs → a, 1.00 s", "tuned r0: a 2.0 µs, b 3.0 µs, c 1.0 µs → c, 0.50 s"]


def test_the_key_knows_sizes_not_names() -> None:
    assert measurement_key(add_region(8, 4).spec, {}, CPU) == measurement_key(add_region(8, 4).spec, {}, CPU)
    assert measurement_key(add_region(8, 4).spec, {}, CPU) != measurement_key(add_region(8, 5).spec, {}, CPU)
    dynamic = add_region(24, 40, dynamic=True)
    assert dynamic.hints == {"s0": 24, "s1": 40}
    key = measurement_key(dynamic.spec, dynamic.hints, CPU)
    assert key == measurement_key(dynamic.spec, {"s0": 31, "s1": 33}, CPU)
    assert key != measurement_key(dynamic.spec, {"s0": 240, "s1": 40}, CPU)
    assert key != measurement_key(dynamic.spec, {"s0": 24, "s1": 40}, torch.device("cuda", 0))


def test_dynamic_sizes_are_measured_at_their_hints() -> None:
    shapes: set[tuple[int, ...]] = set()

    class Watching(Candidate):
        def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            shapes.update(tuple(tensor.shape) for tensor in inputs)
            return super().__call__(inputs)

    bound = add_region(24, 40, dynamic=True)
    tuned().measure(bound, builds(a=Watching(1.0), b=Candidate(1.0)), CPU)
    assert shapes == {(24, 40)}
    tuned().measure(bound, builds(a=Watching(1.0), b=Candidate(1.0)), CPU, {"s0": 3, "s1": 5})
    assert shapes == {(24, 40), (3, 5)}


# ---------------------------------------------------------------------- when, and where


@pytest.mark.parametrize(("tune", "unsure", "sure", "single"), [
    ("never", (), (), ()),
    ("unsure", ("nvfuser", "triton"), (), ()),
    ("always", ("nvfuser", "triton", "eager"), ("nvfuser", "triton", "eager"), ()),
])
def test_what_is_measured(tune: str, unsure: Any, sure: Any, single: Any) -> None:
    every = ("nvfuser", "triton", "eager")
    choices = [(Choice("nvfuser", 0.05, ("nvfuser", "triton")), every, unsure), (Decision((), 0.5, ()), every, sure),
               (Decision(), ("triton",), single)]
    for choice, executors, expected in choices:
        assert contenders(choice, tune, executors) == expected
        assert needs_measuring(choice, tune) == bool(expected)


def test_without_a_gpu_nothing_is_measured() -> None:
    one = Candidate(1.0)
    measurement = Tuner(20.0).measure(add_region(8, 4), builds(a=one, b=one), CPU)
    assert str(measurement) == "not measured → a (not measured: no GPU)"
    assert one.built == 0


def test_one_candidate_is_not_measured() -> None:
    one = Candidate(1.0)
    assert tuned().measure(add_region(8, 4), builds(a=one), CPU).reason == "not measured: nothing to compare"


def test_random_numbers_and_modes_stay_as_they_are() -> None:
    class Drawing(Candidate):
        def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            assert type(inputs[0] + torch.rand(1)) is torch.Tensor
            return super().__call__(inputs)

    before = torch.get_rng_state()
    with torch._subclasses.FakeTensorMode():
        measurement = tuned().measure(add_region(8, 4), builds(a=Drawing(1.0), b=Candidate(2.0)), CPU)
    assert measurement.failures == {} and torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------- as data


def test_measurements_survive_json() -> None:
    measurement = Measurement("key", {"a": Timing(1.5, 4.0), "b": Timing(reason="RuntimeError: no")}, ("b", "a"))
    assert Measurement.from_dict(json.loads(json.dumps(measurement.to_dict()))) == measurement
    store = MeasurementStore()
    store.add(measurement)
    assert store.get("key") == measurement.timings and len(store) == 1
    store.clear()
    assert len(store) == 0 and store.durable("key") is None


@pytest.mark.parametrize("damage", [
    {"timings": []}, {"timings": {"a": {"device_us": "fast"}}}, {"timings": {"a": {"device_us": -1.0}}},
    {"timings": {"a": {"device_us": float("nan")}}}, {"timings": {"a": {}}}, {"timings": {"a": {"us": 1.0}}},
    {"executors": None},
])
def test_damaged_measurements_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Measurement.from_dict({**Measurement("key", {"a": Timing(1.0)}, ("a",)).to_dict(), **damage})


# ---------------------------------------------------------------------- on a GPU


def profiled_us(run: Callable[[], object], calls: int = 20) -> float:
    """Device time a call, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(5):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in found.key_averages())) / calls


def softmax_on_gpu(rows: int, columns: int) -> tuple[CanonicalRegion, dict[str, Callable[[], Any]]]:
    (bound,) = bounds(graphs.built(softmax, torch.randn(rows, columns, device="cuda")), "cuda")
    candidates: dict[str, Callable[[], Any]] = {
        "triton": lambda: native_kernel(bound), "eager": lambda: eager(bound.spec, {}, torch.device("cuda", 0))}
    if availability.find().available:
        from dynafuse.lowering.nvfuser.kernel import FusionKernel
        from dynafuse.lowering.nvfuser.lower import lower
        from dynafuse.lowering.nvfuser.replay import define

        candidates["nvfuser"] = lambda: FusionKernel(bound.key, lower(bound.spec), define)
    return bound, candidates


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096), (64, 512)], ids=str)
def test_measured_times_are_true(shape: tuple[int, int]) -> None:
    device = torch.device("cuda", 0)
    bound, candidates = softmax_on_gpu(*shape)
    state, began = torch.cuda.get_rng_state(), time.monotonic()
    found = Tuner(60.0, store=MeasurementStore())
    measurement = found.measure(bound, candidates, device)
    print(measurement, f"{time.monotonic() - began:.1f} s")
    assert measurement.decided and measurement.failures == {}, str(measurement)
    assert torch.equal(state, torch.cuda.get_rng_state())
    times = {name: one.device_us for name, one in measurement.timings.items()}
    assert all(us is not None and us > 0 and (measurement.timings[n].host_us or 0) > 0 for n, us in times.items())
    assert all(one.captured for one in measurement.timings.values()), str(measurement)
    assert times[measurement.winner] == min(us for us in times.values() if us is not None)
    if shape[0] > 1000:  # small kernels: the profiler leaves out what a launch costs the device
        inputs = [torch.randn(shape, device=device)]
        for name, build in candidates.items():
            run = tuner.runner(build(), bound.spec, {}, device)
            # The least of a few: what else runs on the device may interrupt a kernel, but shortens none.
            independent = min(profiled_us(lambda run=run: run(inputs)) for _ in range(3))  # type: ignore[misc]
            assert independent / 2 < (times[name] or 0.0) < independent * 2, (name, independent, times[name])


@pytest.mark.gpu
def test_a_kernel_that_cannot_be_captured_is_timed_all_the_same() -> None:
    def waits(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if torch.cuda.is_current_stream_capturing():
            inputs[0].sum().item()
        return [inputs[0] + 1]

    bound, candidates = softmax_on_gpu(1024, 4096)
    stream = torch.cuda.current_stream()
    measurement = Tuner(60.0, store=MeasurementStore()).measure(
        bound, {"waits": lambda: waits, "triton": candidates["triton"]}, torch.device("cuda", 0))
    assert measurement.failures == {}, str(measurement)
    assert measurement.timings["triton"].captured and not measurement.timings["waits"].captured
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert bool((torch.rand(4, device="cuda") != torch.rand(4, device="cuda")).any()), "the generator works as before"


@pytest.mark.gpu
def test_out_of_memory_is_survived() -> None:
    def hungry(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty(1 << 45, dtype=torch.uint8, device="cuda")]

    bound, candidates = softmax_on_gpu(1024, 4096)
    measurement = Tuner(60.0, store=MeasurementStore()).measure(
        bound, {"hungry": lambda: hungry, "triton": candidates["triton"]}, torch.device("cuda", 0))
    assert measurement.winner == "triton" and measurement.failures == {"hungry": "out of memory"}


@pytest.mark.gpu
def test_the_clocks_agree_on_a_large_copy() -> None:
    source, target = (torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for _ in range(2))
    clock = Gpu()
    pairs = ((clock.device(lambda: target.copy_(source), 10), clock.replay(lambda: target.copy_(source), 10, 3, 3))
             for _ in range(5))  # other processes may use the device meanwhile
    assert any(by_events == pytest.approx(by_replay, rel=0.2) for by_events, by_replay in pairs)
