"""Divisions that are rounded to nearest, by products where many share a divisor; generated kernels take them from ``libm``.

Worked example: of a softmax over rows of 1,024 each element is ``lm.div(exponential, total)``, of one total a row.
"""

# Device functions have no types that mypy could know.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from dynafuse.lowering.triton import ptx
from dynafuse.lowering.triton.device_functions import jit

MANY = tl.constexpr(64)
"""How many dividends of a divisor make an exact reciprocal worth while: a lane has four of them."""

SMALL = tl.constexpr(2.0 ** -96)
"""Divisors smaller than this, or larger than its reciprocal, are scaled: their reciprocals would not be normal."""


@jit
def div(x, y):
    """Return ``x / y``, rounded to nearest; of float32, less exact where a quotient or a dividend is below 2^-100."""
    if x.dtype == tl.float32 and y.dtype == tl.float32 and x.numel >= MANY * y.numel:
        return _div_by_shared(x, y)
    else:
        return ptx.div(x, y)


@jit
def _div_by_shared(x, y):
    """Return float32 ``x / y`` by products with the reciprocals of ``y``: two corrections round them to nearest.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
    """
    size = tl.abs(y)
    scale = tl.where(size < SMALL, 1 / SMALL, tl.where(size > 1 / SMALL, SMALL, 1.0))
    scale = tl.where(y.to(tl.int32, bitcast=True) < 0, -scale, scale)
    y = y * scale
    inverse = ptx.quick_reciprocal(y)
    error = ptx.fma(y, -inverse, 1.0)  # NaN where the reciprocal is zero or infinite
    inverse = tl.where(error == error, ptx.fma(inverse, error, inverse), inverse) * -1.0  # a minus alone makes 0 of 0
    y = tl.where(inverse == 0, 1.0, y)  # infinity times zero would be NaN
    # With the dividend negated zeros keep their signs; infinities are what the first product is.
    x = x * -scale
    quotient = x * inverse
    better = ptx.fma(ptx.fma(quotient, y, x), inverse, quotient)
    best = ptx.fma(ptx.fma(better, y, x), inverse, better)
    return tl.where(tl.abs(quotient) < float("inf"), best, quotient)


@jit
def div_by(x, high, low):
    """Return float32 ``x`` over an integer whose reciprocal is ``high + low``, rounded as ``div`` does where normal.

    Source: Brisebarre and Muller, "Correctly rounded multiplication by arbitrary precision constants", 2008. Zeros and
    infinities, which are their own quotients, would become zeros of another sign and NaNs.

    Args:
        x: The dividend.
        high, low: The reciprocal, and what float32 leaves of it.
    """
    product = x * high
    return tl.where(product == x, x, ptx.fma(x, high + tl.full([], 0, tl.float32), x * low))
