"""The math library of generated kernels, imported there as ``lm``.

    from dynafuse.lowering.triton import libm as lm

    @triton.jit
    def kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y_ptr + at, lm.silu_slope(tl.load(x_ptr + at)))

Operands are tensors (a number must come as ``tl.full([], number, dtype)``) of float32 or float64, or of an integer type
for the functions that say so. Accuracy is that of CUDA's own functions, as eager has it. NaNs go where eager's go.
``libm_quick.py`` has others, for results that become 16-bit floats.

Under ``TRITON_INTERPRET=1`` there is no libdevice; the same functions then run as Python over
:mod:`dynafuse.lowering.triton.interpreted_libdevice`.
"""

# Device functions have no types that mypy could know: the same source is traced by Triton and run by its interpreter.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl
from triton import knobs
from triton.language.core import builtin

from dynafuse.lowering.triton import ptx
from dynafuse.lowering.triton.device_functions import jit
from dynafuse.lowering.triton.header import PLACE_WIDTH
from dynafuse.lowering.triton.libm_divisions import div as div
from dynafuse.lowering.triton.libm_divisions import div_by as div_by
from dynafuse.lowering.triton.libm_random import rand as rand
from dynafuse.lowering.triton.libm_random import rand_of_fours as rand_of_fours
from dynafuse.lowering.triton.libm_random import randint64 as randint64
from dynafuse.lowering.triton.libm_random import randn as randn
from dynafuse.lowering.triton.libm_random import randn_of_fours as randn_of_fours

if knobs.runtime.interpret:
    from dynafuse.lowering.triton import interpreted_libdevice as libdevice

    device_assert = libdevice.device_assert
else:
    from triton.language.extra import libdevice  # type: ignore[no-redef]

    @builtin
    def device_assert(condition, message, _semantic=None):
        """Stop the program where a condition does not hold. Behind the message is room for the user's line."""
        return tl.device_assert(condition, message + " " * PLACE_WIDTH, _semantic=_semantic)

# Thin wrappers instead of aliases: Triton replaces libdevice by the device's own library only where it is reached
# through a global of the function that is being compiled.


@jit
def exp(x):
    return libdevice.exp(x)


@jit
def exp2(x):
    return libdevice.exp2(x)


@jit
def expm1(x):
    return libdevice.expm1(x)


@jit
def log(x):
    return libdevice.log(x)


@jit
def log1p(x):
    return libdevice.log1p(x)


@jit
def log2(x):
    return libdevice.log2(x)


@jit
def log10(x):
    return libdevice.log10(x)


@jit
def sin(x):
    return libdevice.sin(x)


@jit
def cos(x):
    return libdevice.cos(x)


@jit
def tan(x):
    return libdevice.tan(x)


@jit
def asin(x):
    return libdevice.asin(x)


@jit
def acos(x):
    return libdevice.acos(x)


@jit
def atan(x):
    return libdevice.atan(x)


@jit
def sinh(x):
    return libdevice.sinh(x)


@jit
def cosh(x):
    return libdevice.cosh(x)


@jit
def tanh(x):
    return libdevice.tanh(x)


@jit
def asinh(x):
    return libdevice.asinh(x)


@jit
def acosh(x):
    return libdevice.acosh(x)


@jit
def atanh(x):
    return libdevice.atanh(x)


@jit
def erf(x):
    return libdevice.erf(x)


@jit
def erfc(x):
    return libdevice.erfc(x)


@jit
def erfinv(x):
    return libdevice.erfinv(x)


@jit
def erfcx(x):
    return libdevice.erfcx(x)


@jit
def lgamma(x):
    return libdevice.lgamma(x)


@jit
def rsqrt(x):
    return ptx.rsqrt(x)


@jit
def cbrt(x):
    return libdevice.cbrt(x)


@jit
def trunc(x):
    return libdevice.trunc(x)


@jit
def sqrt(x):
    return ptx.sqrt(x)


