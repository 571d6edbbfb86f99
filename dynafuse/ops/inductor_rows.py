"""What Inductor can take of the op table: every op that may be fused, less the ones named here.

Inductor lowers ATen by its own tables; where it has no lowering it calls the op as eager does, which no one needs it for.
Neither Inductor nor a region is needed to ask. Where its C++ is not what eager computes, it is given other ops instead.

Worked example::

    >>> refusal(lookup(prims.inductor_random.default), call)
    'random numbers: the bits would depend on the executor'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import sympy
import torch

from dynafuse.ops.literals import opmath
from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Call, Kind, Row
from dynafuse.ops.upsampling import BACKWARD

Number: TypeAlias = bool | int | float

MISSING = frozenset(overloads(
    "prims.full.default prims.full_like.default prims.reshape.default prims.collapse_view.default prims.collapse.default "
    "prims.split_dim.default prims.transpose.default prims.squeeze.default aten.slice_copy.Tensor aten.select_copy.int "
    "prims.cat.default aten._adaptive_avg_pool2d_backward.default prims.prod.default prims.amax.default prims.amin.default "
    "prims.mul.default prims.pow.default prims.cbrt.default prims.shift_left.default "
    "prims.shift_right_arithmetic.default prims.isfinite.default prims.signbit.default prims.where.default "
    "prims.erf_inv.default prims.floor.default prims.trunc.default prims.round.default aten.hardshrink_backward.default "
    "aten.softshrink_backward.default aten.detach_copy.default prims.clone.default prims.copy_to.default "
    "aten._adaptive_avg_pool3d.default aten._adaptive_avg_pool3d_backward.default "
    "aten.max_pool3d_with_indices_backward.default"
)) | frozenset(BACKWARD).difference(overloads("aten.upsample_nearest2d_backward.default"))
"""Ops that Inductor neither lowers nor decomposes."""


REMAINDER = frozenset(overloads(
    "aten.remainder.Tensor aten.remainder.Scalar aten.remainder.Scalar_Tensor prims.remainder.default"))
FLOOR_DIVISION = frozenset(overloads("aten.floor_divide.default aten.floor_divide.Scalar"))
ROUNDED_DIVISION = frozenset(overloads("aten.div.Tensor_mode aten.div.Scalar_mode"))
DIVISIONS = REMAINDER | FLOOR_DIVISION | ROUNDED_DIVISION | frozenset(overloads(
    "aten.fmod.Tensor aten.fmod.Scalar prims.fmod.default prims.div.default"))
EXPM1 = frozenset(overloads("aten.expm1.default prims.expm1.default"))
ERF = frozenset(overloads("aten.erf.default prims.erf.default"))
ELU = frozenset(overloads("aten.elu.default"))
POOLING_GRADIENTS = frozenset(overloads("aten.avg_pool2d_backward.default"))


INEXACT = frozenset(overloads(
    "aten.acosh.default prims.acosh.default aten.asinh.default prims.asinh.default aten.atanh.default prims.atanh.default "
    "aten.logit_backward.default"))
"""Ops whose formulas in C++ overflow, or lose a NaN or the sign of a zero, with some version of torch."""


def refusal(row: Row, call: Call) -> str:
    """Return why Inductor cannot take a call of a fusible op, or ""."""
    if row.kind is Kind.RANDOM:
        return "random numbers: the bits would depend on the executor"
    if row.kind is Kind.SCATTER:
        return "writes at loaded indices"
    if row.kind is Kind.SCAN:
        return "a scan: Inductor's C++ calls eager's"
    if row.target.namespace not in ("aten", "prims"):
        return f"Inductor does not know {row.target.namespace}"
    if row.target in DIVISIONS and not call.dtype.is_floating_point and not _is_nonzero(tuple(call.args.values())[1]):
        return "integers divided by what may be 0: eager raises, C++ ends the process"
    if row.target in INEXACT:
        return f"Inductor's {row.target} overflows, or loses NaN or signs of zeros"
    if row.target in POOLING_GRADIENTS and call["ceil_mode"] and call["count_include_pad"] and not call["divisor_override"]:
        return "Inductor divides the gradients of windows that ceil_mode cuts off by the size of whole windows"
    return f"Inductor has no {row.target}" if row.target in MISSING else ""


def _is_nonzero(divisor: Any) -> bool:
    """Return whether a divisor is known, and not 0."""
    if isinstance(divisor, sympy.Expr):
        return bool(divisor.is_nonzero)
    return isinstance(divisor, int | float) and divisor != 0


def replacement(call: Call) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
    """Return the function that Inductor is given in place of a call whose floats it computes otherwise than eager.

    It takes the call's arguments by name. None for a call that Inductor computes as eager does.
    """
    if not call.dtype.is_floating_point:
        return None
    if call.target in POOLING_GRADIENTS:
        return lambda given: _pooling_gradient(call.target, given)
    if call.target in EXPM1:
        return lambda given: _in_opmath(_expm1, call.dtype, *given.values())
    if call.target in ERF and opmath(call.dtype) is torch.float32:
        return lambda given: _in_opmath(_erf, call.dtype, *given.values())
    if call.target in ELU:
        return lambda given: _in_opmath(partial(_elu, *tuple(given.values())[1:]), call.dtype, given["self"])
    if call.target in REMAINDER:
        return lambda given: _in_opmath(_remainder, call.dtype, *given.values())
    floors = call.target in FLOOR_DIVISION or (call.target in ROUNDED_DIVISION and call["rounding_mode"] == "floor")
    return (lambda given: _in_opmath(_floor_divide, call.dtype, *tuple(given.values())[:2])) if floors else None


def _pooling_gradient(target: torch._ops.OpOverload, given: Mapping[str, Any]) -> torch.Tensor:
    """Compute a gradient of pooling, with numbers for both dimensions where eager takes one for both: Inductor does not."""
    pairs = {name: (given[name] * 2)[:2] for name in ("kernel_size", "stride", "padding")}
    gradient: torch.Tensor = target(**{**given, **pairs})
    return gradient


def _in_opmath(function: Callable[..., torch.Tensor], dtype: torch.dtype, *operands: torch.Tensor | Number) -> torch.Tensor:
    """Evaluate a function of tensors or numbers in the opmath type of ``dtype``, and return its result in ``dtype``."""
    device = next(value.device for value in operands if isinstance(value, torch.Tensor))
    wide = (value.to(opmath(dtype)) if isinstance(value, torch.Tensor)
            else torch.full((), value, dtype=opmath(dtype), device=device) for value in operands)
    return function(*wide).to(dtype)


def _expm1(value: torch.Tensor) -> torch.Tensor:
    """Compute ``expm1`` by Kahan's formula, in which the errors of ``exp`` and ``log`` cancel.

    Inductor's own is ``exp(x) - 1``.
    """
    power = torch.exp(value)
    above = power - 1
    near = torch.where(power == 1, value, above * (value / torch.log(power)))
    return torch.where(above.isinf() | (above == -1), above, near)


def _elu(alpha: float, scale: float, input_scale: float, value: torch.Tensor) -> torch.Tensor:
    """Compute ``elu`` by :func:`_expm1`."""
    return torch.where(value > 0, value * scale, _expm1(value * input_scale) * (alpha * scale))


_ERF = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(8))


def _erf(value: torch.Tensor) -> torch.Tensor:
    """Compute ``erf`` of float32, near 0 by its series: Inductor's own is off by 1e-7 wherever it is."""
    square = value * value
    series = torch.full_like(value, _ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        series = series * square + coefficient
    return torch.where(value.abs() < 0.5, value * series, torch.erf(value))


def _remainder(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute Python's ``%`` from an exact remainder: Inductor's own is NaN where the divisor is infinite."""
    rest = torch.fmod(left, right)
    return torch.where(_has_other_sign(rest, right), rest + right, rest)


def _floor_divide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute Python's ``//``, corrected by the exact remainder as eager does it."""
    rest = torch.fmod(left, right)
    quotient = (left - rest) / right
    quotient = torch.where(_has_other_sign(rest, right), quotient - 1, quotient)
    floored = torch.floor(quotient)
    floored = torch.where(quotient - floored > 0.5, floored + 1, floored)
    exact = left / right
    return torch.where(right == 0, exact, torch.where(quotient == 0, torch.copysign(quotient, exact), floored))


def _has_other_sign(rest: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Return where a remainder is on the other side of 0 than its divisor."""
    return (rest != 0) & ((divisor < 0) != (rest < 0))
