"""Separation of the casts that the user wrote from those that decompositions and autocast add.

All of them arrive as ``prims.convert_element_type``. In eager a cast to 16 bits rounds. In a kernel, where values of 16 bits
are held in 32, it need not round, and the result is more exact. A cast that the user wrote has to round, though: it becomes
``aten._to_copy``, whose row of the op table does. A cast in a backward is treated like its cast in the forward.

Worked example: of ``softmax(x.half()).float()`` both casts become ``_to_copy``; those within ``softmax`` stay as they are.

| cast | ``original_aten`` | innermost of ``source_fn_stack`` | rounds |
|---|---|---|---|
| ``x.half()``, ``x.to(y)``, ``x.type_as(y)`` | ``aten._to_copy`` | ``half``, ``to``, ``type_as`` | yes |
| of a decomposition | ``aten._softmax`` | ``softmax`` | no |
| of autocast, or of a function's ``dtype`` | ``aten._to_copy`` | ``Linear``, ``matmul``, ``sum`` | no |
| traced without metadata, as by ``make_fx`` | none | none | yes |
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dynafuse.ops.literals import opmath

aten, prims = torch.ops.aten, torch.ops.prims

STACKS = ("source_fn_stack", "fwd_source_fn_stack")
"""The metadata that name the calls that a node comes from; in a backward, those of its forward."""

CASTS = frozenset({str(aten._to_copy.default), str(prims.convert_element_type.default)})
"""The ATen ops of casts, before decomposition."""

WRITTEN = frozenset({
    "to", "type", "type_as", "half", "bfloat16", "float", "double", "bool", "byte", "char", "short", "int", "long",
    "_to_copy", "convert_element_type", "copy_", "setitem",
})
"""Names of functions and methods by which a user casts."""


def keep_written_casts(module: GraphModule) -> None:
    """Replace the casts that the user wrote by ``aten._to_copy`` in place, where rounding makes a difference."""
    for node in module.graph.nodes:
        if node.target is prims.convert_element_type.default and _matters(node) and is_written(node):
            source, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}


def is_written(node: Node) -> bool:
    """Return whether the user wrote a cast, by its metadata; a cast without metadata counts as written."""
    origin = node.meta.get("original_aten")
    if origin is not None and str(origin) not in CASTS:  # by text, for it may be a copy of the op
        return False
    stack = next((node.meta[name] for name in STACKS if node.meta.get(name)), None)
    return stack is None or _name(stack[-1][1]) in WRITTEN


def _name(function: object) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", "")


def _matters(node: Node) -> bool:
    """Return whether a cast to a float converts from or to fewer than 32 bits."""
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return result.dtype.is_floating_point and any(opmath(value.dtype) is not value.dtype for value in (source, result))
