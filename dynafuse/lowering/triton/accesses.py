"""What a kernel loads and stores; loads of one element under several conditions are one, under what these have in common.

Both sides of a choice may read the same element: one under the condition, the other under its opposite. Two such loads are
masked, so that the compiler cannot tell that they are of neighbours whatever the condition; one load needs no mask.

Worked example: a rotary embedding of the first 20 of 80 features computes ``where(i < 20, x[i] * cos + …, x[i])``. Its lines
have ``tl.load(x + i)`` once, instead of once under ``i < 20`` and once under ``i >= 20``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy

from dynafuse.ir import Layout
from dynafuse.lowering.triton.scopes import Line, Scope, Scopes
from dynafuse.ops import Value

Masks: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True)
class Access:
    """A load or store: the tensor, its layout, the offset in elements, and the conditions that mask it."""

    tensor: str
    layout: Layout
    offset: sympy.Expr
    is_store: bool
    masks: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, sympy.Expr] | None:
        """Return what is loaded; None for a store."""
        return None if self.is_store else (self.tensor, self.offset)

    def under(self, masks: Masks) -> Access:
        """Return the same under other masks."""
        return replace(self, masks=names_of(masks))


def names_of(masks: Masks) -> tuple[str, ...]:
    """Return the names of masks."""
    return tuple(mask.name for mask in masks)


@dataclass
class Load:
    """A load that is written: the line that defines its value, and the masks that it is made under."""

    value: Value
    masks: Masks
    scope: Scope
    line: Line


class SharedLoads:
    """The loads of one kernel, by what they load."""

    def __init__(self) -> None:
        self._loads: dict[Any, list[Load]] = {}

    def again(self, place: object, kernel: Scopes, common: Callable[[Masks], Masks | None],
              written: Callable[[Masks], tuple[str, frozenset[str]]]) -> Load | None:
        """Return a load of a place that serves once more, with its line changed to what that needs; None if there is none.

        A line is only changed for what would stand beside it: that of a branch may load where nothing outside of it does.

        Args:
            place: What is loaded.
            kernel: The kernel as far as it is written.
            common: Returns, for the masks of a load, those among them under which it serves both; None if it cannot.
            written: Returns the text of a load under some masks, and the tile dimensions that it varies along.
        """
        visible = list(kernel.visible_scopes())
        for load in self._loads.get(place, ()):
            masks = common(load.masks) if any(scope is load.scope for scope in visible) else None
            if masks is None:
                continue
            if names_of(masks) == names_of(load.masks):
                return load
            text, tiles = written(masks)
            if tiles == load.value.tiles and kernel.scope(tiles) is load.scope:
                load.line.text, load.masks = f"{load.value.name} = {text}", masks
                return load
        return None

    def forget(self, tile: str, scope: Scope | None) -> None:
        """Let what is loaded along a tile dimension be loaded anew.

        Args:
            tile: The tile dimension.
            scope: Whose loads are forgotten.
        """
        for place, loads in self._loads.items():
            self._loads[place] = [load for load in loads if load.scope is not scope or tile not in load.value.tiles]

    def note(self, place: object, value: Value, masks: Masks, scope: Scope) -> None:
        """Keep a load for who needs the same later.

        Args:
            place: What is loaded.
            value: Its value.
            masks: The masks that it is made under.
            scope: Where it stands, as the last line.
        """
        line = scope.lines[-1]
        assert isinstance(line, Line)
        self._loads.setdefault(place, []).append(Load(value, masks, scope, line))
