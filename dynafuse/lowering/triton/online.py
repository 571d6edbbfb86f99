"""Finds sums of exponentials that need not wait for the row's maximum: the shift is taken out of the sum.

Where a sum is over ``exp(y - shift) * rest`` and only the shift needs an earlier reduction of the row, a loop keeps ``m``,
the largest ``y`` so far, and ``s``, the sum of ``exp(y - m) * rest``, rescaled whenever ``m`` grows; after the loop the sum
is ``s * exp(m - shift)``. Maximum and sum then take one pass instead of two (Milakov, Gimelshein, "Online normalizer
calculation for softmax", 2018). If the shift is the maximum itself, ``m`` serves for that as well.

Worked example, the spec of a softmax: with ``%0 = amax(in0)``, ``%1 = sub(in0, %0)``, ``%2 = exp(%1)``, ``%3 = sum(%2)``
``find_online_sums`` returns ``{3: OnlineSum(difference=1, value=in0, shift=%0, maximum=0)}``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafuse.ir import Ref, Spec, references
from dynafuse.ops import lookup
from dynafuse.ops.algebra import DIFFERENCE, EXPONENTIAL, MAXIMUM, PRODUCT, SUM
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import reduced_dims


@dataclass(frozen=True)
class OnlineSum:
    """A sum over ``exp(value - shift) * rest`` along the row."""

    difference: int  # the op that subtracts
    value: Ref
    shift: Ref
    rest: tuple[Ref, ...] = ()  # the factors of the exponential
    maximum: int | None = None  # the reduction that is the largest ``value`` of the row, if it is the shift


def find_online_sums(spec: Spec) -> dict[int, OnlineSum]:
    """Return the sums of a spec whose shift can be taken out, by op. There are none where each op rounds as in eager."""
    if dict(spec.options).get("round_like_eager"):
        return {}
    candidates = ((op, _Search(spec, op).online_sum()) for op, _ in spec.reductions)
    return {op: online_sum for op, online_sum in candidates if online_sum is not None}


class _Search:
    """Looks from a sum's element for the exponential of a difference."""

    def __init__(self, spec: Spec, op: int) -> None:
        self.spec = spec
        self.op = op
        self.reductions = {position for position, _ in spec.reductions}

    def online_sum(self) -> OnlineSum | None:
        """Return the sum if its shift can be taken out, else None."""
        operand = self._argument(self.op, 0)
        if overload(self.spec.ops[self.op].target) not in SUM or not isinstance(operand, Ref):
            return None
        self.shape = self._shape(operand)
        candidate = self._factor(operand)
        if candidate is None or self._needs_reduction(candidate.value) or any(map(self._needs_reduction, candidate.rest)):
            return None
        shift = candidate.shift
        return candidate if self._is_constant_along_row(shift) and self._needs_reduction(shift) else None

    def _factor(self, ref: Ref) -> OnlineSum | None:
        """Return the element as an exponential of a difference times the factors of its products, through its casts."""
        rest: list[Ref] = []
        while ref.kind == "op" and self._shape(ref) == self.shape:
            target = overload(self.spec.ops[ref.position].target)
            if target in EXPONENTIAL:
                return self._difference(self._argument(ref.position, 0), tuple(rest))
            operands = [arg for arg in (self._argument(ref.position, k) for k in (0, 1)) if isinstance(arg, Ref)]
            row = lookup(target)
            if row is not None and row.casts and not row.rounds and self.spec.ops[ref.position].dtype.is_floating_point:
                ref = operands[0]
            elif target in PRODUCT and len(operands) == 2:
                ref, factor = sorted(operands, key=lambda operand: not self._needs_reduction(operand))
                rest.append(factor)
            else:
                return None
        return None

    def _difference(self, ref: object, rest: tuple[Ref, ...]) -> OnlineSum | None:
        """Return the sum whose exponential is of ``ref``, if that is a difference over whole rows."""
        if not isinstance(ref, Ref) or ref.kind != "op" or self._shape(ref) != self.shape:
            return None
        op = self.spec.ops[ref.position]
        value, shift = self._argument(ref.position, 0), self._argument(ref.position, 1)
        is_difference = overload(op.target) in DIFFERENCE and dict(op.args).get("alpha", 1) == 1
        if not is_difference or not isinstance(value, Ref) or not isinstance(shift, Ref) or self._shape(value) != self.shape:
            return None
        return OnlineSum(ref.position, value, shift, rest, self._maximum(value, shift))

    def _maximum(self, value: Ref, shift: Ref) -> int | None:
        """Return the op of the shift if it is the largest ``value`` of the row, along the axes that the sum closes over."""
        if shift.kind != "op" or shift.position not in self.reductions:
            return None
        if overload(self.spec.ops[shift.position].target) not in MAXIMUM or self._argument(shift.position, 0) != value:
            return None
        dims = dict(self.spec.reductions)
        same_axes = self._reduced_dims(shift.position) == self._reduced_dims(self.op) and (
            dims[shift.position] == dims[self.op])
        return shift.position if same_axes else None

    def _is_constant_along_row(self, shift: Ref) -> bool:
        shape = self._shape(shift)
        missing = len(self.shape) - len(shape)
        return all(dim < missing or shape[dim - missing] == 1 for dim in self._reduced_dims(self.op))

    def _reduced_dims(self, op: int) -> tuple[int, ...]:
        target = overload(self.spec.ops[op].target)
        operand = self._argument(op, 0)
        assert target is not None and isinstance(operand, Ref)
        return tuple(sorted(reduced_dims(dict(self.spec.ops[op].args), len(self._shape(operand)))))

    def _needs_reduction(self, ref: Ref) -> bool:
        """Return whether a value needs a reduction of the row."""
        stack, visited = [ref], set()
        while stack:
            value = stack.pop()
            if value.kind == "op" and value.position not in visited:
                visited.add(value.position)
                if value.position in self.reductions:
                    return True
                stack.extend(references(self.spec.ops[value.position].args))
        return False

    def _argument(self, op: int, number: int) -> object:
        args = self.spec.ops[op].args
        return args[number][1] if number < len(args) else None

    def _shape(self, ref: Ref) -> tuple[object, ...]:
        return tuple(self.spec.tensor(ref).shape)
