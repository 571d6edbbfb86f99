"""What the user casts is rounded, and so is what is compared: through whole graphs, against eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynafuse.lowering.inductor import availability
from dynafuse.passes.casts import is_written
from tests.support.differential import compiled
from tests.support.graphs import recorded

needs_cpp = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
EXECUTORS = ["triton", pytest.param("inductor", marks=needs_cpp)]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NARROW = [F16, BF16]
Function = Callable[..., Any]


def executors_and_dtypes(dtypes: list[torch.dtype], in_cpp: torch.dtype) -> pytest.MarkDecorator:
    """Every dtype in the interpreter, and one in C++, whose compilers are slow."""
    return pytest.mark.parametrize(("executor", "dtype"), [
        *(("triton", dtype) for dtype in dtypes), pytest.param("inductor", in_cpp, marks=needs_cpp)], ids=str)


WAYS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "to dtype": lambda x, dtype: x.to(dtype),
    "to device and dtype": lambda x, dtype: x.to(x.device, dtype),
    "to another": lambda x, dtype: x.to(torch.zeros(1, dtype=dtype)),
    "type": lambda x, dtype: x.type(dtype),
    "type_as": lambda x, dtype: x.type_as(torch.zeros(1, dtype=dtype)),
    "method": lambda x, dtype: {F16: x.half, BF16: x.bfloat16, F32: x.float, F64: x.double, torch.int32: x.int}[dtype](),
    "_to_copy": lambda x, dtype: torch.ops.aten._to_copy(x, dtype=dtype),
    "copy_": lambda x, dtype: torch.empty_like(x, dtype=dtype).copy_(x),
}


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().nan_to_num(7) if value.is_floating_point() else value


def same(left: Any, right: Any) -> bool:
    return torch.equal(bits(left), bits(right))


@executors_and_dtypes([F32, F64, F16, BF16, torch.int32], in_cpp=F32)
def test_a_cast_there_and_back(executor: str, dtype: torch.dtype) -> None:
    """Every way to cast, to every dtype and back, of a computed value; in one graph."""
    source = dtype
    casts = [(way, other) for way in WAYS for other in (F16, BF16, F32, F64, torch.int32) if other is not source]

    def every(x: torch.Tensor) -> list[torch.Tensor]:
        return [WAYS[way](x + x, other).to(source) * 3 for way, other in casts]

    x = (torch.randn(9, 40) * 1000).to(source)
    expected, actual = every(x), compiled(every, executors=executor)(x)
    assert not [cast for cast, ours, eager in zip(casts, actual, expected, strict=True) if not same(ours, eager)]


@executors_and_dtypes(NARROW, in_cpp=BF16)
def test_a_cast_in_the_backward(executor: str, dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 1.5).to(dtype).float() * 1.7

    x = torch.randn(9, 40)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, eager = compiled(function, executors=executor)(left), function(right)
    weights = torch.randn_like(x)
    ours.backward(weights)
    eager.backward(weights)
    assert same(ours, eager) and same(left.grad, right.grad)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_straight_through_estimator(executor: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + (x.bfloat16().float() - x).detach()

    x = torch.randn(64)
    assert same(compiled(function, executors=executor)(x), function(x))


def test_an_equal_cast_of_autocast_does_not_take_the_place_of_the_users() -> None:
    linear = nn.Linear(40, 40)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", BF16):
            y = x * 1.5
            return linear(y), y.bfloat16().float()

    x = torch.randn(9, 40)
    assert same(compiled(function, executors="triton")(x)[1], function(x)[1])


COMPARED: dict[str, Function] = {
    "eq": lambda x, y: x * y == (x * y).amax(-1, keepdim=True),
    "ne": lambda x, y: x * y != (x * y).amin(-1, keepdim=True),
    "lt": lambda x, y: x * y < (x * y).roll(1, 0),
    "ge": lambda x, y: x * y >= y,
    "le number": lambda x, y: x * y <= 0.1,
    "gt number": lambda x, y: x > 0.1,
    "eq integer": lambda x, y: (x * 4).round() * 64 == 257,
    "argmax": lambda x, y: (x * y).argmax(-1),
    "argmin": lambda x, y: (x * y).argmin(0),
    "max": lambda x, y: (x * y).max(-1)[1],
    "short argmax": lambda x, y: (x * y)[:, :3].argmax(-1),
    "any": lambda x, y: (x * 1e-9).any(-1),
    "short all": lambda x, y: (x * 1e-9)[:, :3].all(-1),
    "not": lambda x, y: torch.logical_not(x * 1e-9),
    "isinf": lambda x, y: torch.isinf(x * 60000),
    "isfinite": lambda x, y: torch.isfinite(x * 60000),
    "int": lambda x, y: (x * 7.3).int(),
    "bool": lambda x, y: (x * 1e-9).bool(),
    "copied to int": lambda x, y: torch.empty_like(x, dtype=torch.int32).copy_(x * 7.3) * 2,
    "floor": lambda x, y: (x * 7.3).floor(),
    "ceil": lambda x, y: (x * 7.3).ceil(),
    "round": lambda x, y: (x * 7.3).round(),
    "trunc": lambda x, y: (x * 7.3).trunc(),
    "frac": lambda x, y: (x * 7.3).frac(),
    "sign": lambda x, y: (x * 1e-9).sign(),
    "sgn": lambda x, y: (x * 1e-9).sgn(),
    "fmod": lambda x, y: torch.fmod(x * 7.3, 0.5),
    "remainder": lambda x, y: torch.remainder(x * 7.3, 0.5),
    "floor_divide": lambda x, y: (x * 7.3) // 0.5,
    "div trunc": lambda x, y: torch.div(x * 7.3, 0.5, rounding_mode="trunc"),
    "nan_to_num": lambda x, y: torch.nan_to_num(x * 60000),
    "hardshrink": lambda x, y: F.hardshrink(x * y, 0.25),
    "threshold": lambda x, y: F.threshold(x * y, 0.25, 20.0),
    "where": lambda x, y: torch.where((x * y) > 0.25, x, y),
    "largest sum of a product": lambda x, y: (x * x + y).amax(-1),
    "sum of a product that is cast": lambda x, y: (x.float() * y.float()).to(x.dtype) + y,
}


@executors_and_dtypes(NARROW, in_cpp=F16)
def test_what_is_compared_is_rounded(executor: str, dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in COMPARED.values()]

    x, y = torch.randn(33, 40).to(dtype), torch.randn(33, 40).to(dtype)
    x[0, :8] = torch.tensor([0.1, 0.25, -0.25, 0.5, 1.0, 2.0, 4.0, 64.0])
    expected, actual = every(x, y), compiled(every, executors=executor)(x, y)
    assert not [name for name, ours, eager in zip(COMPARED, actual, expected, strict=True) if not same(ours, eager)]


COMPARED_WITH_A_WIDER_ONE: dict[str, Function] = {
    "eq": lambda x, wide: x == wide,
    "ne": lambda x, wide: wide != x,
    "lt": lambda x, wide: x < wide,
    "ge computed": lambda x, wide: x * 1 >= wide * 1,
    "eq integer": lambda x, wide: x == (wide * 0).long() + 257,
}


@executors_and_dtypes(NARROW, in_cpp=BF16)
def test_a_wider_operand_of_no_dimensions_is_rounded_before_it_is_compared(executor: str, dtype: torch.dtype) -> None:
    """It does not promote the others, which have dimensions."""
    def every(x: torch.Tensor, wide: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, wide) for function in COMPARED_WITH_A_WIDER_ONE.values()]

    wide = torch.tensor(0.7004)
    x = torch.stack([wide, -wide, 3 * wide.to(dtype).float(), torch.tensor(256.0), torch.tensor(257.0)]).to(dtype)
    expected, actual = every(x, wide), compiled(every, executors=executor)(x, wide)
    assert not [name for name, ours, eager in zip(COMPARED_WITH_A_WIDER_ONE, actual, expected, strict=True) if not same(ours, eager)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_is_compared_or_cast_is_rounded_on_a_gpu(dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [*(function(x, y) for function in COMPARED.values()), (x * y).float() * 3, (x * 1.5).float().half().float()]

    x, y = (torch.randn(33, 40, device="cuda").to(dtype) for _ in range(2))
    expected, actual = every(x, y), compiled(every, executors="triton")(x, y)
    names = [*COMPARED, "widened", "narrowed"]
    assert not [name for name, ours, eager in zip(names, actual, expected, strict=True) if not same(ours, eager)]


EXTREMES: dict[str, Function] = {
    "amax": lambda x: x.amax(-1, keepdim=True), "amin": lambda x: x.amin(0), "max of all": lambda x: x.max(),
    "min of all": lambda x: x.min(), "max": lambda x: x.max(-1)[0], "min": lambda x: x.min(-1)[0],
    "median": lambda x: x.median(-1)[0], "aminmax": lambda x: x.aminmax(dim=-1)[0], "inf norm": lambda x: x.norm(torch.inf),
    "adaptive max": lambda x: F.adaptive_max_pool1d(x, 4), "max_pool": lambda x: F.max_pool1d(x, 4),
    "maximum": lambda x: torch.maximum(x, x.roll(1, 0)), "logsumexp": lambda x: x.logsumexp(-1),
}


@pytest.mark.parametrize(("dtype", "dynamic"), [(F16, True), (BF16, False)], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_of_extremes_of_computed_values(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    """The backward compares what it computes again with a maximum that the forward has stored."""
    check_gradients(lambda x, y: EXTREMES[name](x * y), "triton", dtype, dynamic)


ON_THE_WAY: dict[str, Function] = {
    "returned": lambda z: (z, F.silu(z) * z), "of a library": lambda z: (z @ z.t(), F.silu(z) * z),
    "cast": lambda z: (z, (F.silu(z) * z).float() * 0.7), "moved": lambda z: (z, (F.gelu(z)[:, 1::2] * z[:, ::2]).t()),
    "accumulated": lambda z: (z, (z * 0.37).cumsum(-1)), "reduced": lambda z: (z, (z * 0.37).sum(-1) * z.mean(-1)),
}


@pytest.mark.parametrize("reduce", ["amax", "max of all"])
@pytest.mark.parametrize("name", ON_THE_WAY)
def test_gradients_of_extremes_of_what_is_also_stored_on_the_way(name: str, reduce: str) -> None:
    """One kernel computes again what another one loads as it was rounded."""
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other, z = ON_THE_WAY[name](x * 3.7 - y)
        return EXTREMES[reduce](z) + other.sum() * 0

    check_gradients(function, "triton", F16, False)


@pytest.mark.parametrize("seed", range(4))
def test_what_an_extreme_depends_on_is_rounded_where_rows_are_reduced(seed: int) -> None:
    """A mean that one kernel has stored, and another one computes, is one number."""
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.1
        return (y - y.mean(-1, keepdim=True)).amax(-1)

    x = torch.randn(64, 130, generator=torch.Generator().manual_seed(seed)).to(BF16)
    assert torch.equal(compiled(function, executors="triton")(x), function(x))


@needs_cpp
def test_gradients_of_extremes_in_cpp() -> None:
    names = ("amax", "amin", "max of all", "max", "inf norm")
    check_gradients(lambda x, y: sum(EXTREMES[name](x * y).sum() for name in names), "inductor", BF16, False)


def check_gradients(function: Function, executor: str, dtype: torch.dtype, dynamic: bool) -> None:
    given = [torch.randn(12, 40).to(dtype) for _ in range(2)]
    found = []
    for run in (function, compiled(function, executors=executor, dynamic=dynamic or None)):
        inputs = [x.clone().requires_grad_() for x in given]
        result = run(*inputs)
        result.backward(torch.linspace(0.5, 2, result.numel()).reshape(result.shape).to(result.dtype))
        found.append([x.grad for x in inputs])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=1e-2)


# Which casts are the user's ------------------------------------------------------------------------------------------

LINEAR, NORM, BATCH = nn.Linear(40, 40), nn.LayerNorm(40), nn.BatchNorm1d(40)


def autocast(function: Function) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return function(x)

    return run


OURS: dict[str, tuple[Function, torch.dtype]] = {
    "softmax": (lambda x: F.softmax(x * 2, -1), BF16), "layer_norm": (lambda x: F.layer_norm(x * 2, (40,)), BF16),
    "rms_norm": (lambda x: F.rms_norm(x * 2, (40,)), BF16), "gelu": (lambda x: F.gelu(x * 2), BF16),
    "silu": (lambda x: F.silu(x * 2), BF16), "batch_norm": (lambda x: BATCH(x * 2), BF16),
    "mse_loss": (lambda x: F.mse_loss(x * 2, x), BF16), "std": (lambda x: (x * 2).std(-1), BF16),
    "cross_entropy": (lambda x: F.cross_entropy(x * 2, torch.arange(12)), BF16),
    "sum": (lambda x: (x * 2).sum(-1, dtype=F32), BF16), "promotion": (lambda x: x * 2 + torch.ones(40), BF16),
    "autocast linear": (autocast(lambda x: LINEAR(x * 2)), F32), "autocast matmul": (autocast(lambda x: x @ x.t()), F32),
    "autocast layer_norm": (autocast(lambda x: NORM(LINEAR(x))), F32),
    "autocast softmax": (autocast(lambda x: F.softmax(LINEAR(x), -1)), F32),
    "autocast sum": (autocast(lambda x: LINEAR(x).sum(-1)), F32),
}


@pytest.mark.parametrize("name", OURS)
def test_casts_of_decompositions_and_of_autocast_stay_wide(name: str) -> None:
    function, dtype = OURS[name]
    assert not written(function, torch.randn(12, 40).to(dtype))


THEIRS: dict[str, Function] = {
    "norm": lambda x: (F.normalize(x.float()) * 2).to(x.dtype), "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(
        lambda x: (x * 2).float().sin().to(x.dtype), x, use_reentrant=False),
    "under autocast": autocast(lambda x: (x * 2).float().bfloat16()),
}


@pytest.mark.parametrize("name", THEIRS)
def test_casts_that_are_written_round_in_both_directions(name: str) -> None:
    assert len(written(THEIRS[name], torch.randn(12, 40).to(BF16))) >= 4


def written(function: Function, x: torch.Tensor) -> list[str]:
    """The casts of the forward and of the backward that are taken for the user's."""
    with recorded() as graphs:
        compiled(function, executors="triton")(x.requires_grad_()).float().sum().backward()
    nodes = [node for graph in graphs for node in graph.plan.annotated.graph.nodes]
    assert len({graph.kind for graph in graphs}) == 2
    casts = [node for node in nodes if node.op == "call_function" and "_to_copy" in str(node.target)]
    assert all(map(is_written, casts))
    return [node.name for node in casts]
