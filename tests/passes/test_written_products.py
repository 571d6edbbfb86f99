"""Products that are written out: which the library computes, in which layouts, and which stay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynafuse import backend, explain, force_backend
from dynafuse.passes import written_products
from tests.support.differential import check, compiled

aten = torch.ops.aten
Function = Callable[[Tensor, Tensor], Tensor]

CASES: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "rows and columns": (lambda a, b: (a[:, None] * b[None]).sum(-1), (160, 96), (192, 96)),
    "columns first": (lambda a, b: (a[None] * b[:, None]).sum(-1), (160, 96), (192, 96)),
    "batches": (lambda a, b: (a[:, :, None] * b[:, None]).sum(-1), (3, 128, 64), (3, 192, 64)),
    "batches behind rows": (lambda a, b: (a[:, None] * b[None]).sum(-1), (128, 3, 64), (192, 3, 64)),
    "inner dimension first": (lambda a, b: (a[:, :, None] * b[:, None]).sum(0), (96, 160), (96, 192)),
    "two inner dimensions": (lambda a, b: (a[:, None] * b[None]).sum((2, 3)), (160, 8, 16), (192, 8, 16)),
    "two of each": (lambda a, b: (a[:, :, None, None] * b[None, None]).sum(-1), (16, 12, 64), (8, 24, 64)),
    "kept": (lambda a, b: (a[:, None] * b[None]).sum(-1, keepdim=True), (160, 96), (192, 96)),
    "spread by hand": (lambda a, b: (a[:, None].expand(-1, 192, -1) * b.expand(160, -1, -1)).sum(-1), (160, 96), (192, 96)),
    "attention over chunks": (
        lambda a, b: (a[:, :, :, None] * b[:, :, None]).sum(-1), (2, 3, 64, 4, 32), (2, 3, 96, 4, 32)),
}


LIBRARY = (aten.bmm.default, aten.mm.default)
SLOW = {"device": "h200", "cost": {"flops_tflops": 0.001}}
"""Options with which a kernel computes so slowly that the library is faster at any size."""


def tensors(*sizes: tuple[int, ...], grad: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size, dtype=dtype).requires_grad_(grad) for size in sizes]


def products(graphs: list[backend.Compiled], kind: str) -> int:
    nodes = (node for graph in graphs if graph.kind == kind for node in graph.plan.annotated.graph.nodes)
    return sum(node.target in LIBRARY for node in nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_library_computes_it(name: str, dtype: torch.dtype) -> None:
    function, *sizes = CASES[name]
    graphs = check(function, *tensors(*sizes, dtype=dtype), grad=False, **SLOW)
    assert products(graphs, "inference") == 1


@pytest.mark.parametrize("name", CASES)
def test_the_library_computes_its_gradients(name: str) -> None:
    function, *sizes = CASES[name]
    graphs = check(function, *tensors(*sizes, grad=True), **SLOW)
    assert (products(graphs, "forward"), products(graphs, "backward")) == (1, 2)


def test_operands_may_lie_in_any_way() -> None:
    function, left, right = CASES["attention over chunks"]
    a, b = tensors(left, right)
    for order in list(itertools.permutations(range(5)))[::7]:
        moved = [x.permute(order).contiguous().permute([order.index(dim) for dim in range(5)]) for x in (a, b)]
        assert products(check(function, *moved, grad=False, **SLOW), "inference") == 1


def test_nan_and_inf_are_where_they_are_in_eager() -> None:
    function, *sizes = CASES["batches"]
    a, b = tensors(*sizes)
    a[0, 3, 5], a[1, 2, 7], b[1, 4, 7], b[2, 0, 0] = math.nan, math.inf, 0.0, -math.inf
    assert products(check(function, a, b, grad=False, **SLOW), "inference") == 1


STAYS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "terms are read elsewhere": (lambda a, b: (lambda t: t.sum(-1) + t[..., 0])(a[:, None] * b[None]), (16, 8), (12, 8)),
    "one operand alone is summed": (lambda a, b: (a[:, None] * b[None]).sum((0, 2)), (16, 8), (12, 8)),
    "a matrix and a vector": (lambda a, b: (a * b).sum(-1), (16, 8), (8,)),
    "matrices of one size": (lambda a, b: (a * b).sum(-1), (16, 8), (16, 8)),
    "nothing is summed": (lambda a, b: (a[:, None] * b[None]).sum(-1), (16, 1), (12, 1)),
    "nothing is there": (lambda a, b: (a[:, None] * b[None]).sum(-1), (0, 8), (12, 8)),
    "a wider sum": (lambda a, b: (a[:, None] * b[None]).sum(-1, dtype=torch.float64), (16, 8), (12, 8)),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_is_no_product_stays(name: str) -> None:
    function, *sizes = STAYS[name]
    assert not products(check(function, *tensors(*sizes), grad=False, **SLOW), "inference")


def test_the_report_says_why() -> None:
    text = str(explain(CASES["rows and columns"][0], *tensors((512, 512), (512, 512)), device="h200"))
    assert "instead of a sum of 134217728 products that is written out" in text


def test_dynamic_sizes_stay() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, None] * b[None]).sum(-1) + (a * b.shape[0]).sum(-1, keepdim=True)

    assert not products(check(function, *tensors((16, 8), (12, 8)), grad=False, dynamic=True, **SLOW), "inference")


def test_it_stays_where_a_kernel_is_predicted_to_be_faster() -> None:
    function = CASES["rows and columns"][0]
    assert not products(check(function, *tensors((16, 8), (12, 8)), grad=False, device="h200"), "inference")
    large = compiled(function, device="h200")
    graphs: list[backend.Compiled] = []
    with backend.listening(graphs.append, plan_only=True):
        large(*tensors((512, 512), (512, 512)))
    assert products(graphs, "inference") == 1


def test_the_user_can_keep_it() -> None:
    function, *sizes = CASES["rows and columns"]
    assert not products(check(function, *tensors(*sizes), grad=False, **SLOW, join_products=False), "inference")
    forced = force_backend("eager")(lambda a, b: function(a, b))
    assert not products(check(forced, *tensors(*sizes), grad=False, **SLOW), "inference")


def test_float32_does_not_become_tensorfloat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_products, "uses_tf32", lambda: True)
    function, *sizes = CASES["rows and columns"]
    assert not products(check(function, *tensors(*sizes), grad=False, **SLOW), "inference")
    assert products(check(function, *tensors(*sizes, dtype=torch.bfloat16), grad=False, **SLOW), "inference") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_computes_it_on_a_gpu(dtype: torch.dtype) -> None:
    def chunks(a: Tensor, b: Tensor) -> Tensor:
        return (a[:, :, :, None] * b[:, :, None]).sum(-1)

    a, b = (torch.randn(2, 4, 128, 16, 128, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    graphs = check(chunks, a, b)
    assert (products(graphs, "forward"), products(graphs, "backward")) == (1, 2)
