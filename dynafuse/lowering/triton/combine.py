"""What combines the partial states that programs leave: a second kernel, or the last of the programs that share rows.

A second kernel takes a launch, and waits until the first one has ended everywhere. Where programs share few rows, the one
that comes last combines what they have left instead: each counts, once its states are in memory, how many have come before.
The counters are zero before the kernel and after it (``counters.py``). States are combined in one order, whoever is last.

Source: CUDA C++ Programming Guide, "Memory Fence Functions", whose example is such a sum.

Worked example: for ``sum(x, dim=0)`` of ``bfloat16[4096, 32]`` 128 programs leave partial sums of all columns, which the
last of them adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import sympy
import torch

from dynafuse.ir import ARRIVED, Layout, Workspace
from dynafuse.lowering.triton.accesses import Access
from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    add_function,
    add_launch,
    block_count,
    emit_stores,
    finish_reduction,
    identity_text,
    loaded_tensors,
    make_emitter,
    numel,
    program_id,
    recurrence_of,
    tile_dimension,
    with_guests,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.lowering.triton.source import TileDimension
from dynafuse.lowering.triton.text import factor_text
from dynafuse.lowering.triton.tiles import power_of_two
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type
from dynafuse.partition.kernel_class import combines_in_last_program, estimate

SUFFIX = "_combine"
"""What the name of a kernel or function that combines has after the spec's."""

MOST_COUNTERS = 1024
"""Programs along a grid's first dimension that may each have a counter."""


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


@dataclass(frozen=True)
class Left:
    """What programs have left in workspaces, and for what: the axes that it varies along, and the outputs that they stored.

    ``weight`` is the text of how many elements each program has taken in, if a recurrence counts.
    """

    axes: tuple[int, ...]
    stored: Collection[int]
    weight: str = ""


def add_combine_kernel(builder: KernelBuilder, left: Left) -> None:
    """Add the second kernel: it combines partial states, then computes and stores what depends on them."""
    splits, total = builder.schedule.splits, estimate(numel(builder.spec.typical, left.axes))
    block = {"x": min(_combine_width(splits), power_of_two(total)), "r": power_of_two(splits)}
    emitter, tiles = _combined(builder, left)
    grid = (block_count(numel(builder.spec, left.axes), block["x"]), 1, 1)
    add_launch(builder, emitter, tiles, grid, SUFFIX, block, warps=8 if block["x"] * block["r"] >= 4096 else 4)


def combine_in_last_program(builder: KernelBuilder, emitter: Emitter, left: Left) -> Emitter | None:
    """Let the last program of some rows combine what all have left; call it when the kernel is complete but for that.

    Args:
        builder: The kernels of the spec, to which a function is added.
        emitter: What the kernel computes.
        left: What its programs leave.

    Returns:
        What the function computes; None where a second kernel has to.
    """
    block = {"x": builder.schedule.block["x"], "r": power_of_two(builder.schedule.splits)}
    counters = block_count(builder.numel("x"), block["x"])
    points = estimate(numel(builder.spec.typical, range(len(builder.spec.axes))))
    if not (isinstance(counters, int) and counters <= MOST_COUNTERS and combines_in_last_program(
            points, block["x"], builder.schedule.splits, len(builder.workspaces), builder.schedule.warps)):
        return None
    function, tiles = _combined(builder, left)
    if _stored_inputs(builder, left.stored) & loaded_tensors(emitter):
        return None  # programs of other rows may still load what it overwrites
    call = add_function(builder, function, tiles, SUFFIX, block)
    counter = f"{ARRIVED} + {program_id(builder, 0)}"
    is_last = f'tl.atomic_add({counter}, 1, sem="acq_rel") == {builder.schedule.splits - 1}'
    last = Scope([Line(f"tl.store({counter}, 0)"), Line(call)], header=Line(f"if {is_last}:"), is_branch=True)
    emitter.top.lines += [Line("tl.debug_barrier()"), last]
    return function


def _stored_inputs(builder: KernelBuilder, stored: Collection[int]) -> set[str]:
    """Return the names of the inputs that are overwritten by what has not been stored yet."""
    return {f"in{store.into}" for number, store in enumerate(builder.spec.stores)
            if number not in stored and store.into is not None}


def _combined(builder: KernelBuilder, left: Left) -> tuple[Emitter, list[TileDimension]]:
    """Return what combines partial states, then computes and stores what depends on them, and its tile dimensions."""
    spec, splits, total = builder.spec, builder.schedule.splits, numel(builder.spec, left.axes)
    emitter = make_emitter(builder, tile_of=["x" if k in left.axes else "r" for k in range(len(spec.axes))])
    guests = with_guests(spec, builder.deferred_reductions())
    hosts = {guest: op for op in guests for guest in guests[op]}
    workspaces = _workspaces_of_reductions(builder, guests)

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
        weights = f"{left.weight}.to({triton_type(rule.element_dtype)})" if rule.counts else ""
        return finish_reduction(builder, emitter, host, states, weights, guests[host])[op]

    emitter.on_reduction = reduce
    emit_stores(builder, emitter, [pair for pair in enumerate(spec.stores) if pair[0] not in left.stored])
    return emitter, [
        tile_dimension(builder, "x", f"{program_id(builder, 0)} * XBLOCK", total, left.axes, emitter),
        TileDimension("r", (f"r = tl.arange(0, RBLOCK){builder.spread('r')}", f"r_mask = r < {splits}"), []),
    ]


def _combine_width(splits: int) -> int:
    """Return the columns per program: enough neighbours for whole memory sectors, not so many that registers run out."""
    return max(8, 2048 // power_of_two(splits))


def _workspaces_of_reductions(builder: KernelBuilder, ops: Iterable[int]) -> dict[int, list[Workspace]]:
    """Return the workspaces of reductions that the second kernel completes; the first wrote them in this order."""
    workspaces = iter(builder.workspaces)
    return {op: [next(workspaces) for _ in recurrence_of(builder.spec, op).states] for op in ops}
