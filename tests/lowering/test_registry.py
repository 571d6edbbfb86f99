"""Executors of others: one that calls torch op by op, through plan, cache, forcing, measuring and report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import dynafuse
from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.entry import Entry
from dynafuse.errors import OptionError
from dynafuse.futures import finished
from dynafuse.ir import Ref, Spec
from dynafuse.lowering import registry
from dynafuse.lowering.base import Availability, Compilation, Executor, Use
from dynafuse.lowering.interpret import Interpreter, sizes_at
from dynafuse.select import Measurement, Timing, Tuner
from dynafuse.select.data import inputs_for
from dynafuse.select.runners import runner

X, W = torch.randn(6, 8), torch.randn(8, 8)


@dataclass(frozen=True)
class CallKernel:
    """A region as calls of torch."""

    spec: Spec
    log: list[str]

    @property
    def source(self) -> str:
        return str(self.spec)

    @property
    def scalars(self) -> tuple[int, ...]:
        return tuple(range(len(self.spec.symbols)))

    def run(self, inputs: list[Any], device: int | None) -> Sequence[torch.Tensor]:
        self.log.append("run")
        count = len(self.spec.inputs)
        tensors, sizes = inputs[:count], dict(zip(self.spec.symbols, inputs[count:], strict=True))
        interpreter = Interpreter(self.spec, sizes, tensors, torch.device("cpu"))
        stored = []
        for store in self.spec.stores:
            value = interpreter.value(Ref("op", store.op))
            layout = store.layout
            made = tensors[store.into] if store.into is not None else torch.empty_strided(
                sizes_at(layout.shape, sizes), sizes_at(layout.stride, sizes), dtype=layout.dtype)
            stored.append((made, value.clone()))
        return [made.copy_(value) for made, value in stored]


class Calls(Executor):
    """Runs regions by plain calls of torch, for tensors on the CPU."""

    name = "plain"
    device_types = frozenset({"cpu"})
    remedy = "move the tensors to the CPU"
    kept = True

    def __init__(self) -> None:
        self.log: list[str] = []

    def available(self, use: Use) -> Availability:
        return Availability(not use.on_gpu, "it is for the CPU")

    def refuses_node(self, node: Any, facts: Any) -> str:
        return "plain does not know erf" if "erf" in str(node.target) else super().refuses_node(node, facts)

    def refuses_spec(self, spec: Spec) -> str:
        return "plain takes no sines" if any("sin" in op.target for op in spec.ops) else ""

    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[Any]:
        self.log.append("compile")
        return finished(lambda: CallKernel(region.spec, self.log))

    def encode(self, kernel: CallKernel, region: CanonicalRegion, key: str, compilation: Compilation) -> Entry:
        return Entry(self.name, key, {"region": region.key})

    def decode(self, entry: Entry, region: CanonicalRegion, compilation: Compilation) -> CallKernel:
        entry.expect(self.name, region.key)
        self.log.append("decode")
        return CallKernel(region.spec, self.log)


@pytest.fixture
def calls() -> Iterator[Calls]:
    backend.reset()
    executor = Calls()
    dynafuse.register_executor(executor)
    yield executor
    registry.unregister_executor("plain")
    backend.reset()


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same region on both sides of a product."""
    return torch.softmax(torch.softmax(x * 2, -1) @ w * 2, -1)


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynafuse", options={"executors": "plain", "strict": True, **options})


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_runs_regions(calls: Calls, dynamic: bool) -> None:
    torch._dynamo.reset()
    run = torch.compile(block, backend="dynafuse", dynamic=dynamic, options={"executors": "plain", "strict": True})
    for rows in (6, 9):
        x = torch.randn(rows, 8, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        run(x, W).square().sum().backward()
        block(y, W).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert calls.log.count("run") >= 8


def test_equal_regions_share_a_kernel_and_the_disk_keeps_it(calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    torch.testing.assert_close(compiled(block, cache=True)(X, W), block(X, W))
    assert calls.log == ["compile", "run", "run"] and backend.stats()["kernels"] == 1
    backend.reset()
    torch.testing.assert_close(compiled(block, cache=True)(X, W), block(X, W))
    assert calls.log[3:] == ["decode", "run", "run"] and backend.stats()["disk_hits"] == 1


def test_nodes_that_it_refuses_go_elsewhere(calls: Calls) -> None:
    report = dynafuse.explain(lambda x: torch.erf(x * 2) + 1, X, options={"executors": "plain"})
    assert [(step.executor, step.ops) for step in report.graphs[0].steps][1] == ("eager", ("aten.erf.default",))
    beside = compiled(lambda x: torch.erf(x * 2) + 1, executors="plain,triton")
    torch.testing.assert_close(beside(X), torch.erf(X * 2) + 1)
    (graph,) = dynafuse.process_report().graphs
    assert {step.executor for step in graph.steps} == {"triton"} and calls.log == []


def test_regions_that_it_refuses_go_elsewhere(calls: Calls) -> None:
    torch.testing.assert_close(compiled(lambda x: torch.sin(x) + 1)(X), torch.sin(X) + 1)
    (graph,) = dynafuse.process_report().graphs
    assert {(step.executor, step.reason) for step in graph.steps} == {("eager", "not on plain: plain takes no sines")}


def test_it_can_be_forced(calls: Calls) -> None:
    forced = dynafuse.force_backend("plain")(lambda x: (x * 2).exp())
    torch.testing.assert_close(compiled(forced, executors="triton,plain")(X), (X * 2).exp())
    assert calls.log == ["compile", "run"]
    with pytest.raises(dynafuse.ForceError, match="plain does not know erf"):
        compiled(dynafuse.force_backend("plain")(lambda x: torch.erf(x)))(X)


def test_it_is_measured_beside_others(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing is timed: the times are made up, the kernels are built and run."""
    def measured(self: Tuner, region: Any, candidates: Any, device: Any, *_: Any) -> Any:
        with _disable_current_modes():  # the graph is being traced around us
            inputs = inputs_for(region.spec, region.hints, device)
            results = [runner(build(), region.spec, region.hints, device)(inputs) for build in candidates.values()]
            torch.testing.assert_close(list(results[0]), list(results[1]))
        return measure(region, candidates)

    monkeypatch.setattr(Tuner, "measure", measured)
    run = compiled(lambda x: (x * 2).exp() + 1, executors="plain,triton", tune="always")
    torch.testing.assert_close(run(X), (X * 2).exp() + 1)
    (graph,) = dynafuse.process_report().graphs
    (step,) = graph.fused
    assert step.executor == "plain" and step.measured_us == {"plain": 1.0, "triton": 2.0}


def measure(region: Any, candidates: Any) -> Any:
    times = {name: Timing(us, 1.0) for name, us in zip(("plain", "triton"), (1.0, 2.0), strict=True)}
    return Measurement(region.key, times, tuple(candidates))


def test_the_report_names_it(calls: Calls) -> None:
    report = dynafuse.explain(block, X, W, options={"executors": "plain"})
    fused = [step for step in report.graphs[0].steps if step.key]
    assert [step.executor for step in fused] == ["plain", "plain"] and fused[0].prices[0].executor == "plain"
    assert "plain" in str(report)


def test_why_it_cannot_be_used_is_told(calls: Calls) -> None:
    report = dynafuse.explain(block, X, W, device="h200", options={"executors": "plain,triton"})
    assert report.unusable == {"plain": "it is for the CPU"}


@pytest.mark.parametrize("name", ["triton", "Calls", "no name"])
def test_names_that_cannot_be(name: str) -> None:
    executor = Calls()
    executor.name = name
    with pytest.raises(OptionError, match="executor name"):
        dynafuse.register_executor(executor)


def test_packages_announce_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("announced", f"{__name__}:ANNOUNCED", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    registry._announced.cache_clear()
    try:
        assert registry.names()[-2:] == ("announced", "eager") and registry.executor("announced") is ANNOUNCED
    finally:
        monkeypatch.undo()
        registry._announced.cache_clear()
        registry._loaded.pop("announced", None)
    with pytest.raises(OptionError, match="unknown executor 'announced'"):
        registry.executor("announced")


ANNOUNCED = Calls()
ANNOUNCED.name = "announced"
