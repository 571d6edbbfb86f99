"""Rows of pointwise ops: one Triton expression each.

A template's ``{0}``, ``{1}`` … are the arguments in schema order. Where the expression depends on a dtype or on an
argument's value, a function of ``(context, *arguments)`` writes it: tensors are names there, numbers are numbers.

    >>> import dynafuse.ops as ops
    >>> ops.lookup(torch.ops.aten.pow.Tensor_Scalar).emit(Context(torch.float32, torch.float32), "x", 2)
    'x * x'
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from dynafuse.ops.literals import HoistedScalar, Scalar, conversion, literal, supported, triton_type
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Call, Cast, Context, Emit, eager, pointwise, register

# Instructions of functions of a float32 element, as ptxas writes them for sm_90, without those for rare arguments.
_EXP = 8.0
_EXPM1 = 26.0
_LOG = 26.0
_PERIODIC = 40.0  # exact reduction of the argument to a period
_TANH = 20.0
_ERF = 28.0
_POW = 90.0
_QUOTIENT = 12.0
_MODULO = 75.0
_SIGMOID = _EXP + _QUOTIENT + 2
_SOFTPLUS = _EXP + _LOG + 4
_SQRT_HALF = "0.7071067811865476"
_INV_SQRT_2PI = "0.3989422804014327"
_SQRT_2_OVER_PI = "0.7978845608028654"
_GELU_CUBIC = "0.044715"


def _row(names: str, emit: Emit, *, cast: Cast = Cast.OUTPUT, raw: tuple[int, ...] = (), hoists: tuple[int, ...] = (),
         hoists_inverse: tuple[int, ...] = (), steps: tuple[int, ...] = (), rounds: bool = False, casts: bool = False,
         picks: bool = False, smooth: bool = False, flops: float = 1.0, flops_of: Callable[[Call], float] | None = None,
         accepts: Callable[[Call], str] | None = None) -> None:
    for target in overloads(names):
        row = pointwise(target, emit, cast=cast, raw=raw, flops=flops)
        register(dataclasses.replace(row, hoists=hoists, hoists_inverse=hoists_inverse, steps=steps, casts=casts,
                                     rounds=rounds, picks=picks, smooth=smooth, flops_of=flops_of, accepts=accepts))


def _eager(names: str, reason: str) -> None:
    for target in overloads(names):
        register(eager(target, reason))


def text(value: Any, dtype: torch.dtype) -> str:
    """Return a variable's name as it is, a Python number as a literal of ``dtype``."""
    return value if isinstance(value, str) else literal(value, dtype)


def _both(name: str) -> str:
    return f"aten.{name}.default prims.{name}.default"


def _tensor_or_scalar(name: str) -> str:
    return f"aten.{name}.Tensor aten.{name}.Scalar"


def _by_dtype(*, floats: Emit, ints: Emit = "", bools: Emit = "") -> Callable[..., str]:
    """Return an ``emit`` that chooses an expression by the dtype of evaluation; without one, that of the next wider kind."""

    def emit(context: Context, *args: Any) -> str:
        template = _chosen(context.dtype, floats, ints, bools)
        return template(context, *args) if callable(template) else fill(template, context, *args)

    return emit


def _chosen(dtype: torch.dtype, floats: Emit, ints: Emit, bools: Emit) -> Emit:
    if dtype.is_floating_point:
        return floats
    return (bools or ints or floats) if dtype is torch.bool else (ints or floats)


def fill(template: str, context: Context, *args: Any) -> str:
    """Return a template with its arguments filled in.

    Args:
        template: A Triton expression over ``{0}``, ``{1}`` …
        context: The dtypes; numbers become literals of ``context.dtype``.
        *args: Names of values, and numbers.
    """
    return template.format(*(_filled(arg, context.dtype) for arg in args))


def _filled(arg: Any, dtype: torch.dtype) -> Any:
    return literal(arg, dtype) if isinstance(arg, Scalar) else arg


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _scaled(context: Context, value: Any, alpha: Any) -> str:
    if not isinstance(value, str) and not context.dtype.is_floating_point:
        return text(value * alpha, context.dtype)  # wrapped, as the product of two literals of Triton is not
    shown = text(value, context.dtype)
    return shown if alpha == 1 else f"{text(alpha, context.dtype)} * {shown}"


