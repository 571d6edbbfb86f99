"""Python scalars and conversions as Triton source."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynafuse.ops.literals import conversion, literal, number, opmath, supported, triton_type

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@given(st.floats(), st.sampled_from(FLOATS))
def test_a_float_literal_is_the_rounded_value(value: float, dtype: torch.dtype) -> None:
    read = torch.tensor(number(literal(value, dtype), dtype), dtype=torch.float64).to(dtype)
    assert torch.equal(read.nan_to_num(7), torch.tensor(value, dtype=torch.float64).to(dtype).nan_to_num(7))


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(INTS))
def test_an_integer_literal_wraps_as_a_cast_does(value: int, dtype: torch.dtype) -> None:
    assert int(literal(value, dtype)) == torch.tensor(value, dtype=torch.int64).to(dtype).item()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float64_keeps_every_bit(value: float) -> None:
    assert struct.pack("d", number(literal(value, torch.float64), torch.float64)) == struct.pack("d", value)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (0.1, torch.float32, "0.1"),
        (1, torch.float32, "1.0"),
        (-0.0, torch.float32, "lm.minus_zero(tl.float32)"),
        (-0.0, torch.bfloat16, "lm.minus_zero(tl.float32)"),
        (-0.0, torch.float64, "lm.minus_zero(tl.float64)"),
        (-0.0, torch.int32, "0"),
        (1e40, torch.float32, 'float("inf")'),
        (-70000, torch.float16, 'float("-inf")'),
        (math.nan, torch.bfloat16, 'float("nan")'),
        (True, torch.int32, "1"),
        (0.5, torch.bool, "True"),
        (-1, torch.uint64, str(2**64 - 1)),
        (2**40, torch.int64, str(2**40)),
    ],
)
def test_literal(value: float, dtype: torch.dtype, text: str) -> None:
    assert literal(value, dtype) == text


@pytest.mark.parametrize(
    ("source", "dest", "text"),
    [
        (torch.bfloat16, torch.float32, "x"),
        (torch.float32, torch.float16, "x"),
        (torch.float64, torch.float16, "x.to(tl.float32)"),
        (torch.float32, torch.uint8, "x.to(tl.int64).to(tl.uint8)"),
        (torch.float32, torch.int8, "x.to(tl.int32).to(tl.int8)"),
        (torch.int64, torch.bool, "x != 0"),
        (torch.bool, torch.bfloat16, "x.to(tl.float32)"),
    ],
)
def test_conversion(source: torch.dtype, dest: torch.dtype, text: str) -> None:
    assert conversion("x", source, dest) == text


def test_dtypes() -> None:
    assert triton_type(torch.bool) == "tl.int1"
    assert opmath(torch.bfloat16) is torch.float32 and opmath(torch.float64) is torch.float64
    assert supported(torch.uint16) and not supported(torch.complex64)
