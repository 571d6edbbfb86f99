"""Calls whose results, or whether they run, depend on the strides of what they read.

Worked example: ``may_look_at_strides`` is true of a call of ``mylib::scale``, which may look at its operand's memory, and
false of ``aten.mul``, whose kernels take any strides.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from dynafuse.ops import lookup
from dynafuse.ops.overloads import moves_generator

aten = torch.ops.aten


def may_look_at_strides(node: Node) -> bool:
    """Return whether a call's results depend on the strides that eager's tensors have.

    Args:
        node: The call.
    """
    return places_by_strides(node) or _was_made_for_strides(node) or _draws_by_strides(node)


def places_by_strides(node: Node) -> bool:
    """Return whether a call places elements in its first operand's memory, whatever the operand's strides.

    Args:
        node: The call.
    """
    row = lookup(node.target)
    return row is not None and row.by_strides


def wants_eagers_strides(node: Node) -> bool:
    """Return whether a call may compute something else under other strides than eager's.

    Args:
        node: The call.
    """
    return _was_made_for_strides(node) or _draws_by_strides(node) or _is_wrong_in_channels_last(node)


def wants_dense_rows(node: Node) -> bool:
    """Return whether a call wants the innermost dimension of each tensor to be dense: the kernels of attention do.

    Args:
        node: The call.
    """
    row = lookup(node.target)
    return row is not None and row.library == "attention"


def _was_made_for_strides(node: Node) -> bool:
    """Return whether a call was written or traced for eager's strides: calls of graphs and kernels, others' ops."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return torch.Tag.flexible_layout not in target.tags


def _draws_by_strides(node: Node) -> bool:
    """Return whether a call draws a random number for each element of its operand, in the order of memory.

    Attention draws by the places of rows and columns instead.
    """
    return moves_generator(node) and not wants_dense_rows(node)


def _is_wrong_in_channels_last(node: Node) -> bool:
    """Return whether eager's kernel may be wrong in channels-last: that of padded averages' gradient is (pytorch#188344)."""
    return node.target is aten.avg_pool2d_backward.default and any(node.args[4])  # type: ignore[arg-type]
