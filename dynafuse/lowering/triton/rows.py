"""Kernels that reduce rows: with a whole row in registers, or with loops over it.

- ``persistent``: every value is computed once.
- ``looped``: a pass over the row for each reduction that depends on the one before; sums of :mod:`online` take one less.

Worked example: ``softmax(x)`` of rows of 128256 elements takes two passes. One keeps the running maximum and the running
sum of exponentials, the other stores the quotients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from dynafuse.ir import Store
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    add_launch,
    block_count,
    element_and_position,
    element_count,
    emit_stores,
    finish_reduction,
    finish_row,
    make_emitter,
    program_id,
    recurrence_of,
    start_states,
    states_of_element,
    tile_dimension,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.online import OnlineSum, find_online_sums
from dynafuse.lowering.triton.reduction_passes import pass_count, passes_before, runs_along
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops import Value
from dynafuse.ops.literals import opmath, triton_type


def persistent(builder: KernelBuilder) -> None:
    """Add a kernel that holds whole rows in registers and computes every value once."""
    emitter = make_emitter(builder)

    def reduce(op: int) -> Value:
        rule = recurrence_of(builder.spec, op)
        element, position = element_and_position(builder, emitter, op, rule)
        mask = builder.mask("r")
        if rule.element_dtype.is_floating_point and len(rule.states) == 3:
            return _two_pass_variance(builder, emitter, op, element, mask)
        states = states_of_element(emitter, rule, element, position, mask)
        return finish_reduction(builder, emitter, op, rule, states)

    emitter.on_reduction = reduce
    emit_stores(builder, emitter, list(enumerate(builder.spec.stores)))
    add_row_launch(builder, emitter, "0")


def _two_pass_variance(builder: KernelBuilder, emitter: Emitter, op: int, element: Value, mask: str | None) -> Value:
    """Return the variance of a row in registers: the mean of squared deviations from the mean.

    No recurrence is as accurate.
    """
    dtype, rows = element.dtype, frozenset("x")
    total = recurrence("sum", dtype, dtype)
    count = element_count(builder, op)
    mean = finish_row(builder, emitter, recurrence("mean", dtype, dtype),
                      states_of_element(emitter, total, element, None, mask), count, dtype)
    squared_deviation = emitter.expression("({0} - {1}) * ({0} - {1})", dtype, element, mean)
    rule = recurrence_of(builder.spec, op)
    squares_of_lanes = states_of_element(emitter, total, squared_deviation, None, mask)
    squares = finish_row(builder, emitter, total, squares_of_lanes, count, dtype)
    variance = emitter.define(rule.finish(["0", squares.name], count), dtype, rows)
    return emitter.keep_reduced(op, emitter.cast(variance, builder.spec.ops[op].dtype))


def add_row_launch(builder: KernelBuilder, emitter: Emitter, row_start: str, loops: bool = False) -> None:
    """Add the launch of a kernel whose programs each take a block of rows, or with ``split`` a part of one.

    Args:
        builder: The kernels of the spec.
        emitter: What the kernel computes.
        row_start: The text of the first element of the row in a tile.
        loops: Whether the kernel loops over the row.
    """
    order, block = builder.schedule.order, builder.schedule.block
    x_start = f"{program_id(builder, 0)} * XBLOCK"
    tiles = [
        tile_dimension(builder, "x", x_start, builder.numel("x"), order["x"], emitter),
        tile_dimension(builder, "r", row_start, builder.numel("r"), order["r"], emitter, in_loop=loops),
    ]
    splits = builder.schedule.splits if builder.schedule.schedule_class == "split" else 1
    add_launch(builder, emitter, tiles, (block_count(builder.numel("x"), block["x"]), splits, 1))


def looped(builder: KernelBuilder) -> None:
    """Add a kernel that passes over the row: each pass computes the reductions whose operands are known by then.

    A pass stores what is known, too; an input is overwritten in the last pass, since those before it may read it again.
    Every other pass goes backwards: it begins with what the one before has left in the cache. What a later pass may read
    again is to stay there longer than what only the last one reads.
    """
    spec, row_axes = builder.spec, builder.schedule.order["r"]
    emitter = make_emitter(builder, loop="r")
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
            # Lanes of a Welford recurrence that end early have to begin with the others.
            needs_order = any(recurrence_of(spec, op).needs_share for op in reductions)
            emit_pass(builder, emitter, reductions, stores, online_sums=online_sums,
                      backwards=current % 2 == 1 and not needs_order)
    emit_stores(builder, emitter, [output for output in outputs if output not in along_row])
    add_row_launch(builder, emitter, "r_base", loops=True)


def emit_pass(builder: KernelBuilder, emitter: Emitter, reductions: Collection[int], stores: list[tuple[int, Store]],
              bounds: tuple[str, str] | None = None,
              take_states: Callable[[int, Recurrence, list[str]], None] | None = None,
              online_sums: Mapping[int, OnlineSum] | None = None, backwards: bool = False) -> None:
    """Write one loop over the row.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        reductions: The reductions that the pass computes.
        stores: The outputs that it stores, with their numbers.
        bounds: The texts of the first element of the row that is read, and of the end; None for the whole row.
        take_states: Takes the states of a reduction that another kernel finishes.
        online_sums: The sums, by op, that need their shift only when their pass is over.
        backwards: Whether it goes from the end of the whole row to its beginning.
    """
    online = {op: online_sum for op, online_sum in (online_sums or {}).items() if op in reductions}
    maxima = {online_sum.maximum for online_sum in online.values()}
    plain = [op for op in reductions if op not in online and op not in maxima]
    states = {op: start_states(builder, emitter, recurrence_of(builder.spec, op)) for op in plain}
    online_states = {op: _start_online(builder, emitter, builder.spec.ops[online_sum.difference].dtype)
                     for op, online_sum in online.items()}
    begin, end = bounds or ("0", size_text(builder.numel("r")))
    header = builder.loop_header("r_back" if backwards else "r_base", begin, end, "RBLOCK")
    # Triton knows of what the loop's variable is a multiple only if that grows.
    emitter.open_loop(header, f"r_base = {_last_tile(builder)} - r_back" if backwards else None)
    shares = _define_shares(builder, emitter, plain, begin)
    for op, online_sum in online.items():
        _update_online(builder, emitter, op, online_sum, online_states[op])
    for op in plain:
        _update_states(builder, emitter, op, states[op], shares)
    emit_stores(builder, emitter, stores)
    emitter.close_loop()
    for op in plain:
        rule = recurrence_of(builder.spec, op)
        if take_states is None:
            finish_reduction(builder, emitter, op, rule, states[op])
        else:
            take_states(op, rule, states[op])
    # Those that know the row's maximum come first: the shifts of others may be made of it.
    for op, online_sum in sorted(online.items(), key=lambda item: item[1].maximum is None):
        _finish_online(builder, emitter, op, online_sum, online_states[op])


def _last_tile(builder: KernelBuilder) -> str:
    """Return the text of where the last tile of a row begins."""
    length, block = builder.numel("r"), builder.schedule.block["r"]
    if isinstance(length, int):
        return str((length - 1) // block * block)
    return f"({size_text(length)} - 1) // RBLOCK * RBLOCK"


def _define_shares(builder: KernelBuilder, emitter: Emitter, ops: Collection[int], begin: str) -> dict[torch.dtype, str]:
    """Define 1 over the number of elements that a lane has taken in with this step, in each dtype that needs it."""
    rules = [recurrence_of(builder.spec, op) for op in ops]
    names = {rule.element_dtype: emitter.new_name("share") for rule in rules if rule.needs_share}
    steps = "r_base // RBLOCK + 1" if begin == "0" else f"(r_base - {begin}) // RBLOCK + 1"
    for dtype, name in names.items():
        emitter.add_line(f"{name} = 1.0 / tl.full([], {steps}, {triton_type(dtype)})", frozenset("r"))
    return names


def _update_states(
    builder: KernelBuilder, emitter: Emitter, op: int, states: list[str], shares: Mapping[torch.dtype, str]
) -> None:
    """Take the elements of a tile into the states of a reduction."""
    rule = recurrence_of(builder.spec, op)
    element, position = element_and_position(builder, emitter, op, rule)
    if builder.running_states(rule) < builder.schedule.block["r"]:
        _combine_and_update(builder, emitter, rule, element, states)
        return
    updates = rule.update(states, element.name, position.name if position else "", shares.get(rule.element_dtype, ""))
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
    combined = rule.combine([groups], "").replace("AXIS", str(builder.tile_dim("r")))
    emitter.add_line(f"{states[0]} = {rule.update(states, combined, '', '')}", ROW_TILES)


# ---------------------------------------------------------------------- sums of exponentials


@dataclass(frozen=True)
class OnlineStates:
    """The names of an online sum's running states: the largest value so far, and the sum shifted by it."""

    largest: str
    total: str


