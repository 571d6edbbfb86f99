"""Regions of models, as `bench.capture` cuts them out and `bench.regions` runs them.

Example:
    python -m pytest tests/bench/test_capture.py
"""
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import capture, region_file, regions
from bench.region_file import Region


def captured(function: Callable[..., Any], *arguments: Any) -> list[Region]:
    return capture.capture(function, arguments, "m", "cpu")


def ops_of(region: Region) -> list[str]:
    return [op.split(".")[1] for _, op, *_ in region.data["ops"]]


class Net(nn.Module):
    """An embedding and two equal blocks with dropout; a loss over labels, some of which are none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.5)
        return F.cross_entropy(self.head(x), labels)


def build() -> tuple[nn.Module, Sequence[Any]]:
    torch.manual_seed(0)
    labels = torch.randint(16, (12,))
    labels[::3] = -100
    return Net(), (torch.randint(3, 16, (12,)), labels)


def test_a_region_computes_what_the_model_does() -> None:
    x, y = torch.randn(4, 8), torch.randn(8)
    (region,) = captured(lambda x, y: (x * y).tanh().t() + float("inf"), x, y)
    assert region.name.startswith("pointwise_") and region.data["count"] == 1 and region.models == "m"
    assert region.module("cpu")(x, y)[0].equal((x * y).tanh().t() + float("inf"))
    reduced = captured(lambda x: (x * 2).sum(-1).relu(), x)
    assert reduced[0].name.startswith("sum_") and reduced[0].module("cpu")(x)[0].equal((x * 2).sum(-1).relu())


def test_no_region_needs_what_a_call_makes_of_it() -> None:
    """A residual: the sine before the product is one region, the sum with it after the product another."""
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x)
        return y @ w + y.exp()

    before, after = captured(function, torch.randn(8, 8), torch.randn(8, 8))
    assert (ops_of(before), ops_of(after)) == (["sin"], ["exp", "add"]), "the exponential waits for its reader"


def test_constants_are_in_every_region_that_reads_them() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        positions = torch.arange(8, dtype=torch.float32)
        return (x + positions) @ w * positions

    first, second = captured(function, torch.randn(8, 8), torch.randn(8, 8))
    assert all("iota" in ops_of(region) for region in (first, second))
    assert (ops_of(first)[-1], ops_of(second)[-1]) == ("add", "mul")
    assert [len(region.data["inputs"]) for region in (first, second)] == [1, 1]


def test_random_numbers_are_inputs() -> None:
    found = captured(lambda x: F.dropout(x * 2, 0.5) + 1, torch.randn(4, 8))
    assert found and all(region.random_op is None for region in found)


def test_equal_layers_are_one_region() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x @ w)
        return x

    (region,) = captured(function, torch.randn(8, 8), torch.randn(8, 8))
    assert region.data["count"] == 3


def test_integers_stay_in_range() -> None:
    model, arguments = build()
    found = [spec[2]["gen"] for region in captured(model, *arguments) for spec in region.data["inputs"] if spec[1] == "i64"]
    ids, labels = arguments
    assert ["index", int(ids.min()), int(ids.max()) + 1] in found
    real = labels[labels >= 0]
    assert ["index", int(real.min()), int(real.max()) + 1, [-100]] in found


def test_without_running_regions_are_the_same_but_for_integers_that_are_computed() -> None:
    """What reads the order of a sort is not there."""
    def model(x: Tensor, at: Tensor) -> Tensor:
        return F.gelu(x[at.sort().indices] * 2) @ x.t() + F.gelu(x[at]).sum()

    at, x = torch.randint(3, 16, (16,)), torch.randn(16, 8, requires_grad=True)
    ran = {region.name: region for region in captured(model, x, at)}
    fake = {region.name: region for region in capture.capture(model, (x, at), "m", "cpu", fake=True)}
    assert fake and fake.items() <= ran.items() and len(ran) - len(fake) == 2  # forward and backward
    whole, pretended = (capture.capture(*build(), "m", "cpu", fake) for fake in (False, True))
    assert [region.data for region in pretended] == [region.data for region in whole]


def test_more_negative_integers_than_marks_are_a_range() -> None:
    integers = capture.Integers()
    integers.add(torch.arange(-6, 3))
    assert integers.values == ("index", -6, 3)
    negative = capture.Integers()
    negative.add(torch.tensor([-3, -5]))
    assert negative.values == ("index", -5, -2)


def test_strides_and_offsets_are_kept() -> None:
    wide = torch.randn(6, 10)
    (region,) = captured(lambda x: x.sin(), wide.t()[1:, 1:])
    (x,) = region.inputs("cpu")
    assert (x.shape, x.stride(), x.storage_offset()) == ((9, 5), (1, 10), 11 % 4)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_what_capture_writes_is_what_regions_reads(tmp_path: Path, mode: str) -> None:
    """Every region of a model runs on dynafuse, with eager's results, from the file that it was written to."""
    path, out = tmp_path / "net.jsonl.xz", tmp_path / "out.json"
    name = "tests.bench.test_capture:build" if mode == "train" else "opt,llama_small"
    assert capture.main([name, "--scale", "tiny", "--modes", mode, "--device", "cpu", "-o", str(path)]) == 0
    listed = region_file.read(path)
    assert len({region.name for region in listed}) == len(listed) > 2
    every = max(1, len(listed) // 6)
    fixed = ["--device", "cpu", "--in-process", "--samples", "1", "--every", str(every), "--out", str(out)]
    assert regions.main([str(path), "--systems", "dynafuse", *fixed]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(listed[::every]) and all(row["metrics"]["output_vs_eager"] < 0.02 for row in rows)


def test_models_of_one_file_share_their_regions(tmp_path: Path) -> None:
    both = capture.merged([*captured(torch.sin, torch.randn(8)), *capture.capture(torch.sin, [torch.randn(8)], "n", "cpu")])
    assert [(region.models, region.data["count"]) for region in both] == [("m, n", 2)]


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="unknown model 'nobody'"):
        capture.main(["nobody", "-o", str(tmp_path / "x")])
