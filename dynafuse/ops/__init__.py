"""The op table (see :mod:`dynafuse.ops.table`) with all of its rows."""

from __future__ import annotations

from dynafuse.ops import (  # noqa: F401  (fill the table)
    creation,
    depthwise,
    gathers,
    indexing,
    library,
    nvfuser_rows,
    pointwise_rows,
    pooling,
    reductions,
    scans,
    scatters,
    upsampling,
    views,
)
from dynafuse.ops.nvfuser_rows import refusal as nvfuser_refusal
from dynafuse.ops.table import (
    Builder,
    Call,
    Cast,
    Combine,
    Context,
    Index,
    Kind,
    Row,
    Scatter,
    Value,
    View,
    Write,
    eager,
    is_library,
    is_unfilled,
    lookup,
    pointwise,
    reduction,
    refusal,
    register,
    rewrite,
    row_of,
    rows,
)

__all__ = [
    "Builder", "Call", "Cast", "Combine", "Context", "Index", "Kind", "Row", "Scatter", "Value", "View", "Write", "eager",
    "is_library", "is_unfilled", "lookup", "nvfuser_refusal", "pointwise", "reduction", "refusal", "register", "rewrite",
    "row_of", "rows", "shipped",
]

_SHIPPED = {str(row.target): row for row in rows()}


def shipped(target: str) -> bool:
    """Return whether the row of an op (by its overload's name) is the package's own, not one that was registered since."""
    row = _SHIPPED.get(target)
    return row is not None and lookup(row.target) is row
