"""The op table (see :mod:`dynafuse.ops.table`) with all of its rows."""

from __future__ import annotations

from dynafuse.ops import (  # noqa: F401  (fill the table)
    creation,
    gathers,
    indexing,
    nvfuser_rows,
    pointwise_rows,
    reductions,
    views,
    whole,
)
from dynafuse.ops.nvfuser_rows import refusal as nvfuser_refusal
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
    "Builder", "Call", "Cast", "Context", "Index", "Kind", "Row", "Value", "eager", "lookup", "nvfuser_refusal",
    "pointwise", "reduction", "refusal", "register", "rewrite", "rows",
]
