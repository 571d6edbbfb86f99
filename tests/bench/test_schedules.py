"""Schedules under which kernels are timed: which there are, that each computes the same, and what is said of the times."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import schedules
from bench.report import Report
from bench.schedule_space import some_schedules, space
from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.ir import Spec
from dynafuse.lowering.triton.compiler import load
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.select import data
from dynafuse.select.runners import runner
from tests.bench.test_regions import SOFTMAX
from tests.support import graphs

CPU = torch.device("cpu")


def spec_of(write: Any, *inputs: torch.Tensor) -> Spec:
    plan = graphs.planned(graphs.built(write, *inputs))
    (spec,) = [canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").spec for region in plan.regions]
    return spec


def transposed_sum(g: graphs.Builder, x: Node, y: Node) -> Node:
    return g.op("aten.add.Tensor", g.op("aten.sin.default", x), y)


def softmax(g: graphs.Builder, x: Node) -> Node:
    raised = g.op("aten.exp.default", g.op("aten.sub.Tensor", x, g.op("aten.amax.default", x, [1], True)))
    return g.op("aten.div.Tensor", raised, g.op("aten.sum.dim_IntList", raised, [1], True))


def column_sum(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sum.dim_IntList", x, [0])


def both_sums(g: graphs.Builder, x: Node) -> list[Node]:
    return [g.op("aten.sum.dim_IntList", x, [1]), g.op("aten.sum.dim_IntList", x, [0])]


SPECS = {
    "pointwise": (transposed_sum, (torch.empty(96, 80), torch.empty(80, 96).t())),
    "rows": (softmax, (torch.empty(40, 700),)),
    "columns": (column_sum, (torch.empty(2500, 70),)),
    "both": (both_sums, (torch.empty(4096, 250),)),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_chosen_schedule_comes_first_and_others_follow_each_once(name: str) -> None:
    spec = spec_of(SPECS[name][0], *SPECS[name][1])
    drawn = some_schedules(spec, 20, "seed")
    assert drawn[0] == choose_schedule(spec)
    assert len(drawn) == 20
    assert all(schedule not in drawn[:place] for place, schedule in enumerate(drawn))
    assert drawn == some_schedules(spec, 20, "seed")
    assert drawn != some_schedules(spec, 20, "another")


def test_the_space_has_what_no_formula_of_the_class_chooses() -> None:
    spec = spec_of(column_sum, torch.empty(2500, 70))
    classes = {schedule.schedule_class for schedule in space(spec)}
    assert {"looped", "split", "persistent"} <= classes


@pytest.mark.parametrize("name", SPECS)
def test_every_schedule_computes_the_same(name: str) -> None:
    spec = spec_of(SPECS[name][0], *SPECS[name][1])
    inputs = data.inputs_for(spec, {}, CPU)
    expected = None
    for schedule in some_schedules(spec, 40, name)[::10 if name == "both" else 5]:  # interpreted programs take their time
        lowered = lower(spec, schedule)
        kernel = Kernel("k", lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), interpreted=True)
        results = [result.clone() for result in runner(kernel, spec, {}, CPU)(inputs)]
        expected = expected or results
        for result, first in zip(results, expected, strict=True):
            torch.testing.assert_close(result, first, rtol=2e-5, atol=2e-4, msg=lambda text, s=schedule: f"{s}: {text}")


def test_a_region_is_planned_into_jobs_without_its_values() -> None:
    jobs = schedules.jobs_of(SOFTMAX, "h200", 6)
    assert {job.case for job in jobs} == {"amax_sum_1/r0"}
    assert 1 < len(jobs) <= 6
    assert jobs[0].schedule == choose_schedule(jobs[0].code)


def test_a_region_that_cannot_be_planned_gives_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.bench.test_regions import BROKEN

    assert schedules.jobs_of(BROKEN, "h200", 6) == []
    assert BROKEN.name in capsys.readouterr().err


def test_a_compiler_that_ends_its_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = schedules.jobs_of(SOFTMAX, "h200", 1)
    monkeypatch.setattr(schedules, "compiled_here", lambda job, capability: os.abort())
    assert schedules.compiled_job(job, 90) == schedules.Answer(error="the compiler has ended its process")


class Inline:
    """A pool that runs what it is given at once."""

    def submit(self, call: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, us: dict[str, float], seconds: float = 60) -> dict[str, Any]:
    """The rows of a search over one region whose schedules take what ``us`` says, others 10 µs."""
    monkeypatch.setattr(schedules, "compiled_job", lambda job, capability: schedules.Answer(
        error="too large" if job.schedule.warps == 16 else ""))
    monkeypatch.setattr(schedules.Clock, "us", lambda self, job, answer: us.get(str(job.schedule), 10.0))
    options = argparse.Namespace(describe="h200", most=8, device="cpu")
    report = Report(tmp_path / "out.json", {}, {})
    schedules.Search(options, report, Inline(), time.monotonic() + seconds).run([SOFTMAX, SOFTMAX])  # type: ignore[arg-type]
    return {case: row for (_, case, _), row in report.rows.items()}


def test_a_row_has_the_regret_of_the_chosen_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = schedules.jobs_of(SOFTMAX, "h200", 8)
    best = str(next(job.schedule for job in reversed(jobs) if job.schedule.warps < 16))
    (row,) = searched(tmp_path, monkeypatch, {best: 4.0}).values()
    assert row["best"] == best
    assert row["regret"] == 2.5
    assert [entry["schedule"] for entry in row["tried"]] == [str(job.schedule) for job in jobs]
    assert "regret 2.500" in schedules.summary({"amax_sum_1/r0": row})


def test_what_is_timed_first_is_not_taken_for_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has waited for the compiler is slow at first."""
    calls: list[str] = []

    def us(clock: Any, job: Any, answer: Any) -> float:
        calls.append(str(job.schedule))
        return 14.0 if len(calls) <= 3 else 10.0

    monkeypatch.setattr(schedules.Clock, "us", us)
    monkeypatch.setattr(schedules, "compiled_job", lambda job, capability: schedules.Answer())
    report = Report(tmp_path / "out.json", {}, {})
    options = argparse.Namespace(describe="h200", most=8, device="cpu")
    schedules.Search(options, report, Inline(), time.monotonic() + 60).run([SOFTMAX])  # type: ignore[arg-type]
    (row,) = report.rows.values()
    timed = len(row["tried"])
    assert row["regret"] == 1.0 and len(calls) == 3 * timed
    assert sorted(calls[:timed]) == sorted(calls[timed:2 * timed])


def test_nothing_is_timed_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched(tmp_path, monkeypatch, {}, seconds=0) == {}


def test_a_schedule_that_does_not_compile_is_told_and_not_the_best() -> None:
    row = schedules.row_of([{"schedule": "flat x=0/256 w4 s1 p1", "us": 8.0}, {"schedule": "flat x=0/512 w16 s1 p1",
                                                                                "error": "too large"}])
    assert row["regret"] == 1.0
    assert "regret" not in schedules.row_of([{"schedule": "flat x=0/256 w4 s1 p1", "error": "e"},
                                             {"schedule": "flat x=0/512 w4 s1 p1", "us": 3.0}])
