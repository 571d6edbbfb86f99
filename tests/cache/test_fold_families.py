"""Folds of any length run on kernels of a few widths, with the bits that kernels of their own would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

import dynafuse
from dynafuse import backend
from dynafuse.cache import canonical as key
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.fold_families import WIDTHS
from dynafuse.config import resolve
from dynafuse.lowering.triton.compiler import load
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.report import Report
from dynafuse.select.measurement import measurement_key
from dynafuse.select.runners import runner
from tests.support import graphs

CPU = torch.device("cpu")
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, -1.0, 3.3e38)
Term = Callable[[graphs.Builder, Node], Any]
Write = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    """Which lengths there were before is part of the decision."""
    backend.reset()
    yield
    backend.reset()


def as_it_is(b: graphs.Builder, x: Node) -> Node:
    return x


def tanh(b: graphs.Builder, x: Node) -> Node:
    return b.op("aten.tanh.default", x)


def scaled(b: graphs.Builder, x: Node) -> Node:
    return b.op("aten.mul.Tensor", tanh(b, x), 0.3)


def squashed(b: graphs.Builder, x: Node) -> Node:
    return b.op("aten.mul.Tensor", x, b.op("aten.sigmoid.default", x))


def viewed(b: graphs.Builder, x: Node) -> Node:
    return b.op("aten.permute.default", x, [1, 0])


def fold(op: str = "aten.add.Tensor", term: Term = as_it_is, tail: Term = tanh, **named: Any) -> Write:
    """``tail(((x0 op term(x1)) op term(x2)) ...)``."""
    def write(b: graphs.Builder, x: Node, *rest: Node) -> Any:
        for other in rest:
            x = b.op(op, x, term(b, other), **named)
        return tail(b, x)

    return write


def bound(write: Write, *inputs: torch.Tensor) -> CanonicalRegion:
    """The one region of a graph."""
    plan = graphs.planned(graphs.built(write, *inputs))
    (region,) = plan.regions
    return key.canonical(plan.annotated, region, resolve(environ={}).key(), "sm90")


def tensors(count: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 8)) -> list[torch.Tensor]:
    """Values with every special one against every other."""
    generator = torch.Generator().manual_seed(count)
    if dtype is torch.bool or not dtype.is_floating_point:
        return [torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype) for _ in range(count)]
    made = [torch.randn(shape, generator=generator) for _ in range(count)]
    for k, one in enumerate(made):
        at = torch.randint(0, len(SPECIAL), shape, generator=generator)
        one.copy_(torch.where(torch.rand(shape, generator=generator) < 0.3, torch.tensor(SPECIAL)[at], one))
        one.view(-1)[:4] = -0.0 if k % 2 else 0.0
        one.view(-1)[4:8] = -0.0
    return [one.to(dtype) for one in made]


def family(write: Write, count: int, dtype: torch.dtype = torch.float32) -> CanonicalRegion:
    found = key.family(bound(write, *tensors(count, dtype)), 3)
    assert found is not None
    return found


# Which keys are one ---------------------------------------------------------------------------------------------------

FOLDS: dict[str, Write] = {
    "inputs": fold(),
    "no tail": fold(tail=as_it_is),
    "terms": fold(term=tanh),
    "terms with numbers": fold(term=scaled),
    "terms that read twice": fold(term=squashed),
    "alpha": fold(alpha=0.3),
    "products": fold("aten.mul.Tensor"),
    "maxima": fold("aten.maximum.default", term=tanh),
    "differences": fold("aten.sub.Tensor", term=tanh),
    "quotients": fold("aten.div.Tensor"),
    "an operand of what commutes": fold(tail=lambda b, t: b.op("aten.mul.Tensor", tanh(b, t), b.op("aten.exp.default", t))),
}


@pytest.mark.parametrize("what", FOLDS)
def test_lengths_up_to_a_width_share_a_key(what: str) -> None:
    found = {count: family(FOLDS[what], count) for count in range(3, 18)}
    for low, high in ((3, 4), (5, 8), (9, 16)):
        keys = {found[count].key for count in range(low, high + 1)}
        assert len(keys) == 1, what
        assert {repr(found[count].code) for count in (low, high)} == {repr(found[low].code)}
    assert len({one.key for one in found.values()}) == 4
    assert [found[count].family.width for count in (3, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 32]  # type: ignore[union-attr]
    assert all(one.count == count for count, one in found.items())


def test_a_key_tells_what_differs_besides() -> None:
    keys = {what: family(write, 5).key for what, write in FOLDS.items()}
    assert len(set(keys.values())) == len(keys)
    assert family(fold(), 5, torch.bfloat16).key != keys["inputs"]
    assert key.diff(family(fold(), 5), family(fold(), 6)) == []
    assert "number of inputs: 8 against 16" in key.diff(family(fold(), 8), family(fold(), 9))


def test_arguments_are_those_of_the_terms() -> None:
    made = family(fold(alpha=0.3), 5)
    assert [node.name for node in made.arguments[:5]] == [node.name for node in made.inputs]
    assert set(made.arguments) == set(made.inputs) and len(made.arguments) == 8
    assert len(made.hoisted) == len(made.code.hoisted) == 7
    assert measurement_key(made.family.code, {}, CPU) == measurement_key(family(fold(alpha=0.7), 7).family.code, {}, CPU)  # type: ignore[union-attr]


def test_on_other_executors_a_region_is_its_own() -> None:
    made = family(fold(), 5)
    moved = key.rekeyed(made, replace(made.region, executor="nvfuser"), "nvfuser")
    assert moved.code == moved.spec and moved.family is None and moved.arguments == moved.inputs and moved.count is None
    back = key.rekeyed(moved, made.region, made.target)
    assert back == made


def with_read_between(b: graphs.Builder, *xs: Node) -> Any:
    sums = [xs[0]]
    for x in xs[1:]:
        sums.append(b.op("aten.add.Tensor", sums[-1], x))
    return [tanh(b, one) for one in sums[1:]]


def balanced(b: graphs.Builder, *xs: Node) -> Any:
    level = [tanh(b, x) for x in xs]
    while len(level) > 1:
        level = [b.op("aten.mul.Tensor", *level[i:i + 2]) if len(level[i:i + 2]) == 2 else level[i] for i in range(0, len(level), 2)]
    return b.op("aten.exp.default", level[0])


def over_one(b: graphs.Builder, x: Node) -> Any:
    total = x
    for _ in range(6):
        total = b.op("aten.add.Tensor", total, x)
    return total


def overwriting(b: graphs.Builder, *xs: Node) -> Any:
    return b.op("aten.copy_.default", xs[3], fold()(b, *xs))


def test_what_is_no_fold() -> None:
    assert key.family(bound(with_read_between, *tensors(5)), 3) is None
    assert key.family(bound(balanced, *tensors(4)), 3) is None
    assert key.family(bound(over_one, *tensors(1)), 3) is None
    assert key.family(bound(overwriting, *tensors(5)), 3) is None  # a term could be there twice, and be overwritten between
    assert key.family(bound(fold(), *tensors(2)), 3) is None
    assert key.family(bound(fold(), *tensors(5)), 6) is None


def test_terms_that_differ_end_a_fold() -> None:
    write = lambda b, *xs: tanh(b, b.op("aten.add.Tensor", fold(tail=as_it_is)(b, *xs[1:]), b.op("aten.exp.default", xs[0])))  # noqa: E731
    found = key.family(bound(write, *tensors(7)), 3)
    assert found is not None and str(found.family) == "fold of 6 in 8"
    found = key.family(bound(fold(), *tensors(3), *tensors(4, torch.bfloat16)), 3)
    assert found is not None and str(found.family) == "fold of 5 in 8"  # from the sum of the first three on


# Bits -----------------------------------------------------------------------------------------------------------------


def run(made: CanonicalRegion, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    lowered = lower(made.code)
    kernel = Kernel("key", lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), True)
    order = [inputs[int(node.name.removeprefix("arg"))] for node in made.inputs]
    return list(runner(kernel, made.spec, {}, CPU, made.family)(order))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bits, all NaN alike."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor, tensor).view(whole)


def check(write: Write, inputs: list[torch.Tensor], signed_zeros: bool = True) -> None:
    own = bound(write, *inputs)
    shared = key.family(own, 3)
    assert shared is not None and shared.family is not None and shared.key != own.key
    for mine, theirs in zip(run(own, inputs), run(shared, inputs), strict=True):
        if not signed_zeros:
            mine, theirs = mine + 0, theirs + 0
        assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("what", FOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_bits(what: str, dtype: torch.dtype) -> None:
    for count in (3, 4, 5, 11):  # which of 0.0 and -0.0 is the larger, a GPU knows and numpy does not
        check(FOLDS[what], tensors(count, dtype), signed_zeros=what != "maxima")


@pytest.mark.parametrize("op", ["add.Tensor", "mul.Tensor", "maximum.default", "minimum.default", "bitwise_and.Tensor",
                                "bitwise_or.Tensor", "bitwise_xor.Tensor", "sub.Tensor"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool])
def test_the_same_integers(op: str, dtype: torch.dtype) -> None:
    if op == "sub.Tensor" and dtype is torch.bool:
        pytest.skip("torch has none")
    for count in (3, 6):
        check(fold(f"aten.{op}", tail=as_it_is), tensors(count, dtype))


def test_minus_zero_stays() -> None:
    inputs = [torch.full((6, 8), -0.0) for _ in range(5)]
    (found,) = run(family(fold(tail=as_it_is), 5), inputs)
    assert torch.equal(found.signbit(), torch.ones(6, 8, dtype=torch.bool))


@pytest.mark.parametrize("tail", ["sum.dim_IntList", "amax.default"])
def test_rows_of_a_fold(tail: str) -> None:
    for shape in ((6, 8), (3, 300)):
        check(fold(tail=lambda b, t: b.op(f"aten.{tail}", tanh(b, t), [1])), tensors(5, shape=shape))


def test_views_of_terms() -> None:
    check(fold(term=viewed), tensors(6, shape=(8, 8)))


def test_terms_that_are_not_there_are_not_read() -> None:
    made = family(fold(), 5)
    nowhere = torch.empty(0)  # reading from address 0 would end the process
    assert made.family is not None and nowhere.data_ptr() == 0
    inputs = tensors(5)
    lowered = lower(made.code)
    kernel = Kernel("key", lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), True)
    away = replace(made.family, inputs=(*made.family.inputs[:5], 5, 5, 5))
    (found,) = runner(kernel, made.spec, {}, CPU, away)([*inputs, nowhere])
    assert torch.equal(bits(found), bits(run(bound(fold(), *inputs), inputs)[0]))


# Decisions ------------------------------------------------------------------------------------------------------------


def reversed_sums(layers: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """A network whose layer k sums k tensors, the latest first."""
    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        outs = [x]
        for weight in weights:
            total = outs[-1]
            for out in reversed(outs[:-1]):
                total = total + out
            outs.append(torch.tanh(total) @ weight)
        return outs[-1].sum()

    generator = torch.Generator().manual_seed(layers)
    return run, [torch.randn(10, 10, generator=generator).requires_grad_() for _ in range(layers + 1)]


def explained(layers: int) -> Report:
    function, inputs = reversed_sums(layers)
    return dynafuse.explain(function, *inputs, device="h200")


def lengths(report: Report) -> list[str]:
    return [str(step.family) for graph in report.graphs for step in graph.steps if step.family]


@pytest.mark.parametrize(("layers", "kernels"), [(4, 6), (8, 7), (16, 8), (32, 9)])
def test_kernels_grow_with_the_logarithm_of_the_layers(layers: int, kernels: int) -> None:
    report = explained(layers)
    assert report.kernels == kernels
    assert lengths(report) == [f"fold of {n} in {min(w for w in WIDTHS if w >= n)}" for n in range(3, layers + 1)]


def test_the_report_tells() -> None:
    report = explained(6)
    steps = report.to_dict()["graphs"][0]["steps"]
    families = [step["family"] for step in steps if step["family"]]
    assert [(family["terms"], family["width"]) for family in families] == [(3, 4), (4, 4), (5, 8), (6, 8)]
    assert all(0 < family["loss_us"] < family["saved_us"] for family in families)
    assert all(step["family"] is None for step in steps if step["executor"] == "eager")
    assert "family: fold of 5 in 8" in str(report) and "in kernels of 8 terms: a call loses" in str(report)


@pytest.mark.parametrize(("name", "value"), [
    ("NEAR_MATCH", "0"), ("COST_ARGUMENT_US", "100"), ("COST_EXPECTED_RUNS", "1e9"), ("COST_COMPILE_S_TRITON", "0"),
    ("COST_NEAR_LEAST_TERMS", "100"),
])
def test_what_keeps_kernels_apart(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DYNAFUSE_{name}", value)
    report = explained(6)
    assert report.kernels == 9 and lengths(report) == []


def test_a_refusal_has_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAFUSE_COST_ARGUMENT_US", "100")
    report = explained(4)
    notes = [note for step in report.graphs[0].steps for note in step.notes]
    assert "a kernel of its own: as a fold of 3 in 4 it would lose 200.00 µs a call, and save 3.67 of compile time" in notes


def test_a_length_alone_has_a_kernel_of_its_own() -> None:
    def alone(*xs: torch.Tensor) -> torch.Tensor:
        return (((xs[0] + xs[1]) + xs[2]) + xs[3]).tanh()

    assert lengths(dynafuse.explain(alone, *tensors(4), device="h200")) == []


def test_a_second_length_finds_a_family_in_another_graph() -> None:
    runs = [graphs.compiled(graphs.built(fold(), *tensors(count))) for count in (5, 6, 7, 5)]
    assert [str(run.bounds["r0"].family) for run in runs] == ["None", *(f"fold of {count} in 8" for count in (6, 7, 5))]
    for run, count in zip(runs, (5, 6, 7, 5), strict=True):
        inputs = tensors(count)
        (found,) = run.call([*inputs])
        torch.testing.assert_close(found, torch.tanh(sum(inputs[1:], inputs[0])), equal_nan=True)


def test_a_fold_that_runs_often_keeps_its_kernel() -> None:
    def often(x: torch.Tensor, w: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = torch.tanh(sum(xs, x)) @ w
        return torch.tanh(sum(xs[1:], x)) @ w

    report = dynafuse.explain(often, *(torch.randn(8, 8) for _ in range(7)), device="h200")
    assert lengths(report) == ["fold of 5 in 8"]


@pytest.mark.parametrize(("terms", "found"), [(3, []), (5, ["fold of 5 in 8", "fold of 6 in 8"])])
def test_rows_that_would_be_scheduled_otherwise_keep_their_kernels(terms: int, found: list[str]) -> None:
    """Three tensors along a row are held by other warps than four, so that the row would be summed up in another order."""
    def two(w: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        first = torch.softmax(sum(xs[1:], xs[0]), -1) @ w
        return torch.softmax(sum(xs, first), -1) @ w

    inputs = [torch.empty(256, 256), *(torch.empty(16384, 256) for _ in range(terms))]
    assert lengths(dynafuse.explain(two, *inputs, device="h200")) == found


def test_graphs_run_with_the_same_bits() -> None:
    found = []
    for near in (True, False):
        torch._dynamo.reset()
        backend.reset()
        function, inputs = reversed_sums(5)
        compiled = torch.compile(function, backend=backend.dynafuse, options={"near_match": near})
        total = compiled(*inputs)
        total.backward()
        found.append([total.detach(), *(one.grad for one in inputs)])
        assert backend.stats()["kernels"] == (7 if near else 8)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
