"""Where tensors begin in memory: kernels assume what could be seen of it, and random numbers of an op may depend on it.

Worked example: the kernels of a graph that was shown an input at the beginning of its memory assume a multiple of 16 bytes.
One at address 4 is copied once for them; under ``fallback_random`` its dropout reads it where it is, because eager's draws
other numbers for an operand that begins at 16. A slice that a forward saves at byte 104 of its memory is always there: the
kernels of the backward assume a multiple of 8.
"""

from __future__ import annotations

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from dynafuse.fx import extent
from dynafuse.ops.overloads import overloads

DRAWS_BY_ADDRESS = frozenset(overloads("aten.native_dropout.default"))
"""Ops that draw as many numbers at a time as the alignment of their operand lets them load elements."""


def draws_by_address(node: Node) -> bool:
    """Return whether a call draws other random numbers where its operand begins elsewhere."""
    target = node.args[0] if isinstance(node.target, HigherOrderOperator) and node.args else node.target
    return target in DRAWS_BY_ADDRESS


def has_known_place(node: Node) -> bool:
    """Return whether it is known where in its memory, which is aligned, an input begins."""
    return isinstance(node.meta["val"].storage_offset(), int)


def allocates(node: Node) -> bool:
    """Return whether a call returns memory of its own (allocations are aligned), by its schema."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "aten" and not target.is_view


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the memory that a tensor spans, with the same sizes and strides (expanded ones too)."""
    size, stride = tensor.size(), tensor.stride()
    return tensor.as_strided((extent(size, stride),), (1,)).clone().as_strided(size, stride, 0)
