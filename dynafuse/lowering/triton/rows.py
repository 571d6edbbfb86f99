"""Kernels that reduce rows: with a whole row in registers, or with loops over it.

- ``persistent``: every value is computed once.
- ``looped``: a pass over the row for each reduction that depends on the one before; sums of :mod:`online` take one less.

Worked example: ``softmax(x)`` of rows of 128256 elements takes two passes. One keeps the running maximum and the running
sum of exponentials, the other stores the quotients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from dynafuse.ir import Store
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    add_launch,
    block_count,
    combine_lanes,
    element_and_position,
    element_count,
    emit_stores,
    finish_combined,
    finish_reduction,
    make_emitter,
    program_id,
    recurrence_of,
    start_states,
    states_of_element,
    tile_dimension,
    with_guests,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.neighbours import Neighbours
from dynafuse.lowering.triton.online import OnlineSum, find_online_sums
from dynafuse.lowering.triton.online_states import finish_online, start_online, update_online
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before, runs_along
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.row_parts import in_parts
from dynafuse.lowering.triton.scans import scan_rows
from dynafuse.lowering.triton.source import TileDimension
from dynafuse.lowering.triton.text import size_text
from dynafuse.lowering.triton.tiles import are_known
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type
from dynafuse.partition.kernel_class import LANES, estimate

MOST_BESIDE = 8  # neighbours along a row for which one element is loaded
LOADED = 16  # bytes that a lane loads at once


def persistent(builder: KernelBuilder) -> None:
    """Add a kernel that holds whole rows in registers and computes every value once."""
    emitter = row_emitter(builder)
    emitter.on_reduction = lambda op: reduce_held_row(builder, emitter, op)
    emitter.on_scan = lambda op: scan_rows(builder, emitter, op)
    emit_stores(builder, emitter, list(enumerate(builder.spec.stores)))
    in_parts(emitter.top, builder.schedule.parts)
    add_row_launch(builder, emitter, "0")


def row_emitter(builder: KernelBuilder, loop: str | None = None) -> Emitter:
    """Return a new emitter for a kernel that walks rows, which loads once what neighbours along them have in common.

    Args:
        builder: The kernels of the spec.
        loop: The tile dimension that the kernel's loop walks, if it has one.
    """
    emitter, row = make_emitter(builder, loop), builder.schedule.order["r"]
    beside = _neighbours_of_lane(builder)
    if beside > 1 and are_known(builder.spec, row):
        emitter.neighbours = Neighbours([emitter.axes[axis] for axis in row], beside)
    return emitter


def _neighbours_of_lane(builder: KernelBuilder) -> int:
    """Return how many neighbours along a row a lane holds side by side; 1 where they are not loaded in groups.

    As many as it loads at once of the largest tensors' smallest elements: lanes exchange groups of more, or of less. Tiles
    that are copied ahead are left as they are.
    """
    schedule, inputs = builder.schedule, builder.spec.inputs
    is_beside = builder.is_of_lanes("r") and builder.tile_dim("r") == 1
    if not is_beside or schedule.parts > 1 or schedule.stages > 1 or not inputs:
        return 1
    sizes = [math.prod(map(estimate, layout.shape)) for layout in inputs]
    itemsize = min(layout.dtype.itemsize for layout, size in zip(inputs, sizes, strict=True) if size == max(sizes))
    held = schedule.block["x"] * schedule.block["r"] // (LANES * schedule.warps)
    return math.gcd(MOST_BESIDE, LOADED // itemsize, held, schedule.block["r"])


def reduce_held_row(builder: KernelBuilder, emitter: Emitter, op: int) -> Value:
    """Return a reduction of rows that are in registers, and keep it for whoever asks.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, which keeps the result.
        op: The reduction's position in the spec.
    """
    states = states_of_tile(builder, emitter, op, element_count(builder, op), frozenset("x"))
    return finish_combined(builder, emitter, (op,), states)[op]


def states_of_tile(builder: KernelBuilder, emitter: Emitter, op: int, count: str, tiles: frozenset[str]) -> list[str]:
    """Return the names of a reduction's states of all the elements along the row that a tile has in registers.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        op: The reduction's position in the spec.
        count: The text of how many elements there are, as a float.
        tiles: The tile dimensions whose scope they belong to.
    """
    rule = recurrence_of(builder.spec, op)
    element, position = element_and_position(builder, emitter, op, rule)

    def combined(rule: Recurrence, element: Value) -> list[str]:
        states = states_of_element(emitter, rule, element, position, builder.mask("r"))
        return combine_lanes(emitter, rule, states, "", "", tiles, builder.tile_dim("r"))

    if not rule.counts:
        return combined(rule, element)
    # No recurrence is as accurate as a second pass over what is in registers.
    dtype = element.dtype
    total = recurrence("sum", dtype, dtype)
    (whole,) = combined(total, element)
    mean = emitter.define(f"{whole} / {count}", dtype, tiles)
    return [whole, *combined(total, emitter.expression("({0} - {1}) * ({0} - {1})", dtype, element, mean))]


def add_row_launch(builder: KernelBuilder, emitter: Emitter, row_start: str, loops: bool = False,
                   function: Emitter | None = None) -> None:
    """Add the launch of a kernel whose programs each take a block of rows, or with ``split`` a part of one.

    Args:
        builder: The kernels of the spec.
        emitter: What the kernel computes.
        row_start: The text of the first element of the row in a tile.
        loops: Whether the kernel loops over the row.
        function: What the function computes that its last programs call, if there is one.
    """
    order, block = builder.schedule.order, builder.schedule.block
    x_start = f"{program_id(builder, 0)} * XBLOCK"
    tiles = [
        tile_dimension(builder, "x", x_start, builder.numel("x"), order["x"], emitter),
        tile_dimension(builder, "r", row_start, builder.numel("r"), order["r"], emitter, in_loop=loops),
    ]
    tiles += _group_dimensions(builder, emitter, row_start, loops)
    splits = builder.schedule.splits if builder.schedule.schedule_class == "split" else 1
    add_launch(builder, emitter, tiles, (block_count(builder.numel("x"), block["x"]), splits, 1), function=function)


def _group_dimensions(builder: KernelBuilder, emitter: Emitter, start: str, in_loop: bool) -> Iterator[TileDimension]:
    """Yield the tile dimensions that walk groups of neighbours along a row.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, complete.
        start: The text of the first element of the row in a tile, which is the first of a group.
        in_loop: Whether it begins anew in every step of the loop.
    """
    cast = ".to(tl.int64)" if builder.spec.wide else ""
    for size, group in emitter.neighbours.groups.items():
        points = f"tl.arange(0, RBLOCK // {size}){cast}{builder.spread('r')}"
        end = math.prod(int(axis.size) for axis in group.axes)
        define = (f"{group.tile} = {start} // {size} + {points}", f"{group.tile}_mask = {group.tile} < {end}")
        yield TileDimension(group.tile, define, group.axes, in_loop)


def looped(builder: KernelBuilder) -> None:
    """Add a kernel that passes over the row: each pass computes the reductions whose operands are known by then.

    A pass stores what is known, too; an input is overwritten in the last pass, since those before it may read it again.
    Every other pass goes backwards: it begins with what the one before has left in the cache. What a later pass may read
    again is to stay there longer than what only the last one reads.
    """
    spec, row_axes = builder.spec, builder.schedule.order["r"]
    emitter = row_emitter(builder, loop="r")
    emitter.on_scan = lambda op: scan_rows(builder, emitter, op)
    online_sums = find_online_sums(spec)
    needed_passes = passes_before(spec, online_sums)
    outputs = list(enumerate(spec.stores))
    along_row = [(number, store) for number, store in outputs if runs_along(store, row_axes)]
    count = pass_count(spec, needed_passes, row_axes)
    for current in range(count):
        reductions = [op for op, _ in spec.reductions if needed_passes[op] == current + 1]
        stores = [(number, store) for number, store in along_row
                  if current == (needed_passes[store.op] if store.into is None else count - 1)]
        if reductions or stores:
            emitter.eviction.of_row = ("evict_last" if current < count - 1 else "evict_first") if count > 1 else ""
            # Lanes of a recurrence that counts, of which some end early, have to begin with the others.
            needs_order = bool(spec.scans) or any(recurrence_of(spec, op).counts for op in reductions)
            emit_pass(builder, emitter, reductions, stores, online_sums=online_sums,
                      backwards=current % 2 == 1 and not needs_order)
    emit_stores(builder, emitter, [output for output in outputs if output not in along_row])
    add_row_launch(builder, emitter, "r_base", loops=True)


def emit_pass(builder: KernelBuilder, emitter: Emitter, reductions: Collection[int], stores: list[tuple[int, Store]],
              bounds: tuple[str, str] | None = None,
              take_states: Callable[[int, list[str], str], None] | None = None,
              online_sums: Mapping[int, OnlineSum] | None = None, backwards: bool = False) -> None:
    """Write one loop over the row.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        reductions: The reductions that the pass computes.
        stores: The outputs that it stores, with their numbers.
        bounds: The texts of the first element of the row that is read, and of the end; None for the whole row.
        take_states: Takes the states of a reduction that another kernel finishes, and the text of each lane's weight.
        online_sums: The sums, by op, that need their shift only when their pass is over.
        backwards: Whether it goes from the end of the whole row to its beginning.
    """
    online = {op: online_sum for op, online_sum in (online_sums or {}).items() if op in reductions}
    maxima = {online_sum.maximum for online_sum in online.values()}
    plain = [op for op in reductions if op not in online and op not in maxima]
    guests = with_guests(builder.spec, plain)
    states = {op: start_states(builder, emitter, recurrence_of(builder.spec, op)) for op in guests}
    online_states = {op: start_online(builder, emitter, online_sum) for op, online_sum in online.items()}
    begin, end = bounds or ("0", size_text(builder.numel("r")))
    header = builder.loop_header("r_back" if backwards else "r_base", begin, end, "RBLOCK")
    # Triton knows of what the loop's variable is a multiple only if that grows.
    emitter.open_loop(header, f"r_base = {_last_tile(builder)} - r_back" if backwards else None)
    shares = _define_shares(builder, emitter, guests, begin)
    for op, online_sum in online.items():
        update_online(builder, emitter, op, online_sum, online_states[op])
    for op in guests:
        _update_states(builder, emitter, op, states[op], shares)
    emit_stores(builder, emitter, stores)
    emitter.close_loop()
    for op in guests:
        rule = recurrence_of(builder.spec, op)
        weight = _weight_of_lanes(builder, rule.element_dtype, begin, end) if rule.counts else ""
        if take_states is None:
            finish_reduction(builder, emitter, op, states[op], weight, guests[op])
        else:
            take_states(op, states[op], weight)
    # Those that know the row's maximum come first: the shifts of others may be made of it.
    for op, online_sum in sorted(online.items(), key=lambda item: item[1].maximum is None):
        finish_online(builder, emitter, op, online_sum, online_states[op])


def _last_tile(builder: KernelBuilder) -> str:
    """Return the text of where the last tile of a row begins."""
    length, block = builder.numel("r"), builder.schedule.block["r"]
    if isinstance(length, int):
        return str((length - 1) // block * block)
    return f"({size_text(length)} - 1) // RBLOCK * RBLOCK"


def _define_shares(builder: KernelBuilder, emitter: Emitter, ops: Collection[int], begin: str
                   ) -> dict[torch.dtype, tuple[str, str]]:
    """Define how many elements a lane has taken in with this step, and 1 over the product of that and the one before.

    Returns: The names of both for each dtype in which a recurrence counts.
    """
    rules = [recurrence_of(builder.spec, op) for op in ops]
    names = {rule.element_dtype: (emitter.new_name("steps"), emitter.new_name("share")) for rule in rules if rule.counts}
    count = "r_base // RBLOCK + 1" if begin == "0" else f"(r_base - {begin}) // RBLOCK + 1"
    for dtype, (steps, share) in names.items():
        emitter.add_line(f"{steps} = tl.full([], {count}, {triton_type(dtype)})", frozenset("r"))
        emitter.add_line(f"{share} = 1.0 / ({steps} * tl.maximum({steps} - 1.0, 1.0))", frozenset("r"))
    return names


def _weight_of_lanes(builder: KernelBuilder, dtype: torch.dtype, begin: str, end: str) -> str:
    """Return the text of how many elements each lane of a loop has taken in."""
    if builder.mask("r") is None:
        return f"tl.full([], ({end} - {begin}) // RBLOCK, {triton_type(dtype)})"
    lane = f"tl.arange(0, RBLOCK){builder.spread('r')}"
    return f"(tl.maximum({end} - {begin} + RBLOCK - 1 - {lane}, 0) // RBLOCK).to({triton_type(dtype)})"


def _update_states(
    builder: KernelBuilder, emitter: Emitter, op: int, states: list[str], shares: Mapping[torch.dtype, tuple[str, str]]
) -> None:
    """Take the elements of a tile into the states of a reduction."""
    rule = recurrence_of(builder.spec, op)
    element, position = element_and_position(builder, emitter, op, rule)
    if builder.running_states(rule) < builder.schedule.block["r"]:
        _combine_and_update(builder, emitter, rule, element, states)
        return
    updates = rule.update(states, element.name, position.name if position else "", *shares.get(rule.element_dtype, ("", "")))
    candidates = [emitter.new_name("next") for _ in states]
    emitter.add_line(f"{', '.join(candidates)} = {updates}", ROW_TILES)
    mask = builder.mask("r")  # where rows are whole tiles, so are the chunks of split rows
    for state, candidate in zip(states, candidates, strict=True):
        emitter.add_line(f"{state} = " + (f"tl.where({mask}, {candidate}, {state})" if mask else candidate), ROW_TILES)


def _combine_and_update(
    builder: KernelBuilder, emitter: Emitter, rule: Recurrence, element: Value, states: list[str]
) -> None:
    """Combine the elements of a tile that one lane holds, and take the result into its state.

    With a state per element the compiler loads one element after the other where registers are few.
    """
    running = builder.running_states(rule)
    (of_tile,) = states_of_element(emitter, rule, element, None, builder.mask("r"))
    groups = f"tl.reshape({of_tile}, {builder.tile_shape('XBLOCK', f'RBLOCK // {running}', str(running))})"
    combined = rule.combine([groups], "", "").replace("AXIS", str(builder.tile_dim("r")))
    emitter.add_line(f"{states[0]} = {rule.update(states, combined, '', '', '')}", ROW_TILES)