@jit
def round(x):
    return libdevice.rint(x)


@jit
def fmod(x, y):
    return libdevice.fmod(x, y)


@jit
def pow(x, y):
    return libdevice.pow(x, y)


@jit
def hypot(x, y):
    return libdevice.hypot(x, y)


@jit
def atan2(x, y):
    return libdevice.atan2(x, y)


@jit
def copysign(x, y):
    return libdevice.copysign(x, y)


@jit
def nextafter(x, y):
    return libdevice.nextafter(x, y)


@jit
def fma(x, y, z):
    """Return ``x * y + z``, rounded once.

    Args:
        x, y, z: Floats of one dtype.
    """
    return tl.fma(x, y, z)


@jit
def signbit(x):
    """Return whether the sign bit is set, that of zeros and NaNs included."""
    return libdevice.signbit(x) != 0


@jit
def neg(x):
    """Return ``-x`` of a float: Triton's own is ``0 - x``, which is +0 for +0."""
    return x * -1.0


@jit
def minus_zero(dtype: tl.constexpr):
    """Return -0.0 as a scalar."""
    return tl.full([], 0.0, dtype) * -1.0


@jit
def reciprocal(x):
    return ptx.reciprocal(x)


@jit
def sign(x):
    """Return -1, 0 or 1 in the operand's dtype, 0 for NaN. Takes integers too."""
    zero = tl.full([], 0, x.dtype)
    return tl.where(x > 0, zero + 1, tl.where(x < 0, zero - 1, zero))


@jit
def to_float32(x):
    """Return a signed integer as float32."""
    return ptx.to_float32(x)


@jit
def to_float16(x):
    """Return a float32 as float16, rounded before anything is computed of it."""
    return ptx.to_float16(x)


@jit
def to_bfloat16(x):
    """Return a float32 as bfloat16, rounded before anything is computed of it."""
    return ptx.to_bfloat16(x)


@jit
def to_float8e4nv(x):
    """Return a float32 as float8_e4m3fn, rounded to nearest; NaN beyond the largest one, where hardware saturates."""
    return tl.where(tl.abs(x) > 464.0, float("nan"), x).to(tl.float8e4nv)


@jit
def to_float8e5(x):
    """Return a float32 as float8_e5m2, rounded to nearest; infinity beyond the largest one, where hardware saturates."""
    infinity = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
    bits = tl.where(tl.abs(x) >= 61440.0, infinity, x.to(tl.float8e5).to(tl.uint8, bitcast=True))
    return bits.to(tl.float8e5, bitcast=True)


@jit
def maximum(x, y):
    """Return the larger operand, NaN if either is. Takes integers too."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@jit
def minimum(x, y):
    """Return the smaller operand, NaN if either is. Takes integers too."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@jit
def fmax(x, y):
    """Return the larger operand; if one is NaN, the other."""
    return tl.where((x > y) | (y != y), x, y)


@jit
def fmin(x, y):
    """Return the smaller operand; if one is NaN, the other."""
    return tl.where((x < y) | (y != y), x, y)


@jit
def remainder(x, y):
    """Return Python's ``x % y`` of floats, which has the sign of the divisor."""
    rest = libdevice.fmod(x, y)
    return tl.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)


@jit
def floor_div(x, y):
    """Return Python's ``x // y`` of floats, corrected by the exact remainder as in eager; ``x / y`` where ``y`` is 0."""
    rest = libdevice.fmod(x, y)
    quotient = libdevice.div_rn(x - rest, y)
    quotient = tl.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    floored = tl.floor(quotient)
    floored = tl.where(quotient - floored > 0.5, floored + 1, floored)
    exact = libdevice.div_rn(x, y)
    return tl.where(y == 0, exact, tl.where(quotient == 0, libdevice.copysign(quotient, exact), floored))


