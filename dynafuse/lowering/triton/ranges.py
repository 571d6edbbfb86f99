"""Between which bounds the integers of a spec are, as far as its ops show: an index that is proven in range needs no check.

Each op is looked at once, after its operands. Bounds that its dtype might not hold are none: integers wrap around.

Worked example: of ``%0 = iota(10)``, ``%1 = sub(9, %0)`` and ``%2 = remainder(in0, 4)`` the ranges are 0 to 9, 0 to 9 and
0 to 3; ``in0`` is whatever its dtype holds.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynafuse.ir import Ref, Spec
from dynafuse.ops import Call, Kind, Row
from dynafuse.ops.indexing_math import expanded, product
from dynafuse.ops.reductions import reduced_dims

STEEPEST = 2**16
"""The largest factor of a size in a bound of 64 bits: no sum of some such sizes comes near the end."""


@dataclass(frozen=True)
class Range:
    """The lowest and the highest value that something can have; infinite where nothing is known."""

    low: sympy.Expr = -sympy.oo
    high: sympy.Expr = sympy.oo

    def at_least(self, bound: sympy.Expr) -> bool:
        """Whether no value is below ``bound``."""
        return _ordered(bound, self.low)

    def below(self, size: sympy.Expr) -> bool:
        """Whether every value is below ``size``."""
        return _ordered(self.high, size - 1)

    def __or__(self, other: Range) -> Range:
        return Range(-_higher(-self.low, -other.low), _higher(self.high, other.high))

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Range:
        return Range(-self.high, -self.low)

    def __mul__(self, other: Range) -> Range:
        if other.low == other.high and other.low.is_Integer:
            ends = Range(self.low * other.low, self.high * other.low)
            return ends if other.low >= 0 else Range(ends.high, ends.low)
        if self.low == self.high and self.low.is_Integer:
            return other * self
        both = self.at_least(sympy.S.Zero) and other.at_least(sympy.S.Zero)
        return Range(self.low * other.low, self.high * other.high) if both else UNKNOWN


UNKNOWN = Range()
TRUTH = Range(sympy.S.Zero, sympy.S.One)


class Ranges:
    """The ranges of a spec's inputs and ops, each worked out when it is first asked for."""

    def __init__(self, spec: Spec, calls: Sequence[tuple[Row, Call]]) -> None:
        self.spec = spec
        self.calls = calls
        self._ops: list[Range] = []

    def of(self, arg: Any) -> Range:
        """The range of an argument: a tensor or a number."""
        if isinstance(arg, Ref):
            return _held_by(self.spec.inputs[arg.position].dtype) if arg.kind == "in" else self._op(arg.position)
        if isinstance(arg, (int, sympy.Expr)):
            value = sympy.Integer(arg) if isinstance(arg, int) else arg
            return Range(value, value) if value.is_integer else UNKNOWN
        return UNKNOWN

    def _op(self, position: int) -> Range:
        for row, call in self.calls[len(self._ops) : position + 1]:  # operands come first
            self._ops.append(self._made(row, call))
        return self._ops[position]

    def _made(self, row: Row, call: Call) -> Range:
        rule = _moved if row.kind is Kind.VIEW else RULES.get(_name(call))
        if rule is None or call.dtype.is_floating_point:
            return _held_by(call.dtype)
        return _kept(rule(call, Operands(self, call.dtype)), call.dtype)


@dataclass(frozen=True)
class Operands:
    """The arguments of one op, which it takes in a dtype."""

    ranges: Ranges
    dtype: torch.dtype

    def __call__(self, arg: Any) -> Range:
        """The range of an argument."""
        return _kept(self.ranges.of(arg), self.dtype)

    def shape(self, arg: Ref) -> Sequence[sympy.Expr]:
        """The sizes of a tensor."""
        spec = self.ranges.spec
        return tuple(map(sympy.sympify, (spec.inputs if arg.kind == "in" else spec.ops)[arg.position].shape))


def _name(call: Call) -> str:
    """What an op of torch is called, whatever the overload."""
    namespace, _, name = call.target.name().partition("::")
    return name.partition(".")[0] if namespace in ("aten", "prims") else ""


