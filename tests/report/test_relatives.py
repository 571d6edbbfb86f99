"""How far layers share kernels that differ by a few ops, as the report tells it, and what it says keeps them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion, diff
from dynafuse.report import Relative, Report, ReportedStep, Reuse, explain, relatives
from dynafuse.report.relatives import Kernels
from dynafuse.report.text import RELATIVES_SHOWN
from tests.support.report_samples import small

WIDTH = 64


class Attention(nn.Module):
    """Attends to all places before one, or to those in a window."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        place = torch.arange(x.shape[1], device=x.device)
        back = place[:, None] - place[None, :]
        seen = back >= 0 if self.window is None else (back >= 0) & (back < self.window)
        scores = (q @ k.transpose(-1, -2) * 0.125).masked_fill(~seen, float("-inf"))
        return x + self.out(torch.softmax(scores, -1) @ v)


class Dense(nn.Module):
    """A feed-forward layer, with or without its norm."""

    def __init__(self, rate: float = 0.0, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Mixture(nn.Module):
    """Two experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = torch.softmax(self.gate(y), -1)
        return x + sum(weights[..., i, None] * expert(y) for i, expert in enumerate(self.experts))


def planned(*layers: nn.Module) -> Report:
    return explain(nn.Sequential(*layers), torch.randn(4, 32, WIDTH), device="h200", options={"capture": "never"})


def section(report: Report) -> list[str]:
    """The lines below "nearly the same kernels"."""
    return [line.strip() for line in str(report).partition("nearly the same kernels:\n")[2].splitlines()]


def test_masks_that_alternate() -> None:
    report = planned(*(Attention(window) for window in (16, None) * 3))
    assert report.reuse == Reuse(regions=31, distinct=11, exact=20, family=0, apart=3)
    assert [graph.reuse for graph in report.graphs] == [Reuse(13, 5, 8, 0, 1), Reuse(18, 6, 12, 0, 2)]
    assert "reuse: 31 regions on 11 kernels; 20 (65 %) have an earlier region's; 3 of the others nearly do" in str(report)
    assert section(report)[0].startswith("graph 2: r14 differs from r5: number of inputs: 7 against 5; ")


def test_first_layers_that_are_dense() -> None:
    report = planned(Dense(), Dense(), Mixture(), Mixture(), Mixture())
    assert report.reuse == Reuse(regions=25, distinct=18, exact=7, family=0, apart=5)
    assert "graph 2: r8 differs from r6: number of inputs: 7 against 8; … 10 more" in section(report)


def test_a_last_layer_without_a_norm() -> None:
    report = planned(*(Dense(norm=i < 5) for i in range(6)))
    assert report.reuse == Reuse(regions=25, distinct=10, exact=15, family=0, apart=3)
    steps = {step.name: step for step in report.graphs[0].fused}
    last, with_norm = steps["r10"], steps["r8"]
    assert with_norm.reused and "aten.rsqrt.default" in with_norm.ops
    assert not last.reused and last.relative is None and "aten.rsqrt.default" not in last.ops
    assert steps["r12"].reused, "the model's end has no norm either"


def by_rates(*rates: float) -> Report:
    return planned(*(Dense(rate) for rate in rates))


def test_rates_of_dropout_are_no_reason_for_a_kernel() -> None:
    equal, other = by_rates(0.1, 0.1, 0.1, 0.1), by_rates(0.1, 0.15, 0.2, 0.3)
    assert other.reuse == equal.reuse == Reuse(regions=18, distinct=10, exact=8, family=0, apart=1)
    keys = [[step.key for graph in report.graphs for step in graph.fused] for report in (other, equal)]
    assert keys[0] == keys[1]
    assert by_rates(0.1, 0.15, 0.2, 0.3, 0.35, 0.4).kernels == 10, "more layers need no more kernels"


def test_a_rate_whose_scale_is_a_power_of_two_is_one() -> None:
    report = by_rates(0.1, 0.15, 0.5, 0.25, 0.3)
    assert "graph 2: r4 differs from r2: op 15: mul with other 2.0 against k0" in section(report)


def test_regions_are_exact_near_or_new() -> None:
    report = by_rates(0.1, 0.1, 0.5)
    assert all(step.relative is None for graph in report.graphs for step in graph.fused if step.reused)
    table = [line.split()[-1] for line in str(report).splitlines() if " triton " in line]
    assert table.count("reused") == report.reuse.exact
    data = report.to_dict()
    assert data["reuse"] == {"regions": 14, "distinct": 10, "exact": 4, "family": 0, "apart": report.reuse.apart}
    assert [sum(graph["reuse"][name] for graph in data["graphs"]) for name in ("regions", "exact", "family")] == [
        data["reuse"][name] for name in ("regions", "exact", "family")
    ]


def test_eager_steps_are_no_regions() -> None:
    report = explain(torch.mm, torch.randn(8, 8), torch.randn(8, 8), device="h200")
    assert report.reuse == Reuse(0, 0, 0, 0, 0) and report.reuse.rate == 0.0 and "reuse:" not in str(report)


# ---------------------------------------------------------------------- the section


def with_relative(step: ReportedStep, name: str, graph: int, *differences: str) -> ReportedStep:
    return replace(step, name=name, relative=Relative("r0", graph, differences))


def reported(*steps: ReportedStep, graphs: int = 1) -> Report:
    report = small()
    return replace(report, graphs=(replace(report.graphs[0], steps=steps),) * graphs)


def test_few_differences_come_first_and_most_kernels_are_only_counted() -> None:
    step = small().graphs[0].steps[2]
    steps = [with_relative(step, f"r{n}", 1, *("a difference",) * n) for n in range(RELATIVES_SHOWN + 3, 0, -1)]
    lines = section(reported(*steps))
    assert lines[:2] == ["r1 differs from r0: a difference", "r2 differs from r0: a difference; a difference"]
    assert lines[-1] == "… 3 more" and len(lines) == RELATIVES_SHOWN + 1


@pytest.mark.parametrize("difference", ["word " * 100, "x" * 500])
def test_a_kernel_takes_one_line(difference: str) -> None:
    step = small().graphs[0].steps[2]
    report = reported(with_relative(step, "r5", 1, difference, "another"), graphs=2)
    lines = section(report)
    assert lines[0].startswith("graph 1: r5 differs from r0: ") and lines[0].endswith("…; … 1 more")
    assert lines[1].startswith("graph 2: r5 differs from graph 1's r0: ")
    assert max(map(len, str(report).splitlines())) <= 120


# ---------------------------------------------------------------------- what is compared


def bound() -> CanonicalRegion:
    """A region of four ops."""
    seen: list[backend.Compiled] = []
    with backend.listening(seen.append, plan_only=True):
        fn = torch.compile(lambda x: torch.sin(torch.exp(x) * x) + x, backend=backend.dynafuse, options={"device": "h200"})
        fn(torch.randn(8, 8))
    (found,) = seen[0].bounds.values()
    return found


def varied(like: CanonicalRegion, number: int, ops: int = 1) -> CanonicalRegion:
    """Another kernel, with ``ops`` times the ops."""
    code = replace(like.code, ops=like.code.ops * ops, options=(("number", number),))
    return replace(like, code=code, key=f"key {number}")


def test_few_kernels_are_compared_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(relatives, "diff", lambda a, b: compared.append((a, b)) or diff(a, b))
    like, kernels = bound(), Kernels()
    number = 3 * relatives.MOST_LOOKED_AT
    found = [kernels.add(varied(like, n), f"r{n}", 1) for n in range(number)]
    assert found[0] == (False, None) and kernels.add(varied(like, 5), "again", 2) == (True, None)
    assert found[1] == (False, Relative("r0", 1, ("option number: 1 against 0",)))
    assert len(compared) <= relatives.MOST_COMPARED * number
    assert found[-1][1] is not None and found[-1][1].step == f"r{number - 1 - relatives.MOST_LOOKED_AT}"


def test_kernels_of_other_ops_executors_or_too_many_are_no_relatives() -> None:
    like, kernels = bound(), Kernels()
    kernels.add(varied(like, 0), "r0", 1)
    elsewhere = replace(varied(like, 1), region=replace(like.region, executor="nvfuser"))
    twice, many = varied(like, 2, 2), varied(like, 3, 65)
    for other in (elsewhere, twice, many, varied(like, 4, 65)):
        assert kernels.add(other, "r1", 1) == (False, None)
    assert len(many.code.ops) > relatives.MOST_OPS