def _add(context: Context, left: Any, right: Any, alpha: Any = 1) -> str:
    if context.dtype is torch.bool:
        return f"{text(left, torch.bool)} | {text(right, torch.bool)}" if alpha else text(left, torch.bool)
    return f"{text(left, context.dtype)} + {_scaled(context, right, alpha)}"


def _sub(context: Context, left: Any, right: Any, alpha: Any = 1) -> str:
    if isinstance(left, str) and left == right and alpha == 1 and context.dtype.is_floating_point:
        # A product less itself may become one fused multiply-add, which keeps what rounding took from the product.
        return f"tl.abs({left}) * 0.0"
    return f"{text(left, context.dtype)} - {_scaled(context, right, alpha)}"


def _rsub(context: Context, left: Any, right: Any, alpha: Any = 1) -> str:
    return f"{text(right, context.dtype)} - {_scaled(context, left, alpha)}"


def scalar(value: Any, dtype: torch.dtype) -> str:
    """Return a variable's name as it is, a number as a tensor: functions look at their operands' dtypes."""
    return value if isinstance(value, str) else f"tl.full([], {literal(value, dtype)}, {triton_type(dtype)})"


def _function(name: str) -> Callable[..., str]:
    """Return an ``emit`` that calls a math library function on the op's arguments."""
    return lambda context, *args: f"{name}({', '.join(scalar(arg, context.dtype) for arg in args)})"


_MUL = _by_dtype(floats="{0} * {1}", bools="{0} & {1}")


def _div(context: Context, left: Any, right: Any) -> str:
    """Multiply by the reciprocal of a divisor that is a number, as eager does; else divide."""
    if isinstance(right, HoistedScalar):
        return f"{text(left, context.dtype)} * {right.name}"
    if isinstance(right, int | float) and math.isfinite(right) and right != 0:
        return f"{text(left, context.dtype)} * {literal(1 / right, context.dtype)}"
    return _function("lm.div")(context, left, right)


def _flops_of_quotient(call: Call) -> float:
    """Return the instructions of a division: by a number it is a product."""
    return 1.0 if isinstance(tuple(call.args.values())[1], (int, float, HoistedScalar)) else _QUOTIENT


def _modulo_or(integers: float) -> Callable[[Call], float]:
    """Return what counts the instructions of a quotient without its fraction, or of its rest, given those of integers."""
    return lambda call: _MODULO if call.dtype.is_floating_point else integers


_FLOOR_DIV = _by_dtype(floats=_function("lm.floor_div"), ints=_function("lm.floor_div_int"))
_TRUNC_DIV = _by_dtype(floats=lambda *args: f"lm.trunc({_function('lm.div')(*args)})", ints="{0} // {1}")
_FMOD = _by_dtype(floats=_function("lm.fmod"), ints="{0} % {1}")
_REMAINDER = _by_dtype(floats=_function("lm.remainder"), ints=_function("lm.remainder_int"))


def _div_mode(context: Context, left: Any, right: Any, rounding_mode: str | None = None) -> str:
    if rounding_mode is None:
        return _div(context, left, right)
    return (_FLOOR_DIV if rounding_mode == "floor" else _TRUNC_DIV)(context, left, right)


def _prims_div(context: Context, left: Any, right: Any) -> str:
    return _div(context, left, right) if context.dtype.is_floating_point else fill("{0} // {1}", context, left, right)


# What eager does for these exponents.
_POWERS = {0.5: "lm.sqrt({0})", -0.5: "lm.rsqrt({0})", -1: "lm.reciprocal({0})", -2: "lm.reciprocal({0} * {0})"}
_UNROLLED_EXPONENT = 64
# Eager multiplies up to the third power; a call of pow for the fourth would bound the kernel. A product is off by half a
# unit in the last place, a square by twice what its operand is off besides: the 8th power by 3.5. That of CUDA's powf is 4
# (CUDA C++ Programming Guide, "Mathematical Functions"). 16 bits have room for nothing of that.
_UNROLLED_OF_FLOATS = {torch.float64: 4, torch.float32: 8}


def _flops_of_power(call: Call) -> float:
    """Return the instructions of a power whose exponent is a number."""
    exponent = tuple(call.args.values())[1]
    if isinstance(exponent, int | float) and exponent in _POWERS:
        return _QUOTIENT
    is_product = isinstance(exponent, int | float) and 0 <= exponent <= _UNROLLED_OF_FLOATS[torch.float32]
    return 4.0 if is_product and exponent == int(exponent) else _POW


