"""Proves bounds of the integers of a spec from its ops: an index that is proven in range needs no check.

Each op is looked at once, after its operands. Where its dtype might not hold the bounds, the value can be anything that the
dtype holds, since integers wrap around. Floats that are computed of integers and numbers alone have bounds, too, as places
in an image that is resized do; these are wider than exact arithmetic has them, by more than is rounded.

Worked example: of ``%0 = iota(10)``, ``%1 = sub(9, %0)`` and ``%2 = remainder(in0, 4)`` the ranges are 0 to 9, 0 to 9 and
0 to 3; ``in0`` is whatever its dtype holds.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynafuse.ir import Ref, Spec
from dynafuse.ops import Call, Kind, Row
from dynafuse.ops.indexing_math import expanded, product
from dynafuse.ops.literals import HoistedScalar
from dynafuse.ops.reductions import reduced_dims
from dynafuse.ops.table import op_name

FLOATS = {torch.float64: 2**1000, torch.float32: 2**120, torch.bfloat16: 2**120, torch.float16: 2**15}
"""The floats whose bounds are known, and the largest bound: less than what they hold at most."""

NUMBERS = (int, float, HoistedScalar, sympy.Expr)
"""What an op takes as a number; of a hoisted one nothing is known."""

ROUNDED, ROUNDED_OF_16_BITS = sympy.Rational(1, 2**20), sympy.Rational(1, 64)
"""Of a float, more than is rounded of it."""

MOST_COEFFICIENT = 2**16
"""The largest coefficient, and number of terms, in a bound that int64 is taken to hold: no such sum of sizes overflows."""


@dataclass(frozen=True)
class Range:
    """The lowest and the highest value that an integer can have, both included; infinite where nothing is known."""

    low: sympy.Expr = -sympy.oo
    high: sympy.Expr = sympy.oo

    def at_least(self, bound: sympy.Expr) -> bool:
        """Return whether no value is below ``bound``."""
        return _at_most(bound, self.low)

    def below(self, size: sympy.Expr) -> bool:
        """Return whether every value is below ``size``."""
        return _at_most(self.high, size - 1)

    @property
    def is_number(self) -> bool:
        """Return whether both bounds are numbers."""
        return bool(self.low.is_Rational and self.high.is_Rational)

    def truncated(self) -> Range:
        """Return the range of the values without their fractions."""
        return Range(sympy.Integer(int(self.low)), sympy.Integer(int(self.high))) if self.is_number else self

    def rounded(self, dtype: torch.dtype) -> Range:
        """Return the range of the values as floats."""
        share = ROUNDED if dtype.itemsize > 2 else ROUNDED_OF_16_BITS
        low, high = self.low - abs(self.low) * share, self.high + abs(self.high) * share
        return Range(low, high) if max(abs(low), abs(high)) < FLOATS.get(dtype, 0) else UNKNOWN

    def __or__(self, other: Range) -> Range:
        return Range(-_max_bound(-self.low, -other.low), _max_bound(self.high, other.high))

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __mul__(self, other: Range) -> Range:
        if other.low == other.high and other.low.is_Rational:
            low, high = self.low * other.low, self.high * other.low
            return Range(low, high) if other.low >= 0 else Range(high, low)
        if self.low == self.high and self.low.is_Rational:
            return other * self
        if self.at_least(sympy.S.Zero) and other.at_least(sympy.S.Zero):
            return Range(self.low * other.low, self.high * other.high)
        return UNKNOWN


UNKNOWN = Range()
BOOL = Range(sympy.S.Zero, sympy.S.One)


class Ranges:
    """The ranges of a spec's inputs and ops, each computed when it is first asked for."""

    def __init__(self, spec: Spec, calls: Sequence[tuple[Row, Call]]) -> None:
        self.spec = spec
        self.calls = calls
        self._ops: list[Range] = []

    def of(self, arg: Any) -> Range:
        """Return the range of an argument: a tensor or a number."""
        if isinstance(arg, Ref):
            return _dtype_range(self.spec.inputs[arg.position].dtype) if arg.kind == "in" else self._op(arg.position)
        if isinstance(arg, (int, sympy.Expr)):
            value = sympy.Integer(arg) if isinstance(arg, int) else arg
            return Range(value, value) if value.is_integer else UNKNOWN
        if isinstance(arg, float) and math.isfinite(arg):
            return Range(sympy.Rational(arg), sympy.Rational(arg))
        return UNKNOWN

    def fit(self, arg: Any, dtype: torch.dtype) -> bool:
        """Return whether integers of a dtype surely hold the values of an argument, without fractions."""
        return _fits(self.of(arg).truncated(), dtype)

    def _op(self, position: int) -> Range:
        for row, call in self.calls[len(self._ops) : position + 1]:  # operands come first
            self._ops.append(self._compute(row, call))
        return self._ops[position]

    def _compute(self, row: Row, call: Call) -> Range:
        rule = _moved if row.kind is Kind.VIEW else RULES.get(op_name(call))
        if rule is None or (call.dtype.is_floating_point and not self._are_numbers(row, call)):
            return _dtype_range(call.dtype)
        computed = rule(call, Operands(self, call.dtype))
        return computed.rounded(call.dtype) if call.dtype.is_floating_point else _wrapped(computed, call.dtype)

    def _are_numbers(self, row: Row, call: Call) -> bool:
        """Return whether a call computes floats of what has numbers as bounds: then it is none of NaN and infinity."""
        first, *others = call.args.values()
        given = [first, *(arg for arg in others if row.kind is Kind.POINTWISE and isinstance(arg, (Ref, *NUMBERS)))]
        is_known = row.kind is Kind.VIEW or op_name(call) in OF_FLOATS
        return is_known and all(self.of(arg).is_number for arg in given)


