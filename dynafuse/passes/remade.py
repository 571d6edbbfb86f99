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
from collections import Counter
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

UNCHECKED = "saved_tensor_with_no_vc_check"
"""The metadata of values whose versions torch does not check."""

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
    is_changed = _make_places_again(forward, backward, results)
    if _make_of_less(forward, backward, results) or is_changed:
        for module in (forward, backward):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()


def _make_places_again(forward: GraphModule, backward: GraphModule, results: int) -> bool:
    """Make integers of their place again, before all that the backward computes; tell whether there were any."""
    first, places = _first_call(backward.graph), dict[Node, Node]()
    for position, value, given in _saved(forward, backward, results):
        recipe = _recipe(value, given)
        if recipe is not None:
            _replace(forward, given, position, _put(recipe, first, places), [])
    return bool(places)


def _make_of_less(forward: GraphModule, backward: GraphModule, results: int) -> bool:
    """Make what is made of much less again, before it is first read; tell whether there was any."""
    saved = _saved(forward, backward, results)
    less = _Less({value: given for _, value, given in saved}, _outputs(forward)[:results], backward.graph)
    is_changed = False
    for position, value, given in saved:
        way = less.way_to(value)
        if way is not None:
            nodes, sources = way
            further = [source for source in sources if source not in less.given]
            copies = less.inputs_instead(value, sources)
            _replace(forward, given, position, _put(nodes, _first_user(given), copies), further)
            is_changed = True
    return is_changed


def _outputs(forward: GraphModule) -> list[Any]:
    return list(forward.graph.output_node().args[0])  # type: ignore[arg-type]


def _saved(forward: GraphModule, backward: GraphModule, results: int) -> list[tuple[int, Node, Node]]:
    """Return the position of each tensor that is kept, the last one first, with what the backward is given of it."""
    values = _outputs(forward)
    return [(position, values[position], given) for position, given in reversed(saved_tensors(values, results, backward))]


def _replace(forward: GraphModule, given: Node, position: int, new: Node, sources: Sequence[Node]) -> None:
    """Put what the backward computes in the place of what it was given, and keep sources of that instead.

    Args:
        forward: The forward graph.
        given: The input of the backward, which goes.
        position: Where the value was among the forward's outputs.
        new: What is computed.
        sources: What the forward returns instead, in the order of the backward's inputs.
    """
    given.replace_all_uses_with(new)
    given.graph.erase_node(given)
    output, values = forward.graph.output_node(), _outputs(forward)
    values[position:position + 1] = sources
    output.args = (tuple(values),)
    describe_times(output, position, len(sources))


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
        self._in_memory = Counter(map(base, given))
        self._shown = frozenset(base(value) for value in results if isinstance(value, Node))
        self._backward = backward
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
            if not is_cheap or (node not in (value, own) and (node in self.given or self._in_memory[node] > 0)):
                sources[node] = None
            else:
                nodes.add(node)
                stack.extend(node.all_input_nodes)
        may_be = own in nodes and self._are_less(sources, own) and self._may_be_kept(value, sources)
        return (sorted(nodes), list(sources)) if may_be else None

    def _are_less(self, sources: Collection[Node], own: Node) -> bool:
        """Return whether sources take much less memory than a value does."""
        further = {base(source) for source in sources if self._in_memory[base(source)] <= 0}
        if not sources or not all(isinstance(node.meta.get("val"), torch.Tensor) for node in (*sources, *further)):
            return False
        return _bytes(own) >= LEAST_TIMES * max(sum(map(_bytes, sources)), sum(map(_bytes, further)))

    def _may_be_kept(self, value: Node, sources: Collection[Node]) -> bool:
        """Return whether sources may be kept instead of a value.

        An input may not that is not kept anyway: the user may write to it before the backward runs. What the backward
        computes itself has its name there already. Torch tells apart what it checks to be as it was by where it is returned.
        """
        further = [source for source in sources if source not in self.given]
        names = {node.name for node in self._backward.nodes}
        return not any(source.op == "placeholder" or source.name in names for source in further) and not any(
            UNCHECKED in node.meta for node in (value, *sources))

    def inputs_instead(self, value: Node, sources: Collection[Node]) -> dict[Node, Node]:
        """Return what the backward is given of sources, those inputs among it that it gets in the place of a value's."""
        before = self.given.pop(value)
        self._in_memory[base(value)] -= 1
        self._needed.update(sources)
        for source in sources:
            if source not in self.given:
                self.given[source] = _input_before(before, source)
                self._in_memory[base(source)] += 1
        return {source: self.given[source] for source in sources}


def _input_before(given: Node, source: Node) -> Node:
    """Return an input of the backward before another, for a value of the forward's."""
    with given.graph.inserting_before(given):
        node = given.graph.placeholder(source.name)
    node.meta = {**given.meta, **{key: source.meta[key] for key in ("val", "tensor_meta") if key in source.meta}}
    return node


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    return math.prod(map(hint, value.shape)) * int(value.dtype.itemsize)
