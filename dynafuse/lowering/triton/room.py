"""How many warps of a kernel a processor runs side by side, and other schedules where those are too few.

While some warps wait for memory others run, if there are others. A processor has room for 64, unless each takes more than 32
registers for each of its lanes; how many it takes is known when the kernel is compiled. A kernel of which too few warps fit
is compiled again with twice the warps for each tile, so that a lane holds half. The compiler's answer depends on the kernel
alone: every process comes to the same schedule, and to the same bits.

A kernel that holds rows, or copies tiles ahead, is meant to have few warps. It is compiled again only if registers do not
suffice and lanes keep much in memory: that costs more than few warps may gain. One that copies long rows ahead is compiled
again without that where a device has too little shared memory for them; one that loads them ahead, with rows that are read
again instead of held, then without loading ahead.

Worked example: a sum over rows of 23,923 that reads seven tensors takes 152 registers in lanes of 16 elements, so that 8
warps run side by side. In lanes of 8 it takes 90, and 16 warps run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeAlias

from dynafuse.fallback import answered
from dynafuse.futures import settle, then
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton import pool
from dynafuse.lowering.triton.jobs import BINARY
from dynafuse.lowering.triton.tile_cost import REGISTERS
from dynafuse.lowering.triton.tiles import Schedule
from dynafuse.partition.kernel_class import LANES, PROCESSORS

FEW_WARPS = 20  # side by side on a processor, up to which kernels were measured to be slower than others by a tenth
MOST_WARPS = 64  # that a processor runs side by side
MOST_PROGRAMS = 32  # that a processor runs side by side
GRANULE = 8  # registers that a lane gets at a time
SHARED = 227 << 10  # bytes of shared memory of a processor
SHARED_OF_PROGRAM = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB at most, by compute capability
LEAST_SHARED_OF_PROGRAM = 96  # of any other device
LARGE_TILE = 16384  # points of a tile from which on copies of some take more shared memory than every device has
MOST_WARPS_PER_PROGRAM = 16
LEAST_PER_LANE = 8  # elements of a tile that a lane has at least
SUSPECT_PER_LANE = 16  # elements of a tile from which on a lane may hold too much
SUSPECT_PER_FULL_LANE = {"persistent": 64}  # the same of kernels that are meant to fill registers, by class; 32 for others
MOST_SPILLED = 256  # bytes that a lane may keep in memory for want of registers
LEAST_GAIN = 1.3  # how many times as many warps another schedule must leave room for

Chosen: TypeAlias = tuple[Lowered, tuple[Any, ...]]
"""A lowering and its compiled kernels."""

SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, …
ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, size
WITH_SIZE, REGISTER_COUNT, FRAME_SIZE = 0x04, 0x2F, 0x11


def roomier(schedule: Schedule) -> tuple[Schedule, ...]:
    """Return schedules like one that may hold or copy too much, with more warps, without copies or register tiles.

    What copies tiles ahead keeps enough loads under way with few warps. So does what holds whole rows: long ones were
    measured to be faster with fewer warps and more registers each, as long as these suffice.
    """
    if schedule.register_tile:
        return (replace(schedule, register_tile=()),)
    if schedule.loads_next:
        again = replace(schedule, reads_again=True)
        return (*(() if schedule.reads_again else (again,)), replace(again, loads_next=False))
    points = math.prod(schedule.block.values())
    per_lane = points // (LANES * schedule.warps)
    smaller = (replace(schedule, stages=1),) if schedule.stages > 1 and points >= LARGE_TILE else ()
    full_lane = SUSPECT_PER_FULL_LANE.get(schedule.schedule_class, 2 * SUSPECT_PER_LANE)
    if per_lane < (full_lane if schedule.fills_registers else SUSPECT_PER_LANE):
        return smaller
    more = (times for times in (2, 4) if per_lane // times >= LEAST_PER_LANE
            and schedule.warps * times <= MOST_WARPS_PER_PROGRAM)
    return (*(with_warps(schedule, schedule.warps * times) for times in more), *smaller)


def with_warps(schedule: Schedule, warps: int) -> Schedule:
    """Return a schedule with more warps, whose lanes hold as many running states each as before."""
    running = schedule.running * warps // schedule.warps
    return replace(schedule, warps=warps, running=running if running <= schedule.block.get("r", 0) else 0)


def roomiest(choices: Iterator[Lowered], capability: int | None, workers: int | None) -> Future[Chosen]:
    """Compile the first of several lowerings, and the next ones while there is too little room for its warps.

    Args:
        choices: A spec's kernels under several schedules, the best first; the next one is made when it is its turn.
        capability: The device's compute capability, as 90; None in the interpreter.
        workers: As for :func:`dynafuse.lowering.triton.pool.submit`.

    Returns:
        A future of the lowering with its compiled kernels: the first for which there is room, else the one for which there
        is clearly the most. It fails if the first cannot be compiled.
    """
    if capability is None:
        first = next(choices)
        return then(pool.submit(first, capability, workers), lambda compiled: (first, compiled))
    chosen: Future[Chosen] = Future()
    _compile_next(chosen, choices, None, (capability, workers))
    return chosen


def _compile_next(chosen: Future[Chosen], choices: Iterator[Lowered], best: tuple[Lowered, tuple[Any, ...], int] | None,
                  target: tuple[int, int | None]) -> None:
    """Compile the next lowering, if there is one, and settle the future once that decides it."""
    lowered = next(choices, None)
    if lowered is None:
        assert best is not None
        chosen.set_result(best[:2])
        return

    def decided(done: Future[tuple[Any, ...]]) -> None:
        try:
            decide(done)
        except BaseException as error:  # raised here it would be logged, and the kernel waited for forever
            chosen.set_exception(error)

    def decide(done: Future[tuple[Any, ...]]) -> None:
        if done.exception() is not None:
            settle(chosen, lambda: best[:2] if best is not None else (lowered, done.result()))
            return
        compiled = done.result()
        room = answered(lambda: least_room(lowered, compiled, target[0]))
        answer = (lowered, compiled, MOST_WARPS if room is None else room)
        better = answer if best is None or answer[2] >= LEAST_GAIN * best[2] else best
        if answer[2] > FEW_WARPS:
            chosen.set_result(better[:2])
        else:
            _compile_next(chosen, choices, better, target)

    pool.submit(lowered, *target).add_done_callback(decided)


def least_room(lowered: Lowered, compiled: Sequence[Any], capability: int) -> int:
    """Return how many warps a processor runs side by side of the kernel of which it runs the fewest.

    A kernel that has no more than these in all leaves room for all: its grid is what limits it. So does one that is
    meant to fill registers. Where lanes keep much in memory, or shared memory does not suffice, there is no room at all.

    Args:
        lowered: The kernels, as source and launches.
        compiled: Triton's compiled kernel of each launch.
        capability: The device's compute capability, as 90.
    """
    if max(kernel.metadata.shared for kernel in compiled) > SHARED_OF_PROGRAM.get(capability, LEAST_SHARED_OF_PROGRAM) << 10:
        return 0
    if max(frame_bytes(kernel.asm[BINARY]) for kernel in compiled) > MOST_SPILLED:
        return 0
    if lowered.fills_registers:
        return MOST_WARPS
    return min(_room(launch, kernel.metadata.shared, registers(kernel.asm[BINARY]))
               for launch, kernel in zip(lowered.launches, compiled, strict=True))


def _room(launch: Launch, shared: int, register_count: int) -> int:
    room = side_by_side(launch.warps, register_count, shared)
    if all(isinstance(size, int) or getattr(size, "is_Integer", False) for size in launch.grid):
        in_all = launch.warps * math.prod(map(int, launch.grid)) / PROCESSORS  # of each processor
        return room if in_all > room else MOST_WARPS
    return room


def side_by_side(warps: int, register_count: int, shared: int) -> int:
    """Return how many warps a processor runs side by side.

    Args:
        warps: Warps of a program.
        register_count: Registers of a lane.
        shared: Bytes of shared memory of a program.
    """
    granted = -(-max(register_count, 16) // GRANULE) * GRANULE
    programs = min(MOST_PROGRAMS, MOST_WARPS // warps, REGISTERS // (granted * LANES * warps))
    return warps * (min(programs, SHARED // shared) if shared else programs)


def registers(cubin: bytes) -> int:
    """Return how many registers a lane of a kernel takes, of those in a cubin the one that takes most.

    The section ``.nv.info`` has attributes: a byte that tells the format, one that tells which it is, and two that are the
    size of what follows in one format. ``EIATTR_REGCOUNT`` holds the number of a symbol and that of its registers, as
    ``cuobjdump -elf`` shows.

    Args:
        cubin: The content of an ELF file for a GPU.
    """
    return _largest(cubin, REGISTER_COUNT)


def frame_bytes(cubin: bytes) -> int:
    """Return how many bytes of memory a lane of a kernel takes for what it has no registers for (``EIATTR_FRAME_SIZE``).

    Args:
        cubin: As for :func:`registers`.
    """
    return _largest(cubin, FRAME_SIZE)


def _largest(cubin: bytes, attribute: int) -> int:
    """Return the largest value of an attribute of kernels; 0 if none has it."""
    infos = (content for name, content in _sections(cubin) if name == ".nv.info")
    return max((value for content in infos for value in _values(content, attribute)), default=0)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the sections of a 64-bit ELF file, by name."""
    (place,), (size, count, names) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    heads = [SECTION.unpack_from(elf, place + k * size) for k in range(count)]
    for head in heads:
        start = heads[names][4] + head[0]
        yield elf[start:elf.index(b"\0", start)].decode(), elf[head[4]:head[4] + head[5]]


def _values(content: bytes, wanted: int) -> Iterator[int]:
    """Yield the values of an attribute for all kernels that a section tells of."""
    at = 0
    while at < len(content):
        form, attribute, size = ATTRIBUTE.unpack_from(content, at)
        at += ATTRIBUTE.size
        if form == WITH_SIZE:
            if attribute == wanted:
                yield struct.unpack_from("<II", content, at)[1]
            at += size
