"""Calibration: that the constants of a device come back from its times, what is refused, and the command."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dynafuse.cost import calibration
from dynafuse.cost import device as devices
from dynafuse.cost.device import CLASSES, EXECUTORS, describe
from dynafuse.cost.model import predict
from dynafuse.cost.products import Product, product_tflops
from dynafuse.errors import DynafuseError
from dynafuse.tools import calibrate, cli
from dynafuse.tools.calibrate import Calibrator, Refused
from dynafuse.tools.calibrate_cases import BF16, Case, bandwidth_cases, chain, copied

SHIPPED = describe("h200")
OTHER = {
    "bandwidth_tbs": 2.5, "allocation_us": 1.7, "replay_us": 0.9, "launch_us_triton": 2.8, "launch_us_nvfuser": 3.1,
    "launch_us_eager": 2.2, "host_us_triton": 4.4, "host_us_nvfuser": 17.0, "host_us_eager": 9.0,
    "efficiency_triton_row": 0.7, "efficiency_nvfuser_rowcol": 0.5, "efficiency_eager_split": 0.3,
    "length_triton_row_16384": 0.6, "length_triton_rowcol_1024": 0.8, "length_nvfuser_row_65536": 0.9,
    "width_nvfuser_4": 1.1, "width_eager_4": 0.9,
    "contraction_tflops": 600.0, "contraction_share_8": 0.5, "contraction_share_4": 0.3, "contraction_share_2": 0.2,
}
TRUTH = SHIPPED.overridden(OTHER)


class Called:
    """A case that was built; the fake clocks look at it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


class Clocks:
    """Clocks on which everything takes as long as the cost model says of ``device``, by a noise that can be set."""

    def __init__(self, device: devices.Device = TRUTH, noise: Callable[[], float] = lambda: 1.0) -> None:
        self.truth = device
        self.noise = noise

    def device(self, run: Any, calls: int) -> float:
        case = run.case
        if case.name == "copy":
            us = case.work.bytes / self.truth.bandwidth_tbs / 1e6 + self.truth.launch_us_eager
        elif case.name.startswith("product"):
            value = Product.of(*(torch.empty(shape, dtype=case.dtype, device="meta") for shape in (
                case.shapes[0], case.shapes[1][::-1])))
            us = value.flops / product_tflops(value, self.truth) / 1e6 + self.truth.launch_us_eager
        elif not case.work.bytes:
            us = len(case.shapes) * self.truth.constants[f"launch_us_{case.executor}"]
        else:
            us = predict(case.work, self.truth, case.executor).device_us
        return us * self.noise()

    def host(self, run: Any, calls: int) -> float:
        case = run.case
        if case.name == "allocation":
            return self.truth.allocation_us * self.noise()
        each = self.truth.constants[f"host_us_{case.executor}"]
        each += self.truth.allocation_us if case.executor == "triton" else 0.0
        return (7.5 + len(case.shapes) * each) * self.noise()

    def replay(self, run: Any) -> float:
        return len(run.case.shapes) * self.truth.replay_us * self.noise()


def calibrator(clocks: Clocks, executors: tuple[str, ...] = EXECUTORS, **more: Any) -> Calibrator:
    return Calibrator(SHIPPED, dict.fromkeys(executors, Called), clocks, **more)


def measured(work: Calibrator) -> Calibrator:
    work.run()
    return work


# ---------------------------------------------------------------------- the arithmetic


def test_the_constants_of_a_device_come_back_from_its_times() -> None:
    work = measured(calibrator(Clocks()))
    assert work.refused == {}
    assert work.measured == {name: pytest.approx(TRUTH.constants[name], rel=1e-6) for name in work.measured}
    assert set(OTHER) <= set(work.measured)
    assert {f"efficiency_{e}_{kind}" for e in EXECUTORS for kind in CLASSES} <= set(work.measured)


def test_only_executors_at_hand_are_measured() -> None:
    work = measured(calibrator(Clocks(), ("triton", "eager")))
    assert work.refused == {} and not any("nvfuser" in name for name in work.measured)


def test_moderate_noise_is_averaged_out() -> None:
    noise = iter([1.0, 1.05, 0.95, 1.4, 1.0, 0.98, 1.02] * 10**4)
    work = measured(calibrator(Clocks(noise=lambda: next(noise))))
    assert work.measured["bandwidth_tbs"] == pytest.approx(2.5, rel=0.02)
    assert work.measured["efficiency_triton_row"] == pytest.approx(0.7, rel=0.03)


