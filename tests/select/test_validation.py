"""What passes for torch's result before a kernel of another library is used, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynafuse.ir import Spec
from dynafuse.select.validation import check, differs
from tests.support import graphs
from tests.support.by_regions import ByRegions

CPU = torch.device("cpu")


def spec_of(write: Any, *inputs: torch.Tensor) -> Spec:
    bound, = ByRegions(graphs.built(write, *inputs), "sm90").bounds.values()
    return bound.spec


def shifted(g: graphs.Builder, x: Any) -> Any:
    rolled = g.op("aten.cat.default", [g.op("aten.slice.Tensor", x, 0, 7, 8), g.op("aten.slice.Tensor", x, 0, 0, 7)])
    return g.op("aten.add.Tensor", rolled, x)


def test_a_right_kernel_passes_and_a_wrong_one_is_named() -> None:
    spec = spec_of(shifted, torch.randn(8, 8))
    check(lambda inputs: [inputs[0].roll(1, 0) + inputs[0]], spec, {}, CPU)
    with pytest.raises(RuntimeError, match=r"result 0, of aten.add.Tensor, is not torch's"):
        check(lambda inputs: [inputs[0].roll(2, 0) + inputs[0]], spec, {}, CPU)


def test_a_kernel_that_overwrites_its_input_is_compared_with_what_was_there() -> None:
    spec = spec_of(shifted, torch.randn(8, 8))
    check(lambda inputs: [inputs[0].copy_(inputs[0].roll(1, 0) + inputs[0])], spec, {}, CPU)


def full(value: float) -> torch.Tensor:
    return torch.full((9,), value)


DIFFERENCES = {  # found, wanted, whether that is wrong
    "rounding": (full(1 / 3).bfloat16(), full(1 / 3), False),
    "another value": (full(0.0), full(1.0), True),
    "NaN": (full(float("nan")), full(0.0), True),
    "infinities": (full(float("inf")), full(float("inf")), False),
    "one integer in five": (torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 4, 6]), False),
    "all truth values": (torch.tensor([True, False]), torch.tensor([False, True]), True),
    "nothing": (torch.empty(0), torch.empty(0), False),
    "next to nothing": (full(0.0), full(1e-8), False),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_only_gross_differences_count(name: str) -> None:
    found, wanted, wrong = DIFFERENCES[name]
    assert differs(found, wanted) is wrong
