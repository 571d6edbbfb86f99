"""The report: what it says of graphs, and that asking for it leaves nothing behind."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynafuse
from dynafuse.backend import Compiled
from dynafuse.cost import device as devices
from dynafuse.errors import OptionError
from dynafuse.lowering.nvfuser import availability
from dynafuse.report import Price, Report, ReportedStep, explain
from dynafuse.report.reading import report_of
from tests.support.processes import ROOT
from tests.support.report_samples import small

PROMISED = {"executor", "ops", "key", "bytes", "predicted_us", "reused"}
GRAPH_NAMES = {"kind", "called", "sizes", "ops", "device_us", "host_us", "eager_us", "eager_host_us", "bound_by", "captured",
               "capture", "replays", "kept", "reuse", "steps", "refusals"}
GOLDEN = Path(__file__).with_name("report.expected")


class Block(nn.Module):
    """A layer worth repeating: norm, product, activation, residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def blocks(number: int) -> nn.Module:
    return nn.Sequential(*(Block(32) for _ in range(number)))


def on_h200(fn: Any, *args: Any, **kwargs: Any) -> Report:
    return explain(fn, *args, device="h200", **kwargs)


def kinds(report: Report) -> list[str]:
    return [graph["kind"] for graph in report.to_dict()["graphs"]]


def fused(report: Report, graph: int = 0) -> list[dict[str, Any]]:
    return [step for step in report.to_dict()["graphs"][graph]["steps"] if step["executor"] != "eager"]


# ---------------------------------------------------------------------- what it says


def test_to_dict_is_plain_data_of_the_promised_form() -> None:
    data = on_h200(blocks(2), torch.randn(8, 32)).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {"device", "graphs", "kernels", "reuse", "unusable", "breaks", "dropped"}
    assert data["device"] == "h200"
    assert [set(graph) for graph in data["graphs"]] == [GRAPH_NAMES] * 2
    steps = [step for graph in data["graphs"] for step in graph["steps"]]
    assert {step["executor"] for step in steps} == {"triton", "eager"}
    for step in steps:
        assert set(step) == set(steps[0]) and set(step) > PROMISED
        assert step["ops"] and all(isinstance(op, str) for op in step["ops"])
        assert isinstance(step["reused"], bool)
        if step["executor"] == "eager":
            assert step["key"] is None and step["reason"] and not step["reused"]
        else:
            assert step["key"] and step["bytes"] > 0 and not step["reason"]
        assert step["predicted_us"] > 0 and step["host_us"] > 0
        assert step["measured_us"] == {}


def test_numbers_of_a_graph_that_can_be_counted_by_hand() -> None:
    report = on_h200(lambda x, y: torch.relu(x + y), torch.randn(64, 128), torch.randn(64, 128))
    (step,) = fused(report)
    assert step["ops"] == ["aten.add.Tensor", "aten.relu.default"]
    assert step["bytes"] == 3 * 64 * 128 * 4
    assert report.kernels == 1 and kinds(report) == ["inference"]


def test_an_op_that_could_be_fused_but_for_its_operands_has_a_price() -> None:
    report = on_h200(lambda x: x * 2, torch.randn(8, 8, dtype=torch.complex64))
    (step,) = report.to_dict()["graphs"][0]["steps"]
    assert "complex64" in step["reason"]
    assert step["bytes"] == 2 * 8 * 8 * 8 and step["predicted_us"] > 0


def test_a_product_is_priced_by_its_arithmetic() -> None:
    n, tflops = 2048, devices.describe("h200").contraction_tflops_float32
    report = on_h200(torch.mm, torch.empty(n, n), torch.empty(n, n))
    (step,) = report.graphs[0].steps
    assert step.bytes == 3 * n * n * 4
    assert step.predicted_us == pytest.approx(2 * n**3 / (tflops * 1e6) + devices.describe("h200").launch_us_eager)
    assert [price.executor for price in step.prices] == ["eager"]


def test_totals_say_what_bounds_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(n: int) -> Any:
        return on_h200(lambda x, w: torch.relu(x @ w), torch.empty(n, n), torch.empty(n, n)).graphs[0]

    small_, large_ = of(32), of(2048)
    for graph in (small_, large_):
        assert graph.device_us == pytest.approx(sum(step.predicted_us for step in graph.steps))
        assert graph.host_us == pytest.approx(sum(step.host_us for step in graph.steps))
    assert (small_.bound_by, large_.bound_by) == ("host", "device")
    monkeypatch.setenv("DYNAFUSE_CUDAGRAPHS", "1")
    captured = of(32)
    assert captured.captured and captured.bound_by == "device"