def _pow_scalar(context: Context, base: Any, exponent: Any) -> str:
    if isinstance(exponent, str):
        return _pow(context, base, exponent)
    if context.dtype.is_floating_point and exponent in _POWERS:
        return _POWERS[exponent].format(base)
    if 0 <= exponent <= _UNROLLED_OF_FLOATS.get(context.out, _UNROLLED_EXPONENT) and exponent == int(exponent):
        return _int_power(base, int(exponent))
    return _pow(context, base, exponent)


def _int_power(base: str, exponent: int) -> str:
    """Write out repeated squaring."""
    if exponent == 0:
        return f"tl.zeros_like({base}) + 1"
    if exponent == 1:
        return base
    half = _int_power(base, exponent // 2)
    square = f"({half}) * ({half})" if exponent > 3 else f"{half} * {half}"
    return square if exponent % 2 == 0 else f"{square} * {base}"


def _pow(context: Context, base: Any, exponent: Any) -> str:
    return _function("lm.pow" if context.dtype.is_floating_point else "lm.pow_int")(context, base, exponent)


def _accepts_divisor(call: Call) -> str:
    divisor = tuple(call.args.values())[1]
    by_zero = isinstance(divisor, int | float) and divisor == 0 and not call.dtype.is_floating_point
    return "integers divided by 0: eager raises" if by_zero else ""


def _accepts_numbers(call: Call) -> str:
    """Refuse a difference of bools, as eager does. Torch itself traces writes into expanded bools as such."""
    return "a difference of bools: eager raises" if call.dtype is torch.bool else ""


_row("aten.add.Tensor aten.add.Scalar prims.add.default", _add, hoists=(1, 2))
_row("aten.sub.Tensor aten.sub.Scalar prims.sub.default", _sub, hoists=(1, 2), accepts=_accepts_numbers)
_row("aten.rsub.Tensor aten.rsub.Scalar", _rsub, hoists=(1, 2), accepts=_accepts_numbers)
_row(_tensor_or_scalar("mul") + " prims.mul.default", _MUL, hoists=(1,))
_row(_tensor_or_scalar("div") + " " + _tensor_or_scalar("true_divide"), _div, hoists_inverse=(1,), smooth=True,
     flops_of=_flops_of_quotient)
_row("aten.div.Tensor_mode aten.div.Scalar_mode", _div_mode, steps=(0, 1), flops_of=_modulo_or(1.0),
     accepts=_accepts_divisor)
_row("prims.div.default", _prims_div, hoists_inverse=(1,), smooth=True, flops_of=_flops_of_quotient)
_row("aten.floor_divide.default aten.floor_divide.Scalar", _FLOOR_DIV, steps=(0, 1), flops_of=_modulo_or(4.0),
     accepts=_accepts_divisor)
_row(_tensor_or_scalar("fmod") + " prims.fmod.default", _FMOD, steps=(0, 1), flops_of=_modulo_or(40.0),
     accepts=_accepts_divisor)
_row(
    _tensor_or_scalar("remainder") + " aten.remainder.Scalar_Tensor prims.remainder.default",
    _REMAINDER,
    steps=(0, 1),
    flops_of=_modulo_or(40.0),
    accepts=_accepts_divisor,
)
def _accepts_power(call: Call) -> str:
    """Refuse a negative number as the exponent of integers; a tensor may hold some."""
    exponent = tuple(call.args.values())[1]
    allowed = call.dtype.is_floating_point or (isinstance(exponent, int | float) and exponent >= 0)
    return "" if allowed else "integers to a power that may be negative: eager raises"


_row("aten.pow.Tensor_Scalar", _pow_scalar, flops_of=_flops_of_power, accepts=_accepts_power)
_row("aten.pow.Tensor_Tensor prims.pow.default aten.pow.Scalar", _pow, flops=_POW)
_row("aten.float_power.Tensor_Scalar", _pow_scalar, flops=_POW)
_row("aten.float_power.Tensor_Tensor", _pow, flops=_POW)
_row(_both("neg"), _by_dtype(floats="lm.neg({0})", ints="-{0}"), picks=True, accepts=_accepts_numbers)
_row(_both("abs"), _by_dtype(floats="tl.abs({0})", bools="{0}"), picks=True)
_row(_both("sign") + " aten.sgn.default", _by_dtype(floats="lm.sign({0})", bools="{0}"), steps=(0,))
_row("aten.positive.default", "{0}")
_row("aten.square.default", _by_dtype(floats="{0} * {0}", bools="{0}"))
_row(_both("reciprocal"), "lm.reciprocal({0})", smooth=True, flops=4)
_row(_both("sqrt"), "lm.sqrt({0})", smooth=True, flops=4)
_row(_both("rsqrt"), "lm.rsqrt({0})", flops=4)
_row("prims.cbrt.default", "lm.cbrt({0})", flops=12)
_row(
    "prims.fma.default",
    _by_dtype(floats="lm.fma({0}, {1}, {2})", ints="{0} * {1} + {2}", bools="({0} & {1}) | {2}"),
    flops=2,
)
_row(_both("hypot"), _function("lm.hypot"), flops=16)
_row("aten.copysign.Tensor aten.copysign.Scalar", _function("lm.copysign"))
_row(
    _both("nextafter"),
    _function("lm.nextafter"),
    flops=4,
    accepts=lambda call: (
        "" if call.dtype in (torch.float32, torch.float64) else "nextafter needs the 16-bit type itself"
    ),
)
_row("aten.ldexp.Tensor", "{0} * lm.exp2({1})", flops=3)
_eager("aten.gcd.default prims.gcd.default", "gcd: a data-dependent loop")


def _addcmul(context: Context, base: Any, left: Any, right: Any, value: Any = 1) -> str:
    return f"{text(base, context.dtype)} + {_scaled(context, left, value)} * {text(right, context.dtype)}"


def _addcdiv(context: Context, base: Any, left: Any, right: Any, value: Any = 1) -> str:
    quotient = f"({_div(context, left, right)})"
    return f"{text(base, context.dtype)} + {_scaled(context, quotient, value)}"


_LERP = "tl.where(tl.abs({2}) < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1 - {2}))"


def _lerp_scalar(context: Context, start: Any, end: Any, weight: Any) -> str:
    if isinstance(weight, str):
        return fill(_LERP, context, start, end, weight)
    near, far = literal(weight, context.dtype), literal(1 - weight, context.dtype)
    return f"{start} + {near} * ({end} - {start})" if abs(weight) < 0.5 else f"{end} - ({end} - {start}) * {far}"


_row("aten.addcmul.default", _addcmul, hoists=(3,), flops=3)
_row("aten.addcdiv.default", _addcdiv, hoists=(3,), flops=_QUOTIENT + 2)
_row("aten.lerp.Tensor", _LERP, flops=6)
_row("aten.lerp.Scalar", _lerp_scalar, flops=3)

# Comparison and logic -------------------------------------------------------------------------------------------------

# Triton's int1 is signed: true < false. Orders of bools are written as logic.
_COMPARISONS: dict[str, Emit] = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": _by_dtype(floats="{0} < {1}", bools="({0} == 0) & ({1} != 0)"),
    "le": _by_dtype(floats="{0} <= {1}", bools="({0} == 0) | ({1} != 0)"),
    "gt": _by_dtype(floats="{0} > {1}", bools="({0} != 0) & ({1} == 0)"),
    "ge": _by_dtype(floats="{0} >= {1}", bools="({0} != 0) | ({1} == 0)"),
}

