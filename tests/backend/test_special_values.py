"""Signs of zeros, infinities and NaNs through whole graphs, against eager, in the interpreter and in C++.

Every expression of a table is exact, or has a result that is, so that eager's bits are expected. One graph holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dynafuse
from dynafuse import ops
from dynafuse.lowering.inductor import availability
from dynafuse.ops import Kind
from tests.support.differential import compiled

INF, NAN = math.inf, math.nan
needs_cpp = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
EXECUTORS = ["triton", pytest.param("inductor", marks=needs_cpp)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Compilers of C++ are slow: one narrow dtype and one wide tell what differs between them.
EVERY_DTYPE = [*(("triton", dtype) for dtype in DTYPES),
               *(pytest.param("inductor", dtype, marks=needs_cpp) for dtype in (torch.float32, torch.bfloat16))]

SPECIALS = [0.0, -0.0, 1.5, -1.5, INF, -INF, NAN, 2.0, 2.0**-17, -(2.0**-17), 3.0, -0.25, 2.0**-24, -(2.0**-24)]
OTHERS = [-0.0, 0.0, 0.0, -0.0, 1.0, 2.0, 0.0, -0.0, INF, -INF, -INF, INF, -1.0, 0.5]

LITERALS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "neg": lambda x, y: -x,
    "divided by": lambda x, y: x / -0.0,
    "times": lambda x, y: x * -0.0,
    "plus": lambda x, y: x + -0.0,
    "plus zero": lambda x, y: x + 0.0,
    "minus": lambda x, y: x - -0.0,
    "minus zero": lambda x, y: x - 0.0,
    "taken from": lambda x, y: -0.0 - x,
    "taken from zero": lambda x, y: 0.0 - x,
    "two literals": lambda x, y: torch.stack([1 / (x * 0.0), 1 / (x * -0.0)]),
    "two literals by name": lambda x, y: torch.stack([torch.add(x, y, alpha=0.0), torch.add(x, y, alpha=-0.0)]),
    "full": lambda x, y: torch.full_like(x, -0.0) * (x > 0),
    "where": lambda x, y: torch.where(x > 0, x, -0.0),
    "where of two": lambda x, y: torch.where(x > 0, 0.0, -0.0),
    "addcmul": lambda x, y: torch.addcmul(y, x, y, value=-0.0),
    "pad": lambda x, y: F.pad(x, (1, 1), value=-0.0) * 1.0,
    "masked_fill": lambda x, y: x.masked_fill(y > 0, -0.0),
    "copysign": lambda x, y: torch.copysign(x, -0.0),
    "nan_to_num": lambda x, y: torch.nan_to_num(x, nan=-0.0),
    "threshold": lambda x, y: F.threshold(x, 0.5, -0.0),
    "cat": lambda x, y: torch.cat([x.new_full((2,), -0.0), x]) * 1.0,
}

EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "slope of logit": lambda x, y: torch.ops.aten.logit_backward(y, x, 0.25),
    "copysign": torch.copysign, "sign": lambda x, y: torch.sign(x), "abs": lambda x, y: x.abs(),
    "round": lambda x, y: torch.round(x * 0.25), "ceil": lambda x, y: torch.ceil(x * 0.25),
    "trunc": lambda x, y: torch.trunc(x * 0.25), "floor": lambda x, y: torch.floor(x * 0.25),
    "reciprocal": lambda x, y: 1 / x, "sqrt": lambda x, y: torch.sqrt(x), "product": lambda x, y: x * y,
    "quotient": lambda x, y: x / y, "sum": lambda x, y: x + y, "difference": lambda x, y: x - y,
    "rsub": torch.rsub, "square": lambda x, y: x.square(), "cube": lambda x, y: x ** 3, "inverse": lambda x, y: x ** -1,
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.5), "hardshrink": lambda x, y: F.hardshrink(x),
    "fmod": torch.fmod, "sgn": lambda x, y: torch.sgn(x),
}


@pytest.mark.parametrize(("executor", "dtype"), EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("table", [LITERALS, EXACT], ids=["literals", "exact"])
def test_bits_are_eagers(executor: str, table: dict[str, Callable[..., torch.Tensor]], dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in table.values()]

    x, y = torch.tensor(SPECIALS, dtype=dtype), torch.tensor(OTHERS, dtype=dtype)
    expected, actual = every(x, y), compiled(every, executors=executor)(x, y)
    wrong = {name: (ours, eager) for name, ours, eager in zip(table, actual, expected, strict=True) if not same(ours, eager)}
    assert not {name for name, (ours, _) in wrong.items() if not same(ours, one_by_one(table[name], x, y))}, wrong


def one_by_one(function: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Eager's results, each element computed alone: on some CPUs its vector code loses NaNs."""
    return torch.cat([function(x[k:k + 1], y[k:k + 1]) for k in range(len(x))])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table", [LITERALS, EXACT], ids=["literals", "exact"])
