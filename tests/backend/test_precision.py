"""Functions over magnitudes from subnormal to infinite, against float64: as precise as eager's own, wherever they are near 0.

``exp(x) - 1`` for ``expm1``, or a library that flushes subnormal numbers, passes tests of numbers near 1 alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dynafuse.lowering.inductor import availability
from tests.support.differential import compiled

ULPS = 6.0
"""How many units in the last place more than twice eager's own are no error."""

needs_cpp = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
# Compilers of C++ are slow, and what is made for one dtype is made for the other.
CASES = [("triton", torch.float32), ("triton", torch.float64), pytest.param("inductor", torch.float32, marks=needs_cpp)]
Function = Callable[[torch.Tensor], torch.Tensor]

_NAMES = ("exp expm1 exp2 log log1p log2 log10 sin cos tan sinh cosh tanh asinh acosh atanh asin acos atan erf erfc logit sigmoid "
          "rsqrt sqrt reciprocal")
_ACTIVATIONS = "silu softplus mish logsigmoid elu celu selu tanhshrink softsign"
FUNCTIONS: dict[str, Function] = {
    **{name: getattr(torch, name) for name in _NAMES.split()},
    **{name: getattr(F, name) for name in _ACTIVATIONS.split()},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus of 3": lambda x: F.softplus(x, 3, 15),
    "logaddexp": lambda x: torch.logaddexp(x, 0.999 * x),
    "logaddexp of far ones": lambda x: torch.logaddexp(x, x.flip(0)),
    "xlogy": lambda x: torch.xlogy(x, x.abs()),
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "hypot": lambda x: torch.hypot(x, x.flip(0)),
    "pow": lambda x: torch.pow(x.abs(), x.flip(0)),
    "quotient": lambda x: x / x.roll(1),
}
SLOPES = ("silu", "softplus", "softplus of 3", "mish", "logsigmoid", "elu", "celu", "selu", "expm1", "log1p", "erf", "sigmoid")
"""Functions whose derivatives are compared."""


def magnitudes(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Numbers of both signs, by their sizes, and NaN."""
    powers = [factor * 10.0**exponent for exponent in range(-30, 31) for factor in (1.0, 3.0)]
    subnormal = [0.0, 5e-324, 1e-310, 1e-200, 1e-45, 1e-42, 1e-40, 1.2e-38]
    bends = [0.3, 0.41, 0.5, 0.7, 0.9, 0.9999, 1.0001, 2.5, 5.0, 9.0, 12.0, 17.0, 19.9, 20.1, 50.0, 87.0, 88.5, 104.0, 700.0, 745.0]
    sizes = torch.tensor([*subnormal, *powers, *bends, 1e100, 1e300, float("inf")], dtype=torch.float64)
    return torch.cat([sizes, -sizes, sizes.new_full((1,), float("nan"))]).to(dtype).to(device)


def every(*xs: torch.Tensor) -> list[torch.Tensor]:
    return [function(x) for function, x in zip(FUNCTIONS.values(), xs, strict=True)]


def outcome(function: Callable[..., list[torch.Tensor]], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values and derivatives; each function has an input of its own."""
    xs = [x.clone().requires_grad_(name in SLOPES) for name in FUNCTIONS]
    values = dict(zip(FUNCTIONS, function(*xs), strict=True))
    leaves = {f"slope of {name}": leaf for name, leaf in zip(FUNCTIONS, xs, strict=True) if leaf.requires_grad}
    found = torch.autograd.grad([values[name] for name in FUNCTIONS if name in SLOPES], [*leaves.values()], [torch.ones_like(x)] * len(leaves))
    return {**{name: value.detach() for name, value in values.items()}, **dict(zip(leaves, found, strict=True))}


def wrong(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Where a result is worse than eager's; what eager gets wrong by itself is nobody's measure."""
    limits = torch.finfo(eager.dtype)
    right = (eager.double() - truth).abs()
    unit = truth.abs().clamp(min=limits.smallest_normal) * limits.eps
    off = (ours.double() - truth).abs() > 2 * right + ULPS * unit
    finite = eager.isfinite() & truth.to(eager.dtype).isfinite()
    special = (ours.isnan() != eager.isnan()) | (~eager.isnan() & (ours != eager))
    agreed = (eager == truth.to(eager.dtype)) | (eager.isnan() & truth.isnan())
    return torch.where(finite, off | ~ours.isfinite(), special & agreed)


def check(dtype: torch.dtype, device: str, executor: str) -> None:
    """Float64 is compared with eager itself."""
    x = magnitudes(dtype, device)
    ours, eager, truth = outcome(compiled(every, executors=executor), x), outcome(every, x), outcome(every, x.double())
    for name, mine in ours.items():
        where = wrong(mine, eager[name], truth[name])
        assert not bool(where.any()), (name, *(t[where].tolist()[:4] for t in (x, mine, eager[name], truth[name])))


@pytest.mark.parametrize(("executor", "dtype"), CASES, ids=str)
def test_functions_are_as_precise_as_eagers(executor: str, dtype: torch.dtype) -> None:
    check(dtype, "cpu", executor)


@pytest.mark.parametrize("executor", ["triton", pytest.param("inductor", marks=needs_cpp)])
def test_numbers_are_rounded_to_the_dtype_that_they_fill(executor: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((), 1 / 3) + torch.full((3,), 0.1, dtype=torch.bfloat16)

    x = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(compiled(function, executors=executor)(x), function(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_are_as_precise_as_eagers_on_a_gpu(dtype: torch.dtype) -> None:
    check(dtype, "cuda", "triton")
