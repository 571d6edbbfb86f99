"""Kernels that reduce rows and columns in one pass: programs walk rows, and leave column states to a second kernel.

Worked example: the backward of a norm over ``[8192, 4096]`` reads ``x`` and the gradient once; 528 programs each leave a row
of partial sums for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from dynafuse.errors import LoweringError
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    add_launch,
    combine_lanes,
    element_and_position,
    emit_stores,
    make_emitter,
    program_id,
    recurrence_of,
    start_states,
    states_of_element,
    tile_dimension,
    with_guests,
)
from dynafuse.lowering.triton.combine import Left, add_combine_kernel, write_partial
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.next_rows import load_next_rows
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.row_parts import in_parts
from dynafuse.lowering.triton.rows import reduce_held_row
from dynafuse.lowering.triton.scans import scan_rows
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops import Value


def rowcol(builder: KernelBuilder) -> None:
    """Add a kernel whose programs walk rows with column states in registers, and the kernel that combines these."""
    spec, order = builder.spec, builder.schedule.order
    emitter = make_emitter(builder, loop="x")
    if builder.schedule.loads_next:  # of which the last program has none
        emitter.exact_tiles -= frozenset("x")
    columns = with_guests(spec, builder.deferred_reductions())
    column_states = {op: start_states(builder, emitter, recurrence_of(spec, op)) for op in columns}
    first, step = f"{program_id(builder, 0)} * XBLOCK", "tl.num_programs(0) * XBLOCK"
    emitter.open_loop(builder.loop_header("x_base", first, size_text(builder.numel("x")), step))
    emitter.on_reduction = _row_reducer(builder, emitter)
    emitter.on_scan = lambda op: scan_rows(builder, emitter, op)
    read_first = _reduce_rows(builder, emitter) if builder.schedule.reads_again or builder.schedule.parts > 1 else None
    along_rows = [(number, store) for number, store in enumerate(spec.stores) if runs_along(store, order["x"])]
    if any(store.into is not None for _, store in along_rows):  # what the columns read is loaded before it is overwritten
        for op in columns:
            element_and_position(builder, emitter, op, recurrence_of(spec, op))
    emit_stores(builder, emitter, along_rows)
    for op in columns:
        _update_column(builder, emitter, op, column_states[op])
    if builder.schedule.loads_next:
        load_next_rows(emitter, first, f"x_base + {step}", read_first)
    emitter.close_loop()
    for op in columns:
        _leave_column(builder, emitter, op, column_states[op])
    in_parts(emitter.top, builder.schedule.parts)
    tiles = [
        tile_dimension(builder, "x", "x_base", builder.numel("x"), order["x"], emitter, in_loop=True),
        tile_dimension(builder, "r", "0", builder.numel("r"), order["r"], emitter),
    ]
    add_launch(builder, emitter, tiles, (builder.schedule.splits, 1, 1))
    add_combine_kernel(builder, Left(order["r"], {number for number, _ in along_rows}))


def _reduce_rows(builder: KernelBuilder, emitter: Emitter) -> int | None:
    """Reduce the rows of a step before the rest of it; return how many lines that takes if the rest reads them again."""
    again = builder.schedule.reads_again
    emitter.eviction.of_row = "evict_last" if again else ""
    for op, _ in builder.spec.reductions:
        if op not in builder.schedule.deferred:
            emitter.of_whole_row(op, builder.spec.ops[op].target, emitter.on_reduction)
    assert emitter.open_loop_scope is not None
    if not again:
        return None
    emitter.forget("r")
    emitter.eviction.of_row = "evict_first"
    return len(emitter.open_loop_scope.lines)


def _row_reducer(builder: KernelBuilder, emitter: Emitter) -> Callable[[int], Value]:
    """Return a function that reduces rows, and raises LoweringError for columns, which are complete only at the end."""

    def reduce(op: int) -> Value:
        if op in builder.schedule.deferred:
            raise LoweringError(builder.spec.ops[op].target, "its result is needed before it is complete")
        return reduce_held_row(builder, emitter, op)

    return reduce


def _update_column(builder: KernelBuilder, emitter: Emitter, op: int, states: list[str]) -> None:
    """Take a tile's elements into the running states of a column; every lane of the tile has a state of its own."""
    rule = recurrence_of(builder.spec, op)
    if len(rule.states) > 1:
        raise NotImplementedError("column states of several parts")
    element, position = element_and_position(builder, emitter, op, rule)
    element_states = states_of_element(emitter, rule, element, position, builder.mask("x"))
    emitter.add_line(f"{states[0]} = {rule.update(states, element_states[0], '', '', '')}", ROW_TILES)


def _leave_column(builder: KernelBuilder, emitter: Emitter, op: int, states: list[str]) -> None:
    """Combine a program's lanes of each column, if there are several, and write the states to the workspace."""
    rule = recurrence_of(builder.spec, op)
    if builder.schedule.block["x"] > 1:
        states = combine_lanes(emitter, rule, states, "", "", frozenset(), builder.tile_dim("x"))
    for state, (dtype, _) in zip(states, rule.states, strict=True):
        write_partial(builder, emitter, state, dtype, "r", program_id(builder, 0))
