"""What `bench.plans` takes as unchanged, and what not.

Example:
    python -m pytest tests/bench/test_plans.py
"""
from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import plans


def step(key: str | None, **changed: Any) -> dict[str, Any]:
    plan = dict.fromkeys(plans.PLAN) | {"executor": "triton" if key else "eager", "ops": ["aten.exp.default"]}
    return {**plan, "key": key, "kernel": f"source of {key[0]}" if key else "", **changed}


def subject(*steps: dict[str, Any]) -> dict[str, Any]:
    graph = {"kind": "forward", "called": 1, "ops": len(steps), "steps": list(steps)}
    return {"graphs": [graph], "other_kernels": [], "counts": {}, "error": "", "unusable": {}, "seconds": 1.0, "phases": {}}


def file(**named: dict[str, Any]) -> dict[str, Any]:
    return {"skipped": {}, "subjects": named}


BEFORE = file(f=subject(step("a1"), step(None), step("b1"), step("a1")), g=subject(step("b1")))


def after(*keys: str | None, g: str = "b1", **changed: Any) -> dict[str, Any]:
    first, *rest = keys
    return file(f=subject(step(first, **changed), *(step(key) for key in rest)), g=subject(step(g)))


def test_equal_files_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.compare(BEFORE, copy.deepcopy(BEFORE)) == 0
    assert "keys: 2 equal" in capsys.readouterr().out


def test_keys_may_be_renamed_one_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.compare(BEFORE, after("a2", None, "b2", "a2", g="b2")) == 0
    assert "keys: 2 renamed one-to-one" in capsys.readouterr().out


@pytest.mark.parametrize(("changed", "said"), [
    (after("a1", None, "b1", "a1", executor="eager"), "f: graph 1 (forward) step 1, executor: triton → eager"),
    (after("a1", None, "b1", "a1", ops=["aten.sin.default"]), "f: graph 1 (forward) step 1, ops: ['aten.exp.default'] → "),
    (after("a1", None, "b1", "a1", kernel="other"), "f: graph 1 (forward) step 1, kernel: source of a → other"),
    (after("a1", None, "b1"), "f: graph 1 (forward) step 4: triton aten.exp.default → nothing"),
    (after("a1", None, "b1", "a2"), "f: graph 1 (forward) step 4, key: a1 → a2"),  # no longer shared
    (after("a1", None, "b1", "a1", g="b2"), "g: graph 1 (forward) step 1, key: b1 → b2"),  # nor between graphs
    (file(f=BEFORE["subjects"]["f"]), "g: not there any more"),
])
def test_a_change_is_found(changed: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.compare(BEFORE, changed) == 1
    assert said in capsys.readouterr().out


def test_regions_that_come_to_share_a_key_are_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    before = file(f=subject(step("a1"), step("a2")))
    assert plans.compare(before, file(f=subject(step("a1"), step("a1")))) == 1
    assert "not shared by the same regions" in capsys.readouterr().out


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="its kernels are compiled in Triton's interpreter")
def test_a_function_is_recorded_with_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same; a changed constant changes only the kernel, its key included; another executor the plan."""
    monkeypatch.setenv("DYNAFUSE_CACHE", "1")

    def recorded(exponent: int, **options: Any) -> dict[str, Any]:
        def build() -> plans.Built:
            return (lambda x: torch.softmax(x**exponent, -1)), [torch.randn(4, 8, requires_grad=True)]

        found = plans.record(plans.Subject("f", build, {**plans.TRITON, **options}))
        assert not found["error"] and [graph["kind"] for graph in found["graphs"]] == ["forward", "backward"]
        return found

    first = recorded(3)
    assert all(step["kernel"] for graph in first["graphs"] for step in graph["steps"])
    assert plans.compare(file(f=first), file(f=recorded(3))) == 0
    other = recorded(5)
    assert {step["kernel"] for step in first["graphs"][0]["steps"]}.isdisjoint(
        step["kernel"] for step in other["graphs"][0]["steps"])
    assert plans.compare(file(f=first), file(f=other)) == 1
    assert plans.compare(file(f=first), file(f=recorded(3, executors="eager"))) == 1
