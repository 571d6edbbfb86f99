"""Python scalars and dtypes as Triton source text.

    >>> literal(0.1, torch.float32), literal(0.1, torch.bfloat16), literal(float("-inf"), torch.float32)
    ('0.1', '0.10009765625', 'float("-inf")')
    >>> literal(-0.0, torch.float32)
    'lm.minus_zero(tl.float32)'
    >>> literal(-1, torch.uint8), literal(2.7, torch.int32), literal(3, torch.float64), literal(2, torch.bool)
    ('255', '2', '3.0', 'True')
    >>> conversion("x", torch.float32, torch.bool)
    'x != 0'

Values of 16-bit and 8-bit floats live in float32 inside a kernel (their opmath type); every other dtype is its own.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

MINUS_ZERO = "lm.minus_zero"
"""The function of generated kernels that makes -0.0 in a dtype."""

MOST_ODD_DIVISOR = 129
"""The largest odd divisor for which ``lm.div_by`` is tested; factors of two change no rounding."""

_INFINITIES = {math.inf: 'float("inf")', -math.inf: 'float("-inf")'}

_TRITON = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.uint16: "tl.uint16",
    torch.int16: "tl.int16",
    torch.uint32: "tl.uint32",
    torch.int32: "tl.int32",
    torch.uint64: "tl.uint64",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
}

_TO_EIGHT_BITS = {torch.float8_e4m3fn: "lm.to_float8e4nv", torch.float8_e5m2: "lm.to_float8e5"}
"""Functions whose results are NaN, or infinite, beyond the largest number, where hardware saturates."""

_NARROW_INTS = (torch.int8, torch.int16)
_SIGNED_INTS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, repr=False)
class HoistedScalar:
    """A float that a kernel takes as its argument ``name``: the code is the same whatever the value.

    If ``inverse``, what the kernel takes is the number's reciprocal.
    """

    position: int
    inverse: bool = False

    @property
    def name(self) -> str:
        """Return the kernel's argument."""
        return f"k{self.position}"

    def __repr__(self) -> str:
        return f"1/{self.name}" if self.inverse else self.name


Scalar: TypeAlias = bool | int | float | HoistedScalar
"""What an op may be given where no tensor is."""


def supported(dtype: torch.dtype) -> bool:
    """Return whether Triton has the dtype: false for complex, quantised and the rarer 8-bit floats."""
    return dtype in _TRITON


def opmath(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are computed."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def triton_type(dtype: torch.dtype) -> str:
    """Return the name of a dtype in Triton: ``"tl.float32"`` for ``torch.float32``."""
    return _TRITON[dtype]


def literal(value: Scalar, dtype: torch.dtype) -> str:
    """Return the Triton literal of a number, converted to a dtype as eager converts it: rounded, truncated or wrapped.

    Args:
        value: The number. One that the kernel takes as an argument is in ``dtype``, and its name stands for it.
        dtype: The dtype.
    """
    if isinstance(value, HoistedScalar):
        assert not value.inverse and dtype is torch.float32, (value, dtype)
        return value.name
    if dtype is torch.bool:
        return str(bool(value))
    return _float_literal(float(value), dtype) if dtype.is_floating_point else str(_wrapped(int(value), dtype))


def reciprocal_parts(divisor: int) -> tuple[float, float] | None:
    """Return two float32 that add up to the reciprocal of an integer, for ``lm.div_by``; None if that rounds otherwise.

    That it rounds every quotient as a division does is tested for all float32 numbers and these divisors.
    """
    odd = divisor // (divisor & -divisor) if divisor > 0 else 0
    if not 1 <= odd <= MOST_ODD_DIVISOR or divisor < 2 or divisor > 1 << 20:
        return None
    high = _as_float32(1 / divisor)
    return high, _as_float32(1 / divisor - high)


def _as_float32(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def conversion(text: str, source: torch.dtype, dest: torch.dtype) -> str:
    """Return the expression that converts a value; both are held in opmath types.

    Args:
        text: The expression of the value.
        source: Its dtype.
        dest: The dtype that it is converted to.
    """
    if dest in _TO_EIGHT_BITS and source is not dest:
        return f"{narrowed(conversion(text, source, torch.float32), dest)}.to(tl.float32)"
    have, want = opmath(source), opmath(dest)
    if have is want:
        return text
    if want is torch.bool:
        return f"{text} != 0"
    if have.is_floating_point and not want.is_floating_point:
        return f"{text}{_truncation(want)}"
    if have in _SIGNED_INTS and want is torch.float32:
        return f"lm.to_float32({text})"
    return f"{text}.to({triton_type(want)})"


def narrowed(text: str, dtype: torch.dtype) -> str:
    """Return the expression that rounds a value to a float dtype of fewer bits than it is held in.

    Args:
        text: The expression of the value, which is held in the opmath type.
        dtype: The dtype.
    """
    if dtype in _TO_EIGHT_BITS and not _saturates(dtype):
        return f"{_TO_EIGHT_BITS[dtype]}({text})"
    return f"{text}.to({triton_type(dtype)})"


@cache
def _saturates(dtype: torch.dtype) -> bool:
    """Return whether this version of torch makes the largest number of what is beyond it."""
    with _disable_current_modes():
        return math.isfinite(torch.tensor(1e9).to(dtype).item())


def _truncation(dest: torch.dtype) -> str:
    """Convert float to integer by way of a wide integer: hardware saturates at the width it converts to, eager wraps."""
    if dest is torch.uint8 or dest is torch.uint16 or dest is torch.uint32:
        return f".to(tl.int64).to({triton_type(dest)})"
    return f".to(tl.int32).to({triton_type(dest)})" if dest in _NARROW_INTS else f".to({triton_type(dest)})"


def _float_literal(value: float, dtype: torch.dtype) -> str:
    if math.isnan(value):
        return 'float("nan")'
    rounded = _rounded(value.hex(), dtype)
    if math.isinf(rounded):
        return _INFINITIES[rounded]
    if rounded == 0 and math.copysign(1, rounded) < 0:  # Triton makes +0 of a constant -0.0
        return f"{MINUS_ZERO}({triton_type(opmath(dtype))})"
    # Float32 keeps the short text (0.1, not 0.10000000149011612): Triton rounds it in the same way.
    return repr(value) if opmath(dtype) is dtype else repr(rounded)


def rounded(value: int | float, dtype: torch.dtype) -> float:
    """Round a number to a float dtype."""
    return _rounded(float(value).hex(), dtype)


def number(text: str, dtype: torch.dtype) -> bool | int | float:
    """Return the number that a literal of ``dtype`` stands for: the text of a float32 may have more digits than it holds."""
    if text in ("True", "False"):
        return text == "True"
    if text.startswith(MINUS_ZERO):
        return -0.0
    plain = text.removeprefix('float("').removesuffix('")')
    return rounded(float(plain), dtype) if dtype.is_floating_point else int(plain)


@cache
def _rounded(hexadecimal: str, dtype: torch.dtype) -> float:
    """Round a float to a dtype. It is given as text because 0.0 and -0.0 are one key of a cache."""
    with _disable_current_modes():  # a graph's fake tensors are dear
        return float(torch.tensor(float.fromhex(hexadecimal), dtype=torch.float64).to(dtype).item())


def _wrapped(value: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min
