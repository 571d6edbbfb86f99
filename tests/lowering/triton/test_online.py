"""Which sums are found to need no pass of their own, and which are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dynafuse.ir import Ref, Spec
from dynafuse.lowering.triton.online import OnlineSum, find_online_sums
from dynafuse.lowering.triton.reduction_passes import passes_before
from tests.support import representative
from tests.support.representative import F32, Case

Function = Callable[..., torch.Tensor]
X = (((4096, 131072), F32),)
WITH_ROW = (((4096, 131072), F32), ((4096, 1), F32))
WITH_COLUMN = (((4096, 131072), F32), ((131072,), F32))


def spec_of(monkeypatch: pytest.MonkeyPatch, function: Function, arguments: tuple) -> Spec:  # type: ignore[type-arg]
    monkeypatch.setitem(representative.CASES, "one", Case(function, arguments))
    return max((bound.spec for bound in representative.bounds("one")), key=lambda spec: len(spec.reductions))


def passes(spec: Spec) -> int:
    return max(passes_before(spec, find_online_sums(spec))[op] for op, _ in spec.reductions)


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1, keepdim=True)


def test_a_softmax_is_found_with_its_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, lambda x: x.softmax(-1), X)
    (found,) = find_online_sums(spec).values()
    assert found == OnlineSum(1, Ref("in", 0), Ref("op", 0), (), 0)
    assert passes_before(spec)[found.difference + 2] == 2 and passes(spec) == 1


FOUND: dict[str, tuple[Function, tuple, int | None]] = {  # type: ignore[type-arg]
    "weighted": (lambda x, w: ((x - largest(x)).exp() * w).sum(-1), WITH_COLUMN, 0),
    "shift_of_another_kind": (lambda x: (x - x.mean(-1, keepdim=True)).exp().sum(-1), X, None),
    "maximum_of_something_else": (lambda x: (x - largest(x * 2 + 1)).exp().sum(-1), X, None),
    "logsumexp": (lambda x: x.logsumexp(-1), X, None),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_can_be_taken_out_of_the_sum_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, arguments, maximum = FOUND[name]
    spec = spec_of(monkeypatch, function, arguments)
    (found,) = find_online_sums(spec).values()
    assert (found.maximum is None) == (maximum is None) and passes(spec) == 1


NOT_FOUND: dict[str, tuple[Function, tuple]] = {  # type: ignore[type-arg]
    "scaled_shift": (lambda x: torch.sub(x, largest(x), alpha=2).exp().sum(-1), X),
    "shift_needs_no_reduction": (lambda x, r: (x - r).exp().sum(-1), WITH_ROW),
    "added_to_the_exponential": (lambda x: ((x - largest(x)).exp() + 1).sum(-1), X),
    "the_weight_needs_the_row": (lambda x: ((x - largest(x)).exp() * (x - x.mean(-1, keepdim=True))).sum(-1), X),
    "no_sum": (lambda x: (x - largest(x)).exp().amax(-1), X),
    "another_function": (lambda x: (x - largest(x)).sin().sum(-1), X),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_cannot_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert find_online_sums(spec_of(monkeypatch, *NOT_FOUND[name])) == {}


def test_eagers_rounding_needs_the_shifted_values(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, lambda x: x.softmax(-1), X)
    rounded = dataclasses.replace(spec, options=tuple((k, v or k == "round_like_eager") for k, v in spec.options))
    assert find_online_sums(spec) and not find_online_sums(rounded)


SHIFTS: dict[str, Function] = {
    "its maximum where that is finite": lambda x: (x.logsumexp(0), x.softmax(0)),
    "the maximum first": lambda x: (x.softmax(0), x.logsumexp(0)),
    "twice its maximum": lambda x: ((x - 2 * x.amax(0)).exp().sum(0), x.softmax(0)),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_sums_whose_shifts_are_made_of_one_maximum_share_a_loop(name: str) -> None:
    """Rows of unknown length are looped over, whichever of the sums comes first."""
    torch._dynamo.reset()
    options = {"executors": "triton", "strict": True}
    compiled = torch.compile(SHIFTS[name], backend="dynafuse", dynamic=True, options=options)
    for x in (torch.randn(8), torch.randn(5000)):
        torch.testing.assert_close(compiled(x), SHIFTS[name](x))
