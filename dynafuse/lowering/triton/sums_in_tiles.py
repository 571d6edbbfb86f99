"""Sums of what a tile adds to memory, before it does: atomic additions of many lanes to one place would wait in line.

What a tile adds to one address is added up first if one of its dimensions does not tell the address. If the address is one
of few, each of these is looked for in the whole tile.

Worked example: of ``x.index_add(0, i, y)`` each row of a tile of ``y`` goes elsewhere, and nothing is added up. Of
``zeros.index_add(0, i, y)`` with 8 rows of ``zeros`` that one loaded index tells apart, a loop of 8 steps sums what a tile
has for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import sympy
import torch

from dynafuse.lowering.triton.accesses import names_of
from dynafuse.lowering.triton.scopes import PER_STEP, Line, Scope
from dynafuse.ops import Value
from dynafuse.ops.literals import literal, opmath, triton_type

if TYPE_CHECKING:  # it imports this module
    from dynafuse.lowering.triton.emitter import Emitter

FEW_PLACES = 64
"""Places that a tile adds to, up to which each is looked for in the whole tile."""


class Places(NamedTuple):
    """Elements of memory: the first, how many there are, and how far apart."""

    first: sympy.Expr
    number: int
    apart: int


def few_places(emitter: Emitter, offset: sympy.Expr) -> Places | None:
    """Return the few places that a tile adds to; None if they are many, or not known.

    One loaded index tells them apart; what else is in the offset has one value all over the tile.

    Args:
        emitter: What the kernel computes so far.
        offset: The element that each point adds to.
    """
    indices = [symbol for symbol in offset.free_symbols - set(emitter.axes) if emitter.tile_of.get(symbol)]
    if len(indices) != 1 or emitter.spec.wide or emitter.loop is not None or emitter.open_branches:
        return None
    (index,) = indices
    count, apart = index.size, offset.coeff(index)
    first = sympy.expand(offset - apart * index)
    is_even = all(emitter.values_per_tile.get(axis) == 1 for axis in first.free_symbols & set(emitter.axes))
    if not (is_even and count.is_Integer and apart.is_Integer and apart > 0 and 1 < count <= FEW_PLACES):
        return None
    return None if first.has(index) else Places(first, int(count), int(apart))


def add_at(emitter: Emitter, places: Places, tensor: str, dtype: torch.dtype, offset: sympy.Expr, value: Value,
           along: frozenset[str]) -> None:
    """Add to one place after the other what a tile has for it.

    Args:
        emitter: What the kernel computes so far.
        places: As :func:`few_places` returns them.
        tensor: The name of the kernel's argument.
        dtype: What the tensor holds.
        offset: The element that each point adds to.
        value: What it adds.
        along: The tile dimensions of the points.
    """
    first, number, apart = places
    place, hot, total = emitter.new_name("place"), emitter.new_name("hot"), emitter.new_name("total")
    tiles = emitter.tiles(offset).union(value.tiles, *(mask.tiles for mask in emitter.masks))
    conditions = [f"({{0}} == {place})", *names_of(emitter.masks), *_masks_along(emitter, along, tiles)]
    nothing = literal(-0.0 if dtype.is_floating_point else 0, value.dtype)  # 0.0 would change the sign of a zero
    summed = emitter.cast(Value(total, value.dtype), dtype)
    values = f"tl.where({hot}, {value}, {nothing})"
    if not dtype.is_floating_point:  # the sum wraps around
        values += ".to(tl.int64)"
    added = Scope([
        Line(f"{total} = tl.sum({values}).to({triton_type(opmath(value.dtype))})"),
        Line(f'tl.atomic_add({tensor} + {place}, {emitter.stored_text(summed, dtype)}, sem="relaxed")'),
    ], header=Line(f"if tl.max({hot}.to(tl.int32)) > 0:"), is_branch=True)
    header = Line(f"for {place} in range({{0}}, {{0}} + {number * apart}, {apart}):", (first,))
    looked_for = Line(f"{hot} = {' & '.join(conditions)}", (offset,))
    emitter.scope(along).lines.append(Scope([looked_for, added], header=header, is_branch=True))


def summed_tiles(emitter: Emitter, offset: sympy.Expr, along: frozenset[str]) -> frozenset[str]:
    """Return the tile dimensions on which neither the address nor whether it is written to depends.

    Args:
        emitter: What the kernel computes so far.
        offset: The element that each point adds to.
        along: The tile dimensions of the points.
    """
    deciding = emitter.tiles(offset).union(emitter.unit_tiles, PER_STEP, *(mask.tiles for mask in emitter.masks))
    return along - deciding


def _masks_along(emitter: Emitter, along: frozenset[str], tiles: frozenset[str]) -> list[str]:
    """Return masks that spread what varies along ``tiles`` over the points along ``along``: each point adds it."""
    masks = [f"{tile}_mask" for tile in sorted(along - emitter.exact_tiles)]
    return masks + [f"({tile}_zero == 0)" for tile in sorted((along & emitter.exact_tiles) - tiles - PER_STEP)]


def sum_in_tile(emitter: Emitter, text: str, dtype: torch.dtype, tiles: frozenset[str], along: frozenset[str],
                summed: frozenset[str]) -> str:
    """Return the name of the sum of a value over some tile dimensions.

    Args:
        emitter: What the kernel computes so far.
        text: The value.
        dtype: The value's dtype.
        tiles: The tile dimensions that the value varies along.
        along: Those of the points that add it.
        summed: Those that it is summed over.
    """
    masks = _masks_along(emitter, along, tiles)
    if masks:
        nothing = literal(-0.0 if dtype.is_floating_point else 0, dtype)  # 0.0 would change the sign of a zero
        text = f"tl.where({' & '.join(masks)}, {text}, {nothing})"
    value = emitter.define(text, dtype, along)
    if not along - summed - PER_STEP:
        return emitter.define(f"tl.sum({value})", dtype, along).name
    dim = emitter.tile_dims.get(min(summed), 0)  # without a schedule (to see what is accessed) nobody runs the text
    return emitter.define(f"tl.sum({value}, {dim}){'[:, None]' if dim == 1 else '[None, :]'}", dtype, along).name
