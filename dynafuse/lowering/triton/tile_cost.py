"""Prices tiles of pointwise kernels: how long a kernel takes that walks the axes in a given order, with given tiles.

Four things can bound a kernel: the bytes that it moves, the lines of memory that its loads and stores touch, the
instructions that it issues, and the time from a load to its store where too few programs run side by side. The price is the
longest of them and a share of the others, but no less than it takes to start all programs.

A line is touched once by each instruction of a warp in which one of its lanes needs it. Lanes that hold several points side
by side, as many as the widest access moves at once, are as far apart in every other access: one that jumps touches a line
per lane. Where a tile has many rows that lie far apart, lines that are returned to have left the cache.

What varies along one tile dimension alone is computed once for all points along the other one. That is why a batch norm over
``[128, 14, 14, 384]``, whose factors vary along the channels alone, is cheaper in tiles of several positions by many
channels than in runs of positions and channels as one. Over ``[128, 384, 14, 14]`` it is not: what points side by side in
a lane share is computed once for them, and four neighbours are always of one channel; but not what branches (``probe.py``).

Worked example: copying ``float32[4096, 4096]`` to its transpose moves 134 MB, which takes 32 µs. In runs of 1024 elements it
also touches a line of memory for every element that is read, which 132 processors do once a cycle each: 73 µs more. In
tiles of 64 by 64 every line is touched once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynafuse.lowering.triton.pieces import is_begin, tile_count
from dynafuse.lowering.triton.tile_facts import ELSEWHERE, TileFacts, Walk
from dynafuse.lowering.triton.tiles import Schedule, values_per_tile
from dynafuse.partition.kernel_class import LANES, PROCESSORS, SECTOR

LINE = 128  # bytes of a line of the cache: what one instruction touches of one is served in a cycle
SCATTERED = 4.0  # lines that could be touched while a part of a sector is written
PARTIAL_SECTORS = 3.0  # the same while parts of the sectors at both ends of a run are written
CYCLES = 1755.0  # per microsecond
BYTES = 4.2e6  # from or to memory per microsecond
LINES = PROCESSORS * CYCLES  # that all processors touch per microsecond
INSTRUCTIONS = 0.7 * 4 * LANES * PROCESSORS * CYCLES  # of one lane, per microsecond, as far as kernels come near the peak
LATENCY = 0.8  # microseconds from the start of a program to its end, but for its work
STARTED = 1640.0  # programs per microsecond, of all processors together
BUSY = 16  # warps of a processor from which on it issues instructions as fast as it can
REGISTERS = 1 << 16  # of a processor
MOST_LANES = 2048  # of a processor
ACCESS = 3.0  # instructions of a load or store with its address and mask
EXCHANGE = 6.0  # instructions by which an element goes through shared memory to another lane
FAR = 4096  # bytes between rows that may need the same place in a processor's first cache
WAYS, MOST_CONFLICTS = 4, 8.0  # such rows that it holds; how often at most a line of more of them is fetched
OVERLAP = 0.15  # share of what does not bound a kernel that adds to its time


@dataclass(frozen=True)
class _Touched:
    """What an access touches per element: lines of memory, and lines that could be while parts of sectors are written."""

    lines: float
    partial: float


@dataclass(frozen=True)
class _Way:
    """How lanes make an access: what they touch, and along which tile dimension they lie side by side."""

    touched: _Touched
    tile: str
    distinct_lines: float  # of memory that it touches per point of a tile, each counted once
    width: int  # elements that a lane moves at once
    whole: frozenset[str]  # tile dimensions all axes of which it walks as one


class TileCost(TileFacts):
    """The prices of a spec's tilings."""

    def price(self, schedule: Schedule) -> float:
        """Return about how many microseconds a kernel takes."""
        tiling = _Tiling(self, schedule)
        times = [self.bytes_moved / BYTES + tiling.partial() / LINES, tiling.lines() / LINES, tiling.issue(),
                 tiling.latency()]
        return max((1 - OVERLAP) * max(times) + OVERLAP * sum(times), tiling.programs / STARTED)


