"""Scans through the whole pipeline, against eager and float64: with neighbours, in every layout, in every class of kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynafuse import backend
from dynafuse.errors import LoweringError
from dynafuse.ir import RefusalKind, Store
from dynafuse.lowering.triton.lower import lower
from tests.support.differential import check, compiled, recorded, regions

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": torch.cumsum, "cumprod": lambda x, dim: torch.cumprod(x * 0.1 + 1, dim), "logcumsumexp": torch.logcumsumexp,
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: rows(7, 130),
    "transposed": lambda: rows(130, 7).t(),
    "gaps": lambda: rows(14, 260)[::2, 3::2],
    "expanded": lambda: rows(1, 130).expand(7, 130),
    "three": lambda: rows(3, 5, 8).transpose(0, 2),
}
INF, NAN = float("inf"), float("nan")


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


def classes(graphs: list[backend.Compiled]) -> list[str]:
    """The classes of all kernels."""
    return [lower(bound.code).schedule_class for graph in graphs for bound in graph.bounds.values()]


def refusals(graphs: list[backend.Compiled]) -> set[RefusalKind]:
    return {refusal.kind for graph in graphs for refusal in graph.plan.refusals}


def eager_ops(graphs: list[backend.Compiled]) -> list[str]:
    return [str(node.target) for graph in graphs for node, facts in graph.plan.annotated.facts.items() if facts.role == "eager"]


def alone(function: Callable[..., Any], *inputs: Any, **options: Any) -> list[backend.Compiled]:
    """Check a function that is to be a single kernel."""
    graphs = check(function, *inputs, executors="triton", **options)
    assert regions(graphs) == 1 and not eager_ops(graphs), [str(graph.plan) for graph in graphs]
    return graphs


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_along_every_dimension(layout: str, name: str) -> None:
    x = LAYOUTS[layout]()
    for dim in range(-1, x.dim() - 1):
        alone(lambda x, dim=dim: SCANS[name](x.sin(), dim) * 2 + x, x)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_float(dtype: torch.dtype, name: str) -> None:
    """16-bit floats are added up in 32 bits: eager's own rounding is beyond 1e-2 after that many."""
    alone(lambda x: SCANS[name](x, 1), rows(3, 700, dtype=dtype))
    alone(lambda x: SCANS[name](x, 0), rows(700, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype: torch.dtype) -> None:
    x = rows(3, 40, dtype=dtype)
    alone(lambda x: (x.cumsum(1), x.cumprod(1)), x)
    for dest in (torch.int8, torch.uint8, torch.int32, torch.float32, torch.bfloat16):
        alone(lambda x, dest=dest: (x.cumsum(0, dtype=dest), x.cumsum(0, dtype=dest) > 5, x.cumprod(0, dtype=dest)), x)
    check(lambda x: x.cumsum(1, dtype=dtype if dtype is not torch.bool else torch.int16), rows(3, 40), executors="triton")


@pytest.mark.parametrize("name", SCANS)
def test_gradients(name: str) -> None:
    """The gradient of a sum is turned around, scanned and turned around again: what is read elsewhere is its own kernel."""
    for dim in (0, 1):
        graphs = check(lambda x, dim=dim: SCANS[name](x.sin(), dim).cos(), rows(6, 33).requires_grad_(), executors="triton")
        assert regions(graphs, "forward") == 1
        if name == "cumsum":
            assert not eager_ops(graphs) and regions(graphs, "backward") == 2 and RefusalKind.FIXED_INDEX in refusals(graphs)


def test_special_values() -> None:
    x = torch.tensor([
        [1.0, INF, 2.0, -INF, 3.0], [NAN, 1.0, 1.0, 1.0, 1.0], [-INF, -INF, -INF, 0.0, INF], [-0.0, -0.0, 0.0, -0.0, 0.0],
        [1.0, 0.0, INF, 1.0, 1.0], [-1.0, 0.0, 2.0, -0.0, -3.0], [INF, INF, -INF, -INF, NAN]])
    for name, scan in SCANS.items():
        for dim, given in ((1, x), (0, x.t()), (1, x.double()), (1, x.bfloat16())):
            function = (lambda x, dim=dim: torch.cumprod(x, dim)) if name == "cumprod" else lambda x, dim=dim: scan(x, dim)  # noqa: B023
            found, expected = compiled(function, executors="triton")(given), function(given)
            torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{name} {dim} {given.dtype}: {found}")
            if name != "logcumsumexp":
                zero = expected == 0
                assert torch.equal(found[zero].signbit(), expected[zero].signbit()), f"{name} {found} {expected}"


def test_sums_in_a_loop_begin_with_zero() -> None:
    assert not compiled(lambda x: x.cumsum(1), executors="triton")(torch.full((1, 20000), -0.0)).signbit().any()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0), (0, 3), (3, 1), (1, 3), (2, 1, 3)])
