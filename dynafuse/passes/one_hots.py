"""Sums along a dimension of tensors that are zero there but in one place: that one element, instead of a walk over all.

The gradient of a cross-entropy with respect to the probabilities' logarithms is such a tensor, and that of the logits needs
its sum over the classes. What makes it so is found from the op that puts the element there, a scatter into zeros or a
``where`` by the equality of a position and an index, through ops that keep zeros zero.

The sum is that element plus what has become of a zero: 0, or NaN where it was multiplied by infinity.

Worked example: with ``h = scatter(zeros(8, 32000), 1, labels, -1.0) * scale`` and ``scale`` of 8 × 1 elements, ``sum(h, [1],
True)`` becomes ``full_like(labels, -1.0) * scale + full_like(labels, 0.0) * scale``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import arguments, insert, is_count, is_zeros
from dynafuse.ops.indexing_math import as_expr

aten = torch.ops.aten
prims = torch.ops.prims

RESHAPES = {aten.view.default, aten.reshape.default, aten.unsqueeze.default}
KEEP_ZERO: dict[Any, tuple[str, ...]] = {
    aten.mul.Tensor: ("self", "other"), aten.mul.Scalar: ("self",), aten.div.Tensor: ("self",), aten.div.Scalar: ("self",),
    aten.neg.default: ("self",), prims.convert_element_type.default: ("a",), aten._to_copy.default: ("self",),
}
"""Ops of which zero makes zero, or NaN, and the names of the arguments of which one has to be zero for that."""


@dataclass(frozen=True)
class OneHot:
    """A tensor that is zero along a dimension but in one place.

    Attributes:
        base: The op that puts something there.
        index: The place, of size 1 along the dimension.
        value: What is there: a number, or a tensor that is the same along the dimension.
        length: Of the dimension, if the index may be beyond its ends; None if a kernel checks that it is not.
        ops: What is computed of the base, each of the one before.
    """

    base: Node
    index: Node
    value: Any
    length: int | None
    ops: tuple[Node, ...] = ()


def sum_one_hots(module: GraphModule) -> None:
    """Replace sums along a dimension in which all but one element are zero, in place."""
    for node in list(module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        given = arguments(node)
        source, dims = given["self"], given["dim"]
        if dims and len(dims) == 1 and _is_floating(source) and _is_floating(node) and _sizes(source):
            dim = dims[0] % len(_sizes(source))
            if (one_hot := _one_hot(source, dim)) is not None:
                node.replace_all_uses_with(_sum(node, dim, one_hot))
    module.graph.eliminate_dead_code()


# What is zero but in one place ----------------------------------------------------------------------------------------


def _one_hot(node: Node, dim: int) -> OneHot | None:
    """Return what is known of a tensor that is zero along a dimension but in one place; None of any other."""
    ops: list[Node] = []
    while node.target in KEEP_ZERO:
        inner = _zero_operand(node, dim)
        if inner is None:
            return None
        ops.append(node)
        node = inner
    base = _scattered(node, dim) or _selected(node, dim)
    return None if base is None else replace(base, ops=tuple(reversed(ops)))


def _zero_operand(node: Node, dim: int) -> Node | None:
    """Return the operand of an op that may be zero but in one place; None unless the others are the same everywhere."""
    given = arguments(node)
    varying = [operand for operand in node.all_input_nodes if not _is_same(operand, node, dim)]
    if len(varying) != 1 or varying[0] not in [given[name] for name in KEEP_ZERO[node.target]]:
        return None
    return varying[0] if _sizes(varying[0]) == _sizes(node) and _is_floating(varying[0]) else None


def _scattered(node: Node, dim: int) -> OneHot | None:
    """Return what is known of a scatter of one element into zeros."""
    if node.target not in (aten.scatter.value, aten.scatter.src):
        return None
    given = arguments(node)
    index, value = given["index"], given.get("src", given.get("value"))
    if given["dim"] % max(len(_sizes(node)), 1) != dim or not is_zeros(given["self"]):
        return None
    return _known(node, dim, index, value, None)


def _selected(node: Node, dim: int) -> OneHot | None:
    """Return what is known of ``where(position == index, value, 0)``."""
    if node.target is not aten.where.self:
        return None
    condition, value, other = node.args
    length = node.meta["val"].shape[dim] if dim < node.meta["val"].dim() else None
    if not isinstance(condition, Node) or condition.target is not aten.eq.Tensor or not is_zeros(other):
        return None
    if not isinstance(length, int):
        return None
    for position, index in (condition.args, condition.args[::-1]):
        if isinstance(position, Node) and isinstance(index, Node) and _is_position(position, node, dim):
            single = index.args[0] if index.target is aten.expand.default else index
            return _known(node, dim, single, value, length)  # type: ignore[arg-type]
    return None


def _known(base: Node, dim: int, index: Node, value: Any, length: int | None) -> OneHot | None:
    """Return a one-hot tensor if its index and its value have size 1 along a dimension, and the base's sizes elsewhere.

    Args:
        base: The op that makes it.
        dim: The dimension.
        index: The place along it.
        value: What is there.
        length: Of the dimension, if the index is to be checked.
    """
    sizes = [1 if d == dim else size for d, size in enumerate(_sizes(base))]
    if _sizes(index) != sizes or index.meta["val"].dtype not in (torch.int32, torch.int64):
        return None
    if isinstance(value, Node) and not _is_tensor(value):
        return None
    if isinstance(value, Node):
        is_like = value.meta["val"].dtype is base.meta["val"].dtype and value.meta["val"].dim() <= len(sizes)
        if not is_like or not _is_same(value, base, dim):
            return None
    return OneHot(base, index, value, length)


def _is_position(node: Node, like: Node, dim: int) -> bool:
    """Return whether a tensor counts the places along a dimension of another one, from 0 on."""
    own, sizes = dim - len(_sizes(like)) + len(_sizes(node)), _sizes(node)
    if own < 0 or sizes[own] != _sizes(like)[dim] or any(size != 1 for place, size in enumerate(sizes) if place != own):
        return False
    while node.target in RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return is_count(node)


def _is_same(operand: Node, node: Node, dim: int) -> bool:
    """Return whether an operand is the same along a dimension of the tensor that it is broadcast to; numbers are."""
    if not _is_tensor(operand):
        return True
    own = dim - len(_sizes(node)) + len(_sizes(operand))
    return own < 0 or bool(_sizes(operand)[own] == 1)


def _sizes(node: Node) -> list[Any]:
    return [as_expr(size) for size in node.meta["val"].shape]


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_floating(node: Node) -> bool:
    return _is_tensor(node) and bool(node.meta["val"].dtype.is_floating_point)


# The sum --------------------------------------------------------------------------------------------------------------


def _sum(total: Node, dim: int, one_hot: OneHot) -> Node:
    """Insert what a sum is: what there is in the one place, and what has become of a zero."""
    def filled(value: float) -> Node:
        return insert(total, aten.full_like.default, (one_hot.index, value), dtype=one_hot.base.meta["val"].dtype)

    zero, value = filled(0.0), one_hot.value
    hit = insert(total, aten.mul.Tensor, (filled(1.0), value)) if isinstance(value, Node) else filled(value)
    if one_hot.length is not None:
        is_after = insert(total, aten.ge.Scalar, (one_hot.index, 0))
        is_before = insert(total, aten.lt.Scalar, (one_hot.index, one_hot.length))
        hit = insert(total, aten.where.self, (insert(total, aten.logical_and.default, (is_after, is_before)), hit, zero))
    inner = one_hot.base
    for op in one_hot.ops:
        hit, zero = (_again(total, op, inner, term) for term in (hit, zero))
        inner = op
    result = insert(total, aten.add.Tensor, (hit, zero))
    if not arguments(total)["keepdim"]:
        result = insert(total, aten.squeeze.dim, (result, dim))
    dtype = total.meta["val"].dtype
    if result.meta["val"].dtype is not dtype:
        result = insert(total, prims.convert_element_type.default, (result, dtype))
    return result


def _again(total: Node, op: Node, inner: Node, term: Node) -> Node:
    """Insert an op of a one-hot tensor before its sum, of ``term`` in the place of ``inner``."""
    return insert(total, op.target, map_arg(op.args, lambda operand: term if operand is inner else operand), **op.kwargs)
