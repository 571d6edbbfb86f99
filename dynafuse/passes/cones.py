"""Cones: what computes a value point by point, and may be computed once more in another kernel.

A kernel that reduces rows runs along them, so it cannot write rows of another length. A copy of the cone of what it returns
ends in a kernel of its own, which takes what was reduced and reads again what the reductions read.

Worked example: of ``g = (onehot - exp(x - lse) * sum(onehot, -1)).bfloat16()`` the cone is all but ``x``, ``lse`` and the
sum; its reductions read no tensor of ``x``'s size, so computing it apart from them reads nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from dynafuse.fx import hint, is_view, looked_at
from dynafuse.ops import Kind, lookup
from dynafuse.passes.scatters import scatter_of

ANYWHERE = frozenset({Kind.POINTWISE, Kind.VIEW, Kind.CREATION, Kind.GATHER, Kind.INDEX})
"""Kinds of ops whose values can be computed at any index."""


@dataclass(frozen=True)
class Cone:
    """The ``nodes`` that compute a value, in the order of the graph, each at least of its size; their other operands.

    ``reductions`` are those of tensors of that size on which the operands depend.
    """

    nodes: tuple[Node, ...]
    operands: frozenset[Node]
    reductions: frozenset[Node]

    @staticmethod
    def of(value: Node) -> Cone:
        """Return the cone of a value."""
        size = count(value)
        inside, operands = _walked([value], size)
        reductions = frozenset(_reductions(operands, size))
        nodes = tuple(node for node in value.graph.nodes if node in inside)
        return Cone(nodes, frozenset(operands), reductions)

    @property
    def read_again(self) -> int | None:
        """Count the bytes that a kernel reads for the cone after another one for its reductions; None if there is no such.

        There is none where an operand of full size would have to be stored for it.
        """
        size = count(self.nodes[-1]) if self.nodes else 0
        large = {looked_at(operand, is_view) for operand in self.operands if count(operand) >= size}
        if not self.nodes or any(_is_fused(operand) for operand in large):
            return None
        _, reduced = _walked([operand for node in self.reductions for operand in node.all_input_nodes], size)
        again = large & {looked_at(operand, is_view) for operand in reduced}
        return sum(count(tensor) * int(tensor.meta["val"].dtype.itemsize) for tensor in again)

    def copied(self, before: Node) -> Mapping[Node, Node]:
        """Insert copies of the nodes before another one, and return them by what they are copies of."""
        copies: dict[Node, Node] = {}
        with before.graph.inserting_before(before):
            for node in self.nodes:
                copies[node] = before.graph.node_copy(node, lambda operand: copies.get(operand, operand))
        return copies


def count(node: Node) -> int:
    """Return how many elements a tensor has; 0 for what is none."""
    value = node.meta.get("val")
    return math.prod(map(hint, value.shape)) if isinstance(value, torch.Tensor) else 0


def _walked(values: list[Node], size: int) -> tuple[set[Node], set[Node]]:
    """Return the nodes of at least a size that compute values at any index, and what else they or the caller read."""
    inside, operands, asked = set[Node](), set[Node](), list(values)
    while asked:
        node = asked.pop()
        row = lookup(node.target)
        is_anywhere = row is not None and row.kind in ANYWHERE and row.fusible and scatter_of(node) is None
        if not is_anywhere or count(node) < size:
            operands.add(node)
        elif node not in inside:
            inside.add(node)
            asked += node.all_input_nodes
    return inside, operands


def _reductions(operands: set[Node], size: int) -> Iterator[Node]:
    """Yield the reductions of tensors of a size on which operands depend by fused ops."""
    seen, asked = set[Node](), list(operands)
    while asked:
        node = asked.pop()
        row = lookup(node.target)
        if node in seen or row is None or not row.fusible:
            continue
        seen.add(node)
        if row.kind.needs_rows and any(count(operand) >= size for operand in node.all_input_nodes):
            yield node
        asked += node.all_input_nodes


def _is_fused(node: Node) -> bool:
    row = lookup(node.target)
    return row is not None and row.fusible
