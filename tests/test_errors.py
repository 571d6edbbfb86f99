"""Errors name what happened, where, and what to do, and survive pickling."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import dynafuse
from dynafuse import backend
from dynafuse.errors import (
    CacheError,
    CompileError,
    DynafuseError,
    DynafuseWarning,
    ExecutorError,
    ForceError,
    LoweringError,
    OptionError,
    Violation,
    told,
)

ERRORS = (
    OptionError.unknown("option", "a", ["b"]),
    CompileError(["aten.add.Tensor"], "reason", "repro.py"),
    LoweringError("aten.add.Tensor", "reason", "model.py:7"),
    ForceError([Violation("triton", "aten.sort.default", "float32[3] on cpu", "reason", "model.py:7")], ["eager"]),
    CacheError("no exported cache"),
    ExecutorError("executor 'nvfuser' cannot be used"),
)
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


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


@each_error
def test_errors_cross_process_borders(error: DynafuseError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_families() -> None:
    assert all(issubclass(error, DynafuseError) for error in (OptionError, CompileError, LoweringError))
    assert issubclass(DynafuseWarning, UserWarning)


# ---------------------------------------------------------------------- raised by the backend


def test_every_public_error_is_among_those_that_are_tested() -> None:
    public = {getattr(dynafuse, name) for name in dynafuse.__all__ if name.endswith("Error")} - {DynafuseError}
    assert public <= set(map(type, ERRORS))


@each_error
@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_of_the_backend_is_caught_by_its_class(
    error: DynafuseError, fullgraph: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Any:
        raise error from KeyError("cause")

    monkeypatch.setattr(backend, "resolve", fail)
    with pytest.raises(type(error)) as caught:
        torch.compile(lambda x: x + 1, backend=backend.dynafuse, fullgraph=fullgraph)(torch.ones(3))
    assert str(caught.value) == str(error), "without what Dynamo adds"
    assert {name: getattr(caught.value, name) for name in vars(error)} == vars(error)
    assert isinstance(caught.value, BackendCompilerFailed) and caught.value.inner_exception is error
    assert isinstance(error.__cause__, KeyError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is type(error) and str(copy) == str(error)


@pytest.mark.parametrize(("options", "kind"), [
    ({"stritc": True}, OptionError),
    ({"workers": "many"}, OptionError),
    ({"cost": {"bandwith": 1}}, OptionError),
    ({"device": "h300"}, OptionError),
    ({"force": {"lin": "tritn"}}, OptionError),
])
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_what_is_wrong_with_options_is_caught_at_the_first_call(
    options: dict[str, Any], kind: type[DynafuseError], fullgraph: bool, grad: bool,
) -> None:
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4)), backend=backend.dynafuse, options=options,
                             fullgraph=fullgraph)
    for _ in range(2):
        with torch.set_grad_enabled(grad), pytest.raises(kind):
            compiled(torch.ones(4, 4))


def test_an_unknown_mode_is_caught() -> None:
    with pytest.raises(OptionError, match="unknown mode 'fast'; valid: default, max-autotune, max-autotune-no-cudagraphs, reduce-overhead"):
        torch.compile(lambda x: x + 1, backend=backend.dynafuse, mode="fast")(torch.ones(3))


def test_an_error_is_told_by_its_first_line_and_its_last_ones() -> None:
    assert told(ValueError("no\n\n  use  \n")) == "ValueError: no\n    use"
    assert told(ValueError()) == "ValueError"
    long = told(RuntimeError("\n".join(f"line {number}" for number in range(50))))
    assert long.splitlines()[:2] == ["RuntimeError: line 0", "    …"] and long.endswith("    line 49") and len(long.splitlines()) == 8
    assert len(told(RuntimeError("x" * 10_000))) < 200
