"""Which dimensions of an op's operands follow dimensions of its result: the row of the op table is asked, by index symbols.

Worked example: an element of ``cat([x, y], 1)`` at ``(i, j)`` is an element of ``x`` or ``y`` in row ``i``, so the first
dimension of both operands follows the result's first one, and their second follows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node

from dynafuse.errors import LoweringError
from dynafuse.ir import Facts
from dynafuse.ops import Index, Value
from dynafuse.ops.indexing_math import symbol

Followed = tuple[int | None, ...]
"""Per dimension of an operand: the dimension of the result that it follows, or None."""

UNTOLD = Value("", torch.float32)


def followed(node: Node, facts: Mapping[Node, Facts]) -> dict[Node, Followed]:
    """Return, per operand whose elements a node reads, which dimensions of its result they follow."""
    row, call = facts[node].row, facts[node].call
    if row is None or call is None or row.lower is None:
        return {}
    index = tuple(symbol(f"d{k}", size) for k, size in enumerate(call.shape))
    asked = _Asked(facts, index)
    try:
        row.lower(asked, call, index)
    except LoweringError:  # it depends on more than the call
        return {}
    return asked.followed


class _Asked:
    """Notes at which indices a row asks for its operands (implements :class:`dynafuse.ops.table.Builder`)."""

    def __init__(self, facts: Mapping[Node, Facts], index: Index) -> None:
        self.facts = facts
        self.dimension: dict[sympy.Expr, int] = {at: k for k, at in enumerate(index)}
        self.followed: dict[Node, Followed] = {}
        self._picked = 0

    def operand(self, arg: Any, index: Index) -> Value:
        """Note an index of an operand; where it was read before, what both agree on."""
        here = tuple(self.dimension.get(at) for at in index)
        before = self.followed.get(arg, here)
        self.followed[arg] = tuple(a if a == b else None for a, b in zip(here, before, strict=True))
        return UNTOLD

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

    def picked(self, arg: Any, index: Index, size: sympy.Expr, *, wraps: bool = False, trusted: bool = False) -> Value:
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
