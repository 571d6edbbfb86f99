"""Copies into tensors: what remains of them, and where the gaps of a part have to stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from dynafuse.ir import Role
from dynafuse.passes.normalize import normalize
from tests.support import graphs
from tests.support.differential import check
from tests.support.normalized import after

X = torch.randn(6, 8)
COPY = "aten.copy.default"


def copied(build: graphs.Builder, x: Node, sizes: list[int], strides: list[int], **kwargs: object) -> Node:
    """A copy of a tensor in memory that nothing has written."""
    return build.op(COPY, build.op("aten.new_empty_strided.default", x, sizes, strides, **kwargs), x)


@pytest.mark.parametrize("strides", [[8, 1], [1, 6]])
def test_a_copy_into_new_memory_does_without_it(strides: list[int]) -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, Node]:
        first = copied(build, build.op("aten.relu.default", x), [6, 8], strides)
        return first, build.op(COPY, first, build.op("aten.exp.default", first))

    found = after(write, X)
    assert "empty" not in found and COPY not in found and found.count("aten.clone") == 2


def test_one_that_converts_and_repeats_is_a_cast_and_a_repetition() -> None:
    found = after(lambda build, x: copied(build, x, [6, 8], [8, 1], dtype=torch.float64), X[:1])
    assert "empty" not in found and COPY not in found
    assert [line.split(" = ")[1].split("(")[0] for line in found.splitlines()[:-1]] == [
        "aten._to_copy.default", "aten.expand.default", "aten.clone.default"]


def test_the_gaps_of_a_result_stay() -> None:
    assert COPY in after(lambda build, x: copied(build, x, [6, 8], [9, 1]), X)


def into_a_part(read: Callable[[graphs.Builder, Node], Node]) -> Callable[[graphs.Builder, Node, Node], Node]:
    """What ``read`` makes of a copy into the first four columns of eight."""
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        return read(build, build.op(COPY, build.op("aten.slice.Tensor", x, 1, 0, 4), y))

    return write


READERS: dict[str, Callable[[graphs.Builder, Node], Node]] = {
    "pointwise": lambda build, part: build.op("aten.relu.default", part),
    "a sum": lambda build, part: build.op("aten.sum.dim_IntList", part, [1]),
    "a view": lambda build, part: build.op("aten.exp.default", build.op("aten.select.int", part, 1, 2)),
    "a copy of all": lambda build, part: build.op("aten.clone.default", part, memory_format=torch.contiguous_format),
}
TELLING: dict[str, Callable[[graphs.Builder, Node], Node]] = {
    "its memory": lambda build, part: build.op("aten.clone.default", build.op("aten.as_strided.default", part, [12], [1])),
    "a returned view": lambda build, part: build.op("aten.select.int", part, 1, 2),
}


@pytest.mark.parametrize("name", READERS)
def test_gaps_that_nothing_can_tell_go(name: str) -> None:
    assert COPY not in after(into_a_part(READERS[name]), X, X[:, 4:])


@pytest.mark.parametrize("name", TELLING)
def test_gaps_that_something_can_tell_stay(name: str) -> None:
    assert COPY in after(into_a_part(TELLING[name]), X, X[:, 4:])


def test_a_copy_of_dynamic_sizes_repeats_by_what_it_is_copied_into() -> None:
    module = graphs.built(into_a_part(READERS["a sum"]), X, X[:1, 4:], dynamic=True)
    assert COPY not in str(normalize(module).graph)


# As users write them --------------------------------------------------------------------------------------------------


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """As the inputs of decoders are made of labels."""
    result = ids.new_zeros(ids.shape)
    result[:, 1:] = ids[:, :-1].clone()
    result[:, 0] = 2
    return result.masked_fill(result == -100, 1)


def assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[..., ::2] = y[..., 1::2]
    result[1:, 3] = y.double()[1:, 0]
    result[2] = float("-inf")
    return result * 2


def of_a_transpose(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(8, 6, dtype=torch.float64, device=x.device).t()
    result[:5, 2:] = x[:5, 2:]
    result[1:, 0].copy_(x[:5, 1])
    return result.softmax(0)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("function", "inputs"), [
    (shifted, (torch.randint(0, 50, (4, 9)),)), (assigned, (X, X + 1)), (of_a_transpose, (X,))])
def test_assignments_to_parts_are_fused(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...],
                                        dynamic: bool) -> None:
    (graph,) = check(function, *inputs, dynamic=dynamic)
    assert dynamic or len(graph.plan.regions) == 1
    assert not [fact.reason for fact in graph.plan.annotated.facts.values() if fact.role is Role.EAGER and fact.tensor]
