"""Errors name what happened, where, and what to do, and survive pickling."""

from __future__ import annotations

import pickle

import pytest

from dynafuse.errors import CompileError, DynafuseError, DynafuseWarning, LoweringError, OptionError


def test_unknown_name_lists_the_valid_ones_and_suggests_the_nearest() -> None:
    error = OptionError.unknown("option", "stritc", ["workers", "strict"])
    assert str(error) == "unknown option 'stritc' (did you mean 'strict'?); valid: strict, workers"


def test_unknown_name_far_from_all_valid_ones_gets_no_suggestion() -> None:
    assert str(OptionError.unknown("mode", "zzz", ["default"])) == "unknown mode 'zzz'; valid: default"


def test_unknown_name_among_none() -> None:
    assert str(OptionError.unknown("cost constant", "x", [])) == "unknown cost constant 'x'; valid: none"


def test_ill_typed_value_is_named_with_its_type() -> None:
    error = OptionError.ill_typed("option 'workers'", "many", "an integer")
    assert str(error) == "option 'workers' is 'many' (str): expected an integer"


def test_compile_error_says_what_why_and_where() -> None:
    text = str(CompileError(["aten.add.Tensor", "aten.relu.default"], "out of shared memory", "repro.py"))
    assert text.splitlines() == [
        "a region of 2 ops failed to compile: out of shared memory",
        "  ops: aten.add.Tensor, aten.relu.default",
        "  repro: repro.py",
        "  without DYNAFUSE_STRICT=1 the region runs eager instead",
    ]


def test_compile_error_of_a_long_region_is_shortened() -> None:
    text = str(CompileError(["aten.add.Tensor"] * 30, "no reason"))
    assert "a region of 30 ops" in text
    assert "… 18 more" in text
    assert "repro: none written" in text


def test_lowering_error_names_op_and_place() -> None:
    first = str(LoweringError("aten.sort.default", "no row for complex64", "model.py:7")).splitlines()[0]
    assert first == "cannot lower aten.sort.default (from model.py:7): no row for complex64"


@pytest.mark.parametrize(
    "error",
    [
        OptionError.unknown("option", "a", ["b"]),
        CompileError(["aten.add.Tensor"], "reason", "repro.py"),
        LoweringError("aten.add.Tensor", "reason", "model.py:7"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_process_borders(error: DynafuseError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_families() -> None:
    assert all(issubclass(error, DynafuseError) for error in (OptionError, CompileError, LoweringError))
    assert issubclass(DynafuseWarning, UserWarning)
