"""In which pass over a row each value can be known.

A value of level 0 needs no reduction; a reduction's result has one level more than its operand.

Worked example, softmax: the maximum has level 1, the exponential 1, the sum 2, the quotient 2.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from dynafuse.ir import Ref, Spec, Store, references


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


def runs_along(store: Store, axes: Container[int]) -> bool:
    """Whether an output has a dimension that walks one of some axes."""
    return any(axis in axes for dim in store.dims for axis in dim)


def passes(spec: Spec, level: Sequence[int], row: Container[int]) -> int:
    """How often a loop reads the row, whose axes are ``row``, until all reductions and outputs are known."""
    stored = [level[store.op] for store in spec.stores if runs_along(store, row)]
    return max([level[op] - 1 for op, _ in spec.reductions] + stored) + 1