def _start_online(builder: KernelBuilder, emitter: Emitter, dtype: torch.dtype) -> OnlineStates:
    """Write the states before the first element."""
    states = OnlineStates(emitter.new_name("largest"), emitter.new_name("total"))
    held_dtype, shape = triton_type(opmath(dtype)), builder.tile_shape("XBLOCK", "1")
    emitter.add_line(f'{states.largest} = tl.full({shape}, float("-inf"), {held_dtype})', frozenset())
    emitter.add_line(f"{states.total} = tl.full({shape}, 0, {held_dtype})", frozenset())
    return states


def _update_online(builder: KernelBuilder, emitter: Emitter, op: int, online: OnlineSum, states: OnlineStates) -> None:
    """Take one tile into the states."""
    dtype = opmath(builder.spec.ops[online.difference].dtype)
    index = emitter.index(dict(builder.spec.reductions)[op])
    value = emitter.broadcast(online.value, index, dtype)
    mask = builder.mask("r")
    dim, spread = builder.tile_dim("r"), builder.spread("x")
    values = states_of_element(emitter, recurrence("max", dtype, dtype), value, None, mask)[0]
    largest, shift = emitter.new_name("largest"), emitter.new_name("shift")
    emitter.add_line(f"{largest} = lm.maximum({states.largest}, lm.amax({values}, {dim}){spread})", ROW_TILES)
    # Infinities are not shifted: inf - inf is NaN, while the row's own shift may be another value.
    emitter.add_line(f'{shift} = tl.where(tl.abs({largest}) == float("inf"), 0.0, {largest})', ROW_TILES)
    emitter.substitutes[online.difference] = emitter.define(f"{value} - {shift}", dtype, ROW_TILES)
    rule = recurrence_of(builder.spec, op)
    element, _ = element_and_position(builder, emitter, op, rule)
    elements = states_of_element(emitter, rule, element, None, mask)[0]
    del emitter.substitutes[online.difference]
    rescaled = f"{states.total} * lm.exp({states.largest} - {shift})"
    emitter.add_line(f"{states.total} = {rescaled} + tl.sum({elements}, {dim}){spread}", ROW_TILES)
    emitter.add_line(f"{states.largest} = {largest}", ROW_TILES)


def _finish_online(builder: KernelBuilder, emitter: Emitter, op: int, online: OnlineSum, states: OnlineStates) -> None:
    """Keep the sum, now that its shift is known, and the maximum if it is the shift."""
    rows, ops = frozenset("x"), builder.spec.ops
    dtype = opmath(ops[online.difference].dtype)
    if online.maximum is not None:
        emitter.keep_reduced(online.maximum, Value(states.largest, ops[online.maximum].dtype, rows))
    index = emitter.index(dict(builder.spec.reductions)[op])
    shift = emitter.broadcast(online.shift, index, dtype)
    total = emitter.define(f"{states.total} * lm.exp({states.largest} - {shift})", dtype, rows)
    element_dtype = recurrence_of(builder.spec, op).element_dtype
    emitter.keep_reduced(op, emitter.cast(Value(total.name, element_dtype, rows), ops[op].dtype))
