"""Reductions whose rows are split over programs, and that end in the same launch: the last program combines what all have left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynafuse.ir import ARRIVED, Lowered
from dynafuse.lowering.triton import combine, counters
from dynafuse.lowering.triton.counters import Counters, counters_on
from dynafuse.lowering.triton.launch import Captured
from dynafuse.partition.kernel_class import SMALL_SPLIT
from tests.support import representative
from tests.support.differential import compiled
from tests.support.representative import F32, Case

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "all": (lambda x: x.square().sum(), ((300, 4000),)),
    "rows": (lambda x: (x.sum(1), x.amax(1) + 1), ((3, 20_000),)),
    "columns": (lambda x, b: (x * b).sum(0) - b, ((3000, 200), (200,))),
    "ragged columns": (lambda x: x.mean(0), ((2501, 29),)),
    "variances": (lambda x: torch.var_mean(x, (0, 2)), ((8, 40, 900),)),
    "positions": (lambda x: x.argmax(1), ((2, 30_000),)),
    "logical": (lambda x: (x > 3).any(0), ((2048, 24),)),
    "stored on the way": (lambda x, b: ((y := torch.tanh(x + b)), y.sum(0)), ((2100, 96), (96,))),
}


def inputs(shapes: tuple[tuple[int, ...], ...], device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def lowered(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Lowered:
    (bound,) = representative.bounds_of(Case(fn, tuple((shape, F32) for shape in shapes)))
    return representative.lower(bound.code)


@pytest.mark.parametrize("name", CASES)
def test_one_launch_gives_what_eager_gives_call_after_call(name: str) -> None:
    function, shapes = CASES[name]
    kernels = lowered(function, *shapes)
    assert kernels.schedule_class == "split" and len(kernels.launches) == 1
    assert kernels.launches[0].signature[-1] == (ARRIVED, "*i32")
    call, given = compiled(function, executors="triton", device="h200"), inputs(shapes)
    exact = function(*(x.double() for x in given))
    for _ in range(3):
        torch.testing.assert_close(call(*given), exact, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_kernels_of_more_work_have_a_second_one() -> None:
    assert [len(lowered(lambda x: x.sum(1), (4, times * SMALL_SPLIT // 4)).launches) for times in (1, 2)] == [1, 2]


def test_running_statistics_are_updated_by_the_last_program() -> None:
    def function(x: Tensor, running: Tensor) -> Tensor:
        mean = x.mean((0, 2))
        running.mul_(0.9).add_(mean, alpha=0.1)
        return mean

    x, running = inputs(((16, 40, 900), (40,)))
    expected = running.clone()
    call = compiled(function, executors="triton", device="h200")
    for _ in range(2):
        torch.testing.assert_close(call(x, running), function(x, expected))
        torch.testing.assert_close(running, expected)


def test_what_programs_read_is_overwritten_by_a_second_kernel() -> None:
    def function(x: Tensor, vector: Tensor) -> None:
        vector.copy_((x + vector).sum(0))

    assert len(lowered(function, (2501, 29), (29,)).launches) == 2
    x, vector = inputs(((2501, 29), (29,)))
    expected = vector.clone()
    function(x, expected)
    compiled(function, executors="triton", device="h200")(x, vector)
    torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-3)


# The counters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Counters:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return Counters(torch.device("cpu"))


def test_launches_of_a_stream_share_counters_and_those_of_others_do_not(cpu: Counters) -> None:
    first, again, other = cpu(7, 3), cpu(7, combine.MOST_COUNTERS), cpu(8, 3)
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    assert len(first) >= combine.MOST_COUNTERS and not first.any() and not other.any()


def test_each_captured_launch_has_counters_of_its_own(cpu: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "FOR_CAPTURED", 10)
    assert not cpu(Captured(7), 4).any(), "before there are any"
    cpu(7, 1)
    found = [cpu(Captured(7), 4) for _ in range(3)]  # the last one does not fit
    places = {place for taken in (*found, cpu(7, 1)) for place in range(taken.data_ptr(), taken.data_ptr() + 16, 4)}
    assert len(places) == 4 * 4 and not any(taken.any() for taken in found)


def test_counters_that_last_are_allocated_by_another_thread(cpu: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one's allocations may go to a pool whose owner expects them back."""
    threads = set()
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: (threads.add(threading.get_ident()), zeros(*args, **kwargs))[1])
    cpu(7, 1)
    assert threads and threading.get_ident() not in threads


def test_a_launch_that_raises_in_the_interpreter_leaves_no_counters() -> None:
    found = counters_on(None)
    taken = found(None, 4)
    taken += 1
    assert not found(None, 4).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_counters_are_zero_again_after_each_launch(name: str) -> None:
    function, shapes = CASES[name]
    call, given = compiled(function, executors="triton", capture="never"), inputs(shapes, "cuda")
    exact = function(*(x.double() for x in given))
    for _ in range(200):
        found = call(*given)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4, check_dtype=False)
    stream = torch.cuda.current_stream().cuda_stream
    assert not counters_on(torch.cuda.current_device())(stream, 1).any()


@pytest.mark.gpu
def test_graphs_that_are_replayed_at_once_do_not_meet() -> None:
    """Two recordings of one kernel on two streams, replayed again and again, beside launches on a third."""
    def function(x: Tensor) -> Tensor:
        return x.sum(0)

    call = compiled(function, executors="triton", capture="never")
    given = [torch.randn(2048, 1024, device="cuda") for _ in range(3)]
    expected = [function(x.double()) for x in given]
    for x in given:
        call(x)
    torch.cuda.synchronize()
    recorded = []
    for x in given[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(x)
        recorded.append((graph, out, torch.cuda.Stream()))
    for _ in range(300):
        for graph, out, stream in recorded:
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                graph.replay()
        third = call(given[2])
    torch.cuda.synchronize()
    found = [*(out for _, out, _ in recorded), third]
    for result, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-3, check_dtype=False)


@pytest.mark.gpu
def test_results_are_the_same_bits_whoever_is_last() -> None:
    function, shapes = CASES["variances"]
    call, given = compiled(function, executors="triton", capture="never"), inputs(shapes, "cuda")
    first = [result.clone() for result in call(*given)]
    for _ in range(100):
        assert all(torch.equal(result, before) for result, before in zip(call(*given), first, strict=True))



def test_means_and_sums_of_columns_share_states_beside_sums_of_rows() -> None:
    """Each program leaves one state for both, and the second kernel knows."""
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return ((x * y).sum(1), x.sum(0), x.mean(0), y.sum(0), y.amax(0))

    shapes = ((4096, 256), (4096, 256))
    kernels = lowered(sums, *shapes)
    assert kernels.schedule_class == "rowcol" and len(kernels.workspaces) == 3
    given = inputs(shapes)
    exact = sums(*(x.double() for x in given))
    torch.testing.assert_close(compiled(sums, executors="triton", device="h200")(*given), exact, rtol=1e-4, atol=1e-4,
                               check_dtype=False)
