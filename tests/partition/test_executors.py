"""Which executors take nodes, alone and as one kernel, and what they say where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.ir import Annotated
from dynafuse.partition.executors import Executors
from tests.support import graphs

X = torch.empty(64, 512)
ALL = ("nvfuser", "triton", "inductor", "eager")


def nodes_of(write: Any, *inputs: torch.Tensor) -> tuple[Annotated, list[Node]]:
    annotated = graphs.annotated(graphs.built(write, *inputs))
    return annotated, [node for node in annotated.graph.nodes if node.op == "call_function"]


def chain(count: int) -> Any:
    def write(g: graphs.Builder, x: Node) -> Node:
        for _ in range(count):
            x = g.op("aten.sin.default", x)
        return x

    return write


def flipped_sum(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sum.dim_IntList", g.op("aten.exp.default", g.op("aten.flip.default", x, [1])), [1])


def sum_of_half(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sum.dim_IntList", g.op("aten.exp.default", g.op("aten.slice.Tensor", x, 1, 0, 256)), [1])


def half_transposed(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.exp.default", g.op("aten.permute.default", g.op("aten.slice.Tensor", x, 1, 0, 256), [1, 0]))


def test_eager_is_not_asked_and_the_order_is_that_of_preference() -> None:
    annotated, nodes = nodes_of(chain(2), X)
    assert Executors(annotated.facts, ALL).of(nodes) == ("nvfuser", "triton", "inductor")
    assert Executors(annotated.facts, ("eager", "triton", "nvfuser")).of(nodes) == ("triton", "nvfuser")
    assert Executors(annotated.facts, ("eager",)).of(nodes) == ()


@pytest.mark.parametrize(("write", "reason"), [
    (chain(61), "61 ops, nvFuser takes 60"),
    (sum_of_half, "nvFuser has no kernel that both moves and reduces"),
    (half_transposed, "nvFuser has no kernel that both moves and transposes"),
])
def test_what_nvfuser_takes_apart_it_does_not_take_together(write: Any, reason: str) -> None:
    annotated, nodes = nodes_of(write, X)
    executors = Executors(annotated.facts, ("nvfuser", "triton"))
    assert [executors.reason("nvfuser", [node]) for node in nodes] == [""] * len(nodes)
    assert executors.reason("nvfuser", nodes) == reason
    assert executors.of(nodes) == ("triton",)


def test_what_an_executor_cannot_compute_it_refuses_in_company() -> None:
    annotated, nodes = nodes_of(flipped_sum, X)
    executors = Executors(annotated.facts, ALL)
    assert [executors.of([node]) for node in nodes] == [("triton", "inductor"), *[("nvfuser", "triton", "inductor")] * 2]
    assert executors.reason("nvfuser", nodes) == "nvFuser has no flip"


def test_a_node_that_an_executor_failed_on_is_not_given_to_it_again() -> None:
    annotated, (first, second) = nodes_of(chain(2), X)
    executors = Executors(annotated.facts, ("nvfuser", "triton"), frozenset({("nvfuser", second)}))
    assert (executors.of([first]), executors.of([first, second])) == (("nvfuser", "triton"), ("triton",))
    assert executors.reason("nvfuser", [first, second]) == f"nvfuser failed on {second.name}"
    assert str(executors) == f"nvfuser, triton; nvfuser failed on {second.name}"


def test_a_forced_node_is_its_executors_alone() -> None:
    annotated, (first, second) = nodes_of(chain(2), X)
    facts = {**annotated.facts, second: replace(annotated.facts[second], forced="triton")}
    executors = Executors(facts, ALL)
    assert (executors.of([first]), executors.of([second])) == (("nvfuser", "triton", "inductor"), ("triton",))
    assert executors.reason("inductor", [first, second]) == f"{second.name} is forced to triton"


def subsets(nodes: Sequence[Node]) -> list[list[Node]]:
    return [[node for k, node in enumerate(nodes) if mask >> k & 1] for mask in range(1, 1 << len(nodes))]


@pytest.mark.parametrize("write", [flipped_sum, sum_of_half, half_transposed])
def test_a_reason_and_an_offer_exclude_each_other(write: Any) -> None:
    """For every set of nodes; and what refuses a node refuses every set that it is in."""
    annotated, nodes = nodes_of(write, X)
    executors = Executors(annotated.facts, ALL)
    for group in subsets(nodes):
        for name in executors.enabled:
            assert (name in executors.of(group)) == (executors.reason(name, group) == "")
            if any(executors.reason(name, [node]) for node in group):
                assert executors.reason(name, group)