for _name, _emit in _COMPARISONS.items():
    _row(f"{_tensor_or_scalar(_name)} prims.{_name}.default", _emit, cast=Cast.PROMOTED, hoists=(1,))

_row("aten.logical_not.default", "{0} == 0", cast=Cast.NONE)
_row("aten.logical_and.default", "({0} != 0) & ({1} != 0)", cast=Cast.NONE)
_row("aten.logical_or.default", "({0} != 0) | ({1} != 0)", cast=Cast.NONE)
_row("aten.logical_xor.default", "({0} != 0) != ({1} != 0)", cast=Cast.NONE)

_BITWISE = {"and": "&", "or": "|", "xor": "^"}

for _name, _operator in _BITWISE.items():
    _row(f"aten.bitwise_{_name}.Tensor aten.bitwise_{_name}.Scalar aten.bitwise_{_name}.Scalar_Tensor "
         f"aten.__{_name}__.Tensor aten.__{_name}__.Scalar prims.bitwise_{_name}.default", f"{{0}} {_operator} {{1}}")

_row(
    _both("bitwise_not"),
    _by_dtype(floats=lambda context, value: f"{value} ^ {literal(-1, context.dtype)}", bools="{0} == 0"),
)
_row(
    "aten.bitwise_left_shift.Tensor aten.bitwise_left_shift.Tensor_Scalar aten.__lshift__.Tensor "
    "aten.__lshift__.Scalar aten.bitwise_left_shift.Scalar_Tensor prims.shift_left.default",
    _function("lm.left_shift"),
    flops=3,
)
_row("aten.bitwise_right_shift.Tensor aten.bitwise_right_shift.Tensor_Scalar aten.__rshift__.Tensor "
     "aten.__rshift__.Scalar aten.bitwise_right_shift.Scalar_Tensor prims.shift_right_arithmetic.default",
     _function("lm.right_shift"), flops=3)

