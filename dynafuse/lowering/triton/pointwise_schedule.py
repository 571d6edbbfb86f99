"""Chooses the schedules of pointwise specs: flat, or tiled where accesses are contiguous along two axes.

Worked example: ``x + y.t()`` over ``float32[4096, 4096]`` is scheduled ``tiled``: ``y`` walks the rows, ``x`` the columns,
64 of each in a program, so that the reads of both tensors are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynafuse.ir import Spec
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.tiles import (
    PROCESSORS,
    Schedule,
    by_stride,
    clamp,
    estimate,
    point_count,
    power_of_two,
    strides_of,
    weight,
)


def schedule_pointwise(spec: Spec, probed: Emitter, accesses: Sequence[Access]) -> Schedule:
    """Return the schedule of a spec without reductions; ``accesses`` are sorted, the largest first."""
    order = by_stride(probed, accesses, range(len(spec.axes)))
    cut = _transposed_cut(spec, probed, accesses, order)
    if cut:
        return _tiled(spec, order, cut)
    total = point_count(spec, order)
    block = clamp(power_of_two(total // (PROCESSORS * 8)), 128, 1024)
    return Schedule("flat", {"x": order}, {"x": min(block, power_of_two(total))}, 4 if block >= 512 else 2)


def _transposed_cut(spec: Spec, probed: Emitter, accesses: Sequence[Access], order: tuple[int, ...]) -> int:
    """Return where to cut the axes in two tile dimensions so that a large access across them is contiguous too; else 0."""
    if len(order) < 2 or point_count(spec, order) < 64 * 64:
        return 0
    largest = weight(accesses[0])
    for access in accesses:
        strides = strides_of(probed, access)
        contiguous = next((axis for axis in order if strides[axis] == 1), None)
        if contiguous is None:
            continue
        cut = order.index(contiguous) + 1
        inner = order[cut:]
        is_long = point_count(spec, inner) >= 8 and estimate(spec.axes[contiguous].size) >= 8
        if is_long and 2 * weight(access) >= largest and any(strides[axis] for axis in inner):
            return cut
    return 0


def _tiled(spec: Spec, order: tuple[int, ...], cut: int) -> Schedule:
    rows, columns = order[:cut], order[cut:]
    block = {"y": min(64, power_of_two(point_count(spec, rows))), "x": min(64, power_of_two(point_count(spec, columns)))}
    return Schedule("tiled", {"y": rows, "x": columns}, block, 8 if block["x"] * block["y"] >= 4096 else 4)
