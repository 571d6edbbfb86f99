"""The doctor: what it says of healthy and of broken machines, each finding by itself, and the command."""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dynafuse.cost import calibration
from dynafuse.cost import device as devices
from dynafuse.cost.calibration import Calibration
from dynafuse.lowering.inductor import availability as inductor
from dynafuse.lowering.nvfuser.availability import Availability
from dynafuse.tools import cli, doctor
from dynafuse.tools.doctor import FAULT, FINE, NOTE, Finding

Capture = pytest.CaptureFixture[str]
HERE = {"dynafuse": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "nvfuser": "none", "driver": "580.0"}


class Machine:
    """What the doctor looks at, to be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.patch = monkeypatch.setattr
        self.setenv = monkeypatch.setenv
        for name in [name for name in os.environ if name.startswith("DYNAFUSE_")]:
            monkeypatch.delenv(name)
        self.cache = cache
        self.setenv("DYNAFUSE_CACHE_DIR", str(cache))
        self.versions = dict(HERE)
        self.patch(calibration, "versions", lambda: dict(self.versions))
        self.patch(calibration, "driver", lambda: self.versions["driver"])
        self.patch(torch, "__version__", "2.11.0+cu130")
        self.patch(torch.version, "cuda", "13.0")
        self.interpreting(False)
        self.compiler("")
        self.nvfuser(Availability(True, "nvfuser-cu130-torch211 0.3", "nvfuser-cu130-torch211", "0.3"))
        self.gpu("NVIDIA H200", 132)

    def interpreting(self, value: bool) -> None:
        self.patch(doctor, "interpreting", lambda: value)

    def compiler(self, failure: str | None) -> None:
        """A C++ compiler: None for none, else what is wrong with it, or ""."""
        there = inductor.Availability(failure is not None, "g++" if failure is not None else "no C++ compiler: install g++")
        self.patch(doctor.inductor, "find", lambda device: there)
        self.patch(doctor, "_compile_failure", lambda name: failure)

    def nvfuser(self, found: Availability) -> None:
        self.patch(doctor.availability, "find", lambda: found)

    def gpu(self, name: str | None, processors: int = 0) -> None:
        class Properties:
            multi_processor_count, major, minor = processors, 9, 0

        Properties.name = name  # type: ignore[attr-defined]
        for attribute, value in (("is_available", name is not None), ("current_device", 0), ("device_count", 1),
                                 ("get_device_properties", Properties)):
            self.patch(torch.cuda, attribute, lambda *_, value=value: value)
        devices.at_hand.cache_clear()

    def calibrated(self, days: float, **changes: Any) -> None:
        then = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=days)
        fields = {"device": "NVIDIA H200", "versions": self.versions, "date": then.isoformat(), "constants": {"bandwidth_tbs": 4.0}}
        calibration.save(Calibration(**{**fields, **changes}))
        devices.at_hand.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A healthy machine with an H200."""
    yield Machine(monkeypatch, tmp_path / "cache")
    devices.at_hand.cache_clear()


def states() -> dict[str, str]:
    return {one.name: one.state for one in doctor.findings()}


def finding(name: str) -> Finding:
    return next(one for one in doctor.findings() if one.name == name)


# ---------------------------------------------------------------------- the whole


def test_a_healthy_machine_has_no_faults(machine: Machine) -> None:
    machine.calibrated(days=1.5)
    assert set(states().values()) == {FINE}
    assert finding("calibration").found == "1 constants, 1 days old"
    shown = io.StringIO()
    assert doctor.main(console=Console(file=shown, width=120)) == 0
    assert "everything that dynafuse needs is there" in shown.getvalue() and "→" not in shown.getvalue()


def test_every_shortcoming_says_what_to_do(machine: Machine) -> None:
    machine.versions.update(triton="3.5.1")
    machine.patch(torch, "__version__", "2.9.1")
    machine.compiler(None)
    machine.nvfuser(Availability(False, "it is for another torch"))
    machine.setenv("DYNAFUSE_WORKERS", "0")
    machine.setenv("DYNAFUSE_CACHE_DIR", "/dev/null/cache")
    found = doctor.findings()
    short = [one for one in found if one.state != FINE]
    assert {one.name for one in short} == {"torch", "Triton", "C++ compiler", "nvFuser", "calibration", "cache",
                                             "workers"}
    assert all(one.advice for one in short)
    shown = io.StringIO()
    assert doctor.main(console=Console(file=shown, width=200)) == 1
    assert "3 faults" in shown.getvalue()
    assert all(one.advice in " ".join(shown.getvalue().split()) for one in short)


def test_long_findings_wrap_in_their_column(machine: Machine) -> None:
    machine.setenv("DYNAFUSE_REPRO_DIR", "/" + "x" * 500)
    shown = io.StringIO()
    doctor.main(console=Console(file=shown, width=300))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= doctor.WIDTH
    assert sum(line.count("x") for line in lines if line.startswith(" ") or "environment" in line) >= 500


