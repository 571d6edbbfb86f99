"""Where the views of a compiled graph lie in the memory of what they are views of.

Worked example: of ``t()[1:]`` of a kernel's ``float32[8, 4]`` it is sizes ``(3, 8)``, strides ``(1, 4)`` and offset 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.fx import Node

from dynafuse.fx import extent, size_of
from dynafuse.ir import Facts, Role, Size


class Place(NamedTuple):
    """Sizes, strides and the offset from the base, in elements."""

    sizes: Sequence[Size]
    strides: Sequence[Size]
    offset: Size


def place_in(view: Node, base: Node, facts: Mapping[Node, Facts]) -> Place:
    """Return where a view lies in its base.

    Args:
        view: The view, or the end of a chain of them.
        base: What it is a view of.
        facts: Of all nodes.

    Raises:
        AssertionError: A pass has left strides that reach beyond the memory that a kernel's result is given: nobody else
            would notice what is read there.
    """
    tensor, memory = facts[view].tensor, facts[base].tensor
    assert tensor is not None
    offset = size_of(view.meta["val"].storage_offset() - base.meta["val"].storage_offset())
    if memory is not None and facts[base].role is Role.FUSED and tensor.dtype is memory.dtype:
        reach, room = (extent(known.shape, known.stride) for known in (tensor, memory))
        if isinstance(offset, int) and isinstance(reach, int) and isinstance(room, int) and reach:
            assert offset + reach <= room, f"the view {view} reaches beyond {base}: {tensor} at {offset} of {memory}"
    return Place(tensor.shape, tensor.stride, offset)
