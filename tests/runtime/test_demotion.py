"""A region that does not compile: eager with one warning and a repro file, or an error when strict. One that nvFuser merely
rejects: another executor's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import Node

import dynafuse
from dynafuse import backend, ops, pipeline
from dynafuse.cache.canonical import CanonicalPlan
from dynafuse.config import FORCE_MARK, Config, resolve
from dynafuse.errors import CompileError, DynafuseWarning
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.nvfuser import availability, replay
from dynafuse.lowering.triton import pool
from dynafuse.ops import Row
from dynafuse.partition.search import quickest
from dynafuse.runtime import setting
from dynafuse.select.place import moved
from tests.support import graphs

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


def test_what_shares_a_launch_with_what_fails_is_fused_all_the_same(tmp_path: Path) -> None:
    def beside(build: graphs.Builder, x: Node, w: Node) -> list[Node]:
        return [build.op("aten.sin.default", x), build.op("aten.exp.default", w)]

    inputs = [X, torch.randn(3, 7)]
    with pytest.warns(DynafuseWarning, match="sin is broken today"):
        run = graphs.compiled(graphs.built(beside, *inputs), inputs, config(tmp_path, strict=False))
    assert [str(node.target) for node in run.computed] == ["aten.sin.default"]
    (region,) = run.plan.regions
    assert not region.nests and [str(node.target) for node in region.nodes] == ["aten.exp.default"]
    for got, expected in zip(run.call(list(inputs)), (inputs[0].sin(), inputs[1].exp()), strict=True):
        torch.testing.assert_close(got, expected)


def test_a_copy_that_runs_eager_overwrites_the_input_itself(tmp_path: Path) -> None:
    """A kernel reads a copy of a misaligned input."""
    def overwrite(build: graphs.Builder, x: Node, w: Node) -> Node:
        product = build.op("aten.mm.default", build.op("aten.relu.default", x), w)
        return build.op("aten.copy_.default", x, build.op("aten.sin.default", product))

    x = torch.randn(65)[1:].view(8, 8)
    expected = (x.relu() @ W).sin()
    with pytest.warns(DynafuseWarning, match="sin is broken today"):
        run = graphs.compiled(graphs.built(overwrite, x, W), [x, W], config(tmp_path, strict=False))
    (found,) = run.call([x, W])
    assert x.data_ptr() % 16 and found.data_ptr() == x.data_ptr()
    torch.testing.assert_close(x, expected)


PTXAS = "\n".join(["PTXAS error: Internal Triton PTX codegen error", "`ptxas` stderr:",
                   *(f"ptxas info: {number}" for number in range(20)), "ptxas fatal: too many registers"])


def scaled_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


def test_the_warning_has_the_compilers_last_lines_and_the_users_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError(PTXAS)

    monkeypatch.setattr(pool, "submit", fails)
    options = {"strict": False, "repro_dir": tmp_path, "executors": "triton"}
    with pytest.warns(DynafuseWarning) as caught:
        torch.testing.assert_close(torch.compile(scaled_relu, backend="dynafuse", options=options)(X), scaled_relu(X))
    (text,) = [str(one.message) for one in caught if issubclass(one.category, DynafuseWarning)]
    assert "RuntimeError: PTXAS error: Internal Triton PTX codegen error\n" in text and "ptxas info: 3" not in text
    assert "ptxas fatal: too many registers\n" in text
    assert f"at {__file__}:" in text and "in scaled_relu: return x.relu() * 2" in text


def test_a_repro_that_cannot_be_written_is_no_other_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run, caught = compiled(tmp_path / "file" / "folder")
    assert len(caught) == 1 and "repro: none written" in str(caught[0].message)
    torch.testing.assert_close(run.call([X, W])[0], (X.relu() @ W).sin() + 1)


# ---------------------------------------------------------------------- what nvFuser rejects

ASSERTION = (" INTERNAL ASSERT FAILED at /csrc/fusion_segmenter.cpp:4612, please report a bug with repro script to NVFuser at "
             "https://github.com/NVIDIA/Fuser/issues. \nExpected something . \n")
CHEAP = {"host_us_nvfuser": 0.001, "launch_us_nvfuser": 0.001, "compile_s_nvfuser": 0.0}


class Library:
    """nvFuser's library as it is here: it fails at what it is given, with ``error``, and counts how often."""

    error: Exception = RuntimeError(ASSERTION)
    asked = 0

    def define(self, recipe: Any) -> Any:
        self.asked += 1
        raise self.error


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    there = availability.Availability(True, "for a test", "nvfuser-cu128-torch210", "0.2.36")
    monkeypatch.setattr(availability, "find", lambda: there)
    monkeypatch.setattr(replay, "define", found.define)
    return found


def on_nvfuser(monkeypatch: pytest.MonkeyPatch, folder: Path, function: Any, *inputs: torch.Tensor,
               others: tuple[str, ...] = ("triton",), **options: Any) -> graphs.Run:
    """A graph compiled where nvFuser is the cheapest of the executors. Nothing may be warned of, and no file be left."""
    monkeypatch.setattr(setting, "usable", lambda use: (("nvfuser", *others, "eager"), {}))
    found = resolve(options={"strict": True, "repro_dir": folder, "workers": 0, "cost": CHEAP} | options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DynafuseWarning)
        return graphs.compiled(graphs.built(function, *inputs), list(inputs), found)


