"""Reductions over some dimensions, of what is reduced over fewer of them as well: made of those results, not of it all.

A sum's partial sums have to be exact enough: they are in float32 or wider, or integers. An extreme's are elements.

Worked example: of ``rows = y.sum(-1)`` and ``total = y.sum((-2, -1))``, in float32, ``total`` becomes ``rows.sum(-1)``, so
that ``y``, if it is large, is read once. Contact maps of proteins are corrected by such sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from dynafuse.fx import arguments, fake_mode_of, insert, is_one
from dynafuse.ops.reductions import keepdim, reduced_dims
from dynafuse.partition.accuracy import NARROW
from dynafuse.passes.cones import count
from dynafuse.passes.staged_reductions import STAGED, WIDENING
from dynafuse.passes.strides import same_layout

aten = torch.ops.aten

LEAST_BYTES = 16 << 20
"""Of what is reduced, those that take longer to read again than a kernel to start. Small sums share kernels with others."""


def nest_reductions(module: GraphModule) -> None:
    """Replace reductions in the graph by those of smaller results, in place; strides stay as they were."""
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.target in STAGED and _is_exact_enough(node) and _is_large(operand := arguments(node)["self"]):
            groups[operand, STAGED[node.target], node.meta["val"].dtype].append(node)
    for group in groups.values():
        if len(group) > 1:
            _nest(group)


def _is_exact_enough(node: Node) -> bool:
    dtype = node.meta["val"].dtype
    return STAGED[node.target] not in WIDENING or not (dtype in NARROW or dtype.itemsize == 1 or dtype.is_complex)


def _is_large(operand: Node) -> bool:
    itemsize: int = operand.meta["val"].dtype.itemsize
    return count(operand) * itemsize >= LEAST_BYTES


def _nest(group: list[Node]) -> None:
    """Make each of some reductions of one operand of that one which leaves least of the same elements, if there is any."""
    over = {node: _longer_dims(node) for node in group}
    dims = {node: _dims(node) for node in group}
    order = {node: place for place, node in enumerate(group)}
    results = {node: node for node in group}
    for node in sorted(group, key=lambda node: len(over[node])):
        smaller = [other for other in group if over[other] < over[node]]
        inner = max(smaller, key=lambda other: len(over[other]), default=None)
        if inner is None:
            continue
        if order[inner] > order[node]:
            if results[inner] is not inner:
                continue
            node.prepend(inner)  # which reads nothing but what both reduce
        results[node] = _remade(node, results[inner], dims[inner])


def _dims(node: Node) -> tuple[int, ...]:
    given = arguments(node)
    return reduced_dims(given, given["self"].meta["val"].ndim)


def _longer_dims(node: Node) -> frozenset[int]:
    sizes = arguments(node)["self"].meta["val"].shape
    return frozenset(dim for dim in _dims(node) if not is_one(sizes[dim]))


def _remade(node: Node, inner: Node, inner_dims: Sequence[int]) -> Node:
    """Replace a reduction by that of another's result, and return what there is then.

    Args:
        node: The reduction.
        inner: The result.
        inner_dims: What it is the reduction over.
    """
    rank, partial = arguments(node)["self"].meta["val"].ndim, inner
    with fake_mode_of((node,)):
        if inner.meta["val"].ndim < rank:
            for dim in inner_dims:
                partial = insert(node, aten.unsqueeze.default, (partial, dim))
        result = insert(node, STAGED[node.target], (partial, list(_dims(node)), keepdim(arguments(node))))
    if not same_layout(result.meta["val"], node.meta["val"]):
        return node  # the new one is dead code, which is removed in the end
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return result
