"""Which kernel reduces rows."""

from __future__ import annotations

import pytest
import sympy

from dynafuse.fx import UNKNOWN_SIZE
from dynafuse.partition.kernel_class import (
    FEW_ROWS,
    HEAVY,
    LONGEST_AHEAD,
    LONGEST_BESIDE,
    LONGEST_TOGETHER,
    PROCESSORS,
    SPLIT_ABOVE,
    SPLIT_COLUMNS_FROM,
    SPLIT_HEAVY_COLUMNS_FROM,
    estimate,
    reduction_class,
    rows_beside_columns,
)

N = sympy.Symbol("n", integer=True, positive=True)


@pytest.mark.parametrize(("rows", "length", "contiguous", "expected"), [
    (64, 1024, True, "row"),
    (64, 65536, True, "split"),
    (1, SPLIT_ABOVE, True, "row"),
    (1, SPLIT_ABOVE + 1, True, "split"),
    (2 * PROCESSORS - 1, 2 * SPLIT_ABOVE, True, "split"),
    (2 * PROCESSORS, 2 * SPLIT_ABOVE, True, "row"),
    (1, UNKNOWN_SIZE, True, "split"),  # it may be long
    (1024, SPLIT_COLUMNS_FROM - 1, False, "column"),
    (1024, SPLIT_COLUMNS_FROM, False, "split"),
    (1 << 17, 1 << 20, False, "column"),
])
def test_few_long_rows_are_split(rows: int, length: int, contiguous: bool, expected: str) -> None:
    along, across = (1.0, 0.0) if contiguous else (0.0, 1.0)
    assert reduction_class(rows, length, along=along, across=across, splittable=True) == expected
    whole = reduction_class(rows, length, along=along, across=across, splittable=False)
    assert whole == ("row" if contiguous else "column")


@pytest.mark.parametrize(("length", "along", "expected"), [
    (LONGEST_TOGETHER, 1.0, "row"), (LONGEST_TOGETHER + 1, 1.0, "column"), (LONGEST_TOGETHER + 1, 4.0, "row"),
    (LONGEST_AHEAD + 1, 4.0, "column"),
])
def test_few_long_rows_that_most_lies_across_are_walked(length: int, along: float, expected: str) -> None:
    """A program has no registers for as many of them as fill sectors: eight of 6,272 elements took six times as long."""
    assert reduction_class(8 * FEW_ROWS - 1, length, along=along, across=4.0, splittable=False) == expected


@pytest.mark.parametrize(("along", "longest"), [(3.0, 2 * LONGEST_BESIDE), (1.0, LONGEST_BESIDE)])
def test_rows_that_others_lie_across_are_held_or_taken_side_by_side(along: float, longest: int) -> None:
    def found(rows: int, length: int, is_static: bool = True) -> str:
        return reduction_class(rows, length, along=along, across=1.0, splittable=False, is_static=is_static)

    assert found(FEW_ROWS, 12544) == "row"  # however long: a few programs of neighbouring rows would leave the device idle
    assert found(FEW_ROWS + 1, 12544) == "column"
    assert found(FEW_ROWS + 1, LONGEST_AHEAD) == "row"
    assert [found(1 << 17, length) for length in (longest, longest + 1)] == ["row", "column"]
    assert found(1 << 17, longest, is_static=False) == "column"


@pytest.mark.parametrize(("length", "flops", "expected"), [
    (SPLIT_HEAVY_COLUMNS_FROM, HEAVY, "split"),
    (SPLIT_HEAVY_COLUMNS_FROM - 1, HEAVY, "column"),
    (SPLIT_COLUMNS_FROM - 1, HEAVY - 1, "column"),
    (SPLIT_COLUMNS_FROM, 0.0, "split"),
])
def test_columns_of_much_arithmetic_are_split_when_they_are_shorter(length: int, flops: float, expected: str) -> None:
    assert reduction_class(1024, length, along=0.0, across=1.0, splittable=True, flops=flops) == expected


@pytest.mark.parametrize(("size", "expected"), [
    (7, 7), (N, UNKNOWN_SIZE), (2 * N, 2 * UNKNOWN_SIZE), (N // (4 * UNKNOWN_SIZE), 1),
])
def test_sizes_that_are_not_known_count_as_one_number(size: int | sympy.Expr, expected: int) -> None:
    assert estimate(size) == expected


@pytest.mark.parametrize(("length", "states", "in_parts", "expected"), [
    (4096, 8, True, "shared"), (4097, 8, True, "next"), (12288, 8, True, "next"), (12289, 8, True, "again"),
    (17066, 8, True, "again"), (17067, 8, True, None), (16384, 4, True, "shared"), (16385, 4, True, "again"),
    (13312, 8, False, "shared"), (13313, 8, False, None), (10240, 12, True, "next"), (10241, 12, True, None),
])
def test_how_rows_are_taken_beside_states_of_columns(
        length: int, states: int, in_parts: bool, expected: str | None) -> None:
    """Of two tensors of 16-bit floats: as they were loaded, as what is computed with, or once more from the cache."""
    assert rows_beside_columns(length, read=4, held=8, states=states, in_parts=in_parts) == expected