_NEVER, _ALWAYS = "{0} != {0}", "{0} == {0}"
_row("aten.isnan.default", "{0} != {0}", cast=Cast.PROMOTED)
_row("aten.isinf.default", _by_dtype(floats='tl.abs({0}) == float("inf")', ints=_NEVER), cast=Cast.PROMOTED)
_row("aten.isfinite.default prims.isfinite.default",
     _by_dtype(floats='tl.abs({0}) < float("inf")', ints=_ALWAYS), cast=Cast.PROMOTED)
_row("aten.isposinf.default", _by_dtype(floats='{0} == float("inf")', ints=_NEVER), cast=Cast.PROMOTED)
_row("aten.isneginf.default", _by_dtype(floats='{0} == float("-inf")', ints=_NEVER), cast=Cast.PROMOTED)
_row(_both("signbit"), _by_dtype(floats="lm.signbit({0})", ints="{0} < 0", bools=_NEVER), cast=Cast.PROMOTED)

# Choice ---------------------------------------------------------------------------------------------------------------

_MAXIMUM = _by_dtype(floats=_function("lm.maximum"), bools="{0} | {1}")
_MINIMUM = _by_dtype(floats=_function("lm.minimum"), bools="{0} & {1}")


def _where(context: Context, condition: Any, left: Any, right: Any) -> str:
    chosen = f"tl.where({condition}, {text(left, context.dtype)}, {text(right, context.dtype)})"
    return chosen if isinstance(left, str) or isinstance(right, str) else f"{chosen}.to({triton_type(context.dtype)})"


def _clamp(context: Context, value: Any, low: Any = None, high: Any = None) -> str:
    bounded = value if low is None else _MAXIMUM(context, value, low)
    return bounded if high is None else _MINIMUM(context, bounded, high)


