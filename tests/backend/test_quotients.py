"""Quotients of float32 on a GPU, which kernels compute without torch's division, against torch's: exact, and of any size."""

from __future__ import annotations

import pytest
import torch

from tests.support.differential import compiled

pytestmark = pytest.mark.gpu

SIZES = [0.0, 1e-45, 3e-40, 1.1e-38, 1.2e-38, 4.7e-30, 0.1, 1.0, 3.0, 1e10, 8.4e37, 8.6e37, 3.4e38, float("inf"), float("nan")]
MISSED = 1e-6
"""Of the quotients, those that may be one unit in the last place off, where rounding to nearest nearly is a tie."""


def test_quotients_are_torchs() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, y = (torch.randn(1 << 24, generator=generator, device="cuda") for _ in range(2))
    found, expected = compiled(lambda x, y: x / y)(x, y), x / y
    assert float((found != expected).double().mean()) < MISSED
    torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=0)


def test_quotients_of_any_size_are_torchs() -> None:
    sizes = torch.tensor(SIZES, device="cuda")
    numbers = torch.cat([sizes, -sizes])
    x, y = torch.cartesian_prod(numbers, numbers).unbind(1)
    found, expected = compiled(lambda x, y: x / y)(x, y), x / y
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=2.0**-149, equal_nan=True)
    is_sure = ~expected.isnan() & ((expected == 0) | (expected.abs() > 2.0**-126))
    assert torch.equal(found[is_sure].signbit(), expected[is_sure].signbit())


def test_integers_divide_exactly() -> None:
    x = torch.arange(1, 1 << 20, device="cuda", dtype=torch.float32)
    for y in (3.0, 7.0, 49.0, 1001.0):
        quotient = compiled(lambda x, y: (x * y) / y)(x[: (1 << 24) // int(y)], x.new_full((1,), y))
        assert torch.equal(quotient, x[: (1 << 24) // int(y)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quotients_of_rows(dtype: torch.dtype) -> None:
    """Whose divisors, one for many dividends, are of any size."""
    sizes = torch.tensor(SIZES, device="cuda")[:, None]
    x = torch.rand(len(SIZES), 500, device="cuda") * sizes
    found = compiled(lambda x: (x / x.amax(-1, keepdim=True)).to(dtype))(x)
    expected = (x / x.amax(-1, keepdim=True)).to(dtype)
    torch.testing.assert_close(found, expected, rtol=2.0**-22 if dtype is torch.float32 else 2.0**-7, atol=0, equal_nan=True)
