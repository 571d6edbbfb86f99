"""The kernel classes: how tile dimensions walk the iteration space, pass by pass.

- ``flat`` and ``tiled``: pointwise, one or two tile dimensions (here).
- ``persistent`` and ``looped``: rows (``rows.py``, ``online.py``, ``scans.py``).
- ``split``: several programs per row (``split.py``).
- ``rowcol``: rows and columns in one pass (``rowcol.py``).
- several loop nests in one launch, each of a class of its own (``side_by_side.py``).

Worked example: ``relu(x) + 1`` over ``float32[8, 4]`` is ``flat``: one program of 32 points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynafuse.ir import Lowered, Size, Spec
from dynafuse.lowering.triton.builder import (
    KernelBuilder,
    add_launch,
    emit_stores,
    fits_grid,
    looping_emitter,
    program_id,
    tile_dimension,
)
from dynafuse.lowering.triton.header import HEADER, QUICK, SCANS
from dynafuse.lowering.triton.register_tiles import in_steps
from dynafuse.lowering.triton.rowcol import rowcol
from dynafuse.lowering.triton.rows import looped, persistent
from dynafuse.lowering.triton.side_by_side import SIDE_BY_SIDE, side_by_side
from dynafuse.lowering.triton.split import split
from dynafuse.lowering.triton.text import size_text
from dynafuse.lowering.triton.tiles import Schedule


def pointwise(builder: KernelBuilder) -> None:
    """Add a kernel with one program per tile, of one or two tile dimensions."""
    order = builder.schedule.order
    emitter = looping_emitter(builder)
    emit_stores(builder, emitter, list(enumerate(builder.spec.stores)))
    names = [name for name in ("x", "y") if name in order]
    grid = [builder.tile_count(name) for name in names]
    tiles = [tile_dimension(builder, name, builder.start(name, program), builder.numel(name), order[name], emitter)
             for name, program in zip(names, _program_ids(builder, grid), strict=True)]
    x, y = grid if len(grid) == 2 else (grid[0], 1)
    add_launch(builder, emitter, tiles, (x, y, 1) if fits_grid(builder, y) else (x * y, 1, 1))


def _program_ids(builder: KernelBuilder, grid: Sequence[Size]) -> list[str]:
    """Return the program's number along each tile dimension; both from the grid's first if the second might not fit."""
    if all(fits_grid(builder, size) for size in grid[1:]):
        return [program_id(builder, dimension) for dimension in range(len(grid))]
    width = size_text(grid[0]) if isinstance(grid[0], int) else f"({size_text(grid[0])})"
    return [f"({program_id(builder, 0)} {operator} {width})" for operator in ("%", "//")]


CLASSES: dict[str, Callable[[KernelBuilder], None]] = {
    "flat": pointwise, "tiled": pointwise, "persistent": persistent, "looped": looped, "split": split, "rowcol": rowcol,
}
"""The function that adds the kernels of each class."""

UNNAMED_OPS = frozenset({
    "view", "permute", "expand", "convert_element_type", "_to_copy", "unsqueeze", "squeeze", "_unsafe_view", "full"})
"""Ops that a kernel is not named after, unless it has no others."""


def write_kernels(spec: Spec, schedule: Schedule, round_like_eager: bool) -> Lowered:
    """Return the kernels of a spec under a schedule.

    Args:
        spec: The region, or the class of sizes that it is in.
        schedule: Its tiles, loops and warps.
        round_like_eager: Whether every op's result is rounded to its dtype, as in eager.
    """
    name = _kernel_name(spec, schedule.schedule_class)
    builder = KernelBuilder(in_steps(spec, schedule.register_tile), schedule, name, round_like_eager)
    CLASSES[schedule.schedule_class](builder)
    return Lowered(_module(spec, builder.sources), tuple(builder.launches), tuple(builder.workspaces),
                   schedule.schedule_class, schedule.fills_registers)


def write_nests(spec: Spec, round_like_eager: bool) -> Lowered:
    """Return the kernel of a spec of several loop nests, each of which has a schedule of its own.

    Args:
        spec: The region.
        round_like_eager: Whether every op's result is rounded to its dtype, as in eager.

    Raises:
        LoweringError: A nest takes more than one launch.
    """
    def write(own: Spec, schedule: Schedule) -> KernelBuilder:
        steps = in_steps(own, schedule.register_tile)
        builder = KernelBuilder(steps, schedule, _kernel_name(own, "nest"), round_like_eager, inside=True)
        CLASSES[schedule.schedule_class](builder)
        return builder

    texts, launch = side_by_side(spec, _kernel_name(spec, SIDE_BY_SIDE), write)
    return Lowered(_module(spec, texts), (launch,), schedule_class=SIDE_BY_SIDE, fills_registers=True)


def _module(spec: Spec, texts: Sequence[str]) -> str:
    """Return the text of a module with some functions."""
    kernels = "".join(f"\n\n{text}" for text in texts)
    return HEADER + (QUICK if "lq." in kernels else "") + (SCANS if spec.scans else "") + kernels


def _kernel_name(spec: Spec, what: str) -> str:
    """Return a kernel's name, of what it is and of its ops."""
    ops = [op.target.split(".")[1] for op in spec.ops]
    named_ops = list(dict.fromkeys(op for op in ops if op not in UNNAMED_OPS)) or ops
    return f"dynafuse_{what}_{'_'.join(named_ops)}"[:60].rstrip("_")
