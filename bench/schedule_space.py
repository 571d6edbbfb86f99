"""Schedules of a kernel beyond those that dynafuse would consider: what a search over all of them could find.

Worked example: of ``relu(x) + 1`` over ``float32[8192, 4096]`` the space has tiles of 256 to 4096 points with 2 to 8 warps.
"""
from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from dynafuse.ir import Spec
from dynafuse.lowering.triton.pointwise_schedule import pointwise_schedules
from dynafuse.lowering.triton.reduced_rows import Rows, rows_of, split_over, splittable, with_running_states
from dynafuse.lowering.triton.room import roomier
from dynafuse.lowering.triton.schedule import candidates
from dynafuse.lowering.triton.tiles import (
    Schedule,
    point_count,
    power_of_two,
    probe,
    reduced_axes,
    traffic,
)
from dynafuse.partition.kernel_class import LANES, PROCESSORS

WARPS = (1, 2, 4, 8, 16)
ROWS = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (8, 16, 32, 64, 128, 256)
TILES = (512, 1024, 2048, 4096, 8192)
PROGRAMS = tuple(PROCESSORS * per for per in (2, 4, 8, 16))
PER_LANE = range(4, 65)
"""Elements of a tile that a lane may hold."""

MOST_SHARED = 160 << 10
"""Bytes of shared memory that tiles under way may take."""

LONGEST_HELD = 32768
"""Elements of a row that a program may hold."""

SHORTEST_SPLIT = 512
"""Elements of a row from which on several programs may share it."""


def some_schedules(spec: Spec, most: int, seed: str) -> list[Schedule]:
    """Return the schedules that dynafuse considers, its first choice first, and random others of the space.

    Args:
        spec: What the kernel computes.
        most: How many to return at most.
        seed: What the others are drawn by: equal seeds draw equal ones.
    """
    typical, generator = spec.typical, random.Random(seed)
    considered = list(candidates(spec))
    considered += [schedule for schedule in roomier(considered[0]) if schedule not in considered]
    others = [schedule for schedule in space(typical) if schedule not in considered]
    alike = [schedule for schedule in others if schedule.schedule_class == considered[0].schedule_class]
    generator.shuffle(others)
    generator.shuffle(alike)
    chosen = list(considered)
    for schedule in [*alike[:most // 3], *others]:
        if len(chosen) >= most:
            break
        if schedule not in chosen:
            chosen.append(schedule)
    return chosen[:most]


def space(spec: Spec) -> list[Schedule]:
    """Return all schedules of the space, of a spec of known sizes."""
    probed = probe(spec)
    reduced = list(dict.fromkeys(reduced_axes(spec, op) for op, _ in spec.reductions))
    if not reduced:
        priced = list(pointwise_schedules(spec, probed))
        flat = next((schedule for schedule in priced if schedule.schedule_class == "flat"), None)
        return [*priced, *(_flat(spec, flat) if flat else ())]
    if len(reduced) > 1:
        return list(_rows_and_columns(candidates(spec)[0]))
    accesses = sorted(probed.accesses, key=lambda access: -traffic(spec, probed, access))
    rows = rows_of(spec, probed, accesses, reduced[0])
    return [*_persistent(rows), *_loops(rows, splittable(spec, reduced[0]))]


def _flat(spec: Spec, usual: Schedule) -> Iterator[Schedule]:
    """Yield tiles of one dimension."""
    points = power_of_two(point_count(spec, usual.order["x"]))
    for block in (64, 128, 256, 512, 1024, 2048, 4096):
        for warps in WARPS[:4]:
            if LANES * warps <= block <= points:
                yield dataclasses.replace(usual, block={"x": block}, warps=warps)


def _persistent(rows: Rows) -> Iterator[Schedule]:
    """Yield schedules that hold whole rows."""
    r, most = power_of_two(rows.length), power_of_two(rows.rows)
    if not rows.is_static or r > LONGEST_HELD:
        return
    for x in ROWS:
        for warps in WARPS:
            if x <= most and x * r // (LANES * warps) in range(PER_LANE.start, 2 * PER_LANE.stop):
                yield Schedule("persistent", rows.order, {"x": x, "r": r}, warps)


def _tiles(rows: Rows) -> list[tuple[int, int]]:
    """Return rows and elements along them of the tiles of a loop."""
    most, longest = power_of_two(rows.rows), power_of_two(rows.length)
    if rows.lanes == "r":
        tiles = [(x, tile // x) for tile in TILES for x in (1, 2, 4, 8, 16)]
    else:
        tiles = [(x, max(tile // x, 1)) for tile in TILES for x in COLUMNS]
    if rows.is_mixed:
        tiles += [(x, r) for x in (8, 16, 32, 64) for r in (8, 16, 32, 64, 128)]
    return list(dict.fromkeys((x, min(r, longest)) for x, r in tiles if x <= most))


def _loops(rows: Rows, is_splittable: bool) -> Iterator[Schedule]:
    """Yield schedules that walk rows tile by tile, by one program or several."""
    shaped = ((x, r, warps, stages) for x, r in _tiles(rows) for warps in WARPS if x * r // (LANES * warps) in PER_LANE
              for stages in (1, 3) if stages == 1 or _may_be_ahead(rows, x, r, stages))
    for x, r, warps, stages in shaped:
        looped = Schedule("looped", rows.order, {"x": x, "r": r}, warps, stages, lanes=rows.lanes)
        yield with_running_states(rows, looped)
        if is_splittable and rows.length >= SHORTEST_SPLIT:
            for programs in PROGRAMS:
                if rows.rows // x < programs:
                    yield with_running_states(rows, split_over(rows, x, r, warps, programs, stages))


def _may_be_ahead(rows: Rows, x: int, r: int, stages: int) -> bool:
    """Return whether so many tiles may be under way."""
    return rows.length > 4 * r and stages * x * r * rows.bytes_read <= MOST_SHARED


def _rows_and_columns(usual: Schedule) -> Iterator[Schedule]:
    """Yield schedules that reduce rows and columns in one pass."""
    r = usual.block["r"]
    for x in ROWS[:5]:
        for warps in WARPS:
            if x * r // (LANES * warps) not in range(PER_LANE.start, 2 * PER_LANE.stop):
                continue
            for per_processor in (1, 2, 3, 4, 6, 8):
                for stages in (1, 2, 3):
                    if per_processor * warps <= 64:
                        tiles = dataclasses.replace(usual, block={"x": x, "r": r}, warps=warps, stages=stages,
                                                    splits=PROCESSORS * per_processor)
                        yield tiles
                        if stages == 1:
                            yield dataclasses.replace(tiles, loads_next=True)
