"""Rows of reductions, and which dimensions a call reduces.

    >>> reduced_dims({"self": None, "dim": [-1], "keepdim": True}, 3)
    (2,)
    >>> correction({"self": None, "dim": None, "correction": None})
    1.0

The operand is converted to the output's dtype (in its opmath type) before it is reduced; ``any`` and ``all`` to bool;
the order ops, ``argmax`` and the variances take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynafuse.ops.overloads import overloads
from dynafuse.ops.table import eager, reduction, register

_REDUCTIONS = {
    "sum": "aten.sum.default aten.sum.dim_IntList prims.sum.default",
    "mean": "aten.mean.default aten.mean.dim",
    "prod": "aten.prod.default aten.prod.dim_int prims.prod.default",
    "max": "aten.amax.default aten.max.default prims.amax.default",
    "min": "aten.amin.default aten.min.default prims.amin.default",
    "any": "aten.any.default aten.any.dim aten.any.dims",
    "all": "aten.all.default aten.all.dim aten.all.dims",
    "argmax": "aten.argmax.default",
    "argmin": "aten.argmin.default",
}
_STATES = {"argmax": 2, "argmin": 2}  # the extreme and its position
_VARIANCES = {  # mean, sum of squared deviations, weight
    "var": "aten.var.correction prims.var.default",
    "var_mean": "aten.var_mean.correction",
    "std": "aten.std.correction",
}
_EAGER = {
    "aten.max.dim aten.min.dim aten._aminmax.default aten._aminmax.dim aten.aminmax.default aten.std_mean.correction "
    "prims.prepare_softmax_online.default": "two outputs",
    "aten.logsumexp.default": "arrives decomposed into amax, exp, sum and log",
    "prims.xor_sum.default aten.hash_tensor.default": "a rare recurrence",
    "aten.cummax.default aten.cummin.default aten._cummax_helper.default": "scan: two outputs",
    "aten.sort.default aten.sort.stable aten.argsort.default aten.topk.default aten.kthvalue.default "
    "aten.median.default "
    "aten.median.dim aten.nanmedian.default aten.nanmedian.dim aten.mode.default aten.msort.default":
        "sort: a selection over the whole dimension",
    "aten.histc.default aten.bincount.default aten.unique_dim.default aten._unique2.default": "histogram: a scatter",
    "aten.searchsorted.Tensor aten.bucketize.Tensor": "a search per element",
    "aten.equal.default aten.allclose.default": "its result is a Python value",
}

for _name, _names in _REDUCTIONS.items():
    for _target in overloads(_names):
        register(reduction(_target, _name, states=_STATES.get(_name, 1)))
for _name, _names in _VARIANCES.items():
    for _target in overloads(_names):
        register(reduction(_target, _name, flops=4.0, states=2))
for _names, _reason in _EAGER.items():
    for _target in overloads(_names):
        register(eager(_target, _reason))


def reduced_dims(args: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """Return the dimensions that a call reduces, counted from the front and sorted; no ``dim`` or an empty one means all.

    Args:
        args: The call's arguments by name.
        rank: How many dimensions its operand has.
    """
    dims = args.get("dim", args.get("dims"))
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({dim % rank for dim in listed})) if rank else ()


def keepdim(args: Mapping[str, Any]) -> bool:
    """Return whether the reduced dimensions stay, with size 1."""
    return bool(args.get("keepdim", False))


def correction(args: Mapping[str, Any]) -> float:
    """Return what a variance subtracts from the count; torch's default is 1."""
    given = args.get("correction")
    return 1.0 if given is None else float(given)
