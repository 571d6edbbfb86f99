"""The values of the pipeline as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dynafuse import backend
from dynafuse.errors import DynafuseWarning
from tests.support import graphs

STAGES = ("aten", "normalized", "facts", "plan", "regions", "decided", "kernels", "buffers", "function")


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x @ w).relu() * 2, -1)


def traced(folder: Path, **options: Any) -> list[str]:
    """Train a step; the folders that are there afterwards."""
    backend.reset()
    torch._dynamo.reset()
    x = torch.randn(6, 8, requires_grad=True)
    settings = {"trace": folder, "strict": True, "executors": "triton", **options}
    torch.compile(step, backend="dynafuse", options=settings)(x, torch.randn(8, 8)).sum().backward()
    return sorted(path.name for path in folder.iterdir())


def text(folder: Path, stage: str) -> str:
    (path,) = folder.glob(f"*-{stage}.txt")
    return path.read_text(encoding="utf-8")


def test_every_stage_of_every_graph_is_a_file(tmp_path: Path) -> None:
    assert traced(tmp_path) == ["000-forward", "001-backward"]
    for folder in tmp_path.iterdir():
        assert [path.name for path in sorted(folder.iterdir())] == [f"{k}-{stage}.txt" for k, stage in enumerate(STAGES)]
    forward = tmp_path / "000-forward"
    assert "aten._softmax" in text(forward, "aten") or "aten.amax" in text(forward, "aten")
    assert "mm                       eager" in text(forward, "facts")
    assert "r0 [triton]" in text(forward, "plan") and "store %" in text(forward, "regions")
    assert "on triton, launches: 1, regions: r0" in text(forward, "kernels") and "@triton.jit" in text(forward, "kernels") and "def call(args):" in text(forward, "function")
    assert traced(tmp_path) == ["000-forward", "001-backward", "002-forward", "003-backward"]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graphs.compiled(graphs.built(lambda g, x: g.op("aten.exp.default", x), torch.randn(4)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    backend.reset()
    torch._dynamo.reset()
    options = {"trace": tmp_path / "file", "strict": False, "repro_dir": tmp_path}
    x = torch.randn(4)
    with pytest.warns(DynafuseWarning, match="trace failed"):
        torch.testing.assert_close(torch.compile(torch.exp, backend="dynafuse", options=options)(x), x.exp())


def test_torchs_structured_trace_has_them_too(tmp_path: Path) -> None:
    """In a process of its own: torch sets its trace up when it is imported."""
    from tests.support.processes import environment, python

    code = ("import torch; torch.compile(lambda x: x.exp() + 1, backend='dynafuse', "
            "options={'executors': 'triton'})(torch.randn(4))")
    python("-c", code, env=environment(TORCH_TRACE=str(tmp_path)))
    lines = "".join(path.read_text() for path in tmp_path.glob("*.log")).splitlines()
    found = [json.loads(line[line.index("{"):]) for line in lines if "dynafuse_" in line and "{" in line]
    names = {one["artifact"]["name"] for one in found if "artifact" in one}
    assert {f"dynafuse_{stage}" for stage in STAGES} <= names
