"""Plans on disk: one comes back as it was made, for the graph and the planner that it was made for and for no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from dynafuse import backend, ops, pipeline
from dynafuse.cache import plans, sources
from dynafuse.cache.entry import Entry
from dynafuse.cache.folder import disk as disk_of
from dynafuse.config import Config, resolve
from dynafuse.cost import device as devices
from dynafuse.fx import user_line
from dynafuse.ir import Annotated, Plan
from dynafuse.partition.executors import Executors
from dynafuse.partition.search import partition
from tests.support import graphs

H200 = devices.describe("h200")
SETTINGS = {"captured": False, "recompute": True, "max_ops": 200}
CONTIGUOUS = torch.contiguous_format
X, W = torch.randn(64, 48), torch.randn(48, 48)


@pytest.fixture(autouse=True)
def _of_small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of small graphs are kept as well."""
    monkeypatch.setattr(plans, "LEAST_NODES", 1)


# Graphs ---------------------------------------------------------------------------------------------------------------


def norm(build: graphs.Builder, x: Any, eps: float = 1e-5) -> Any:
    mean = build.op("aten.mean.dim", build.op("aten.mul.Tensor", x, x), [1], True)
    return build.op("aten.mul.Tensor", x, build.op("aten.rsqrt.default", build.op("aten.add.Tensor", mean, eps)))


def layers(build: graphs.Builder, x: Any, w: Any, count: int = 3) -> Any:
    """Norms, products that stay eager between them, a residual stream, views."""
    for _ in range(count):
        product = build.op("aten.mm.default", norm(build, x), w)
        heads = build.op("aten.view.default", build.op("aten.sigmoid.default", product), [-1, 4, 12])
        moved = build.op("aten.clone.default", build.op("aten.permute.default", heads, [0, 2, 1]), memory_format=CONTIGUOUS)
        flat = build.op("aten.view.default", moved, [-1, 48])
        x = build.op("aten.add.Tensor", x, flat)
    return x


def overwriting(build: graphs.Builder, x: Any, w: Any) -> Any:
    doubled = build.op("aten.mul.Tensor", x, 2.0)
    return build.op("aten.copy_.default", x, doubled), build.op("aten.sum.dim_IntList", build.op("aten.exp.default", w), [0])


def reductions(build: graphs.Builder, x: Any, w: Any) -> Any:
    """Rows and columns, several executors' worth of kinds, an op that none of them takes."""
    rows, columns = (build.op("aten.sum.dim_IntList", x, [dim]) for dim in (1, 0))
    order = build.op("aten.argsort.default", rows)
    return rows, columns, build.op("aten.relu.default", build.op("aten.mm.default", x, w)), order


