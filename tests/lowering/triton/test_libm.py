"""The math library in the interpreter against torch, NaNs and infinities included."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dynafuse.lowering.triton import libm, libm_quick, text
from dynafuse.ops.literals import MOST_ODD_DIVISOR, reciprocal_parts
from tests.support.pointwise_harness import DEVICE, load

SIZE = 32
SPECIALS = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, float("inf"), float("-inf"), float("nan")], dtype=torch.float64
)

UNARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erfinv",
    "lgamma",
    "rsqrt",
    "sqrt",
    "trunc",
    "round",
    "reciprocal",
    "sign",
    "sigmoid",
]
BINARY = {
    "maximum": torch.maximum, "minimum": torch.minimum, "fmax": torch.fmax, "fmin": torch.fmin, "fmod": torch.fmod,
    "remainder": torch.remainder, "floor_div": torch.floor_divide, "pow": torch.pow, "atan2": torch.atan2,
    "hypot": torch.hypot, "copysign": torch.copysign, "div": torch.true_divide, "logaddexp": torch.logaddexp,
    "xlogy": torch.xlogy,
}
INTEGER = {
    "floor_div_int": torch.floor_divide, "remainder_int": torch.remainder, "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift, "maximum": torch.maximum,
}
SLOPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_slope": torch.nn.functional.silu,
    "mish_slope": torch.nn.functional.mish,
    "gelu_tanh_slope": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


_KERNEL = """\
import triton
import triton.language as tl
from dynafuse.lowering.triton import libm as lm


@triton.jit
def kernel({pointers}out_pointer, N: tl.constexpr, M: tl.constexpr):
    at = tl.arange(0, N)
{lines}
    tl.store(out_pointer + tl.arange(0, M), out)
