"""Which outputs a kernel may write over which inputs, as its launches say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.schedule import choose_schedule
from tests.support import graphs

Pairs = set[tuple[str, str]]


def overwrites(write: Callable[..., Any], *inputs: torch.Tensor) -> list[Pairs]:
    """The pairs of each launch of a graph that is one region."""
    (bound,) = graphs.compiled(graphs.built(write, *inputs), inputs).bounds.values()
    return [set(launch.overwrites) for launch in lower(bound.code).launches]


def added(build: graphs.Builder, x: Node, y: Node) -> Node:
    return build.op("aten.add.Tensor", x, y)


def doubled_and_shifted(build: graphs.Builder, x: Node) -> tuple[Node, Node]:
    """The first result is known in the first pass over a row, the second in the next one, which reads the row again."""
    doubled = build.op("aten.mul.Tensor", x, 2)
    return doubled, build.op("aten.sub.Tensor", doubled, build.op("aten.amax.default", doubled, [1], True))


def test_what_is_read_where_it_is_stored_may_be_overwritten() -> None:
    assert overwrites(added, torch.randn(64, 64), torch.randn(64, 64)) == [{("out0", "in0"), ("out0", "in1")}]


@pytest.mark.parametrize("other", [torch.randn(64, 64).t(), torch.randn(64), torch.randn(64, 1), torch.randn(64, 64).bfloat16(),
                                   torch.randn(64, 128)[:, ::2], torch.randn(1, 64).expand(64, 64)])
def test_what_is_read_otherwise_may_not(other: torch.Tensor) -> None:
    (pairs,) = overwrites(added, torch.randn(64, 64), other)
    assert {name for _, name in pairs} < {"in0", "in1"}
    assert len(pairs) == 1


def test_what_a_result_does_not_need_is_not_overwritten_by_it() -> None:
    def apart(build: graphs.Builder, x: Node, y: Node) -> tuple[Node, Node]:
        return build.op("aten.mul.Tensor", x, 2), build.op("aten.add.Tensor", y, 1)

    assert overwrites(apart, torch.randn(64, 64), torch.randn(64, 64)) == [{("out0", "in0"), ("out1", "in1")}]


def test_threads_that_share_an_element_overwrite_none() -> None:
    assert overwrites(added, torch.randn(8), torch.randn(8)) == [set()]  # fewer than the threads of a warp


def test_a_row_in_registers_is_overwritten_by_either_result() -> None:
    assert overwrites(doubled_and_shifted, torch.randn(64, 256)) == [{("out0", "in0"), ("out1", "in0")}]


@pytest.mark.parametrize(("warps", "expected"), [(2, {("out1", "in0")}), (4, set())])
def test_a_row_that_is_read_again_is_overwritten_in_the_last_pass(warps: int, expected: Pairs) -> None:
    x = torch.randn(64, 256)
    (bound,) = graphs.compiled(graphs.built(doubled_and_shifted, x), [x]).bounds.values()
    looped = replace(choose_schedule(bound.code), schedule_class="looped", block={"x": 1, "r": 64}, warps=warps)
    (launch,) = write_kernels(bound.code, looped, round_like_eager=False).launches
    assert set(launch.overwrites) == expected  # of a tile of 64 elements, four warps hold each twice


def test_a_result_of_rows_takes_the_place_of_none() -> None:
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        return build.op("aten.add.Tensor", build.op("aten.sum.dim_IntList", x, [1]), y)

    assert overwrites(write, torch.randn(4096, 64), torch.randn(4096)) == [set()]


def test_the_first_of_two_launches_may_overwrite_what_the_second_does_not_read() -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, ...]:
        return (build.op("aten.sum.dim_IntList", x, [0]),
                build.op("aten.sub.Tensor", x, build.op("aten.amax.default", x, [1], True)))

    first, second = overwrites(write, torch.randn(1 << 16, 64))
    assert first == {("out1", "in0")} and second == set()
