"""The demo, as a newcomer starts it on a machine without a GPU, and the checks that it makes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._inductor import config as inductor
from torch._inductor import cpu_vec_isa

from dynafuse.lowering.inductor import availability
from dynafuse.tools import demo
from dynafuse.tools.demo import model as models
from dynafuse.tools.demo import phases, speed, training
from tests.support.processes import ROOT

LIMIT_S = 400  # it takes a minute alone, longer beside other tests
COMPILER = availability.find("cpu")

PLANNED = ["the plan for an H200", "plan for NVIDIA H200: 2 graphs", "graph 2, backward", "merges were rejected"]
ENDED = "ok: losses and gradients agree with eager's"
NATIVE = ["compiled by", "step 3: loss", "on inductor; distinct kernels", "A warm step takes", ENDED]
INTERPRETED = ["in Triton's interpreter", "step 3: loss", "on triton; distinct kernels", "@triton.jit", ENDED]


def ran(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run of Python without TRITON_INTERPRET; on a machine with a GPU, as if there were none."""
    dropped = ("TRITON_INTERPRET", "COLUMNS", "FORCE_COLOR")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    variables |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(
        [sys.executable, *command],
        env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False, encoding="utf-8",
    )


def assert_shown(done: subprocess.CompletedProcess[str], marks: list[str]) -> None:
    """It succeeded, and the marks are in its output, in order."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rest = done.stdout
    for mark in marks:
        assert mark in rest, f"{mark!r} is missing in {rest[-3000:]}"
        rest = rest[rest.index(mark):]


def what_is_known() -> dict[str, str]:
    """Tell the demo that the compiler has all of the processor's vector instructions, if it has: to try each takes ten seconds without a cache."""
    found: list[list[cpu_vec_isa.VecISA]] = []
    for untried in (None, True):
        with inductor.patch({"cpp.vec_isa_ok": untried}):
            found.append(cpu_vec_isa.valid_vec_isa_list.__wrapped__())
    return {"TORCHINDUCTOR_VEC_ISA_OK": "1"} if found[0] == found[1] else {}


@pytest.mark.skipif(not COMPILER.available, reason=str(COMPILER))
def test_it_trains_on_the_cpu_and_in_the_interpreter() -> None:
    done = ran("-c", "import sys; from dynafuse.tools.cli import main; sys.exit(main(['demo']))", **what_is_known())
    assert_shown(done, [*PLANNED, *NATIVE, *INTERPRETED, "every check passed, in"])


def test_without_a_compiler_it_says_so_and_nothing_failed() -> None:
    done = ran("-m", "dynafuse.tools.demo", "native", CXX="there-is-no-such-compiler")
    assert_shown(done, [*PLANNED, "left out: Inductor is not available: 'there-is-no-such-compiler'"])
    assert "step 1" not in done.stdout


@pytest.mark.parametrize(("statuses", "gpu", "environ", "phases_run", "status"), [
    ([0, 0], False, {}, ["native", "interpreted"], 0),
    ([1, 0], False, {}, ["native", "interpreted"], 1),
    ([0, -11], False, {}, ["native", "interpreted"], 1),
    ([0], True, {}, ["native"], 0),
    ([1], True, {}, ["native"], 1),
    ([0, 0], True, {"TRITON_INTERPRET": "1"}, ["native", "interpreted"], 0),
], ids=range(6))
def test_phases_and_their_statuses(
    statuses: list[int], gpu: bool, environ: dict[str, str], phases_run: list[str], status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, str | None]] = []

    def call(command: list[str], env: dict[str, str]) -> int:
        seen.append((command[-1], env.get("TRITON_INTERPRET")))
        assert env["DYNAFUSE_STRICT"] == "1" and "TRITON_CACHE_DIR" in env
        return statuses[len(seen) - 1]

    monkeypatch.setattr(demo.subprocess, "call", call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert demo.main(environ=environ) == status
    assert seen == [(phase, "1" if phase == "interpreted" else None) for phase in phases_run]


def test_wrong_gradients_fail_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The check itself, on a compiled model that is off by a part in a thousand."""
    model, batch = models.build(models.INTERPRETED, "cpu")
    right, _ = training.trained(Console(), model, batch, model)
    assert right
    right, _ = training.trained(Console(), model, batch, lambda *args: model(*args) * 1.001)
    assert not right and "off" in capsys.readouterr().out


def test_a_phase_whose_steps_are_off_is_false(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def off(*arguments: Any) -> tuple[bool, float]:
        return False, 0.0

    monkeypatch.setattr(phases, "trained", off)
    assert not phases.interpreted(Console())
    assert "off: losses and gradients do not agree" in capsys.readouterr().out


@pytest.mark.gpu
def test_it_measures_speed_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = models.Sizes(2, 256, 4, 512, 1024, 2, 128, torch.bfloat16)
    model, batch = models.build(sizes, "cuda")
    speed.on_gpu(Console(), model, batch, model, 1.0)
    assert "inductor" in capsys.readouterr().out
