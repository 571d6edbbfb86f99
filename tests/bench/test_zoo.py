"""The zoo in small, on a CPU: rows, verdicts, what is skipped, its table; with transformers where it is installed."""
from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import table, zoo, zoo_models
from bench.draws import Draw, compare_draws
from bench.models import Build, Skip, Workload
from bench.zoo_models import Architecture, mixed, without_dropout
from bench.zoo_summary import Rows, summary_of

FAST = ("--scale", "tiny", "--device", "cpu", "--steps", "2", "--rounds", "1", "--warmup", "0", "--in-process")


class Squares(nn.Module):
    """A net that needs no package but torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.drop(torch.tanh(self.inner(x))).square().mean()
        return loss


def make_squares(how: Build) -> Workload:
    return Workload(Squares().to(how.dtype), (torch.randn(8, 16, dtype=how.dtype),))


def make_missing(how: Build) -> Workload:
    raise Skip("needs nothing that there is")


@pytest.fixture
def small_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Architecture("squares", make_squares), Architecture("missing", make_missing, modes=("infer",)))
    cases = {row.name: row for row in rows}
    monkeypatch.setattr(zoo_models, "CASES", cases)
    monkeypatch.setattr(zoo, "CASES", cases)


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    assert {row["suite"] for row in rows} == {"zoo"}
    return {(row["case"], row["system"]): row["metrics"] for row in rows}


@pytest.mark.usefixtures("small_zoo")
def test_every_case_has_a_row_under_every_system(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert zoo.main([*FAST, "--systems", "eager,dynafuse", "--out", str(out)]) == 0
    found = rows_of(out)
    assert set(found) == {(case, system) for case in ("squares/train", "squares/infer", "missing/infer")
                          for system in ("eager", "dynafuse")}
    assert found["missing/infer", "eager"] == {"skipped": "needs nothing that there is"}
    for system in ("eager", "dynafuse"):
        row = found["squares/train", system]
        assert row["right"] == 1 and 0 < row["distance"] <= 2 and row["step_ms"] > 0 and row["cold_s"] > 0
        assert row["samples"] == 2
    text = table.render([out])
    assert "| squares/train | dynafuse | " in text and "| missing/infer | eager | skipped: needs nothing" in text
    assert "- dynafuse: 2 of 2 right, 0 failed, 1 skipped" in text


@pytest.mark.usefixtures("small_zoo")
def test_a_system_that_fails_leaves_its_error(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    systems = "eager,eager@PYTHONHOME=/nowhere"
    arguments = [*FAST[:-1], "--cases", "squares/tr*", "--systems", systems, "--limit", "60", "--out", str(out)]
    assert zoo.main(arguments) == 1
    errors = {system: row["error"] for (_, system), row in rows_of(out).items()}
    assert errors["eager"] == "KeyError: 'squares'", "the child has the real zoo, and no such case"
    assert "the process ended" in errors["eager@PYTHONHOME=/nowhere"]


def test_no_case_begins_without_time(tmp_path: Path, small_zoo: None, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert zoo.main([*FAST, "--systems", "eager", "--seconds", "0", "--out", str(out)]) == 0
    assert "3 cases were not measured" in capsys.readouterr().out


def test_cases_are_chosen_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--cases", "llama*,bert/train", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert sorted(listed) == ["bert/train", "llama/infer", "llama/train", "llama_decode/infer", "llama_small/infer",
                              "llama_small/train"]
    with pytest.raises(SystemExit, match="no case is called nope"):
        zoo.main(["--cases", "nope", "--list"])


def test_the_zoo_is_broad_and_mixed() -> None:
    kinds = [tuple(Architecture(f"{kind}{i}", make_squares) for i in range(count)) for kind, count in (("a", 2), ("b", 4))]
    assert list(mixed(*kinds)) == ["a0", "b0", "b1", "a1", "b2", "b3"]
    assert len(zoo_models.CASES) >= 26


def test_what_drops_at_random_is_switched_off() -> None:
    class Labels(nn.Module):
        dropout_prob: float

        def __init__(self) -> None:
            super().__init__()
            self.dropout_prob, self.eps = 0.1, 0.1

    dropout, norm, labels = nn.Dropout(0.5), nn.BatchNorm1d(4), Labels()
    without_dropout(nn.Sequential(dropout, norm, labels))
    assert (dropout.p, norm.momentum, labels.dropout_prob, labels.eps) == (0.0, 0.1, 0.0, 0.1)


@pytest.mark.usefixtures("small_zoo")
def test_what_models_drop_is_compared_as_draws(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert zoo.main([*FAST, "--modes", "dropout", "--systems", "eager,dynafuse", "--out", str(out)]) == 0
    row = rows_of(out)["squares/dropout", "dynafuse"]
    assert row["right"] == 1 and row["draws"] == 16 and row["step_ms"] > 0
    assert row["gradient_spread"] > 0 < row["eager_gradient_spread"], "squares drops some at random"
    assert row["gradient_mean"] != row["eager_gradient_mean"]


DRAWN = [Draw(1 + shift, 10 * (1 - shift)) for shift in (0.0, 0.1, -0.1, 0.05, -0.05, 0.02, -0.02, 0.07)]


@pytest.mark.parametrize(("got", "expected"), [
    (DRAWN[::-1], True),
    ([Draw(draw.loss + 0.02, draw.gradient) for draw in DRAWN], True),  # less than a standard error of the mean
    ([Draw(draw.loss + 0.3, draw.gradient) for draw in DRAWN], False),
    ([Draw(draw.loss, draw.gradient * 1.4) for draw in DRAWN], False),  # as if what is left were scaled twice
    ([Draw(1.01, 10.1)] * 8, False),  # the same is dropped in each step
    ([Draw(1.0, draw.gradient) for draw in DRAWN], True),  # a loss of bfloat16
    ([Draw(math.nan, draw.gradient) for draw in DRAWN], False),
])
def test_the_verdict_on_draws(got: list[Draw], expected: bool) -> None:
    assert compare_draws(got, DRAWN)["right"] is expected


def test_models_that_drop_nothing_have_no_spread() -> None:
    steady, rounded = [Draw(1.0, 10.0)] * 8, [Draw(1.0, 10.0 + 1e-4 * (i % 2)) for i in range(8)]
    assert compare_draws(steady, rounded)["right"] is True


@pytest.mark.parametrize(("metrics", "expected"), [
    ({"step_ms": 1.0}, {}),
    ({"right": True, "output_rmse": 0.03, "eager_output_rmse": 0.02}, {"right": 1, "distance": 1.5}),
    ({"right": False, "output_rmse": 0.06, "eager_output_rmse": 0.02}, {"right": 0, "distance": 3.0}),
    ({"right": True, "grad_rmse": 0.02, "eager_grad_rmse": 0.02, "grad_rmse_median": 0.3, "eager_grad_rmse_median": 0.1},
     {"right": 0, "distance": 3.0}),
    ({"right": False, "gradients_missing": ["weight"]}, {"right": 0}),
])
def test_the_verdict(metrics: dict[str, Any], expected: dict[str, Any]) -> None:
    assert zoo.judged(metrics) == pytest.approx(expected)


def test_the_summary_compares_what_is_right_on_both() -> None:
    rows: Rows = {("fast/train", "inductor"): {"step_ms": 2.0, "right": 1}, ("fast/train", "dynafuse"): {"step_ms": 1.0, "right": 1},
            ("slow/train", "inductor"): {"step_ms": 1.0, "right": 1}, ("slow/train", "dynafuse"): {"step_ms": 2.0, "right": 1},
            ("wrong/train", "inductor"): {"step_ms": 9.0, "right": 1}, ("wrong/train", "dynafuse"): {"step_ms": 1.0, "right": 0},
            ("broken/train", "dynafuse"): {"error": "no"}}
    found = summary_of("dynafuse", rows)
    assert (found.cases, found.right, found.failed) == (3, 2, 1)
    assert found.means == {"step_ms": pytest.approx(1.0)} and found.slowest[0] == (2.0, "slow/train")


@pytest.mark.parametrize(("package", "case"), [
    ("transformers", "bert/train"), ("transformers", "llama_decode/infer"), ("timm", "mixer/train"),
    ("torchvision", "mobilenet_v3/infer"), ("diffusers", "dit/train")])
def test_models_of_packages_agree_with_their_wider_copies(package: str, case: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    out = tmp_path / "out.json"
    assert zoo.main([*FAST, "--cases", case, "--systems", "eager", "--out", str(out)]) == 0
    row = rows_of(out)[case, "eager"]
    error = row["eager_grad_rmse" if case.endswith("train") else "eager_output_rmse"]
    assert row["right"] == 1 and 1e-4 < error < 0.2, "bfloat16 must differ from the wider copy, by its rounding"
