"""The report of what this process has compiled and run."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynafuse
from dynafuse import backend
from dynafuse.errors import DynafuseWarning
from dynafuse.report import history
from dynafuse.report.data import ReportedGraph, ReportedStep
from dynafuse.report.history import History
from tests.support.fake_recorder import recording_on_cpu

X = torch.linspace(-1, 1, 64).reshape(4, 16)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    backend.reset()


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=backend.dynafuse, options=options)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2


def test_before_anything_is_compiled_it_says_so() -> None:
    report = dynafuse.process_report()
    assert report.graphs == () and "no graph has been compiled and called yet" in str(report)
    assert "no graph has been compiled" in report.to_html()


def test_graphs_are_those_that_listeners_see_in_order() -> None:
    seen: list[backend.Compiled] = []
    with backend.listening(seen.append, plan_only=False):
        compiled(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)))(X).sum().backward()
        compiled(scaled)(X)
    report = dynafuse.process_report()
    assert [graph.kind for graph in report.graphs] == [one.kind for one in seen] == ["forward", "backward", "inference"]
    for graph, one in zip(report.graphs, seen, strict=True):
        assert [step.key for step in graph.fused] == [one.bounds[r.name].key for r in one.plan.regions]
        assert [step.executor for step in graph.fused] == [r.executor for r in one.plan.regions]
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_it_is_noted_when_it_is_called_and_explaining_is_not() -> None:
    function = compiled(scaled)
    dynafuse.explain(function, X)
    assert dynafuse.process_report().graphs == ()
    for _ in range(3):
        function(X)
    assert len(dynafuse.process_report().graphs) == 1
    torch._dynamo.reset()
    assert dynafuse.process_report().graphs == ()


def test_kernels_say_where_they_came_from(tmp_path: Path) -> None:
    code = ("import torch, dynafuse; f = lambda x: torch.softmax(x, -1) * 2\n"
            "for tune in ('never', 'unsure'): torch.compile(f, backend='dynafuse', options={'tune': tune})(torch.ones(4, 16))\n"
            "print([g.steps[0].origin for g in dynafuse.process_report().graphs])")
    environment = {**os.environ, "DYNAFUSE_CACHE": "1", "DYNAFUSE_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    told = [subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            for _ in range(2)]
    assert told == ["['compiled', 'memory']\n", "['disk', 'memory']\n"]


def test_what_fell_back_is_shown_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynafuse.lowering.triton import executor

    def fails(spec: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(executor, "lowerings", fails)
    with pytest.warns(DynafuseWarning, match="not today"):
        compiled(scaled, strict=False)(X)
    (graph,) = dynafuse.process_report().graphs
    assert {step.executor for step in graph.steps} == {"eager"} and {step.reason for step in graph.steps} == {"demoted"}


def test_it_shows_options_of_the_call() -> None:
    compiled(scaled, executors="eager")(X)
    (graph,) = dynafuse.process_report().graphs
    assert {step.executor for step in graph.steps} == {"eager"} and graph.bound_by is None


def test_it_counts_calls_that_were_replayed() -> None:
    with recording_on_cpu():
        call = compiled(scaled, capture="always", executors="triton")
        for _ in range(6):
            call(X)
        (graph,) = dynafuse.process_report().graphs
    assert graph.captured and graph.replays is not None
    replayed, launched = graph.replays.replayed, graph.replays.launched
    assert graph.replays.recordings == 1 and replayed >= 3 and replayed + launched == 6
    assert f"so far {replayed} calls replayed, {launched} launched kernel by kernel, 1 recorded" in " ".join(str(dynafuse.process_report()).split())
    with recording_on_cpu():
        call(X)
    assert graph.replays.replayed == replayed, "a report stays as it is"


# ---------------------------------------------------------------------- what it costs


def graph_of(steps: int, key: str = "k") -> ReportedGraph:
    step = ReportedStep("r0", "triton", ("aten.sin.default",), key, 8, 1.0)
    return ReportedGraph("inference", tuple(replace(step, name=f"r{i}") for i in range(steps)), steps, ())


def test_memory_is_bounded() -> None:
    kept = History(most_graphs=3, most_steps=10)
    for i in range(7):
        kept._add(graph_of(1, f"k{i}"), {})
    report = kept.report()
    assert [graph.steps[0].key for graph in report.graphs] == ["k4", "k5", "k6"] and report.dropped == 4
    assert "4 earlier graphs not listed" in str(report)
    kept._add(graph_of(9), {})
    assert [len(graph.steps) for graph in kept.report().graphs] == [1, 9]
    kept._add(graph_of(50), {})
    assert [len(graph.steps) for graph in kept.report().graphs] == [50], "the latest, however large"


def test_nothing_of_a_graph_is_kept_alive() -> None:
    kept, seen = History(), []

    def note(one: backend.Compiled) -> None:
        kept.note(one, {})
        seen.append(weakref.ref(one.plan.annotated.graph))

    with backend.listening(note, plan_only=False):
        compiled(scaled)(X)
    torch._dynamo.reset()
    gc.collect()
    assert len(kept.report().graphs) == 1 and [graph() for graph in seen] == [None]


def test_what_fails_in_it_does_not_reach_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dynafuse.report import history as home

    def fails(*_: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(home, "graph_of", fails)
    options = {"strict": False, "repro_dir": tmp_path}
    with pytest.warns(DynafuseWarning, match="reports failed: RuntimeError: not today"):
        torch.testing.assert_close(torch.compile(scaled, backend="dynafuse", options=options)(X), scaled(X))
    assert history.process_report().graphs == ()
