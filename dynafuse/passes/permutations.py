"""Scatters at the places of a permutation, as gathers from the places of its inverse.

What experts compute is sorted by expert and put back in order; the gradient of either is a scatter. At the places that a
sort returns every row is written once, so that nothing is added up. Where a few rows follow each other to one place, as the
copies of a token do, there is a sum of that many rows. Gathers need neither atomic additions, for which 16-bit floats are
widened, nor zeros to begin with, and whatever kernel reads them computes them.

The inverse is looked for in the graph. Where there is none, a scatter of 0, 1, 2 … at the permutation makes it. That is what
sorting a permutation comes to as well.

Worked example: with ``p = sort(expert)[1]`` of 32,768 rows, 8 a token, ``index_put(zeros(4096, 64), [p // 8], rows, True)``
becomes ``sum(view(index(rows, [q]), [4096, 8, 64]), [1])``, where ``q = index_put(empty(32768), [p], iota(32768))``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from dynafuse.fx import arguments, fake_mode_of, insert, is_count, is_zeros, looked_at

aten, prims = torch.ops.aten, torch.ops.prims

SORTS = frozenset({aten.sort.default, aten.sort.stable})
DIVISIONS = frozenset({aten.div.Tensor_mode, aten.floor_divide.default})
IN_ORDER = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
                      aten.squeeze.dim, aten.clone.default, aten.detach.default, aten.alias.default})
"""Ops whose result has the elements of their first operand in the same order."""


@dataclass(frozen=True)
class Scatter:
    """A scatter along the first dimension: ``rows[i]`` is written, or added, to ``base[place[i]]``."""

    base: Node
    place: Node
    rows: Node
    adds: bool


@dataclass(frozen=True)
class Permutations:
    """The values of a graph that are permutations of 0, 1, 2 …, and the inverses of those that have one."""

    inverses: dict[Node, Node | None] = field(default_factory=dict)

    def add(self, node: Node, inverse: Node | None = None) -> None:
        """Note that a value is a permutation, and which one is its inverse, if that is known."""
        self.inverses[node] = inverse
        if inverse is not None and self.inverses[inverse] is None:
            self.inverses[inverse] = node

    def inverse(self, node: Node, before: Node) -> Node:
        """Return the inverse of a permutation, inserted before a node if the graph has none so far."""
        known = self.inverses[node]
        if known is None:
            known = _inserted_inverse(node, before)
            self.add(known, node)
        return known


def gather_by_inverses(graph: Graph, eager: Collection[Node] = ()) -> None:
    """Replace scatters at the places of permutations by gathers, in place.

    Args:
        graph: A graph of ATen ops: forward and backward as one where there are both.
        eager: Nodes that are to stay as they are.
    """
    permutations = Permutations()
    for node in list(graph.nodes):
        if node.op != "call_function" or node in eager:
            continue
        if _is_order(node):
            _note_order(node, permutations)
        elif (scatter := _scatter(node)) is not None:
            place, counts = _origin(scatter.place), is_count(_origin(scatter.rows)) and not scatter.adds
            if counts and place in permutations.inverses and _has_size(scatter, place):
                permutations.add(node, place)
            elif (gathered := _gathered(node, scatter, permutations)) is not None:
                node.replace_all_uses_with(gathered)
    graph.eliminate_dead_code()


# Permutations ---------------------------------------------------------------------------------------------------------


def _origin(node: Node) -> Node:
    """Return the value that has the same elements in the same order, before views and copies."""
    return looked_at(node, lambda value: value.target in IN_ORDER)


def _is_order(node: Node) -> bool:
    """Return whether a value is the order that a sort of one dimension returns."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return isinstance(source, Node) and source.target in SORTS and len(arguments(source)["self"].meta["val"].shape) == 1


def _note_order(order: Node, permutations: Permutations) -> None:
    """Note that a sort's order is a permutation: of a permutation it is the inverse, for which nothing need be sorted."""
    given = arguments(order.args[0])  # type: ignore[arg-type]
    origin = _origin(given["self"])
    is_inverse = origin in permutations.inverses and not given["descending"]
    if is_inverse and isinstance(order.meta["val"].shape[0], int):
        order.replace_all_uses_with(permutations.inverse(origin, order))
    else:
        permutations.add(order)


def _inserted_inverse(permutation: Node, before: Node) -> Node:
    value = permutation.meta["val"]
    with fake_mode_of((permutation,)):
        memory = insert(before, aten.empty.memory_format, (list(value.shape),), dtype=torch.int64, device=value.device)
        count = insert(before, prims.iota.default, (value.shape[0],), start=0, step=1, dtype=torch.int64,
                       device=value.device, requires_grad=False)
        return insert(before, aten.index_put.default, (memory, [permutation], count))


