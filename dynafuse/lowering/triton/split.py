"""Kernels for few long rows, or for columns: several programs per row leave partial states, which are then combined.

Worked example: ``sum(x, dim=0)`` of ``x[8192, 512]`` is split: 8 × 64 programs each add up 128 rows of 64 columns into a
workspace ``[64, 512]``, and the last program, or a second kernel, adds the 64 partial sums of every column.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynafuse.ir import Size, Store
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    block_count,
    combine_lanes,
    emit_stores,
    program_id,
    recurrence_of,
    with_guests,
)
from dynafuse.lowering.triton.combine import Left, add_combine_kernel, combine_in_last_program, write_partial
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.rows import add_row_launch, emit_pass, row_emitter, states_of_tile
from dynafuse.lowering.triton.scopes import Line
from dynafuse.lowering.triton.text import factor_text, size_text


def split(builder: KernelBuilder) -> None:
    """Add a kernel with several programs per row, and what combines what they leave."""
    spec, schedule = builder.spec, builder.schedule
    emitter = row_emitter(builder, loop="r")
    row_length, block = builder.numel("r"), schedule.block["r"]
    chunk = block_count(block_count(row_length, schedule.splits), block) * block
    emitter.top.lines.extend(_chunk_bounds(builder, chunk, row_length))
    along_row = [(number, store) for number, store in enumerate(spec.stores) if runs_along(store, schedule.order["r"])]

    def leave(op: int, states: list[str]) -> None:
        """Write a program's combined states to the workspace, one row per program."""
        for state, (dtype, _) in zip(states, recurrence_of(spec, op).states, strict=True):
            write_partial(builder, emitter, state, dtype, "x", program_id(builder, 1))

    def combine_and_leave(op: int, states: list[str], weight: str) -> None:
        rule = recurrence_of(spec, op)
        leave(op, combine_lanes(emitter, rule, states, weight, "r_end - r_begin", frozenset("x"), builder.tile_dim("r")))

    if chunk == block:
        for op, states in _of_one_tile(builder, emitter, along_row).items():
            leave(op, states)
    else:
        emit_pass(builder, emitter, builder.deferred_reductions(), along_row, ("r_begin", "r_end"), combine_and_leave)
    weight = f"tl.maximum(tl.minimum({size_text(chunk)}, {size_text(row_length)} - r * {factor_text(chunk)}), 0)"
    left = Left(schedule.order["x"], {number for number, _ in along_row}, weight)
    function = combine_in_last_program(builder, emitter, left)
    add_row_launch(builder, emitter, "r_base", loops=True, function=function)
    if function is None:
        add_combine_kernel(builder, left)


def _of_one_tile(builder: KernelBuilder, emitter: Emitter, stores: list[tuple[int, Store]]) -> dict[int, list[str]]:
    """Write the part of a program that reads one tile of the row, in a loop that is none to the compiler.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        stores: The outputs that run along the row, with their numbers.

    Returns:
        The combined states of each reduction that keeps any.
    """
    count = str(float(builder.schedule.block["r"])) if builder.mask("r") is None else "tl.maximum(r_end - r_begin, 1)"
    emitter.open_loop("for _ in tl.static_range(1):", "r_base = r_begin")
    states = {op: states_of_tile(builder, emitter, op, count, ROW_TILES)
              for op in with_guests(builder.spec, builder.deferred_reductions())}
    emit_stores(builder, emitter, stores)
    emitter.close_loop()
    return states


def _chunk_bounds(builder: KernelBuilder, chunk: Size, row_length: Size) -> Iterator[Line]:
    """Yield the lines that define the part of the row that a program reads."""
    yield Line(f"r_begin = {program_id(builder, 1)} * {factor_text(chunk)}")
    yield Line(f"r_end = tl.minimum(r_begin + {size_text(chunk)}, {size_text(row_length)})")