def test_overridden_costs_reach_what_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_COST_LAUNCH_US_EAGER", "500")
    (step,) = on_h200(torch.mm, torch.randn(8, 16), torch.randn(16, 4)).graphs[0].steps
    assert step.predicted_us is not None and 500 < step.predicted_us < 501


def test_reads_go_through_views_and_outputs() -> None:
    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        values = torch.topk(torch.relu(x).t(), 2).values.t()
        return torch.sin(values @ w) + values

    (graph,) = on_h200(mixed, torch.randn(8, 8), torch.randn(8, 8)).graphs
    reads = {step.ops[0].split(".")[1]: step.reads for step in graph.steps}
    names = {step.ops[0].split(".")[1]: step.name for step in graph.steps}
    assert reads["relu"] == () and reads["topk"] == (names["relu"],) and reads["mm"] == (names["topk"],)
    assert set(reads["sin"]) == {names["mm"], names["topk"]}


def test_what_is_overwritten_is_read_after() -> None:
    def counting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x @ w

    (graph,) = on_h200(counting, torch.randn(8, 8), torch.randn(8, 8)).graphs
    assert graph.steps[1].reads == (graph.steps[0].name,)


def test_steps_name_the_lines_that_they_compute() -> None:
    (graph,) = on_h200(lambda x: torch.sin(x) + 1, torch.randn(8)).graphs
    assert "torch.sin(x) + 1" in graph.steps[0].lines[0]


