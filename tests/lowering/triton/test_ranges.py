"""The ranges of integers: never narrower than what is computed, and as narrow as an index needs to go unchecked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from dynafuse.ir import Ref
from dynafuse.lowering.calls import row_and_call
from dynafuse.lowering.triton.ranges import Range, Ranges
from dynafuse.ops import Kind
from tests.support.representative import spec_of

Function = Callable[..., torch.Tensor]
GENERATOR = torch.Generator().manual_seed(3)


def integers(dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, (6, 5), generator=GENERATOR).to(dtype)


LONG = torch.cat([integers(torch.int64, -20, 20), torch.tensor([[-(2**63), 2**63 - 1, 0, 1, -1]])])
BYTES = torch.arange(40).reshape(8, 5).mul(7).to(torch.uint8)
SMALL = torch.tensor([[-128, 127, 100, -1, 44]], dtype=torch.int8)
TRUTH = integers(torch.bool, 0, 2)


def range_of(function: Function, *inputs: torch.Tensor, dynamic: bool = False) -> Range:
    spec = spec_of(function, *inputs, dynamic=dynamic)
    ranges = Ranges(spec, list(map(row_and_call, spec.ops)))
    (store,) = spec.stores
    return ranges.of(Ref("op", store.op))


KNOWN: dict[str, tuple[Function, tuple[torch.Tensor, ...], int, int]] = {
    "arange": (lambda x: torch.arange(3, 12, 2) + x[0, 0] * 0, (TRUTH,), 3, 11),
    "arange backwards": (lambda x: torch.arange(9, -1, -1) + x[0, 0] * 0, (TRUTH,), 0, 9),
    "clamp": (lambda x: x.clamp(0, 9), (LONG,), 0, 9),
    "clamp below": (lambda x: x.clamp_min(-3).clamp_max(4), (LONG,), -3, 4),
    "clamp of crossed bounds": (lambda x: x.clamp(5, 2), (LONG,), 2, 2),
    "remainder": (lambda x: x % 7, (LONG,), 0, 6),
    "bits": (lambda x: x & 15, (LONG,), 0, 15),
    "where": (lambda x: torch.where(x > 0, x % 3, torch.full_like(x, 8)), (LONG,), 0, 8),
    "bools": (lambda x: x.long() * 3 + 1, (TRUTH,), 1, 4),
    "bytes": (lambda x: x.long(), (BYTES,), 0, 255),
    "byte below": (lambda x: x.int() - 300, (BYTES,), -300, -45),
    "product": (lambda x: (x % 5) * (x % 3), (LONG,), 0, 8),
    "negative": (lambda x: -(x % 5) * 2, (LONG,), -8, 0),
    "magnitude": (lambda x: (x % 9 - 6).abs(), (LONG,), 0, 6),
    "extremes": (lambda x: torch.minimum(torch.maximum(x, x % 4), x % 11), (LONG,), 0, 10),
    "position": (lambda x: x.argmax(1), (LONG,), 0, 4),
    "count": (lambda x: (x > 0).sum(1), (LONG,), 0, 5),
    "position in all": (lambda x: x.argmin(), (LONG,), 0, 34),
    "views": (lambda x: (x % 7).t()[1:3].reshape(-1).flip(0), (LONG,), 0, 6),
    "cat": (lambda x: torch.cat([x % 7, (x % 3) - 9]), (LONG,), -9, 6),
    "pad": (lambda x: torch.constant_pad_nd(x % 7, [1, 1], 40), (LONG,), 0, 40),
    "taken": (lambda x: (x % 7)[:, torch.tensor([0, 2])], (LONG,), 0, 6),
    "halves": (lambda x: ((x % 50).float() * 0.5).long(), (LONG,), 0, 24),
    "pixels that are resized": (lambda x: (((x % 50).float() + 0.5) * 0.5 - 0.5).clamp(min=0.0).long()[:, None], (LONG,), 0, 24),
    "negative halves": (lambda x: ((x % 50).bfloat16() * -0.5).long(), (LONG,), -25, 0),
    "floats of views": (lambda x: ((x % 9).double().t()[1:3] + 0.75).int(), (LONG,), 0, 8),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_range_is_known(name: str) -> None:
    function, inputs, low, high = KNOWN[name]
    assert range_of(function, *inputs) == Range(sympy.Integer(low), sympy.Integer(high))
    low_value, high_value = map(int, torch.aminmax(function(*inputs).long()))
    assert low <= low_value and high_value <= high


UNKNOWN: dict[str, tuple[Function, torch.Tensor]] = {
    "an input": (lambda x: x.flip(0), LONG),
    "what wraps around": (lambda x: x.clamp_min(0) + 1, LONG),
    "the magnitude of the lowest": (lambda x: x.abs(), LONG),
    "a negation of the lowest": (lambda x: -x.clamp_max(0), LONG),
    "a narrower type": (lambda x: (x % 1000).to(torch.int8), LONG),
    "a bound that does not fit": (lambda x: x.clamp_min(100) + 100, SMALL),
    "a product that does not fit": (lambda x: x * 2, SMALL),
    "a float": (lambda x: (x.float() / 3).to(torch.int8), SMALL),
    "a float that is given": (lambda x: x.float().clamp(0.0, 3.0).long(), torch.randn(5)),
    "a product with one": (lambda x: ((x % 5).float() * x.abs().float().sqrt()).clamp(0.0, 9.0).long(), LONG),
    "a float that is not held": (lambda x: ((x % 7).half() * 20000.0).clamp(max=1.0).long(), LONG),
    "a divisor of either sign": (lambda x: x % x.clamp(-3, 3), LONG),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_sure_is_the_dtypes(name: str) -> None:
    function, x = UNKNOWN[name]
    dtype = function(torch.ones_like(x)).dtype
    info = torch.iinfo(dtype)
    assert range_of(function, x) == Range(sympy.Integer(info.min), sympy.Integer(info.max))


@pytest.mark.parametrize("function", [
    lambda x: torch.arange(x.shape[0]) + (x[0, 0] > 0) * 0,
    lambda x: x.shape[0] - 1 - torch.arange(x.shape[0]) + (x[0, 0] > 0) * 0,
    lambda x: x.clamp(0, x.shape[0] - 1),
    lambda x: (x - 5) % x.shape[0],
])
def test_sizes_are_bounds(function: Function) -> None:
    found = range_of(function, LONG, dynamic=True)
    (size,) = found.high.free_symbols
    assert found.at_least(sympy.S.Zero) and found.below(size) and not found.below(size - 1)


def test_every_rule_is_of_an_op_of_the_table() -> None:
    import dynafuse.ops as ops
    from dynafuse.lowering.triton.ranges import RULES

    names = {row.target.name().partition("::")[2].partition(".")[0] for row in ops.rows() if row.kind is not Kind.OPAQUE}
    assert RULES.keys() <= names