def test_json_is_the_same_as_data(machine: Machine, capsys: Capture) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    assert data["findings"] == [vars(one) for one in doctor.findings()]
    machine.versions["triton"] = "none"
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_on_this_machine_as_installed_users_start_it(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DYNAFUSE_")}
    environment |= {"DYNAFUSE_CACHE_DIR": str(tmp_path / "new"), "DYNAFUSE_STRICT": "1"}
    code = "import sys; from dynafuse.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == any(one["state"] == FAULT for one in found.values())
    assert found["torch"]["found"].startswith(torch.__version__)
    assert found["environment"]["found"] == f"DYNAFUSE_CACHE_DIR={tmp_path / 'new'}, DYNAFUSE_STRICT=1"
    assert found["cache"]["found"] == f"{tmp_path / 'new'}, not yet made"
    assert not (tmp_path / "new").exists(), "looking leaves nothing behind"


# ---------------------------------------------------------------------- finding by finding


@pytest.mark.parametrize(("version", "state"), [
    ("2.9.1", FAULT), ("2.10.0", FINE), ("2.11.0+cu130", FINE), ("2.13.0+cpu", FINE), ("2.14.0a0+git12", NOTE),
])
def test_torch_versions(version: str, state: str, machine: Machine) -> None:
    machine.patch(torch, "__version__", version)
    assert finding("torch").state == state and version in finding("torch").found


@pytest.mark.parametrize(("version", "interprets", "state"), [
    ("none", False, FAULT), ("3.5.9", False, FAULT), ("3.6.0", False, FINE), ("3.10.0", False, FINE), ("3.6.0", True, NOTE),
])
def test_triton_versions(version: str, interprets: bool, state: str, machine: Machine) -> None:
    machine.versions["triton"] = version
    machine.interpreting(interprets)
    assert finding("Triton").state == state


def test_without_triton_nothing_asks_it(machine: Machine) -> None:
    def missing() -> bool:
        raise ImportError("triton")

    machine.versions["triton"] = "none"
    machine.patch(doctor, "interpreting", missing)
    machine.gpu(None)
    assert states()["Triton"] == FAULT


def test_nvfuser_that_does_not_match_is_no_fault(machine: Machine) -> None:
    machine.nvfuser(Availability(False, "built for torch 2.10"))
    assert finding("nvFuser").state == NOTE and "built for torch 2.10" in finding("nvFuser").found
    machine.nvfuser(Availability(True, "built for torch 2.10, but allowed", matched=False))
    assert finding("nvFuser").state == NOTE and "DYNAFUSE_NVFUSER_UNMATCHED" in finding("nvFuser").advice


def test_a_machine_without_a_gpu_has_no_faults(machine: Machine) -> None:
    machine.gpu(None)
    machine.versions["driver"] = "none"
    machine.nvfuser(Availability(False, "no module"))
    assert set(states().values()) == {FINE}
    assert "C++" in finding("GPU").found and doctor.main(console=Console(file=io.StringIO())) == 0
    assert finding("cost model").found.startswith("CPU of ")
    machine.interpreting(True)
    assert finding("GPU").state == NOTE and "TRITON_INTERPRET" in finding("GPU").advice and finding("Triton").state == FINE
    assert finding("cost model").found.startswith("NVIDIA H200")
    assert doctor.main(console=Console(file=io.StringIO())) == 0


@pytest.mark.parametrize(("failure", "words"), [(None, "none: no C++ compiler"), ("omp.h: no such file", "omp.h: no such file")])
def test_a_compiler_is_needed_where_there_is_no_gpu(failure: str | None, words: str, machine: Machine) -> None:
    machine.compiler(failure)
    assert finding("C++ compiler").state == NOTE and words in finding("C++ compiler").found
    machine.gpu(None)
    assert finding("C++ compiler").state == FAULT
    assert doctor.main(console=Console(file=io.StringIO())) == 1
    machine.interpreting(True)
    assert finding("C++ compiler").state == NOTE


def test_the_compiler_is_tried(tmp_path: Path) -> None:
    def program(text: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    assert doctor._compile_failure("g++") == ""
    assert doctor._compile_failure(program("echo 'probe.cpp:3: fatal error: no header' >&2; exit 1")).endswith("no header")
    assert doctor._compile_failure(program("exit 3")) == "it ends with status 3 and leaves no library"
    assert doctor._compile_failure(program("exit 0")) == "it ends with status 0 and leaves no library"
    assert "No such file" in doctor._compile_failure(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("cuda", "driver", "words"), [
    (None, "580.0", "built without CUDA"), ("13.0", "580.0", "CUDA 13.0 finds no GPU"),
])
def test_why_there_is_no_gpu(cuda: str | None, driver: str, words: str, machine: Machine) -> None:
    machine.gpu(None)
    machine.versions["driver"] = driver
    machine.patch(torch.version, "cuda", cuda)
    assert finding("GPU").state == FAULT and words in finding("GPU").found


def test_description_in_use(machine: Machine) -> None:
    assert finding("cost model").found.startswith("NVIDIA H200 (shipped")
    machine.calibrated(days=0)
    assert finding("cost model").found.startswith("NVIDIA H200 (calibrated")
    machine.gpu("NVIDIA B1000", 200)
    scaled = finding("cost model")
    assert (scaled.state, scaled.found) == (NOTE, "NVIDIA B1000 (scaled; scaled from h200 by processors)")
    assert "dynafuse calibrate" in scaled.advice
    machine.setenv("DYNAFUSE_DEVICE", "a100")
    assert finding("cost model").found.startswith("NVIDIA A100 80GB SXM (shipped; DYNAFUSE_DEVICE")


def test_calibration_that_is_missing_old_or_of_other_versions(machine: Machine) -> None:
    assert finding("calibration").state == NOTE and finding("calibration").found == "none"
    machine.calibrated(days=0, device="NVIDIA H100")
    assert finding("calibration").found == "none", "another device's does not count"
    machine.calibrated(days=0, versions={**HERE, "torch": "2.10.0"})
    assert finding("calibration").found == "not used: torch was 2.10.0, is 2.11.0"
    machine.calibrated(days=91)
    assert finding("calibration").state == NOTE and "91 days old" in finding("calibration").found
    machine.calibrated(days=89)
    assert finding("calibration").state == FINE
    machine.calibrated(days=0, date="yesterday")
    assert finding("calibration").state == NOTE


def test_cache_folder(machine: Machine, tmp_path: Path) -> None:
    assert finding("cache").found == f"{machine.cache}, not yet made"
    (machine.cache / "kernels").mkdir(parents=True)
    (machine.cache / "kernels" / "a").write_bytes(b"x" * 1_500_000)
    (machine.cache / "b").write_bytes(b"x" * 500_000)
    assert finding("cache").found == f"{machine.cache}, 2 files, 2.0 MB"
    mine = os.getuid()
    machine.patch(doctor.os, "getuid", lambda: mine + 1)
    assert finding("cache").state == FAULT and "another user" in finding("cache").found


@pytest.mark.parametrize("folder", [
    "{file}", "{file}/below", "{file}/below/deeper", "/proc/dynafuse", "/proc/dynafuse/below", "/dev/null/cache", "/" + "x" * 300,
])
def test_a_cache_that_cannot_be_written_is_a_fault(folder: str, machine: Machine, tmp_path: Path) -> None:
    """Asking for permissions does not tell: to root they say yes everywhere."""
    file = tmp_path / "file"
    file.write_text("")
    path = folder.format(file=file)
    machine.setenv("DYNAFUSE_CACHE_DIR", path)
    found = finding("cache")
    assert found.state == FAULT and found.found.startswith(f"{path} cannot be written: ") and found.advice
    assert doctor.main(console=Console(file=io.StringIO())) == 1


def test_looking_at_the_cache_leaves_nothing(machine: Machine, tmp_path: Path) -> None:
    machine.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path / "a" / "b" / "c"))
    assert finding("cache").state == FINE and not (tmp_path / "a").exists()
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert finding("cache").state == FINE and list((tmp_path / "a" / "b" / "c").iterdir()) == []


