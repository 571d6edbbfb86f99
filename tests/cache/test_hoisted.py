"""Floats that do not change code are no part of a key: kernels take them as arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.cache import canonical as key
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.config import resolve
from dynafuse.select.measurement import measurement_key
from tests.support import graphs

X, Y = torch.randn(6, 8), torch.randn(8)
Write = Callable[..., Any]


def bound(write: Write, *inputs: torch.Tensor, executor: str = "triton") -> CanonicalRegion:
    """The one region of a graph."""
    plan = graphs.planned(graphs.built(write, *(inputs or (X, Y))))
    (region,) = plan.regions
    made = key.canonical(plan.annotated, region, resolve(environ={}).key(), "sm90")
    return made if executor == "triton" else key.rekeyed(made, key.replace(region, executor=executor), executor)


def called(target: str, *numbers: Any, **named: Any) -> Write:
    """An op of exp(x) and numbers, less y."""
    return lambda b, x, y: b.op("aten.sub.Tensor", b.op(target, b.op("aten.exp.default", x), *numbers, **named), y)


def scaled(number: Any) -> Write:
    return called("aten.mul.Tensor", number)


LIFTED: dict[str, tuple[Write, Write, tuple[float, ...]]] = {
    "an epsilon": (called("aten.add.Tensor", 1e-5), called("aten.add.Tensor", 1e-6), (1e-6,)),
    "a factor": (scaled(0.3), scaled(-1.7), (-1.7,)),
    "a divisor": (called("aten.div.Tensor", 3.7), called("aten.div.Tensor", 0.9), (1 / 0.9,)),
    "a difference": (called("aten.rsub.Scalar", 0.3), called("aten.rsub.Scalar", 0.7), (0.7,)),
    "alpha": (lambda b, x, y: b.op("aten.add.Tensor", x, y, alpha=0.3), lambda b, x, y: b.op("aten.add.Tensor", x, y, alpha=0.7),
              (0.7,)),
    "bounds": (called("aten.clamp.default", -0.1, 0.1), called("aten.clamp.default", -0.2, 1.3), (-0.2, 1.3)),
    "a slope": (called("aten.leaky_relu.default", 0.01), called("aten.leaky_relu.default", 0.2), (0.2,)),
    "a threshold": (called("aten.gt.Scalar", 0.1), called("aten.gt.Scalar", 0.2), (0.2,)),
}


@pytest.mark.parametrize("what", LIFTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_share_a_kernel(what: str, dtype: torch.dtype) -> None:
    first, second, numbers = LIFTED[what]
    left, right = (bound(write, X.to(dtype), Y.to(dtype)) for write in (first, second))
    assert left.key == right.key and key.diff(left, right) == []
    if what == "a threshold":  # is compared in the dtype of what it is compared with
        numbers = tuple(torch.tensor(numbers, dtype=dtype).double().tolist()) if dtype is torch.bfloat16 else numbers
    assert right.hoisted == numbers and len(left.hoisted) == len(numbers)
    assert right.code.hoisted == tuple(f"k{i}" for i in range(len(numbers)))
    assert key.diff(left.spec, right.spec) != []  # which hold the numbers


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -0.25, 3.0, 3, True, math.inf, -math.inf, math.nan,
                                    1e-42, 1e300, -3.4028234663852886e38])
def test_remarkable_numbers_stay_in_the_code(number: Any) -> None:
    write = lambda b, x, y: b.op("aten.where.ScalarOther", b.op("aten.gt.Tensor", x, y), x, number)  # noqa: E731
    made = bound(write)
    assert repr(made.code) == repr(made.spec)
    assert made.hoisted == ()
    assert made.key != bound(scaled(0.3)).key


@pytest.mark.parametrize("number", [3e-39, 1e300])
def test_a_divisor_whose_reciprocal_is_no_ordinary_float_stays(number: float) -> None:
    assert bound(called("aten.div.Tensor", number)).hoisted == ()


def test_float64_keeps_its_numbers() -> None:
    first, second = (bound(scaled(number), X.double(), Y.double()) for number in (0.3, 0.7))
    assert first.hoisted == () and first.key != second.key
    assert key.diff(first, second) == ["op 1: mul with other 0.3 against 0.7"]
    compared = bound(called("aten.gt.Scalar", 0.1), X.double(), Y)
    assert compared.hoisted == ()


def test_exponents_stay_in_the_code() -> None:
    power = lambda e: bound(called("aten.pow.Tensor_Scalar", e))  # noqa: E731
    assert power(2.7).hoisted == () and power(2.7).key != power(2.3).key


def test_factors_of_numbers_stay_in_the_code() -> None:
    assert bound(called("aten.add.Tensor", 0.3, alpha=0.7)).hoisted == (0.3,)


@pytest.mark.parametrize("executor", ["nvfuser", "inductor"])
def test_other_executors_keep_their_numbers(executor: str) -> None:
    first, second = (bound(scaled(number), executor=executor) for number in (0.3, 0.7))
    assert first.hoisted == () and first.code == first.spec and first.key != second.key
    assert key.diff(first, second) == ["op 1: mul with other 0.3 against 0.7"]


def test_a_measurement_serves_all_layers() -> None:
    first, second, other = (measurement_key(bound(scaled(n)).spec, {}, torch.device("cpu")) for n in (0.3, 0.7, 1.0))
    assert first == second != other


@pytest.mark.parametrize("numbers", [(0.3, 0.7), (0.7, 0.3), (0.4, 0.4)])
def test_the_order_of_operands_does_not_follow_from_numbers(numbers: tuple[float, float]) -> None:
    def write(first: float, second: float, swapped: bool = False) -> Write:
        def sum_of_products(build: graphs.Builder, x: Node, y: Node) -> Node:
            products = [build.op("aten.mul.Tensor", x, first), build.op("aten.mul.Tensor", build.op("aten.sin.default", y), second)]
            return build.op("aten.add.Tensor", *(reversed(products) if swapped else products))

        return sum_of_products

    assert bound(write(0.1, 0.2)).key == bound(write(*numbers)).key == bound(write(*numbers, swapped=True)).key
