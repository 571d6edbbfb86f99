"""Integers that depend on nothing but their place: the backward computes them again, and the forward keeps none.

Torch's min-cut forbids to compute some ops again, such as remainders, whatever they are computed from. So a forward stores
the indices of a ``roll``, and its backward loads and checks them.

Worked example: of ``x.roll(1, 0)`` over 64 rows a backward gets ``fmod(iota(64) + 63, 64)``; afterwards it computes that
where it reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dynafuse.ops import Kind, lookup
from dynafuse.passes.saved import describe_times, saved_tensors

OF_PLACES = frozenset({Kind.POINTWISE, Kind.VIEW, Kind.INDEX, Kind.CREATION})
"""Kinds of ops by which an element is computed of elements at other places, a few at most."""

MOST_NODES = 64
"""Of which a value may be computed: longer ones are rather kept."""


def make_places_again(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Have a backward compute what its forward keeps of integers that depend on no input; both in place.

    Integers that the backward hands to a library are in memory anyway, and kept. So are masks: of layers that differ in
    their masks alone, kernels that load these are the same.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        results: How many of the forward's outputs come before those that it keeps.
    """
    output = forward.graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    first = next(node for node in backward.graph.nodes if node.op not in ("placeholder", "get_attr"))
    copies: dict[Node, Node] = {}
    for position, given in reversed(saved_tensors(values, results, backward)):
        recipe = _recipe(values[position])
        if recipe is None or values[position].meta["val"].dtype is torch.bool or _is_passed_on(given):
            continue
        with backward.graph.inserting_before(first):
            for node in recipe:
                if node not in copies:
                    copies[node] = backward.graph.node_copy(node, copies.__getitem__)
        given.replace_all_uses_with(copies[values[position]])
        backward.graph.erase_node(given)
        del values[position]
        describe_times(output, position, 0)
    if copies:
        output.args = (tuple(values),)
        forward.graph.eliminate_dead_code()
        forward.recompile()
        backward.recompile()


def _recipe(value: Node) -> list[Node] | None:
    """Return the nodes that a value is computed from, itself included, in graph order; None if that is an input."""
    nodes: set[Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in nodes:
            continue
        if len(nodes) == MOST_NODES or not _is_of_places(node):
            return None
        nodes.add(node)
        stack.extend(node.all_input_nodes)
    return sorted(nodes)


def _is_of_places(node: Node) -> bool:
    """Return whether a node computes integers or bools of such, or of nothing."""
    tensor = node.meta.get("val")
    is_whole = isinstance(tensor, torch.Tensor) and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return is_whole and _kind(node) in OF_PLACES


def _is_passed_on(node: Node) -> bool:
    """Return whether a call that is no kernel of ours reads a node, or a view of it."""
    kinds = {user: _kind(user) for user in node.users}
    return any(kind is Kind.OPAQUE or (kind is Kind.VIEW and _is_passed_on(user)) for user, kind in kinds.items())


def _kind(node: Node) -> Kind:
    row = lookup(node.target)
    return Kind.OPAQUE if row is None else row.kind
