"""In which pass over a row each value can be known.

A value of level 0 needs no reduction; a reduction's result has one level more than its operand.

Worked example, softmax: the maximum has level 1, the exponential 1, the sum 2, the quotient 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dynafuse.ir import OpSpec, Ref, Spec


def references(op: OpSpec) -> Iterator[Ref]:
    """The tensors that an op takes."""
    stack: list[Any] = [value for _, value in reversed(op.args)]
    while stack:
        value = stack.pop()
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            stack.extend(reversed(value))


def levels(spec: Spec) -> list[int]:
    """Per op, how many reductions stand one after another on the way to its value."""
    loops = {op for op, _ in spec.reductions}
    found: list[int] = []
    for position, op in enumerate(spec.ops):
        below = max((found[ref.position] for ref in references(op) if ref.kind == "op"), default=0)
        found.append(below + (position in loops))
    return found