def test_tensors_of_few_elements(shape: tuple[int, ...]) -> None:
    for dim in range(max(len(shape), 1)):
        check(lambda x, dim=dim: (torch.cumsum(x * 2, dim) + 1, torch.logcumsumexp(x, dim), x.cumprod(dim)), rows(*shape), executors="triton")


# Neighbours -----------------------------------------------------------------------------------------------------------------

FUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a softmax before": (lambda x: x.softmax(1).cumsum(1), (rows(9, 100),)),
    "a softmax behind": (lambda x: x.cumsum(1).softmax(1), (rows(9, 100),)),
    "a softmax of columns behind": (lambda x: x.cumsum(0).softmax(0), (rows(100, 9),)),
    "two, one of the other": (lambda x: x.cumsum(1).sin().cumprod(1), (rows(9, 100),)),
    "two beside one another": (lambda x: (x.cumsum(1), torch.logcumsumexp(x, 1)), (rows(9, 100),)),
    "sums of its rows": (lambda x: (x.cumsum(1), x.sum(1), x.cumsum(1).amax(1), x.cumsum(1).argmax(1)), (rows(9, 100),)),
    "its distance from the mean": (lambda x: x.cumsum(1) - x.mean(1, keepdim=True), (rows(9, 100),)),
    "a bias": (lambda x, b, c: (x + b).cumsum(1) * b + c, (rows(9, 100), rows(100), rows(9, 1))),
    "a mask": (lambda m: (m.cumsum(1) - 1).masked_fill(~m, 0), (rows(9, 100) > 0,)),
    "exclusive sums": (lambda x: x.cumsum(1) - x, (rows(9, 100),)),
    "turned around before": (lambda x: x.flip(1).cumsum(1), (rows(9, 100),)),
    "rows that are gathered": (lambda x, i: x[i].cumsum(1), (rows(9, 100), torch.tensor([3, 8, 0, 3, -1]))),
    "all dimensions as one": (lambda x: (x * 2).flatten().cumsum(0), (rows(5, 6, 7),)),
    "some dimensions as one": (lambda x, y: ((x * 2).flatten(1).cumsum(1).view(5, 6, 7) + y), (rows(5, 6, 7), rows(6, 1))),
    "dimensions as one in another order": (lambda x: (x * 2).permute(2, 1, 0).reshape(7, 30).cumsum(1), (rows(5, 6, 7),)),
    "a transposed result": (lambda x: x.cumsum(1).t() * 2, (rows(9, 100),)),
    "ones": (lambda x: torch.ones_like(x).cumsum(1) + x, (rows(9, 100),)),
    "a place in a head": (lambda x: x.view(4, 25, 9).transpose(0, 1).cumsum(1), (rows(100, 9),)),
    "the only place of another dimension, rolled": (lambda x: x.cumsum(1).roll(1, 2) * 2, (rows(1, 5, 1),)),
    "the only place of another dimension, picked": (
        lambda x, i: x.cumprod(-2).index_select(2, i) * 2, (rows(1, 5, 1), torch.tensor(0))),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_what_one_kernel_computes(name: str, dynamic: bool) -> None:
    function, inputs = FUSED[name]
    with torch.no_grad():
        alone(function, *inputs, dynamic=dynamic)


APART: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], RefusalKind]] = {
    "turned around": (lambda x: x.cumsum(1).flip(1), (rows(9, 100),), RefusalKind.FIXED_INDEX),
    "moved on": (lambda x: torch.cat([x[:, :1], x.cumsum(1)[:, :-1]], 1), (rows(9, 100),), RefusalKind.FIXED_INDEX),
    "beside its transpose": (lambda x: (y := x.cumsum(1)) + y.t(), (rows(40, 40),), RefusalKind.READ_ELSEWHERE),
    "along both dimensions": (lambda x: x.cumsum(1).cumsum(0), (rows(9, 100),), RefusalKind.SCANNED_APART),
    "in two orders": (lambda x: (x.flatten().cumsum(0), x.t().flatten().cumsum(0)), (rows(9, 100),), RefusalKind.SCANNED_APART),
    "and the sums of what it runs along": (lambda x: (y := x.cumsum(0), y.sum(1)), (rows(90, 100),), RefusalKind.SCANNED_ACROSS),
    "and all of it summed up": (lambda x: (y := x.cumsum(1), y.sum()), (rows(9, 100),), RefusalKind.DIFFERENT_REDUCTIONS),
    "fewer rows": (lambda x, y: x.cumsum(0) + y, (rows(100), rows(9, 100)), RefusalKind.FEWER_ROWS),
}


