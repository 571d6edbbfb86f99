"""Which equal calls become one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.passes.duplicates import merge_duplicates
from tests.support import graphs
from tests.support.differential import check

Write = Callable[[graphs.Builder, Node], Any]


def left(write: Write, *inputs: torch.Tensor, dynamic: bool = False) -> int:
    """How many calls are left of those that ``write`` makes."""
    module = graphs.built(write, *(inputs or (torch.ones(6),)), dynamic=dynamic)
    merge_duplicates(module.graph)
    module.graph.lint()
    return sum(node.op == "call_function" for node in module.graph.nodes)


def twice(name: str, *args: Any, **kwargs: Any) -> Write:
    """Makes one call twice and adds the results."""
    def write(build: graphs.Builder, x: Node) -> Node:
        first, second = (build.op(name, *(x if a is X else a for a in args), **kwargs) for _ in range(2))
        return build.op("aten.add.Tensor", first, second)

    return write


X = object()
ONCE: dict[str, Write] = {
    "pointwise": twice("aten.sin.default", X),
    "reduction": twice("aten.sum.dim_IntList", X, [0], True),
    "view": twice("aten.view.default", X, [2, 3]),
    "keyword": twice("aten.full_like.default", X, 2.0, pin_memory=False),
    "not a number": twice("aten.add.Scalar", X, math.nan),
}
TWICE: dict[str, Write] = {
    "random": twice("aten.rand_like.default", X),
    "random numbers of a distribution": twice("aten.exponential.default", X),
    "random integers": twice("aten.randint_like.default", X, 5),
    "unfilled": twice("aten.empty_like.default", X),
    "unfilled, of a size": twice("aten.new_empty.default", X, [6]),
}
DIFFERENT = [(0.0, -0.0), (1, 1.0), (1, True), (2.0, 2.5), (math.inf, -math.inf)]


@pytest.mark.parametrize("name", ONCE)
def test_an_equal_call_is_made_once(name: str) -> None:
    assert left(ONCE[name]) == 2


@pytest.mark.parametrize("name", TWICE)
def test_a_call_whose_operands_do_not_settle_its_result_is_made_again(name: str) -> None:
    assert left(TWICE[name]) == 3


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=str)
def test_literals_that_compare_equal_are_not_the_same(first: Any, second: Any) -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        return build.op("aten.add.Tensor", *(build.op("aten.mul.Scalar", x, value) for value in (first, second)))

    assert left(write) == 3


def test_chains_of_equal_calls_are_merged() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        first, second = (build.op("aten.exp.default", build.op("aten.neg.default", x)) for _ in range(2))
        return build.op("aten.add.Tensor", first, second)

    assert left(write) == 3


def test_two_results_are_two_tensors() -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, ...]:
        return tuple(build.op("aten.view.default", build.op("aten.sin.default", x), [2, 3]) for _ in range(2))

    assert left(write) == 4


def results(name: str, *args: Any) -> Write:
    """Makes one call twice and returns both results."""
    def write(build: graphs.Builder, x: Node) -> tuple[Node, ...]:
        return tuple(build.op(name, *(x if a is X else a for a in args)) for _ in range(2))

    return write


@pytest.mark.parametrize(("name", "args", "is_copied"), [
    ("aten.sum.dim_IntList", (X, [0]), True), ("aten.mm.default", (X, X), True), ("aten.cumsum.default", (X, 0), True),
    ("aten.sin.default", (X,), False), ("aten.full_like.default", (X, 2.0), False), ("aten.view.default", (X, [9]), False),
    ("aten.exponential.default", (X,), False), ("aten.argmax.default", (X, 0), True),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_second_result_is_copied_where_it_takes_longer_to_compute(name: str, args: tuple[Any, ...], is_copied: bool) -> None:
    module = graphs.built(results(name, *args), torch.ones(3, 3))
    merge_duplicates(module.graph)
    assert len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == is_copied


def test_gradients_of_two_biases_are_one_sum_and_two_tensors() -> None:
    def step(x: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm((x + biases[0] + biases[1]).sin(), (16,))

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(size, generator=torch.Generator().manual_seed(3), requires_grad=True) for size in ((8, 16), (16,), (16,))]

    eager, compiled = inputs(), inputs()
    for f, leaves in ((step, eager), (torch.compile(step, backend="dynafuse"), compiled)):
        (f(*leaves) * torch.arange(16)).sum().backward()
    first, second = compiled[1].grad, compiled[2].grad
    assert first is not None and second is not None and first.data_ptr() != second.data_ptr()
    for leaf, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(other.grad, leaf.grad, rtol=1e-4, atol=1e-4)


def test_results_made_by_other_calls_than_traced_are_two_tensors() -> None:
    """A product of one matrix is an ``mm`` instead of the ``bmm`` that was traced, whose memory the values of views have."""
    x = torch.randn(1, 3, 4)
    first, second = torch.compile(lambda x: tuple(torch.einsum("bij,bkj->bik", x, x) for _ in range(2)), backend="dynafuse")(x)
    assert first.data_ptr() != second.data_ptr()


def test_results_of_calls_that_return_several_are_tensors_of_their_own() -> None:
    check(lambda x: (x.sort(0)[0], x.sort(0)[0], x.sort(0)[1] + x.sort(0)[1]), torch.randn(6, 5))


def test_a_read_before_a_write_is_not_the_one_after_it() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        first = build.op("aten.sin.default", x)
        build.op("aten.copy_.default", x, first)
        second = build.op("aten.sin.default", x)
        return build.op("aten.add.Tensor", build.op("aten.add.Tensor", first, second), build.op("aten.sin.default", x))

    assert left(write) == 5


def test_sizes_are_computed_once() -> None:
    def write(build: graphs.Builder, x: Node) -> Node:
        zeros = [build.op("aten.new_zeros.default", x, [build.op("aten.sym_size.int", x, 0)]) for _ in range(2)]
        return build.op("aten.add.Tensor", *zeros)

    assert left(write, dynamic=True) == 3


@pytest.mark.parametrize("name", ["aten.nonzero.default", "aten._local_scalar_dense.default"])
def test_what_only_data_tell_keeps_its_symbols(name: str) -> None:
    def write(build: graphs.Builder, x: Node) -> tuple[Node, ...]:
        masks = [build.op("aten.gt.Scalar", build.op("aten.sum.default", x), 1) for _ in range(2)]
        return tuple(build.op(name, mask) for mask in masks)

    assert left(write, dynamic=True) == 4  # one sum, one comparison, and what depends on data twice


def test_an_op_of_somebody_elses_is_called_as_often_as_before() -> None:
    calls = []

    @torch.library.custom_op("dynafuse_test::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.clone()

    counted.register_fake(torch.empty_like)

    def write(build: graphs.Builder, x: Node) -> Node:
        first, second = (build.op(torch.ops.dynafuse_test.counted.default, x) for _ in range(2))
        return build.op("aten.add.Tensor", first, second)

    assert left(write) == 3
