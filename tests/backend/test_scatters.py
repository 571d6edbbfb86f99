"""Scatters through the whole pipeline, against eager and float64: with producers and consumers, in every class of kernel."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynafuse import backend
from dynafuse.errors import IndexOutOfRange
from dynafuse.lowering.triton.lower import lower
from tests.support.differential import check, compiled, recorded

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def at(size: int, *shape: int, low: int = 0, seed: int = 1) -> Tensor:
    return torch.randint(low, size, shape, generator=torch.Generator().manual_seed(seed))


def planned(function: Callable[..., Any], *inputs: Tensor) -> backend.Compiled:
    """Compile, run, compare with eager, and return what was compiled."""
    with recorded() as graphs:
        found = compiled(function, executors="triton")(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-4)
    return graphs[-1]


def source_of(function: Callable[..., Any], *inputs: Tensor) -> str:
    """The source of all kernels of a function, which is compared with eager."""
    return "".join(lower(bound.code).source for bound in planned(function, *inputs).bounds.values())


def eager_ops(graph: backend.Compiled) -> list[str]:
    facts = graph.plan.annotated.facts
    return [node.name for node in graph.plan.annotated.graph.nodes if facts[node].role == "eager"]


def added(base: Tensor, index: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(aten.index_put(base * 2, [index], values * weight + 1, True)) - 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_computed_are_added(dtype: torch.dtype) -> None:
    check(added, rows(10, 8, dtype=dtype), at(10, 33, low=-10), rows(33, 8, dtype=dtype, seed=2), rows(8, dtype=dtype), executors="triton")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_wrap_around(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    check(lambda b, i, v: aten.index_put(b, [i], v, True), torch.full((4,), most, dtype=dtype), at(4, 9),
          torch.full((9,), most // 2, dtype=dtype), executors="triton")


PLACES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "in the middle": (lambda b, i, j, v: aten.index_put(b, [None, i, j], v, True),
                      (rows(3, 7, 9, 4), at(7, 5, 1, low=-7), at(9, 6), rows(3, 5, 6, 4))),
    "values are broadcast": (lambda b, i, j, v: aten.index_put(b, [None, i, j], v, True),
                             (rows(3, 7, 9, 4), at(7, 5, 1), at(9, 6), rows(6, 4))),
    "apart": (lambda b, i, j, v: aten.index_put(b, [i, None, j], v, True), (rows(7, 3, 9), at(7, 5), at(9, 5), rows(5, 3))),
    "counts": (lambda b, i: aten.index_put(b, [i], torch.ones((), dtype=b.dtype), True), (rows(7), at(7, 50, 2))),
    "an axis that no address depends on": (
        lambda b, i, w: aten.index_put(b, [i[:, None].expand(100, 90)], w.expand(100, 90), True), (rows(7), at(7, 100), rows(90))),
    "an axis that neither address nor value depends on": (
        lambda b, i: aten.index_put(b, [i[:, None].expand(100, 90)], torch.ones((), dtype=b.dtype), True), (rows(7), at(7, 100))),
    "a computed index": (lambda b, i, v: aten.index_put(b, [(i * 3 + 1) % 9], v, True), (rows(9, 5), at(9, 14), rows(14, 5))),
    "an index that is reduced": (lambda b, v: aten.index_put(b, [v.argmax(1)], v.sum(1), True), (rows(9), rows(14, 9))),
    "a single value": (lambda b, i, v: aten.index_put(b, [i], v, True), (rows(5), torch.tensor(3), torch.tensor(2.0))),
    "scatter_add": (lambda b, i, v: torch.scatter_add(b, 1, i, v * 2) + 1, (rows(6, 10), at(10, 6, 20), rows(6, 20))),
    "scatter_add of a part": (lambda b, i, v: torch.scatter_add(b, 1, i, v), (rows(6, 10), at(10, 4, 20), rows(6, 25))),
    "scatter_reduce": (lambda b, i, v: torch.scatter_reduce(b, 0, i, v, "sum"), (rows(6, 10), at(6, 14, 10), rows(14, 10))),
    "the largest integer": (lambda b, i, v: torch.scatter_reduce(b, 0, i, v, "amax"),
                            (rows(6, 10, dtype=torch.int64), at(6, 14, 10), rows(14, 10, dtype=torch.int64))),
    "index_add": (lambda b, i, v: torch.index_add(b, 1, i, v, alpha=2), (rows(4, 9), at(9, 20), rows(4, 20))),
    "an own base": (lambda b, i: aten.index_put(b * 2, [i], b * 2, True), (rows(9, 5), at(9, 9))),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name: str) -> None:
    function, inputs = PLACES[name]
    assert not eager_ops(planned(function, *inputs))


def spread(index: Tensor, rows: int, columns: int) -> Tensor:
    return index.expand(rows, columns)


HOT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "along rows": (lambda b, i, v: (aten.index_put(b, [spread(i[:, None], 70, 50)], v * 2, True), v.sum(1)),
                   (rows(9), at(9, 70), rows(70, 50))),
    "along columns": (lambda b, i, v: (aten.index_put(b, [spread(i, 70, 50)], v * 2, True), v.sum(1)),
                      (rows(9), at(9, 50), rows(70, 50))),
    "along what a loop walks": (lambda b, i, v: (aten.index_put(b, [spread(i, 70, 50)], v * 2, True), v.sum(0)),
                                (rows(9), at(9, 50), rows(70, 50))),
    "along long rows": (lambda b, i, v: (aten.index_put(b, [spread(i[:, None], 7, 20000)], v * 2, True), v.sum(1)),
                        (rows(9), at(9, 7), rows(7, 20000))),
    "of a number": (lambda b, i, v: (aten.index_put(b, [spread(i[:, None], 64, 50)], torch.ones(()), True), v.sum(1)),
                    (rows(9), at(9, 64), rows(64, 50))),
    "to one element": (lambda b, i, v: aten.index_put(b, [i.expand(5000)], v * 2, True),
                       (rows(9), torch.tensor(3), rows(5000))),
    "to one element, in rows": (lambda b, i, v: (aten.index_put(b, [spread(i, 70, 50)], v * 2, True), v.sum(1)),
                                (rows(9), torch.tensor(3), rows(70, 50))),
    "of integers": (lambda b, i, v: (aten.index_put(b, [spread(i[:, None], 70, 50)], v, True), v.sum(1)),
                    (rows(9, dtype=torch.int64), at(9, 70), rows(70, 50, dtype=torch.int64))),
    "that are masked along what stays": (
        lambda m, i, v: (aten._unsafe_masked_index_put_accumulate(torch.zeros(9), m, [spread(i[:, None], 70, 50)], v), v.sum(1)),
        (rows(70, 1) > 0, at(9, 70), rows(70, 50))),
}


@pytest.mark.parametrize("name", HOT)
def test_what_a_tile_adds_to_one_address_is_added_up_before(name: str) -> None:
    function, inputs = HOT[name]
    source = source_of(function, *inputs)
    assert re.search(r"(v\d+) = tl\.sum\(.*\n *tl\.atomic_add\(.*, \1[,)]", source), source


def table(places: int, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape) * 7 % 11 % places


FEW: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "of a table for all heads": (lambda b, i, v: aten.index_put(b, [i], v.mul(2).permute(1, 2, 0), True),
                                 (rows(32, 3), table(32, 64, 64), rows(3, 64, 64))),
    "of a vector": (lambda b, i, v: aten.index_put(b, [i], v * 2, True), (rows(7), table(7, 5000), rows(5000))),
    "from the end": (lambda b, i, v: aten.index_put(b, [i - 7], v * 2, True), (rows(7), table(7, 5000), rows(5000))),
    "of integers": (lambda b, i, v: aten.index_put(b, [i], v * 2, True),
                    (rows(7, dtype=torch.int32), table(7, 3000), rows(3000, dtype=torch.int32))),
    "of a number": (lambda b, i: aten.index_put(b, [i], torch.ones(()), True), (rows(9), table(9, 4100))),
    "that are masked": (lambda m, i, v: aten._unsafe_masked_index_put_accumulate(torch.zeros(9), m, [i], v),
                        (table(3, 5000) > 0, table(9, 5000), rows(5000))),
    "of which most are nothing": (lambda b, i, v: aten.index_put(b, [i], v, True),
                                  (rows(64), torch.zeros(4096, dtype=torch.int64) + 63, rows(4096))),
}


@pytest.mark.parametrize("name", FEW)
def test_what_a_tile_adds_to_few_places_is_added_up_place_by_place(name: str) -> None:
    function, inputs = FEW[name]
    source = source_of(function, *inputs)
    assert re.search(r"for place\d+ in range\(.*\n.*\n.*\n.*tl\.sum\(.*\n *tl\.atomic_add\(\w+ \+ place\d+, ", source), source


@pytest.mark.parametrize(("places", "shape", "values"), [
    (65, (4096,), (4096,)),  # too many to look for each
    (7, (500,), (500, 48)),  # the elements of a place are many
    (7, (49, 49), (3, 49, 49)),  # tiles reach over heads
])
def test_other_places_are_added_to_one_by_one(places: int, shape: tuple[int, ...], values: tuple[int, ...]) -> None:
    def function(b: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return aten.index_put(b, [i], (v * 2).permute(1, 2, 0) if v.ndim == 3 else v * 2, True)

    base = rows(places, *values[len(shape):]) if len(values) < 3 else rows(places, 3)
    assert "place" not in source_of(function, base, table(places, *shape), rows(*values))


def planned_result(base: Tensor, index: Tensor, values: Tensor) -> Tensor:
    def function(base: Tensor, index: Tensor, values: Tensor) -> Tensor:
        return aten.index_put(base, [index], values, True)

    result: Tensor = compiled(function, executors="triton")(base, index, values)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_added_up_for_a_place_is_rounded_once(dtype: torch.dtype) -> None:
    index, values = table(5, 4096), torch.rand(4096).to(dtype)
    ours = planned_result(torch.zeros(5, dtype=dtype), index, values)
    exact = torch.zeros(5, dtype=torch.float64).index_put([index], values.double(), accumulate=True)
    assert ((ours.double() - exact).abs() <= 4 * torch.finfo(dtype).eps * exact).all()


def test_nan_stays_at_its_place() -> None:
    values = torch.ones(3000)
    values[17] = float("nan")
    ours = planned_result(torch.zeros(6), table(6, 3000), values)
    assert ours.isnan().tolist() == [place == int(table(6, 3000)[17]) for place in range(6)]


def test_values_masked_along_what_is_summed_are_added_one_by_one() -> None:
    def function(mask: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        places = spread(index[:, None], 70, 50)
        return aten._unsafe_masked_index_put_accumulate(torch.zeros(9), mask, [places], values), values.sum(1)

    planned(function, rows(70, 50) > 0, at(9, 70), rows(70, 50))


@pytest.mark.gpu
def test_sums_of_negative_zeros_are_negative_zeros() -> None:
    """The interpreter adds with NumPy, for which the sum of negative zeros is 0.0."""
    function, (_, index, _) = HOT["along rows"]
    base, values = torch.full((9,), -0.0, device="cuda"), torch.full((70, 50), -0.0, device="cuda")
    added, _ = compiled(function, executors="triton")(base, index.cuda(), values)
    assert added.signbit().all()


def added_bools(base: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.scatter_add(base, 0, index, values) & True


def test_a_sum_of_bools_at_an_index_is_written_as_logic() -> None:
    """Triton adds bools modulo 2, but for its interpreter."""
    base, values = torch.tensor([[True, True, False, False]] * 3), torch.tensor([[True, False, True, False]])
    graph = planned(added_bools, base, torch.tensor([[1, 1, 2, 0]]), values)
    source = "".join(lower(bound.code).source for bound in graph.bounds.values())
    assert not eager_ops(graph)
    assert re.search(r"v\d+ \| v\d+", source) and not re.search(r"v\d+ \+ v\d+", source), source


STORED: dict[str, Callable[..., Any]] = {
    "index_put": lambda b, i, v: aten.index_put(b + 1, [i], v * 2),
    "of bools": lambda b, i, v: aten.index_put(b > 0, [i], v > 0),
    "index_copy": lambda b, i, v: torch.index_copy(b, 0, i, v),
    "index_fill": lambda b, i, v: torch.index_fill(b, 0, i - 9, 3),
    "scatter": lambda b, i, v: torch.scatter(b, 0, i[:, None].expand(6, 5), v) * 2,
    "scatter of a number": lambda b, i, v: torch.scatter(b, 0, i[:, None].expand(6, 4), 2),
    "in place": lambda b, i, v: _assigned(b.clone(), i, v),
}


def _assigned(base: Tensor, index: Tensor, values: Tensor) -> Tensor:
    base[index] += values
    base[index] = values * 2
    return base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("name", STORED)
def test_elements_are_replaced(name: str, dtype: torch.dtype) -> None:
    index = torch.randperm(9, generator=torch.Generator().manual_seed(3))[:6]
    graph = planned(STORED[name], rows(9, 5, dtype=dtype), index, rows(6, 5, dtype=dtype, seed=2))
    assert not eager_ops(graph)


def masked(mask: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return aten._unsafe_masked_index_put_accumulate(torch.zeros(12, 16), mask, [index], values * 2)


def test_masked_values_are_not_added_wherever_their_indices_are() -> None:
    mask = rows(5, 9, 1) > 0
    assert not eager_ops(planned(masked, mask, at(30, 5, 9, low=-30), rows(5, 9, 16)))


@pytest.mark.parametrize("shape", [(5, 9), (40, 50), (3, 1000)])
def test_one_kernel_reduces_and_scatters(shape: tuple[int, int]) -> None:
    """The backward of a norm and of what it normalizes: rows, columns and several scatters of one value."""
    def function(mask: Tensor, first: Tensor, second: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = x * weight
        grad = wide - wide.sum(-1, keepdim=True) * x
        tokens = aten._unsafe_masked_index_put_accumulate(torch.zeros(12, 16), mask, [first], grad)
        return tokens, aten.index_put(torch.zeros(4, 16), [second], grad, True), grad.sum((0, 1)), (wide * x).sum((0, 1))

    graph = planned(function, rows(*shape, 1) > 0, at(12, *shape), at(4, *shape, seed=5), rows(*shape, 16), rows(16))
    assert not eager_ops(graph)
    assert len(graph.plan.regions) == 2  # the other fills zeros


def test_sums_are_scattered_by_the_kernel_that_makes_them() -> None:
    def function(index: Tensor, x: Tensor) -> Tensor:
        return aten.index_put(torch.zeros(30, 12), [index], x.sum(0).permute(1, 2, 0).reshape(-1, 12), True)

    assert len(planned(function, at(30, 49), rows(16, 12, 7, 7)).plan.regions) == 2


def test_a_chain_of_scatters_is_one_kernel() -> None:
    def function(first: Tensor, second: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        zeros = torch.zeros(3, 8, 9)
        places = ((first, x * weight), (second, x + weight), (second, x - weight))
        parts = [aten.index_put(zeros, [None, None, place], values, True) for place, values in places]
        return parts[0] + parts[1] + parts[2]

    graph = planned(function, at(9, 20), at(9, 20, seed=2), rows(3, 8, 20), rows(20))
    assert len(graph.plan.regions) == 2


def test_scatters_that_replace_wait_for_those_before() -> None:
    def function(base: Tensor, first: Tensor, second: Tensor, values: Tensor) -> Tensor:
        one = aten.index_put(base * 2, [first], values, True)
        return aten.index_put(aten.index_put(one, [second], values), [first], values + 1, True)

    graph = planned(function, rows(20, 5), at(20, 6), torch.randperm(20)[:6], rows(6, 5))
    assert not eager_ops(graph)
    assert len(graph.plan.regions) == 4


def test_results_are_read_after_their_kernel() -> None:
    def function(base: Tensor, index: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        result = aten.index_put(base * 2, [index], values, True)
        return result.view(-1)[3:] + 1, result, values * base[:1], (result * values[:1]).sum(0)

    planned(function, rows(9, 5), at(9, 14), rows(14, 5))


def test_infinities_and_nan_arrive() -> None:
    values = rows(14, 5)
    values[3, 1], values[4, 2], values[5, 3], values[6, 3] = float("nan"), float("inf"), float("inf"), float("-inf")
    check(lambda b, i, v: aten.index_put(b, [i], v, True), rows(9, 5), torch.arange(14) % 3, values, executors="triton")


def test_dynamic_sizes() -> None:
    function = compiled(added, dynamic=True, executors="triton")
    for count, size in ((5, 9), (17, 31), (300, 9), (1, 31), (0, 9), (64, 64)):
        inputs = rows(size, 4), at(size, count, low=-size), rows(count, 4, seed=2), rows(4)
        torch.testing.assert_close(function(*inputs), added(*inputs))


BASE = rows(9, 4)
OUTSIDE: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "index_put": (lambda i: aten.index_put(BASE * 1, [i], BASE[:2], True), (9, -10)),
    "scatter_add": (lambda i: torch.scatter_add(BASE * 1, 0, i[:, None].expand(2, 4), BASE[:2]), (9, -1)),
    "index_copy": (lambda i: torch.index_copy(BASE * 1, 0, i, BASE[:2]), (9, -1)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_indices_out_of_range_are_found(name: str) -> None:
    function, outside = OUTSIDE[name]
    for index in outside:
        torch._dynamo.reset()
        with pytest.raises(IndexOutOfRange, match=name):
            compiled(function, executors="triton")(torch.tensor([1, index]))


def test_deterministic_algorithms_are_eagers() -> None:
    inputs = rows(10, 8), at(10, 33), rows(33, 8, seed=2), rows(8)
    torch.use_deterministic_algorithms(True)
    assert eager_ops(planned(added, *inputs)) == ["index_put"]
    torch.use_deterministic_algorithms(False)
    assert not eager_ops(planned(added, *inputs))


def test_gradients_of_embeddings() -> None:
    def function(table: Tensor, places: Tensor, index: Tensor, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(table[index] + places[: x.shape[1]] + x, [16])

    check(function, rows(20, 16).requires_grad_(), rows(9, 16).requires_grad_(), at(20, 4, 9), rows(4, 9, 16), executors="triton")


def embedded(table: Tensor, index: Tensor, x: Tensor, padding: int | None = 3) -> Tensor:
    return torch.nn.functional.layer_norm(torch.nn.functional.embedding(index, table, padding) * x, [16])


def backward_of(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> backend.Compiled:
    """Check gradients, and return the compiled backward."""
    with recorded() as graphs:
        check(function, *inputs, executors="triton", **options)
    return next(graph for graph in graphs if graph.kind == "backward")


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_that_makes_the_gradient_of_an_embedding_adds_it(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    index = at(20, 4, 30).to(index_dtype)
    index[0, :5] = 3  # the padding, whose gradient stays 0
    graph = backward_of(embedded, rows(20, 16, dtype=dtype).requires_grad_(), index, rows(4, 30, 1, dtype=dtype))
    assert not eager_ops(graph)
    assert len(graph.plan.regions) == 2 + (dtype.itemsize == 2)  # zeros, all else, rounding


def test_the_gradient_of_an_embedding_without_padding_and_of_dynamic_sizes() -> None:
    def function(table: Tensor, index: Tensor, x: Tensor) -> Tensor:
        return embedded(table, index, x, None)

    graph = backward_of(function, rows(20, 16).requires_grad_(), at(20, 4, 30), rows(4, 30, 1))
    assert not eager_ops(graph)
    dynamic = compiled(function, dynamic=True, executors="triton")
    for count, size in ((5, 9), (17, 31), (300, 9), (4, 4)):
        tables = [rows(size, 16).requires_grad_() for _ in range(2)]
        for run, table in zip((dynamic, function), tables, strict=True):
            run(table, at(size, count, 3), rows(count, 3, 1, seed=2)).square().sum().backward()
        torch.testing.assert_close(tables[0].grad, tables[1].grad, rtol=1e-4, atol=1e-4)


def test_gradients_that_stay_eagers() -> None:
    def scaled(table: Tensor, index: Tensor) -> Tensor:
        return torch.nn.functional.embedding(index, table, scale_grad_by_freq=True) * 2

    inputs = rows(20, 16).requires_grad_(), at(20, 30)
    assert eager_ops(backward_of(scaled, *inputs)) == ["embedding_dense_backward"]
    torch.use_deterministic_algorithms(True)
    assert eager_ops(backward_of(embedded, *inputs, rows(30, 1))) == ["embedding_dense_backward"]
    torch.use_deterministic_algorithms(False)


def test_on_the_processor_the_gradient_of_an_embedding_is_eagers() -> None:
    with recorded() as graphs:
        check(embedded, rows(20, 16).requires_grad_(), at(20, 30), rows(30, 1), executors="inductor")
    assert eager_ops(next(graph for graph in graphs if graph.kind == "backward")) == ["embedding_dense_backward"]
