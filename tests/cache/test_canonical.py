"""Which regions share a key: those that one kernel can serve, whatever their names and order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.cache.canonical import canonical, key_of, reuse
from dynafuse.config import resolve
from tests.support import graphs

X, Y = torch.randn(6, 8), torch.randn(6, 8)
OPTIONS = resolve(environ={}).key()
Write = Callable[..., Any]


def keys(module: GraphModule, target: str = "sm90", **options: Any) -> list[str]:
    """The keys of a graph's regions, in order."""
    plan, chosen = graphs.planned(module), resolve(options=options, environ={}).key()
    return [canonical(plan.annotated, region, chosen, target).key for region in plan.regions]


def key(write: Write, *inputs: torch.Tensor, dynamic: bool = False, target: str = "sm90", **options: Any) -> str:
    """The key of the one region of a graph."""
    (only,) = keys(graphs.built(write, *(inputs or (X, Y)), dynamic=dynamic), target, **options)
    return only


def chain(build: graphs.Builder, x: Node, y: Node) -> Node:
    """(exp(x) - y) * exp(x)"""
    e = build.op("aten.exp.default", x)
    return build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", e, y), e)


# What does not change a key -------------------------------------------------------------------------------------------


def test_names_do_not_matter() -> None:
    module = graphs.built(chain, X, Y)
    renamed: dict[Node, Node] = {}
    other = Graph()
    for k, node in enumerate(module.graph.nodes):
        renamed[node] = other.node_copy(node, renamed.__getitem__)
        if node.op != "output":
            renamed[node].name = f"layers_{17 + k}_{node.name[::-1]}"
    assert keys(GraphModule(torch.nn.Module(), other)) == keys(graphs.built(chain, X, Y))


def test_order_of_independent_nodes_does_not_matter() -> None:
    def first(build: graphs.Builder, x: Node, y: Node) -> Node:
        a = build.op("aten.exp.default", x)
        return build.op("aten.sub.Tensor", a, build.op("aten.sin.default", y))

    def second(build: graphs.Builder, x: Node, y: Node) -> Node:
        b = build.op("aten.sin.default", y)
        return build.op("aten.sub.Tensor", build.op("aten.exp.default", x), b)

    assert key(first) == key(second)


def test_order_of_inputs_does_not_matter() -> None:
    assert key(chain) == key(lambda b, y, x: chain(b, x, y))


def test_layers_share_their_kernels() -> None:
    def write(build: graphs.Builder, x: Node, w: Node) -> Node:
        for _ in range(5):
            wide = build.op("aten.mm.default", build.op("aten.relu.default", x), w)
            x = build.op("aten.add.Tensor", build.op("aten.mul.Tensor", wide, 0.5), x)
        return x

    found = keys(graphs.built(write, torch.randn(8, 8), torch.randn(8, 8)))
    assert len(found) > len(set(found))
    assert len(set(found)) <= 3  # the first, those in the middle, the last


def test_dynamic_sizes_are_keyed_by_their_examples() -> None:
    """By them a kernel is tiled, whatever the sizes that it is called with."""
    inputs = torch.randn(48, 130), torch.randn(48, 130)
    assert key(chain, dynamic=True) != key(chain, *inputs, dynamic=True) == key(chain, *inputs, dynamic=True)


def test_options_outside_the_key_do_not_matter() -> None:
    assert key(chain) == key(chain, strict=True, workers=0)


def test_order_of_commutative_operands_does_not_matter() -> None:
    def left(build: graphs.Builder, x: Node, y: Node) -> Node:
        return build.op("aten.add.Tensor", build.op("aten.exp.default", x), y)

    def right(build: graphs.Builder, x: Node, y: Node) -> Node:
        return build.op("aten.add.Tensor", y, build.op("aten.exp.default", x))

    assert key(left) == key(right)


@pytest.mark.parametrize("write", [
    lambda dim: lambda b, x: b.op("aten.sum.dim_IntList", b.op("aten.exp.default", x), [dim]),
    lambda dim: lambda b, x: b.op("aten.cat.default", [x, b.op("aten.exp.default", x)], dim),
])
def test_from_where_dimensions_are_counted_does_not_matter(write: Any) -> None:
    assert key(write(1), X) == key(write(-1), X)


# What changes it ------------------------------------------------------------------------------------------------------


def swapped(build: graphs.Builder, x: Node, y: Node) -> Node:
    e = build.op("aten.exp.default", x)
    return build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", y, e), e)


def rewired(build: graphs.Builder, x: Node, y: Node) -> Node:
    e = build.op("aten.exp.default", x)
    return build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", e, y), x)


