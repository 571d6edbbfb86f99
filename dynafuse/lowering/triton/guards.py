"""Which inputs of a kernel belong to terms that its fold may not have: those are not loaded then.

Worked example: of ``%1 = aten.add.Tensor(%0, %2) if count > 3`` with ``%2 = aten.tanh.default(in5)``, where nothing else
reads ``%2`` and ``in5``, the latter is loaded if ``count > 3``; of ``%2`` nothing is used otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynafuse.ir import Ref, Spec, references


def guarded_inputs(spec: Spec) -> Mapping[int, int]:
    """The guard of every input that is needed for the terms of one guarded op alone, by its position."""
    if not spec.counts:
        return {}
    needed: dict[Ref, set[int]] = {Ref("op", store.op): {0} for store in spec.stores}  # under which guards; 0 is always
    for position in reversed(range(len(spec.ops))):
        op = spec.ops[position]
        under = needed.get(Ref("op", position), set())
        for place, ref in enumerate(references(op.args)):
            needed.setdefault(ref, set()).update({op.guard} if op.guard and place else under)
    found = ((ref.position, guards) for ref, guards in needed.items() if ref.kind == "in" and len(guards) == 1)
    return {position: guard for position, (guard,) in found if guard}
