"""The benchmark of batches that change, in small, on a CPU."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bench import batches
from bench.models import Build, Workload

SMALL = ("--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--steps", "2", "--batch", "8", "--inside")


class Tiny:
    """A row of the table of models."""

    def build(self, how: Build) -> Workload:
        return Workload(nn.Sequential(nn.Linear(4, 3), nn.Flatten(0), nn.Softmax(0)), (torch.randn(6, 4),))


class Summed(nn.Module):
    """A model whose result is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum()


@pytest.mark.parametrize("way", batches.WAYS)
def test_a_row(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the batch changes or not, one graph serves all of its sizes."""
    monkeypatch.setattr(batches, "KNOWN", {"tiny": Tiny()})
    torch._dynamo.reset()
    counters.clear()
    out = tmp_path / "row.json"
    assert batches.main([*SMALL, "--cases", f"tiny/infer/{way}", "--systems", "aot_eager", "--out", str(out)]) == 0
    row = json.loads(out.read_text())
    assert row["batch"] == 8 and row["step_ms"] > 0 and row["cold_s"] > 0
    assert counters["stats"]["unique_graphs"] == 1


def test_training_accumulates_nothing() -> None:
    work = Workload(Summed(), (torch.randn(6, 4),))
    step = batches.step_of(work, work.module, train=True)
    (whole,) = batches.batches(work, 8, is_changing=False)
    gradients = []
    for _ in range(2):
        step(whole)
        gradients.append([parameter.grad for parameter in work.module.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_sizes_of_batches() -> None:
    x = torch.arange(6)
    assert batches.of_size([x], 4)[0].tolist() == [0, 1, 2, 3]
    assert batches.of_size([x], 8)[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    made = batches.batches(Workload(Summed(), (torch.randn(6, 4),)), 8, is_changing=True)
    assert [len(batch[0]) for batch in made] == [8, 6, 10]


def test_unknown_cases_end_the_run() -> None:
    with pytest.raises(SystemExit, match="no case is called nobody/train/same"):
        batches.main(["--cases", "nobody/train/same"])
