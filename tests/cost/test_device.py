"""Descriptions of devices: what is shipped, overriding, interpolation, and stored calibrations."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import stat
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynafuse import config
from dynafuse.cost import calibration
from dynafuse.cost import device as devices
from dynafuse.cost.calibration import Calibration
from dynafuse.cost.device import BY_LENGTH, CLASSES, COST_CONSTANTS, EXECUTORS, LENGTHS, WIDTHS, describe
from dynafuse.errors import OptionError

KINDS_OF_SOURCE = ("measured", "data sheet", "estimated", "carried over from")
NAMES = frozenset(COST_CONSTANTS)
HERE = {"torch": "2.11.0", "triton": "3.6.0", "nvfuser": "none", "dynafuse": "0.1.0", "driver": "580.0"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, fixed versions."""
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "versions", lambda: dict(HERE))
    return tmp_path / "cache"


def made(**changes: Any) -> Calibration:
    given_ = {"device": "NVIDIA H200", "versions": HERE, "date": "2026-11-21T12:00:00+00:00",
              "constants": {"bandwidth_tbs": 4.0}}
    return Calibration(**{**given_, **changes})


# ---------------------------------------------------------------------- what is shipped


def test_shipped_descriptions() -> None:
    assert devices.known() == ("a100", "cpu", "h100", "h200")


@pytest.mark.parametrize("name", ["a100", "cpu", "h100", "h200"])
def test_every_constant_is_there_and_says_where_it_comes_from(name: str) -> None:
    device = describe(name)
    assert device.constants.keys() == device.sources.keys() == NAMES
    assert all(device.sources[constant].startswith(KINDS_OF_SOURCE) for constant in NAMES), device.sources
    assert device.kind == "shipped" and device.name == name


def test_constants_of_data_sheets_carry_the_rest_over() -> None:
    h100, h200 = describe("h100"), describe("h200")
    own = {name for name, source in h100.sources.items() if not source.startswith("carried over from h200")}
    assert own == {"bandwidth_tbs", "flops_tflops", "contraction_tflops", "processors"}
    assert all(h100.sources[name].startswith("data sheet") for name in own)
    assert h100.bandwidth_tbs < h200.bandwidth_tbs
    assert h100.efficiency_nvfuser_row == h200.efficiency_nvfuser_row


def test_shipped_files_have_one_line_per_constant() -> None:
    text = (resources.files("dynafuse.cost") / "devices" / "h200.json").read_text(encoding="utf-8")
    assert sum('"value"' in line for line in text.splitlines()) == len(COST_CONSTANTS)


def test_unknown_device_lists_the_known() -> None:
    with pytest.raises(OptionError, match="known: a100, cpu, h100, h200"):
        describe("h300")


def test_names_of_constants_are_systematic() -> None:
    for executor in EXECUTORS:
        assert {f"efficiency_{executor}_{kind}" for kind in CLASSES} <= NAMES
        assert {f"length_{executor}_{kind}_{length}" for kind in BY_LENGTH for length in LENGTHS} <= NAMES
        assert {f"width_{executor}_{width}" for width in WIDTHS} <= NAMES
        assert {f"launch_us_{executor}", f"host_us_{executor}", f"compile_s_{executor}"} <= NAMES
    assert all(len(doc) > 20 for doc in COST_CONSTANTS.values())


# ---------------------------------------------------------------------- overriding


@pytest.mark.parametrize("name", sorted(COST_CONSTANTS))
def test_every_constant_is_overridden_by_environment_and_options(name: str) -> None:
    environ = {f"DYNAFUSE_COST_{name.upper()}": "0.125"}
    from_environment = config.resolve(None, None, environ).cost
    assert from_environment == {name: 0.125}
    assert getattr(describe("h200").overridden(from_environment), name) == 0.125
    from_options = config.resolve(None, {"cost": {name: 0.5}}, environ).cost
    device = describe("h100").overridden(from_options)
    assert getattr(device, name) == 0.5
    assert device.sources[name] == "override"


def test_unknown_constants_list_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"did you mean 'efficiency_nvfuser_row'.*valid: .*bandwidth_tbs.*replay_us"):
        config.resolve(None, {"cost": {"efficiency_nvfuser_rows": 1.0}}, {})


def test_overriding_leaves_the_original_alone() -> None:
    before = describe("h200").bandwidth_tbs
    changed = describe("h200").overridden({"bandwidth_tbs": before / 2})
    assert (changed.bandwidth_tbs, describe("h200").bandwidth_tbs) == (before / 2, before)
    assert describe("h200").overridden({}) is describe("h200")


