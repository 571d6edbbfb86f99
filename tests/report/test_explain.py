"""``explain`` beside a process that compiles: with whose options it plans, what it says of graph breaks, what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import dynafuse
from dynafuse import backend
from dynafuse.errors import OptionError
from dynafuse.report.breaks import break_of
from dynafuse.report.tracing import settings_of

X = torch.linspace(-1, 1, 64).reshape(4, 16)


def smooth(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def broken_inside(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    torch._dynamo.graph_break()
    return y + 1


def calls_broken(x: torch.Tensor) -> torch.Tensor:
    return broken_inside(x * 2) * 3


def broken_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x * 2


def branches(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def reads_a_number(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def executors(report: dynafuse.Report) -> set[str]:
    return {step.executor for graph in report.graphs for step in graph.steps}


# ---------------------------------------------------------------------- options and mode


def in_place(module: nn.Module, **settings: Any) -> nn.Module:
    module.compile(backend=backend.dynafuse, **settings)
    return module


def whole(fn: Any, **settings: Any) -> Any:
    return torch.compile(fn, backend=backend.dynafuse, **settings)


COMPILED: dict[str, Callable[..., Any]] = {
    "module": lambda **settings: whole(Net(), **settings),
    "function": lambda **settings: whole(smooth, **settings),
    "method": lambda **settings: whole(Net().forward, **settings),
    "module in place": lambda **settings: in_place(Net(), **settings),
}


@pytest.mark.parametrize("kind", COMPILED)
def test_what_is_compiled_is_planned_with_its_options(kind: str) -> None:
    compiled = COMPILED[kind](options={"executors": "eager"})
    assert settings_of(compiled).options == {"executors": "eager"}
    with torch.no_grad():
        assert executors(dynafuse.explain(compiled, X)) == {"eager"}
        assert "triton" in executors(dynafuse.explain(compiled, X, options={"executors": "triton"})), "those given win"
        assert "triton" in executors(dynafuse.explain(COMPILED[kind](), X))


@pytest.mark.parametrize("kind", COMPILED)
def test_what_is_compiled_is_planned_with_its_mode(kind: str) -> None:
    with torch.no_grad():
        assert dynafuse.explain(COMPILED[kind](mode="reduce-overhead"), X).graphs[0].captured
        assert not dynafuse.explain(COMPILED[kind](), X).graphs[0].captured
        assert dynafuse.explain(COMPILED[kind](), X, mode="reduce-overhead").graphs[0].captured


def test_the_plan_is_that_of_the_compiled_object() -> None:
    """Regions, executors and keys are those of the graphs that the object really runs."""
    options = {"max_region_ops": 2, "executors": "triton", "round_like_eager": True}
    ran: list[backend.Compiled] = []
    compiled = whole(Net(), options=options)
    x = X.clone().requires_grad_()
    with backend.listening(ran.append, plan_only=False):
        compiled(x).sum().backward()
    explained = dynafuse.explain(compiled, X.clone().requires_grad_())
    planned = [[(step.name, step.key) for step in graph.fused] for graph in explained.graphs]
    assert planned == [[(r.name, one.bounds[r.name].key) for r in one.plan.regions] for one in ran]
    assert planned != [[(step.name, step.key) for step in graph.fused] for graph in dynafuse.explain(Net(), x).graphs]


def test_options_without_a_compiled_object() -> None:
    assert executors(dynafuse.explain(smooth, X, options={"executors": "eager"})) == {"eager"}
    (graph,) = dynafuse.explain(smooth, X, mode="reduce-overhead").graphs
    assert graph.captured
    report = dynafuse.explain(smooth, X, options={"device": "a100"})
    assert report.device == "a100" and dynafuse.explain(smooth, X, device="h100", options={"device": "a100"}).device == "h100"
    for wrong in ({"mode": "fast"}, {"options": "strict"}, {"options": {"stritc": True}}, {"options": {"device": "h300"}}, {"device": "h300"}):
        with pytest.raises(OptionError):
            dynafuse.explain(smooth, X, **wrong)  # type: ignore[arg-type]


def test_options_of_another_backend_are_not_ours() -> None:
    report = dynafuse.explain(torch.compile(smooth, backend="inductor", options={"max_autotune": True}), X)
    assert executors(report) == {"triton"}


def test_dynamic_sizes_are_those_of_the_compiled_object() -> None:
    for dynamic, known in ((True, False), (False, True)):
        (graph,) = dynafuse.explain(whole(smooth, dynamic=dynamic), X).graphs
        (explained,) = graph.steps
        fresh: list[backend.Compiled] = []
        torch._dynamo.reset()
        with backend.listening(fresh.append, plan_only=True):
            whole(smooth, dynamic=dynamic)(X)
        (region,) = fresh[0].plan.regions
        assert explained.key == fresh[0].bounds[region.name].key
        assert bool(fresh[0].bounds[region.name].symbols) is not known


@pytest.mark.parametrize("returns", [True, False])
def test_a_training_step_that_runs_its_backward_itself(returns: bool) -> None:
    model = Net()

    def step(x: torch.Tensor) -> torch.Tensor | None:
        loss = model(x).square().mean()
        loss.backward()
        return loss if returns else None

    graphs = dynafuse.explain(step, X).graphs
    assert [graph.kind for graph in graphs] == ["forward", "backward"]


# ---------------------------------------------------------------------- what it leaves of Dynamo


@pytest.mark.parametrize("fn", [smooth, calls_broken, broken_in_a_loop, branches, reads_a_number, Net()], ids=lambda fn: getattr(fn, "__name__", "Net"))
def test_what_was_compiled_stays_compiled(fn: Any) -> None:
    counter = CompileCounter()
    compiled = torch.compile(fn, backend=counter)
    with torch.no_grad():
        compiled(X)
        frames = counter.frame_count
        for rows in (4, 8, 12):
            dynafuse.explain(fn, torch.ones(rows, 16))
        compiled(X)
    assert counter.frame_count == frames


def test_sizes_of_explained_calls_are_no_profile() -> None:
    """Neither makes a second size seen by ``explain`` the next compilation dynamic, nor a first one that of the plan."""
    shapes: list[list[Any]] = []

    def told(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.append([size for value in inputs for size in getattr(value, "shape", ())])
        return module

    dynafuse.explain(smooth, torch.ones(3, 16))
    torch.compile(smooth, backend=told)(torch.ones(4, 16))
    assert shapes == [[4, 16]] and all(type(size) is int for size in shapes[0])
    planned = {dynafuse.explain(smooth, torch.ones(rows, 16)).graphs[0].steps[0].bytes for rows in (4, 8, 16)}
    assert planned == {rows * 16 * 4 * 2 for rows in (4, 8, 16)}


@pytest.mark.parametrize("fn", [smooth, calls_broken], ids=lambda fn: fn.__name__)
def test_explained_calls_do_not_count_as_recompilations(fn: Any) -> None:
    limit = torch._dynamo.config.recompile_limit
    counter = CompileCounter()
    compiled = torch.compile(fn, backend=counter, dynamic=False)
    compiled(torch.ones(1, 16))
    for _ in range(limit):
        dynafuse.explain(fn, X)
    before = counter.frame_count
    compiled(torch.ones(2, 16))
    assert counter.frame_count > before, "Dynamo would have given up on it"


def test_nothing_of_it_is_kept_alive() -> None:
    import gc
    import weakref

    class Watched(Net):
        made: list[Any] = []  # noqa: RUF012

        def __deepcopy__(self, memo: dict[int, Any]) -> Watched:
            copy = Watched()
            Watched.made.append(weakref.ref(copy))
            return copy

    model = Watched()
    torch.compile(model, backend="eager")(X)
    dynafuse.explain(model, X)
    gc.collect()
    assert Watched.made and all(reference() is None for reference in Watched.made)


# ---------------------------------------------------------------------- graph breaks


@pytest.mark.parametrize(("fn", "line", "words"), [
    (calls_broken, "torch._dynamo.graph_break()", "graph_break"),
    (broken_in_a_loop, "torch._dynamo.graph_break()", "graph_break"),
    (branches, "return x + 1 if x.sum() > 0 else x - 1", "ata-dependent branching"),
    (reads_a_number, "return x * x.sum().item()", "item"),
], ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "compiled before"])
def test_breaks_are_told_with_their_cause_and_the_users_line(fn: Any, line: str, words: str, before: bool) -> None:
    if before:
        torch.compile(fn, backend="eager")(X)
    for _ in range(2):
        report = dynafuse.explain(fn, X)
        (found,) = report.breaks
        assert found.where.startswith(__file__) and found.where.endswith(f": {line}")
        assert words in found.reason
        assert report.to_dict()["breaks"] == [{"where": found.where, "reason": found.reason, "hint": found.hint}]
        text = " ".join(str(report).split())
        assert "graph break at" in text and " ".join(found.reason.split()) in text
        assert "graph break at" in report.to_html()


def test_a_break_inside_of_torch_is_one_of_the_line_that_calls_it() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        places = [found.where for found in dynafuse.explain(step, X).breaks]
        assert places and all(where.startswith(__file__) for where in places)
        assert any(where.endswith(": optimizer.step()") for where in places)


def test_a_whole_graph_has_no_breaks() -> None:
    report = dynafuse.explain(Net(), X)
    assert report.breaks == () and "graph break" not in str(report)


def test_breaks_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    dynafuse.explain(calls_broken, X)
    assert "Graph break" not in "".join(capfd.readouterr())


def test_words_of_other_versions_of_dynamo() -> None:
    skipped = break_of('… will skip tracing the frame g\nuser code:\n  File "nowhere.py", line 11, in g\n', ValueError("odd"))
    assert skipped is not None and (skipped.where, skipped.reason) == ("nowhere.py:11", "odd")
    plain = break_of("Graph break in user code at nowhere.py:3\nGraph Break Reason: generic_jump TensorVariable()\n\nmore")
    assert plain is not None and (plain.where, plain.reason) == ("nowhere.py:3", "generic_jump TensorVariable()")
    assert break_of("something else") is None
