"""Copies into parts of tensors, as what they are: casts and repetitions of what is copied, without the gaps of the part.

``y[:, 0] = x`` arrives as a copy of ``x`` into a part of ``y``, which a scatter puts back. What such a copy returns has the
part's sizes, dtype and strides, with the gaps that the part has in ``y``, but none of its values; so a kernel need not wait
for ``y``, and nothing needs the gaps. Those of a scatter into a part, as of ``y[1:, 0] = x``, are in the way alike. They
stay where something can tell: in a result, and where strides decide those of another tensor.

Worked example: of ``copy(select(y, 1, 0), x)``, with ``x`` a number in float64 and ``y`` of float32[8, 4], remains
``clone(expand(_to_copy(x, float32), [8]))``, which kernels compute where they need it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import fake_mode_of, insert, is_dense, size_node, size_of
from dynafuse.passes.strides import after_of, in_order, order_of, renew

aten = torch.ops.aten
SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default}
"""Ops whose results have the strides of the part that they replace a part of."""


def close_gaps(module: GraphModule) -> None:
    """Replace copies into tensors, in place, by copies in memory of their own; so that scatters go into such, too."""
    nodes = [node for node in module.graph.nodes if node.target in SCATTERS or node.target is aten.copy.default]
    with fake_mode_of(nodes):
        for node in nodes:
            if node.target is aten.copy.default:
                _copy_apart(node)
            else:
                _scatter_apart(node)


def _copy_apart(node: Node) -> None:
    into, source = node.args[:2]
    if not (isinstance(into, Node) and isinstance(source, Node)):
        return
    value, given = node.meta["val"], source.meta["val"]
    if value.layout is torch.strided and given.layout is torch.strided and given.device == value.device:
        copy = in_order(copied(into, source, node), order_of(value, value.stride()), node, share=False)
        if renew(node, copy.meta["val"]):
            node.replace_all_uses_with(copy)


def _scatter_apart(node: Node) -> None:
    into, value = node.args[0], node.meta["val"]
    assert isinstance(into, Node)
    if is_dense(tuple(map(size_of, value.shape)), tuple(map(size_of, value.stride()))):
        return
    apart = in_order(into, order_of(value, value.stride()), after_of(into), share=False)
    args = map_arg((apart, *node.args[1:]), lambda operand: operand.meta["val"])
    renewed = node.target(*args, **map_arg(node.kwargs, lambda operand: operand.meta["val"]))  # type: ignore[operator]
    if renew(node, renewed):
        node.update_arg(0, apart)


def copied(into: Node, source: Node, before: Node) -> Node:
    """Return what a copy of ``source`` has in the sizes and the dtype of ``into``: itself, or calls on it.

    Args:
        into: What is copied into.
        source: What is copied.
        before: The node that the calls are inserted before.
    """
    value = into.meta["val"]
    if source.meta["val"].dtype is not value.dtype:
        source = insert(before, aten._to_copy.default, (source,), dtype=value.dtype)
    if list(map(size_of, source.meta["val"].shape)) == list(map(size_of, value.shape)):
        return source
    sizes = [size_node(before, into, dim) for dim in range(value.dim())]
    return insert(before, aten.expand.default, (source, sizes))
