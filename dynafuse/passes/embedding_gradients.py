"""Gradients of embeddings as scatters, where that is predicted to be faster than eager's own op.

``embedding_dense_backward`` sorts the indices, and adds the rows of each in order. A scatter adds atomically, in the kernel
that makes the rows: they are neither stored nor loaded again. Those of 16 bits are added in float32 (see ``scatters.py``),
in a table that is rounded at the end: of a large table with few rows to add, that costs more than sorting does.

Worked example::

    g = embedding_dense_backward(rows, at, 1000, padding_idx=3, scale_grad_by_freq=False)

becomes ``zeros = full([1000, 64], 0)``, ``kept = unsqueeze(ne(at, 3), -1)`` and
``g = _unsafe_masked_index_put_accumulate(zeros, kept, [at], rows)``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import call_prediction
from dynafuse.cost.model import Work, streaming, work_us
from dynafuse.fx import arguments, hint, insert, is_view, looked_at
from dynafuse.lowering.registry import PREFERRED
from dynafuse.ops import lookup
from dynafuse.ops.literals import opmath

aten, prims = torch.ops.aten, torch.ops.prims

def scatter_gradients(module: GraphModule, device: Device, device_type: str | None, eager: Collection[Node] = ()) -> None:
    """Replace gradients of embeddings by scatters into zeros, in place.

    Args:
        module: A normalized graph.
        device: The device that prices are of.
        device_type: The type of device whose tensors are fused; None if nothing is.
        eager: Nodes that are to stay as they are.
    """
    if torch.are_deterministic_algorithms_enabled():
        return
    for node in module.graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        if node not in eager and _may_scatter(node, device_type) and _pays(node, device):
            node.replace_all_uses_with(_scattered(node))
            module.graph.erase_node(node)


def _may_scatter(node: Node, device_type: str | None) -> bool:
    """Return whether a kernel can compute a gradient: of floats on its device, none empty, not scaled by counts."""
    given = arguments(node)
    values = [node.meta["val"], given["grad_output"].meta["val"], given["indices"].meta["val"]]
    is_known = isinstance(given["padding_idx"], int) and not given["scale_grad_by_freq"]
    if not is_known or not values[0].dtype.is_floating_point:
        return False
    if any(value.device.type != device_type or value.layout is not torch.strided for value in values):
        return False
    sizes = [size for value in values for size in value.shape]
    return isinstance(values[0].shape[-1], int) and not any(isinstance(size, int) and size == 0 for size in sizes)


def _pays(node: Node, device: Device) -> bool:
    """Return whether zeros, a scatter and the rounding of its result cost no more than eager's op.

    Where a kernel makes the rows for this alone, the scatter is its last lines, and eager's op has them stored for it.
    """
    given, table = arguments(node), node.meta["val"]
    rows = given["grad_output"].meta["val"]
    size, added = _count(table), _count(rows)
    width, row_bytes = opmath(table.dtype).itemsize, added * rows.dtype.itemsize
    is_joined = _is_made_for(node, given["grad_output"])
    parts = [_moving(size * width), _moving(min(size, added) * width + (0 if is_joined else row_bytes), added)]
    if width != table.dtype.itemsize:
        parts.append(_moving(size * (width + table.dtype.itemsize)))
    launch_us = device.constants[f"launch_us_{PREFERRED}"]
    fused = sum(work_us(part, device) for part in parts) + (len(parts) - is_joined) * launch_us
    index_bytes = _count(given["indices"].meta["val"]) * given["indices"].meta["val"].dtype.itemsize
    moved = size * table.dtype.itemsize + row_bytes * (1 + is_joined) + index_bytes
    return fused <= call_prediction(node, moved, device).device_us


def _is_made_for(node: Node, value: Node) -> bool:
    """Return whether a kernel may make a value, and ``node`` alone reads it."""
    source = looked_at(value, is_view)
    row = lookup(source.target)
    return row is not None and row.fusible and len(source.users) == len(value.users) == 1


def _moving(moved: int, atomics: int = 0) -> Work:
    return replace(streaming(moved), atomics=atomics)


def _count(value: torch.Tensor) -> int:
    return math.prod(map(hint, value.shape))


def _scattered(node: Node) -> Node:
    """Insert a scatter that computes a gradient, and return it."""
    given, value = arguments(node), node.meta["val"]
    rows, at, padding = given["grad_output"], given["indices"], given["padding_idx"]
    zeros = _zeros(node, [given["num_weights"], value.shape[-1]])
    if rows.meta["val"].dtype is not value.dtype:
        rows = insert(node, prims.convert_element_type.default, (rows, value.dtype))
    if at.meta["val"].dtype is not torch.int64:
        at = insert(node, prims.convert_element_type.default, (at, torch.int64))
    if padding < 0:  # there is none
        return insert(node, aten.index_put.default, (zeros, [at], rows, True))
    mask = insert(node, aten.unsqueeze.default, (insert(node, aten.ne.Scalar, (at, padding)), -1))
    return insert(node, aten._unsafe_masked_index_put_accumulate.default, (zeros, mask, [at], rows))


def _zeros(gradient: Node, sizes: list[Node | int]) -> Node:
    """Insert what a gradient is where no row is added."""
    value = gradient.meta["val"]
    with gradient.graph.inserting_before(gradient):
        zeros = gradient.graph.call_function(aten.full.default, (sizes, 0), {
            "dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False})
    zeros.meta = gradient.meta | {"val": torch.zeros_like(value)}
    return zeros