def both(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
    e = build.op("aten.exp.default", x)
    return [build.op("aten.mul.Tensor", build.op("aten.sub.Tensor", e, y), e), e]


def constant(value: float) -> Write:
    return lambda b, x, y: b.op("aten.mul.Tensor", b.op("aten.sub.Tensor", b.op("aten.exp.default", x), y), value)


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "an edge": ((chain, X, Y), (rewired, X, Y)),
    "operands of a subtraction": ((chain, X, Y), (swapped, X, Y)),
    "what is stored": ((chain, X, Y), (both, X, Y)),
    "a constant": ((constant(2.0), X, Y), (constant(3.0), X, Y)),
    "a constant's type": ((constant(2.0), X.int(), Y.int()), (constant(2), X.int(), Y.int())),
    "an input's dtype": ((chain, X, Y), (chain, X, Y.half())),
    "every dtype": ((chain, X, Y), (chain, X.double(), Y.double())),
    "a stride pattern": ((chain, X, Y), (chain, X, torch.randn(8, 6).t())),
    "a broadcast": ((chain, X, Y), (chain, X, torch.randn(8))),
    "an expanded input": ((chain, X, Y), (chain, X, torch.randn(6, 1).expand(6, 8))),
    "static against dynamic": ((chain, X, Y), None),
    "the same tensor twice": ((chain, X, Y), (lambda b, x, y: chain(b, x, x), X, Y)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_changes_the_kernel_changes_the_key(what: str) -> None:
    left, right = DIFFERENT[what]
    assert key(*left) != (key(*left, dynamic=True) if right is None else key(*right))


def reduced(dims: list[int], keepdim: bool = False) -> Write:
    return lambda b, x: b.op("aten.sum.dim_IntList", x, dims, keepdim)


@pytest.mark.parametrize("other", [reduced([0]), reduced([0, 1]), reduced([1], True),
                                   lambda b, x: b.op("aten.mean.dim", x, [1])])
def test_what_is_reduced_is_in_the_key(other: Write) -> None:
    square = torch.randn(16, 16)
    assert key(reduced([1]), square) != key(other, square)


def test_a_reduced_extent_is_in_the_key() -> None:
    assert key(reduced([1]), torch.randn(16, 32)) != key(reduced([1]), torch.randn(16, 48))


@pytest.mark.parametrize(("option", "value"), [("round_like_eager", True), ("fallback_random", True), ("check_indices", False)])
def test_options_in_the_key_are(option: str, value: bool) -> None:
    assert key(chain) != key(chain, **{option: value})


def test_the_target_is_in_the_key() -> None:
    assert key(chain) != key(chain, target="sm100")


def test_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(chain)
    monkeypatch.setattr("dynafuse.cache.canonical.versions", lambda: ("0", "0", "0"))
    assert key(chain) != before


def test_writing_into_an_input_is_in_the_key() -> None:
    def into(build: graphs.Builder, x: Node, y: Node) -> Node:
        return build.op("aten.copy_.default", x, chain(build, x, y))

    assert key(into) != key(chain)


# The spec itself ------------------------------------------------------------------------------------------------------


def test_a_key_says_all_that_the_spec_does() -> None:
    plan = graphs.planned(graphs.built(chain, X, Y))
    bound = canonical(plan.annotated, plan.regions[0], OPTIONS, "sm90")
    assert str(bound.spec) == (
        "in0: float32[6, 8] (8, 1)\n"
        "in1: float32[6, 8] (8, 1)\n"
        "%0 = aten.exp.default(self=in0) : float32[6, 8]\n"
        "%1 = aten.sub.Tensor(self=%0, other=in1, alpha=1) : float32[6, 8]\n"
        "%2 = aten.mul.Tensor(self=%1, other=%0) : float32[6, 8]\n"
        "store %2 float32[6, 8] (8, 1)")
    assert bound.key == key_of(bound.spec, "sm90")
    assert [node.name for node in bound.inputs] == ["arg0", "arg1"]


def test_symbols_are_numbered_and_bound() -> None:
    plan = graphs.planned(graphs.built(chain, X, Y, dynamic=True))
    bound = canonical(plan.annotated, plan.regions[0], OPTIONS, "sm90")
    assert bound.spec.symbols == tuple(f"s{k}" for k in range(len(bound.symbols)))
    sizes = {str(size) for node in plan.annotated.graph.nodes if node.op == "placeholder"
             for size in node.meta["val"].shape}
    assert set(map(str, bound.symbols)) <= sizes


def test_reuse_counts_regions_per_key() -> None:
    plan = graphs.planned(graphs.built(chain, X, Y))
    bound = canonical(plan.annotated, plan.regions[0], OPTIONS, "sm90")
    assert reuse([bound, bound]) == {bound.key: 2}
