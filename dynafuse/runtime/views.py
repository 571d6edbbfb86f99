"""Where the views of a compiled graph lie in the memory of what they are views of.

Worked example: of ``t()[1:]`` of a kernel's ``float32[8, 4]`` it is sizes ``(3, 8)``, strides ``(1, 4)`` and offset 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.fx import Node

from dynafuse.fx import size_of
from dynafuse.ir import Facts, Role, Size, Tensor


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
        reach, extent = _reach(tensor), _reach(memory)
        if reach and extent is not None and isinstance(offset, int):
            assert offset + reach <= extent, f"the view {view} reaches beyond {base}: {tensor} at {offset} of {memory}"
    return Place(tensor.shape, tensor.stride, offset)


def _reach(tensor: Tensor) -> int | None:
    """Return how many elements of memory a tensor reaches over; None if that is not known."""
    known = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride, strict=True)
             if isinstance(size, int) and isinstance(stride, int)]
    if len(known) < len(tensor.shape):
        return None
    return 1 + sum((size - 1) * stride for size, stride in known) if all(size for size, _ in known) else 0
