"""Rows and columns in one pass: programs walk rows, reduce each, and keep running column states for a second kernel.

Worked example: the backward of a norm over ``[8192, 4096]`` reads ``x`` and the gradient once; 528 programs each leave a row
of partial sums for the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from dynafuse.errors import LoweringError
from dynafuse.lowering.triton.builder import (
    Parts,
    add_launch,
    combined,
    element,
    element_count,
    emit_stores,
    emitter,
    mask_of,
    program,
    recurrence_of,
    states_of_element,
    tile,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.reduction_passes import runs_along
from dynafuse.lowering.triton.split import combine, combine_lanes, write_partial
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type


def rowcol(parts: Parts) -> None:
    """Programs walk rows; running column states stay in registers until the end."""
    emit = emitter(parts, loop="x")
    late = [op for op, _ in parts.spec.reductions if op in parts.tiles.late]
    running = {op: _start_column(emit, op, parts) for op in late}
    emit.open_loop(parts.loop("x_base", f"{program(parts, 0)} * XBLOCK", size_text(parts.numel("x")),
                              "tl.num_programs(0) * XBLOCK"))
    emit.on_reduction = _row_reducer(parts, emit)
    along = [(n, s) for n, s in enumerate(parts.spec.stores) if runs_along(s, parts.tiles.order["x"])]
    if any(s.into is not None for _, s in along):  # then what the columns read comes before it is overwritten
        for op in late:
            element(parts, emit, op, recurrence_of(parts.spec, op))
    emit_stores(parts, emit, along)
    for op in late:
        _advance_column(parts, emit, op, running[op])
    emit.close_loop()
    for op in late:
        rule = recurrence_of(parts.spec, op)
        states = combine_lanes(emit, rule, running[op], frozenset(), 0) if parts.tiles.block["x"] > 1 else running[op]
        for name, (dtype, _) in zip(states, rule.states, strict=True):
            write_partial(parts, emit, op, name, dtype, "r", program(parts, 0))
    order = parts.tiles.order
    tiles = [
        tile(parts, "x", "x_base", "[:, None]", parts.numel("x"), order["x"], emit, in_loop=True),
        tile(parts, "r", "0", "[None, :]", parts.numel("r"), order["r"], emit),
    ]
    add_launch(parts, emit, tiles, (parts.tiles.splits, 1, 1))
    combine(parts, order["r"], {n for n, _ in along})


def _row_reducer(parts: Parts, emit: Emitter) -> Callable[[int], Value]:
    full = frozenset("xr")

    def reduce(op: int) -> Value:
        if op in parts.tiles.late:
            raise LoweringError(parts.spec.ops[op].target, "its result is needed before it is complete")
        rule = recurrence_of(parts.spec, op)
        value, position = element(parts, emit, op, rule)
        states = states_of_element(emit, rule, value, position, full, mask_of(parts, "r"))
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op),
                                    parts.spec.ops[op].dtype, 1)
        return emit.reduced[op]

    return reduce


def _start_column(emit: Emitter, op: int, parts: Parts) -> list[str]:
    """The running states of every lane: rows of a tile meet only at the end."""
    names = []
    for dtype, identity in recurrence_of(parts.spec, op).states:
        names.append(emit.name("acc"))
        emit.line(f"{names[-1]} = tl.full([XBLOCK, RBLOCK], {identity}, {triton_type(dtype)})", frozenset())
    return names


def _advance_column(parts: Parts, emit: Emitter, op: int, running: list[str]) -> None:
    """Take a tile's elements into the running column states."""
    rule = recurrence_of(parts.spec, op)
    full = frozenset("xr")
    value, position = element(parts, emit, op, rule)
    states = states_of_element(emit, rule, value, position, full, mask_of(parts, "x"))
    if len(states) > 1:
        raise NotImplementedError("column states of several parts")
    new = rule.update(running, states[0], "", "")
    emit.line(f"{running[0]} = {new[0]}", full)