@dataclass(frozen=True)
class Operands:
    """The ranges of one op's arguments, which the op takes in ``dtype``."""

    ranges: Ranges
    dtype: torch.dtype

    def __call__(self, arg: Any) -> Range:
        """Return the range of an argument."""
        given = self.ranges.of(arg)
        return given if self.dtype.is_floating_point else _wrapped(given.truncated(), self.dtype)

    def shape(self, arg: Ref) -> Sequence[sympy.Expr]:
        """Return the sizes of a tensor argument."""
        spec = self.ranges.spec
        return tuple(map(sympy.sympify, spec.tensor(arg).shape))


def _dtype_range(dtype: torch.dtype) -> Range:
    """Return the range of everything that a dtype holds."""
    if dtype is torch.bool:
        return BOOL
    if dtype.is_floating_point:
        return UNKNOWN
    info = torch.iinfo(dtype)
    return Range(sympy.Integer(info.min), sympy.Integer(info.max))


def _wrapped(value_range: Range, dtype: torch.dtype) -> Range:
    """Return the range of integers in a dtype: where that might not hold their bounds, everything that it holds."""
    return value_range if _fits(value_range, dtype) else _dtype_range(dtype)


def _fits(value_range: Range, dtype: torch.dtype) -> bool:
    """Return whether a dtype surely holds both bounds of integers."""
    return all(_is_within(bound, _dtype_range(dtype)) for bound in (value_range.low, value_range.high))


def _is_within(bound: sympy.Expr, dtype_range: Range) -> bool:
    """Return whether a dtype surely holds a bound; one over sizes must be a small sum of them, in int64."""
    if bound.is_Integer:
        return bool(dtype_range.low <= bound <= dtype_range.high)
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expanded(bound))]
    is_small = all(abs(coefficient) <= MOST_COEFFICIENT and (rest == 1 or (rest.is_Symbol and rest.is_nonnegative))
                   for coefficient, rest in terms)
    return is_small and len(terms) <= MOST_COEFFICIENT and dtype_range == _dtype_range(torch.int64)


