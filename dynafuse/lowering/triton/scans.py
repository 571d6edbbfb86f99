"""Scans of rows: in kernels that hold whole rows at once, in loops with what came before as a state.

Worked example: a cumulative sum of rows of a million elements walks each in tiles. A tile is scanned by itself, the last sum
of the tile before is added to its sums, and its own last one is kept for the next.
"""

from __future__ import annotations

from dynafuse.lowering.triton.builder import (
    ROW_TILES,
    KernelBuilder,
    element_and_position,
    recurrence_of,
    states_of_element,
)
from dynafuse.lowering.triton.emitter import Emitter
from dynafuse.lowering.triton.reductions import Recurrence
from dynafuse.lowering.triton.scopes import Line
from dynafuse.ops import Value
from dynafuse.ops.literals import triton_type


def scan_rows(builder: KernelBuilder, emitter: Emitter, op: int) -> Value:
    """Return a scan of the tile's rows, and keep it for whoever asks.

    Elements beyond the end of a row come after all that count, so that no mask is needed.

    Args:
        builder: The kernels of the spec.
        emitter: The kernel's emitter, which keeps the result.
        op: The scan's position in the spec.
    """
    rule = recurrence_of(builder.spec, op)
    element, _ = element_and_position(builder, emitter, op, rule)
    is_tile = element.tiles >= ROW_TILES
    states = [element.name] if is_tile else states_of_element(emitter, rule, element, None, None)
    emitter.wait()
    scanned = emitter.define(_along_row(builder, rule.combine(states, "", "")), rule.element_dtype, ROW_TILES,
                             comment=f"%{op} {builder.spec.ops[op].target}")
    if emitter.loop == "r":
        scanned = _carried(builder, emitter, rule, scanned)
    return emitter.keep_reduced(op, emitter.cast(scanned, builder.spec.ops[op].dtype))


def _along_row(builder: KernelBuilder, text: str) -> str:
    return text.replace("AXIS", str(builder.tile_dim("r")))


def _carried(builder: KernelBuilder, emitter: Emitter, rule: Recurrence, scanned: Value) -> Value:
    """Return a scan of a tile with what the loop has left of the tiles before; that begins anew with every loop."""
    ((dtype, identity),) = rule.states
    carry, shape = emitter.new_name("carry"), builder.tile_shape("XBLOCK", "1")
    emitter.top.lines.append(Line(f"{carry} = tl.full({shape}, {identity}, {triton_type(dtype)})"))
    whole = emitter.define(rule.update([carry], scanned.name, "", "", ""), dtype, ROW_TILES)
    emitter.add_line(f"{carry} = {_along_row(builder, f'ls.last({whole}, AXIS)')}", ROW_TILES)
    return whole