def annotated(write: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> Annotated:
    return graphs.annotated(graphs.built(write, *(inputs or (X, W)), dynamic=dynamic))


def planned(graph: Annotated, executors: tuple[str, ...] = ("triton",)) -> Plan:
    return partition(graph, H200, Executors(graph.facts, executors), **SETTINGS)


def read_back(plan: Plan, graph: Annotated | None = None) -> Plan:
    text = json.dumps(plans.plan_to_json(plan, user_line))
    return plans.plan_from_json(json.loads(text), graph or plan.annotated, user_line)


# There and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executors", [("triton",), ("nvfuser", "triton")], ids="+".join)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("write", [layers, overwriting, reductions])
def test_a_plan_comes_back_as_it_was(write: Callable[..., Any], dynamic: bool, executors: tuple[str, ...]) -> None:
    plan = planned(annotated(write, dynamic=dynamic), executors)
    found = read_back(plan)
    assert plan.regions and found == plan and str(found) == str(plan)
    for before, after in zip(plan.regions, found.regions, strict=True):  # what is numbered in this order
        assert list(before.dims) == list(after.dims) and list(before.copies) == list(after.copies)


def test_a_refusal_and_what_no_executor_takes_come_back() -> None:
    plan = planned(annotated(layers))
    assert plan.refusals and read_back(plan).refusals == plan.refusals
    unplaced = planned(annotated(reductions), ("nvfuser",))
    node = next(iter(unplaced.annotated.facts))
    unplaced = replace(unplaced, steps=(), unplaced={node: "no reason"})
    assert read_back(unplaced) == unplaced


def test_a_plan_is_read_onto_an_equal_graph() -> None:
    first, second = annotated(layers), annotated(layers)
    found = read_back(planned(first), second)
    assert found == planned(second) != planned(first)


def test_lines_are_those_of_the_graph_that_it_is_read_onto() -> None:
    graph = annotated(layers)
    for number, node in enumerate(graph.graph.nodes):
        node.meta["stack_trace"] = f'File "model.py", line {number}, in forward\n    x\n'
    plan = planned(graph)
    plain = plans.plan_to_json(plan, user_line)
    for node in graph.graph.nodes:
        node.meta["stack_trace"] = node.meta["stack_trace"].replace("line ", "line 1")
    moved = plans.plan_from_json(plain, graph, user_line).regions[0].origins
    assert plan.regions[0].origins and moved != plan.regions[0].origins
    assert moved == planned(graph).regions[0].origins


# Keys -----------------------------------------------------------------------------------------------------------------


def key(graph: Annotated, executors: Executors | None = None, device: devices.Device = H200, **settings: Any) -> str | None:
    executors = executors or Executors(graph.facts, ("triton",))
    told = (device.capability, sorted(device.constants.items()), str(executors), sorted({**SETTINGS, **settings}.items()))
    return plans.key_of(graph, told)


def test_equal_graphs_have_one_key() -> None:
    assert key(annotated(layers)) == key(annotated(layers)) is not None


def test_whatever_the_planner_sees_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = annotated(layers)
    node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.add.Tensor)
    facts = {name: Annotated(graph.graph, {**graph.facts, node: replace(graph.facts[node], **{name: value})})
             for name, value in {"forced": "triton", "role": "eager", "reason": "demoted", "fallback": "no"}.items()}
    hint = {**graph.facts, node: replace(graph.facts[node], tensor=replace(graph.facts[node].tensor, hint=7))}  # type: ignore[type-var]
    denied = Executors(graph.facts, ("triton", "nvfuser"), frozenset({("triton", node)}))
    keys = [
        key(graph),
        key(annotated(lambda build, x, w: layers(build, x, w, 2))),
        key(annotated(lambda build, x, w: layers(build, w, w))),
        key(annotated(layers, X.double(), W.double())),
        key(annotated(layers, X[:32], W)),
        key(annotated(layers, X.t().contiguous().t(), W)),
        key(annotated(layers, dynamic=True)),
        key(annotated(lambda build, x, w: layers(build, norm(build, x, 1e-6), w, 2))),
        key(annotated(lambda build, x, w: layers(build, norm(build, x, 1e-5), w, 2))),
        key(annotated(lambda build, x, w: build.op("aten.sum.dim_IntList", x, [0]))),
        key(annotated(lambda build, x, w: build.op("aten.sum.dim_IntList", x, [1]))),
        key(annotated(lambda build, x, w: build.op("aten.sub.Tensor", x, norm(build, x)))),
        key(annotated(lambda build, x, w: build.op("aten.sub.Tensor", norm(build, x), x))),
        *(key(changed) for changed in facts.values()),
        key(Annotated(graph.graph, hint)),
        key(graph, Executors(graph.facts, ("nvfuser", "triton"))),
        key(graph, denied),
        key(graph, Executors(graph.facts, ("triton", "nvfuser"))),
        key(graph, device=H200.overridden({"launch_us_triton": 3.0})),
        key(graph, captured=True), key(graph, recompute=False), key(graph, max_ops=10),
    ]
    monkeypatch.setattr(sources, "digest", lambda parts=None: "other sources")
    keys.append(key(graph))
    monkeypatch.setattr(plans, "versions", lambda: ("another",))
    keys.append(key(graph))
    assert None not in keys and len(set(keys)) == len(keys)


