"""Every pointwise row's expression against eager, in the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dynafuse.ops as ops
from dynafuse.ops import Context, Kind, Row
from tests.support.pointwise_harness import DEVICE, evaluate, expression

SIZE = 64
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool)
SPECIALS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    -3.0,
    6.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-3,
)
ROWS = [row for row in ops.rows() if row.kind is Kind.POINTWISE]

NUMBERS: dict[str, list[list[Any]]] = {
    "aten.pow.Tensor_Scalar": [[e] for e in (0, 0.5, 1, 2, 3, 4, 7, 9, -0.5, -1, -2, 2.5)],
    "aten.pow.Scalar": [[2], [0.5], [1]],
    "aten.div.Tensor_mode": [[None], ["floor"], ["trunc"]],
    "aten.div.Scalar_mode": [[3, None], [3, "floor"], [-3, "trunc"]],
    "aten.round.decimals": [[2], [-1], [0]],
    "aten.gelu.default": [["none"], ["tanh"]],
    "aten.gelu_backward.default": [["none"], ["tanh"]],
    "aten.clip.default": [[-1, 2]],
    "aten.clamp.default": [[-1, 2], [None, 2], [-1, None]],
    "aten.lerp.Scalar": [[0.25], [0.75]],
    "aten.logit.default": [[None], [1e-2]],
    "aten.elu_backward.default": [[1.0, 1.0, 1.0, False], [2.0, 3.0, 0.5, False]],
    "aten.where.ScalarOther": [[2], [1.5]],
    "aten.add.Tensor": [[1], [2]],
}
"""The arguments that are not tensors, in schema order, where one value does not show everything."""

SCALAR_TENSORS = {"aten.masked_fill.Tensor": 2, "aten.fill.Tensor": 1}
"""Positions of operands that eager wants 0-dimensional."""

ROUNDED_CONSTANTS = ("hardsigmoid", "hardswish")
"""Eager keeps 1/6 as a float32 there, in float64 too."""

OWN_RANGE = ("nextafter", "nan_to_num")
"""The result depends on the dtype's own limits, so a wider type is no reference."""

EITHER_ZERO = ("aten.relu.", "aten.relu6.")
"""Maxima of 0.0 and -0.0 are either, as a processor has it: eager's own differ between CPU and CUDA."""

NONZERO_DIVISOR = ("div", "floor_divide", "fmod", "remainder")


def numbers_of(row: Row) -> list[list[Any]]:
    """Argument lists without the tensors: the table above, or defaults, or 2 for every number."""
    if str(row.target) in NUMBERS:
        return NUMBERS[str(row.target)]
    plain = [argument for argument in row.target._schema.arguments if "Tensor" not in str(argument.type)]
    return [[_default(argument) for argument in plain]]


def _default(argument: Any) -> Any:
    if argument.has_default_value():
        return argument.default_value
    return {"bool": False, "number": 2, "int": 2, "float": 2.0}.get(str(argument.type), 2)


def arguments(row: Row, dtype: torch.dtype, numbers: list[Any]) -> list[Any]:
    """Tensors of ``dtype`` (bool where a condition is asked for) among the numbers, in schema order."""
    rest, made, tensors = list(numbers), [], 0
    for position, argument in enumerate(row.target._schema.arguments):
        if "Tensor" in str(argument.type):
            values = tensor(torch.bool if position in row.raw else dtype, tensors, row)
            uniform = SCALAR_TENSORS.get(str(row.target)) == position
            made.append((values[:1].expand(SIZE).contiguous() if uniform else values).to(DEVICE))
            tensors += 1
        elif rest:
            made.append(rest.pop(0))
    return made


