"""Reductions of one element each, as a group norm's over the channels of a group that has one: copies of the element.

What reads the result could not be in the kernel of the rows that were reduced before, since the rows of a reduction of one
element are others.

Worked example: ``s.view(4, 512, 1).sum(2)``, of sums ``s`` over 6,399 elements each, is a copy of ``s``, so that the kernel
which adds up ``s`` goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from dynafuse.fx import arguments, fake_mode_of, insert, is_one
from dynafuse.ops.reductions import reduced_dims
from dynafuse.passes.strides import same_layout

aten = torch.ops.aten
prims = torch.ops.prims

SUMS = (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
REDUCTIONS = (*SUMS, aten.prod.default, aten.prod.dim_int, aten.amax.default, aten.amin.default, aten.max.default,
              aten.min.default)
"""Those whose result of one element is that element; of sums, which begin with 0, that of -0 is 0."""


def copy_lone_elements(module: GraphModule) -> None:
    """Replace reductions of one element each by copies, or casts, in the graph, in place; strides stay as they were."""
    for target in REDUCTIONS:
        for node in module.graph.find_nodes(op="call_function", target=target):
            sizes = arguments(node)["self"].meta["val"].shape
            dims = reduced_dims(arguments(node), len(sizes))
            if all(is_one(sizes[dim]) for dim in dims):
                with fake_mode_of((node,)):
                    _replace_by_copy(node, dims)


def _replace_by_copy(node: Node, dims: Sequence[int]) -> None:
    given, result = arguments(node), node.meta["val"]
    operand = given["self"].meta["val"]
    copy = given["self"]
    if operand.dtype is not result.dtype:
        copy = insert(node, prims.convert_element_type.default, (copy, result.dtype))
    if node.target in SUMS and result.dtype.is_floating_point:
        copy = insert(node, aten.add.Tensor, (copy, 0.0))
    elif copy is given["self"]:
        copy = insert(node, aten.clone.default, (copy,))
    if result.ndim < operand.ndim:
        copy = insert(node, aten.squeeze.dims, (copy, list(dims)))
    if same_layout(copy.meta["val"], result):  # else dead code, which is removed in the end
        node.replace_all_uses_with(copy)
        node.graph.erase_node(node)
