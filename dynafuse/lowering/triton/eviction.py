"""How long the cache is to hold what a kernel loads: what is read again longer than what streams through.

Other points read the same element where a tensor is spread along an axis, as a bias is along the rows. Other lanes, or
the same ones later, read the rest of a line where a tensor does not lie along the tile, as one that is transposed; and
neighbours read it again where a kernel loads it at several places, as a stencil does. A row that a loop passes over several
times is to stay until its last pass.

Source: PTX ISA, "Cache Eviction Priority Hints".

Worked example: of ``x + bias`` over ``[4096, 1024]`` the bias is loaded with ``evict_last``, ``x`` without a hint.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy

from dynafuse.ir import Layout
from dynafuse.lowering.triton.scopes import PER_STEP, Scope
from dynafuse.partition.kernel_class import estimate

ROW = PER_STEP | {"r"}
"""Tile dimensions along rows that are reduced."""

LARGEST_KEPT = 24 << 20
"""Bytes of a tensor up to which it may stay: half of the second-level cache of an H100 or H200."""

PLAIN_LOAD = re.compile(
    r"(?P<load>\w+ = (lm\.repeated\()?tl\.load\((?P<tensor>in\d+) \+ (?!.*eviction_policy).*?)"
    r"(?P<end>\)(\.to\(tl\.\w+\))?(, \d\))?)$")
"""A load without a hint: what comes before the place for one, and behind it."""


@dataclass
class Eviction:
    """The hints of one kernel's loads."""

    axes: Sequence[sympy.Symbol]
    tiles_of: Mapping[sympy.Symbol, frozenset[str]]  # the tile dimensions that an axis or a loaded index varies along
    unit_tiles: frozenset[str]  # tile dimensions that walk no axis
    beside: frozenset[sympy.Symbol] = frozenset()  # axes along which lanes may lie side by side
    of_row: str = ""  # the policy of what is loaded along rows now; empty unless they are passed over several times

    def hint(self, layout: Layout, offset: sympy.Expr, tiles: frozenset[str]) -> str:
        """Return the text of the argument of a load that says how long the cache is to hold it; empty without a hint.

        Args:
            layout: The tensor's layout.
            offset: Where the element is.
            tiles: The tile dimensions that the load varies along.
        """
        policy = ""
        if "r" in tiles:
            policy = self.of_row if "x" in tiles | self.unit_tiles else "evict_last"
        if not policy and tiles and self._is_read_again(layout, offset, tiles):
            policy = "evict_last"
        return _argument(policy) if policy else ""

    def _is_read_again(self, layout: Layout, offset: sympy.Expr, tiles: frozenset[str]) -> bool:
        """Return whether several points read an element, or lanes the parts of a line, of a tensor that the cache holds."""
        if not _fits(layout):
            return False
        symbols = offset.free_symbols
        if any(self.tiles_of.get(symbol) for symbol in symbols.difference(self.axes)):
            return False  # where a loaded index leads is not known
        is_row = bool(tiles & ROW)
        walked = {axis for axis in self.axes if axis.size != 1 and (is_row or not self.tiles_of[axis] <= ROW)}
        return not walked <= symbols or not any(offset.coeff(axis) == 1 for axis in self.beside)


def _argument(policy: str) -> str:
    return f', eviction_policy="{policy}"'


def _fits(layout: Layout) -> bool:
    return math.prod(map(estimate, layout.shape)) * layout.dtype.itemsize <= LARGEST_KEPT


def keep_what_is_loaded_again(scope: Scope, loads: Iterable[tuple[str, Layout, sympy.Expr]]) -> None:
    """Give a hint to all loads of tensors that a kernel loads at several places.

    Args:
        scope: The kernel's top level.
        loads: The tensor, its layout and the place of each load of the kernel.
    """
    places: dict[str, set[sympy.Expr]] = defaultdict(set)
    for tensor, layout, place in loads:
        if _fits(layout):
            places[tensor].add(place)
    for line in scope.all_lines():
        match = PLAIN_LOAD.match(line.text)
        if match and len(places.get(match["tensor"], ())) > 1:
            line.text = f"{match['load']}{_argument('evict_last')}{match['end']}"


def innermost(axes: Sequence[sympy.Symbol], orders: Iterable[Sequence[int]]) -> frozenset[sympy.Symbol]:
    """Return the last axis of more than one point in each order.

    Args:
        axes: All axes.
        orders: The axes that tile dimensions walk, by number, the outermost first.
    """
    longer = ([axes[k] for k in order if axes[k].size != 1] for order in orders)
    return frozenset(order[-1] for order in longer if order)
