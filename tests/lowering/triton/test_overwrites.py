"""Kernels that write into their inputs: everything is read before it is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse import backend
from dynafuse.lowering.triton.schedule import choose_schedule
from tests.support import graphs

X, Y = torch.randn(30, 50), torch.randn(30, 50)


def check(write: Any, *inputs: torch.Tensor, dynamic: bool = False, classes: str = "") -> None:
    """Results and inputs are afterwards as they are when the graph runs node by node."""
    module = graphs.built(write, *inputs, dynamic=dynamic)
    theirs, ours = [t.clone() for t in inputs], [t.clone() for t in inputs]
    expected = [t.clone() for t in module(*theirs)]
    run = graphs.compiled(module, inputs)
    found = run.call(list(ours))
    for mine, other in zip([*found, *ours], [*expected, *theirs], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert classes in [choose_schedule(bound.spec).schedule_class for bound in run.bounds.values()] or not classes


def into(build: graphs.Builder, target: Node, value: Node) -> Node:
    return build.op("aten.copy_.default", target, value)


def swap(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
    a, b = build.op("aten.neg.default", y), build.op("aten.exp.default", x)
    return [into(build, x, a), into(build, y, b)]


def swap_whole(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
    """Both values read both inputs, so that they share a kernel."""
    a, b = build.op("aten.atan2.default", y, x), build.op("aten.atan2.default", x, y)
    return [into(build, x, build.op("aten.lgamma.default", a)), into(build, y, build.op("aten.lgamma.default", b))]


def rotate(build: graphs.Builder, x: Node, y: Node, z: Node) -> list[Node]:
    made = [build.op("aten.neg.default", t) for t in (y, z, x)]
    return [into(build, t, value) for t, value in zip((x, y, z), made, strict=True)]


def test_two_inputs_change_places() -> None:
    check(swap, X, Y)
    check(swap_whole, X, Y)
    check(rotate, X, Y, X + Y)


def test_two_inputs_change_places_transposed() -> None:
    def write(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
        a, b = (build.op("aten.exp.default", build.op("aten.permute.default", t, [1, 0])) for t in (y, x))
        return [into(build, x, a), into(build, y, b)]

    check(write, torch.randn(70, 70), torch.randn(70, 70))


def test_two_inputs_change_places_through_the_backend() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> None:
        a, b = -y, x.exp()
        x.copy_(a)
        y.copy_(b)

    theirs, ours = (X.clone(), Y.clone()), (X.clone(), Y.clone())
    function(*theirs)
    torch.compile(function, backend=backend.dynafuse)(*ours)
    torch.testing.assert_close(ours, theirs)


def negated_with_row_sums(build: graphs.Builder, x: Node) -> list[Node]:
    """The overwriting value is known in the first pass, and the input is read in a later one."""
    shifted = build.op("aten.sub.Tensor", x, build.op("aten.amax.default", x, [1], True))
    total = build.op("aten.sum.dim_IntList", build.op("aten.exp.default", shifted), [1])
    return [into(build, x, build.op("aten.neg.default", x)), total]


def negated_with_column_sums(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
    row = build.op("aten.sum.dim_IntList", build.op("aten.mul.Tensor", x, y), [1])
    column = build.op("aten.sum.dim_IntList", build.op("aten.exp.default", x), [0])
    return [into(build, x, build.op("aten.neg.default", y)), row, column]


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_are_read_in_every_pass_before_they_are_overwritten(dynamic: bool) -> None:
    check(negated_with_row_sums, X, dynamic=dynamic, classes="looped" if dynamic else "persistent")


def test_rows_and_columns_are_read_before_they_are_overwritten() -> None:
    check(negated_with_column_sums, X, Y)


def test_split_rows_are_read_before_they_are_overwritten() -> None:
    def write(build: graphs.Builder, x: Node) -> list[Node]:
        total = build.op("aten.sum.dim_IntList", build.op("aten.exp.default", x), [1])
        return [total, into(build, x, build.op("aten.neg.default", x))]

    check(write, torch.randn(3, 5000) * 0.1, classes="split")


def test_a_running_mean_is_updated() -> None:
    def write(build: graphs.Builder, x: Node, mean: Node) -> list[Node]:
        new = build.op("aten.mul.Tensor", build.op("aten.mean.dim", x, [0]), 0.1)
        old = build.op("aten.mul.Tensor", mean, 0.9)
        centred = build.op("aten.sub.Tensor", x, mean)
        return [into(build, mean, build.op("aten.add.Tensor", old, new)), centred]

    check(write, X, torch.randn(50))
    check(write, torch.randn(4000, 7), torch.randn(7))
