"""The sweep itself: that it finds what it is for, and that what it makes is small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.architectures import compare
from tests.architectures.catalog import MOST_PARAMETERS, Skipped, Subject, build, names, small
from tests.architectures.compare import check
from tests.architectures.main import main


class Config:
    """A configuration of two parts, as transformers has them."""

    def __init__(self, hidden_size: int = 4096, layers: Any = (1, 2), text: Any = None, vocab_size: int = 32000) -> None:
        self.hidden_size, self.layers, self.vocab_size = hidden_size, layers, vocab_size
        self.text = text or Part()

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class Part:
    """What a configuration has for its text model."""

    def __init__(self, num_attention_heads: int = 64) -> None:
        self.num_attention_heads = num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def test_configurations_become_small_and_so_do_their_parts() -> None:
    config = small(Config)
    assert (config.hidden_size, config.vocab_size, config.text.num_attention_heads) == (64, 120, 4)
    assert config.layers == (1, 2)


class Layer(nn.Module):
    """A layer that scales by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = (x * self.weight).softmax(-1) * (1 + 0.1 * torch.compiler.is_compiling())
        return {"loss": (y * self.weight).sum(), "y": y}


class Alike(Layer):
    """The same for eager and compilers."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = (x * self.weight).softmax(-1)
        return {"loss": (y * self.weight).sum(), "y": y}


class Refused(Alike):
    """One that eager does not run."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        raise ValueError("not this one")


@pytest.mark.parametrize(("layer", "status", "said"), [
    (Alike, "right", ""), (Layer, "skipped", "traced by torch"), (Refused, "skipped", "eager: ValueError: not this one")])
@pytest.mark.parametrize("mode", ["train", "infer", "autocast", "resized"])
def test_what_comes_of_a_model(layer: type[Layer], status: str, said: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "build", lambda name, device: Subject(layer(), {"x": torch.randn(4, 8)}))
    verdict = check("any", mode, "cpu")
    assert verdict.status == status and said in verdict.detail


@pytest.mark.parametrize(("change", "said"), [
    (lambda results: results | {"['y']": results["['y']"] * 1.001}, "error"),
    (lambda results: results | {"['y']": results["['y']"].t().contiguous().t()}, "strides"),
    (lambda results: results | {"['y']": results["['y']"].double()}, "dtype"),
    (lambda results: results | {"['y']": torch.full_like(results["['y']"], float("nan"))}, "error inf"),
    (lambda results: {name: value for name, value in results.items() if "grad" not in name}, "grad of weight"),
    (lambda results: results | {"buffer calls": results["buffer calls"] + 1}, "buffer calls")])
def test_what_is_wrong_is_found(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "build", lambda name, device: Subject(Alike(), {"x": torch.randn(4, 8)}))
    right = compare._compiled
    monkeypatch.setattr(compare, "_compiled", lambda run, subject, **how: (
        change(right(run, subject, **how)) if how["backend"] == "dynafuse" else right(run, subject, **how)))
    verdict = check("any", "train", "cpu")
    assert verdict.status == "wrong" and said in verdict.detail


@pytest.mark.parametrize("mode", ["generate", "static"])
def test_what_makes_no_tokens_is_skipped(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "build", lambda name, device: Subject(Alike(), {"x": torch.randn(4, 8)}))
    assert check("any", mode, "cpu") == compare.Verdict("skipped", "it makes no tokens")


def test_names_that_nobody_has_are_skipped() -> None:
    with pytest.raises(Skipped):
        build("transformers/causal/of-nobody", "cpu")


def test_a_run_by_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model of transformers, if there is one; else nothing."""
    out = tmp_path / "found.json"
    name = next((name for name in names() if name == "transformers/causal/gpt2"), "none")
    assert main(["--names", name, "--modes", "infer", "--jobs", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert ("1 right" in printed and json.loads(out.read_text())[0]["status"] == "right") if name != "none" else "nothing" in printed


def test_models_are_small() -> None:
    pytest.importorskip("transformers")
    subject = build("transformers/causal/llama", "cpu")
    assert sum(parameter.numel() for parameter in subject.module.parameters()) < MOST_PARAMETERS / 100
