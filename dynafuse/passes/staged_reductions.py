"""Reductions of all of a tensor whose rows are reduced already: of each row first, in the same kernel, then of what is left.

What comes of a softmax or a norm depends on whole rows, so that a kernel which reduces all of it can only read it again. A
kernel of rows can reduce each row itself, and what is left has one element a row.

That pays if what is read again is more than what is left, and if programs take whole rows: of few long ones each is spread
over several, whose parts are known only after the kernel.

Worked example: of ``log_softmax(x).mean()``, with ``x`` of 4096 × 32000, becomes ``log_softmax(x).mean(1, True).mean()``, of
which the second ``mean`` reads 4096 elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.fx import Size, arguments, fake_mode_of, hint, insert, size_of
from dynafuse.ops import Kind, lookup
from dynafuse.ops.literals import opmath
from dynafuse.ops.reductions import reduced_dims
from dynafuse.partition.kernel_class import SPLIT_ABOVE
from dynafuse.passes.cones import Cone, count

aten = torch.ops.aten
prims = torch.ops.prims

STAGED: dict[Any, Any] = {
    aten.sum.default: aten.sum.dim_IntList, aten.sum.dim_IntList: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim, aten.mean.dim: aten.mean.dim,
    aten.amax.default: aten.amax.default, aten.max.default: aten.amax.default,
    aten.amin.default: aten.amin.default, aten.min.default: aten.amin.default,
}
"""Reductions that are the same of parts and of what is left of these, with what reduces some dimensions alike."""

WIDENING = {aten.sum.dim_IntList, aten.mean.dim}
"""Those of them that add up, in a wider dtype than their result's."""


Rows: TypeAlias = tuple[tuple[Size, ...], frozenset[int]]
"""The sizes of a tensor, and those of its dimensions that are reduced."""

MOST_KINDS = 16
"""How many kinds of rows a value is followed through."""


def stage_reductions(module: GraphModule, processors: int, forced: Collection[Node]) -> None:
    """Reduce rows first where their kernel has read all that is to be reduced, in place.

    Args:
        module: The graph.
        processors: How many of them a kernel has.
        forced: The nodes that run eager.
    """
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    rows = _reduced_before(module.graph)
    for node in list(places):
        if node.target not in STAGED or node in forced:
            continue
        given = arguments(node)
        sizes = _sizes(given["self"])
        reduced = frozenset(reduced_dims(given, len(sizes)))
        may_pay = any(frozenset() < _dims_in(kind, sizes) < reduced for kind in rows[given["self"]])
        if may_pay and (dims := _rows_of(node, reduced, processors, places)):
            with fake_mode_of((node,)):
                staged = _stage(node, dims)
            places |= dict.fromkeys(staged, places[node])
            rows |= dict.fromkeys(staged, rows[node])


def _reduced_before(graph: Graph) -> dict[Node, frozenset[Rows]]:
    """Return what rows are reduced of which each value is computed by fused ops: none if they are of too many kinds."""
    before: dict[Node, frozenset[Rows]] = {}
    for node in graph.nodes:
        row = lookup(node.target)
        is_fused = row is not None and row.fusible
        kinds = frozenset[Rows]().union(*(before[operand] for operand in node.all_input_nodes)) if is_fused else frozenset()
        before[node] = (kinds if len(kinds) < MOST_KINDS else frozenset()) | _rows_reduced_by(node)
    return before


def _rows_reduced_by(node: Node) -> frozenset[Rows]:
    """Return what rows a call reduces; none if it is no reduction of a tensor."""
    row = lookup(node.target)
    if row is None or row.kind is not Kind.REDUCTION or not isinstance(operand := arguments(node).get("self"), Node):
        return frozenset()
    sizes = tuple(_sizes(operand))
    return frozenset({(sizes, frozenset(reduced_dims(arguments(node), len(sizes))))})


def _stage(node: Node, dims: Collection[int]) -> list[Node]:
    """Reduce some dimensions of what a call reduces before the others; return the calls that do, in its place."""
    target, given = STAGED[node.target], arguments(node)
    dtype = node.meta["val"].dtype
    wide = {"dtype": opmath(dtype)} if target in WIDENING else {}
    rows = insert(node, target, (given["self"], sorted(dims), True), **wide)
    rest = {name: given[name] for name in ("dim", "keepdim") if name in given}
    staged = [rows, insert(node, node.target, (rows, *rest.values()))]
    if staged[-1].meta["val"].dtype is not dtype:
        staged.append(insert(node, prims.convert_element_type.default, (staged[-1], dtype)))
    node.replace_all_uses_with(staged[-1])
    node.graph.erase_node(node)
    return staged


# What is reduced first ------------------------------------------------------------------------------------------------


def _rows_of(node: Node, reduced: frozenset[int], processors: int, places: Mapping[Node, int]) -> frozenset[int]:
    """Return the dimensions of what a call reduces that are rows of a kernel which has read it; none if it does not pay."""
    source = arguments(node)["self"]
    dtype, none = opmath(node.meta["val"].dtype), frozenset[int]()
    if not (dtype.is_floating_point and source.meta["val"].dtype.is_floating_point):
        return none
    cone = Cone.of(source)
    kinds = {dims for reduction in cone.reductions for dims in _dims_of(reduction, _sizes(source))}
    dims = kinds.pop() if len(kinds) == 1 else none
    if not dims or not dims < reduced or not _is_known_by_then(cone, places):
        return none
    length = max(math.prod(hint(source.meta["val"].shape[dim]) for dim in dims), 1)
    left, read_again = count(source) // length, cone.read_again or 0
    are_whole = left >= 2 * processors or (length <= SPLIT_ABOVE and all(count(rows) == left for rows in cone.reductions))
    return dims if are_whole and read_again > 2 * left * dtype.itemsize else none


def _is_known_by_then(cone: Cone, places: Mapping[Node, int]) -> bool:
    """Return whether all large operands of a cone are there before its last reduction: none depends on that."""
    size, last = count(cone.nodes[-1]) if cone.nodes else 0, max(places[node] for node in cone.reductions)
    return all(places[operand] < last for operand in cone.operands if count(operand) >= size)


def _dims_of(reduction: Node, sizes: Sequence[Size]) -> set[frozenset[int]]:
    """Return which dimensions of some sizes a call reduces; an empty set of them where that is not known, as of a scan."""
    return {_dims_in(rows, sizes) for rows in _rows_reduced_by(reduction)} or {frozenset()}


def _dims_in(rows: Rows, sizes: Sequence[Size]) -> frozenset[int]:
    """Return which dimensions of some sizes rows are; none where that is not known.

    These are of the sizes that the rows are of, or of others whose last dimensions are as many elements: ``[8, 512, 768]``
    for ``[4096, 768]``.
    """
    own, dims = rows
    if own == tuple(sizes):
        return dims
    rest = len(own) - len(dims)
    if dims != frozenset(range(rest, len(own))):
        return frozenset()
    trailing = math.prod(own[rest:])
    fitting = (k for k in range(len(sizes), -1, -1) if math.prod(sizes[k:]) == trailing)
    return frozenset(range(next(fitting, len(sizes)), len(sizes)))


def _sizes(node: Node) -> list[Size]:
    return [size_of(size) for size in node.meta["val"].shape]
