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
from triton import knobs

from dynafuse.lowering.triton.libm import jit

if knobs.runtime.interpret:
    from dynafuse.lowering.triton import interpreted_libdevice as libdevice
else:
    from triton.language.extra import libdevice  # type: ignore[no-redef]


@jit
def exp(x):
    return libdevice.fast_expf(x)


@jit
def div(x, y):
    return x / y


@jit
def reciprocal(x):
    return 1.0 / x


@jit
def sqrt(x):
    return tl.sqrt(x)


@jit
def sigmoid(x):
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


@jit
def silu_slope(x):
    """Return the derivative of ``x * sigmoid(x)``."""
    gate = sigmoid(x)
    return gate * (1 + x * (1 - gate))
