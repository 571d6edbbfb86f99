"""What eager ops return in other layouts than torch foretold: kernels, views and callers get what was planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dynafuse.lowering.inductor import availability
from tests.support import graphs
from tests.support.differential import compiled

needs_compiler = pytest.mark.skipif(not availability.find("cpu").available, reason="Inductor has no C++ compiler")
EXECUTORS = ["triton", pytest.param("inductor", marks=needs_compiler)]
NAMESPACE = "dynafuse_promised"
X = torch.randn(6, 5)

Op = Callable[[Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def _ops() -> Iterator[None]:
    """Ops whose fake implementations are wrong: they return columns, or fewer rows."""
    with torch.library._scoped_library(NAMESPACE, "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        library.define("two(Tensor x) -> (Tensor, Tensor)")
        library.define("fewer(Tensor x) -> Tensor")
        library.impl("one", lambda x: (x + 1).t().contiguous().t(), "CPU")
        library.impl("two", lambda x: (x * 2, (x + 1).t().contiguous().t()), "CPU")
        library.impl("fewer", lambda x: x[1:].clone(), "CPU")
        for name, fake in (("one", torch.empty_like), ("two", lambda x: (torch.empty_like(x), torch.empty_like(x))),
                           ("fewer", torch.empty_like)):
            library.impl(name, fake, "Meta")
        yield


CASES: dict[str, Callable[[Tensor, Op, Op], Tensor]] = {
    "read": lambda x, one, two: one(x).exp() * 2,
    "viewed": lambda x, one, two: one(x).view(-1),
    "viewed and read": lambda x, one, two: one(x)[1:].flatten().exp() * 2,
    "returned": lambda x, one, two: one(x * 2),
    "one of two": lambda x, one, two: two(x)[0].exp() + two(x)[1].exp(),
    "read by an op": lambda x, one, two: one(one(x)) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", CASES)
def test_other_strides_are_made_the_planned_ones(case: str, executor: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    ops = getattr(torch.ops, NAMESPACE)
    ours = compiled(lambda x: CASES[case](x, ops.one, ops.two), dynamic=dynamic, executors=executor)(X)
    torch.testing.assert_close(ours, CASES[case](X, lambda x: x + 1, lambda x: (x * 2, x + 1)))
    assert ours.is_contiguous()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_other_sizes_raise(executor: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    op = getattr(torch.ops, NAMESPACE).fewer
    function = compiled(lambda x: op(x).exp() * 2, dynamic=dynamic, executors=executor)
    with pytest.raises(RuntimeError, match=r"fewer.* returned a tensor of sizes \(5, 5\); .* compiled for \(6, 5\)"):
        function(X)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_size_that_the_program_asserts_and_the_data_has_not_raises(executor: str) -> None:
    def four(x: Tensor) -> Tensor:
        found = x.nonzero()
        torch._check(found.size(0) == 4)
        return found + 3

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = compiled(four, executors=executor)
        assert function(torch.tensor([0, 1, 3, 4, 2, 0, 0])).flatten().tolist() == [4, 5, 6, 7]
        with pytest.raises(RuntimeError):
            function(torch.zeros(7, dtype=torch.int64))


def test_what_products_of_matrices_return_is_not_looked_at() -> None:
    def product(build: graphs.Builder, x: Node, w: Node) -> Node:
        return build.op("aten.relu.default", build.op("aten.mm.default", x, w))

    given = [torch.randn(4, 4), torch.randn(4, 4)]
    assert ".stride()" not in graphs.compiled(graphs.built(product, *given), given).call.source  # type: ignore[attr-defined]


def test_a_result_that_an_op_leaves_out_is_none() -> None:
    """Torch foretells an empty tensor for the weights that are not asked for."""
    def attention(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return torch._native_multi_head_attention(x, x, x, 6, 2, weight.repeat(3, 1), bias.repeat(3), weight, bias, None, False)  # type: ignore[no-any-return,attr-defined]

    arguments = torch.randn(1, 3, 6), torch.randn(6, 6), torch.randn(6)
    with torch.no_grad():
        result, weights = compiled(attention)(*arguments)
        torch.testing.assert_close(result, attention(*arguments)[0])
    assert weights is None
