"""The demo, as a newcomer starts it on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
LIMIT_S = 300  # it takes half a minute alone, longer beside other tests


@pytest.fixture(scope="module")
def finished() -> subprocess.CompletedProcess[str]:
    """The demo's run; on a machine with a GPU, as if there were none."""
    dropped = ("TRITON_INTERPRET", "COLUMNS", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    code = "import sys; from dynafuse.cli import main; sys.exit(main(['demo']))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, encoding="utf-8",
    )


def test_it_succeeds(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-4000:]


@pytest.mark.parametrize(
    "mark",
    [
        "the plan for an H200",
        "plan for NVIDIA H200: 2 graphs",
        "graph 2, backward",
        "in Triton's interpreter",
        "step 3: loss",
        "fused regions ran, made by",
        "@triton.jit",
        "ok: losses and gradients agree with eager's",
    ],
)
def test_it_shows(mark: str, finished: subprocess.CompletedProcess[str]) -> None:
    assert mark in finished.stdout


def test_wrong_gradients_fail_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The check itself, on a compiled model that is off by a part in a thousand."""
    from rich.console import Console

    from dynafuse import demo

    model, batch = demo.made(demo.INTERPRETED, "cpu")
    right, _ = demo.trained(Console(), model, batch, model)
    assert right
    right, _ = demo.trained(Console(), model, batch, lambda *args: model(*args) * 1.001)
    assert not right and "off" in capsys.readouterr().out


@pytest.mark.gpu
def test_it_measures_speed_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from dynafuse import demo

    sizes = demo.Sizes(2, 256, 4, 512, 1024, 2, 128, torch.bfloat16)
    model, batch = demo.made(sizes, "cuda")
    demo.speed(Console(), model, batch, model, 1.0)
    assert "inductor" in capsys.readouterr().out