def softmax(g: graphs.Builder, x: Node) -> Node:
    e = g.op("aten.exp.default", x)
    return g.op("aten.div.Tensor", e, g.op("aten.sum.dim_IntList", e, [1], True))


def halves(g: graphs.Builder, x: Node, w: Node) -> list[Node]:
    """Twice the same region, on both sides of a product."""
    return [softmax(g, g.op("aten.mm.default", softmax(g, x), w))]


def test_a_region_that_the_library_turns_down_goes_to_the_next_executor(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = on_nvfuser(monkeypatch, tmp_path, halves, X, W)
    torch.testing.assert_close(run.call([X, W])[0], (X.softmax(1) @ W).softmax(1))
    assert [region.executor for region in run.plan.regions] == ["triton", "triton"] and not list(tmp_path.iterdir())
    for region in run.plan.regions:
        assert region.reasons[-1] == "not on nvfuser: INTERNAL ASSERT FAILED at /csrc/fusion_segmenter.cpp:4612"
        assert [option.executor for option in region.decision.options] == ["triton"]
        assert region.predicted_us == region.decision.options[0].device_us


def test_the_library_is_asked_once_for_all_equal_regions(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(pipeline, "quickest", lambda *args, **kwargs: planned.append(quickest(*args, **kwargs)) or planned[-1])
    on_nvfuser(monkeypatch, tmp_path, halves, X, W)
    assert library.asked == 1 and len(planned) == 2
    on_nvfuser(monkeypatch, tmp_path, lambda g, x: softmax(g, x), X)
    assert library.asked == 1 and len(planned) == 3, "what is known is known before a kernel is asked for"


def test_what_the_library_turns_down_is_not_measured_again(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A measurement that knows no better may not choose it once more."""
    chosen: list[Any] = []

    def measured(plan: CanonicalPlan, device: Any, compilation: Compilation) -> CanonicalPlan:
        chosen.append({option.executor for one in plan.regions for option in one.region.decision.options})
        return plan.mapped(lambda one: moved(one, "nvfuser", compilation.capability)) if "nvfuser" in chosen[-1] else plan

    monkeypatch.setattr(pipeline, "measured", measured)
    run = on_nvfuser(monkeypatch, tmp_path, softmax, X, cost={"host_us_nvfuser": 1e4})  # Triton's, by its price
    assert chosen == [{"triton", "nvfuser"}, {"triton"}] and library.asked == 1
    (region,) = run.plan.regions
    assert region.executor == "triton"


def test_an_error_of_our_own_is_a_failure_on_nvfuser_too(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library.error = IndexError("list index out of range")
    with pytest.raises(CompileError, match="list index out of range"):
        on_nvfuser(monkeypatch, tmp_path, halves, X, W)


def test_what_the_library_turns_down_fails_where_nvfuser_is_the_only_executor(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="fusion_segmenter"):
            on_nvfuser(monkeypatch, tmp_path, halves, X, W, others=())
        on_nvfuser(monkeypatch, tmp_path, halves, X, W)  # what another configuration knows changes nothing


def test_what_the_library_turns_down_fails_where_nvfuser_is_forced(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match="fusion_segmenter"):
        on_nvfuser(monkeypatch, tmp_path, forced(softmax), X)


def forced(write: Any) -> Any:
    """A graph whose every op is forced to nvFuser."""
    def marked(g: graphs.Builder, *inputs: Node) -> Any:
        found = write(g, *inputs)
        for node in g.graph.nodes:
            node.meta["custom"] = {FORCE_MARK: ("nvfuser", True, "")}
        return found

    return marked


def overwritten(g: graphs.Builder, x: Node) -> list[Node]:
    """A region that nvFuser's lowering refuses: what is overwritten is also read for another store."""
    new = g.op("aten.add.Tensor", x, 1.0)
    return [g.op("aten.copy_.default", x, new), g.op("aten.mul.Tensor", new, 2.0)]


def test_what_the_lowering_refuses_runs_eager_where_there_is_no_other_executor(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = on_nvfuser(monkeypatch, tmp_path, overwritten, X, others=())
    x = X.clone()
    torch.testing.assert_close(run.call([x])[1], (X + 1) * 2)
    torch.testing.assert_close(x, X + 1)
    assert not run.plan.regions and library.asked == 0
    assert set(run.reasons) == {"not on nvfuser: in0 is overwritten, but another store reads it"}


def test_what_the_lowering_refuses_goes_to_triton_if_it_can(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = on_nvfuser(monkeypatch, tmp_path, overwritten, X)
    (region,) = run.plan.regions
    assert region.executor == "triton" and library.asked == 0
    assert region.reasons[-1] == "not on nvfuser: in0 is overwritten, but another store reads it"


def test_what_the_lowering_refuses_fails_where_nvfuser_is_forced(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match="in0 is overwritten"):
        on_nvfuser(monkeypatch, tmp_path, forced(overwritten), X, others=())