def test_missing_attributes_are_errors_and_devices_copy_and_pickle() -> None:
    device = describe("h200")
    with pytest.raises(AttributeError, match="bandwith"):
        device.bandwith  # noqa: B018
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device


# ---------------------------------------------------------------------- efficiency by length and width


def test_efficiency_at_the_known_lengths() -> None:
    device = describe("h200").overridden({"efficiency_triton_row": 0.5, "length_triton_row_16384": 1.5})
    assert device.efficiency("triton", "row", 4096) == 0.5
    assert device.efficiency("triton", "row", 16384) == 0.75
    assert device.efficiency("triton", "row", 8192) == pytest.approx(0.5 * 1.25), "half way in the logarithm"
    assert device.efficiency("triton", "row", 0) == 0.5
    assert device.efficiency("triton", "row", 1) == device.efficiency("triton", "row", 256)
    assert device.efficiency("triton", "row", 10**7) == device.efficiency("triton", "row", 65536)
    assert device.efficiency("triton", "split", 16384) == device.efficiency_triton_split


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from(EXECUTORS), st.sampled_from(BY_LENGTH))
def test_efficiency_lies_between_the_outer_factors_and_has_no_jumps(a: int, b: int, executor: str, kind: str) -> None:
    device = describe("h200")
    factors = [1.0, *(device.constants[f"length_{executor}_{kind}_{length}"] for length in LENGTHS)]
    base = device.constants[f"efficiency_{executor}_{kind}"]
    of_a, of_b = device.efficiency(executor, kind, a), device.efficiency(executor, kind, b)
    assert base * min(factors) - 1e-9 <= of_a <= base * max(factors) + 1e-9
    if abs(a - b) <= 0.01 * min(a, b):
        assert of_a == pytest.approx(of_b, rel=0.02)


@pytest.mark.parametrize(("width", "constant"), [(1, "1"), (3, "4"), (4, "4"), (8, "8"), (16, "8")])
def test_width_picks_the_nearest_factor(width: int, constant: str) -> None:
    device = describe("h200").overridden({f"width_eager_{constant}": 0.25})
    assert device.efficiency("eager", "pointwise", width=width) == 0.25 * device.efficiency_eager_pointwise
    assert device.efficiency("eager", "pointwise", width=2) == device.efficiency_eager_pointwise


# ---------------------------------------------------------------------- the device at hand


