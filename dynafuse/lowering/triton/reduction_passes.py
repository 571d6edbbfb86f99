"""Tells how many passes over a row must end before a value is known.

A value that needs no reduction is known before the first pass ends; a reduction's result takes one pass more than its
operand.

Worked example, softmax: the maximum takes 1 pass, the exponential 1, the sum 2, the quotient 2.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from dynafuse.ir import Ref, Spec, Store, references
from dynafuse.lowering.triton.online import OnlineSum


def passes_before(spec: Spec, online_sums: Mapping[int, OnlineSum] | None = None) -> list[int]:
    """Return for each op how many passes over the row end before its value is known.

    Args:
        spec: The region.
        online_sums: The sums, by op, that need their shift only when their own pass is over.
    """
    online_sums = online_sums or {}
    reductions = {op for op, _ in spec.reductions}
    counts: list[int] = []

    def most(refs: Iterable[Ref]) -> int:
        return max((counts[ref.position] for ref in refs if ref.kind == "op"), default=0)

    for position, op in enumerate(spec.ops):
        online_sum = online_sums.get(position)
        if online_sum is None:
            counts.append(most(references(op.args)) + (position in reductions))
        else:
            counts.append(max(most((online_sum.value, *online_sum.rest)) + 1, most([online_sum.shift])))
    return counts


def runs_along(store: Store, axes: Container[int]) -> bool:
    """Return whether an output has a dimension that walks one of ``axes``."""
    return any(axis in axes for dim in store.dims for axis in dim)


def pass_count(spec: Spec, needed_passes: Sequence[int], row_axes: Container[int]) -> int:
    """Return how often a loop reads the row until all reductions and outputs are known.

    Args:
        spec: The region.
        needed_passes: What :func:`passes_before` says of its ops.
        row_axes: The axes of the row.
    """
    stored = [needed_passes[store.op] for store in spec.stores if runs_along(store, row_axes)]
    return max([needed_passes[op] - 1 for op, _ in spec.reductions] + stored) + 1