def test_bits_are_eagers_on_a_gpu(table: dict[str, Callable[..., torch.Tensor]], dtype: torch.dtype) -> None:
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, y) for function in table.values()]

    # So many that a lane has several, which are compared two at a time.
    x, y = (torch.tensor(values, dtype=dtype, device="cuda").repeat(64) for values in (SPECIALS, OTHERS))
    expected, actual = every(x, y), compiled(every, executors="triton")(x, y)
    assert not [name for name, ours, eager in zip(table, actual, expected, strict=True) if not same(ours, eager)]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether values are equal, the signs of zeros too; one NaN is as good as another."""
    left, right = left.double(), right.double()
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        torch.where(left.isnan(), 0, left).view(torch.int64), torch.where(right.isnan(), 0, right).view(torch.int64))


EITHER = ("relu", "clamp", "clip", "hardtanh", "maximum", "minimum", "fmax", "fmin")
"""Maxima of 0.0 and -0.0 are either, as a processor has it: eager's own differ between CPU and CUDA."""

OWN = {
    "aten.softshrink.default": "its decomposition multiplies by 0",
    "aten.gelu.default": "NaN of infinity, or infinity, by whether eager's own code is vectorised",
    "aten.sigmoid_backward.default": "its decomposition multiplies in another order: overflow",
    "aten.lerp.Tensor": "its decomposition adds in another order: 0.0 or -0.0",
    "prims.fma.default": "rounded once or twice",
    "aten.addcmul.default": "rounded once or twice",
}
"""Rows that are not compared, with the reason."""


def calls() -> dict[str, Callable[..., torch.Tensor]]:
    """Every pointwise row that eager has for float32, as a function of three tensors."""
    rows = [row for row in ops.rows() if row.kind is Kind.POINTWISE and not row.raw and "(a" not in str(row.target._schema)]
    made = {str(row.target): called(row.target) for row in rows if str(row.target) not in OWN}
    return {name: function for name, function in made.items() if runs(function)}


def called(target: Any) -> Callable[..., torch.Tensor]:
    """An op of tensors, and of its defaults or 2 for every number."""
    arguments = [(a.name if a.kwarg_only else None, a.type.kind() == "TensorType", number(a)) for a in target._schema.arguments]

    def function(*given: torch.Tensor) -> torch.Tensor:
        tensors = iter((*given, *given))
        values = [(name, next(tensors) if is_tensor else value) for name, is_tensor, value in arguments]
        positional = [value for name, value in values if name is None]
        made: torch.Tensor = target(*positional, **{name: value for name, value in values if name is not None})
        return made

    return function


def number(argument: Any) -> Any:
    return argument.default_value if argument.has_default_value() else NUMBERS.get(str(argument.type), 2.0)


NUMBERS = {"bool": False, "int": 2}


def runs(function: Callable[..., torch.Tensor]) -> bool:
    try:
        return function(*GRID).shape == GRID[0].shape
    except (RuntimeError, NotImplementedError, TypeError):
        return False


VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -3.0, INF, -INF, NAN, 2.0**-40, -(2.0**-50), 2e18]
GRID = tuple(torch.tensor(VALUES)[at].flatten() for at in torch.meshgrid(*[torch.arange(len(VALUES))] * 3, indexing="ij"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_pointwise_row_has_eagers_special_values(executor: str) -> None:
    """Infinities, NaNs and zeros with their signs are where eager has them; the others are near."""
    table = calls()
    assert len(table) > 100
    every = lambda *given: [function(*given) for function in table.values()]  # noqa: E731
    results = compiled(every, executors=executor)(*GRID)
    wrong = {}
    for name, ours, eager in zip(table, results, every(*GRID), strict=True):
        bad = differing(name, ours, eager)
        bad &= ~(torch.stack(GRID).isnan().any(0) & ("_backward" in name))  # eager's own vectorised code is otherwise there
        if bad.any():
            wrong[name] = [(*(float(x[k]) for x in GRID), float(ours[k]), float(eager[k])) for k in bad.nonzero().flatten()[:3]]
    assert not wrong, "\n".join(f"{name}: {triples}" for name, triples in wrong.items())


def differing(name: str, ours: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """Where a result is another than eager's."""
    if not eager.is_floating_point():
        return ours != eager
    near = torch.isclose(ours, eager, rtol=1e-4, atol=1e-6, equal_nan=True)
    signs = (eager == 0) & (ours == 0) & (ours.signbit() != eager.signbit())
    return ~near | (signs & (not any(part in name for part in EITHER)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_equal_literals_of_two_signs_stay_two_in_training(executor: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([1 / (x.sin() * 0.0), 1 / (x.sin() * -0.0)])

    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    assert same(compiled(function, executors=executor)(x).detach(), function(x).detach())


POWERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "-1": lambda x: (x + 1) ** -1, "-2": lambda x: torch.pow(x + 1, -2), "in place": lambda x: (x + 1).pow_(-1),
    "of bytes": lambda x: (x.to(torch.uint8) + 1) ** -1,
}
QUOTIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floor_divide": lambda x: (x + 1) // 0, "remainder": lambda x: (x + 1) % 0, "fmod": lambda x: torch.fmod(x + 1, 0),
    "floor": lambda x: torch.div(x + 1, 0, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x + 1, 0, rounding_mode="trunc"),
}


REFUSED = POWERS | QUOTIENTS


@pytest.mark.parametrize(("name", "executor"), [
    *((name, "triton") for name in REFUSED),
    *(pytest.param(name, "inductor", marks=needs_cpp) for name in ("-1", "remainder", "trunc"))])
def test_what_eager_refuses_of_integers_raises(name: str, executor: str) -> None:
    function, x = REFUSED[name], torch.arange(1, 9)
    with pytest.raises(RuntimeError) as eager:
        function(x)
    with pytest.raises(RuntimeError, match=str(eager.value)):
        compiled(function, executors=executor)(x)


BY_ZEROS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor_divide": lambda x, y: (x + 1) // y, "remainder": lambda x, y: (x + 1) % y, "fmod": lambda x, y: torch.fmod(x + 1, y),
    "trunc": lambda x, y: torch.div(x + 1, y, rounding_mode="trunc"), "taken of": lambda x, y: 7 % (y + 0),
}


@needs_cpp
@pytest.mark.parametrize("name", BY_ZEROS)
def test_integers_divided_by_a_zero_among_others_raise_in_c_plus_plus(name: str) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(BY_ZEROS[name], executors="inductor")(torch.arange(4), torch.tensor([1, 0, 2, 3]))


DIVISORS = [1.5, -1.5, 0.0, -0.0, INF, -INF, NAN]
DIVISIONS: dict[str, Callable[..., torch.Tensor]] = {
    "remainder": torch.remainder, "fmod": torch.fmod, "floor_divide": torch.floor_divide,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"), "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize(("executor", "dtype"), EVERY_DTYPE[:-1], ids=str)
def test_divisions_with_a_remainder(executor: str, dtype: torch.dtype) -> None:
    """Of tensors and of numbers, with every special value on both sides."""
    def every(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [function(x, divisor) for function in DIVISIONS.values() for divisor in (y, *DIVISORS)]

    x, y = (values.flatten() for values in torch.meshgrid(
        torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -7.0, INF, -INF, NAN], dtype=dtype), torch.tensor(DIVISORS, dtype=dtype),
        indexing="ij"))
    names = [(name, divisor) for name in DIVISIONS for divisor in ("a tensor", *DIVISORS)]
    wrong = {name: (ours, eager) for name, ours, eager in zip(names, compiled(every, executors=executor)(x, y), every(x, y),
                                                              strict=True) if not same(ours, eager)}
    assert not wrong


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("value", [-0.0, 1.5, float("nan"), float("-inf")])
def test_reductions_of_one_element_are_computed_in_kernels(value: float, dynamic: bool) -> None:
    """A sum begins with 0, so that of -0 it is 0; what the largest, the product and others begin with does not show."""
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(1), x.mean(1, keepdim=True) * 2, x.amax(1), x.amin((1,), True), x.prod(1), (x != 0).any(1), (x > 0).all(1)

    x = torch.full((3, 1, 4), value)
    for actual, expected in zip(compiled(function, dynamic=dynamic, executors="triton")(x), function(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
        if value == 0 and expected.is_floating_point():
            assert torch.equal(actual.signbit(), expected.signbit())
    assert not any(step["executor"] == "eager" for graph in dynafuse.explain(function, x, device="h200").to_dict()["graphs"]
                   for step in graph["steps"])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("reduction", "beta"), [("sum", 1.0), ("mean", 0.5)])
def test_the_gradient_of_a_smooth_l1_loss_is_nan_where_its_difference_is(executor: str, reduction: str, beta: float) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(x, y, reduction=reduction, beta=beta)

    x, y = torch.tensor([*SPECIALS, INF], requires_grad=True), torch.tensor([*OTHERS, INF])
    (expected,), (gradient,) = (torch.autograd.grad(call(x, y), x) for call in (loss, compiled(loss, executors=executor)))
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(gradient, expected, equal_nan=True)


def test_writes_into_expanded_bools_raise() -> None:
    """Torch traces them as a difference of bools, which it refuses itself where sizes are known."""
    def write(x: torch.Tensor) -> torch.Tensor:
        is_small = x < 1
        is_small.expand(1, -1).masked_fill_(is_small, False)
        return is_small

    with pytest.raises(Exception, match="two bool tensors"):
        compiled(write, dynamic=True, executors="triton")(torch.zeros(3))