def test_samples_that_scatter_are_refused() -> None:
    noise = iter([1.0, 3.0, 0.3, 2.0, 0.5, 1.5, 4.0] * 10**4)
    work = measured(calibrator(Clocks(noise=lambda: next(noise))))
    assert work.measured == {}
    assert work.refused["bandwidth_tbs"].startswith("samples scatter")


@pytest.mark.parametrize(("constants", "refused"), [
    ({"bandwidth_tbs": 1000.0}, "bandwidth_tbs"),
    ({"bandwidth_tbs": 0.001}, "bandwidth_tbs"),
    ({"efficiency_triton_row": 5.0}, "efficiency_triton_row"),
    ({"launch_us_eager": 500.0}, "launch_us_eager"),
    ({"host_us_nvfuser": 0.01}, "host_us_nvfuser"),
    ({"replay_us": float("nan")}, "replay_us"),
    ({"allocation_us": 0.0}, "allocation_us"),
    ({"length_nvfuser_rowcol_16384": 30.0}, "length_nvfuser_rowcol_16384"),
])
def test_values_that_cannot_be_are_refused(constants: dict[str, float], refused: str) -> None:
    work = measured(calibrator(Clocks(SHIPPED.overridden(constants))))
    assert refused in work.refused and refused not in work.measured
    assert work.device.constants[refused] == SHIPPED.constants[refused]


def test_factors_without_their_base_are_refused() -> None:
    work = measured(calibrator(Clocks(SHIPPED.overridden({"efficiency_triton_row": 5.0}))))
    assert work.refused["length_triton_row_1024"] == "rests on efficiency_triton_row, which was not measured"
    assert "length_nvfuser_row_1024" in work.measured


def test_an_executor_that_fails_costs_only_its_own_constants() -> None:
    def broken(case: Case) -> Called:
        raise RuntimeError("CUDA error:\n  out of memory")

    work = Calibrator(SHIPPED, {"triton": Called, "nvfuser": broken, "eager": Called}, Clocks())
    work.run()
    assert {name for name in work.refused if "nvfuser" not in name} == set()
    assert work.refused["efficiency_nvfuser_row"] == "CUDA error: out of memory"
    assert work.measured["efficiency_triton_row"] == pytest.approx(0.7)


def test_mistakes_of_ours_are_not_swallowed() -> None:
    def wrong(case: Case) -> Called:
        raise AssertionError

    with pytest.raises(AssertionError):
        Calibrator(SHIPPED, {"eager": wrong}, Clocks()).run()


def test_what_time_is_left_for_is_kept() -> None:
    now = iter(range(1000))
    work = measured(calibrator(Clocks(), clock=lambda: float(next(now)), seconds=9.5))
    assert len(work.measured) == 9 and "allocation_us" in work.measured
    assert set(work.refused.values()) == {"no time left"}


def test_progress_hears_of_every_constant() -> None:
    heard: list[str] = []
    work = calibrator(Clocks())
    work.run(heard.append)
    assert heard == [name for name, _ in work.steps()] and len(set(heard)) == len(heard)
    assert set(heard) <= SHIPPED.constants.keys()


# ---------------------------------------------------------------------- the cases

SMALL = 400_000


def all_cases(executor: str) -> list[Case]:
    lengths = {"row": (256, 4096), "rowcol": (1024,)}
    found = [chain(executor, 3)]
    for kind in CLASSES:
        for length in lengths.get(kind, (4096,)):
            found += bandwidth_cases(executor, kind, length, BF16, SMALL)
    return found


def inputs_of(case: Case) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=case.dtype) for shape in case.shapes]


@pytest.mark.parametrize("case", [copied(SMALL), *all_cases("eager"), *all_cases("triton")],
                         ids=lambda case: f"{case.executor} {case.name} {case.work.length}")
def test_work_counts_the_bytes_of_inputs_and_outputs(case: Case) -> None:
    inputs = inputs_of(case)
    outputs = case.function(*inputs)
    moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
    if case.work.bytes:
        assert case.work.bytes == pytest.approx(moved, rel=0.02)
        assert SMALL * 0.6 < moved < SMALL * 1.1


