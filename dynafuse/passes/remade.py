"""What the backward makes again, whatever the cut says: integers of nothing but their place, and what is made of much less.

Torch's min-cut forbids to compute some ops again, such as remainders, whatever they are computed from, and keeps what a
library reads in the backward as it reads it. So a forward stores the indices of a ``roll``, which its backward loads and
checks, and rows that are repeated for each of many heads. The backward makes the indices where it reads them, and the rows
of what they repeat, which is kept instead.

Worked example: of ``x.roll(1, 0)`` over 64 rows a backward gets ``fmod(iota(64) + 63, 64)``; afterwards it computes that
where it reads it. Of ``bfloat16[2, 512, 1, 256]`` that is laid out for products as ``float32[2, 32, 512, 256]`` it gets 0.5
MB, not 34.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.fx import base, hint
from dynafuse.ops import Kind, lookup
from dynafuse.passes.saved import describe_times, saved_tensors

OF_PLACES = frozenset({Kind.POINTWISE, Kind.VIEW, Kind.INDEX, Kind.CREATION})
"""Kinds of ops by which an element is computed of elements at other places, a few at most."""

CHEAP = frozenset({Kind.POINTWISE, Kind.VIEW, Kind.CREATION})
"""Kinds of ops by which an element is computed of one element of each operand."""

MOST_NODES = 64
"""Of which a value may be computed: longer ones are rather kept."""

LEAST_TIMES = 8
"""How many times as large as what it is made of a value is that is made again: it is written once more."""


def make_again(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Have a backward make what need not be kept for it, or not in full; both graphs are changed in place.

    Integers that the backward hands to a library are in memory anyway, and kept. So are masks: of layers that differ in
    their masks alone, kernels that load these are the same.

    Args:
        forward: The forward graph.
        backward: The backward graph.
        results: How many of the forward's outputs come before those that it keeps.
    """
    output, first = forward.graph.output_node(), _first_call(backward.graph)
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    saved = saved_tensors(values, results, backward)
    less = _Less({values[position]: node for position, node in saved}, values[:results], backward.graph)
    places: dict[Node, Node] = {}
    is_changed = False
    for position, node in reversed(saved):
        value, sources = values[position], list[Node]()
        if (recipe := _recipe(value, node)) is not None:
            new = _put(recipe, first, places)
        elif (way := less.way_to(value)) is not None:
            nodes, sources = way
            inputs = less.inputs_for(sources, node)
            new, sources = _put(nodes, _first_user(node), inputs.copy()), [key for key in sources if key not in less.given]
            less.given |= inputs
        else:
            continue
        node.replace_all_uses_with(new)
        backward.graph.erase_node(node)
        less.given.pop(value)
        values[position:position + 1] = sources
        describe_times(output, position, len(sources))
        is_changed = True
    if is_changed:
        output.args = (tuple(values),)
        forward.graph.eliminate_dead_code()
        forward.recompile()
        backward.recompile()


def _put(nodes: Sequence[Node], before: Node, copies: dict[Node, Node]) -> Node:
    """Copy nodes of the forward to before one of the backward, and return the last one's copy.

    Args:
        nodes: The nodes, in order.
        before: The node of the backward.
        copies: The backward's nodes for some of the forward's; those that are made are added.
    """
    with before.graph.inserting_before(before):
        for node in nodes:
            if node not in copies:
                copies[node] = before.graph.node_copy(node, copies.__getitem__)
    return copies[nodes[-1]]


def _first_call(graph: Graph) -> Node:
    calls: Iterator[Node] = (node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    return next(calls)


def _first_user(given: Node) -> Node:
    users: Iterator[Node] = (node for node in given.graph.nodes if node in given.users)
    return next(users)


# Integers of their place ----------------------------------------------------------------------------------------------


def _recipe(value: Node, given: Node) -> list[Node] | None:
    """Return the nodes that a value is computed from, itself included, in graph order; None if that is an input.

    None, too, if the backward needs it in memory: ``given`` is what it is there.
    """
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
    return None if value.meta["val"].dtype is torch.bool or _is_passed_on(given) else sorted(nodes)


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


# What is made of much less --------------------------------------------------------------------------------------------


class _Less:
    """Finds what values can be made of that takes much less memory than they do.

    Args:
        given: What the backward is given of each value that is kept.
        results: The forward's outputs that the user gets.
        backward: The backward graph.
    """

    def __init__(self, given: Mapping[Node, Node], results: Sequence[Any], backward: Graph) -> None:
        self.given = dict(given)
        self._in_memory = frozenset(map(base, given))
        self._shown = frozenset(base(value) for value in results if isinstance(value, Node))
        self._names = frozenset(node.name for node in backward.nodes)
        self._needed: set[Node] = set()  # values that others are made of

    def way_to(self, value: Node) -> tuple[list[Node], list[Node]] | None:
        """Return the nodes that make floats, in order, and what they make them of; None if that is not much less."""
        tensor, own = value.meta["val"], base(value)
        is_floats = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        if not is_floats or value in self._needed or own in self._shown or not self.given[value].users:
            return None
        nodes, sources, stack = set[Node](), dict[Node, None](), [value]
        while stack:
            node = stack.pop()
            if node in nodes or node in sources:
                continue
            is_cheap = _kind(node) in CHEAP and len(nodes) < MOST_NODES
            if not is_cheap or (node not in (value, own) and (node in self.given or node in self._in_memory)):
                sources[node] = None
            else:
                nodes.add(node)
                stack.extend(node.all_input_nodes)
        return (sorted(nodes), list(sources)) if own in nodes and self._are_less(sources, own) else None

    def _are_less(self, sources: Collection[Node], own: Node) -> bool:
        """Return whether sources take much less memory than a value does, of which the backward computes none itself."""
        further = {base(source) for source in sources} - self._in_memory
        if not sources or not all(isinstance(node.meta.get("val"), torch.Tensor) for node in (*sources, *further)):
            return False
        if any(source not in self.given and source.name in self._names for source in sources):
            return False
        return _bytes(own) >= LEAST_TIMES * max(sum(map(_bytes, sources)), sum(map(_bytes, further)))

    def inputs_for(self, sources: Collection[Node], before: Node) -> dict[Node, Node]:
        """Return what the backward is given of sources, further inputs before one of its inputs among it."""
        self._needed.update(sources)
        return {source: self.given.get(source) or _input_before(before, source) for source in sources}


def _input_before(given: Node, source: Node) -> Node:
    """Return an input of the backward before another, for a value of the forward's."""
    with given.graph.inserting_before(given):
        node = given.graph.placeholder(source.name)
    node.meta = {**given.meta, **{key: source.meta[key] for key in ("val", "tensor_meta") if key in source.meta}}
    return node


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return math.prod(map(hint, value.shape)) * int(value.dtype.itemsize)
