"""How a loop over a row keeps the states of a sum of exponentials: the largest value so far, and the sum shifted by it.

Each lane has states of its own where it holds several elements of a tile. Then it takes them in without waiting for others,
and what all lanes have found is combined once, behind the loop. Elsewhere a tile is combined in every step.

Worked example: of 8192 ``bfloat16`` numbers, which 8 warps load 8 at a time, each lane holds 32. It takes their maximum, 32
exponentials, and one more to rescale the sum that it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    combine_lanes,
    element_and_position,
    recurrence_of,
    states_of_element,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.online import OnlineSum
from dynafuse.lowering.triton.reductions import recurrence
from dynafuse.ops import Value
from dynafuse.ops.literals import opmath, triton_type
from dynafuse.partition.kernel_class import LANES


@dataclass(frozen=True)
class Shares:
    """How the elements of a tile along the row are divided among states: all have one, or each lane has.

    A lane holds ``side`` neighbouring elements, and as many again after those of all other lanes.
    """

    builder: KernelBuilder
    count: int = 1
    side: int = 1

    @staticmethod
    def of(builder: KernelBuilder) -> Shares:
        """Return what a lane holds of a tile, if it is more than one element."""
        running, warps, block = builder.schedule.running, builder.schedule.warps, builder.schedule.block["r"]
        side = max(running // (LANES * warps), 1) if builder.schedule.lanes == "r" else 1
        if not running or (running == block and side == 1):
            return Shares(builder)
        return Shares(builder, running // side, side)

    @property
    def shape(self) -> str:
        """Return the text of the states' shape."""
        return self.builder.tile_shape("XBLOCK", str(self.count))

    @property
    def _parts(self) -> list[str]:
        """Return the texts of the sizes of the dimensions along the row."""
        parts = [f"RBLOCK // {self.count * self.side}", str(self.count), str(self.side)]
        return parts if self.side > 1 else parts[:2]

    def combined(self, function: str, tile: str) -> str:
        """Return the text of a tile combined to one value for each state.

        Args:
            function: What combines the values along a dimension.
            tile: The tile's name.
        """
        first = self.builder.tile_dim("r")
        if self.count == 1:
            return f"{function}({tile}, {first}){self.builder.spread('x')}"
        parts = f"tl.reshape({tile}, {self.builder.tile_shape('XBLOCK', *self._parts)})"
        of_neighbours = f"{function}({parts}, {first + 2})" if self.side > 1 else parts
        return f"{function}({of_neighbours}, {first})"

    def over_tile(self, states: str) -> str:
        """Return the text of states that are spread over the tile."""
        if self.count == 1:
            return states
        spread = ["None", ":", "None"][:len(self._parts)]
        index = ", ".join([":", *spread] if self.builder.tile_dim("r") == 1 else [*spread, ":"])
        parts = self.builder.tile_shape("XBLOCK", *self._parts)
        return f"tl.reshape(tl.broadcast_to({states}[{index}], {parts}), {self.builder.tile_shape('XBLOCK', 'RBLOCK')})"


@dataclass(frozen=True)
class OnlineStates:
    """The names of the running states, and how a tile is divided among those that there are of each."""

    largest: str
    total: str
    shares: Shares

    def total_shifted_by(self, shift: str) -> str:
        """Return the text of the sum if it is shifted by another value than the largest."""
        return f"{self.total} * lm.exp({self.largest} - {shift})"


def start_online(builder: KernelBuilder, emitter: Emitter, online: OnlineSum) -> OnlineStates:
    """Write the states before the first element, and return them.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        online: What is summed up.
    """
    states = OnlineStates(emitter.new_name("largest"), emitter.new_name("total"), Shares.of(builder))
    held_dtype = triton_type(opmath(builder.spec.ops[online.difference].dtype))
    emitter.add_line(f'{states.largest} = tl.full({states.shares.shape}, float("-inf"), {held_dtype})', frozenset())
    emitter.add_line(f"{states.total} = tl.full({states.shares.shape}, 0, {held_dtype})", frozenset())
    return states


