"""Evaluates pointwise expressions over nvFuser's functions.

The op table has one expression per pointwise op, written for Triton (``{0} * lm.sigmoid({0})``). Its names have the same
meaning here: ``lm.exp`` is nvFuser's ``exp``, ``lm.silu_slope`` is composed from what nvFuser has, and a name that is
neither makes the op one that nvFuser cannot do. So a row that a user adds serves both executors.

    >>> missing("{0} * lm.sigmoid({0})"), missing("lm.pow_int({0}, {1})")
    ([], ['lm.pow_int'])
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from dynafuse.ops.literals import opmath
from dynafuse.ops.nvfuser_fusion import Fusion, FusionTensor, Operand

_NAMES = re.compile(r"\b(?:tl|lm)\.\w+")

_NATIVE = (
    "abs acos acosh asin asinh atan atan2 atanh ceil cos cosh erf erfc erfinv exp exp2 expm1 floor fmod lgamma log log10 "
    "log1p log2 maximum minimum neg nextafter pow reciprocal remainder round rsqrt sigmoid signbit sin sinh sqrt tan tanh "
    "trunc where"
)
NATIVE = frozenset(_NATIVE.split())
"""Functions that nvFuser has by the names that they have in expressions."""

COMPOSED: Mapping[str, str] = {
    "div": "{0} / {1}",
    "fma": "{0} * {1} + {2}",
    "sign": "({0} > 0).to({0}.dtype) - ({0} < 0).to({0}.dtype)",
    "copysign": "tl.where(lm.signbit({0}) ^ lm.signbit({1}), -{0}, {0})",
    "floor_quotient": "tl.where((lm.fmod({0}, {1}) != 0) & (({1} < 0) ^ (lm.fmod({0}, {1}) < 0)), "
                      "({0} - lm.fmod({0}, {1})) / {1} - 1, ({0} - lm.fmod({0}, {1})) / {1})",
    "nearest_floor": "tl.where({0} - tl.floor({0}) > 0.5, tl.floor({0}) + 1, tl.floor({0}))",
    "floor_div": "tl.where({1} == 0, {0} / {1}, tl.where(lm.floor_quotient({0}, {1}) == 0, "
                 "lm.copysign(lm.floor_quotient({0}, {1}), {0} / {1}), lm.nearest_floor(lm.floor_quotient({0}, {1}))))",
    "fmax": "tl.where({0} != {0}, {1}, tl.where({1} != {1}, {0}, lm.maximum({0}, {1})))",
    "fmin": "tl.where({0} != {0}, {1}, tl.where({1} != {1}, {0}, lm.minimum({0}, {1})))",
    "remainder_int": "{0} % {1} + tl.where(({0} % {1} != 0) & (({0} % {1} < 0) ^ ({1} < 0)), {1}, {0} * 0)",
    "floor_div_int": "{0} // {1} - (({0} % {1} != 0) & (({0} < 0) ^ ({1} < 0))).to({0}.dtype)",
    "to_float32": "{0}.to(tl.float32)",
    "softplus": "lm.log1p(lm.exp({0}))",
    "logit": "lm.log({0} / (1 - {0}))",
    "xlogy": "tl.where({1} != {1}, {1}, tl.where({0} == 0, {0} * 0, {0} * lm.log({1})))",
    "silu_slope": "lm.sigmoid({0}) * (1 + {0} * (1 - lm.sigmoid({0})))",
    "mish_slope": "lm.tanh(lm.softplus({0})) + {0} * lm.sigmoid({0}) "
                  "* (1 - lm.tanh(lm.softplus({0})) * lm.tanh(lm.softplus({0})))",
    "tanh_of_gelu": "lm.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}))",
    "gelu_tanh_slope": "0.5 * (1 + lm.tanh_of_gelu({0})) + 0.5 * {0} * (1 - lm.tanh_of_gelu({0}) * lm.tanh_of_gelu({0})) "
                       "* (0.7978845608028654 * (1 + 0.134145 * {0} * {0}))",
}
"""Functions that are written as expressions over others; equal subexpressions are recorded once."""

_TYPES: Mapping[str, torch.dtype] = {
    "int1": torch.bool, "int32": torch.int32, "int64": torch.int64, "float16": torch.float16,
    "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
}
_METHODS = frozenset({"full", "zeros_like", "minus_zero"})


def missing(text: str) -> list[str]:
    """Return the functions in an expression that nvFuser cannot compute, sorted."""
    available = NATIVE | COMPOSED.keys() | _TYPES.keys() | _METHODS
    return sorted({name for name in _NAMES.findall(text) if name[3:] not in available})


def evaluate(fusion: Fusion, text: str, names: Mapping[str, FusionTensor]) -> Operand:
    """Record a pointwise expression.

    Args:
        fusion: The fusion to which it is added.
        text: The expression, over ``tl``, ``lm`` and names.
        names: The tensor of each name.

    Returns:
        The result: a number if it depends on no tensor.
    """
    library = _Library(fusion)
    result: Operand = eval(_compiled(text), {"tl": library, "lm": library, "float": float, **names})
    return result


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<pointwise expression>", "eval")


class _Library:
    """Stands for ``tl`` and ``lm`` in expressions: its attributes record nvFuser's functions."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion

    def __getattr__(self, name: str) -> Any:
        if name in _TYPES:
            return _TYPES[name]
        if name in NATIVE:
            return functools.partial(self._native, name)
        if name in COMPOSED:
            return self._composed(COMPOSED[name])
        raise AttributeError(name)

    def _native(self, name: str, *operands: Operand) -> Operand:
        """Record a function of nvFuser; of numbers alone, return its value."""
        if name == "where" and not isinstance(operands[0], FusionTensor):
            return operands[1] if operands[0] else operands[2]
        if any(isinstance(operand, FusionTensor) for operand in operands):
            return self._fusion.pointwise(name, *operands)
        numbers = (torch.tensor(operand, dtype=torch.float64) for operand in operands)
        value: Operand = getattr(torch, name)(*numbers).item()
        return value

    def _composed(self, template: str) -> Callable[..., Operand]:
        """Return a function that evaluates an expression over others."""

        def function(*operands: Operand) -> Operand:
            names = {f"a{i}": operand for i, operand in enumerate(operands)}
            return evaluate(self._fusion, template.format(*names), names)  # type: ignore[arg-type]

        return function

    def full(self, shape: list[int], value: Any, dtype: torch.dtype) -> Any:
        """Return a number as an operand, as nvFuser takes it."""
        return float(value) if dtype.is_floating_point and not isinstance(value, FusionTensor) else value

    def minus_zero(self, dtype: torch.dtype) -> float:
        """Return -0.0, which nvFuser takes as it is."""
        return -0.0

    def zeros_like(self, tensor: FusionTensor) -> FusionTensor:
        """Return zeros of the sizes of ``tensor``, in its opmath type."""
        return self._fusion.full(tensor.shape, 0, opmath(tensor.dtype))
