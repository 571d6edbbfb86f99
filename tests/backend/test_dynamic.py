"""Sizes that change from call to call: one compilation serves them all, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.support.cases import rotate_half
from tests.support.differential import check, compare, compiled, copies, regions, run
from tests.support.graphs import recorded

Build = Callable[[int], tuple[Any, ...]]
WIDE = torch.randn(33, 33, generator=torch.Generator().manual_seed(1))
SIZES = (5, 130, 3, 64)
SQUARES = (5, 66, 3)
"""Sizes where the work grows with their square."""


def marked(tree: Any, dims: Sequence[Sequence[int]]) -> Any:
    """The arguments with some of their dimensions marked as dynamic."""
    for tensor, dynamic in zip(tree, dims, strict=True):
        for dim in dynamic:
            torch._dynamo.mark_dynamic(tensor, dim)
    return tree


def check_sizes(function: Callable[..., Any], build: Build, dims: Sequence[Sequence[int]], sizes: Sequence[int] = SIZES,
                graphs_compiled: int = 1) -> None:
    """``function`` is compiled once and is right at every size."""
    torch._dynamo.reset()
    counters.clear()
    call = compiled(function, dynamic=None)
    with recorded() as graphs:
        for size in sizes:
            torch.manual_seed(size)
            arguments = build(size)
            ours = run(call, marked(copies(arguments), dims))
            compare(ours, run(function, copies(arguments)), run(function, copies(arguments, torch.float64)))
    assert counters["stats"]["unique_graphs"] == graphs_compiled, "a changed size compiled again"
    assert regions(graphs)


def x_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


ONE: dict[str, tuple[Callable[..., Any], Build, list[list[int]]]] = {
    "pointwise": (lambda x, b: (x * b).sin() + x, lambda n: (x_of(n, 33), x_of(33)), [[0], []]),
    "pointwise_inner": (lambda x, b: (x * b).sin() + b, lambda n: (x_of(7, n), x_of(n)), [[1], [0]]),
    "row_sum": (lambda x: (x.sum(1), x.amax(1), x.mean()), lambda n: (x_of(7, n),), [[1]]),
    "row_sum_of_many": (lambda x: (x.sum(1), x.argmax(1), x.var(1)), lambda n: (x_of(n, 33),), [[0]]),
    "column_sum": (lambda x: (x.sum(0), x.amax(0), x.mean(0)), lambda n: (x_of(n, 33),), [[0]]),
    "column_sum_inner": (lambda x: x.exp().sum(0) * 2, lambda n: (x_of(33, n),), [[1]]),
    "both_dims": (lambda x: (x.sum(0), x.sum(1), x.sum()), lambda n: (x_of(n, n + 1),), [[0, 1]]),
    "softmax_along": (lambda x: (x * 2).softmax(-1), lambda n: (x_of(7, n),), [[1]]),
    "softmax_across": (lambda x: (x * 2).softmax(-1) * x, lambda n: (x_of(n, 33),), [[0]]),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda n: (x_of(3, n),), [[1]]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (33,), w, b), lambda n: (x_of(2, n, 33), x_of(33), x_of(33)), [[1], [], []]),
    "variance_along": (lambda x: (x.var(1), x.std(1, correction=0)), lambda n: (x_of(5, n),), [[1]]),
    "views": (lambda x: x.reshape(-1, 11).sum(1) + x.view(-1)[::11] * 2, lambda n: (x_of(n, 33),), [[0]]),
    "split_heads": (lambda x: x.view(2, -1, 3, 11).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(2, -1, 33), lambda n: (x_of(2, n, 33),), [[1]]),
    "transposed": (lambda x: (x.t() * 2).contiguous() + x.t().exp(), lambda n: (x_of(n, 33),), [[0]]),
    "cat": (lambda x, y: torch.cat([x * 2, y], 0).sin(), lambda n: (x_of(n, 33), x_of(4, 33)), [[0], []]),
    "cat_inner": (lambda x, y: torch.cat([x, y.exp()], 1).sum(1), lambda n: (x_of(7, n), x_of(7, 5)), [[1], []]),
    "pad": (lambda x: F.pad(x, (1, 2)) * 2, lambda n: (x_of(7, n),), [[1]]),
    "slices": (lambda x: x[:, 1:] - x[:, :-1], lambda n: (x_of(7, n),), [[1]]),
    "flip": (lambda x: x.flip(0) * x, lambda n: (x_of(n, 33),), [[0]]),
    "rotary": (lambda x: x * x.cos() + rotate_half(x) * x.sin(), lambda n: (x_of(2, n, 8),), [[1]]),
    "gather": (lambda x, i: x[i].exp(), lambda n: (x_of(20, 33), torch.arange(n) % 20), [[], [0]]),
    "embedding": (lambda w, i: F.embedding(i, w) * 2, lambda n: (x_of(20, 33), (torch.arange(2 * n) * 7 % 20).view(2, n)), [[], [1]]),
    "positions": (lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None] * 0.5, lambda n: (x_of(n, 33),), [[0]]),
    "size_in_arithmetic": (lambda x: x / x.shape[0] + x.sum(0) * x.shape[0] ** -0.5, lambda n: (x_of(n, 33),), [[0]]),
    "product": (lambda x, w: F.gelu(x @ w) @ w.t() + x, lambda n: (x_of(n, 33), WIDE.clone().requires_grad_()), [[0], []]),
    "causal": (lambda x: (x @ x.transpose(-1, -2)).masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9).softmax(-1) @ x,
               lambda n: (x_of(2, n, 8),), [[1]]),
    "cross_entropy": (lambda x, t: F.cross_entropy(x, t), lambda n: (x_of(n, 33), torch.arange(n) % 33), [[0], [0]]),
    "scalar_results": (lambda x: (x * x).sum() / x.shape[0], lambda n: (x_of(n, 33),), [[0]]),
}


@pytest.mark.parametrize("name", ONE)
def test_one_compilation_serves_every_size(name: str) -> None:
    check_sizes(*ONE[name], sizes=SQUARES if name in ("both_dims", "causal") else SIZES)


@pytest.mark.parametrize(("function", "build", "dims"), [
    (lambda x: (x.sum(1), (x * x).mean(1)), lambda n: (x_of(2, n),), [[1]]),
    (lambda x: (x.sum(0), x.amax(0)), lambda n: (x_of(n, 3),), [[0]]),
    (lambda x: x.sum(), lambda n: (x_of(n),), [[0]]),
], ids=["rows", "columns", "all"])
def test_long_reductions_split(function: Callable[..., Any], build: Build, dims: list[list[int]]) -> None:
    check_sizes(function, build, dims, (9000, 12, 4097))


@pytest.mark.parametrize("function", [
    lambda x: x[:, :x.shape[1] // 2].sum(0), lambda x: x[:, :x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).amax((0, 2)),
    lambda x: x[:, ::2].mean(0), lambda x: x[:, :x.shape[1] % 4 + 1].sum(0)], ids=["halves", "pairs", "every other", "rest"])
def test_long_reductions_split_where_their_number_is_a_quotient(function: Callable[..., Any]) -> None:
    """A program's place in the workspace is a product with that number, odd sizes included."""
    call = compiled(function, dynamic=True)
    for rows in (13, 7, 4):
        x = (torch.randn(9000, rows, generator=torch.Generator().manual_seed(rows)),)
        compare(run(call, x), run(function, x))


