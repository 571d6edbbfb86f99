"""Floats of 8 bits: cast, copied and cast back in kernels, to the bits that eager's casts have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from dynafuse.partition.annotate import unknown_to_device
from tests.support import graphs
from tests.support.differential import compiled, recorded, regions

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def floats(device: str) -> Tensor:
    """Every bfloat16, and the float32 numbers beside and between them: all numbers of 8 bits, ties, and what is beyond."""
    high = torch.arange(1 << 16, device=device) << 16
    low = torch.tensor([[0], [1], [0x7FFF], [0x8000], [0x8001], [0xFFFF]], device=device)
    return (high + low).flatten().to(torch.int32).view(torch.float32)


def every(dtype: torch.dtype, device: str) -> Tensor:
    return torch.arange(256, device=device, dtype=torch.int64).to(torch.uint8).view(dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """The same bits, whichever NaN a NaN is."""
    assert found.dtype is expected.dtype
    is_nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert torch.equal(found.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


def fused(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What a function returns whose every op is in a kernel."""
    torch._dynamo.reset()
    with recorded() as graphs_:
        result = compiled(function, executors="triton")(*inputs)
    assert regions(graphs_) == 1 == len(graphs_[0].plan.steps)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_cast(dtype: torch.dtype, device: str) -> None:
    x = floats(device)
    assert_same_bits(fused(lambda x: x.to(dtype), x), x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_casts_of_others(dtype: torch.dtype, source: torch.dtype, device: str) -> None:
    x = (torch.arange(-600, 600, device=device) * 7.3).to(source)
    assert_same_bits(fused(lambda x: x.to(dtype), x), x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_casts_back(dtype: torch.dtype, to: torch.dtype, device: str) -> None:
    x = every(dtype, device)
    torch.testing.assert_close(fused(lambda x: x.to(to) * 2, x), x.to(to) * 2, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", [
    lambda x: x.clone(), lambda x: torch.cat([x, x]), lambda x: x.view(16, 16).t().contiguous()])
def test_copies(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str) -> None:
    x = every(dtype, device)
    assert_same_bits(fused(function, x), function(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype: torch.dtype, device: str) -> None:
    def error(x: Tensor) -> Tensor:
        return ((x * 2).to(dtype).to(torch.float32) / 2 - x).abs().amax(-1)

    x = torch.randn(64, 200, device=device)
    torch.testing.assert_close(fused(error, x), error(x), rtol=0, atol=0)


def test_devices_without_them() -> None:
    def write(g: graphs.Builder, x: Node) -> Node:
        narrow = g.op("prims.convert_element_type.default", x, DTYPES[0])
        return g.op("aten.clone.default", g.op("aten.view.default", narrow, [2, 2]))

    module = graphs.built(write, torch.randn(4))
    assert [node.name for node in unknown_to_device(module, 80)] == ["convert_element_type_default", "clone_default"]
    assert unknown_to_device(module, 90) == unknown_to_device(module, None) == {}
