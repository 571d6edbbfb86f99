"""Gradients of max pooling from the places of the maxima in their windows, instead of from their indices in what is pooled.

Places are kept in int8, indices in int64, and the gradient needs nothing else: what was pooled is not kept for its size.

Worked example: ``max_pool2d_with_indices_backward(g, x, [3, 3], …, offsets_to_indices(o, …, [112, 112], …))`` becomes
``max_pool_offsets_backward(g, o, [112, 112], [3, 3], …)``, in the joint graph of forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dynafuse.fx import arguments
from dynafuse.ops.pooling import MAX_POOL_OFFSETS_BACKWARD

aten = torch.ops.aten

BACKWARD = frozenset({aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default})


def use_offsets(graph: Graph) -> None:
    """Rewrite the gradients of max pooling whose indices are made of offsets."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in BACKWARD:
            args = _by_offsets(arguments(node))
            if args is not None:
                _replace(node, args)


def _by_offsets(gradient: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the arguments of the op that takes offsets; None if there are none, or of other windows."""
    indices, windows = gradient["indices"], ("kernel_size", "stride", "padding", "dilation")
    if indices.target is not torch.ops.prims._low_memory_max_pool_offsets_to_indices.default:
        return None
    given = arguments(indices)
    if any(list(given[name]) != list(gradient[name]) for name in windows if gradient[name]):
        return None
    return (gradient["grad_output"], indices.args[0], given["input_size"], *(given[name] for name in windows))


def _replace(node: Node, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(MAX_POOL_OFFSETS_BACKWARD, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
