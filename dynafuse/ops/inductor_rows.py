"""What Inductor can take of the op table: every op that may be fused, less the ones named here.

Inductor lowers ATen by its own tables; where it has no lowering it calls the op as eager does, which no one needs it for.
Neither Inductor nor a region is needed to ask.

Worked example::

    >>> refusal(lookup(prims.inductor_random.default), call)
    'random numbers: the bits would depend on the executor'
"""

from __future__ import annotations

from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import Call, Kind, Row

MISSING = frozenset(overloads(
    "prims.full.default prims.full_like.default prims.reshape.default prims.collapse_view.default prims.collapse.default "
    "prims.split_dim.default prims.transpose.default prims.squeeze.default aten.slice_copy.Tensor aten.select_copy.int "
    "prims.cat.default aten._adaptive_avg_pool2d_backward.default prims.prod.default prims.amax.default prims.amin.default "
    "prims.mul.default prims.pow.default prims.cbrt.default prims.shift_left.default "
    "prims.shift_right_arithmetic.default prims.isfinite.default prims.signbit.default prims.where.default "
    "prims.erf_inv.default prims.floor.default prims.trunc.default prims.round.default aten.hardshrink_backward.default "
    "aten.softshrink_backward.default aten.detach_copy.default prims.clone.default prims.copy_to.default"
))
"""Ops that Inductor neither lowers nor decomposes."""


def refusal(row: Row, call: Call) -> str:
    """Why Inductor cannot take a call of a fusible op, or ""."""
    if row.kind is Kind.RANDOM:
        return "random numbers: the bits would depend on the executor"
    if row.target.namespace not in ("aten", "prims"):
        return f"Inductor does not know {row.target.namespace}"
    return f"Inductor has no {row.target}" if row.target in MISSING else ""
