"""The benchmark of optimizers in small, on a CPU."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from bench import optimizers
from bench.models import Build, Workload

SMALL = ("--scale", "tiny", "--device", "cpu", "--steps", "2", "--inside")


class Tiny:
    """A row of the table of models."""

    def build(self, how: Build) -> Workload:
        return Workload(nn.Linear(4, 3, dtype=how.dtype), ())


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_a_row(optimizer: str, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "MODELS", {"tiny": Tiny()})
    out = tmp_path / "row.json"
    assert optimizers.main([*SMALL, "--cases", f"{optimizer}/tiny", "--systems", system, "--out", str(out)]) == 0
    row = json.loads(out.read_text())
    assert (row["parameters"], row["off"] < 1e-6) == (2, True)
    assert row["step_ms"] > 0
    assert row["cold_s"] > 0


def test_unknown_cases_end_the_run() -> None:
    with pytest.raises(SystemExit, match="no case is called sgd/nobody"):
        optimizers.main(["--cases", "sgd/nobody"])
