"""Functions that are an instruction or two of PTX for float32; ``libm.py`` and ``libm_quick.py`` take them.

libdevice has them too, and they become the same instructions. But a kernel that calls anything of libdevice waits until all
of it is read and linked: a third of the time that a small kernel compiles. Subnormal numbers are kept, as eager keeps them.

Source: PTX ISA, "Floating Point Instructions".

Worked example: ``ptx.rsqrt(x)`` is ``rsqrt.approx.f32``, once for each element of a lane.
"""

# Device functions have no types that mypy could know.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl
from triton import knobs

if knobs.runtime.interpret:
    from dynafuse.lowering.triton import interpreted_libdevice as libdevice

    exp, fma, rsqrt = libdevice.exp, libdevice.fma, libdevice.rsqrt
    reciprocal = quick_reciprocal = libdevice.rcp_rn
    sqrt = quick_sqrt = libdevice.sqrt_rn
    div = quick_div = libdevice.div_rn
    to_float32 = libdevice.to_float32
    to_float16, to_bfloat16 = libdevice.to_float16, libdevice.to_bfloat16
else:
    from triton import jit
    from triton.language.extra import libdevice  # type: ignore[no-redef]

    @jit
    def exp(x):
        """Return e to the power of ``x``, off by as many units in the last place as it is large, and two."""
        return tl.exp(x)

    @jit
    def fma(x, y, z):
        """Return ``x * y + z``, rounded once."""
        return tl.fma(x, y, z)

    @jit
    def rsqrt(x):
        """Return 1 over the square root, off by two units in the last place at most; takes float64, too."""
        if x.dtype == tl.float32:
            return tl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        else:
            return libdevice.rsqrt(x)

    @jit
    def sqrt(x):
        """Return the square root, rounded to nearest; takes float64, too."""
        if x.dtype == tl.float32:
            return tl.sqrt_rn(x)
        else:
            return libdevice.sqrt_rn(x)

    @jit
    def quick_sqrt(x):
        """Return the square root, off by a unit in the last place at most."""
        return tl.inline_asm_elementwise("sqrt.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @jit
    def reciprocal(x):
        """Return 1 over ``x``, rounded to nearest; takes float64, too."""
        if x.dtype == tl.float32:
            return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        else:
            return libdevice.rcp_rn(x)

    @jit
    def quick_reciprocal(x):
        """Return 1 over ``x``, off by a unit in the last place at most; infinite where ``x`` is subnormal."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @jit
    def div(x, y):
        """Return ``x / y`` of two tensors, rounded to nearest; takes float64, too."""
        if x.dtype == tl.float32 and y.dtype == tl.float32:
            return _float32_div(x, y)
        else:
            return libdevice.div_rn(x, y)

    @jit
    def _float32_div(x, y):
        """Return ``x / y`` with no branch, which ``div.rn`` is made of: neighbours are computed at the same time.

        It is the float next to the quotient, but for one of some millions, and is less exact where the quotient or ``x`` is
        below 2^-100. Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990.
        """
        size = tl.abs(y)
        scale = tl.where(size > 2.0 ** 126, 0.25, tl.where(size < 2.0 ** -126, 2.0 ** 24, 1.0))  # so that 1 / y is normal
        x = x * scale
        y = y * scale
        inverse = quick_reciprocal(y)
        quotient = x * inverse
        better = fma(fma(quotient, y * -1.0, x), inverse, quotient)
        size = tl.abs(better)  # of zeros and infinities NaN, or 0 with another sign
        return tl.where((size > 0) & (size < float("inf")), better, quotient)

    @jit
    def quick_div(x, y):
        """Return ``x / y``, off by two units in the last place at most; 0 where ``y`` is beyond 2^126."""
        return tl.inline_asm_elementwise("div.approx.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)

    @jit
    def to_float32(x):
        """Return a signed integer as float32, rounded to nearest.

        LLVM takes what it knows to be -1 or 0 for one bit, and makes a bfloat16 of that as if it were 1 or 0, where the bit
        comes from a comparison of two 16-bit floats at a time.
        """
        if x.dtype == tl.int64:
            return tl.inline_asm_elementwise("cvt.rn.f32.s64 $0, $1;", "=f,l", [x], tl.float32, is_pure=True, pack=1)
        else:
            wide = x.to(tl.int32)
            return tl.inline_asm_elementwise("cvt.rn.f32.s32 $0, $1;", "=f,r", [wide], tl.float32, is_pure=True, pack=1)

    @jit
    def to_float16(x):
        """Return a float32 as float16, rounded to nearest.

        Of a product that LLVM sees rounded, and of a sum of that which is rounded, too, it makes one instruction of 16 bits,
        which does not round the product.
        """
        return tl.inline_asm_elementwise("cvt.rn.f16.f32 $0, $1;", "=h,f", [x], tl.float16, is_pure=True, pack=1)

    @jit
    def to_bfloat16(x):
        """Return a float32 as bfloat16, rounded to nearest, whatever it is a product of."""
        return tl.inline_asm_elementwise("cvt.rn.bf16.f32 $0, $1;", "=h,f", [x], tl.bfloat16, is_pure=True, pack=1)