def update_online(builder: KernelBuilder, emitter: Emitter, op: int, online: OnlineSum, states: OnlineStates) -> None:
    """Take one tile into the states.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        op: The sum's position in the spec.
        online: What is summed up.
        states: What was found so far.
    """
    dtype, shares = opmath(builder.spec.ops[online.difference].dtype), states.shares
    index = emitter.index(dict(builder.spec.reductions)[op])
    value = emitter.broadcast(online.value, index, dtype)
    mask = builder.mask("r")
    values = states_of_element(emitter, recurrence("max", dtype, dtype), value, None, mask)[0]
    largest = emitter.new_name("largest")
    emitter.add_line(f"{largest} = lm.maximum({states.largest}, {shares.combined('lm.amax', values)})", ROW_TILES)
    shift = _shift(emitter, largest, ROW_TILES)
    element = value.name if value.tiles >= ROW_TILES else values  # sums are of a whole tile, of what an input repeats too
    emitter.substitutes[online.difference] = emitter.define(f"{element} - {shares.over_tile(shift)}", dtype, ROW_TILES)
    rule = recurrence_of(builder.spec, op)
    power, _ = element_and_position(builder, emitter, op, rule)
    powers = states_of_element(emitter, rule, power, None, mask)[0]
    del emitter.substitutes[online.difference]
    emitter.add_line(f"{states.total} = {states.total_shifted_by(shift)} + {shares.combined('tl.sum', powers)}", ROW_TILES)
    emitter.add_line(f"{states.largest} = {largest}", ROW_TILES)


def _shift(emitter: Emitter, largest: str, tiles: frozenset[str]) -> str:
    """Define what exponents are shifted by, and return its name.

    Infinities are not shifted by: inf - inf is NaN, while the row's own shift may be another value.

    Args:
        emitter: The kernel's emitter.
        largest: The name of the largest value so far.
        tiles: The tile dimensions that it varies along.
    """
    shift = emitter.new_name("shift")
    emitter.add_line(f'{shift} = tl.where(tl.abs({largest}) == float("inf"), 0.0, {largest})', tiles)
    return shift


def finish_online(builder: KernelBuilder, emitter: Emitter, op: int, online: OnlineSum, states: OnlineStates) -> None:
    """Keep the sum, now that its shift is known, and the maximum if it is the shift.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, which keeps both.
        op: The sum's position in the spec.
        online: What is summed up.
        states: What was found in the whole row.
    """
    rows, ops = frozenset("x"), builder.spec.ops
    dtype = opmath(ops[online.difference].dtype)
    of_row = _of_all_lanes(builder, emitter, dtype, states) if states.shares.count > 1 else states
    if online.maximum is not None:
        emitter.keep_reduced(online.maximum, Value(of_row.largest, ops[online.maximum].dtype, rows))
    index = emitter.index(dict(builder.spec.reductions)[op])
    shift = emitter.broadcast(online.shift, index, dtype)
    total = emitter.define(of_row.total_shifted_by(shift.name), dtype, rows)
    element_dtype = recurrence_of(builder.spec, op).element_dtype
    emitter.keep_reduced(op, emitter.cast(Value(total.name, element_dtype, rows), ops[op].dtype))


def _of_all_lanes(builder: KernelBuilder, emitter: Emitter, dtype: torch.dtype, states: OnlineStates) -> OnlineStates:
    """Write the states of a row, given those of its lanes; return their names.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter.
        dtype: What the states are held in.
        states: The names of the lanes' states.
    """
    rows, dim = frozenset("x"), builder.tile_dim("r")
    (largest,) = combine_lanes(emitter, recurrence("max", dtype, dtype), [states.largest], "", "", rows, dim)
    shifted = states.total_shifted_by(_shift(emitter, largest, rows))
    (total,) = combine_lanes(emitter, recurrence("sum", dtype, dtype), [shifted], "", "", rows, dim)
    return OnlineStates(largest, total, Shares(builder))