@jit
def remainder_int(x, y):
    """Return Python's ``x % y`` of integers; Triton's is C's."""
    rest = x % y
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@jit
def floor_div_int(x, y):
    """Return Python's ``x // y`` of integers; Triton's is C's."""
    quotient = x // y
    return tl.where((x % y != 0) & ((x < 0) != (y < 0)), quotient - 1, quotient)


@jit
def pow_int(base, exponent):
    """Return an exact integer power modulo 2^bits; 0 for negative exponents but of the bases 1 and -1."""
    result = tl.zeros_like(base) + 1
    factor = base
    bits = exponent
    width: tl.constexpr = exponent.dtype.primitive_bitwidth
    for _ in tl.static_range(width):
        result = tl.where((bits & 1) != 0, result * factor, result)
        factor = factor * factor
        bits = bits >> 1
    ones = tl.where(base == 1, 1, tl.where((exponent & 1) != 0, -1, 1))
    reciprocals = tl.where((base == 1) | (base == -1), ones, 0)
    return tl.where(exponent < 0, reciprocals.to(result.dtype), result)


@jit
def left_shift(x, y):
    """Return ``x << y``; 0 where the shift is negative or not below the width."""
    return tl.where((y < 0) | (y >= x.dtype.primitive_bitwidth), 0, x << y)


@jit
def right_shift(x, y):
    """Return ``x >> y``, arithmetic for signed types; all sign bits where the shift is negative or not below the width."""
    outside = (y < 0) | (y >= x.dtype.primitive_bitwidth)
    shifted = x >> tl.where(outside, x.dtype.primitive_bitwidth - 1, y)
    return tl.where(outside & (x >= 0), 0, shifted)


@jit
def sigmoid(x):
    return ptx.reciprocal(1 + libdevice.exp(-x))


@jit
def softplus(x):
    return libdevice.log1p(libdevice.exp(x))


@jit
def logit(x):
    return libdevice.log(libdevice.div_rn(x, 1 - x))


@jit
def sinc(x):
    scaled = x * 3.141592653589793
    return tl.where(x == 0, 1.0, libdevice.div_rn(libdevice.sin(scaled), scaled))


@jit
def xlogy(x, y):
    """Return ``x * log(y)``; 0 where ``x`` is 0, unless ``y`` is NaN."""
    return tl.where(y != y, y, tl.where(x == 0, 0.0, x * libdevice.log(y)))


@jit
def logaddexp(x, y):
    """Return ``log(exp(x) + exp(y))``; of equal infinities that infinity."""
    high = maximum(x, y)
    gap = tl.where(x == y, 0.0, tl.abs(x - y))
    return high + libdevice.log1p(libdevice.exp(-gap))


@jit
def silu_slope(x):
    """Return the derivative of ``x * sigmoid(x)``."""
    gate = sigmoid(x)
    return gate * (1 + x * (1 - gate))


@jit
def mish_slope(x):
    """Return the derivative of ``x * tanh(softplus(x))``."""
    gate = libdevice.tanh(softplus(x))
    return gate + x * sigmoid(x) * (1 - gate * gate)


@jit
def gelu_tanh_slope(x):
    """Return the derivative of GELU's tanh approximation."""
    gate = libdevice.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
    inner = 0.7978845608028654 * (1 + 0.134145 * x * x)
    return 0.5 * (1 + gate) + 0.5 * x * (1 - gate * gate) * inner


@jit
def repeated(x, times: tl.constexpr):
    """Return a tile in which each element of the last of two dimensions is there several times, side by side."""
    rows: tl.constexpr = x.shape[0]
    groups: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (rows, groups, times)), (rows, groups * times))


# Combine functions for tl.reduce. Bools come in as integers: Triton's int1 is signed, so true < false there.


@jit
def combine_prod(x, y):
    return x * y


@jit
def combine_max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@jit
def combine_min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@jit
def combine_any(x, y):
    return x | y


@jit
def combine_all(x, y):
    return x & y


