"""Where an op reads its operands, and which of their dimensions follow the result's: its row is asked, by index symbols.

Worked example: an element of ``cat([x, y], 1)`` at ``(i, j)`` is an element of ``x`` or ``y`` in row ``i``, so the first
dimension of both operands follows the result's first one, and their second follows none. An element of a pooling over
windows of ``3 × 3`` is made of nine elements of its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from dynafuse.errors import LoweringError
from dynafuse.ir import Facts, Size
from dynafuse.ops import Index, Value
from dynafuse.ops.indexing_math import IndexSymbol, symbol

Followed = tuple[int | None, ...]
"""Per dimension of an operand: the dimension of the result that it follows, or None."""

UNTOLD = Value("", torch.float32)

FEW_LANES = 0.4
"""How long a load takes at least that some lanes of a warp need, of one that all of them need."""


@dataclass(frozen=True)
class Operand:
    """What a node reads of an operand for one element of its own.

    ``reach`` is how many elements: several for a window, 0 if only sizes matter. ``share`` is how many are needed, which is
    less than one where the operand is a part of the result. ``is_picked`` says that loaded indices tell which ones,
    so that no other node is known to read the same. ``is_mixed`` says that it is a part of the result in runs shorter than a
    warp: then all lanes compute it, under a condition of its own, and whatever it is made of anew. ``shared`` is how many
    loads a window takes in a pointwise kernel whose lanes compute several points, None where each takes one.
    """

    reach: int = 1
    share: float = 1.0
    is_picked: bool = False
    is_mixed: bool = False
    shared: float | None = None

    @property
    def in_window(self) -> float:
        """Return how many loads a pointwise kernel takes for it."""
        return self.reach if self.shared is None else self.shared

    @property
    def computed(self) -> float:
        """Return how many elements have to be computed."""
        return 1.0 if self.is_mixed else self.share

    @property
    def computed_by_longest(self) -> float:
        """Return the same of the programs that have most of it: of a part they have nothing else."""
        return max(self.computed, 1.0)

    @property
    def loaded(self) -> float:
        """Return how many loads it takes, of those that all lanes need: lanes that need nothing load nothing."""
        return max(self.share, FEW_LANES) if self.is_mixed else self.share

    @property
    def loaded_together(self) -> float:
        """Return the same of a pointwise kernel, whose lanes share what windows have in common."""
        return self.loaded if self.shared is None else self.shared


ELEMENTWISE = Operand()


@dataclass(frozen=True)
class Reading:
    """Where an op reads an operand: at which indices, over the result's, and which dimensions follow the result's.

    ``told``: whether the indices tell which elements are read, because none of them is loaded. ``shifted`` is like
    ``followed``, but at any distance, of an operand each of whose elements one of the result is made of; None of any other.
    """

    indices: frozenset[Index]
    followed: Followed
    told: bool = True
    shifted: Followed | None = None


def indices_of(shape: Sequence[Size]) -> Index:
    """Return the symbols of an element's place in a result, one for each dimension."""
    return tuple(symbol(f"d{k}", size) for k, size in enumerate(shape))


def readings(node: Node, facts: Mapping[Node, Facts]) -> Mapping[Node, Reading] | None:
    """Return where a node reads each operand whose elements it reads; None if its row does not tell."""
    row, call = facts[node].row, facts[node].call
    if row is None or call is None or row.lower is None:
        return None
    index = indices_of(call.shape)
    asked = _Asked(facts, index)
    try:
        row.lower(asked, call, index)
    except LoweringError:  # it depends on more than the call
        return None
    return asked.readings


class _Asked:
    """Notes at which indices a row asks for its operands (implements :class:`dynafuse.ops.table.Builder`)."""

    def __init__(self, facts: Mapping[Node, Facts], index: Index) -> None:
        self.facts = facts
        self.dimension: dict[sympy.Expr, int] = {at: k for k, at in enumerate(index)}
        self.readings: dict[Node, Reading] = {}
        self._picked = 0

    def operand(self, arg: Any, index: Index) -> Value:
        """Note an index of an operand; where it was read before, what both agree on."""
        here = tuple(self.dimension.get(at) for at in index)
        before = self.readings.get(arg, Reading(frozenset(), here))
        agreed = tuple(a if a == b else None for a, b in zip(here, before.followed, strict=True))
        symbols = frozenset[sympy.Symbol]().union(*(at.free_symbols for at in index))
        loaded = any(isinstance(part, IndexSymbol) and part not in self.dimension for part in symbols)
        indices = before.indices | {index}
        shifted = self._shifted(index) if len(indices) == 1 else None
        self.readings[arg] = Reading(indices, agreed, before.told and not loaded, shifted)
        return UNTOLD

    def _shifted(self, index: Index) -> Followed | None:
        """Return the dimensions that an index follows at any distance; None unless all of it does, and none twice."""
        dimensions = [self._dimension(at) for at in index]
        return tuple(dimensions) if None not in dimensions and len(set(dimensions)) == len(dimensions) else None

    def _dimension(self, at: sympy.Expr) -> int | None:
        """Return the dimension that a part of an index is, plus what is the same everywhere."""
        symbols = [part for part in at.free_symbols if isinstance(part, IndexSymbol)]
        is_shifted = len(symbols) == 1 and not (at - symbols[0]).has(symbols[0])
        return self.dimension.get(symbols[0]) if is_shifted else None

    def rounded(self, arg: Any, index: Index) -> Value:
        """Note an index of an operand."""
        return self.operand(arg, index)

    def shape(self, arg: Any) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a tensor argument."""
        return tuple(sympy.sympify(size) for size in self._tensor(arg).shape)

    def dtype(self, arg: Any) -> torch.dtype:
        """Return the dtype of a tensor argument."""
        dtype: torch.dtype = self._tensor(arg).dtype
        return dtype

    def _tensor(self, arg: Any) -> Any:
        tensor = self.facts[arg].tensor
        assert tensor is not None, arg
        return tensor

    def indirect(self, value: Value, size: sympy.Expr) -> sympy.Expr:
        """Return an index that follows no dimension."""
        self._picked += 1
        return symbol(f"p{self._picked}", size)

    def loaded_index(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False,
                     trusted: bool = False) -> Value:
        """Note where an index is read."""
        return self.operand(arg, index)

    def masked(self, condition: Value, body: Callable[[], Value], other: bool | int | float) -> Value:
        """Note what is read where a condition holds."""
        return body()

    def choose(self, condition: Value, if_true: Callable[[], Value], if_false: Callable[[], Value]) -> Value:
        """Note what is read whether a condition holds or not."""
        if_true()
        return if_false()

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Value:
        """Return a value."""
        return UNTOLD

    def index_value(self, expr: sympy.Expr) -> Value:
        """Return a value."""
        return UNTOLD

    def compare(self, left: sympy.Expr, op: str, right: sympy.Expr) -> Value:
        """Return a value."""
        return UNTOLD

    def expression(self, text: str, dtype: torch.dtype, *operands: Value) -> Value:
        """Return a value."""
        return UNTOLD

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Return a value."""
        return UNTOLD

    def drawn(self, mode: str, seed: Value, position: sympy.Expr) -> Value:
        """Return a value."""
        return UNTOLD
