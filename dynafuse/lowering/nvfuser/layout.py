"""Describes memory layouts as nvFuser wants them: the order of the dimensions in memory, and which are contiguous.

Worked example: ``float32[2, 3, 4, 5]`` in channels-last strides ``(60, 1, 15, 3)`` has stride order ``(3, 0, 2, 1)`` and
is contiguous in all four. Strides may be symbolic: a dimension is contiguous only where that holds for all sizes.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
from torch.utils._sympy.functions import Max

from dynafuse.ir import Layout, Size
from dynafuse.lowering.nvfuser.recipe import Input
from dynafuse.ops.symbols import with_symbols_at

_EXAMPLE = 1009
"""The size that stands for every size symbol where strides are ordered."""


def fusion_input(layout: Layout) -> Input:
    """Return the input of a recipe that takes a tensor of a layout."""
    layout = replace(layout, stride=tuple(map(_without_empty, layout.stride)))
    dims = memory_order(layout)
    contiguity: dict[int, bool | None] = dict.fromkeys(dims)
    contiguous_stride: Size = 1
    for dim in reversed(dims):
        if layout.shape[dim] != 1 and layout.stride[dim] != 0:
            contiguity[dim] = bool(sympy.expand(layout.stride[dim] - contiguous_stride) == 0)
            contiguous_stride = layout.stride[dim] * layout.shape[dim]
    shape = tuple(size if isinstance(size, int) else -1 for size in layout.shape)
    return Input(shape, tuple(contiguity.values()), stride_order(layout), layout.dtype)


def memory_order(layout: Layout) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    strides = [with_symbols_at(stride, _EXAMPLE) for stride in layout.stride]
    for dim in reversed(range(len(strides) - 1)):
        strides[dim] = strides[dim] or strides[dim + 1]  # an expanded dimension stays beside its neighbour
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def stride_order(layout: Layout) -> tuple[int, ...]:
    """Return the rank in memory of each dimension: 0 is innermost."""
    innermost_first = memory_order(layout)[::-1]
    return tuple(innermost_first.index(dim) for dim in range(len(innermost_first)))


def is_dense(layout: Layout) -> bool:
    """Return whether the elements fill their memory, in whatever order."""
    return all(flag is not False for flag in fusion_input(layout).contiguity) and not any(
        size != 1 and stride == 0 for size, stride in zip(layout.shape, layout.stride, strict=True))


def _without_empty(stride: Size) -> Size:
    """Return a stride with ``Max(1, size)`` as ``size``: they differ only for tensors without elements."""
    if isinstance(stride, int):
        return stride
    return stride.replace(lambda e: isinstance(e, (sympy.Max, Max)) and 1 in e.args,
                          lambda e: sympy.Mul(*(arg for arg in e.args if arg != 1)))