@jit
def combine_argmax(x, x_at, y, y_at):
    """Return the larger (value, index): a NaN is larger than any number, and of equals the lower index wins.

    Args:
        x, x_at, y, y_at: Two values, each with its index.
    """
    tie = (x == y) | ((x != x) & (y != y))
    left = (x > y) | ((x != x) & (y == y)) | (tie & (x_at < y_at))
    return tl.where(left, x, y), tl.where(left, x_at, y_at)


@jit
def combine_argmin(x, x_at, y, y_at):
    """Return the smaller (value, index): a NaN is smaller than any number, and of equals the lower index wins.

    Args:
        x, x_at, y, y_at: Two values, each with its index.
    """
    tie = (x == y) | ((x != x) & (y != y))
    left = (x < y) | ((x != x) & (y == y)) | (tie & (x_at < y_at))
    return tl.where(left, x, y), tl.where(left, x_at, y_at)


@jit
def take_deviation(total, m2, v, steps, share):
    """Return (sum, sum of squared deviations from the mean) with one more element.

    A sum instead of Welford's mean stays what a plain sum is, of infinities too, and serves for that as well.
    Source: Youngs, Cramer, "Some results relevant to choice of sum and sum-of-product algorithms", Technometrics, 1971.

    Args:
        total, m2, v: Those without it, and the element.
        steps, share: How many elements there are with it, and 1 over the product of that and the count before.
    """
    total = total + v
    gap = steps * v - total
    return total, m2 + gap * gap * share


@jit
def deviations(total, m2, weight, count, axis: tl.constexpr):
    """Return the (sum, sum of squared deviations from the mean) of all parts along ``axis``, given those of each part.

    These are plain sums over the parts: combining two at a time would take a division each.
    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.

    Args:
        total, m2: Those of each part.
        weight: How many elements each part has, which may be none.
        count: How many all have: one number, since a tensor of sums, spread again, would move through shared memory.
        axis: As for ``tl.sum``.
    """
    whole = tl.sum(total, axis, keep_dims=True)
    gap = total * (1.0 / tl.maximum(weight, 1.0)) - whole / tl.maximum(tl.full([], count, total.dtype), 1.0)
    return tl.sum(whole, axis), tl.sum(m2 + gap * gap * weight, axis)


# Reductions over an axis of a tile; the interpreter's own tl.reduce walks element by element.
if knobs.runtime.interpret:
    amax, amin, prod = libdevice.amax, libdevice.amin, libdevice.prod
    any_of, all_of = libdevice.any_of, libdevice.all_of
    argmax, argmin = libdevice.argmax, libdevice.argmin
else:

    @jit
    def amax(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return the largest value along ``axis``, NaN if there is one."""
        return tl.reduce(x, axis, combine_max, keep_dims=keep_dims)

    @jit
    def amin(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return the smallest value along ``axis``, NaN if there is one."""
        return tl.reduce(x, axis, combine_min, keep_dims=keep_dims)

    @jit
    def prod(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        return tl.reduce(x, axis, combine_prod, keep_dims=keep_dims)

    @jit
    def any_of(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return the bitwise or along ``axis``."""
        return tl.reduce(x, axis, combine_any, keep_dims=keep_dims)

    @jit
    def all_of(x, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return the bitwise and along ``axis``."""
        return tl.reduce(x, axis, combine_all, keep_dims=keep_dims)

    @jit
    def argmax(x, at, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return ``(value, index)`` of the largest value along ``axis``; ``at`` holds the elements' indices."""
        return tl.reduce((x, at), axis, combine_argmax, keep_dims=keep_dims)

    @jit
    def argmin(x, at, axis: tl.constexpr, keep_dims: tl.constexpr = False):
        """Return ``(value, index)`` of the smallest value along ``axis``; ``at`` holds the elements' indices."""
        return tl.reduce((x, at), axis, combine_argmin, keep_dims=keep_dims)