# ---------------------------------------------------------------------- several executors


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that may use nvFuser as well, wherever they are made."""
    found = availability.Availability(True, "for planning", "nvfuser-cu128-torch210", "0.2.36")
    monkeypatch.setattr(availability, "find", lambda: found)
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton,nvfuser,eager")


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * 2


@pytest.mark.usefixtures("two")
def test_prices_of_all_executors_with_the_override_that_would_flip_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4096, 1024)
    (step,) = on_h200(softmax, x).graphs[0].steps
    assert {price.executor for price in step.prices} == {"triton", "nvfuser"} and step.margin is not None
    assert step.prices[0].executor == step.executor and step.predicted_us == step.prices[0].device_us
    (other,) = step.others
    name, value = other.override.split(" above ")
    assert name == f"DYNAFUSE_COST_EFFICIENCY_{other.executor.upper()}_ROW" and step.kernel_class == "row"
    monkeypatch.setenv(name, f"{1.1 * float(value) + 0.3:.2f}")
    (flipped,) = on_h200(softmax, x).graphs[0].steps
    assert flipped.executor == other.executor


@pytest.mark.parametrize(("bound_by", "shown"), [("device", "nvfuser 12.0 +20 %"), ("host", "nvfuser 6.0 host +50 %"), (None, "nvfuser 12.0 +20 %")])
def test_the_next_best_executor_is_compared_by_the_time_that_is_shown(bound_by: str | None, shown: str) -> None:
    prices = (Price("triton", 10.0, 4.0), Price("nvfuser", 12.0, 6.0))
    step = ReportedStep("r0", "triton", ("aten.sin.default",), "k" * 32, 8, 10.0, host_us=4.0, prices=prices, margin=9.0)
    assert str(step.second(bound_by)) == shown
    faster = replace(step, prices=(prices[0], Price("nvfuser", 9.0, 44.0)))
    assert str(faster.second(bound_by)) == ("nvfuser 44.0 host ×11" if bound_by == "host" else "nvfuser 9.0 -10 %")
    assert replace(step, prices=prices[:1]).second(bound_by) is None
    assert replace(step, predicted_us=0.0, host_us=0.0).second(bound_by).more is None  # type: ignore[union-attr]


@pytest.mark.usefixtures("two")
def test_what_bounds_a_graph_is_what_executors_are_compared_by() -> None:
    for rows, of in ((8, "host"), (65536, "device")):
        (graph,) = on_h200(softmax, torch.empty(rows, 1024)).graphs
        second = graph.steps[0].second(graph.bound_by)
        assert graph.bound_by == of and second is not None and second.of == of


def test_one_executor_has_no_column_for_another() -> None:
    report = on_h200(softmax, torch.empty(8, 8))
    assert "next best" not in str(report)


@pytest.mark.usefixtures("two")
def test_no_override_of_device_time_where_host_time_decides() -> None:
    (graph,) = on_h200(softmax, torch.empty(8, 1024)).graphs
    (step,) = graph.steps
    assert graph.bound_by == "host" and step.executor == "triton"
    assert step.others[0].host_us > step.prices[0].host_us and step.others[0].override == ""


@pytest.mark.usefixtures("two")
def test_what_is_forced_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forced = dynafuse.force_backend("nvfuser")(softmax)
    (step,) = on_h200(lambda x: forced(x), torch.empty(64, 1024)).graphs[0].steps
    assert (step.executor, step.forced, step.fallback) == ("nvfuser", "nvfuser", ())
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton,eager")
    fallen = dynafuse.force_backend("nvfuser", strict=False)(softmax)
    report = on_h200(lambda x: fallen(x), torch.empty(64, 1024))
    (step,) = report.graphs[0].steps
    assert step.executor == "triton" and step.forced is None
    assert step.fallback and step.fallback[0].startswith("nvfuser: executor 'nvfuser' is not enabled")
    assert "fell back" in str(report)


@pytest.mark.parametrize(("fn", "reason"), [
    (lambda x: x @ x, "contraction: stays with the vendor's library"),
    (lambda x: x[:0].exp(), "an empty tensor"),
])
def test_a_step_that_does_not_run_where_it_is_forced_says_what_happened(fn: Any, reason: str) -> None:
    report = on_h200(dynafuse.force_backend("triton")(lambda x: torch.sin(fn(x))), torch.randn(16, 16))
    eager = [step for step in report.graphs[0].steps if step.executor == "eager"]
    assert eager and all(step.forced is None for step in eager)
    assert f"triton: {reason}" in eager[0].fallback
    text = str(report)
    assert f"fell back   {eager[0].name}" in text and f"asked for triton: {reason}" in text
    assert not any(step.name in line for line in text.splitlines() if line.startswith(" forced") for step in eager)


def test_what_was_measured_is_said() -> None:
    seen: list[Compiled] = []
    with dynafuse.backend.listening(seen.append, plan_only=True):
        torch.compile(softmax, backend=dynafuse.backend.dynafuse, options={"device": "h200"})(torch.empty(8, 8))
    (compiled,) = seen
    (whole,) = compiled.regions.regions
    decision = replace(whole.region.decision, measured={"triton": 2.5, "nvfuser": 2.25})
    measured = replace(whole, region=replace(whole.region, decision=decision))
    report = report_of([replace(compiled, regions=replace(compiled.regions, steps=(measured,)))], "h200", captured=False)
    assert report.graphs[0].steps[0].measured_us == {"triton": 2.5, "nvfuser": 2.25}
    assert "measured    r0: nvfuser 2.2, triton 2.5 µs" in str(report)


def test_an_executor_that_cannot_be_used_is_said_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = availability.Availability(False, "no module nvfuser_direct")
    monkeypatch.setattr(availability, "find", lambda: missing)
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton,nvfuser,eager")
    report = on_h200(softmax, torch.empty(8, 8))
    assert report.to_dict()["unusable"] == {"nvfuser": "nvFuser is not available: no module nvfuser_direct"}
    assert str(report).splitlines()[1] == "nvFuser is not available: no module nvfuser_direct"


def test_views_and_picks_of_outputs_are_no_steps() -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        return torch.topk(x.t().unsqueeze(0), 2).values.view(-1)[1:]

    (graph,) = on_h200(views, torch.randn(8, 4)).to_dict()["graphs"]
    assert [step["ops"] for step in graph["steps"]] == [["aten.topk.default"]]


def test_backward_is_covered_where_an_output_requires_grad() -> None:
    model = blocks(1)
    assert kinds(on_h200(model, torch.randn(8, 32))) == ["forward", "backward"]
    with torch.no_grad():
        assert kinds(on_h200(model, torch.randn(8, 32))) == ["inference"]


@pytest.mark.parametrize("nest", [lambda y: {"out": [y, 3]}, lambda y: (None, (y,)), lambda y: [y, y]])
def test_backward_starts_from_tensors_anywhere_in_the_output(nest: Any) -> None:
    report = on_h200(lambda x: nest(torch.sin(x)), torch.randn(8, requires_grad=True))
    assert kinds(report) == ["forward", "backward"]


def test_what_is_kept_for_the_backward_is_counted_once_and_without_inputs() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w.t()) @ w).sum()  # keeps the tanh, for itself and transposed for the product

    report = explain(fn, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)), device="h200")
    forward, backward = report.graphs
    assert forward.kept is not None and (forward.kept.tensors, forward.kept.bytes) == (1, 64 * 64 * 4)
    assert backward.kept is None
    assert "; keeps 1 tensor, 0.016 MB for the backward" in str(report)


def test_repeated_layers_reuse_kernels() -> None:
    three, five = (on_h200(blocks(n), torch.randn(8, 32)) for n in (3, 5))  # first and last may differ
    assert three.kernels == five.kernels
    assert len(fused(five)) > len(fused(three))


def test_reused_means_that_an_equal_key_came_earlier() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())]
    report = on_h200(nn.Sequential(*layers), torch.randn(1 << 10, 32))
    seen: set[str] = set()
    steps = [step for graph in range(2) for step in fused(report, graph)]
    for step in steps:
        assert step["reused"] == (step["key"] in seen)
        seen.add(step["key"])
    assert any(step["reused"] for step in steps)


def test_a_merge_that_must_be_refused_is_listed() -> None:
    def two_statistics(x: torch.Tensor) -> torch.Tensor:  # the column sums need all rows before the row sums can start
        return (x - x.sum(0)).exp().sum(1)

    report = on_h200(two_statistics, torch.randn(512, 512))
    assert len(fused(report)) > 1
    assert report.refusals
    assert all(refusal.kind and refusal.first and refusal.second for refusal in report.refusals)


def test_what_eager_would_take_is_said_and_why_an_op_runs_so() -> None:
    x, slow = torch.zeros(8192, 1024), {"cost": {"efficiency_triton_pointwise": 0.01}}
    softmax = on_h200(lambda x: x.softmax(1), x)
    (fused,), (eager,) = softmax.graphs, on_h200(torch.sin, x, options=slow).graphs
    assert len(fused.steps) == 1 and fused.eager_us > 2 * fused.device_us
    assert f"eager: device {fused.eager_us:.1f} µs, host {fused.eager_host_us:.1f} µs" in str(softmax)
    assert [step.executor for step in eager.steps] == ["eager"]
    assert eager.steps[0].reason.startswith("cheaper eager: ") and eager.eager_us == eager.device_us


def test_graph_break_gives_several_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x * 2)
        torch._dynamo.graph_break()
        return torch.sin(y) + 1

    assert kinds(on_h200(broken, torch.randn(8, 8))) == ["inference"] * 2
    trained = kinds(on_h200(broken, torch.randn(8, 8, requires_grad=True)))
    assert sorted(trained) == ["backward"] * 2 + ["forward"] * 2


def test_keyword_arguments_reach_the_function() -> None:
    report = on_h200(lambda x, *, scale: x * scale, torch.randn(8), scale=torch.randn(8))
    assert fused(report)[0]["bytes"] == 3 * 8 * 4


def test_a_function_without_tensors_has_no_graphs() -> None:
    report = on_h200(lambda: 3)
    nothing = {"regions": 0, "distinct": 0, "exact": 0, "family": 0, "apart": 0}
    assert report.to_dict() == {"device": "h200", "graphs": [], "kernels": 0, "reuse": nothing, "unusable": {},
                                "breaks": [], "dropped": 0}
    assert report.refusals == ()
    assert "nothing to compile" in str(report)


def test_what_is_compiled_already_can_be_explained() -> None:
    model = blocks(1)
    plain, compiled = on_h200(model, torch.randn(8, 32)), on_h200(torch.compile(model), torch.randn(8, 32))
    assert plain.to_dict() == compiled.to_dict()


# ---------------------------------------------------------------------- its text


def test_text_is_a_plain_table_of_stable_width(monkeypatch: pytest.MonkeyPatch) -> None:
    report = on_h200(blocks(2), torch.randn(8, 32))
    text = str(report)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(report) == text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    assert text.startswith("plan for NVIDIA H200: 2 graphs")


def test_text_has_a_line_per_graph_and_per_step() -> None:
    text = str(on_h200(lambda x, w: torch.relu(x) @ w, torch.randn(8, 8), torch.randn(8, 8)))
    assert "graph 1, inference: 2 ops → 1 kernel (1 distinct), 1 eager call; fused part" in text
    cells = [line.split() for line in text.splitlines()]
    assert [cell[:3] for cell in cells if len(cell) > 2 and cell[1] in ("triton", "eager")] == [
        ["r0", "triton", "relu"],
        ["mm", "eager", "mm"],
    ]


def test_text_of_everything_that_a_report_can_say() -> None:
    text = str(small()) + "\n"
    if os.environ.get("REWRITE_GOLDENS") == "1":
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8"), "REWRITE_GOLDENS=1 rewrites the file if this is meant"
    assert max(map(len, text.splitlines())) <= 120
    assert text in (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_page_of_documentation_names_every_field() -> None:
    data = on_h200(torch.sin, torch.randn(8)).to_dict()
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    (graph,) = data["graphs"]
    for name in (*data, *data["reuse"], *graph, *graph["steps"][0], *graph["steps"][0]["prices"][0]):
        assert f"`{name}`" in text


# ---------------------------------------------------------------------- devices


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'h20'.*h200"):
        explain(lambda x: x, torch.randn(2), device="h20")


def test_device_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_DEVICE", "h200")
    assert explain(torch.relu, torch.randn(8)).device == "h200"
    monkeypatch.setenv("DYNAFUSE_DEVICE", "abacus")
    with pytest.raises(OptionError, match="abacus"):
        explain(torch.relu, torch.randn(8))


def test_a_function_with_a_device_of_its_own() -> None:
    def made(x: torch.Tensor, device: str) -> torch.Tensor:
        return x + torch.ones(8, device=device)

    assert on_h200(functools.partial(made, device="cpu"), torch.randn(8)).kernels == 1


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU on which Triton does not interpret."""
    monkeypatch.setattr("dynafuse.lowering.triton.compiler.interpreting", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("_compiled")
def test_without_a_gpu_inductor_fuses() -> None:
    report = explain(lambda x: x.sin() + 1, torch.randn(1 << 16))
    (step,) = report.to_dict()["graphs"][0]["steps"]
    assert (report.device, report.kernels, step["executor"]) == ("cpu", 1, "inductor")
    assert step["predicted_us"] > 0


@pytest.mark.usefixtures("_compiled")
def test_without_an_executor_nothing_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_EXECUTORS", "triton")
    report = explain(lambda x: x + 1, torch.randn(8))
    (step,) = report.to_dict()["graphs"][0]["steps"]
    assert (report.device, report.kernels, step["executor"]) == ("cpu", 0, "eager")


# ---------------------------------------------------------------------- nothing is left behind


def test_gradients_of_the_user_are_untouched() -> None:
    model, x = blocks(1), torch.randn(8, 32, requires_grad=True)
    x.grad = torch.ones_like(x)
    on_h200(model, x)
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_what_a_function_closes_over_are_untouched() -> None:
    model = blocks(1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    assert kinds(on_h200(lambda x: model(x), torch.randn(8, 32))) == ["forward", "backward"]
    assert all(torch.equal(p.grad, torch.full_like(p, 7)) for p in model.parameters() if p.grad is not None)


def test_the_graph_that_made_an_argument_survives() -> None:
    leaf = torch.randn(8, requires_grad=True)
    x = leaf.exp()
    on_h200(torch.sin, x)
    x.sum().backward()
    assert torch.equal(leaf.grad, x)  # type: ignore[arg-type]


def test_state_of_a_module_is_untouched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    on_h200(model, torch.randn(2, 3, 8, 8))
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_arguments_are_untouched() -> None:
    x = torch.ones(8)
    on_h200(lambda a, b: a.add_(b), x, x)
    assert torch.equal(x, torch.ones(8))


def test_an_argument_inside_an_autograd_graph_may_be_overwritten() -> None:
    x = torch.ones(8, requires_grad=True) * 1
    assert kinds(on_h200(lambda a: a.mul_(2), x)) == ["forward", "backward"]
    assert torch.equal(x, torch.ones(8))


def test_random_numbers_go_on_as_if_nothing_happened() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    on_h200(lambda x: nn.functional.dropout(x) + torch.rand(8), torch.ones(8, requires_grad=True))
    assert torch.equal(torch.rand(4), expected)


def test_no_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynafuse.lowering.triton.executor.lowerings", lambda spec: pytest.fail("a region was lowered"))
    on_h200(blocks(1), torch.randn(8, 32))
    assert dynafuse.backend.stats()["kernels"] == 0


def test_an_error_of_the_function_passes_through_and_leaves_the_backend_working() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        on_h200(fails, torch.randn(8))
    compiled = torch.compile(lambda x: x + 1, backend=dynafuse.backend.dynafuse)
    assert torch.equal(compiled(torch.zeros(8)), torch.ones(8))
    assert dynafuse.backend.stats()["kernels"] == 1


def test_marked_dimensions_stay_dynamic() -> None:
    x, marked, again = torch.randn(3, 8, 32).unbind()
    for tensor in (marked, again):
        torch._dynamo.mark_dynamic(tensor, 0)
    static, *dynamic = [fused(on_h200(lambda t: torch.softmax(t, -1), t))[0]["key"] for t in (x, marked, again)]
    assert dynamic[0] == dynamic[1] != static
