"""A region that does not compile: eager with one warning and a repro file, or an error when strict."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Node

import dynafuse
from dynafuse import backend, ops
from dynafuse.config import Config, resolve
from dynafuse.errors import CompileError, DynafuseWarning
from dynafuse.ops import Row

X, W = torch.randn(8, 8), torch.randn(8, 8)


@pytest.fixture(autouse=True)
def _broken_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``sin`` promises what it cannot lower; the store forgets the failures that a test leaves."""
    before = ops.lookup(torch.ops.aten.sin.default)
    assert before is not None
    ops.register(Row(before.target, before.kind, emit=_raise))
    backend.reset()
    yield
    ops.register(before)
    backend.reset()


def _raise(context: Any, *operands: str) -> str:
    raise ValueError("sin is broken today")


def write(build: graphs.Builder, x: Node, w: Node) -> list[Node]:
    """A region that works, a product, and a region with the broken op."""
    product = build.op("aten.mm.default", build.op("aten.relu.default", x), w)
    return [build.op("aten.add.Tensor", build.op("aten.sin.default", product), 1.0), build.op("aten.exp.default", x)]


def config(folder: Path, strict: bool) -> Config:
    return resolve(options={"strict": strict, "repro_dir": folder, "workers": 0})


def compiled(folder: Path, strict: bool = False) -> tuple[graphs.Run, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = graphs.compiled(graphs.built(write, X, W), [X, W], config(folder, strict))
    return run, [w for w in caught if issubclass(w.category, DynafuseWarning)]


def test_the_result_is_right(tmp_path: Path) -> None:
    run, _ = compiled(tmp_path)
    first, second = run.call([X, W])
    torch.testing.assert_close(first, (X.relu() @ W).sin() + 1)
    torch.testing.assert_close(second, X.exp())


def test_only_the_failed_region_runs_eager(tmp_path: Path) -> None:
    run, _ = compiled(tmp_path)
    assert {str(n.target) for n in run.computed} == {"aten.mm.default", "aten.sin.default", "aten.add.Tensor"}
    fused = {str(n.target) for region in run.plan.regions for n in region.nodes}
    assert fused == {"aten.relu.default", "aten.exp.default"}


def test_one_warning_names_the_ops_the_reason_and_the_file(tmp_path: Path) -> None:
    _, caught = compiled(tmp_path)
    (warning,) = caught
    (repro,) = tmp_path.glob("dynafuse_repro_*.py")
    for part in ("aten.sin.default, aten.add.Tensor", "ValueError: sin is broken today", str(repro)):
        assert part in str(warning.message)


def test_the_repro_shows_the_region_and_the_traceback(tmp_path: Path) -> None:
    compiled(tmp_path)
    (repro,) = tmp_path.glob("dynafuse_repro_*.py")
    text = repro.read_text()
    for part in ("aten.sin.default", "tensor((8, 8), (8, 1), torch.float32, 'cpu')", "Traceback", "ValueError: sin is broken today"):
        assert part in text


def test_the_repro_fails_in_the_same_way_and_passes_once_it_is_mended(tmp_path: Path) -> None:
    compiled(tmp_path)
    (repro,) = tmp_path.glob("dynafuse_repro_*.py")
    script = repro.read_text().replace('backend="dynafuse"', "backend=dynafuse.backend.dynafuse")
    with pytest.raises(BackendCompilerFailed, match="sin is broken today"):
        exec(compile(script, str(repro), "exec"), {"dynafuse": dynafuse})
    ops.register(ops.pointwise(torch.ops.aten.sin.default, "lm.sin({0})"))
    backend.reset()
    torch._dynamo.reset()
    exec(compile(script, str(repro), "exec"), {"dynafuse": dynafuse})


def test_strict_raises(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="sin is broken today") as caught:
        compiled(tmp_path, strict=True)
    assert caught.value.ops == ("aten.sin.default", "aten.add.Tensor")
    assert isinstance(caught.value.__cause__, ValueError)
    assert Path(str(caught.value.repro)).parent == tmp_path


def test_through_torch_compile(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.relu().sin() * 2).sum(-1)

    options = {"strict": False, "repro_dir": tmp_path, "workers": 0}
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    with pytest.warns(DynafuseWarning, match="sin is broken today"):
        found = torch.compile(function, backend=backend.dynafuse, options=options)(x)
    expected = function(y)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_source_that_does_not_parse_is_demoted_too(tmp_path: Path) -> None:
    target = torch.ops.aten.sin.default
    ops.register(ops.pointwise(target, "{0} +* 2"))
    run, caught = compiled(tmp_path)
    (repro,) = tmp_path.glob("dynafuse_repro_*.py")
    assert len(caught) == 1 and "SyntaxError" in repro.read_text()
    torch.testing.assert_close(run.call([X, W])[0], (X.relu() @ W).sin() + 1)
