"""Functions of float32 whose results become 16-bit floats, imported by generated kernels as ``lq``.

They take half of the instructions of those of ``libm.py``, and are off by a few units in the last place: ``exp`` by as
many as its operand is large. The units of 16-bit floats are thousands of times as large. NaNs and infinities are eager's.

Source of the bounds: CUDA C++ Programming Guide, "Intrinsic Functions".

Worked example: a SiLU in bfloat16 is ``v2 = v1 * lq.sigmoid(v1)``, of 14 instructions instead of 32.
"""

# Device functions have no types that mypy could know.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from dynafuse.lowering.triton import ptx
from dynafuse.lowering.triton.device_functions import jit

MANY = tl.constexpr(16)
"""How many dividends of a divisor make its reciprocal worth while."""


@jit
def exp(x):
    return ptx.exp(x)


@jit
def div(x, y):
    if x.numel >= MANY * y.numel:
        size = tl.abs(y)
        scale = tl.where(size > 2.0 ** 126, 0.25, tl.where(size < 2.0 ** -126, 2.0 ** 24, 1.0))  # so that 1 / y is normal
        return (x * scale) * ptx.quick_reciprocal(y * scale)
    else:
        return x / y


@jit
def reciprocal(x):
    return 1.0 / x


@jit
def sqrt(x):
    return ptx.quick_sqrt(x)


@jit
def sigmoid(x):
    return ptx.quick_div(1.0, 1.0 + ptx.exp(-x))


@jit
def silu_slope(x):
    """Return the derivative of ``x * sigmoid(x)``."""
    gate = sigmoid(x)
    return gate * (1 + x * (1 - gate))
