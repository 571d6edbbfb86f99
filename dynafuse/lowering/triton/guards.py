"""Tells which inputs of a kernel belong to terms that its fold may lack: these are loaded only where the fold has the term.

Worked example: of ``%1 = aten.add.Tensor(%0, %2) if count > 3`` with ``%2 = aten.tanh.default(in5)``, where nothing else
reads ``%2`` and ``in5``, the latter is loaded if ``count > 3``; otherwise nothing of ``%2`` is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynafuse.ir import Ref, Spec, references

ALWAYS = 0
"""The guard of an op that every fold has."""


def input_guards(spec: Spec) -> Mapping[int, int]:
    """Return the guard of each input that only the terms of one guarded op need, by the input's position."""
    if not spec.counts:
        return {}
    needed_under: dict[Ref, set[int]] = {Ref("op", store.op): {ALWAYS} for store in spec.stores}
    for position in reversed(range(len(spec.ops))):
        op = spec.ops[position]
        op_guards = needed_under.get(Ref("op", position), set())
        for place, ref in enumerate(references(op.args)):  # the first operand is the fold so far, the others are the term
            needed_under.setdefault(ref, set()).update({op.guard} if op.guard and place else op_guards)
    inputs = ((ref.position, guards) for ref, guards in needed_under.items() if ref.kind == "in")
    return {position: min(guards) for position, guards in inputs if len(guards) == 1 and ALWAYS not in guards}
