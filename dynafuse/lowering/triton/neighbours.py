"""Loads once what neighbours along a row have in common, of whom a lane holds several side by side.

A tensor that varies along the outer axes of a row alone has one element for many neighbours. The compiler does not make one
load of several with a mask, as rows have that are no whole tiles, and some versions of Triton show it different ones
without: each element of a lane would be loaded apart. So one is loaded for each group of neighbours, and repeated in
registers.

Worked example: of images ``[64, 512, 784]`` with rows ``(i0, i2)`` a gate at ``512*i0 + x`` is loaded by
``lm.repeated(tl.load(in1 + (x + 512*r_eights0), r_eights_mask), 8)``, where ``r_eights`` counts groups of eight and
``r_eights0 = r_eights // 98``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import sympy

from dynafuse.ops import Value
from dynafuse.ops.indexing_math import symbol

NAMES = {8: "eights", 4: "fours", 2: "pairs"}
"""What groups are called, by how many neighbours are in one."""


@dataclass(frozen=True)
class Group:
    """How many neighbours along a row are in a group, and what walks the groups in place of the row's axes."""

    size: int
    outer: dict[sympy.Symbol, sympy.Symbol]  # by the outer axes of the row, which are the same all over a group
    inner: sympy.Symbol  # the groups along the rest of the axes together

    @property
    def tile(self) -> str:
        """Return the name of the tile dimension that walks the groups."""
        return f"r_{NAMES[self.size]}"

    @property
    def axes(self) -> list[sympy.Symbol]:
        """Return the axes that it walks, outermost first."""
        return [*self.outer.values(), self.inner]


@dataclass
class Neighbours:
    """The groups of neighbours for which a kernel loads one element; of one that does not know its rows there are none."""

    axes: Sequence[sympy.Symbol] = ()  # of its rows, outermost first, of known sizes
    beside: int = 1  # neighbours that a lane holds side by side: a power of two that divides where tiles begin
    groups: dict[int, Group] = field(default_factory=dict)  # those in use, by size

    def group(self, offset: sympy.Expr, varying: Iterable[sympy.Symbol], masks: Iterable[Value]) -> Group | None:
        """Return the largest groups of neighbours that load the same element; None if each loads its own.

        Args:
            offset: The element's offset.
            varying: The symbols of it that vary along a row.
            masks: The conditions under which it is loaded.
        """
        along, inner = set(varying), 1
        if not along or not along <= set(self.axes) or any("r" in mask.tiles for mask in masks):
            return None
        for axis in reversed(self.axes):
            if axis in along:
                break
            inner *= int(axis.size)
        size = math.gcd(inner, self.beside)
        return self.groups.setdefault(size, self._of(size)) if size > 1 else None

    def _of(self, size: int) -> Group:
        """Return the groups of a size, over as many outer axes as are the same all over one."""
        outer, inner = list(self.axes), 1
        while inner % size:
            inner *= int(outer.pop().size)
        walked = {axis: symbol(f"{axis.name}_{NAMES[size]}", axis.size) for axis in outer}
        return Group(size, walked, symbol(NAMES[size], inner // size))