def _held_by(dtype: torch.dtype) -> Range:
    if dtype is torch.bool:
        return TRUTH
    if dtype.is_floating_point:
        return UNKNOWN
    info = torch.iinfo(dtype)
    return Range(sympy.Integer(info.min), sympy.Integer(info.max))


def _kept(found: Range, dtype: torch.dtype) -> Range:
    """A range of integers in a dtype: if that might not hold them, they are anywhere in it."""
    held = _held_by(dtype)
    return found if all(_is_within(bound, held) for bound in (found.low, found.high)) else held


def _is_within(bound: sympy.Expr, held: Range) -> bool:
    if bound.is_Integer:
        return bool(held.low <= bound <= held.high)
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expanded(bound))]
    small = all(abs(by) <= STEEPEST and (part == 1 or (part.is_Symbol and part.is_nonnegative)) for by, part in terms)
    return small and len(terms) <= STEEPEST and held == _held_by(torch.int64)


def _ordered(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether ``left <= right`` whatever the sizes."""
    return bool(expanded(right - left).is_nonnegative)


def _higher(left: sympy.Expr, right: sympy.Expr) -> sympy.Expr:
    """What is not below either bound."""
    if _ordered(left, right):
        return right
    return left if _ordered(right, left) else sympy.oo


Rule = Callable[[Call, Operands], Range]

# Rules ----------------------------------------------------------------------------------------------------------------


def _moved(call: Call, of: Operands) -> Range:
    """Of an op that moves what its first operand holds."""
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


def _number(value: int) -> Rule:
    return lambda call, of: of(value)


def _range(call: Call, of: Operands) -> Range:
    """From a start in steps."""
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
    return _greater(_greater(of(call["self"]), -of(call["self"])), of(0))


def _greater(left: Range, right: Range) -> Range:
    """The larger of two values: not below either low bound."""
    if _ordered(left.low, right.low):
        low = right.low
    else:  # where neither is known to be lower, the one of sizes tells more than a dtype's
        low = left.low if _ordered(right.low, left.low) or right.low.is_Integer else right.low
    return Range(low, _higher(left.high, right.high))


def _smaller(left: Range, right: Range) -> Range:
    return -_greater(-left, -right)


def _clamp(call: Call, of: Operands) -> Range:
    made = of(call["self"])
    if call.args.get("min") is not None:
        made = _greater(made, of(call["min"]))
    return made if call.args.get("max") is None else _smaller(made, of(call["max"]))


def _maximum(call: Call, of: Operands) -> Range:
    return _greater(of(call["self"]), of(call["other"]))


def _minimum(call: Call, of: Operands) -> Range:
    return _smaller(of(call["self"]), of(call["other"]))


def _remainder(call: Call, of: Operands) -> Range:
    """It has the sign of what is divided by."""
    by = of(call["other"])
    return Range(sympy.S.Zero, by.high - 1) if by.at_least(sympy.S.One) else UNKNOWN


def _and(call: Call, of: Operands) -> Range:
    """Not above an operand that has no sign."""
    signless = [side for side in (of(call["self"]), of(call["other"])) if side.at_least(sympy.S.Zero)]
    highs = [side.high for side in signless]
    return Range(sympy.S.Zero, -functools.reduce(_higher, (-high for high in highs))) if highs else UNKNOWN


def _position(call: Call, of: Operands) -> Range:
    """The position of an element in what is reduced."""
    shape = of.shape(call["self"])
    gone = reduced_dims(call.args, len(shape))
    return Range(sympy.S.Zero, product(shape[dim] for dim in gone) - 1)


def _drawn(call: Call, of: Operands) -> Range:
    return of(call["low"]) | of(call["high"]) + -of(1)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("convert_element_type", "clone", "flip", "rev", "roll", "repeat", "gather", "index", "index_select",
                     "embedding", "_unsafe_index", "amax", "amin"), _moved),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _number(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _number(1)),
    **dict.fromkeys(("iota", "arange"), _range),
    **dict.fromkeys(("argmax", "argmin"), _position),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamp),
    "where": _where, "constant_pad_nd": _pad,
    "add": _add, "sub": _sub, "mul": _mul, "neg": _neg, "abs": _abs,
    "maximum": _maximum, "minimum": _minimum, "remainder": _remainder, "bitwise_and": _and, "inductor_randint": _drawn,
}
"""The range of an op's elements from those of its operands, by its name without the overload."""
