"""Reductions of rows: a whole row in registers, or loops over it.

- ``persistent``: every value is computed once.
- ``looped``: passes over the row, one per level of reductions; what :mod:`online` finds takes one pass less.

Worked example: ``softmax(x)`` of rows of 128256 elements is two passes: one keeps the running maximum and the running sum of
exponentials, the other stores the quotients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dynafuse.ir import Store
from dynafuse.lowering.triton.builder import (
    Parts,
    add_launch,
    blocks,
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
from dynafuse.lowering.triton.online import Online, find
from dynafuse.lowering.triton.reduction_passes import levels, passes, runs_along
from dynafuse.lowering.triton.reductions import Recurrence, recurrence
from dynafuse.lowering.triton.text import size_text
from dynafuse.ops import Value
from dynafuse.ops.literals import opmath, triton_type


def persistent(parts: Parts) -> None:
    """A whole row in registers: every value is computed once."""
    emit = emitter(parts)
    full = frozenset("xr")

    def reduce(op: int) -> Value:
        rule = recurrence_of(parts.spec, op)
        value, position = element(parts, emit, op, rule)
        row_mask = mask_of(parts, "r")
        if rule.element.is_floating_point and len(rule.states) == 3:
            return _two_pass_variance(parts, emit, op, value, row_mask)
        states = states_of_element(emit, rule, value, position, full, row_mask)
        emit.reduced[op] = combined(emit, rule, states, frozenset("x"), element_count(parts, op),
                                    parts.spec.ops[op].dtype, 1)
        return emit.reduced[op]

    emit.on_reduction = reduce
    emit_stores(parts, emit, list(enumerate(parts.spec.stores)))
    row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "0")


def _two_pass_variance(parts: Parts, emit: Emitter, op: int, value: Value, mask: str | None) -> Value:
    """The variance of a row in registers: the mean, then the mean of squared deviations. No recurrence is as accurate."""
    dtype, full, x = value.dtype, frozenset("xr"), frozenset("x")
    total = recurrence("sum", dtype, dtype)
    count = element_count(parts, op)
    mean = combined(emit, recurrence("mean", dtype, dtype),
                    states_of_element(emit, total, value, None, full, mask), x, count, dtype, 1)
    deviation = emit.expression("({0} - {1}) * ({0} - {1})", dtype, value, mean)
    rule = recurrence_of(parts.spec, op)
    squares = combined(emit, total, states_of_element(emit, total, deviation, None, full, mask), x, count, dtype, 1)
    finished = emit.define(rule.finish(["0", squares.name], count), dtype, x)
    emit.reduced[op] = emit.cast(finished, parts.spec.ops[op].dtype)
    return emit.reduced[op]


def row_launch(parts: Parts, emit: Emitter, x_start: str, r_start: str, r_loop: bool = False) -> None:
    order, block = parts.tiles.order, parts.tiles.block
    tiles = [
        tile(parts, "x", x_start, "[:, None]", parts.numel("x"), order["x"], emit),
        tile(parts, "r", r_start, "[None, :]", parts.numel("r"), order["r"], emit, in_loop=r_loop),
    ]
    splits = parts.tiles.splits if parts.tiles.kernel_class == "split" else 1
    add_launch(parts, emit, tiles, (blocks(parts.numel("x"), block["x"]), splits, 1))


def looped(parts: Parts) -> None:
    """Passes over the row: each computes the reductions whose operands are known by then, and stores what it can."""
    emit = emitter(parts, loop="r")
    sums = find(parts.spec)
    level = levels(parts.spec, sums)
    row = parts.tiles.order["r"]
    along_row = [runs_along(store, row) for store in parts.spec.stores]
    waiting = [(n, s) for n, s in enumerate(parts.spec.stores) if along_row[n]]
    count = passes(parts.spec, level, row)
    for current in range(count):
        now = [op for op, _ in parts.spec.reductions if level[op] == current + 1]
        # An input is overwritten in the last pass: those before it may read it again.
        stores = [(n, s) for n, s in waiting if current == (level[s.op] if s.into is None else count - 1)]
        if now or stores:
            one_pass(parts, emit, now, stores, sums=sums)
    emit_stores(parts, emit, [(n, s) for n, s in enumerate(parts.spec.stores) if not along_row[n]])
    row_launch(parts, emit, f"{program(parts, 0)} * XBLOCK", "r_base", r_loop=True)


def one_pass(parts: Parts, emit: Emitter, now: list[int], stores: list[tuple[int, Store]],
             bounds: tuple[str, str] | None = None,
             leave: Callable[[int, Recurrence, list[str]], None] | None = None,
             sums: Mapping[int, Online] | None = None) -> None:
    """One loop over the row. ``leave`` takes the states of what another kernel completes; ``sums`` are the online ones."""
    sums = {op: found for op, found in (sums or {}).items() if op in now}
    served = {found.maximum for found in sums.values()}
    plain = [op for op in now if op not in sums and op not in served]
    running = {op: _start(emit, op, parts) for op in plain}
    kept = {op: _start_online(emit, parts.spec.ops[found.difference].dtype) for op, found in sums.items()}
    begin, end = bounds or ("0", size_text(parts.numel("r")))
    emit.open_loop(parts.loop("r_base", begin, end, "RBLOCK"))
    shares = _shares(parts, emit, plain, begin)
    for op, found in sums.items():
        _advance_online(parts, emit, op, found, kept[op])
    for op in plain:
        _advance(parts, emit, op, running[op], shares)
    emit_stores(parts, emit, stores)
    emit.close_loop()
    for op in plain:
        rule = recurrence_of(parts.spec, op)
        if leave is None:
            emit.reduced[op] = combined(emit, rule, running[op], frozenset("x"), element_count(parts, op),
                                        parts.spec.ops[op].dtype, 1)
        else:
            leave(op, rule, running[op])
    for op, found in sums.items():
        _finish_online(parts, emit, op, found, kept[op])


def _start(emit: Emitter, op: int, parts: Parts) -> list[str]:
    """The running states of a reduction, one per lane."""
    names = []
    for dtype, identity in recurrence_of(parts.spec, op).states:
        names.append(emit.name("acc"))
        emit.line(f"{names[-1]} = tl.full([XBLOCK, RBLOCK], {identity}, {triton_type(dtype)})".replace("{", "{{"),
                  frozenset())
    return names


def _shares(parts: Parts, emit: Emitter, ops: list[int], begin: str) -> dict[torch.dtype, str]:
    """By dtype, 1 over the number of elements that a lane has taken in with this step, where a recurrence needs it."""
    rules = [recurrence_of(parts.spec, op) for op in ops]
    names = {rule.element: emit.name("share") for rule in rules if rule.shared}
    steps = "r_base // RBLOCK + 1" if begin == "0" else f"(r_base - {begin}) // RBLOCK + 1"
    for dtype, name in names.items():
        emit.line(f"{name} = 1.0 / tl.full([], {steps}, {triton_type(dtype)})", frozenset("r"))
    return names


def _advance(parts: Parts, emit: Emitter, op: int, states: list[str], shares: Mapping[torch.dtype, str]) -> None:
    """Take in one element per lane."""
    full = frozenset("xr")
    rule = recurrence_of(parts.spec, op)
    value, position = element(parts, emit, op, rule)
    new = rule.update(states, value.name, position.name if position else "", shares.get(rule.element, ""))
    texts = [new] if isinstance(new, str) else list(new)
    fresh = [emit.name("next") for _ in states]
    emit.line(f"{', '.join(fresh)} = {', '.join(texts)}", full)
    mask = None if parts.exact("r", parts.tiles.block["r"]) else "r_mask"  # chunks of split rows are whole tiles too
    for state, candidate in zip(states, fresh, strict=True):
        emit.line(f"{state} = " + (f"tl.where({mask}, {candidate}, {state})" if mask else candidate), full)


# ---------------------------------------------------------------------- sums of exponentials


@dataclass(frozen=True)
class Running:
    """The variables of one such sum: the largest value and the sum so far."""

    largest: str
    total: str


def _start_online(emit: Emitter, dtype: torch.dtype) -> Running:
    """Nothing seen yet."""
    running = Running(emit.name("largest"), emit.name("total"))
    kind = triton_type(opmath(dtype))
    emit.line(f'{running.largest} = tl.full([XBLOCK, 1], float("-inf"), {kind})', frozenset())
    emit.line(f"{running.total} = tl.full([XBLOCK, 1], 0, {kind})", frozenset())
    return running


def _advance_online(parts: Parts, emit: Emitter, op: int, online: Online, running: Running) -> None:
    """Take in one tile."""
    full = frozenset("xr")
    dtype = opmath(parts.spec.ops[online.difference].dtype)
    index = emit.index(dict(parts.spec.reductions)[op])
    value = emit.broadcast(online.value, index, dtype)
    mask = mask_of(parts, "r")
    seen = states_of_element(emit, recurrence("max", dtype, dtype), value, None, full, mask)[0]
    largest, shift = emit.name("largest"), emit.name("shift")
    emit.line(f"{largest} = lm.maximum({running.largest}, lm.amax({seen}, 1)[:, None])", full)
    # Infinities are not shifted: inf - inf is NaN, where the row's own shift may be another.
    emit.line(f'{shift} = tl.where(tl.abs({largest}) == float("inf"), 0.0, {largest})', full)
    emit.replaced[online.difference] = emit.define(f"{value} - {shift}", dtype, full)
    rule = recurrence_of(parts.spec, op)
    part = states_of_element(emit, rule, element(parts, emit, op, rule)[0], None, full, mask)[0]
    del emit.replaced[online.difference]
    emit.line(f"{running.total} = {running.total} * lm.exp({running.largest} - {shift}) + tl.sum({part}, 1)[:, None]", full)
    emit.line(f"{running.largest} = {largest}", full)


def _finish_online(parts: Parts, emit: Emitter, op: int, online: Online, running: Running) -> None:
    """The sum, once the shift is known; the maximum, if it is that."""
    row, dtype = frozenset("x"), opmath(parts.spec.ops[online.difference].dtype)
    if online.maximum is not None:
        emit.reduced[online.maximum] = Value(running.largest, parts.spec.ops[online.maximum].dtype, row)
    index = emit.index(dict(parts.spec.reductions)[op])
    shift = emit.broadcast(online.shift, index, dtype)
    total = emit.define(f"{running.total} * lm.exp({running.largest} - {shift})", dtype, row)
    emit.reduced[op] = emit.cast(Value(total.name, recurrence_of(parts.spec, op).element, row), parts.spec.ops[op].dtype)
