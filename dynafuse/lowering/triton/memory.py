"""Where a kernel reads and writes: the offsets of elements, the masks of accesses, and loads that serve several places.

Worked example: in tiles of which the last may reach beyond the end of ``x``, the element ``i`` of ``in0`` is loaded under a
condition ``v0`` by ``tl.load(in0 + (x), v0 & x_mask)``; asked for once more under ``v0`` it is the same value.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sympy
import torch

from dynafuse.ir import INT32_LIMIT, Layout, Spec
from dynafuse.lowering.triton.accesses import Access, Load, Masks, SharedLoads, names_of
from dynafuse.lowering.triton.control_flow import ControlFlow
from dynafuse.lowering.triton.eviction import Eviction
from dynafuse.lowering.triton.neighbours import Neighbours
from dynafuse.lowering.triton.scopes import PER_STEP, Line
from dynafuse.ops import Index, Value
from dynafuse.ops.indexing_math import expanded, rejoin, symbol
from dynafuse.ops.literals import opmath


@functools.lru_cache(maxsize=65536)
def _offset(strides: tuple[sympy.Expr | int, ...], index: Index) -> sympy.Expr:
    """Return the sum of what each number of an index is away from the begin, in elements."""
    terms = (i * stride for i, stride in zip(index, strides, strict=True))
    return rejoin(expanded(sum(terms, sympy.S.Zero)))


class Memory(ControlFlow):
    """The loads of one kernel of a spec, and what the texts of all of its accesses are made of.

    Args:
        spec: The region.
        tile_of: For each axis of the spec, the tile dimension that walks it: ``x``, ``y`` or ``r``.
        loop: The tile dimension that the kernel's loop walks, if it has one.
    """

    def __init__(self, spec: Spec, tile_of: Sequence[str], loop: str | None = None) -> None:
        super().__init__(loop)
        self.spec = spec
        self.axes = [symbol(f"i{k}", axis.size) for k, axis in enumerate(spec.axes)]
        self.tile_of.update({axis: frozenset({tile}) for axis, tile in zip(self.axes, tile_of, strict=True)})
        self.unit_tiles = frozenset("xyr") - frozenset(tile_of)  # tile dimensions that walk no axis: a single point
        self.exact_tiles: frozenset[str] = frozenset()  # tile dimensions that never reach beyond their end: no mask
        self.accesses: list[Access] = []
        self.times = 1  # how often what is written now is computed: more than once in a loop of which a probe writes a step
        self.loads = SharedLoads()
        self.neighbours = Neighbours()
        self.eviction = Eviction(self.axes, self.tile_of, self.unit_tiles)

    def offset(self, layout: Layout, index: Index) -> sympy.Expr:
        """Return the offset of an index in elements.

        Of a piece of what is put together, parts of the sum may be beyond the 32 bits that suffice for the sum: they wrap
        around, as does the constant among them here, which would not compile otherwise.
        """
        offset = _offset(tuple(layout.stride), index)
        constant, others = offset.as_coeff_Add()
        if self.spec.wide or not constant.is_Integer or abs(constant) <= INT32_LIMIT:
            return offset
        return others + (constant + 2**31) % 2**32 - 2**31

    def load(self, tensor: str, layout: Layout, index: Index) -> Value:
        """Load an element of a tensor; a 16-bit float arrives in float32.

        Args:
            tensor: The name of the kernel's argument.
            layout: The tensor's layout.
            index: The element's index.
        """
        offset = self.offset(layout, index)
        outer, self.masks = self.masks, self.masks_at(self.tiles(offset), offset)
        value = self._loaded(tensor, layout, offset)
        self.masks = outer
        return value

    def forget(self, tile: str) -> None:
        super().forget(tile)
        self.loads.forget(tile, self.open_loop_scope)

    def _loaded(self, tensor: str, layout: Layout, offset: sympy.Expr) -> Value:
        """Return what is loaded under the masks: by a load that is written already, if one serves, or by a new one."""
        masks, place = self.masks, (tensor, offset)
        shared = self.loads.again(place, self, lambda others: self.common(others, masks),
                                  lambda common: self._load_line(tensor, layout, offset, common))
        shared = shared or self._loaded_at_either(tensor, layout, offset)
        if shared is not None:
            self.accesses = [access.under(shared.masks) if access.place == place else access for access in self.accesses]
            return shared.value
        self._note(tensor, layout, offset)
        names_before, line = self._name_count, self._load_line(tensor, layout, offset, masks)
        value = self.define(line.text, layout.dtype, line.tiles, *line.exprs)
        if self._name_count > names_before:
            self.loads.note(place, value, masks, self.scope(line.tiles))
        return value

    def _loaded_at_either(self, tensor: str, layout: Layout, offset: sympy.Expr) -> Load | None:
        """Return a load under the opposite of a mask that from now on loads here as well, where that holds; None without."""
        if not self.has_opposite(self.masks):
            return None
        start, along = self._split(offset)
        for load in self.loads.visible(tensor, self):
            either = None if load.is_shared else self.either(load.masks, self.masks)
            if either is None:
                continue
            (tells, masks), (other_start, other_along) = either, self._split(load.offset)
            if other_along != along:
                continue
            at = f"tl.where({tells}, {{0}}, {{1}}) + {{2}}"
            text, tiles = self._load_text(tensor, layout, offset, masks, at, tells.tiles)
            if tiles == load.value.tiles and self.scope(tiles) is load.scope and load.is_after(masks):
                line = Line(text, (other_start, start, along))
                self._note(tensor, layout, offset)
                return self.loads.share(load, line, (tensor, offset), self.masks)
        return None

    def _split(self, offset: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """Return the part of an offset that is the same all over a kernel, and the rest."""
        start, rest = offset.as_independent(*(self.tile_of.keys() & offset.free_symbols), as_Add=True)
        return start, rest

    def _note(self, tensor: str, layout: Layout, offset: sympy.Expr) -> None:
        """Note that a place is loaded from under the masks."""
        if not any(access.place == (tensor, offset) for access in self.accesses):
            self.accesses.append(Access(tensor, layout, offset, False, names_of(self.masks), self.times))

    def _load_line(self, tensor: str, layout: Layout, offset: sympy.Expr, masks: Masks) -> Line:
        """Return what loads under some masks, without a name: one element for a group of neighbours that load the same."""
        varying = (symbol for symbol in offset.free_symbols if "r" in self.tile_of.get(symbol, ()))
        group = self.neighbours.group(offset, varying, masks)
        if group is None:
            text, tiles = self._load_text(tensor, layout, offset, masks)
            return Line(text, (offset,), tiles=tiles)
        text, tiles = self._load_text(tensor, layout, offset, masks, row=group.tile)
        return Line(f"lm.repeated({text}, {group.size})", (offset.xreplace(group.outer),), tiles=tiles)

    def _load_text(self, tensor: str, layout: Layout, offset: sympy.Expr, masks: Masks, at: str = "{0}",
                   along: frozenset[str] = frozenset(), row: str = "r") -> tuple[str, frozenset[str]]:
        """Return the text of a load under some masks, and the tile dimensions that it varies along.

        ``at`` is the text of the offset, which varies along the tile dimensions ``along`` as well; ``row`` walks the row.
        """
        outer, self.masks = self.masks, masks
        pointer, mask, tiles = self.pointer_and_mask(tensor, offset, self.tiles(offset), along, at, row)
        self.masks = outer
        text = f"tl.load({pointer}{mask}{self.eviction.hint(layout, offset, tiles)})"
        if layout.dtype is torch.bool:
            text += ".to(tl.int1)"
        elif opmath(layout.dtype) is not layout.dtype:
            text += ".to(tl.float32)"
        return text, tiles

    def pointer_and_mask(
        self, tensor: str, offset: sympy.Expr, tiles: frozenset[str], along: frozenset[str] = frozenset(), at: str = "{0}",
        row: str = "r",
    ) -> tuple[str, str, frozenset[str]]:
        """Return the pointer's text, the text of the mask argument, and the access's tiles.

        A mask must not vary along more tile dimensions than the pointer, so the pointer is widened to those of its masks.

        Args:
            tensor: The name of the kernel's argument.
            offset: The offset in elements.
            tiles: The tile dimensions that it varies along.
            along: Further ones that the pointer is widened to.
            at: The text of the offset, with a place for it.
            row: What walks the row in place of ``r``.
        """
        masks = [*names_of(self.masks)]
        all_tiles = tiles.union(along, *(mask.tiles for mask in self.masks))
        widening = "".join(f" + {tile}_zero" for tile in sorted(all_tiles - tiles - PER_STEP))
        masks += [f"{row if tile == 'r' else tile}_mask" for tile in sorted(all_tiles - self.exact_tiles)]
        mask_argument = f", {' & '.join(masks)}" if masks else ""
        return f"{tensor} + ({at}{widening})", mask_argument, all_tiles