def _nan_to_num(context: Context, value: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> str:
    """Clamp to the limits of the output's own dtype, which has less range than its opmath type."""
    if not context.dtype.is_floating_point:
        return str(value)
    info = torch.finfo(context.out)
    high, low = (literal(info.max if posinf is None else posinf, context.out),
                 literal(info.min if neginf is None else neginf, context.out))
    finite = f'tl.where({value} == float("inf"), {high}, tl.where({value} == float("-inf"), {low}, {value}))'
    return f"tl.where({value} != {value}, {literal(0.0 if nan is None else nan, context.out)}, {finite})"


_row(
    "aten.where.self aten.where.ScalarSelf aten.where.ScalarOther aten.where.Scalar prims.where.default",
    _where,
    raw=(0,),
    hoists=(1, 2),
    picks=True,
)
_row("aten.masked_fill.Scalar aten.masked_fill.Tensor",
     lambda context, value, mask, other: _where(context, mask, other, value), raw=(1,), hoists=(2,))
_row("aten.clamp.default aten.clamp.Tensor aten.clip.default aten.clip.Tensor", _clamp, hoists=(1, 2), flops=2)
_row("aten.clamp_min.default aten.clamp_min.Tensor aten.maximum.default prims.maximum.default", _MAXIMUM, hoists=(1,),
     picks=True)
_row("aten.clamp_max.default aten.clamp_max.Tensor aten.minimum.default prims.minimum.default", _MINIMUM, hoists=(1,),
     picks=True)
_row("aten.fmax.default", _by_dtype(floats=_function("lm.fmax"), ints=_function("lm.maximum"), bools="{0} | {1}"))
_row("aten.fmin.default", _by_dtype(floats=_function("lm.fmin"), ints=_function("lm.minimum"), bools="{0} & {1}"))
_row("aten.nan_to_num.default", _nan_to_num, steps=(0,), flops=3)

# Transcendental -------------------------------------------------------------------------------------------------------

_FUNCTIONS = {
    "exp": _EXP, "exp2": 2.0, "expm1": _EXPM1, "log": _LOG, "log1p": _LOG, "log2": _LOG, "log10": _LOG, "sin": _PERIODIC,
    "cos": _PERIODIC, "tan": _PERIODIC, "asin": 16.0, "acos": 16.0, "atan": 24.0, "sinh": _EXPM1, "cosh": 20.0,
    "tanh": _TANH, "asinh": 40.0, "acosh": 40.0, "atanh": 40.0, "erf": _ERF, "erfc": 40.0, "lgamma": 100.0,
}

for _name, _flops in _FUNCTIONS.items():
    _row(_both(_name), f"lm.{_name}({{0}})", smooth=_name == "exp", flops=_flops)

_row("aten.erfinv.default prims.erf_inv.default", "lm.erfinv({0})", flops=42)
_row("aten.special_erfcx.default prims.erfcx.default", "lm.erfcx({0})", flops=64)
_row(_both("atan2"), _function("lm.atan2"), flops=50)
_row("aten.sigmoid.default", "lm.sigmoid({0})", smooth=True, flops=_SIGMOID)
_row("aten.sinc.default", "lm.sinc({0})", flops=_PERIODIC + _QUOTIENT)
_row(
    "aten.xlogy.Tensor aten.xlogy.Scalar_Other aten.xlogy.Scalar_Self", _function("lm.xlogy"), flops=_LOG + 3
)
_row("aten.logaddexp.default", _function("lm.logaddexp"), flops=_SOFTPLUS)


def _logit(context: Context, value: Any, eps: Any = None) -> str:
    if eps is None:
        return f"lm.logit({value})"
    return f"lm.logit({_clamp(context, value, eps, 1 - eps)})"


_row("aten.logit.default", _logit, flops=_LOG + _QUOTIENT + 2)

_SPECIAL_REASON = "special function without an equal in the device's math library"
_eager(
    "aten.digamma.default prims.digamma.default aten.polygamma.default aten.igamma.default aten.igammac.default "
    "prims.igamma.default prims.igammac.default aten.special_i0e.default aten.special_i1e.default "
    "prims.bessel_i0e.default "
    "prims.bessel_i1e.default aten.special_ndtri.default prims.ndtri.default aten.special_zeta.default "
    "prims.zeta.default "
    "aten.i0.default prims.bessel_i0.default aten.special_i1.default prims.bessel_i1.default "
    "aten.special_bessel_j0.default prims.bessel_j0.default aten.special_bessel_j1.default prims.bessel_j1.default "
    "aten.special_bessel_y0.default prims.bessel_y0.default aten.special_bessel_y1.default prims.bessel_y1.default "
    "aten.special_airy_ai.default aten.special_spherical_bessel_j0.default prims.spherical_bessel_j0.default "
    "aten.special_modified_bessel_i0.default aten.special_modified_bessel_i1.default "
    "aten.special_modified_bessel_k0.default aten.special_modified_bessel_k1.default",
    _SPECIAL_REASON,
)
_eager("aten.frexp.Tensor prims.frexp.default", "two outputs of different dtypes")
_eager(
    "aten.complex.default aten.polar.default aten._conj.default aten._conj_physical.default "
    "aten.conj_physical.default prims.conj.default prims.conj_physical.default aten.angle.default",
    "complex stays whole",
)

# Rounding -------------------------------------------------------------------------------------------------------------

for _name, _emit in {"floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "lm.trunc({0})",
                     "round": "lm.round({0})"}.items():
    _row(_both(_name), _by_dtype(floats=_emit, ints="{0}"), steps=(0,))


def _round_decimals(context: Context, value: Any, decimals: int = 0) -> str:
    if not context.dtype.is_floating_point:
        return str(value)
    scale = scalar(float(10 ** abs(decimals)), context.dtype)
    if decimals > 0:
        return f"lm.div(lm.round({value} * {scale}), {scale})"
    return f"lm.round(lm.div({value}, {scale})) * {scale}" if decimals else f"lm.round({value})"


_row("aten.round.decimals", _round_decimals, steps=(0,), flops=4)
_row("aten.frac.default", "{0} - lm.trunc({0})", steps=(0,), flops=2)

# Activations ----------------------------------------------------------------------------------------------------------


def _gelu(context: Context, value: Any, approximate: str = "none") -> str:
    x = value
    if approximate == "tanh":
        return f"0.5 * {x} * (1 + lm.tanh({_SQRT_2_OVER_PI} * ({x} + {_GELU_CUBIC} * {x} * {x} * {x})))"
    return f"0.5 * {x} * (1 + lm.erf({x} * {_SQRT_HALF}))"


def _gelu_backward(context: Context, grad: Any, value: Any, approximate: str = "none") -> str:
    if approximate == "tanh":
        return f"{grad} * lm.gelu_tanh_slope({value})"
    x = value
    return f"{grad} * (0.5 * (1 + lm.erf({x} * {_SQRT_HALF})) + {x} * lm.exp(-0.5 * {x} * {x}) * {_INV_SQRT_2PI})"


def _elu(context: Context, value: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> str:
    return fill(
        "tl.where({0} > 0, {0} * {2}, lm.expm1({0} * {3}) * ({1} * {2}))", context, value, alpha, scale, input_scale
    )


def _elu_backward(
    context: Context, grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, value: Any
) -> str:
    slope = "({4} + {1} * {2})" if is_result else "({1} * {2}) * lm.exp({4} * {3})"
    return fill(f"tl.where({{4}} <= 0, {{0}} * {{3}} * {slope}, {{0}} * {{2}})",
                context, grad, alpha, scale, input_scale, value)


def _softplus(context: Context, value: Any, beta: Any = 1, threshold: Any = 20) -> str:
    return fill("tl.where({0} * {1} > {2}, {0}, lm.log1p(lm.exp({0} * {1})) / {1})", context, value, beta, threshold)


def _softplus_backward(context: Context, grad: Any, value: Any, beta: Any, threshold: Any) -> str:
    return fill("tl.where({1} * {2} > {3}, {0}, {0} * lm.sigmoid({1} * {2}))", context, grad, value, beta, threshold)


_HARDSIGMOID = "lm.minimum(lm.maximum({0} + 3, 0), 6)"

_row("aten.relu.default", _by_dtype(floats=lambda context, value: _MAXIMUM(context, value, 0), bools="{0}"), picks=True)
_row("aten.relu6.default", lambda context, value: _clamp(context, value, 0, 6), flops=2)
_row("aten.leaky_relu.default", "tl.where({0} > 0, {0}, {0} * {1})", hoists=(1,), flops=2)
_row("aten.elu.default", _elu, flops=_EXPM1 + 2)
_row("aten.gelu.default", _gelu, flops=_ERF + 4)
_row("aten.silu.default", "{0} * lm.sigmoid({0})", smooth=True, flops=_SIGMOID + 1)
_row("aten.mish.default", "{0} * lm.tanh(lm.softplus({0}))", flops=_SOFTPLUS + _TANH + 1)
_row("aten.softplus.default", _softplus, flops=_SOFTPLUS)
_row("aten.hardtanh.default", _clamp, hoists=(1, 2), flops=2)
_row("aten.hardsigmoid.default", f"{_HARDSIGMOID} * 0.16666666666666666", flops=4)
_row("aten.hardswish.default", f"{{0}} * {_HARDSIGMOID} * 0.16666666666666666", flops=5)
_row("aten.hardshrink.default", "tl.where(({0} >= -{1}) & ({0} <= {1}), 0.0, {0})", hoists=(1,), steps=(0,), flops=3)
_row("aten.softshrink.default", "tl.where({0} > {1}, {0} - {1}, tl.where({0} < -{1}, {0} + {1}, "
     "tl.where({0} != {0}, {0}, 0.0)))", hoists=(1,), flops=4)
_row("aten.threshold.default", "tl.where({0} <= {1}, {2}, {0})", hoists=(1, 2), steps=(0,))
_row("aten.log_sigmoid.default", "lm.minimum({0}, 0) - lm.log1p(lm.exp(-tl.abs({0})))", flops=_SOFTPLUS)
_row("aten.sigmoid_backward.default", "{0} * ((1 - {1}) * {1})", flops=3)
_row("aten.tanh_backward.default", "{0} * (1 - {1} * {1})", flops=3)
_row("aten.threshold_backward.default", "tl.where({1} <= {2}, 0, {0})", hoists=(2,), steps=(1,))
_row("aten.gelu_backward.default", _gelu_backward, smooth=True, flops=_ERF + _EXP + 8)
_row("aten.silu_backward.default", "{0} * lm.silu_slope({1})", smooth=True, flops=_SIGMOID + 4)
_row("aten.leaky_relu_backward.default", "tl.where({1} > 0, {0}, {0} * {2})", hoists=(2,), steps=(1,), flops=2)
_row("aten.elu_backward.default", _elu_backward, steps=(5,), flops=_EXP + 4)
_row("aten.hardtanh_backward.default", "tl.where(({1} <= {2}) | ({1} >= {3}), 0, {0})", hoists=(2, 3), steps=(1,), flops=3)
_row("aten.hardsigmoid_backward.default", "tl.where(({1} > -3) & ({1} < 3), {0} * 0.16666666666666666, 0.0)", steps=(1,),
     flops=3)
_row("aten.hardswish_backward.default",
     "tl.where({1} <= -3, 0.0, tl.where({1} < 3, {0} * (({1} + 1.5) * 0.3333333333333333), {0}))", steps=(1,), flops=5)
_row("aten.softplus_backward.default", _softplus_backward, flops=_SIGMOID + 4)
_row("aten.mish_backward.default", "{0} * lm.mish_slope({1})", flops=_SOFTPLUS + _TANH + _SIGMOID + 8)
_row("aten.hardshrink_backward.default aten.softshrink_backward.default",
     "tl.where(({1} >= -{2}) & ({1} <= {2}), 0, {0})", hoists=(2,), steps=(1,), flops=3)
_row("aten.logit_backward.default",
     lambda context, grad, value, eps=None: _logit_backward(context, grad, value, eps), steps=(1,), flops=4)


def _logit_backward(context: Context, grad: str, value: str, eps: float | None) -> str:
    slope = f"lm.div({grad}, {value} * (1 - {value}))"
    low, high, outside = (0.0, 1.0, 'float("nan")') if eps is None else (eps, 1.0 - eps, "0.0")
    is_outside = f"({value} < {literal(low, context.dtype)}) | ({value} > {literal(high, context.dtype)})"  # not of NaN
    return f"tl.where({is_outside}, {outside}, {slope})"


# Copies and casts -----------------------------------------------------------------------------------------------------


def _convert(context: Context, value: Any, *unused: Any) -> str:
    (source, *_), out = context.operands, context.out
    if context.is_narrow and (source.is_floating_point or out.is_floating_point):  # hardware is slower at 64 bits
        value, source = conversion(value, source, torch.int32), torch.int32
    return conversion(value, source, out)


def _accepts_dtype(call: Call) -> str:
    return "" if supported(call.dtype) else f"{call.dtype} has no Triton type"


def _accepts_copy(call: Call) -> str:
    elsewhere = [name for name in ("layout", "device", "pin_memory", "memory_format") if call.args.get(name) is not None]
    return f"a copy with a {elsewhere[0]} of its own" if elsewhere else _accepts_dtype(call)


_row("prims.convert_element_type.default", _convert, cast=Cast.NONE, casts=True, accepts=_accepts_dtype)
_row("aten._to_copy.default", _convert, cast=Cast.NONE, casts=True, rounds=True, accepts=_accepts_copy)
_row("aten.clone.default aten.lift_fresh_copy.default aten.lift_fresh.default aten.detach_copy.default "
     "aten.alias_copy.default prims.clone.default prims.view_of.default aten.contiguous.default", "{0}")
_row("aten.copy.default aten.copy_.default prims.copy_to.default", "{1}", rounds=True)
_row("aten.fill.Scalar aten.fill.Tensor", lambda context, value, other: scalar(other, context.dtype))
_eager("prims.device_put.default", "moves between devices")
