"""Windows that lanes share: how many points of overlapping windows a lane computes, and from what it loads these.

The price of a region asks how many loads a point takes, the schedule of its kernel which points a lane takes
(``lowering/triton/register_tiles.py``).

Worked example: windows of 3 × 3 over ``bfloat16[128, 144, 56, 56]`` whose channels lie side by side take 9 loads a point.
Of 4 × 2 points they take 24, three a point.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch.fx import Node

from dynafuse.cost.depthwise import MOST_POINTS as MOST_POINTS
from dynafuse.cost.depthwise import STEPS_OF_PROCESSOR
from dynafuse.ir import Tensor
from dynafuse.ops.indexing_math import IndexSymbol
from dynafuse.partition.kernel_class import PROCESSORS, REGISTER
from dynafuse.partition.places import Reading, indices_of

RegisterTile = tuple[tuple[int, int], ...]
"""Axes, each with how many points along it a lane computes."""

LEAST_PLACES = 4
"""Places at which a tensor is read for a point, from which on these are a window."""

MOST_REGISTERS = 250
"""Registers for all that a lane loads."""

LEAST_SHARED = 0.75
"""Of the loads of a point, what is left of them at most where points share them."""

STEPS = 4
"""Steps of a tile that a lane takes."""

LEAST_STEPS = PROCESSORS * STEPS_OF_PROCESSOR
"""Steps of a kernel that leave all processors several programs."""


@dataclass(frozen=True)
class Window:
    """The places at which a tensor is read for a point, and how far apart they are for neighbours along each axis.

    ``registers`` is how many a lane takes for one place: a lane loads several steps side by side.
    """

    strides: tuple[int, ...]
    places: frozenset[int]
    registers: int

    def overlaps(self, axis: int) -> bool:
        """Return whether neighbouring points along an axis read some of the same elements; of what lies side by side."""
        stride = self.strides[axis]
        return 1 in self.strides and stride != 0 and any(place + stride in self.places for place in self.places)

    def loads(self, tile: RegisterTile) -> int:
        """Return from how many places the points of a register tile are loaded."""
        steps = ([point * self.strides[axis] for point in range(count)] for axis, count in tile)
        return len({place + sum(offsets) for offsets in itertools.product(*steps) for place in self.places})


def points_of(tile: RegisterTile) -> int:
    """Return how many points of a register tile a lane computes."""
    return math.prod(count for _, count in tile)


def registers_of(itemsize: int, *, is_alike: bool, is_torn: bool) -> int:
    """Return how many registers a lane takes for what it loads from one place.

    Args:
        itemsize: Bytes of an element.
        is_alike: Whether all lanes load the same, and one element each; otherwise they load one for each of several steps.
        is_torn: Whether it loads these one by one.
    """
    return (1 if is_alike else STEPS) * (max(itemsize, REGISTER) if is_alike or is_torn else itemsize) // REGISTER


def overlapping(windows: Iterable[Window], axes: Iterable[int]) -> list[int]:
    """Return the axes along which some windows overlap."""
    known = list(windows)
    return [axis for axis in sorted(axes) if any(window.overlaps(axis) for window in known)]


def tiles_of(sizes: Mapping[int, int], axes: Sequence[int], most: int) -> Iterator[RegisterTile]:
    """Yield register tiles that divide axes.

    Args:
        sizes: Of the axes.
        axes: The axes.
        most: How many points they have at most.
    """
    counts = ([count for count in range(1, most + 1) if sizes[axis] % count == 0] for axis in axes)
    tiles = (tuple(zip(axes, chosen, strict=True)) for chosen in itertools.product(*counts))
    return (tile for tile in tiles if points_of(tile) <= most)


def best_tile(windows: Sequence[Window], axes: Sequence[int], tiles: Iterable[RegisterTile]) -> RegisterTile:
    """Return the tile for which a point is loaded from fewest places; nothing if few are shared.

    Args:
        windows: What is read in windows.
        axes: Those along which some of them overlap.
        tiles: The tiles to choose from.
    """
    shared = [window for window in windows if any(map(window.overlaps, axes))]
    alike = sum(len(window.places) * window.registers for window in windows if window not in shared)
    alone = sum(len(window.places) for window in shared)
    shares: dict[RegisterTile, tuple[float, int]] = {}
    for tile in tiles:
        loads, points = [window.loads(tile) for window in shared], points_of(tile)
        registers = sum(count * window.registers for count, window in zip(loads, shared, strict=True))
        if sum(loads) <= LEAST_SHARED * alone * points and registers + alike <= MOST_REGISTERS:
            shares[tile] = (sum(loads) / points, points)
    return tuple((axis, count) for axis, count in min(shares, key=shares.__getitem__, default=()) if count > 1)


# Of a node -------------------------------------------------------------------------------------------------------------


def window_loads(result: Tensor, readings: Mapping[Node, Reading], operands: Mapping[Node, Tensor],
                 steps: int = 1, dim: int = 0) -> dict[Node, float]:
    """Return how many loads a point takes of each operand that is read in windows which lanes of a pointwise kernel share.

    Operands of which each point is loaded by itself are left out.

    Args:
        result: What is made of the windows.
        readings: Where its operands are read.
        operands: Those that are read at several places.
        steps: In how many steps a loop walks the windows, if they are not written out: lanes share what one step reads.
        dim: The dimension of operands along which a step moves.
    """
    if steps > 1:
        readings = {argument: _of_a_step(reading, dim) for argument, reading in readings.items()}
    if not all(isinstance(size, int) for size in result.shape) or result.innermost is None:
        return {}
    windows = {argument: window for argument, operand in operands.items()
               if argument in readings and (window := _window(readings[argument], operand, result)) is not None}
    if any(stride == 1 and axis != result.innermost for window in windows.values()
           for axis, stride in enumerate(window.strides)):
        return {}
    axes = overlapping(windows.values(), (axis for axis in range(len(result.shape)) if axis != result.innermost))
    tiles = tiles_of(dict(enumerate(map(int, result.shape))), axes, min(MOST_POINTS, result.hint // LEAST_STEPS))
    tile = best_tile(list(windows.values()), axes, tiles)
    points = points_of(tile)
    return {argument: steps * window.loads(tile) / points for argument, window in windows.items()} if tile else {}


def _of_a_step(reading: Reading, dim: int) -> Reading:
    """Return what a step of a loop reads, of which each moves along a dimension."""
    at = min((index[dim] for index in reading.indices), key=str)
    return replace(reading, indices=frozenset(index for index in reading.indices if index[dim] == at))


def _window(reading: Reading, operand: Tensor, result: Tensor) -> Window | None:
    """Return the window in which an operand is read; None if its elements are not known numbers of elements apart."""
    if not reading.told or len(reading.indices) < LEAST_PLACES or not all(isinstance(s, int) for s in operand.stride):
        return None
    places, strides, along = set[int](), set[tuple[int, ...]](), set[int]()
    axes = {at: axis for axis, at in enumerate(indices_of(result.shape))}
    for index in reading.indices:
        terms = [_affine(at) for at in index]
        if None in terms:
            return None
        place, steps = 0, [0] * len(result.shape)
        for dim, (start, factors) in enumerate(terms):  # type: ignore[misc]
            place += start * operand.stride[dim]
            along |= {start} if dim == operand.innermost else set()
            for at, factor in factors:
                steps[axes[at]] += factor * operand.stride[dim]
        places.add(place)
        strides.add(tuple(steps))
    if len(strides) != 1:
        return None
    (stride,) = strides
    assert result.innermost is not None
    registers = registers_of(operand.dtype.itemsize, is_alike=stride[result.innermost] == 0, is_torn=len(along) > 1)
    return Window(stride, frozenset(places), registers)


@functools.lru_cache(maxsize=1024)
def _affine(at: sympy.Expr) -> tuple[int, tuple[tuple[IndexSymbol, int], ...]] | None:
    """Return an index as a number and a factor of each symbol of a dimension; None if it is something else."""
    start, factors = 0, list[tuple[IndexSymbol, int]]()
    for term, factor in at.as_coefficients_dict().items():
        if not factor.is_Integer or not (term == 1 or isinstance(term, IndexSymbol)):
            return None
        if term == 1:
            start = int(factor)
        else:
            factors.append((term, int(factor)))
    return start, tuple(factors)