@pytest.mark.parametrize("case", all_cases("triton"), ids=lambda case: f"{case.name} {case.work.length}")
def test_fused_cases_are_kernels_of_the_executor_and_right(case: Case) -> None:
    inputs = inputs_of(case)
    outputs = calibrate.bound("triton", case, inputs)()
    wide = case.function(*(tensor.double() for tensor in inputs))
    for mine, exact in zip(outputs, wide, strict=True):  # type: ignore[call-overload]
        error = (mine.double() - exact).norm() / exact.norm()
        assert error < 2e-2, "bfloat16 has eight bits"


def test_an_executor_that_was_not_given_the_kernel_is_refused() -> None:
    with pytest.raises(Refused, match="eager was not given the kernel"):
        calibrate.bound("eager", chain("triton", 1), inputs_of(chain("triton", 1)))


# ---------------------------------------------------------------------- the command


def test_without_a_gpu_it_ends_with_status_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate"]) == 2
    assert capsys.readouterr().err == "dynafuse: no CUDA device is available: there is nothing to calibrate\n"


def test_interpreted_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calibrate, "interpreting", lambda: True)
    with pytest.raises(DynafuseError, match="without TRITON_INTERPRET"):
        calibrate.main()


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU of fake times, and an empty cache folder."""
    class Properties:
        name, multi_processor_count, major, minor, total_memory = "NVIDIA H200", 132, 9, 0, 150 * 10**9

    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    for name, value in (("is_available", True), ("current_device", 0), ("empty_cache", None),
                        ("get_device_properties", Properties)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(calibrate, "interpreting", lambda: False)
    monkeypatch.setattr(calibrate, "executors_at_hand", lambda: dict.fromkeys(EXECUTORS, Called))
    monkeypatch.setattr(calibrate, "Gpu", Clocks)
    devices.at_hand.cache_clear()


def test_what_was_measured_is_shown_stored_and_used(pretended: None) -> None:
    shown = io.StringIO()
    assert devices.at_hand(0) is SHIPPED
    assert calibrate.main(console=Console(file=shown, width=100)) == 0
    lines = [line.split() for line in shown.getvalue().splitlines() if "bandwidth_tbs" in line]
    assert [[cell for cell in line if cell not in "│┃"] for line in lines] == [["bandwidth_tbs", "4.12", "2.5", "0.61"]]
    assert devices.at_hand(0).kind == "calibrated"
    assert devices.at_hand(0).bandwidth_tbs == pytest.approx(2.5, rel=1e-3)
    devices.at_hand.cache_clear()


def test_without_a_bandwidth_nothing_is_stored(
    pretended: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate, "Gpu", lambda: Clocks(SHIPPED.overridden({"bandwidth_tbs": 1000.0})))
    shown = io.StringIO()
    assert calibrate.main(console=Console(file=shown, width=200)) == 1
    assert "bandwidth_tbs keeps 4.12: 1000 cannot be: expected 0.02 to 50" in shown.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_the_seconds_of_the_command_line_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(calibrate, "main", lambda seconds: given.append(seconds) or 0)
    assert cli.main(["calibrate"]) == cli.main(["calibrate", "--seconds", "7.5"]) == 0
    assert given == [calibrate.SECONDS, 7.5]


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="others are on the device: run it alone")
def test_calibration_of_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    devices.at_hand.cache_clear()
    shown = io.StringIO()
    began = time.monotonic()
    assert calibrate.main(console=Console(file=shown, width=120)) == 0
    assert time.monotonic() - began < 60, shown.getvalue()
    print(shown.getvalue())
    (found,) = calibration.stored(devices.COST_CONSTANTS)
    expected = {name for name in SHIPPED.constants if name.startswith(("efficiency_triton", "efficiency_eager"))}
    # Whoever else is on the device or its host may keep some from being measured, and each is told of.
    kept = set(re.findall(r"(\w+) keeps [\d.]+: ", shown.getvalue()))
    assert expected <= found.constants.keys() | kept and 2 * len(expected & kept) < len(expected), shown.getvalue()
    assert 0.5 < found.constants.get("efficiency_triton_pointwise", 1.0) < 1.3
    assert 0.3 < found.constants.get("efficiency_triton_row", 1.0) < 1.3
    for name, most in (("launch_us_triton", 10), ("host_us_triton", 60)):
        assert name in kept or found.constants[name] < most, shown.getvalue()
    assert devices.at_hand(0).kind == "calibrated"
    devices.at_hand.cache_clear()