def test_empty_sizes_of_a_dynamic_graph() -> None:
    def function(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        rest = x[n:]  # its size is what is left, also nothing
        return rest * 2, rest.sum(0), torch.cat([rest, rest + 1]), rest.reshape(-1).sum(), rest.amax(1)

    counters.clear()
    call = compiled(function, dynamic=True)
    for size, n in ((7, 3), (9, 9), (5, 2)):
        x = torch.randn(size, 33)
        compare(run(call, (x, n)), run(function, (x, n)))
    assert counters["stats"]["unique_graphs"] <= 2  # torch compiles a size of nothing by itself


def test_sizes_become_dynamic_by_themselves() -> None:
    counters.clear()
    call = compiled(lambda x: (x.softmax(-1) * 2, x.sum(0)), dynamic=None)
    for size in (9, 17, 130, 40, 3):
        x = torch.randn(size, 33)
        compare(run(call, (x,)), run(lambda x: (x.softmax(-1) * 2, x.sum(0)), (x,)))
    assert counters["stats"]["unique_graphs"] == 2  # the first size alone, then all others


def test_everything_dynamic() -> None:
    counters.clear()
    function = lambda x, y: (x * y + 1).softmax(-1).sum(0)  # noqa: E731
    call = compiled(function, dynamic=True)
    for rows, columns in ((5, 9), (64, 130), (7, 3)):
        x, y = torch.randn(rows, columns, requires_grad=True), torch.randn(columns)
        compare(run(call, (x, y)), run(function, (x, y)))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_dynamic_kernel_is_shared_by_sizes() -> None:
    from dynafuse import backend

    torch._dynamo.reset()
    call = compiled(lambda x: x.sin() + 1, dynamic=True)
    call(torch.randn(5, 33))
    kernels = backend.stats()["kernels"]
    call(torch.randn(70, 9))
    assert backend.stats()["kernels"] == kernels


@pytest.mark.parametrize("function", [
    lambda x: x[x > 0].exp() * 2, lambda x: (x > 0).nonzero() * 3 + 1, lambda x: x[x > 0].sum() + x, lambda x: x[(x > 0).nonzero().squeeze(1)].relu() + 1,
    lambda x: torch.unique((x * 3).int()).float() * 0.5,
], ids=["masked", "nonzero", "reduced", "indexed", "unique"])
def test_sizes_that_depend_on_data(function: Callable[..., Any]) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        call = compiled(function, fullgraph=True)
        for x in (torch.randn(40), -torch.rand(40), torch.rand(40)):
            compare(run(call, (x.clone(),)), run(function, (x.clone(),)))


def test_python_numbers_that_depend_on_data() -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = n.item()
        torch._check(k >= 1)
        torch._check(k <= 20)
        return x * k, torch.zeros(k, 3) + 1, x[:k].sum()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = compiled(function, fullgraph=True)
        for k in (3, 7):
            arguments = (torch.randn(30), torch.tensor(k))
            compare(run(call, arguments), run(function, arguments))


ONE_BY_GUARD: dict[str, Callable[..., Any]] = {
    "diagonal": lambda x: x.diagonal(1, 0, 1).flatten() - x.diagonal(1, 0, 1),
    "half": lambda x: x[0, : x.shape[1] // 2] * 2 + x[0],
    "slice": lambda x: x[0, 1:2].exp() + x[0],
    "last": lambda x: x[0, x.shape[1] - 1:] * x[0] + x[0].sum(0),
    "chunk": lambda x: x[0].chunk(2)[1] + x[0].t(),
    "expanded": lambda x: (x[0, : x.shape[1] // 2] * 2).expand(5, -1) + 1,
    "reduced": lambda x: (x[0] * x[0, : x.shape[1] // 2]).sum(0),
}


@pytest.mark.parametrize("executor", ["triton", "inductor"])
@pytest.mark.parametrize("name", ONE_BY_GUARD)
def test_size_that_a_guard_makes_one(name: str, executor: str) -> None:
    """What tracing took to broadcast is read at place 0, though its size is an expression of symbols."""
    check(ONE_BY_GUARD[name], torch.randn(1, 2, 2, requires_grad=True), dynamic=True, executors=executor)
