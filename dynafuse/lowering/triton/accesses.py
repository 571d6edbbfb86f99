"""What a kernel loads and stores; loads of one tensor under several conditions are one where that serves all of them.

Both sides of a choice may read the same element: one under the condition, the other under its opposite. Two such loads are
masked, so that the compiler cannot tell that they are of neighbours whatever the condition; one load needs no mask. If they
read elements that are a number of elements apart, one load serves as well, at a place that the condition tells: whatever
the condition, a lane needs one of them.

Worked example: a rotary embedding of the first 20 of 80 features computes ``where(i < 20, x[i] * cos + …, x[i])``. Its lines
have ``tl.load(x + i)`` once, instead of once under ``i < 20`` and once under ``i >= 20``. Of the features it turns it reads
``where(i < 10, -x[i + 10], x[i - 10])``, by ``tl.load(x + (tl.where(i < 10, 10, -10) + i), i < 20)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy

from dynafuse.ir import Layout
from dynafuse.lowering.triton.early_loads import defined_names
from dynafuse.lowering.triton.scopes import Line, Scope, Scopes
from dynafuse.ops import Value

Masks: TypeAlias = tuple[Value, ...]
Place: TypeAlias = tuple[str, sympy.Expr]
"""A tensor, and the offset in elements."""


@dataclass(frozen=True)
class Access:
    """A load or store: the tensor, its layout, the offset in elements, the conditions that mask it; how often, in a loop."""

    tensor: str
    layout: Layout
    offset: sympy.Expr
    is_store: bool
    masks: tuple[str, ...] = ()
    times: int = 1

    @property
    def place(self) -> Place | None:
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
    """A load that is written: the offset, the line that defines its value, and the masks that it is made under."""

    offset: sympy.Expr
    value: Value
    masks: Masks
    scope: Scope
    line: Line
    is_shared: bool = False  # whether the line loads elsewhere where other masks hold

    def write(self, line: Line) -> None:
        """Write what a line computes in place of what stands there."""
        self.line.text, self.line.exprs = f"{self.value.name} = {line.text}", line.exprs

    def is_after(self, masks: Masks) -> bool:
        """Return whether masks that are visible where it stands are defined before it."""
        place = next(k for k, line in enumerate(self.scope.lines) if line is self.line)
        return defined_names(Scope(self.scope.lines[place:])).isdisjoint(names_of(masks))


class SharedLoads:
    """The loads of one kernel, by what they load."""

    def __init__(self) -> None:
        self._loads: dict[str, list[Load]] = defaultdict(list)  # by tensor

    def visible(self, tensor: str, kernel: Scopes) -> Iterator[Load]:
        """Yield the loads of a tensor whose values can be used now.

        Args:
            tensor: The tensor.
            kernel: The kernel as far as it is written.
        """
        scopes = list(kernel.visible_scopes())
        return (load for load in self._loads[tensor] if any(scope is load.scope for scope in scopes))

    def again(self, place: Place, kernel: Scopes, common: Callable[[Masks], Masks | None],
              written: Callable[[Masks], Line]) -> Load | None:
        """Return a load of a place that serves once more, with its line changed to what that needs; None if there is none.

        A line is only changed for what would stand beside it: that of a branch may load where nothing outside of it does.

        Args:
            place: What is loaded.
            kernel: The kernel as far as it is written.
            common: Returns, for the masks of a load, those among them under which it serves both; None if it cannot.
            written: Returns what loads it under some masks, without a name.
        """
        tensor, offset = place
        for load in self.visible(tensor, kernel):
            masks = common(load.masks) if load.offset == offset else None
            if masks is None:
                continue
            if names_of(masks) == names_of(load.masks):
                return load
            line = written(masks)
            if not load.is_shared and line.tiles == load.value.tiles and kernel.scope(line.tiles) is load.scope:
                load.write(line)
                load.masks = masks
                return load
        return None

    def forget(self, tile: str, scope: Scope | None) -> None:
        """Let what is loaded along a tile dimension be loaded anew.

        Args:
            tile: The tile dimension.
            scope: Whose loads are forgotten.
        """
        for tensor, loads in self._loads.items():
            self._loads[tensor] = [load for load in loads if load.scope is not scope or tile not in load.value.tiles]

    def note(self, place: Place, value: Value, masks: Masks, scope: Scope) -> None:
        """Keep a load for who needs the same later.

        Args:
            place: What is loaded.
            value: Its value.
            masks: The masks that it is made under.
            scope: Where it stands, as the last line.
        """
        tensor, offset = place
        line = scope.lines[-1]
        assert isinstance(line, Line)
        self._loads[tensor].append(Load(offset, value, masks, scope, line))

    def share(self, load: Load, line: Line, place: Place, masks: Masks) -> Load:
        """Let a load serve at another place as well, and return it as one of that place.

        Args:
            load: The load.
            line: What is written in place of it, without a name.
            place: The other place, in the same tensor.
            masks: The masks under which it loads there.
        """
        tensor, offset = place
        load.write(line)
        load.is_shared = True
        self._loads[tensor].append(replace(load, offset=offset, masks=masks))
        return self._loads[tensor][-1]
