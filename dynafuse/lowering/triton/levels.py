"""In which pass over a row each value can be known.

A value of level 0 needs no reduction; a reduction's result has one level more than its operand.

Worked example, softmax: the maximum has level 1, the exponential 1, the sum 2, the quotient 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from dynafuse.ir import Ref, Spec, references


class Shifted(Protocol):
    """A reduction that needs ``shift`` only once its pass is over."""

    @property
    def value(self) -> Ref: ...

    @property
    def rest(self) -> tuple[Ref, ...]: ...

    @property
    def shift(self) -> Ref: ...


def levels(spec: Spec, sums: Mapping[int, Shifted] | None = None) -> list[int]:
    """Per op, how many passes over the row it takes until its value is known; ``sums`` are those of :mod:`online`."""
    loops = {op for op, _ in spec.reductions}
    found: list[int] = []

    def highest(refs: Iterable[Ref]) -> int:
        return max((found[ref.position] for ref in refs if ref.kind == "op"), default=0)

    for position, op in enumerate(spec.ops):
        if sums and position in sums:
            one = sums[position]
            found.append(max(highest((one.value, *one.rest)) + 1, highest([one.shift])))
        else:
            found.append(highest(references(op.args)) + (position in loops))
    return found