def test_sources_of_the_planner_are_in_the_digest(tmp_path: Path) -> None:
    for name in ("ir", "ops", "cost", "partition", "passes", "cache"):
        (tmp_path / name).mkdir()
    found = []
    for content in ("x = 1\n", "x = 2\n"):
        (tmp_path / "partition" / "grow.py").write_text(content)
        found.append(sources.digest_of(tmp_path, sources.PLANNERS))
    assert found[0] != found[1]
    assert sources.digest(sources.PLANNERS) != sources.digest()


class Stranger:
    """An argument of which a key would know nothing."""

    def __repr__(self) -> str:
        return "Stranger"


def test_what_no_key_describes_is_not_kept() -> None:
    graph = annotated(layers)
    assert key(graph) is not None
    node = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default)
    before = node.target
    node.target = torch.ops.higher_order.invoke_subgraph
    assert key(graph) is None
    node.target = before
    node.kwargs = {"out": [Stranger()]}
    assert key(graph) is None


def test_a_row_that_was_registered_is_not_kept() -> None:
    graph = annotated(layers)
    before = ops.lookup(torch.ops.aten.sigmoid.default)
    assert before is not None
    ops.register(ops.pointwise(before.target, "1.0 / (1.0 + tl.exp(-{0}))"))
    try:
        assert key(graph) is None
    finally:
        ops.register(before)
    assert key(graph) is not None


# The disk -------------------------------------------------------------------------------------------------------------


def compiled(module: GraphModule, config: Config | None = None) -> graphs.Run:
    """As if the process had just begun."""
    backend.reset()
    return graphs.compiled(module, config=config)


def never(*args: Any, **kwargs: Any) -> Plan:
    raise AssertionError("planned anew")


def kinds(folder: Path) -> list[str]:
    disk = disk_of(resolve())
    assert disk is not None and disk.folder == folder
    return [entry.kind for _, entry in disk.entries() if isinstance(entry, Entry)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_is_planned_once(cached: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    first = compiled(graphs.built(layers, X, W, dynamic=dynamic))
    assert kinds(cached).count("plan") == 1
    monkeypatch.setattr(pipeline, "quickest", never)
    second = compiled(graphs.built(layers, X, W, dynamic=dynamic))
    assert str(second.plan) == str(first.plan)
    assert {name: bound.key for name, bound in second.bounds.items()} == {n: b.key for n, b in first.bounds.items()}
    assert torch.equal(second.call([X, W])[0], first.call([X, W])[0])
    with pytest.raises(AssertionError, match="planned anew"):
        compiled(graphs.built(layers, X[:32], W))


def test_small_graphs_are_planned_each_time(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LEAST_NODES", 1000)
    compiled(graphs.built(layers, X, W))
    assert "plan" not in kinds(cached)


def test_without_a_cache_and_to_look_at_a_plan_nothing_is_kept(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with backend.listening(lambda graph: None, plan_only=True):
        pipeline.compile_graph("inference", resolve(), graphs.built(layers, X, W), [])
    monkeypatch.setenv("DYNAFUSE_CACHE", "0")
    compiled(graphs.built(layers, X, W))
    assert not cached.exists()


@pytest.mark.parametrize("damage", [
    lambda entry: replace(entry, kind="triton"),
    lambda entry: replace(entry, data={}),
    lambda entry: replace(entry, data={**entry.data, "steps": [100000]}),
    lambda entry: replace(entry, data={**entry.data, "steps": [{"name": "r0"}]}),
    lambda entry: replace(entry, data={**entry.data, "refusals": [["too", "few"]]}),
], ids=["kind", "empty", "place", "region", "refusal"])
def test_an_entry_that_is_no_plan_is_ignored(
    cached: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Entry], Entry]
) -> None:
    first = compiled(graphs.built(layers, X, W))
    disk = disk_of(resolve())
    assert disk is not None
    kept = next(entry for _, entry in disk.entries() if isinstance(entry, Entry) and entry.kind == "plan")
    disk.write(damage(kept))
    second = compiled(graphs.built(layers, X, W))
    assert str(second.plan) == str(first.plan) and f"ignored {disk.path(kept.key)}" in caplog.text
    assert disk.read(kept.key) == kept  # replaced
