"""Few long rows, or columns: several programs per row leave partial states, a second kernel combines them.

Worked example: ``sum(x, dim=0)`` of ``x[8192, 512]`` is split: 8 × 64 programs each add up 128 rows of 64 columns into a
workspace ``[64, 512]``, and the second kernel adds the 64 partial sums of every column.
"""

from __future__ import annotations

import sympy
import torch

from dynafuse.ir import Layout, Size, Spec, Workspace
from dynafuse.lowering.triton.builder import (
    Parts,
    add_launch,
    blocks,
    combined,
    element_count,
    emit_stores,
    emitter,
    identity_text,
    program,
    recurrence_of,
    tile,
)
from dynafuse.lowering.triton.emitter import Access, Emitter
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.reductions import Recurrence
from dynafuse.lowering.triton.rows import one_pass, row_launch
from dynafuse.lowering.triton.schedule import estimate, power_of_two
from dynafuse.lowering.triton.scopes import Line
from dynafuse.lowering.triton.source import Tile
from dynafuse.lowering.triton.text import factor_text, size_text
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type


def split(parts: Parts) -> None:
    """Several programs per row, then a kernel that combines what they leave."""
    emit = emitter(parts, loop="r")
    r = parts.numel("r")
    chunk = blocks(blocks(r, parts.tiles.splits), parts.tiles.block["r"]) * parts.tiles.block["r"]
    emit.top.lines.extend(_chunk_lines(parts, chunk, r))
    early = [(n, s) for n, s in enumerate(parts.spec.stores) if runs_along(s, parts.tiles.order["r"])]
    one_pass(parts, emit, [op for op, _ in parts.spec.reductions], early, ("r_begin", "r_end"),
             lambda op, rule, states: _leave_partials(parts, emit, op, rule, states))
    done = {n for n, _ in early}
    row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "r_base", r_loop=True)
    combine(parts, parts.tiles.order["x"], done)


def _chunk_lines(parts: Parts, chunk: Size, total: Size):  # type: ignore[no-untyped-def]
    yield Line(f"r_begin = {program(parts, 1)} * {factor_text(chunk)}")
    yield Line(f"r_end = tl.minimum(r_begin + {size_text(chunk)}, {size_text(total)})")


def _leave_partials(parts: Parts, emit: Emitter, op: int, rule: Recurrence, states: list[str]) -> None:
    """Combine a program's lanes and write the states to the workspace, one row per program."""
    names = combine_lanes(emit, rule, states, frozenset("x"), 1)
    for name, (dtype, _) in zip(names, rule.states, strict=True):
        write_partial(parts, emit, op, name, dtype, "x", program(parts, 1))


def combine_lanes(emit: Emitter, rule: Recurrence, states: list[str], tiles: frozenset[str], axis: int) -> list[str]:
    names = [emit.name("c") for _ in states]
    emit.line(f"{', '.join(names)} = {rule.combine(states).replace('AXIS', str(axis))}", tiles)
    for name in names:
        emit.line(f"{name} = {name}{'[:, None]' if axis == 1 else '[None, :]'}", tiles)
    return names


def write_partial(parts: Parts, emit: Emitter, op: int, name: str, dtype: torch.dtype, along: str, row: str) -> None:
    total = parts.numel(along)
    space = Workspace(f"tmp{len(parts.workspaces)}", dtype, parts.tiles.splits * total)
    parts.workspaces.append(space)
    emit.accesses.append(_workspace_access(space, True))
    held = f"{name}.to({triton_type(dtype)})"
    emit.line(f"tl.store({space.name} + ({row} * {factor_text(total)} + {along}), {held}, {along}_mask)", frozenset())


def _workspace_access(space: Workspace, store: bool):  # type: ignore[no-untyped-def]
    return Access(space.name, Layout(space.dtype, (space.size,), (1,)), sympy.S.Zero, store)


def combine(parts: Parts, axes: tuple[int, ...], done: set[int]) -> None:
    """The second kernel: combines partial states, then computes and stores what depends on them."""
    spec = parts.spec
    emit = emitter(parts, tile_of=["x" if k in axes else "r" for k in range(len(spec.axes))])
    splits, total, typical = parts.tiles.splits, _total(spec, axes), estimate(_total(spec.typical, axes))
    spaces = _spaces_of(parts)
    block = {"x": min(_combine_width(splits), power_of_two(typical)), "r": power_of_two(splits)}
    warps = 8 if block["x"] * block["r"] >= 4096 else 4

    def reduce(op: int) -> Value:
        rule = recurrence_of(spec, op)
        states = []
        for space, (dtype, identity) in zip(spaces[op], rule.states, strict=True):
            emit.accesses.append(_workspace_access(space, False))
            load = f"tl.load({space.name} + (r * {factor_text(total)} + x), x_mask & r_mask)"
            load += ".to(tl.int1)" if dtype is torch.bool else ""
            text = f"tl.where(r_mask, {load}, {identity_text(dtype, identity)})"
            states.append(emit.define(text, dtype, frozenset("xr")).name)
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op), spec.ops[op].dtype, 1)
        return emit.reduced[op]

    emit.on_reduction = reduce
    emit_stores(parts, emit, [(n, s) for n, s in enumerate(spec.stores) if n not in done])
    tiles = [
        tile(parts, "x", f"{program(parts, 0)} * XBLOCK", "[:, None]", total, axes, emit),
        Tile("r", ("r = tl.arange(0, RBLOCK)[None, :]", f"r_mask = r < {splits}"), []),
    ]
    add_launch(parts, emit, tiles, (blocks(total, block["x"]), 1, 1), "_combine", block, warps)


def _combine_width(splits: int) -> int:
    """Columns per program: enough neighbours for whole memory sectors, not so many that registers run out."""
    return max(16, 2048 // power_of_two(splits))


def _total(spec: Spec, axes: tuple[int, ...]) -> Size:
    total: Size = 1
    for axis in axes:
        total = total * spec.axes[axis].size
    return total


def _spaces_of(parts: Parts) -> dict[int, list[Workspace]]:
    """The workspaces of each reduction that a second kernel completes, in the order in which they were made."""
    rest = iter(parts.workspaces)
    order = [op for op, _ in parts.spec.reductions if op in parts.tiles.late]
    return {op: [next(rest) for _ in recurrence_of(parts.spec, op).states] for op in order}
