"""Tells casts that the user wrote from those that decompositions and autocast add.

All of them arrive as ``prims.convert_element_type``. In eager a cast to 16 bits rounds; in a kernel, where values of 16 bits
are held in 32, it need not, and the result is better for it. That is not so of a cast that the user asks for: it becomes
``aten._to_copy``, whose row of the op table rounds. A cast in a backward is as the one in the forward that it comes from.

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
"""Where a node's metadata name the calls that it comes from: its own, or of a backward those of its forward."""

CASTS = frozenset({str(aten._to_copy.default), str(prims.convert_element_type.default)})
"""What a cast is in ATen before it is decomposed."""

WRITTEN = frozenset({
    "to", "type", "type_as", "half", "bfloat16", "float", "double", "bool", "byte", "char", "short", "int", "long",
    "_to_copy", "convert_element_type", "copy_", "setitem",
})
"""Names of functions and methods by which a user casts."""


def keep_written_casts(module: GraphModule) -> None:
    """Make casts of their own kind of those that the user wrote, where it makes a difference."""
    for node in module.graph.nodes:
        if node.target is prims.convert_element_type.default and _matters(node) and is_written(node):
            source, dtype = node.args
            node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": dtype}


def is_written(node: Node) -> bool:
    """Whether a cast is one that the user wrote."""
    origin = node.meta.get("original_aten")
    if origin is not None and str(origin) not in CASTS:  # it may be a copy of the op
        return False
    stack = next((node.meta[name] for name in STACKS if node.meta.get(name)), None)
    return stack is None or _name(stack[-1][1]) in WRITTEN


def _name(function: object) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", "")


def _matters(node: Node) -> bool:
    """Whether a float of less than 32 bits takes part."""
    source, made = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return made.dtype.is_floating_point and any(opmath(value.dtype) is not value.dtype for value in (source, made))
