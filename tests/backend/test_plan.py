"""What the planner must get right whatever the costs: random graphs are computed in full, in order and as in eager;
and a few shapes of graph whose regions are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

import dynafuse
from dynafuse import backend
from dynafuse.ir import Region
from dynafuse.partition import iteration_space as spaces
from tests.support.cases import rotate_half
from tests.support.differential import check

# ---------------------------------------------------------------------- random graphs


Rows, Columns = 6, 10
"""Every tensor of a random graph can be brought back to these sizes."""

POINTWISE: list[Callable[..., torch.Tensor]] = [
    lambda a, b: a + b, lambda a, b: a * b.sigmoid(), lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: a.tanh() - b,
    lambda a, b: torch.maximum(a, b), lambda a, b: a * 0.5, lambda a, b: a.clamp(-1, 1) + b.cos(),
]
REDUCING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda a: a.sum(0), lambda a: a.mean(1), lambda a: a.amax(1, keepdim=True), lambda a: a.sum(), lambda a: a.sum(0, keepdim=True),
    lambda a: a.var(1), lambda a: a.amin(0), lambda a: a.softmax(1), lambda a: a.softmax(0), lambda a: a.logsumexp(1), lambda a: a.cumsum(0),
    lambda a: a.reshape(3, 2, 10).sum(1), lambda a: a.reshape(6, 2, 5).sum((0, 2)), lambda a: a.reshape(6, 5, 2).amax(1),
]
MOVING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda a: a.t(), lambda a: a.flip(1), lambda a: a[1:4], lambda a: a[:, ::2], lambda a: torch.cat([a[:, 5:], -a[:, :5]], 1), lambda a: a.roll(1, 0),
    lambda a: F.pad(a, (1, 2)), lambda a: a.reshape(10, 6), lambda a: a.reshape(3, 2, 10).transpose(0, 1), lambda a: a[torch.tensor([3, 0, 0, 5])],
    lambda a: a.unsqueeze(0).expand(2, 6, 10), lambda a: a.diagonal(), lambda a: a.sort(1)[0], lambda a: torch.stack([a, a * 2], 1), lambda a: a[:, 3:4],
]


def refit(value: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape as ``[Rows, Columns]``, by views where that is possible, else by repeating its elements."""
    if value.dim() == 2 and value.shape == (Rows, Columns):
        return value
    if value.dim() == 2 and value.shape == (Columns, Rows):
        return value.t()
    if value.dim() == 1 and value.shape[0] == Rows:
        return value[:, None].expand(Rows, Columns)
    if value.dim() == 2 and value.shape[0] in (1, Rows) and value.shape[1] in (1, Columns):
        return value.expand(Rows, Columns)
    if value.dim() <= 1 and value.numel() in (1, Columns):
        return value.expand(Rows, Columns)
    flat = value.reshape(-1)
    return flat.repeat(1 + 60 // flat.numel())[:60].view(Rows, Columns)


def random_function(seed: int) -> Callable[..., list[torch.Tensor]]:
    """A function of three tensors: a dozen random ops, each over values that came before, and several results."""
    pick = random.Random(seed)
    program = [(pick.choices(("pointwise", "reduce", "move", "matmul"), (5, 3, 3, 1))[0], pick.randrange(1000), pick.randrange(1000), pick.randrange(1000))
               for _ in range(pick.randint(6, 14))]
    results = [pick.randrange(1000) for _ in range(pick.randint(1, 4))]

    def function(*arguments: torch.Tensor) -> list[torch.Tensor]:
        values = list(arguments)
        raw = []
        for kind, which, first, second in program:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind == "pointwise":
                made = POINTWISE[which % len(POINTWISE)](a, b)
            elif kind == "reduce":
                made = REDUCING[which % len(REDUCING)](a)
            elif kind == "move":
                made = MOVING[which % len(MOVING)](a)
            else:
                made = (a @ b.t()) @ b * 0.01
            raw.append(made)
            values.append(refit(made))
        return [raw[-1], *(raw[k % len(raw)] for k in results)]

    return function


@pytest.mark.parametrize("seed", range(28))
def test_random_graphs_are_computed_as_in_eager(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other pair of graphs short reductions are not written out, so that small ones are reduced as large ones are."""
    if seed % 4 < 2:
        monkeypatch.setattr(spaces, "UNROLL", 1)
        monkeypatch.setattr(spaces, "UNROLL_NEAR", 1)
    arguments = [torch.randn(Rows, Columns, dtype=torch.float64, requires_grad=seed % 2 == 1) for _ in range(3)]
    for graph in check(random_function(seed), *arguments):
        assert_complete(graph)


def assert_complete(graph: backend.Compiled) -> None:
    """Every node that a step or the output needs is an input, or made by an earlier step or by the region itself."""
    facts = graph.plan.annotated.facts
    made = {n for n in facts if n.op in ("placeholder", "get_attr")}
    for step in graph.plan.steps:
        if isinstance(step, Region):
            assert {base(facts, n) for n in step.inputs} <= made, step
            inside = set(step.nodes) | made
            for node in step.nodes:
                assert all(base(facts, n) in inside for n in node.all_input_nodes), (step, node)
            made.update(step.outputs)
        else:
            assert all(base(facts, n) in made for n in step.all_input_nodes), step
            made.add(step)
    output = graph.plan.annotated.graph.output_node()
    assert all(n in made for n in output.all_input_nodes)


def base(facts: Any, node: Node) -> Node:
    while facts[node].role == "view":
        node = node.all_input_nodes[0]
    return node


# ---------------------------------------------------------------------- known plans


def plan_of(function: Callable[..., Any], *arguments: Any) -> dict[str, list[tuple[str, ...]]]:
    """Per kind of graph, the ops of its regions, checked against eager on the way."""
    return {g.kind: [tuple(n.name for n in r.nodes) for r in g.plan.regions] for g in check(function, *arguments)}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_softmax_is_one_region() -> None:
    assert {kind: len(found) for kind, found in plan_of(lambda x: (x * 0.5).softmax(-1), leaf(9, 130)).items()} == {"forward": 1, "backward": 1}


def test_layer_norm_is_one_region_each_way() -> None:
    found = plan_of(lambda x, w, b: F.layer_norm(x, (128,), w, b), leaf(4096, 128), leaf(128), leaf(128))
    assert {kind: len(regions) for kind, regions in found.items()} == {"forward": 1, "backward": 1}


def test_the_gradient_of_a_group_norm_of_one_channel_a_group_is_one_large_kernel() -> None:
    """Its sums over the channels of a group are of one element each, so that rows of a channel go on."""
    x = leaf(4, 64, 3000)
    plan = dynafuse.explain(lambda x, w, b: F.gelu(F.group_norm(x, 64, w, b)), x, leaf(64), leaf(64), device="h200").to_dict()
    (steps,) = [graph["steps"] for graph in plan["graphs"] if graph["kind"] == "backward"]
    assert len([step for step in steps if step["bytes"] > x.nbytes]) == 1


@pytest.mark.parametrize(("length", "held"), [(4096, True), (16384, False)])
def test_a_row_too_long_to_hold_beside_its_columns_is_read_again(length: int, held: bool) -> None:
    """Three running sums and two inputs of 16384 elements are more than a processor's registers."""
    plan = dynafuse.explain(lambda x, a, w, b: F.layer_norm(x + a, (length,), w, b),
                            leaf(512, length), leaf(length), leaf(length), leaf(length), device="h200").to_dict()
    (steps,) = [graph["steps"] for graph in plan["graphs"] if graph["kind"] == "backward"]
    assert (len([step for step in steps if step["executor"] == "triton"]) == 1) is held


@pytest.mark.parametrize("rows", [8, 64, 4096])
def test_a_norm_is_one_region_whatever_bounds_the_graph(rows: int) -> None:
    """Host time, device time, or the one before and the other after merging: what is saved counts against one total."""
    x, weight, a, b = torch.randn(rows, 1024), torch.randn(1024), torch.randn(1024, 4096), torch.randn(4096, 1024)

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.layer_norm(x, (1024,), weight) @ a) @ b

    report = dynafuse.explain(function, x, device="h200").to_dict()
    assert [step["executor"] for step in report["graphs"][0]["steps"]].count("triton") == 2


def test_rms_norm_is_one_region_each_way() -> None:
    found = plan_of(lambda x, w: F.rms_norm(x, (128,), w, 1e-6), leaf(4096, 128), leaf(128))
    assert {kind: len(regions) for kind, regions in found.items()} == {"forward": 1, "backward": 1}


def test_rotary_embeddings_of_queries_and_keys_share_a_launch() -> None:
    cos, sin = torch.randn(16, 64), torch.randn(16, 64)
    found = plan_of(lambda q, k: (q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin), leaf(2, 3, 16, 64), leaf(2, 1, 16, 64))
    assert {kind: len(regions) for kind, regions in found.items()} == {"forward": 1, "backward": 1}


def test_residual_stream_fuses_between_products() -> None:
    def block(x, weight, norm):
        h = x + F.linear(F.rms_norm(x, (64,), norm, 1e-6), weight)
        return h + F.linear(F.rms_norm(h, (64,), norm, 1e-6), weight)

    found = plan_of(block, torch.randn(32, 64), torch.randn(64, 64), torch.randn(64))
    assert [len(regions) for regions in found["inference"]].__len__() == 3  # norm | add, norm | add


@pytest.mark.parametrize("function", [
    lambda x: x.t(), lambda x: (x.view(2, -1), x[3:]), lambda x: x @ x.t(), lambda x: x.unsqueeze(1).expand(-1, 3, -1).permute(2, 0, 1),
])
def test_views_launch_nothing(function: Callable[..., Any]) -> None:
    assert plan_of(function, torch.randn(8, 8)) == {"inference": []} or not plan_of(function, torch.randn(8, 8))


def test_a_pointwise_chain_is_one_region() -> None:
    def chain(x, y):
        for _ in range(8):
            x = (x * y).sin() + 1
        return x

    assert len(plan_of(chain, torch.randn(9, 130), torch.randn(130))["inference"]) == 1


@pytest.mark.parametrize(("rows", "regions"), [(16, 1), (4096, 2)])
def test_a_short_sum_of_little_is_computed_where_it_is_read(rows: int, regions: int) -> None:
    """A launch costs more than reading sixteen cached elements again; of a large operand that is another matter."""
    report = dynafuse.explain(lambda x, y: x.sum(1) * y[:, None], torch.randn(rows, 16), torch.randn(2 * rows), device="h200")
    assert len(report.to_dict()["graphs"][0]["steps"]) == regions


def test_two_products_are_not_merged_across() -> None:
    found = plan_of(lambda x, w: ((x @ w).relu() @ w).tanh(), torch.randn(8, 8), torch.randn(8, 8))
    assert len(found["inference"]) == 2
