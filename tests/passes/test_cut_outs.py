"""Pieces that are cut out of what they were put into: which are taken as they are, and which are not."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import pytest
import torch
from torch._prims.rng_prims import graphsafe_run_with_rng_state
from torch.fx import Node

from dynafuse.passes.normalize import normalize
from tests.support import graphs
from tests.support.differential import check
from tests.support.normalized import after

X, BASE = torch.randn(8, 197), torch.randn(8, 200)
Write = Callable[..., Node]


def scattered(build: graphs.Builder, base: Node, x: Node, start: int = 0) -> Node:
    return build.op("aten.slice_scatter.default", base, x, 1, start, start + 197)


def cut(build: graphs.Builder, whole: Node, start: int = 0, count: int = 197) -> Node:
    return build.op("aten.relu.default", build.op("aten.slice.Tensor", whole, 1, start, start + count))


SAME: dict[str, Write] = {
    "a slice": lambda build, x, base: cut(build, scattered(build, base, x)),
    "a slice from the end": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.slice.Tensor", scattered(build, base, x, 3), 1, -197, 9223372036854775807)),
    "a pad that shortens": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.constant_pad_nd.default", scattered(build, base, x), [0, -3])),
    "both pads": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.constant_pad_nd.default", build.op("aten.constant_pad_nd.default", x, [2, 1]), [-2, -1])),
}
OTHER: dict[str, Write] = {
    "other places": lambda build, x, base: cut(build, scattered(build, base, x), 1),
    "fewer": lambda build, x, base: cut(build, scattered(build, base, x), 0, 190),
    "another dimension": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.slice.Tensor", build.op("aten.constant_pad_nd.default", x, [0, 0, 0, 189]), 1, 0, 8)),
    "every other": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.slice.Tensor", scattered(build, base, x), 1, 0, 197, 2)),
    "two dimensions": lambda build, x, base: build.op("aten.relu.default", build.op(
        "aten.constant_pad_nd.default", build.op("aten.constant_pad_nd.default", x, [0, 3]), [0, -3, 0, -1])),
    "a result": lambda build, x, base: build.op("aten.constant_pad_nd.default", scattered(build, base, x), [0, -3]),
    "a returned view": lambda build, x, base: build.op("aten.slice.Tensor", scattered(build, base, x), 1, 0, 197),
}


def selected(build: graphs.Builder, whole: Node, index: int) -> Node:
    return build.op("aten.relu.default", build.op("aten.select.int", whole, 1, index))


def _known(name: re.Match[str]) -> str:
    return {"arg0": "x", "arg1": "base"}.get(name[0], "_")


def put(build: graphs.Builder, base: Node, x: Node, index: int) -> Node:
    """Put the first column of ``x`` into a column of ``base``."""
    return build.op("aten.select_scatter.default", base, build.op("aten.select.int", x, 1, 0), 1, index)


READS: dict[str, tuple[Write, list[str]]] = {
    "within a slice": (lambda build, x, base: cut(build, scattered(build, base, x, 2), 5, 10),
                       ["aten.slice.Tensor(x, 1, 3, 13)"]),
    "one of a slice": (lambda build, x, base: selected(build, scattered(build, base, x, 2), 5), ["aten.select.int(x, 1, 3)"]),
    "within a pad": (lambda build, x, base: selected(build, build.op("aten.constant_pad_nd.default", x, [4, 1]), 4),
                     ["aten.select.int(x, 1, 0)"]),
    "what was selected": (lambda build, x, base: selected(build, put(build, base, x, -1), 199), ["aten.select.int(x, 1, 0)"]),
    "a slice of what was selected": (lambda build, x, base: cut(build, put(build, base, x, 7), 7, 1),
                                     ["aten.select.int(x, 1, 0)", "aten.unsqueeze.default(_, 1)"]),
    "beside it": (lambda build, x, base: cut(build, put(build, base, x, 7), 8, 20), ["aten.slice.Tensor(base, 1, 8, 28)"]),
    "beside several": (lambda build, x, base: selected(build, put(build, put(build, base, x, 7), x, 3), 5),
                       ["aten.select.int(base, 1, 5)"]),
    "behind one": (lambda build, x, base: selected(build, put(build, put(build, base, x, 7), base, 3), 7),
                   ["aten.select.int(x, 1, 0)"]),
    "over a scatter": (lambda build, x, base: build.op("aten.relu.default", put(build, put(build, base, x, 3), base, 3)),
                       ["aten.select.int(base, 1, 0)", "aten.select_scatter.default(base, _, 1, 3)"]),
    "a slice over a column": (lambda build, x, base: build.op("aten.relu.default", scattered(build, put(build, base, x, 3), x)),
                              ["aten.slice_scatter.default(base, x, 1, 0, 197)"]),
    "partly within": (lambda build, x, base: cut(build, scattered(build, base, x, 3), 0, 10),
                      ["aten.slice_scatter.default(base, x, 1, 3, 200)", "aten.slice.Tensor(_, 1, 0, 10)"]),
    "over a part": (lambda build, x, base: build.op("aten.relu.default", put(build, scattered(build, base, x), base, 3)),
                    ["aten.slice_scatter.default(base, x, 1, 0, 197)", "aten.select.int(base, 1, 0)",
                     "aten.select_scatter.default(_, _, 1, 3)"]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_go_where_their_values_come_from(name: str) -> None:
    write, expected = READS[name]
    calls = [line.split(" = ")[1] for line in after(write, X, BASE).splitlines()[:-2]]
    assert [re.sub(r"\b[a-z][a-z0-9_]*(?=[,)])", _known, call) for call in calls] == expected


def test_a_recurrence_is_one_kernel_over_its_rows() -> None:
    def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Thomas' algorithm forward and back, as it is written with arrays."""
        c = torch.zeros_like(a)
        c[:, 0] = a[:, 0] / b[:, 0]
        for k in range(1, 6):
            c[:, k] = (a[:, k] - c[:, k - 1]) / (b[:, k] + c[:, k - 1])
        for k in range(4, -1, -1):
            c[:, k] -= c[:, k + 1] * a[:, k]
        return c

    (graph,) = check(solve, torch.randn(50, 6), torch.rand(50, 6) + 3)
    assert len(graph.plan.regions) <= 2


