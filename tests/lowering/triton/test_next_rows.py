"""Loops over long rows whose next ones are loaded while those of the moment are computed, part by part where they are longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.errors import LoweringError
from dynafuse.lowering.triton import rowcol_schedule
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.row_parts import in_parts
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.partition import kernel_class
from tests.support import graphs

LENGTH = 4100  # more than the rows that shared memory serves as well, and no whole number of tiles
IN_PARTS, READ_AGAIN = 6100, 12800  # elements of rows for which four warps have too few registers, and eight
PROCESSORS = 8
"""Of the device that the kernels which run are scheduled for, with one program or two on each: the interpreter walks over every row."""

BOTH = frozenset("xr")
Function = Callable[..., tuple[Tensor, ...]]


def gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Those of a layer norm but for its statistics: rows of two sums, and two sums of columns."""
    g = dy.float() * w
    row = g - g.mean(1, keepdim=True) - x.float() * (g * x.float()).mean(1, keepdim=True)
    return row.to(x.dtype), (dy.float() * x.float()).sum(0), dy.float().sum(0)


def under_a_mask(dy: Tensor, x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    return gradients(torch.where(keep, dy, 0), x, w)


def of_chosen_rows(dy: Tensor, table: Tensor, w: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    return gradients(dy, table[chosen], w)


def read_late(dy: Tensor, x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """What is added to the result is needed once a row's sums are known, and no sooner."""
    row, *columns = gradients(dy, x, w)
    return (row + residual, *columns)


def extremes(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Of rows other reductions than sums."""
    g = dy.float() * w
    row = g - g.amax(1, keepdim=True) - x.float() * x.float().amin(1, keepdim=True)
    return row.to(x.dtype), (dy.float() * x.float()).sum(0), dy.float().sum(0)


def rows(count: int, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH) -> Tensor:
    return torch.randn(count, length).to(dtype)


def weights(length: int = LENGTH) -> Tensor:
    return torch.randn(length)


CASES: dict[str, tuple[Function, Callable[[], Sequence[Tensor]], int]] = {
    "more rows than programs": (gradients, lambda: [rows(18), rows(18), weights()], 2),
    "wide numbers": (gradients, lambda: [rows(20, torch.float32), rows(20, torch.float32), weights()], 2),
    "as many": (gradients, lambda: [rows(16), rows(16), weights()], 2),
    "a mask": (under_a_mask, lambda: [rows(18), rows(18), weights(), torch.rand(18, LENGTH) < 0.7], 3),
    "a row for all": (under_a_mask, lambda: [rows(18), rows(18), weights(), torch.rand(18, 1) < 0.7], 3),
    "at loaded places": (of_chosen_rows, lambda: [rows(18), rows(6), weights(), torch.randint(0, 6, (18,))], 2),
    "in parts": (gradients, lambda: [rows(18, length=IN_PARTS), rows(18, length=IN_PARTS), weights(IN_PARTS)], 2),
    "read again": (gradients, lambda: [rows(18, length=READ_AGAIN), rows(18, length=READ_AGAIN), weights(READ_AGAIN)], 2),
    "extremes": (extremes, lambda: [rows(18, length=IN_PARTS), rows(18, length=IN_PARTS), weights(IN_PARTS)], 2),
    "read late": (read_late, lambda: [rows(18), rows(18), weights(), rows(18)], 3),
}
"""By name the function, its inputs, and how many loads come before their rows do."""


@pytest.fixture(autouse=True)
def one_kernel_is_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is of more rows than the interpreter gets through in a test."""
    for executor in ("TRITON", "EAGER"):
        monkeypatch.setenv(f"DYNAFUSE_COST_LAUNCH_US_{executor}", "1000")


@pytest.fixture
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rowcol_schedule, kernel_class):
        monkeypatch.setattr(module, "PROCESSORS", PROCESSORS)
    monkeypatch.setenv("DYNAFUSE_COST_PROCESSORS", str(PROCESSORS))


def traced(function: Function, inputs: Sequence[Tensor], mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def compiled(module: torch.fx.GraphModule, inputs: Sequence[Tensor], **options: Any) -> graphs.Run:
    run = graphs.compiled(module, inputs, resolve(options={"strict": True, "executors": "triton", **options}))
    (bound,) = run.bounds.values()
    schedule = choose_schedule(bound.code)
    assert schedule.loads_next and schedule.splits <= 2 * PROCESSORS
    return run


def assert_close(found: Sequence[Tensor], function: Function, inputs: Sequence[Tensor]) -> None:
    """As close to float64 as eager, but for some bits in the last place of float32."""
    exact = function(*(t.double() if t.is_floating_point() else t for t in inputs))
    for ours, theirs, reference in zip(found, function(*inputs), exact, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        error, allowed = ((t.double() - reference).abs().amax() if t.numel() else 0 for t in (ours, theirs))
        assert error <= 2 * allowed + 1e-6 * (reference.abs().amax() if reference.numel() else 1)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("name", CASES)
def test_rows_and_columns(name: str) -> None:
    function, make, count = CASES[name]
    torch.manual_seed(0)
    inputs = make()
    run = compiled(traced(function, inputs), inputs)
    (source,) = (lower(bound.code).source for bound in run.bounds.values())
    loop = source.split("    for x_base")[1].split("    tl.store(tmp")[0]
    assert loop.count("= next") == loop.count("\n        next") >= count
    assert ("_p1" in loop, "evict_first" in loop) == (name in ("in parts", "read again", "extremes", "read late"), name == "read again")
    assert_close(run.call([t.clone() for t in inputs]), function, inputs)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("length", [LENGTH, READ_AGAIN])
def test_what_is_not_finite_stays_in_its_row(length: int) -> None:
    inputs = [rows(18, length=length), rows(18, length=length), weights(length)]
    inputs[0][7, 3], inputs[1][17, length - 1] = torch.nan, torch.inf
    run = compiled(traced(gradients, inputs), inputs)
    ours, theirs = run.call([t.clone() for t in inputs]), gradients(*inputs)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("length", [LENGTH, IN_PARTS])
def test_as_many_rows_as_there_are(length: int) -> None:
    """A kernel for any number of rows has programs that may find none."""
    torch._dynamo.reset()
    call = torch.compile(gradients, backend="dynafuse", options={"strict": True, "executors": "triton"})
    with graphs.recorded() as compilations:
        for count in (18, 9, 2, 0):
            inputs = [rows(count, length=length), rows(count, length=length), weights(length)]
            for t in inputs[:2]:
                torch._dynamo.mark_dynamic(t, 0)
            assert_close(call(*inputs), gradients, inputs)
    kernels = [bound for graph in compilations for bound in graph.bounds.values()]
    assert kernels and all(choose_schedule(bound.code).loads_next and bound.code.symbols for bound in kernels)


@pytest.mark.usefixtures("few_processors")
@pytest.mark.parametrize("length", [LENGTH, READ_AGAIN])
def test_an_input_that_is_overwritten_is_read_before(length: int) -> None:
    def added(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        row, *columns = gradients(dy, x, w)
        return (x.copy_(row), *columns)

    inputs = [rows(12, length=length), rows(12, length=length), weights(length)]
    run = compiled(traced(added, inputs), inputs)
    overwritten = inputs[1].clone()
    _, *columns = run.call([inputs[0], overwritten, inputs[2]])
    assert_close([overwritten, *columns], gradients, inputs)


def chosen(count: int, length: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    inputs = [torch.empty(8192, length, dtype=dtype), torch.empty(8192, length, dtype=dtype), torch.empty(length)]
    plan = graphs.planned(traced(lambda dy, x, w: gradients(dy, x, w)[:1 + count], inputs))
    specs = [canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").spec for region in plan.regions]
    return [str(choose_schedule(spec)).removeprefix("rowcol x=0/1 r=1/") for spec in specs]


@pytest.mark.parametrize(("length", "expected"), [
    (4096, "4096 w4 s3 p264"), (5120, "8192 w4 s1n p264"), (6144, "2048x3 w8 s1n p132"), (8192, "4096x2 w8 s1n p132"),
    (12288, "4096x3 w8 s1n p132")])
def test_rows_beside_two_sums_of_columns(length: int, expected: str) -> None:
    """Longer ones leave fewer registers for the next ones, then for themselves."""
    assert chosen(2, length) == [expected]


def test_rows_beside_one_sum_come_by_shared_memory_as_long_as_they_have_room_there() -> None:
    assert [chosen(1, length) for length in (8192, 16384, 20480)] == [
        ["8192 w8 s3 p132"], ["16384 w8 s3 p132"], ["4096x5 w16 s1na p132"]]


def test_lines_of_parts_stand_together_as_far_as_no_reduction_is_waited_for() -> None:
    scope = Scope([Line(text, tiles=tiles) for text, tiles in [
        ("v0 = tl.load(in0 + (r))", BOTH), ("v1 = tl.load(in1 + (x))", frozenset("x")), ("v2 = v0 * v1", BOTH),
        ("v3 = tl.sum(v2, 1)[:, None]", frozenset("x")), ("v4 = v3 / 2", frozenset("x")), ("v5 = v0 + v1", BOTH),
        ("v6 = v5 - v4", BOTH), ("tl.store(out0 + (r), v6)", BOTH)]])
    in_parts(scope, 2)
    written = [(item.part, [line.text for line in item.lines]) if isinstance(item, Scope) else item.text for item in scope.lines]
    first, last = ["v0 = tl.load(in0 + (r))", "v2 = v0 * v1", "v5 = v0 + v1"], ["v6 = v5 - v4", "tl.store(out0 + (r), v6)"]
    assert written == ["v1 = tl.load(in1 + (x))", (0, first), (1, first), "v3 = tl.sum(v2_p0 + v2_p1, 1)[:, None]",
                       "v4 = v3 / 2", (0, last), (1, last)]


def test_parts_wait_for_what_their_places_are_made_of() -> None:
    """A row is read at a place that the sum of another tells."""
    place = Line("v3 = tl.load(in1 + ({0}))", (sympy.Symbol("v2") + sympy.Symbol("i1"),), tiles=BOTH)
    scope = Scope([Line("v0 = tl.load(in0 + (r))", tiles=BOTH), Line("v1 = tl.sum(v0, 0)[None, :]", tiles=frozenset("x")),
                   Line("v2 = v1 % 8", tiles=frozenset("x")), place])
    in_parts(scope, 2)
    written = [item.part if isinstance(item, Scope) else item.text for item in scope.lines]
    assert written == [0, 1, "v1 = tl.sum(v0_p0 + v0_p1, 0)[None, :]", "v2 = v1 % 8", 0, 1]


def test_rows_of_which_something_else_is_made_are_not_in_parts() -> None:
    scope = Scope([Line("v0 = tl.load(in0 + (r))", tiles=BOTH), Line("v1 = lm.argmax(v0, 1)", tiles=frozenset("x"))])
    with pytest.raises(LoweringError, match="in one part"):
        in_parts(scope, 2)
