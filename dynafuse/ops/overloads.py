"""Op overloads by name, across the torch versions that have them.

    >>> [str(op) for op in overloads("aten.add.Tensor aten.not_an_op.default prims.neg.default")]
    ['aten.add.Tensor', 'prims.neg.default']
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._inductor.inductor_prims
from torch._ops import OpOverload

COPIES_INTO: OpOverload = torch.ops.aten.copy_.default
"""The op that overwrites its first operand: functional graphs end in it where the user's code wrote into an input."""


def overload(name: str) -> OpOverload | None:
    """The overload called ``namespace.op.overload``, or None where this torch lacks it."""
    space, op, variant = name.split(".")
    packet = getattr(getattr(torch.ops, space), op, None)
    return getattr(packet, variant, None) if packet is not None else None


def overloads(names: str) -> Iterator[OpOverload]:
    """Those of the whitespace-separated overloads that exist."""
    return (op for op in map(overload, names.split()) if op is not None)