@pytest.mark.parametrize("name", APART)
def test_what_two_kernels_compute(name: str) -> None:
    function, inputs, kind = APART[name]
    graphs = check(function, *inputs, executors="triton")
    loops = sum(len(region.nests) or 1 for graph in graphs for region in graph.plan.regions)
    assert loops == 2 and not eager_ops(graphs)
    assert kind in refusals(graphs), refusals(graphs)


def test_an_input_is_overwritten_by_its_own_sums() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(x.cumsum(1))
        y.add_(y.cumsum(0))
        return x * 2

    check(function, rows(9, 100), rows(100, 9), executors="triton")
    check(function, rows(2, 20000), rows(2500, 9), executors="triton")


# Classes of kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "shape", "expected"), [
    (lambda x: x.cumsum(1) * 2, (3, 16384), ["persistent"]),
    (lambda x: x.cumsum(1) * 2, (3, 16385), ["looped"]),
    (lambda x: x.cumsum(1).softmax(1), (3, 20001), ["looped"]),
    (lambda x: x.cumsum(1).var(1), (3, 40001), ["looped"]),
    (lambda x: torch.logcumsumexp(x, 1), (3, 8200), ["looped"]),
    (lambda x: x.cumsum(0) * 2, (2049, 70), ["looped"]),
    (lambda x: (y := x.cumsum(1), y.sum(0)), (4096, 512), ["rowcol"]),
], ids=range(7))
def test_classes(function: Callable[..., Any], shape: tuple[int, ...], expected: list[str]) -> None:
    """Rows of 0, ±1/8, …: sums of them are exact, in whatever order."""
    x = (rows(*shape) * 8).round() / 8
    assert classes(alone(function, x, device="h200")) == expected


def test_a_row_is_never_split() -> None:
    """Few long rows: eager's kernel for one row runs on the whole device, ours on a single processor."""
    with recorded() as graphs:
        compiled(lambda x: x.cumsum(0), executors="triton", device="h200")(rows(1 << 20))
    (graph,) = graphs
    (facts,) = (facts for node, facts in graph.plan.annotated.facts.items() if node.op == "call_function")
    assert facts.role == "eager" and facts.reason.startswith("cheaper eager")


@pytest.mark.parametrize("dim", [0, 1])
def test_dynamic_sizes(dim: int) -> None:
    torch._dynamo.reset()
    with recorded() as graphs:
        function = compiled(lambda x: torch.cumsum(x * 2, dim).softmax(dim) + x, executors="triton", dynamic=True)
        for shape in ((9, 100), (17, 5), (37, 518)):  # tiles have 16 rows or 128 columns
            x = rows(*shape)
            torch.testing.assert_close(function(x), torch.cumsum(x * 2, dim).softmax(dim) + x)
    assert len(graphs) == 1 and regions(graphs) == 1


def test_sizes_of_a_class_share_a_kernel() -> None:
    keys = set()
    for count in (33, 47, 63):
        graphs = alone(lambda x: x.cumsum(1) * 2, rows(count, 70), size_classes=True)
        keys |= {bound.key for bound in graphs[0].bounds.values()}
    assert len(keys) == 1


def test_a_value_is_known_only_where_its_kernel_walks() -> None:
    """The planner keeps such readers apart; a spec that has one is refused."""
    (graph,) = alone(lambda x: x.cumsum(0) * 2, rows(12))
    (bound,) = graph.bounds.values()
    spec = bound.spec
    turned = spec.ops[1].__class__("aten.flip.default", (("self", spec.ops[1].args[0][1]), ("dims", (0,))), spec.ops[1].shape, spec.ops[1].dtype)
    wrong = spec.__class__(spec.inputs, (spec.ops[0], turned), spec.axes, (), tuple(Store(1, s.layout, s.dims) for s in spec.stores), (), scans=spec.scans)
    with pytest.raises(LoweringError, match="needed elsewhere than its kernel walks"):
        lower(wrong)