# Scatters -------------------------------------------------------------------------------------------------------------


def _scatter(node: Node) -> Scatter | None:
    """Return what a call scatters along the first dimension at places of one dimension; None if it does no such thing."""
    if node.target is aten.index_put.default:
        given = arguments(node)
        places, rows = given["indices"], given["values"]
        if len(places) != 1 or not isinstance(places[0], Node):
            return None
        scatter = Scatter(given["self"], places[0], rows, bool(given["accumulate"]))
    elif node.target in (aten.scatter_add.default, aten.scatter.src):
        given = arguments(node)
        place = _row_of(given["index"]) if given["dim"] == 0 else None
        if place is None:
            return None
        scatter = Scatter(given["self"], place, given["src"], node.target is aten.scatter_add.default)
    else:
        return None
    return scatter if _fits(scatter) else None


def _row_of(index: Node) -> Node | None:
    """Return the value that an index of rows is made of, if it is the same along all other dimensions."""
    sizes = index.meta["val"].shape
    if index.target is aten.expand.default:
        index = index.args[0]  # type: ignore[assignment]
    narrow = index.meta["val"].shape
    is_same = len(narrow) == len(sizes) and all(size == 1 for size in narrow[1:])
    return index if is_same and narrow[:1] == sizes[:1] else None


def _fits(scatter: Scatter) -> bool:
    """Return whether there is a place for each row, rows are as long as the base's, and all sizes are known."""
    base, place, rows = (node.meta["val"] for node in (scatter.base, scatter.place, scatter.rows))
    if not (base.dim() and place.dim() and rows.dim()):
        return False
    sizes = [*base.shape, *place.shape, *rows.shape]
    return (all(isinstance(size, int) and size for size in sizes) and place.dtype is torch.int64
            and place.numel() == place.shape[0] == rows.shape[0] and rows.shape[1:] == base.shape[1:]
            and (place.dim() == 1 or rows.dim() == place.dim()) and rows.dtype is base.dtype)


def _has_size(scatter: Scatter, permutation: Node) -> bool:
    """Return whether a scatter at a permutation's places writes all of its base."""
    length: int = permutation.meta["val"].shape[0]
    return bool(scatter.base.meta["val"].shape[0] == length)


def _gathered(node: Node, scatter: Scatter, permutations: Permutations) -> Node | None:
    """Insert what a scatter comes to, gathered; return None if its places are not those of a permutation."""
    permutation, copies = _followed(scatter.place)
    length, *row = scatter.rows.meta["val"].shape
    if permutation not in permutations.inverses or scatter.base.meta["val"].shape[0] * copies != length:
        return None
    if copies > 1 and not scatter.adds:
        return None
    inverse = permutations.inverse(permutation, node)
    gathered = insert(node, aten.index.Tensor, (scatter.rows, [inverse]))
    if copies > 1:
        apart = insert(node, aten.view.default, (gathered, [length // copies, copies, *row]))
        gathered = insert(node, aten.sum.dim_IntList, (apart, [1]), dtype=scatter.rows.meta["val"].dtype)
    if scatter.adds and not is_zeros(scatter.base):
        return insert(node, aten.add.Tensor, (scatter.base, gathered))
    return gathered


def _followed(place: Node) -> tuple[Node, int]:
    """Return the value whose elements, divided by a number, are places, and the number: 1 where nothing is divided."""
    origin = _origin(place)
    if origin.target in DIVISIONS:
        given = arguments(origin)
        if isinstance(given["other"], int) and given["other"] > 0 and given.get("rounding_mode", "floor") is not None:
            return _origin(given["self"]), given["other"]
    if origin.target is aten.index.Tensor and len(indices := arguments(origin)["indices"]) == 1:
        copies = _copies(arguments(origin)["self"])
        if copies is not None and isinstance(indices[0], Node):
            return _origin(indices[0]), copies
    return origin, 1


def _copies(node: Node) -> int | None:
    """Return how often each number is repeated in 0, 0, 1, 1 …; None of other values."""
    origin = _origin(node)
    if origin.target is not aten.expand.default or origin.meta["val"].dim() != 2 or node.meta["val"].dim() != 1:
        return None
    single: Any = origin.args[0]
    rows, copies = origin.meta["val"].shape
    is_repeated = tuple(single.meta["val"].shape) == (rows, 1) and isinstance(copies, int) and is_count(_origin(single))
    return copies if is_repeated else None
