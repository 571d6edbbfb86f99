"""The kernel classes: how tile dimensions walk the iteration space, pass by pass.

- ``flat`` and ``tiled``: pointwise, one or two tile dimensions (here).
- ``persistent`` and ``looped``: rows (``rows.py``, ``online.py``).
- ``split``: several programs per row (``split.py``).
- ``rowcol``: rows and columns in one pass (``rowcol.py``).

Worked example: ``relu(x) + 1`` over ``float32[8, 4]`` is ``flat``: one program of 32 points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynafuse.ir import Lowered, Size, Spec
from dynafuse.lowering.triton.builder import Parts, add_launch, blocks, emit_stores, emitter, fits_grid, program, tile
from dynafuse.lowering.triton.rowcol import rowcol
from dynafuse.lowering.triton.rows import looped, persistent
from dynafuse.lowering.triton.schedule import Tiles
from dynafuse.lowering.triton.source import HEADER, Tile
from dynafuse.lowering.triton.split import split
from dynafuse.lowering.triton.text import size_text


def pointwise(parts: Parts) -> None:
    """One program per tile, one or two tile dimensions."""
    emit = emitter(parts)
    emit_stores(parts, emit, list(enumerate(parts.spec.stores)))
    order, block = parts.tiles.order, parts.tiles.block
    tiles: list[Tile] = []
    spreads = {"x": ""} if len(order) == 1 else {"y": "[:, None]", "x": "[None, :]"}
    names = [name for name in ("x", "y") if name in order]
    grid = [blocks(parts.numel(name), block[name]) for name in names]
    for name, number in zip(names, programs(parts, grid), strict=True):
        start = f"{number} * {name.upper()}BLOCK"
        tiles.append(tile(parts, name, start, spreads[name], parts.numel(name), order[name], emit))
    x, y = grid if len(grid) == 2 else (grid[0], 1)
    add_launch(parts, emit, tiles, (x, y, 1) if fits_grid(parts, y) else (x * y, 1, 1))


def programs(parts: Parts, grid: Sequence[Size]) -> list[str]:
    """The program's number along each tile dimension; both in the grid's first where the second might not fit."""
    if all(fits_grid(parts, size) for size in grid[1:]):
        return [program(parts, k) for k in range(len(grid))]
    along = size_text(grid[0]) if isinstance(grid[0], int) else f"({size_text(grid[0])})"
    return [f"({program(parts, 0)} {sign} {along})" for sign in ("%", "//")]


CLASSES: dict[str, Callable[[Parts], None]] = {
    "flat": pointwise, "tiled": pointwise, "persistent": persistent, "looped": looped, "split": split, "rowcol": rowcol,
}


def lowered(spec: Spec, tiles: Tiles, round_like_eager: bool) -> Lowered:
    """The kernels of a spec under a schedule."""
    parts = Parts(spec, tiles, _name(spec, tiles), round_like_eager)
    CLASSES[tiles.kernel_class](parts)
    source = HEADER + "".join(f"\n\n{text}" for text in parts.sources)
    return Lowered(source, tuple(parts.launches), tuple(parts.workspaces), tiles.kernel_class)


def _name(spec: Spec, tiles: Tiles) -> str:
    """A kernel's name: its class and its telling ops."""
    quiet = {"view", "permute", "expand", "convert_element_type", "_to_copy", "unsqueeze", "squeeze", "_unsafe_view", "full"}
    ops = [op.target.split(".")[1] for op in spec.ops]
    told = list(dict.fromkeys(op for op in ops if op not in quiet)) or ops
    return f"dynafuse_{tiles.kernel_class}_{'_'.join(told)}"[:60].rstrip("_")