def properties(name: str, processors: int, major: int = 9) -> SimpleNamespace:
    return SimpleNamespace(name=name, multi_processor_count=processors, major=major, minor=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that there is a GPU."""
    def set_(name: str, processors: int) -> None:
        monkeypatch.setattr(devices.torch.cuda, "get_device_properties", lambda index: properties(name, processors))
        devices.at_hand.cache_clear()

    yield set_
    devices.at_hand.cache_clear()


def test_shipped_when_name_and_size_agree(gpu: Any) -> None:
    gpu("NVIDIA H100 80GB HBM3", 132)
    assert devices.at_hand(0) is describe("h100")


def test_a_smaller_card_of_the_name_is_scaled_from_its_own_description(gpu: Any) -> None:
    gpu("NVIDIA H100 PCIe", 66)
    device = devices.at_hand(0)
    assert device.kind == "scaled" and device.source == "scaled from h100 by processors"
    assert device.bandwidth_tbs == pytest.approx(describe("h100").bandwidth_tbs / 2)
    assert device.processors == 66 and device.capability == 90


def test_an_unknown_card_is_scaled_from_the_h200(gpu: Any) -> None:
    gpu("NVIDIA B1000", 264)
    device = devices.at_hand(0)
    assert device.bandwidth_tbs == pytest.approx(2 * describe("h200").bandwidth_tbs)
    assert device.launch_us_triton == describe("h200").launch_us_triton
    assert device.sources["bandwidth_tbs"] == "scaled from h200 by processors"


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that the machine has so many cores."""
    def set_(count: int | None) -> None:
        monkeypatch.setattr(devices.os, "cpu_count", lambda: count)
        devices.of_host.cache_clear()

    yield set_
    devices.of_host.cache_clear()


@pytest.mark.parametrize(("count", "processors", "bandwidth"), [(2, 2, 1), (8, 8, 4), (128, 128, 8), (None, 1, 0.5)])
def test_the_cpu_is_scaled_by_cores_and_its_memory_is_filled_by_some(
    cores: Any, count: int | None, processors: int, bandwidth: float
) -> None:
    cores(count)
    device, shipped = devices.of_host(), describe("cpu")
    assert (device.processors, device.capability, device.name) == (processors, 0, "cpu")
    assert device.bandwidth_tbs == pytest.approx(bandwidth * shipped.bandwidth_tbs)
    for rate in devices.RATES:
        assert device.constants[rate] == pytest.approx(processors / 2 * shipped.constants[rate])
    assert (device is shipped) == (count == 2)


def test_calibrated_comes_before_shipped(gpu: Any) -> None:
    gpu("NVIDIA H200", 132)
    calibration.save(made())
    device = devices.at_hand(0)
    assert (device.kind, device.name, device.bandwidth_tbs) == ("calibrated", "h200", 4.0)
    assert device.sources["bandwidth_tbs"] == "calibrated"
    assert device.launch_us_eager == describe("h200").launch_us_eager
    assert devices.not_calibrated(0) is describe("h200")


def test_other_versions_are_ignored(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("NVIDIA H200", 132)
    calibration.save(made())
    monkeypatch.setattr(calibration, "versions", lambda: {**HERE, "torch": "2.12.0"})
    assert devices.at_hand(0) is describe("h200")


# ---------------------------------------------------------------------- storage


def test_round_trip() -> None:
    one = made(constants={"bandwidth_tbs": 4.0, "launch_us_triton": 1.25})
    path = calibration.save(one)
    assert calibration.load("NVIDIA H200", NAMES) == one
    assert calibration.load("NVIDIA H100", NAMES) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half-written is left"


def test_folder_is_the_users_own() -> None:
    assert stat.S_IMODE(calibration.save(made()).parent.stat().st_mode) == 0o700
    calibration.folder().chmod(0o755)
    assert stat.S_IMODE(calibration.save(made()).parent.stat().st_mode) == 0o700


def test_versions_and_devices_have_files_of_their_own() -> None:
    paths = {calibration.save(one) for one in (
        made(), made(versions={**HERE, "driver": "581.0"}), made(device="NVIDIA H100"), made(date="2027-01-01"))}
    assert len(paths) == 3, "a newer measurement replaces the older one"
    assert [one.date for one in calibration.stored(NAMES)] == ["2026-11-21T12:00:00+00:00"] * 2 + ["2027-01-01"]


def test_no_folder_is_no_calibration(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert calibration.load("NVIDIA H200", NAMES) is None
    assert calibration.stored(NAMES) == []
    assert not cache.exists() and not caplog.records


GOOD = {"device": "NVIDIA H200", "versions": HERE, "date": "2026", "constants": {"bandwidth_tbs": 4.0}, "format": 1}


@pytest.mark.parametrize(("text", "words"), [
    ("", "Expecting value"),
    ('{"format": 1', "Expecting"),
    ("[]", "not a calibration"),
    (json.dumps({**GOOD, "format": 2}), "not a calibration of this format"),
    (json.dumps({**GOOD, "more": 1}), "more"),
    (json.dumps({key: value for key, value in GOOD.items() if key != "date"}), "date"),
    (json.dumps({**GOOD, "date": 2026}), "have to be texts"),
    (json.dumps({**GOOD, "constants": {"bandwidth": 4.0}}), "unknown constants bandwidth"),
    (json.dumps({**GOOD, "constants": {"bandwidth_tbs": "4"}}), "bandwidth_tbs is '4'"),
    (json.dumps({**GOOD, "constants": {"bandwidth_tbs": True}}), "bandwidth_tbs is True"),
    (json.dumps({**GOOD, "constants": {"bandwidth_tbs": -1.0}}), "bandwidth_tbs is -1.0"),
    (json.dumps({**GOOD, "constants": {"bandwidth_tbs": float("nan")}}), "bandwidth_tbs is nan"),
    (json.dumps({**GOOD, "constants": [1]}), "have to be objects"),
    (json.dumps({**GOOD, "versions": "all"}), "have to be objects"),
    (json.dumps({**GOOD, "device": "NVIDIA A100"}), "it is for NVIDIA A100"),
    (json.dumps({**GOOD, "versions": {**HERE, "torch": "1.0"}}), "it is for NVIDIA H200 with"),
])
def test_damaged_and_foreign_files_are_logged_and_ignored(
    text: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    calibration.save(made()).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert calibration.load("NVIDIA H200", NAMES) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("ignored ") and words in record.getMessage()


def test_files_of_other_users_are_ignored(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calibration.save(made())
    mine = os.getuid()
    monkeypatch.setattr(calibration.os, "getuid", lambda: mine + 1)
    assert calibration.load("NVIDIA H200", NAMES) is None
    assert "another user owns it" in caplog.text


def test_versions_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = calibration.versions()
    assert set(found) == {"dynafuse", "torch", "triton", "nvfuser", "driver"}
    import torch

    assert torch.__version__.startswith(found["torch"].split("+")[0])


def test_driver_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(calibration, "DRIVER", file)
    assert calibration.driver() == "none"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13\n")
    assert calibration.driver() == "580.159.04"
