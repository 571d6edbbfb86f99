"""The op table (see :mod:`dynafuse.ops.table`) with all of its rows."""

from __future__ import annotations

from dynafuse.ops import creation, gathers, indexing, pointwise_rows, reductions, views, whole  # noqa: F401  (fill the table)
from dynafuse.ops.table import (
    Builder,
    Call,
    Cast,
    Context,
    Index,
    Kind,
    Row,
    Value,
    eager,
    lookup,
    pointwise,
    reduction,
    refusal,
    register,
    rewrite,
    rows,
)

__all__ = [
    "Builder", "Call", "Cast", "Context", "Index", "Kind", "Row", "Value", "eager", "lookup", "pointwise", "reduction",
    "refusal", "register", "rewrite", "rows",
]
