"""Register tiles: several points of windows beside each other, which a lane computes from what it has loaded once.

Windows of neighbouring points overlap. A lane that computes some of these points keeps what it has loaded for one in
registers for the others; what all of them read alike, such as a weight, it loads once as well. A kernel walks the axis in
steps then, and its text has the lines of each point, in which loads of one place are one.

Axes along which memory is contiguous are left to neighbouring lanes. Where windows begin apart, the gradient of what they
read has a tile as large as that: which windows a point is in, and where, is then known when the kernel is written.

Worked example: windows of 3 × 3 over ``bfloat16[128, 144, 56, 56]`` whose channels lie side by side take 9 loads a point.
Of 4 × 2 points they take 24, three a point: a convolution that keeps channels apart takes 74 µs on an H200, not 150.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import sympy
from torch.utils._sympy.functions import FloorDiv

from dynafuse.ir import Spec
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.probe import Probe
from dynafuse.lowering.triton.tiles import Schedule, are_known, point_count, probe, start_of, strides_of, vector_length
from dynafuse.partition.windows import (
    LEAST_PLACES,
    LEAST_SHARED,
    LEAST_STEPS,
    MOST_POINTS,
    MOST_REGISTERS,
    STEPS,
    RegisterTile,
    Window,
    best_tile,
    overlapping,
    points_of,
    registers_of,
    tiles_of,
)

MOST_INSTRUCTIONS = 1600
"""Instructions of a lane: what follows the windows is computed for each point, and takes the longer to compile."""

TILES = ((512, 4), (256, 2))
"""Steps of a tile, and warps."""


def in_steps(spec: Spec, register_tile: RegisterTile) -> Spec:
    """Return a spec whose axes have a point for each step of a register tile."""
    points = dict(register_tile)
    axes = (replace(axis, size=axis.size // points[k]) if k in points else axis for k, axis in enumerate(spec.axes))
    return replace(spec, axes=tuple(axes)) if points else spec


def with_register_tiles(spec: Spec, probed: Probe, order: tuple[int, ...]) -> Iterator[Schedule]:
    """Yield schedules of a pointwise spec whose lanes compute several points of windows; none without windows that overlap.

    Args:
        spec: The region, of typical sizes.
        probed: Its probe.
        order: Its axes, outermost first.
    """
    tile = _best(spec, probed, order)
    if tile:
        for block, warps in TILES:
            yield Schedule("flat", {"x": order}, {"x": block}, warps, register_tile=tile)


def _windows(spec: Spec, probed: Probe, order: tuple[int, ...]) -> list[Window]:
    """Return the windows of a region: what is read at several places that are known numbers of elements apart."""
    groups: dict[tuple[str, tuple[int | None, ...]], dict[int, Access]] = defaultdict(dict)
    for access in probed.accesses:
        start = sympy.nan if access.is_store else start_of(probed, access)
        if start.is_Integer:
            groups[access.tensor, tuple(strides_of(probed, access))][int(start)] = access
    return [Window(tuple(stride or 0 for stride in strides), frozenset(places),
                    max(_registers(spec, probed, access, order) for access in places.values()))
            for (_, strides), places in groups.items() if len(places) >= LEAST_PLACES and None not in strides]


def _registers(spec: Spec, probed: Probe, access: Access, order: tuple[int, ...]) -> int:
    """Return how many registers a lane takes for what it loads at once: for each step, or for one if all load the same."""
    is_alike, is_torn = strides_of(probed, access)[order[-1]] == 0, vector_length(spec, probed, access, order) < STEPS
    return registers_of(access.layout.dtype.itemsize, is_alike=is_alike, is_torn=is_torn)


def _best(spec: Spec, probed: Probe, order: tuple[int, ...]) -> RegisterTile:
    """Return the tile for whose points a lane loads least; nothing if that is not much less than for each by itself."""
    if not order or not are_known(spec, order) or any(store.scatters for store in spec.stores):
        return ()
    if not _is_along(probed, order[-1]):
        return ()
    return _of_strides(spec, probed, order) or _of_overlaps(spec, probed, order)


def _of_strides(spec: Spec, probed: Probe, order: tuple[int, ...]) -> RegisterTile:
    """Return a tile of as many points as windows of a gradient begin apart; nothing if that does not save many loads.

    Points at multiples of the stride are in other windows than those between, and at other places in these: of each point
    in the tile it is known in which, so that a lane does not load from others.
    """
    strides = ((axis, math.lcm(*_divisors(probed, axis))) for axis in sorted(order[:-1]))
    tile = tuple((axis, stride) for axis, stride in strides if stride > 1)
    if not tile or tile not in _tiles(spec, probed, [axis for axis, _ in tile]):
        return ()
    stepped = probe(in_steps(spec, tile), tile)
    loads, alone = ({access.place: access for access in each.accesses if access.place} for each in (stepped, probed))
    registers = sum(_registers(spec, stepped, access, order) for access in loads.values())
    return tile if len(loads) <= LEAST_SHARED * len(alone) * points_of(tile) and registers <= MOST_REGISTERS else ()


def _divisors(probed: Probe, axis: int) -> set[int]:
    """Return by which numbers an axis is divided in places at which a tensor is read in windows."""
    divisors: dict[str, list[int]] = defaultdict(list)
    for access in probed.accesses:
        for term in access.offset.atoms(FloorDiv):
            if not access.is_store and term.args[0].has(probed.axes[axis]) and term.args[1].is_Integer:
                divisors[access.tensor].append(int(term.args[1]))
    return {divisor for of in divisors.values() if len(of) >= LEAST_PLACES for divisor in of}


def _of_overlaps(spec: Spec, probed: Probe, order: tuple[int, ...]) -> RegisterTile:
    """Return the tile of overlapping windows for which a point is loaded from fewest places; nothing if few are shared."""
    windows = _windows(spec, probed, order)
    axes = overlapping(windows, order[:-1])
    return best_tile(windows, axes, _tiles(spec, probed, axes))


def _is_along(probed: Probe, innermost: int) -> bool:
    """Return whether memory is contiguous along one axis, if any, wherever it is read or written."""
    return all(stride != 1 or axis == innermost for access in probed.accesses
               for axis, stride in enumerate(strides_of(probed, access)))


def _tiles(spec: Spec, probed: Probe, axes: Sequence[int]) -> Iterator[RegisterTile]:
    """Yield register tiles that divide axes, have few enough instructions, and leave all processors several programs."""
    instructions = sum(work.instructions for work in probed.work)
    steps = point_count(spec, range(len(spec.axes)))
    most = min(MOST_POINTS, steps // LEAST_STEPS, int(MOST_INSTRUCTIONS // max(instructions, 1)))
    return tiles_of({axis: int(spec.axes[axis].size) for axis in axes}, axes, most)
