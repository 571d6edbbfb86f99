"""Memory layouts as nvFuser wants them: the order of the dimensions in memory, and which of them are contiguous.

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

_EXAMPLE = 1009  # what stands in for a size symbol where strides are ordered


def described(layout: Layout) -> Input:
    """The input that a tensor of ``layout`` is."""
    layout = replace(layout, stride=tuple(map(_without_empty, layout.stride)))
    memory = in_memory(layout)
    flags = {dim: None if _spread(layout, dim) else False for dim in memory}
    expected: Size = 1
    for dim in reversed(memory):
        if flags[dim] is not None:
            flags[dim] = bool(sympy.expand(layout.stride[dim] - expected) == 0)
            expected = layout.stride[dim] * layout.shape[dim]
    shape = tuple(size if isinstance(size, int) else -1 for size in layout.shape)
    return Input(shape, tuple(flags[dim] for dim in memory), stride_order(layout), layout.dtype)


def in_memory(layout: Layout) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    keys = [with_symbols_at(stride, _EXAMPLE) for stride in layout.stride]
    for dim in reversed(range(len(keys) - 1)):
        keys[dim] = keys[dim] or keys[dim + 1]  # an expanded dimension stays where it is
    return sorted(range(len(keys)), key=lambda dim: -keys[dim])


def stride_order(layout: Layout) -> tuple[int, ...]:
    """Per dimension, its rank in memory: 0 is innermost."""
    memory = in_memory(layout)[::-1]
    return tuple(memory.index(dim) for dim in range(len(memory)))


def is_dense(layout: Layout) -> bool:
    """Whether the elements fill their memory, in whatever order."""
    given = described(layout)
    return all(flag is not False for flag in given.contiguity) and not any(
        size != 1 and stride == 0 for size, stride in zip(layout.shape, layout.stride, strict=True))


def _without_empty(stride: Size) -> Size:
    """A stride with ``Max(1, size)`` as ``size``: they differ only where there is no element."""
    if isinstance(stride, int):
        return stride
    return stride.replace(lambda e: isinstance(e, (sympy.Max, Max)) and 1 in e.args,
                          lambda e: sympy.Mul(*(arg for arg in e.args if arg != 1)))


def _spread(layout: Layout, dim: int) -> bool:
    return layout.shape[dim] == 1 or layout.stride[dim] == 0