def _at_most(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Return whether ``left <= right`` whatever the sizes."""
    return bool(expanded(right - left).is_nonnegative)


def _max_bound(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """Return a bound that is not below either of two; infinity if neither is known to be the higher one."""
    if _at_most(left, right):
        return right
    return left if _at_most(right, left) else sympy.oo


Rule = Callable[[Call, Operands], Range]
"""The range of an op's elements, from its call and the ranges of its arguments."""

# Rules ----------------------------------------------------------------------------------------------------------------


def _moved(call: Call, of: Operands) -> Range:
    """Return the range of an op whose elements are elements of its first operand."""
    return of(next(iter(call.args.values())))


def _joined(call: Call, of: Operands) -> Range:
    return functools.reduce(operator.or_, map(of, call["tensors"]))


def _where(call: Call, of: Operands) -> Range:
    _, left, right = call.args.values()
    return of(left) | of(right)


def _pad(call: Call, of: Operands) -> Range:
    return of(call["self"]) | of(call["value"])


def _full(call: Call, of: Operands) -> Range:
    return of(call["fill_value"])


def _always(value: int) -> Rule:
    """Return the rule of an op whose elements are all ``value``."""
    return lambda call, of: of(value)


def _range(call: Call, of: Operands) -> Range:
    """Return the range of numbers that go from a start in steps."""
    start, step = of(call.args.get("start", 0)), of(call.args.get("step", 1))
    last = call.shape[0] - 1
    return start | start + Range(last, last) * step


def _add(call: Call, of: Operands) -> Range:
    return of(call["self"]) + of(call["other"]) * of(call.args.get("alpha", 1))


def _sub(call: Call, of: Operands) -> Range:
    return of(call["self"]) + -(of(call["other"]) * of(call.args.get("alpha", 1)))


def _mul(call: Call, of: Operands) -> Range:
    return of(call["self"]) * of(call["other"])


def _neg(call: Call, of: Operands) -> Range:
    return -of(call["self"])


def _abs(call: Call, of: Operands) -> Range:
    return _larger(_larger(of(call["self"]), -of(call["self"])), of(0))


def _larger(left: Range, right: Range) -> Range:
    """Return the range of the larger of two values, which is not below either low bound."""
    if _at_most(left.low, right.low):
        low = right.low
    else:  # where neither is known to be lower, a bound over sizes says more than that of a dtype
        low = left.low if _at_most(right.low, left.low) or right.low.is_Integer else right.low
    return Range(low, _max_bound(left.high, right.high))


def _smaller(left: Range, right: Range) -> Range:
    return -_larger(-left, -right)


def _clamp(call: Call, of: Operands) -> Range:
    clamped = of(call["self"])
    if call.args.get("min") is not None:
        clamped = _larger(clamped, of(call["min"]))
    return clamped if call.args.get("max") is None else _smaller(clamped, of(call["max"]))


def _maximum(call: Call, of: Operands) -> Range:
    return _larger(of(call["self"]), of(call["other"]))


def _minimum(call: Call, of: Operands) -> Range:
    return _smaller(of(call["self"]), of(call["other"]))


def _remainder(call: Call, of: Operands) -> Range:
    """Return the range of a remainder, which has the sign of its divisor."""
    divisor = of(call["other"])
    return Range(sympy.S.Zero, divisor.high - 1) if divisor.at_least(sympy.S.One) else UNKNOWN


def _fmod(call: Call, of: Operands) -> Range:
    """Return the range of a remainder that has the sign of its dividend, and is not farther from 0 than that."""
    most = _smaller(_larger(of(call["other"]), -of(call["other"])) + -of(1), _larger(of(call["self"]), -of(call["self"])))
    low = sympy.S.Zero if of(call["self"]).at_least(sympy.S.Zero) else -most.high
    return Range(low, most.high)


def _and(call: Call, of: Operands) -> Range:
    """Return the range of a bitwise and, which is not above an operand that is never negative."""
    operands = (of(call["self"]), of(call["other"]))
    highs = [operand.high for operand in operands if operand.at_least(sympy.S.Zero)]
    return Range(sympy.S.Zero, -functools.reduce(_max_bound, (-high for high in highs))) if highs else UNKNOWN


def _reduced_size(call: Call, of: Operands) -> sympy.Expr:
    """Return how many elements are reduced to one."""
    shape = of.shape(call["self"])
    return product(shape[dim] for dim in reduced_dims(call.args, len(shape)))


def _position(call: Call, of: Operands) -> Range:
    """Return the range of positions in what is reduced."""
    return Range(sympy.S.Zero, _reduced_size(call, of) - 1)


def _sum(call: Call, of: Operands) -> Range:
    size = _reduced_size(call, of)
    return of(call["self"]) * Range(size, size)


def _randint(call: Call, of: Operands) -> Range:
    return of(call["low"]) | of(call["high"]) + -of(1)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("convert_element_type", "_to_copy", "clone", "flip", "rev", "roll", "repeat", "gather", "index",
                     "index_select", "embedding", "_unsafe_index", "amax", "amin"), _moved),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _always(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _always(1)),
    **dict.fromkeys(("iota", "arange"), _range),
    **dict.fromkeys(("argmax", "argmin"), _position),
    "sum": _sum,
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "where": _where, "constant_pad_nd": _pad,
    "add": _add, "sub": _sub, "mul": _mul, "neg": _neg, "abs": _abs,
    "maximum": _maximum, "minimum": _minimum, "remainder": _remainder, "fmod": _fmod, "bitwise_and": _and,
    "inductor_randint": _randint,
}
"""The range of an op's elements from those of its operands, by its name without the overload."""

OF_FLOATS = frozenset({"convert_element_type", "_to_copy", "clone", "add", "sub", "mul", "neg", "clamp", "clamp_min",
                       "clamp_max", "maximum", "minimum"})
"""The pointwise ops whose rules hold for floats, too."""
