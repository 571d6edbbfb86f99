"""Captured kernels that begin while the one before runs: what the driver is asked for, and that results are the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from dynafuse.lowering.triton import dependent, launch
from dynafuse.lowering.triton.dependent import dependent_launcher, prologue
from dynafuse.lowering.triton.launch import Captured, stream_of
from tests.lowering.triton.test_launch import LAUNCH, Api, api, kernel
from tests.support.differential import compiled

__all__ = ["api"]


class Driver(SimpleNamespace):
    """The driver, without a GPU: keeps what it is asked to launch."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUlaunchConfig, CUstream, CUfunction = SimpleNamespace, int, int

    def __init__(self, answer: Any = 0) -> None:
        super().__init__(launched=[], answer=answer)

    @staticmethod
    def CUlaunchAttribute() -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, config: Any, function: int, params: Any, extra: int) -> tuple[Any]:
        self.launched.append((config, function, *params))
        return self.answer,


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(dependent, "_driver", lambda: made)
    return made


def test_a_captured_launch_may_begin_early(api: Api, driver: Driver) -> None:
    (run,) = kernel(arch=90, global_scratch_size=0).bound(0)
    tensor = torch.empty(4)
    run(Captured(77), 4, 2, 1, tensor, tensor, 5)
    ((config, function, values, kinds),) = driver.launched
    assert (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX) == (4, 2, 1, 256)
    assert (config.sharedMemBytes, config.hStream, function, config.numAttrs) == (512, 77, 1000, 1)
    assert config.attrs[0].id == 6 and config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert values == (tensor.data_ptr(), tensor.data_ptr(), 5, 0)
    assert kinds == (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    assert not api.launched


@pytest.mark.parametrize(("arch", "stream", "programs"), [(90, 77, 4), (80, Captured(77), 4), (90, Captured(77), 513)])
def test_others_wait_for_the_one_before(api: Api, driver: Driver, arch: int, stream: int, programs: int) -> None:
    (run,) = kernel(arch=arch).bound(0)
    run(stream, programs, 1, 1, "in", "out", 5)
    assert len(api.launched) == 1 and not driver.launched


def test_without_the_driver_s_functions(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent, "_driver", lambda: None)
    (run,) = kernel(arch=90).bound(0)
    run(Captured(77), 4, 1, 1, "in", "out", 5)
    assert len(api.launched) == 1


def test_what_the_driver_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent, "_driver", lambda: Driver(SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")))
    run = dependent_launcher(1000, LAUNCH, 0, 0)
    assert run is not None
    with pytest.raises(RuntimeError, match="k could not be launched: CUDA_ERROR_INVALID_VALUE"):
        run(77, 1, 1, 1, 0, 0, 5)


@pytest.mark.parametrize("captured", [False, True])
def test_streams_know_whether_they_are_captured(monkeypatch: pytest.MonkeyPatch, captured: bool) -> None:
    monkeypatch.setattr(launch, "raw_stream", lambda device: 70 + device)
    monkeypatch.setattr(launch, "is_captured", lambda: captured)
    assert stream_of(1) == 71 and (type(stream_of(1)) is Captured) == captured


WAIT, LET = "if WAITS:\n    gdc_wait()\n", "    gdc_launch_dependents()\n"
FEW = "if WAITS and tl.num_programs(0) * tl.num_programs(1) <= 512:\n    gdc_wait()\n"
ROWS = sympy.Symbol("s0", integer=True, nonnegative=True)


@pytest.mark.parametrize(("programs", "points", "expected"), [
    (512, 2048, WAIT + LET), (512, 2049, WAIT), (4, None, WAIT), (513, 1, ""),
    (ROWS, 4096, FEW + "    if tl.num_programs(0) * tl.num_programs(1) <= 256:\n        gdc_launch_dependents()\n"),
    (ROWS, None, FEW)])
def test_what_a_kernel_does_first(programs: Any, points: int | None, expected: str) -> None:
    assert "".join(f"{line}\n" for line in prologue(programs, points)) == expected


# On a GPU ---------------------------------------------------------------------------------------------------------------


def rows(x: Tensor) -> Tensor:
    """Some dependent kernels: each reads what the one before wrote, at other places."""
    for dim in (0, 1, 0, 1):
        x = (x - x.amax(dim, keepdim=True)).exp().cumsum(dim).flip(1 - dim)
        x = x / x.sum()
    return x


def after_a_fill(x: Tensor) -> Tensor:
    return rows(x + torch.zeros_like(x).fill_diagonal_(1))


def around_products(x: Tensor) -> Tensor:
    return (rows(x) @ x).relu().sum(0) + rows(x @ x).sum(0)


CHAINS: list[Callable[[Tensor], Tensor]] = [rows, after_a_fill, around_products]


def programmatic_edges(graph: torch.cuda.CUDAGraph) -> int:
    """How many kernels of a captured graph may begin while the one before them runs."""
    from cuda.bindings import driver

    raw = driver.CUgraph(graph.raw_cuda_graph())
    ask = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    count = ask(raw, 0)[-1]
    edges = ask(raw, count)[3]
    return sum(edge.type == driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value for edge in edges)


@pytest.mark.gpu
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
@pytest.mark.parametrize("joined", [False, True])
def test_captured_kernels_give_the_same_bits(chain: Callable[[Tensor], Tensor], joined: bool) -> None:
    call, x = compiled(chain, capture="never", executors="triton"), torch.randn(257, 257, device="cuda")
    expected, side, other = call(x), torch.cuda.Stream(), torch.empty_like(x)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        if joined:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other.copy_(x)
            torch.cuda.current_stream().wait_stream(side)
        result = call(other if joined else x)
    assert programmatic_edges(graph) > 0
    graph.instantiate()
    for _ in range(50):
        result.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