def test_an_input_that_is_written_to_is_read_before() -> None:
    """A row that is read beside the one that is written is the input's; the write stays in place."""
    def step(cache: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        cache[:, 3] = row
        return cache[:, 5] * 2 + cache[:, 3]

    check(step, torch.randn(4, 40, 8), torch.randn(4, 8))


@pytest.mark.parametrize("name", SAME)
def test_what_was_put_there_is_taken(name: str) -> None:
    assert after(SAME[name], X, BASE).count("aten.") == 1


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_is_computed(name: str) -> None:
    assert after(OTHER[name], X, BASE).count("aten.") > 1


@pytest.mark.parametrize("is_run_again", [False, True], ids=["", "checkpointed"])
def test_what_a_call_reads_keeps_its_strides(is_run_again: bool) -> None:
    """Attention takes biases whose rows begin at multiples of 16 bytes, as a part of what torch pads.

    Of what a checkpoint runs again with the same random numbers, an operator of operators, torch gives no value.
    """
    def write(build: graphs.Builder, q: Node, bias: Node) -> Node:
        padded = build.op("aten.constant_pad_nd.default", bias, [0, 3])
        part = build.op("aten.expand.default", build.op("aten.slice.Tensor", padded, 3, 0, 197), [2, 4, 197, 197])
        attention = build.op("aten._scaled_dot_product_efficient_attention.default", q, q, q, part, False)
        return build.op(operator.getitem, attention, 0)

    q, bias = (torch.empty(size, device="meta") for size in ((2, 4, 197, 32), (1, 4, 197, 197)))
    module = graphs.built(write, q, bias)
    (attention,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._scaled_dot_product_efficient_attention.default)
    if is_run_again:
        attention.args, attention.target = (attention.target, *attention.args), graphsafe_run_with_rng_state
        del attention.meta["val"]
    normalize(module)
    assert attention.args[3 + is_run_again].meta["val"].stride()[2] == 200  # type: ignore[union-attr]


def test_sizes_that_are_symbols() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        rows = build.op("aten.sym_size.int", x, 0)
        wide = build.op("aten.constant_pad_nd.default", x, [0, 0, 0, 5])
        return build.op("aten.relu.default", build.op("aten.slice.Tensor", wide, 0, 0, rows))

    assert "pad" not in str(normalize(graphs.built(write, X, dynamic=True)).graph)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_sum_goes_on_into_a_table(dynamic: bool) -> None:
    def gradient(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(12, 13, 16)
        padded[..., :13] = x.sum(0)
        return x.new_zeros(40, 12).index_put((index,), padded[..., :13].permute(1, 2, 0).reshape(-1, 12), accumulate=True)

    (graph,) = check(gradient, torch.randn(6, 12, 13, 13), torch.randint(0, 40, (169,)), dynamic=dynamic)
    assert not any("slice_scatter" in node.name for region in graph.plan.regions for node in region.nodes)