def _sums(left: set[int], right: set[int]) -> set[int]:
    """Return the sums of a number of one set and one of another."""
    return right if left == {0} else {a + b for a in left for b in right}


def _partial(offsets: set[int], size: int, lines: int) -> float:
    """Return the lines that could be touched while a store of ``size`` bytes at each offset writes parts of sectors."""
    runs = sum(offset - size not in offsets for offset in offsets)
    if size * len(offsets) < SECTOR * runs:
        return (SCATTERED - 1) * lines
    begins = sum(offset % SECTOR != 0 and offset - size not in offsets for offset in offsets)
    ends = sum((offset + size) % SECTOR != 0 and offset + size not in offsets for offset in offsets)
    return PARTIAL_SECTORS / 2 * (begins + ends)


class _Tiling:
    """The work of a kernel's tiles under a schedule."""

    def __init__(self, cost: TileCost, schedule: Schedule) -> None:
        self.cost = cost
        self.lanes = LANES * schedule.warps
        self.block = schedule.block
        self.order = schedule.order
        self.tile_of = {axis: tile for tile, axes in schedule.order.items() for axis in axes}
        self.groups = {tile: cost.groups(axes) for tile, axes in schedule.order.items()}
        self.walked = {tile: math.prod(cost.sizes[k] for k in axes) for tile, axes in schedule.order.items()}
        self.per_lane = max(1.0, math.prod(schedule.block.values()) / self.lanes)
        self.cuts = schedule.cuts
        self.tile_counts = {tile: tile_count(self.walked[tile], schedule.cuts_along(tile), block)
                            for tile, block in schedule.block.items()}
        self.programs = math.prod(self.tile_counts.values())
        self.held = dict(values_per_tile(cost.spec, schedule.order, schedule.block))
        self._besides: dict[str, int] = {}
        self._repeated: dict[frozenset[int], float] = {}
        self._uniform: dict[str, bool] = {}
        ways = {walk: self._way(walk) for walk in cost.walks}
        self.ways = [(access, ways[access.walk]) for access in cost.accesses]

    def _tiles(self, axes: frozenset[int]) -> frozenset[str]:
        return frozenset(self.tile_of[axis] for axis in axes)

    def _needed(self, masks: Sequence[str]) -> float:
        """Return the share of the programs that need what is under masks: about half, of those without a known bound."""
        uniform = [mask for mask in masks if mask in self.cost.conditions and self._is_uniform(mask)]
        unknown = sum(self.cost.conditions[mask].bound is None for mask in uniform)
        return self.cost.share_under(uniform) * 0.5**unknown

    def _is_uniform(self, mask: str) -> bool:
        if mask not in self._uniform:
            self._uniform[mask] = self._has_one_outcome(mask)
        return self._uniform[mask]

    def _has_one_outcome(self, mask: str) -> bool:
        """Return whether a condition holds for all of a program's points or for none."""
        axes, bound, _ = self.cost.conditions[mask]
        held = [self.held.get(axis, 0) for axis in axes]
        cuts = self.cuts if axes == {*self.order["x"]} else ()
        return all(count == 1 for count in held) or (len(held) == 1 and bound is not None and is_begin(bound, cuts, held[0]))

    def _repeats(self, axes: frozenset[int]) -> float:
        """Return how often what varies along some axes is loaded or computed per point of the tile."""
        if axes not in self._repeated:
            self._repeated[axes] = self._repeats_of_lanes(axes) / self._alike(axes)
        return self._repeated[axes]

    def _alike(self, axes: frozenset[int]) -> int:
        """Return how many of a lane's points side by side are the same along some axes: Triton sees it, and takes one.

        So it does in runs of ``[N, C, 28, 28]`` with what varies along the channels: 8 points of a lane are of one. It
        does not if sizes are known at run time only.
        """
        if self.cost.wide or "x" not in self._tiles(axes):
            return 1
        inside = itertools.takewhile(lambda axis: axis not in axes, reversed(self.order["x"]))
        inner = [self.cost.spec.axes[axis] for axis in inside]
        sizes = [axis.size for axis in inner if axis.is_known and isinstance(axis.size, int)]
        return math.gcd(math.prod(sizes), self._beside("x")) if len(sizes) == len(inner) else 1

    def _repeats_of_lanes(self, axes: frozenset[int]) -> float:
        """Return the same, were all points of a lane different."""
        tiles = self._tiles(axes)
        missing = [tile for tile in self.block if tile not in tiles]
        if not missing:
            return 1.0
        if not tiles:
            return 1 / self.per_lane
        (tile,) = tiles
        (other,) = missing
        if self.block[tile] >= self.lanes:
            return 1 / self.block[other]  # each lane computes its own, and they are exchanged
        along_x = min(self.lanes, max(1, self.block["x"] // self._beside("x")))
        lanes_along = {"x": along_x, "y": max(1, self.lanes // along_x)}
        return min(1.0, lanes_along[other] / self.block[other])

    def _touched(self, walk: Walk, tile: str) -> _Touched:
        """Return what an access touches per element with lanes side by side along a tile dimension."""
        beside = self._beside(tile)
        width = min(self._vector(walk, tile), beside)
        lanes = self._lanes(tile, width if walk.is_store else beside)
        offsets = {0}
        for dimension, count, apart in lanes:
            offsets = _sums(offsets, self._offsets(walk, dimension, count, apart))
        lines = len({offset // LINE for offset in offsets})
        taken = math.prod(count for _, count, _ in lanes) * width
        partial = 0.0
        if walk.is_store:
            begin = self._begin(walk, tile)
            partial = _partial({offset + begin for offset in offsets}, width * walk.itemsize, lines)
        again = 0.0  # lines that are returned to, and fetched again where others have taken their place
        if not any(walk.strides[group.axis] == 1 for group in self.groups[tile][-1:]):
            again = max(0.0, lines / taken - self._distinct_lines(walk)) * self._conflicts(walk)
        return _Touched(lines / taken + again, partial / taken)

    def _begin(self, walk: Walk, tile: str) -> int:
        """Return how many bytes behind the begin of a sector the stores of a warp begin.

        Rows that are no whole sectors apart begin anywhere in one; so does what a warp stores of a row longer than a tile.
        """
        apart = (walk.strides[group.axis] or 0 for t, groups in self.groups.items() for group in groups
                 if not (self._is_whole(walk, t) and walk.strides[groups[-1].axis] == 1))
        is_shifted = any(stride != 1 and stride * walk.itemsize % SECTOR for stride in apart)
        return walk.itemsize if is_shifted and self.block[tile] < self.walked[tile] else 0

    def _lanes(self, tile: str, beside: int) -> list[tuple[str, int, int]]:
        """Return how many lanes of a warp lie along each tile dimension, and how many points apart.

        A lane takes ``beside`` points of ``tile`` side by side, so its neighbour begins as many points further.
        """
        lanes, apart, along = LANES, beside, []
        for dimension in (tile, *(other for other in self.block if other != tile)):
            count = min(lanes, max(1, self.block[dimension] // apart))
            along.append((dimension, count, apart))
            lanes, apart = max(1, lanes // count), 1
        return along

    def _offsets(self, walk: Walk, dimension: str, count: int, apart: int) -> set[int]:
        """Return the offsets, in bytes, at which lanes along a tile dimension are in an access."""
        offsets, inner = [0.0] * count, 1
        for group in reversed(self.groups[dimension]):
            stride = walk.strides[group.axis]
            apart_bytes = ELSEWHERE if stride is None else stride * walk.itemsize
            if apart_bytes:
                for lane in range(count):
                    offsets[lane] += lane * apart // inner % group.size * apart_bytes
            inner *= group.size
        return set(map(int, offsets))

    def _conflicts(self, walk: Walk) -> float:
        """Return how often a line is fetched again that is returned to: a cache holds few rows that are far apart."""
        far = math.prod(count for tile in self.block for apart, count in self._steps(walk, tile) if apart >= FAR)
        return min(MOST_CONFLICTS, far / WAYS - 1) if far > WAYS else 0.0

    def _distinct_lines(self, walk: Walk) -> float:
        """Return how many different lines of memory an access touches per point of a tile."""
        steps = sorted((step for tile in self.block for step in self._steps(walk, tile)), key=lambda step: step[0])
        runs, extent = 1.0, float(walk.itemsize)
        for stride, count in steps:
            if stride <= max(extent, LINE / 2):
                extent += stride * (count - 1)
            else:
                runs *= count
        apart = [stride for stride, _ in steps if stride > extent]
        lines = extent / LINE + (1.0 if any(stride % LINE for stride in apart) else max(0.0, 1.0 - extent / LINE))
        if walk.is_store and any(stride % SECTOR for stride in apart):
            lines += PARTIAL_SECTORS
        return runs * lines / math.prod(self.block.values())

    def _steps(self, walk: Walk, tile: str) -> Iterator[tuple[float, int]]:
        """Yield how far apart, in bytes, and how many the values of each axis are in a tile."""
        covered = 1
        for group in reversed(self.groups[tile]):
            count = min(group.size, -(-self.block[tile] // covered))
            stride = walk.strides[group.axis]
            yield (walk.itemsize if stride is None else abs(stride) * walk.itemsize), count
            covered *= count

    def _way(self, walk: Walk) -> _Way:
        """Return how lanes make an access.

        They lie side by side along the dimension along which they move most elements at once, be it two of every other row
        that are moved so: Triton takes that.
        """
        touched = {tile: self._touched(walk, tile) for tile in self.block}
        widths = {tile: self._vector(walk, tile) for tile in self.block}
        tile = min(touched, key=lambda tile: (
            -widths[tile], touched[tile].lines + touched[tile].partial, tile != "x", tile))
        whole = frozenset(tile for tile in self.block if self._is_whole(walk, tile))
        return _Way(touched[tile], tile, self._distinct_lines(walk), widths[tile], whole)

    def _beside(self, tile: str) -> int:
        """Return how many points side by side a lane loads along a tile dimension: as many as an access moves at once."""
        if tile not in self._besides:
            widest = max((self._vector(walk, tile) for walk in self.cost.walks), default=1)
            self._besides[tile] = min(widest, max(1, int(self.per_lane)), self.block[tile])
        return self._besides[tile]

    def _vector(self, walk: Walk, tile: str) -> int:
        """Return how many elements a lane moves at once."""
        groups = [(group, t) for t in self.groups for group in self.groups[t] if walk.strides[group.axis] != 0]
        if not self.groups[tile]:
            return 1
        innermost = self.groups[tile][-1]
        is_blurred = any(self.tile_of[axis] == tile for axis in walk.blurred)
        if walk.strides[innermost.axis] != 1 or innermost.axis not in walk.linear or is_blurred:
            return 1
        is_whole = self._is_whole(walk, tile)
        width = math.gcd(walk.vector, self.walked[tile] if is_whole else innermost.size)
        for group, t in groups:
            stride = walk.strides[group.axis]
            if group is not innermost and not (is_whole and t == tile):
                jump = (walk.jump or 1) if stride is None else int(stride) if stride == int(stride) else 1
                width = math.gcd(width, jump)
        return math.gcd(width, *(bound for axes, bound in walk.bounds if innermost.axis in axes))

    def _is_whole(self, walk: Walk, tile: str) -> bool:
        """Return whether an access walks all axes of a tile dimension as one: it is at the tile's own variable."""
        expected = walk.strides[self.groups[tile][-1].axis] if self.groups[tile] else 0
        for group in reversed(self.groups[tile]):
            if expected is None or walk.strides[group.axis] != expected:
                return False
            expected *= group.size
        return True

    def _index_instructions(self, tile: str) -> float:
        """Return the instructions that take a point of a tile dimension apart into its axes."""
        return self.cost.division * 2 * max(0, len(self.groups[tile]) - 1)

    def _place_instructions(self, tile: str) -> float:
        """Return the instructions that take each point apart whose place along an axis is computed with.

        What neighbours load is at one place, which Triton finds once. What they compare is at a place each, unless one
        comparison counts for all of a program.
        """
        apart = (axes for name, axes in self.cost.places.items()
                 if not (name in self.cost.conditions and self._is_uniform(name)))
        places = frozenset(axis for axis in frozenset[int]().union(*apart)
                           if self.tile_of[axis] == tile and self.cost.sizes[axis] > 1)
        if len(self.groups[tile]) < 2 or not places:
            return 0.0
        return self.cost.division * len(places) * self._repeats_of_lanes(places)

    def instructions(self) -> float:
        """Return the instructions of all lanes."""
        per_point = sum(instructions * (self._repeats_of_lanes if is_apart else self._repeats)(axes) * self._needed(masks)
                        for (axes, masks, is_apart), instructions in self.cost.work.items())
        indices: dict[str, float] = {}
        for access, way in self.ways:
            repeats, exchange = self._repeats(access.axes) * self._needed(access.masks), EXCHANGE if way.tile != "x" else 0.0
            per_point += repeats * (ACCESS / way.width + exchange + (access.walk.itemsize < 4))
            for t in self._tiles(access.axes) - way.whole:
                along = frozenset(axis for axis in access.axes if self.tile_of[axis] == t)
                indices[t] = max(indices.get(t, 0.0), self._index_instructions(t) * self._repeats(along) / way.width)
        for t in self.block:
            indices[t] = max(indices.get(t, 0.0), self._place_instructions(t))
        padded = math.prod(self.tile_counts[tile] * block for tile, block in self.block.items())
        rounds = -(-self.programs // PROCESSORS) * PROCESSORS / self.programs
        return padded * rounds * (per_point + sum(indices.values()) + 1)

    def distinct_lines(self) -> float:
        """Return how many lines of memory all programs touch, each counted once a program."""
        points = math.prod(self.block.values()) * self.programs
        return points * sum(way.distinct_lines * access.share for access, way in self.ways)

    def lines(self) -> float:
        """Return how many lines of memory all accesses touch."""
        touched = (way.touched.lines * access.share * self._repeats(access.axes) for access, way in self.ways)
        return self.cost.points * sum(touched)

    def partial(self) -> float:
        """Return how many lines could be touched while parts of sectors are read or written."""
        written = sum(way.touched.partial * access.share for access, way in self.ways)
        return max(0.0, self.distinct_lines() - self.cost.bytes_moved / LINE) + self.cost.points * written

    def issue(self) -> float:
        """Return the microseconds that it takes to issue all instructions."""
        warps = min(self._at_a_time(), max(1.0, self.programs / PROCESSORS)) * self.lanes / LANES
        return self.instructions() / (INSTRUCTIONS * min(1.0, warps / BUSY))

    def _at_a_time(self) -> int:
        """Return how many programs run side by side on a processor: as many as there are registers for."""
        whole = sum(len(self._tiles(access.axes)) == len(self.block) for access in self.cost.accesses)
        registers = min(255, 24 + self.per_lane * whole)
        return max(1, min(MOST_LANES // self.lanes, 32, int(REGISTERS / (self.lanes * registers))))

    def latency(self) -> float:
        """Return the microseconds that programs spend waiting, with as many side by side as there are registers for."""
        return LATENCY * (max(1.0, self.programs / (PROCESSORS * self._at_a_time())) + self._branches())

    def _branches(self) -> int:
        """Return how often a program waits for the loads of a branch before it begins those of the next: once a store."""
        masks = {mask for access in self.cost.accesses for mask in access.masks if mask in self.cost.conditions}
        return sum(access.walk.is_store for access in self.cost.accesses) - 1 if any(map(self._is_uniform, masks)) else 0
