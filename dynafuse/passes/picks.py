"""Gathers before what they pick from: what is picked is computed, instead of all that it is picked from.

``gather(x - m, 1, i)`` becomes ``gather(x, 1, i) - m`` where ``m`` is the same along dimension 1: the difference is never
stored, and of ``x`` only what is picked is read. That is how a cross-entropy reads its logits once more at the labels alone,
instead of storing the logarithms of all probabilities.

A gather moves before pointwise ops that nothing but fusible ops reads: another reader has their result stored anyway.

Worked example: with ``float32[4096, 32000]`` logits, ``gather(logits - largest - log_sum, 1, labels)`` becomes
``gather(logits, 1, labels) - largest - log_sum``, of 4096 elements each.
"""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import arguments, hint, insert
from dynafuse.ops import Kind, lookup
from dynafuse.ops.indexing_math import as_expr

aten = torch.ops.aten

READ = 8  # elements that are read for one that is picked
MOST_GATHERS = 4  # gathers that one may become


def pick_early(module: GraphModule) -> None:
    """Move gathers of few elements before the pointwise ops that compute what they pick from, in place."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.gather.default)):
        pending, count = [node], 1
        while pending and count <= MOST_GATHERS:
            gather = pending.pop()
            if _may_move(gather):
                gathers = _moved(gather)
                pending += gathers
                count += len(gathers) - 1
    module.graph.eliminate_dead_code()


# Whether --------------------------------------------------------------------------------------------------------------


def _may_move(gather: Node) -> bool:
    """Return whether a gather may pick from the operands of what it picks from, and whether that computes much less."""
    args, dim = arguments(gather), _dim(gather)
    source, index = args["self"], args["index"]
    if args["sparse_grad"] or not _is_pointwise(source) or _needs_memory(source):
        return False
    values = [node.meta.get("val") for node in (source, index, *source.all_input_nodes)]
    if not all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values):
        return False
    shape, picked = values[0].shape, values[1].shape
    if not shape or not all(d == dim or as_expr(picked[d]) == as_expr(shape[d]) for d in range(len(shape))):
        return False
    varying = [operand for operand in source.all_input_nodes if _varies(operand, shape, dim)]
    is_known = all(isinstance(size, int) for size in shape) or all(_has_shape(operand, shape) for operand in varying)
    return bool(varying) and is_known and READ * len(varying) * _count(picked) <= _count(shape)


def _is_pointwise(node: Node) -> bool:
    row, target = lookup(node.target), node.target
    return (row is not None and row.kind is Kind.POINTWISE and isinstance(target, torch._ops.OpOverload)
            and not target._schema.is_mutable)


def _needs_memory(node: Node) -> bool:
    """Return whether a reader of a node, or of a view of it, is no op that is fused, so that the node is stored."""
    for user in node.users:
        row = lookup(user.target) if user.op == "call_function" else None
        if row is None or not row.fusible or (row.kind is Kind.VIEW and _needs_memory(user)):
            return True
    return False


def _varies(operand: Node, shape: torch.Size, dim: int) -> bool:
    """Return whether an operand that is broadcast to a shape differs along a dimension of it."""
    sizes = operand.meta["val"].shape
    own = dim - (len(shape) - len(sizes))
    return own >= 0 and as_expr(sizes[own]) != 1


def _count(shape: torch.Size) -> int:
    return math.prod(map(hint, shape))


def _dim(gather: Node) -> int:
    args = arguments(gather)
    return int(args["dim"]) % max(len(args["self"].meta["val"].shape), 1)


# How ------------------------------------------------------------------------------------------------------------------


def _moved(gather: Node) -> list[Node]:
    """Replace a gather by the op that it picks from, over gathers of its operands; return these."""
    args, dim = arguments(gather), _dim(gather)
    source: Node = args["self"]
    shape = source.meta["val"].shape
    gathers: dict[Node, Node] = {}
    for operand in source.all_input_nodes:
        if _varies(operand, shape, dim):
            is_whole = _has_shape(operand, shape)
            whole = operand if is_whole else insert(gather, aten.expand.default, (operand, list(shape)), operand)
            gathers[operand] = insert(gather, aten.gather.default, (whole, args["dim"], args["index"]))
    moved_args, moved_kwargs = map_arg((source.args, source.kwargs), lambda operand: gathers.get(operand, operand))
    moved = insert(gather, source.target, moved_args, source, **moved_kwargs)
    if moved.meta["val"].stride() != gather.meta["val"].stride():
        moved = insert(gather, aten.clone.default, (moved,), source, memory_format=torch.contiguous_format)
    gather.replace_all_uses_with(moved)
    gather.graph.erase_node(gather)
    return list(gathers.values())


def _has_shape(operand: Node, shape: torch.Size) -> bool:
    sizes = operand.meta["val"].shape
    return len(sizes) == len(shape) and all(as_expr(a) == as_expr(b) for a, b in zip(sizes, shape, strict=True))
