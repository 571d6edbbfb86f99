"""Graphs with dynamic sizes that are compiled once more for sizes that keep coming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import dynafuse
from tests.support.differential import compare, compiled, copies, run
from tests.support.graphs import recorded

WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def block(x: Tensor, weight: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Views by size, masks, reductions over a dynamic dimension, a matrix product, and a number."""
    batch, length, _ = x.shape
    heads = (x @ weight).view(batch, length, 2, 8).transpose(1, 2)
    scores = (heads @ heads.transpose(-1, -2)).masked_fill(~mask[:length, :length], float("-inf")).softmax(-1)
    out = (scores @ heads).transpose(1, 2).reshape(batch, length, 16)
    return F.layer_norm(out + x, (16,)), x.mean(1), out.sum()


def given(batch: int, length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(length)
    return torch.randn(batch, length, 16, requires_grad=True), WEIGHT, torch.ones(64, 64, dtype=torch.bool).tril()


def fixed(graphs: Sequence[Any]) -> int:
    """How many graphs have no symbol as a size of a region."""
    return sum(all(isinstance(axis.size, int) for region in graph.plan.regions for axis in region.axes) for graph in graphs)


def checked(function: Callable[..., Any], call: Callable[..., Any], build: Callable[[], Any]) -> None:
    compare(run(call, copies(build())), run(function, copies(build())), run(function, copies(build(), torch.float64)))


def test_forward_and_backward_are_right_before_and_after() -> None:
    counters.clear()
    call = compiled(block, dynamic=True, specialize_after=3)
    with recorded() as graphs:
        for length in (7, 7, 7, 7, 9, 7, 9, 9, 9, 9, 5):
            checked(block, call, lambda length=length: given(3, length))
    assert counters["stats"]["unique_graphs"] == 1, "Dynamo has compiled again"
    assert len(graphs) == 6 and fixed(graphs) == 4, "forward and backward: of any sizes, and of two"


def test_a_backward_may_be_run_after_later_forwards() -> None:
    """Each call's backward belongs to it, whichever function that was."""
    call = compiled(lambda x, y: ((x * y).softmax(-1) * y).sum(1), dynamic=True)
    x, y = torch.randn(5, 12, requires_grad=True), torch.randn(5, 12)
    results = [call(x, y) for _ in range(4)]
    gradients = [torch.autograd.grad(result.sum(), x)[0] for result in results]
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_inputs_are_overwritten_once_per_call() -> None:
    def step(x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.sum(0))
        return total * 2

    call, total, expected = compiled(step, dynamic=True), torch.zeros(8), torch.zeros(8)
    for _ in range(5):
        x = torch.randn(6, 8)
        torch.testing.assert_close(call(x, total), step(x, expected))
        torch.testing.assert_close(total, expected)


def test_dropout_draws_new_numbers() -> None:
    call = compiled(lambda x: F.dropout(x, 0.5), dynamic=True)
    x = torch.ones(16, 33)
    results = [call(x) for _ in range(5)]
    assert len({tuple(result.flatten().tolist()) for result in results}) == 5


@pytest.mark.parametrize("width", [7, 32, 33])
@pytest.mark.parametrize("function", [lambda x: F.dropout(x.exp(), 0.5), lambda x: F.dropout(x.t().softmax(-1), 0.5) * x.t(),
                                      lambda x: F.dropout(torch.cat([x, x], 1), 0.5)], ids=["rows", "columns", "pieces"])
def test_a_backward_drops_what_its_forward_has(function: Callable[[Tensor], Tensor], width: int) -> None:
    """Of any size, and of those that are compiled for: where four neighbours share random words, and where they do not."""
    call = compiled(function, dynamic=True, specialize_after=3)
    for rows in (5, 8, 8, 8, 8, 9):
        weight = torch.rand(rows, width) + 0.5
        outer = torch.zeros(rows, width, requires_grad=True)
        result = call(torch.ones(rows, width) + outer * weight)
        dropped = result == 0
        assert 0 < int(dropped.sum()) < dropped.numel()
        kept = torch.autograd.grad(torch.where(dropped, result, 0).sum(), outer, retain_graph=True)[0]
        assert not kept.any(), "what was dropped has no gradient"
        moved = torch.autograd.grad(result.sum(), outer)[0]
        assert moved.any()


def test_parameters_and_states_of_a_module() -> None:
    """Running statistics move once per call, and weights that change between calls are read anew."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    twin = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    twin.load_state_dict(model.state_dict())
    call = compiled(model, dynamic=True)
    for _ in range(5):
        x = torch.randn(9, 12)
        for module, forward in ((model, call), (twin, twin)):
            loss = forward(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


def test_without_gradients_and_with() -> None:
    call = compiled(block, dynamic=True)
    for _ in range(4):
        with torch.no_grad():
            torch.testing.assert_close(call(*given(2, 11)), block(*given(2, 11)))
        checked(block, call, lambda: given(2, 11))


def test_sizes_that_grow_are_compiled_once() -> None:
    call = compiled(block, dynamic=True, specialize_after=3)
    with recorded() as graphs, torch.no_grad():
        for length in range(3, 30):
            call(*given(2, length))
    assert len(graphs) == 1


def test_the_report_names_the_sizes() -> None:
    dynafuse.process_report()  # which watches from its first import on
    torch.compiler.reset()
    call = compiled(block, dynamic=True, specialize_after=3)
    with torch.no_grad():
        for _ in range(3):
            call(*given(2, 7))
    graphs = dynafuse.process_report().graphs
    assert [graph.to_dict()["sizes"] for graph in graphs] == [[], [2, 7, 64]]
    assert [graph.title for graph in graphs] == ["inference", "inference, for sizes of 2, 7, 64 alone"]


def test_the_option_turns_it_off() -> None:
    call = compiled(block, dynamic=True, specialize_after=0)
    with recorded() as graphs, torch.no_grad():
        for _ in range(6):
            call(*given(2, 7))
    assert len(graphs) == 1 and fixed(graphs) == 0


def test_transforms_inside() -> None:
    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(lambda w: F.layer_norm(x, x.shape[1:], w).square().sum() / x.shape[0])(weight)

    call = compiled(gradient, dynamic=True, specialize_after=3)
    with recorded() as graphs:
        for _ in range(4):
            x, weight = torch.randn(6, 9), torch.randn(9)
            torch.testing.assert_close(call(x, weight), gradient(x, weight), rtol=1e-4, atol=1e-4)
    assert fixed(graphs) == len(graphs) // 2 > 0


def test_numbers_that_are_arguments_may_change() -> None:
    """Dynamo hands over a float of a module, or of a call, as a tensor of its own."""
    call = compiled(lambda x, scale: (x * scale).softmax(0) + scale, dynamic=True, specialize_after=3)
    with recorded() as graphs:
        for scale in (0.5, 0.25, float("inf"), 0.125, -2.5):
            x = torch.randn(6, 9)
            torch.testing.assert_close(call(x, scale), (x * scale).softmax(0) + scale, equal_nan=True)
    assert len(graphs) == 2 and fixed(graphs) == 1


def test_threads_call_it_at_once() -> None:
    call = compiled(block, dynamic=True, specialize_after=2)
    with torch.no_grad():
        call(*given(2, 5))
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda length: (length, call(*given_apart(length))), [7, 7, 9, 7, 9, 9, 7, 9] * 2))
        for length, result in results:
            torch.testing.assert_close(result, block(*given_apart(length)))


def given_apart(length: int) -> tuple[Tensor, ...]:
    """The same without the generator that threads share."""
    return torch.linspace(-1, 1, 2 * length * 16).view(2, length, 16), WEIGHT, torch.ones(64, 64, dtype=torch.bool).tril()


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)],
                         ids=["inference", "autocast"])
def test_modes_of_the_caller(context: Callable[[], Any]) -> None:
    call = compiled(block, dynamic=True, specialize_after=3)
    with context(), recorded() as graphs:
        for _ in range(4):
            arguments = given(2, 13)
            for mine, expected in zip(call(*arguments), block(*arguments), strict=True):
                assert mine.dtype is expected.dtype
                torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)
    assert fixed(graphs) == len(graphs) // 2 > 0
