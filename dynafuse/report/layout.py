"""Layout of a graph's picture: rows from top to bottom, each step below the steps that it reads.

Rows follow the order of the plan. An edge that passes rows gets a lane in each, so that it does not run through boxes; one
that passes many is left out of the picture and shown for the selected step only.

Worked example: of ``a``, ``b`` that reads ``a``, ``c`` that reads ``a`` and ``d`` that reads ``b`` and ``c``, the rows are
``a`` | ``b c`` | ``d``, and ``a`` and ``d`` stand in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MOST_IN_ROW = 6
MOST_ROWS_PASSED = 12
BOX, LANE, GAP = 212.0, 8.0, 20.0  # widths in pixels
SWEEPS = 4
PULL = 0.12  # share of a pull to the middle of the picture: without it residual paths push a deep model to one side


@dataclass(frozen=True)
class Edge:
    """An edge from step ``source`` to ``target``. ``lanes`` are the pixels at which it passes the rows between the two.

    ``far`` edges pass too many rows to be drawn.
    """

    source: int
    target: int
    lanes: tuple[float, ...] = ()
    far: bool = False


@dataclass(frozen=True)
class Layout:
    """Per step its row and the centre of its box, in pixels from the left; ``width`` is that of the picture."""

    rows: tuple[int, ...]
    centres: tuple[float, ...]
    edges: tuple[Edge, ...]
    width: float


def layout(reads: Sequence[Sequence[int]]) -> Layout:
    """Place steps, given in the order of the plan; ``reads`` has per step the positions of those that it reads."""
    rows = _rows(reads)
    pairs = [(source, target) for target, sources in enumerate(reads) for source in sources]
    drawn = [(a, b) for a, b in pairs if rows[b] - rows[a] <= MOST_ROWS_PASSED]
    items, above, below = _with_lanes(rows, drawn)
    widths = {item: BOX if isinstance(item, int) else LANE for row in items for item in row}
    centres = _placed(items, above, below, widths)
    left = min((centres[i] - widths[i] / 2 for i in centres), default=0.0)
    x = {item: round(centre - left, 1) for item, centre in centres.items()}
    edges = [Edge(a, b, tuple(x[a, b, row] for row in range(rows[a] + 1, rows[b]))) for a, b in drawn]
    edges += [Edge(a, b, far=True) for a, b in pairs if rows[b] - rows[a] > MOST_ROWS_PASSED]
    right = max((x[i] + widths[i] / 2 for i in x), default=0.0)
    return Layout(tuple(rows), tuple(x[i] for i in range(len(reads))), tuple(edges), right)


Item: TypeAlias = int | tuple[int, int, int]
"""A step, or the lane of an edge in a row."""


def _rows(reads: Sequence[Sequence[int]]) -> list[int]:
    """Give each step the first row with room below all that it reads; one that reads nothing goes beside its predecessor."""
    rows: list[int] = []
    filled: dict[int, int] = {}
    for sources in reads:
        row = max((rows[s] + 1 for s in sources), default=rows[-1] if rows else 0)
        while filled.get(row, 0) >= MOST_IN_ROW:
            row += 1
        filled[row] = filled.get(row, 0) + 1
        rows.append(row)
    return rows


def _with_lanes(
    rows: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[list[list[Item]], Mapping[Item, list[Item]], Mapping[Item, list[Item]]]:
    """Return the items of each row, and the neighbours of each item in the row above and in the row below."""
    items: list[list[Item]] = [[] for _ in range(max(rows, default=-1) + 1)]
    above: dict[Item, list[Item]] = {}
    below: dict[Item, list[Item]] = {}
    for step, row in enumerate(rows):
        items[row].append(step)
    for source, target in edges:
        path: list[Item] = [source, *((source, target, row) for row in range(rows[source] + 1, rows[target])), target]
        for row, lane in enumerate(path[1:-1], rows[source] + 1):
            items[row].append(lane)
        for upper, lower in itertools.pairwise(path):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return items, above, below


def _placed(
    items: Sequence[Sequence[Item]], above: Mapping[Item, list[Item]], below: Mapping[Item, list[Item]],
    widths: Mapping[Item, float],
) -> dict[Item, float]:
    """Return the centres: sweeps down and up move each item to the mean of its neighbours (the barycentre heuristic)."""
    x: dict[Item, float] = {}
    for row in items:
        _place(row, {item: _mean(x, above.get(item, ()), 0.0) for item in row}, widths, x)
    for _ in range(SWEEPS):
        for neighbours, order in ((below, reversed(items)), (above, iter(items))):
            for row in order:
                _place(row, {item: _mean(x, neighbours.get(item, ()), x[item]) for item in row}, widths, x)
    return x


def _mean(x: Mapping[Item, float], neighbours: Sequence[Item], default: float) -> float:
    """Return the mean of the neighbours' centres, pulled to the middle, which is 0; ``default`` without neighbours."""
    return (1 - PULL) * sum(x[item] for item in neighbours) / len(neighbours) if neighbours else default


def _place(row: Sequence[Item], wanted: Mapping[Item, float], widths: Mapping[Item, float], x: dict[Item, float]) -> None:
    """Move the items of a row as near to their wanted centres as they go without overlap, in the order of those centres.

    Minimises the squared distances by pooling adjacent violators (isotonic regression): items that would overlap form a
    block, which stands at the mean of what its items want. Writes the centres into ``x``.
    """
    order = sorted(row, key=lambda item: wanted[item])
    offsets, position = {}, 0.0
    for item in order:
        offsets[item] = position + widths[item] / 2
        position += widths[item] + GAP
    blocks: list[tuple[float, list[Item]]] = []
    for item in order:
        mean, block = wanted[item] - offsets[item], [item]
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean = (before * len(others) + mean * len(block)) / (len(others) + len(block))
            block = others + block
        blocks.append((mean, block))
    x.update((item, mean + offsets[item]) for mean, block in blocks for item in block)
