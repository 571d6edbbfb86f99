"""Kernels for few long rows, or for columns: several programs per row leave partial states, a second kernel combines them.

Worked example: ``sum(x, dim=0)`` of ``x[8192, 512]`` is split: 8 × 64 programs each add up 128 rows of 64 columns into a
workspace ``[64, 512]``, and the second kernel adds the 64 partial sums of every column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import sympy
import torch

from dynafuse.ir import Layout, Size, Store, Workspace
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    add_launch,
    block_count,
    combine_lanes,
    emit_stores,
    finish_reduction,
    identity_text,
    make_emitter,
    numel,
    program_id,
    recurrence_of,
    tile_dimension,
    with_guests,
)
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.rows import add_row_launch, emit_pass, states_of_tile
from dynafuse.lowering.triton.scopes import Line
from dynafuse.lowering.triton.source import TileDimension
from dynafuse.lowering.triton.text import factor_text, size_text
from dynafuse.lowering.triton.tiles import power_of_two
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type
from dynafuse.partition.kernel_class import estimate


def split(builder: KernelBuilder) -> None:
    """Add a kernel with several programs per row, and the kernel that combines what they leave."""
    spec, schedule = builder.spec, builder.schedule
    emitter = make_emitter(builder, loop="r")
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
    add_row_launch(builder, emitter, "r_base", loops=True)
    weight = f"tl.maximum(tl.minimum({size_text(chunk)}, {size_text(row_length)} - r * {factor_text(chunk)}), 0)"
    add_combine_kernel(builder, schedule.order["x"], {number for number, _ in along_row}, weight)


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


def write_partial(
    builder: KernelBuilder, emitter: Emitter, state: str, dtype: torch.dtype, along: str, program: str
) -> None:
    """Write a partial state to a new workspace, which has a row per program.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        state: The name of the state.
        dtype: Its dtype.
        along: The tile dimension that it varies along.
        program: The text of the program's number.
    """
    total = builder.numel(along)
    workspace = Workspace(f"tmp{len(builder.workspaces)}", dtype, builder.schedule.splits * total)
    builder.workspaces.append(workspace)
    emitter.accesses.append(_workspace_access(workspace, is_store=True))
    offset = f"{program} * {factor_text(total)} + {along}"
    text = f"tl.store({workspace.name} + ({offset}), {state}.to({triton_type(dtype)}), {along}_mask)"
    emitter.add_line(text, frozenset())


def _workspace_access(workspace: Workspace, *, is_store: bool) -> Access:
    return Access(workspace.name, Layout(workspace.dtype, (workspace.size,), (1,)), sympy.S.Zero, is_store)


def add_combine_kernel(builder: KernelBuilder, axes: tuple[int, ...], stored: Collection[int], weight: str = "") -> None:
    """Add the second kernel: it combines partial states, then computes and stores what depends on them.

    Args:
        builder: The kernels of the spec.
        axes: The axes that the partial states vary along.
        stored: The numbers of the outputs that the first kernel has stored.
        weight: The text of how many elements each program has taken in, if a recurrence counts.
    """
    spec, splits = builder.spec, builder.schedule.splits
    emitter = make_emitter(builder, tile_of=["x" if k in axes else "r" for k in range(len(spec.axes))])
    total, typical_total = numel(spec, axes), estimate(numel(spec.typical, axes))
    guests = with_guests(spec, builder.deferred_reductions())
    hosts = {guest: op for op in guests for guest in guests[op]}
    workspaces = _workspaces_of_reductions(builder, guests)
    block = {"x": min(_combine_width(splits), power_of_two(typical_total)), "r": power_of_two(splits)}

    def reduce(op: int) -> Value:
        host, states = hosts.get(op, op), []
        rule = recurrence_of(spec, host)
        for workspace, (dtype, identity) in zip(workspaces[host], rule.states, strict=True):
            emitter.accesses.append(_workspace_access(workspace, is_store=False))
            load = f"tl.load({workspace.name} + (r * {factor_text(total)} + x), x_mask & r_mask)"
            load += ".to(tl.int1)" if dtype is torch.bool else ""
            partial = emitter.define(load, dtype, ROW_TILES)
            text = f"tl.where(r_mask, {partial}, {identity_text(dtype, identity)})"
            states.append(emitter.define(text, dtype, ROW_TILES).name)
        weights = f"{weight}.to({triton_type(rule.element_dtype)})" if rule.counts else ""
        return finish_reduction(builder, emitter, host, states, weights, guests[host])[op]

    emitter.on_reduction = reduce
    emit_stores(builder, emitter, [(number, store) for number, store in enumerate(spec.stores) if number not in stored])
    tiles = [
        tile_dimension(builder, "x", f"{program_id(builder, 0)} * XBLOCK", total, axes, emitter),
        TileDimension("r", (f"r = tl.arange(0, RBLOCK){builder.spread('r')}", f"r_mask = r < {splits}"), []),
    ]
    warps = 8 if block["x"] * block["r"] >= 4096 else 4
    add_launch(builder, emitter, tiles, (block_count(total, block["x"]), 1, 1), "_combine", block, warps)


def _combine_width(splits: int) -> int:
    """Return the columns per program: enough neighbours for whole memory sectors, not so many that registers run out."""
    return max(8, 2048 // power_of_two(splits))


def _workspaces_of_reductions(builder: KernelBuilder, ops: Iterable[int]) -> dict[int, list[Workspace]]:
    """Return the workspaces of reductions that the second kernel completes; the first wrote them in this order."""
    workspaces = iter(builder.workspaces)
    return {op: [next(workspaces) for _ in recurrence_of(builder.spec, op).states] for op in ops}
