"""Scans along an axis of a tile, imported by generated kernels as ``ls``.

Worked example: of a tile ``[[1, 2], [3, 4]]`` ``ls.cumsum(x, 1)`` is ``[[1, 3], [3, 7]]``, of which ``ls.last(y, 1)`` is
``[[3], [7]]``: what the next tile of the same rows begins with.
"""

# Device functions have no types that mypy could know.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl
from triton import knobs

from dynafuse.lowering.triton.device_functions import jit
from dynafuse.lowering.triton.libm import combine_prod, logaddexp, minus_zero


@jit
def combine_sum(x, y):
    return x + y


if knobs.runtime.interpret:  # Triton's own scans walk element by element
    from dynafuse.lowering.triton.interpreted_libdevice import cumprod, logcumsumexp
    from dynafuse.lowering.triton.interpreted_libdevice import cumsum as scan_sum
else:

    @jit
    def scan_sum(x, axis: tl.constexpr):
        return tl.associative_scan(x, axis, combine_sum)

    @jit
    def cumprod(x, axis: tl.constexpr):
        """Return the products of all elements up to each."""
        return tl.associative_scan(x, axis, combine_prod)

    @jit
    def logcumsumexp(x, axis: tl.constexpr):
        """Return the logarithms of the sums of the exponentials of all elements up to each."""
        return tl.associative_scan(x, axis, logaddexp)


@jit
def cumsum(x, axis: tl.constexpr):
    """Return the sums of all elements up to each. They begin with 0, as in eager, so that none is -0."""
    return tl.full([], 0, x.dtype) + scan_sum(x, axis)


@jit
def last(x, axis: tl.constexpr):
    """Return the last elements along an axis of a tile of two dimensions; the axis stays, with size 1."""
    size: tl.constexpr = x.shape[axis]
    at = tl.arange(0, size)
    is_last = (at[None, :] if axis == 1 else at[:, None]) == size - 1
    nothing = minus_zero(x.dtype) if x.dtype.is_floating() else tl.full([], 0, x.dtype)
    return tl.sum(tl.where(is_last, x, nothing), axis, keep_dims=True).to(x.dtype)