def tensor(dtype: torch.dtype, position: int, row: Row) -> torch.Tensor:
    """Random values and specials, in another order for each operand."""
    torch.manual_seed(position + 1)
    name = str(row.target)
    divides = (position > 0 or "Scalar_Tensor" in name) and any(part in name for part in NONZERO_DIVISOR)
    if dtype is torch.bool:
        return (torch.rand(SIZE) < 0.5) | divides
    if dtype.is_floating_point:
        values = torch.randn(SIZE, dtype=torch.float64) * 2
        # Vectorised and scalar backward functions treat NaN differently on the CPU; CUDA has the scalar ones.
        specials = torch.tensor(
            [x for x in SPECIALS if x == x or "_backward" not in str(row.target)], dtype=torch.float64
        )
        return values.index_put((torch.randperm(SIZE)[: len(specials)],), specials).to(dtype)
    low = 0 if dtype is torch.uint8 or "shift" in str(row.target) or "pow" in str(row.target) else -7
    values = torch.randint(low, 8, (SIZE,)).to(dtype)
    return torch.where(values == 0, 1, values).to(dtype) if divides else values


def call(row: Row, args: list[Any], size: int = SIZE) -> torch.Tensor | None:
    """Eager's result, or None where eager has no such kernel. Keyword-only arguments go by name."""
    schema = row.target._schema.arguments
    args = [arg[0] if SCALAR_TENSORS.get(str(row.target)) == k else arg for k, arg in enumerate(args)]
    positional = [arg for arg, argument in zip(args, schema, strict=False) if not argument.kwarg_only]
    named = {argument.name: arg for arg, argument in zip(args, schema, strict=False) if argument.kwarg_only}
    try:
        result = row.target(*[arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in positional], **named)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return result if result.shape == (size,) else None


def one_by_one(row: Row, args: list[Any], places: torch.Tensor) -> torch.Tensor:
    """Eager's results at some places, each alone: on some CPUs its vector code makes NaN of infinities, 0.0 of -0.0."""
    return torch.cat([call(row, [a[place:place + 1] if isinstance(a, torch.Tensor) else a for a in args], 1) for place in places])


def widened(args: list[Any]) -> list[Any]:
    return [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.target))
def test_expression_is_eager(row: Row, tmp_path: Path) -> None:
    if str(row.target).startswith("prims.convert_element_type"):
        pytest.skip("test_conversion has it")
    compared = 0
    for dtype in DTYPES:
        for numbers in numbers_of(row):
            args = arguments(row, dtype, numbers)
            expected = call(row, args)
            if expected is None:
                continue
            actual = evaluate(row, args, expected, tmp_path)
            check(row, args, actual, expected)
            compared += 1
    assert compared, "eager ran for no dtype"