"""


def run(expression: str, operands: list[torch.Tensor], out: torch.Tensor, folder: Path) -> torch.Tensor:
    """``expression`` over ``x0``, ``x1`` … (and ``at``, their positions)."""
    names = [f"x{k}" for k in range(len(operands))]
    body = [f"{name} = tl.load({name}_pointer + at)" for name in names] + [f"out = {expression}"]
    pointers, lines = "".join(f"{name}_pointer, " for name in names), "".join(f"    {line}\n" for line in body)
    text = _KERNEL.format(pointers=pointers, lines=lines)
    result = out.to(DEVICE)
    load(text, folder).kernel[(1,)](*(x.to(DEVICE) for x in operands), result, N=operands[0].numel(), M=out.numel())
    return result.cpu()


def values(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        drawn = torch.randint(-20, 20, (SIZE,), generator=generator)
        return torch.where(drawn == 0, 3, drawn).to(dtype)
    drawn = torch.randn(SIZE, dtype=torch.float64, generator=generator) * 2
    drawn[torch.randperm(SIZE, generator=generator)[: len(SPECIALS)]] = SPECIALS
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = values(0, dtype)
    torch.testing.assert_close(
        run(f"lm.{name}(x0)", [x], torch.empty_like(x), tmp_path), getattr(torch, name)(x), equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = values(0, dtype), values(1, dtype)
    torch.testing.assert_close(
        run(f"lm.{name}(x0, x1)", [x, y], torch.empty_like(x), tmp_path), BINARY[name](x, y), equal_nan=True
    )


@pytest.mark.parametrize("divisor", [2, 3, 9, 14, 25, 96, 129])
def test_division_by_a_small_integer(divisor: int, tmp_path: Path) -> None:
    x = torch.cat([values(0, torch.float32)[4:], torch.tensor([3e38, -0.0, 1e-30, -torch.inf])])
    parts = reciprocal_parts(divisor)
    assert parts
    found = run(f"lm.div_by(x0, {parts[0]!r}, {parts[1]!r})", [x], torch.empty_like(x), tmp_path)
    bits, expected = found.view(torch.int32), (x / divisor).view(torch.int32)
    assert torch.equal(bits[~x.isnan()], expected[~x.isnan()]) and torch.equal(found.isnan(), x.isnan())


DIVISORS = [0.0, -0.0, 1.0, -3.0, 7.3, 1e-45, -3e-40, 1.2e-38, 4.7e-30, 6.1e28, -2.9e38, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("divisor", DIVISORS)
def test_division_of_many_by_one(divisor: float, tmp_path: Path) -> None:
    mantissas, exponents = torch.randn(4096 - len(SPECIALS)), torch.randint(-90, 120, (4096 - len(SPECIALS),))
    x = torch.cat([torch.ldexp(mantissas, exponents), SPECIALS.float()])
    y = torch.full_like(x, divisor)
    found = run("lm.div(x0, tl.load(x1_pointer))", [x, y], torch.empty_like(x), tmp_path)
    expected = x / y
    normal = ~(expected.abs() < 2.0**-100) | (expected == 0)
    assert torch.equal(found[normal].view(torch.int32)[~expected[normal].isnan()],
                       expected[normal].view(torch.int32)[~expected[normal].isnan()])
    assert torch.equal(found.isnan(), expected.isnan())
    torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=0, equal_nan=True)


def test_short_divisions_round_like_divisions() -> None:
    """For all significands: neither sign nor exponent matters, but for overflow and subnormal numbers."""
    significands = (torch.arange(1 << 23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    parts = {divisor: reciprocal_parts(divisor) for divisor in range(3, MOST_ODD_DIVISOR + 1, 2)}
    for x in significands.split(1 << 14):  # what is computed of so many stays in the processor's cache
        exact = x.double()
        for divisor, part in parts.items():
            assert part
            rest = x * part[1]  # in float32; the sum below is exact in float64
            assert torch.equal((exact * part[0] + rest.double()).float(), (exact / divisor).float()), divisor


@pytest.mark.parametrize("divisor", [-3, 0, 1, MOST_ODD_DIVISOR + 2, 1 << 30])
def test_other_divisions_stay_divisions(divisor: int) -> None:
    assert reciprocal_parts(divisor) is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", INTEGER)
def test_integers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = values(0, dtype), values(1, dtype)
    assert torch.equal(run(f"lm.{name}(x0, x1)", [x, y], torch.empty_like(x), tmp_path), INTEGER[name](x, y))


def test_integer_powers(tmp_path: Path) -> None:
    base, exponent = torch.arange(-4, 4).repeat(8), torch.arange(8).repeat_interleave(8)
    assert torch.equal(run("lm.pow_int(x0, x1)", [base, exponent], torch.empty_like(base), tmp_path), base**exponent)


@pytest.mark.parametrize("name", SLOPES)
def test_slopes(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-6, 6, SIZE, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(SLOPES[name](x).sum(), x)
    torch.testing.assert_close(run(f"lm.{name}(x0)", [x.detach()], torch.empty_like(slope), tmp_path), slope)


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_random_numbers(name: str, tmp_path: Path) -> None:
    positions = torch.arange(4096)
    drawn = run(f"lm.{name}(x1, x0)", [positions, torch.full((4096,), 7)], torch.empty(4096), tmp_path)
    mean, spread = (0.5, 12**-0.5) if name == "rand" else (0.0, 1.0)
    assert abs(drawn.mean() - mean) < 0.05 and abs(drawn.std() - spread) < 0.05
    if name == "rand":
        assert drawn.min() >= 0 and drawn.max() < 1


@pytest.mark.parametrize("name", ["rand", "randn"])
def test_neighbours_may_share_a_block_of_random_words(name: str, tmp_path: Path) -> None:
    positions = torch.arange(1 << 34, (1 << 34) + 4096)
    alone, shared = (run(f"lm.{name}{suffix}(7, x0)", [positions], torch.empty(4096), tmp_path) for suffix in ("", "_of_fours"))
    torch.testing.assert_close(alone, shared, rtol=0 if name == "rand" else 1e-6, atol=0 if name == "rand" else 1e-6)
    assert alone.unique().numel() > 4000


def test_random_integers(tmp_path: Path) -> None:
    positions = torch.arange(1024)
    operands = [positions, torch.full((1024,), 7), torch.full((1024,), -3), torch.full((1024,), 5)]
    drawn = run("lm.randint64(x1, x0, x2, x3)", operands, torch.empty(1024, dtype=torch.int64), tmp_path)
    assert drawn.unique().tolist() == list(range(-3, 5))


@pytest.mark.parametrize("bound", [2**62 + 5, 2**63 - 1])
def test_random_integers_of_more_than_half_their_range(bound: int, tmp_path: Path) -> None:
    drawn = run(f"lm.randint64(x1, x0, {1 - bound}, {bound})", [torch.arange(1024), torch.full((1024,), 7)],
                torch.empty(1024, dtype=torch.int64), tmp_path)
    assert bool((drawn.abs() < bound).all()) and 0.4 < float((drawn < 0).double().mean()) < 0.6
    assert float(drawn.double().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


REDUCTIONS = {"amax": torch.amax, "amin": torch.amin, "prod": torch.prod}


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, nan: bool, combine: bool, tmp_path: Path) -> None:
    x = torch.randn(SIZE)
    if nan:
        x[5] = float("nan")
    short = {"amax": "max", "amin": "min"}.get(name, name)
    text = f"tl.reduce(x0, 0, lm.combine_{short}, keep_dims=True)" if combine else f"lm.{name}(x0, 0, True)"
    expected = REDUCTIONS[name](x, 0, keepdim=True)
    torch.testing.assert_close(run(text, [x], torch.empty(1), tmp_path), expected, equal_nan=True)


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("data", [[3.0, 7.0, 7.0, 1.0], [3.0, float("nan"), float("nan"), 9.0], [2.0, 2.0, 2.0, 2.0]])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_reductions(name: str, data: list[float], combine: bool, tmp_path: Path) -> None:
    x = torch.tensor(data)
    text = (
        f"tl.reduce((x0, at), 0, lm.combine_{name}, keep_dims=True)[1]" if combine else f"lm.{name}(x0, at, 0, True)[1]"
    )
    assert run(text, [x], torch.empty(1, dtype=torch.int32), tmp_path).item() == getattr(torch, name)(x).item()


def test_deviations(tmp_path: Path) -> None:
    x, weight = torch.randn(SIZE, dtype=torch.float64) + 100, torch.ones(SIZE, dtype=torch.float64)
    x[3] = weight[3] = 0
    elements = x[weight > 0]
    for part, expected in enumerate([elements.sum(), elements.var(correction=0) * (SIZE - 1)]):
        text = f"tl.full([1], 0.0, tl.float64) + lm.deviations(x0, x0 * 0, x1, {SIZE - 1}, 0)[{part}]"
        torch.testing.assert_close(run(text, [x, weight], torch.empty(1, dtype=torch.float64), tmp_path)[0], expected)


def test_take_deviation(tmp_path: Path) -> None:
    x = torch.randn(3, SIZE, dtype=torch.float64) + 100
    first = "lm.take_deviation(0.0, 0.0, x0, 1.0, 1.0)"
    second = f"lm.take_deviation({first}[0], {first}[1], x1, 2.0, 1 / 2)"
    for part, expected in enumerate([x.sum(0), x.var(0, correction=0) * 3]):
        text = f"lm.take_deviation({second}[0], {second}[1], x2, 3.0, 1 / 6)[{part}]"
        torch.testing.assert_close(run(text, list(x), torch.empty(SIZE, dtype=torch.float64), tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_an_element_has_the_same_bits_in_a_tile_of_any_size(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.linspace(0.1, 0.9, 32, dtype=dtype)
    whole, part = (run(f"lm.{name}(x0)", [x[:n]], torch.empty(n, dtype=dtype), tmp_path) for n in (32, 2))
    torch.testing.assert_close(whole[:2], part, rtol=0, atol=0, equal_nan=True)


def test_one_value_is_added_at_every_place_of_a_tile(tmp_path: Path) -> None:
    text = _KERNEL.replace("tl.store(out_pointer + tl.arange(0, M), out)", "tl.atomic_add(out_pointer + at[None, :], out)")
    line = "    out = tl.load(x_pointer + tl.arange(0, 1)[:, None])"
    out = torch.ones(SIZE, device=DEVICE)
    kernel = load(text.format(pointers="x_pointer, ", lines=line), tmp_path).kernel
    kernel[(1,)](torch.full((SIZE,), 2.5, device=DEVICE)[-1:], out, N=SIZE, M=SIZE)
    torch.testing.assert_close(out.cpu(), torch.full((SIZE,), 3.5))


def test_all_quicker_functions_are_taken_where_they_may_be() -> None:
    names = re.findall(r"^def (\w+)\(", Path(libm_quick.__file__).read_text(), re.MULTILINE)
    assert names
    for name in names:
        assert text.quick(f"lm.{name}(v0)") == f"lq.{name}(v0)" and hasattr(libm, name)
    assert text.quick("lm.erf(v0) + lm.exp2(v1)") == "lm.erf(v0) + lm.exp2(v1)"
