"""Attention that is written out, run by torch's: what comes out is what eager computes, or nearer to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse import backend, explain
from tests.support.differential import check, compiled, recorded

B, H, N, D = 2, 3, 130, 64
CHEAP: dict[str, Any] = {"cost": {"contraction_tflops": 1e4}}
"""Constants by which products take no time, so that the matrix of scores alone counts."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def operands(device: str, dtype: torch.dtype = torch.bfloat16, keys: int = N) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = (torch.randn(B, rows, H * D, device=device).to(dtype).requires_grad_() for rows in (N, keys, keys))
    q, k, v = made
    return q, k, v


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], H, D).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
    scores = change(heads(q) @ heads(k).transpose(-1, -2) / D**0.5)
    return (F.softmax(scores, dim=-1) @ heads(v)).transpose(1, 2).reshape(B, q.shape[1], H * D)


def joined(graphs: list[backend.Compiled]) -> int:
    """How many calls of an attention of torch's the first graph has."""
    return sum("_scaled_dot_product" in str(node.target) for node in graphs[0].plan.annotated.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_plain(dtype: torch.dtype, dynamic: bool, device: str) -> None:
    assert joined(check(attend, *operands(device, dtype), dynamic=dynamic, **CHEAP)) == 1


def test_other_number_of_keys(device: str) -> None:
    assert joined(check(attend, *operands(device, keys=77), **CHEAP)) == 1


def bias(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, H, N, N), (B, 1, 1, N), (N, N), (B, H, 1, N)])
def test_bias(shape: tuple[int, ...], device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attend(q, k, v, lambda scores: scores + bias)

    assert joined(check(function, *operands(device), bias(device, *shape), **CHEAP)) == 1


FILLS = [-1e9, -10000.0, torch.finfo(torch.bfloat16).min]


def half_masked(device: str) -> Tensor:
    """Which keys to leave out: the first batch loses the last third of them, the second all."""
    mask = torch.zeros(B, 1, 1, N, dtype=torch.bool, device=device)
    mask[0, ..., 2 * N // 3:] = True
    mask[1] = True
    return mask


@pytest.mark.parametrize("fill", FILLS)
def test_queries_that_are_left_no_key(fill: float, device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, lambda scores: scores.masked_fill(mask, fill))

    assert joined(check(function, *operands(device), half_masked(device), **CHEAP)) == 1


def test_infinite_masks_make_nan_of_queries_that_are_left_no_key(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, lambda scores: scores.masked_fill(mask, float("-inf")))

    assert joined(check(function, *(x.detach() for x in operands(device)), half_masked(device), **CHEAP)) == 1


def test_a_mask_that_is_added(device: str) -> None:
    added = half_masked(device).to(torch.bfloat16) * torch.finfo(torch.bfloat16).min

    def function(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
        return attend(q, k, v, lambda scores: scores + added)

    assert joined(check(function, *operands(device), added, grad=False, precise=False, **CHEAP)) == 1


def test_infinite_masks_make_no_nan_where_a_row_keeps_something(device: str) -> None:
    mask = half_masked(device)[:1].expand(B, 1, 1, N)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, lambda scores: scores.masked_fill(mask, float("-inf")))

    assert joined(check(function, *operands(device), mask, **CHEAP)) == 1


def test_a_floor_keeps_infinite_masks_from_making_nan(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        low = torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device)
        return attend(q, k, v, lambda scores: torch.max(scores.masked_fill(mask, float("-inf")), low))

    inputs = (x.detach() for x in operands(device))
    assert joined(check(function, *inputs, half_masked(device), **CHEAP)) == 1


def test_the_triangle(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(N, N, dtype=torch.bool, device=q.device).triu(1)
        return attend(q, k, v, lambda scores: scores.masked_fill(later, float("-inf")))

    graphs = check(function, *operands(device), **CHEAP)
    assert joined(graphs) == 1
    (call,) = [n for n in graphs[0].plan.annotated.graph.nodes if "_scaled_dot_product" in str(n.target)]
    assert True in call.args or call.kwargs.get("is_causal")


def test_nan_and_infinity_go_where_they_go_in_eager(device: str) -> None:
    q, k, v = (x.detach() for x in operands(device))
    q[0, 3, 5] = float("nan")
    v[1, :, 7] = float("inf")
    assert joined(check(attend, q, k, v, **CHEAP)) == 1


def test_float32_in_between(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = heads(q.float()) @ heads(k.float()).transpose(-1, -2) / 8
        return (scores.softmax(-1).to(v.dtype) @ heads(v)).transpose(1, 2).reshape(B, N, -1)

    assert joined(check(function, *operands(device), **CHEAP)) == 1


def test_einsum(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(B, N, H, D) for x in (q, k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(B, N, H * D)

    assert joined(check(function, *operands(device), **CHEAP)) == 1


def test_under_autocast(device: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=q.dtype is torch.float32):
            return attend(F.linear(q, weight), F.linear(k, weight), F.linear(v, weight)).to(q.dtype)

    inputs = [x.detach().float() for x in (*operands(device), torch.randn(H * D, H * D, device=device) / D**0.5)]
    torch._dynamo.reset()
    with recorded() as graphs:
        found = compiled(function, **CHEAP)(*inputs)
    assert joined(graphs) == 1
    truth = function(*(x.double() for x in inputs))
    ours, eager = ((result.double() - truth).square().mean() for result in (found, function(*inputs)))
    assert ours <= eager


@pytest.mark.parametrize("options", [{"join_attention": False}, {"force": {"*": "eager"}}])
def test_what_turns_it_off(options: dict[str, Any], device: str) -> None:
    assert joined(check(attend, *operands(device), **CHEAP, **options)) == 0


def test_deterministic_algorithms_turn_it_off(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        assert joined(check(attend, *operands(device), **CHEAP)) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_report_says_why(device: str) -> None:
    text = " ".join(str(explain(attend, *operands(device), options=CHEAP)).split())
    assert "attention that is written out: " in text and "µs, gradient included, by " in text


def test_scores_are_not_kept_for_the_gradient(device: str) -> None:
    kept: list[int] = []
    q, k, v = operands(device)
    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        compiled(attend, **CHEAP)(q, k, v)
    assert kept and max(kept) < B * H * N * N