def check(row: Row, args: list[Any], actual: torch.Tensor, expected: torch.Tensor) -> None:
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), (args, actual, expected)
        return
    narrow = expected.dtype is torch.float32 and not any(name in str(row.target) for name in OWN_RANGE)
    precise = call(row, widened(args)) if narrow else expected
    coarse = expected.dtype is torch.float32 or any(name in str(row.target) for name in ROUNDED_CONSTANTS)
    tolerance = 3e-6 if coarse else 1e-12
    reference = expected.double() if precise is None else precise.double()
    finite = expected.isfinite() & reference.isfinite()
    differs = ~finite & ~torch.isclose(actual, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    if differs.any():
        alone = one_by_one(row, args, differs.nonzero().flatten())
        torch.testing.assert_close(actual[differs], alone, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(actual[finite].double(), reference[finite], rtol=tolerance, atol=tolerance)
    zeros = (expected == 0) & (actual == 0)
    differs = zeros & (actual.signbit() != expected.signbit())
    if differs.any() and not any(name in str(row.target) for name in EITHER_ZERO):
        alone = one_by_one(row, args, differs.nonzero().flatten())
        assert torch.equal(actual[differs].signbit(), alone.signbit()), (args, actual, expected)


@pytest.mark.parametrize("dest", (*DTYPES, torch.float16, torch.int64), ids=str)
@pytest.mark.parametrize("source", (*DTYPES, torch.bfloat16, torch.int64), ids=str)
def test_conversion(source: torch.dtype, dest: torch.dtype, tmp_path: Path) -> None:
    row = ops.lookup(torch.ops.prims.convert_element_type.default)
    assert row is not None
    value = torch.arange(-8 if source.is_signed else 0, 8).repeat(4)[:SIZE // 2].to(source)
    value = (value * 0.75).to(source) if source.is_floating_point else value
    value = (value.abs() if _negative_to_unsigned(source, dest) else value).to(DEVICE)
    expected = value.to(dest)
    held = expected.float() if dest is torch.float16 else expected
    assert torch.equal(evaluate(row, [value, dest], held, tmp_path), held)


def _negative_to_unsigned(source: torch.dtype, dest: torch.dtype) -> bool:
    """Undefined in C for floats, and different between eager's devices."""
    return source.is_floating_point and dest is torch.uint8


MIXED = [
    ("aten.add.Tensor", torch.int32, torch.float32), ("aten.mul.Tensor", torch.bool, torch.int64),
    ("aten.lt.Tensor", torch.int64, torch.float32), ("aten.eq.Tensor", torch.bool, torch.uint8),
    ("aten.maximum.default", torch.int8, torch.int32), ("aten.div.Tensor", torch.int64, torch.int32),
    ("aten.logical_and.default", torch.float32, torch.bool), ("aten.copy.default", torch.int32, torch.float32),
]


@pytest.mark.parametrize(("name", "left", "right"), MIXED)
def test_operands_of_two_dtypes(name: str, left: torch.dtype, right: torch.dtype, tmp_path: Path) -> None:
    row = next(row for row in ROWS if str(row.target) == name)
    torch.manual_seed(0)
    args = [torch.randint(0, 5, (SIZE,)).to(DEVICE, dtype) for dtype in (left, right)]
    expected = call(row, args)
    assert expected is not None
    torch.testing.assert_close(evaluate(row, args, expected, tmp_path), expected, equal_nan=True)


@pytest.mark.parametrize("number", [2, 2.5, -1])
@pytest.mark.parametrize("name", ["eq", "lt", "ge"])
def test_integers_against_numbers(name: str, number: float, tmp_path: Path) -> None:
    row = next(row for row in ROWS if str(row.target) == f"aten.{name}.Scalar")
    args = [torch.arange(-4, 4, dtype=torch.int32, device=DEVICE), number]
    expected = row.target(*args)
    assert torch.equal(evaluate(row, args, expected, tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
@pytest.mark.parametrize("name", ["aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar"])
def test_a_number_times_alpha_wraps(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    row = next(row for row in ROWS if str(row.target) == name)
    value = torch.arange(8, device=DEVICE).to(dtype)
    args = [value, 3 if name != "aten.rsub.Scalar" else 2, 100]
    expected = row.target(*args) if "Scalar" in name else row.target(*args[:2], alpha=args[2])
    assert torch.equal(evaluate(row, args, expected, tmp_path), expected)


def test_a_product_less_itself_is_no_fused_multiply_add() -> None:
    """``fma(a, b, -v)`` of ``v = a * b`` is what rounding took from ``v``; eager's difference is 0, or NaN."""
    (row,) = (row for row in ROWS if row.target is torch.ops.aten.sub.Tensor)
    context = Context(torch.float32, torch.bfloat16)
    assert expression(row, context, ["v1", "v1"]) == "tl.abs(v1) * 0.0"
    assert expression(row, context, ["v1", "v2"]) == expression(row, context, ["v1", "v2", 1]) == "v1 - v2"
    assert expression(row, context, ["v1", "v1", 2]) == "v1 - 2.0 * v1"


@pytest.mark.parametrize(("out", "exponent", "is_called"), [
    (torch.float32, 7, False), (torch.float32, 9, True), (torch.bfloat16, 9, False), (torch.bfloat16, 9.5, True),
    (torch.float16, -3, True), (torch.float64, 5, True)])
def test_whole_powers_are_products_where_these_are_as_exact(out: torch.dtype, exponent: float, is_called: bool) -> None:
    row = ops.lookup(torch.ops.aten.pow.Tensor_Scalar)
    assert row is not None and row.emit is not None
    dtype = torch.float64 if out is torch.float64 else torch.float32
    assert ("lm.pow" in row.emit(Context(dtype, out), "x", exponent)) == is_called