@pytest.mark.parametrize(("variable", "value", "words"), [
    ("DYNAFUSE_STRIKT", "1", "did you mean 'DYNAFUSE_STRICT'"),
    ("DYNAFUSE_WORKERS", "many", "environment variable DYNAFUSE_WORKERS is 'many'"),
    ("DYNAFUSE_COST_BANDWITH_TBS", "4", "did you mean 'DYNAFUSE_COST_BANDWIDTH_TBS'"),
    ("DYNAFUSE_DEVICE", "h300", "unknown device 'h300'"),
])
def test_wrong_variables_are_faults(variable: str, value: str, words: str, machine: Machine) -> None:
    machine.setenv(variable, value)
    found = finding("environment")
    assert found.state == FAULT and words in found.advice and f"{variable}={value}" in found.found
    assert len(found.advice) < 300, "not all that is valid"


def test_right_variables_are_listed(machine: Machine) -> None:
    machine.setenv("DYNAFUSE_COST_REPLAY_US", "1.5")
    machine.setenv("DYNAFUSE_STRICT", "")
    assert finding("environment") == Finding(
        "environment", FINE, f"DYNAFUSE_CACHE_DIR={machine.cache}, DYNAFUSE_COST_REPLAY_US=1.5")


def test_workers(machine: Machine) -> None:
    assert finding("workers").found.endswith(f"{os.cpu_count()} cores")
    machine.setenv("DYNAFUSE_WORKERS", "0")
    assert finding("workers").state == NOTE
    machine.setenv("DYNAFUSE_WORKERS", "x")
    assert finding("workers").found == "not known"
