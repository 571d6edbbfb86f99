"""Sums of exponentials that need not wait for the row's maximum: the shift is taken out of the sum.

Where a sum is over ``exp(y - shift) * rest`` and only the shift needs an earlier reduction of the row, a loop keeps ``m``,
the largest ``y`` so far, and ``s``, the sum of ``exp(y - m) * rest``, rescaled whenever ``m`` grows; after the loop the sum
is ``s * exp(m - shift)``. Maximum and sum then take one pass instead of two (Milakov, Gimelshein, "Online normalizer
calculation for softmax", 2018). If the shift is the maximum itself, ``m`` serves for that as well.

Worked example, the spec of a softmax: ``find`` says ``{3: Online(difference=1, value=in0, shift=%0, maximum=0)}``, for
``%0 = amax(in0)``, ``%1 = sub(in0, %0)``, ``%2 = exp(%1)``, ``%3 = sum(%2)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynafuse.ir import Ref, Spec, references
from dynafuse.ops import lookup
from dynafuse.ops.algebra import DIFFERENCE, EXPONENTIAL, MAXIMUM, PRODUCT, SUM
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import reduced_dims


@dataclass(frozen=True)
class Online:
    """A sum over ``exp(value - shift) * rest``: where the difference is, its sides, what else the element takes.

    ``maximum`` is the reduction that is the largest ``value`` of the row, if the spec has one.
    """

    difference: int
    value: Ref
    shift: Ref
    rest: tuple[Ref, ...] = ()
    maximum: int | None = None


def find(spec: Spec) -> dict[int, Online]:
    """The sums of a spec that can be computed so."""
    if dict(spec.options).get("round_like_eager"):
        return {}
    return {op: found for op, _ in spec.reductions if (found := _Search(spec, op).result()) is not None}


class _Search:
    """Looks from a sum's element for the exponential of a difference."""

    def __init__(self, spec: Spec, op: int) -> None:
        self.spec = spec
        self.op = op
        self.loops = {position for position, _ in spec.reductions}

    def result(self) -> Online | None:
        operand = self._argument(self.op, 0)
        if overload(self.spec.ops[self.op].target) not in SUM or not isinstance(operand, Ref):
            return None
        self.shape = self._shape(operand)
        found = self._factored(operand)
        if found is None or self._reduces(found.value) or any(map(self._reduces, found.rest)):
            return None
        return found if self._of_row(found.shift) and self._reduces(found.shift) else None

    def _factored(self, ref: Ref) -> Online | None:
        """The element as an exponential of a difference, times what its products and casts add."""
        rest: list[Ref] = []
        while ref.kind == "op" and self._shape(ref) == self.shape:
            target = overload(self.spec.ops[ref.position].target)
            if target in EXPONENTIAL:
                return self._difference(self._argument(ref.position, 0), tuple(rest))
            inner = [a for a in (self._argument(ref.position, k) for k in (0, 1)) if isinstance(a, Ref)]
            row = lookup(target)
            if row is not None and row.casts and not row.rounds and self.spec.ops[ref.position].dtype.is_floating_point:
                ref = inner[0]
            elif target in PRODUCT and len(inner) == 2:
                ref, other = sorted(inner, key=lambda r: not self._reduces(r))
                rest.append(other)
            else:
                return None
        return None

    def _difference(self, ref: object, rest: tuple[Ref, ...]) -> Online | None:
        if not isinstance(ref, Ref) or ref.kind != "op" or self._shape(ref) != self.shape:
            return None
        op = self.spec.ops[ref.position]
        value, shift = self._argument(ref.position, 0), self._argument(ref.position, 1)
        plain = overload(op.target) in DIFFERENCE and dict(op.args).get("alpha", 1) == 1
        if not plain or not isinstance(value, Ref) or not isinstance(shift, Ref) or self._shape(value) != self.shape:
            return None
        return Online(ref.position, value, shift, rest, self._maximum(value, shift))

    def _maximum(self, value: Ref, shift: Ref) -> int | None:
        """The shift, if it is the largest value of the row by the same axes that the sum closes over."""
        if shift.kind != "op" or shift.position not in self.loops:
            return None
        same = overload(self.spec.ops[shift.position].target) in MAXIMUM and self._argument(shift.position, 0) == value
        dims = dict(self.spec.reductions)
        return shift.position if same and self._gone(shift.position) == self._gone(self.op) and (
            dims[shift.position] == dims[self.op]) else None

    def _of_row(self, shift: Ref) -> bool:
        """Whether the shift is one per row."""
        shape = self._shape(shift)
        kept = len(self.shape) - len(shape)
        return all(d < kept or shape[d - kept] == 1 for d in self._gone(self.op))

    def _gone(self, op: int) -> tuple[int, ...]:
        target = overload(self.spec.ops[op].target)
        operand = self._argument(op, 0)
        assert target is not None and isinstance(operand, Ref)
        return tuple(sorted(reduced_dims(dict(self.spec.ops[op].args), len(self._shape(operand)))))

    def _reduces(self, ref: Ref) -> bool:
        """Whether a value needs a reduction of the row."""
        stack, seen = [ref], set()
        while stack:
            one = stack.pop()
            if one.kind == "op" and one.position not in seen:
                seen.add(one.position)
                if one.position in self.loops:
                    return True
                stack.extend(references(self.spec.ops[one.position].args))
        return False

    def _argument(self, op: int, number: int) -> object:
        args = self.spec.ops[op].args
        return args[number][1] if number < len(args) else None

    def _shape(self, ref: Ref) -> tuple[object, ...]:
        return tuple((self.spec.inputs if ref.kind == "in" else self.spec.ops)[ref.position].shape)
