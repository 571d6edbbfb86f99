"""Scatters into inputs, in place: what writes some rows of a cache does not copy the cache.

Where a model writes into an input, AOTAutograd hands over a graph that computes the input's new value beside the old one,
and copies it into the input at the end. For a cache of keys that gets one row a step these are two copies of all of it. So
a scatter whose result is an input's new value is noted to run in the input's memory (``IN_PLACE``), if what else reads the
old value can run before it; the copy at the end then has nothing to do. The graph's ops stay as they are, so that it
computes the same node by node.

Values that replace a slice, or the slice of a slice, are brought into the form of a scatter first. Those that replace more
than half of an input are not: what reads the result then shares a kernel with what makes it.

Worked example::

    k = index_copy(cache, 2, position, key)
    y = attention(query, k)
    copy_(cache, k)

stays, with ``k`` noted: whether a kernel or eager computes it, it writes ``key`` into ``cache``, and ``copy_`` is not run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from dynafuse.fx import IN_PLACE, arguments, hint, insert, is_returned, shares_memory, size_node
from dynafuse.ops.overloads import COPIES_INTO, in_place_variant
from dynafuse.passes.scatters import scatter_of

aten, prims = torch.ops.aten, torch.ops.prims


def note_in_place(module: GraphModule) -> GraphModule:
    """Note the scatters that run in the memory of inputs, and return the module."""
    for copy in module.graph.find_nodes(op="call_function", target=COPIES_INTO):
        target, value = copy.args[:2]
        if not (isinstance(target, Node) and target.op == "placeholder" and isinstance(value, Node)):
            continue
        value = _as_scatter(target, value)
        chain = _chain(target, value)
        if chain and _may_overwrite(target, chain, copy):
            for node in chain:
                node.meta[IN_PLACE] = True
    module.graph.eliminate_dead_code()
    return module


# Which scatters -------------------------------------------------------------------------------------------------------


def _chain(target: Node, value: Node) -> list[Node]:
    """Return the scatters that compute the new value of an input, one after the other in the same memory; else none."""
    chain: list[Node] = []
    while value is not target:
        if not _scatters(value) or not _alike(value, target):
            return []
        if chain and (list(value.users) != [chain[-1]] or _reads(chain[-1]).count(value) != 1):
            return []
        chain.append(value)
        value = value.all_input_nodes[0]
    return chain


def _scatters(node: Node) -> bool:
    """Return whether an op writes some values into a copy of its first operand, and has a variant that does without."""
    if scatter_of(node) is None or in_place_variant(node.target) is None:
        return False
    return bool(node.args) and node.args[0] is arguments(node)["self"]


def _alike(node: Node, target: Node) -> bool:
    """Return whether a value has the layout and the dtype of an input."""
    value, into = node.meta.get("val"), target.meta.get("val")
    if not (isinstance(value, torch.Tensor) and isinstance(into, torch.Tensor)):
        return False
    same = value.dtype is into.dtype and value.device == into.device and value.dim() == into.dim()
    sizes = zip((*value.shape, *value.stride()), (*into.shape, *into.stride()), strict=True) if same else ()
    return same and all(statically_known_true(left == right) for left, right in sizes)


def _may_overwrite(target: Node, chain: Sequence[Node], copy: Node) -> bool:
    """Return whether an input may have its new value early: all readers of the old one can run before."""
    first = chain[-1]
    if _reads(first).count(target) != 1 or any(map(is_returned, chain)):
        return False
    readers = [reader for reader in _readers(target) if reader is not copy]
    if readers == [first]:
        return True
    later = _later(chain)
    is_late = any(reader in later or reader.op == "output" or _writes(reader) for reader in readers)
    return readers.count(first) == 1 and not is_late


def _readers(node: Node) -> Iterator[Node]:
    """Yield what reads a node's memory, through views; not what only asks for its sizes."""
    for user in node.users:
        if shares_memory(user):
            yield from _readers(user)
        elif user.op == "output" or not isinstance(user.meta.get("val"), (torch.SymInt, int)):
            yield user


def _later(chain: Sequence[Node]) -> set[Node]:
    """Return what needs the result of a scatter, but not those after it in its chain."""
    later: set[Node] = set()
    stack = list(chain[0].users)
    while stack:
        node = stack.pop()
        if node not in later:
            later.add(node)
            stack.extend(node.users)
    return later


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _reads(node: Node) -> list[Node]:
    """Return the operands of a call, each as often as it is given."""
    reads: list[Node] = []
    map_arg((node.args, node.kwargs), reads.append)
    return reads


# Slices ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """Places along a dimension: ``count`` from ``start`` on, every ``step``-th; or one that is ``selected``.

    Values have no dimension for the latter.
    """

    start: Any
    count: Any
    step: int = 1
    selected: bool = False


def _as_scatter(target: Node, value: Node) -> Node:
    """Return the ``index_put`` that computes an input with a part replaced, in the place of ``value``; else ``value``."""
    parts: dict[int, _Part] = {}
    rank = target.meta["val"].dim()
    source = _replaced_part(target, list(range(rank)), value, parts)
    if source is None or not _alike(value, target) or 2 * _count(source) > _count(target):
        return value
    first, last = min(parts), max(parts)
    indices: list[Node | None] = [None] * first
    for dim in range(first, last + 1):
        part = parts.get(dim) or _Part(0, size_node(value, target, dim))
        indices.append(_places(value, part, last - dim))
    for dim in sorted((dim for dim, part in parts.items() if part.selected), reverse=True):  # then those behind are there
        source = insert(value, aten.unsqueeze.default, (source, dim - rank))
    put = insert(value, aten.index_put.default, (target, indices, source))
    if not _alike(put, value):  # of an input with gaps, which a slice that is replaced leaves where they are
        value.graph.erase_node(put)
        return value
    value.replace_all_uses_with(put)
    return put


def _replaced_part(base: Node, dims: list[int], value: Node, parts: dict[int, _Part]) -> Node | None:
    """Return what replaces a part of ``base`` in ``value``, and note which part; None if it is not known to be one.

    ``dims`` are the dimensions of the input that those of ``base`` are.
    """
    if value.target not in (aten.slice_scatter.default, aten.select_scatter.default) or value.args[0] is not base:
        return None
    args = arguments(value)
    source, dim = args["src"], dims[args["dim"] % len(dims)]
    part = _part(value, args, base.meta["val"].shape[dims.index(dim)], source, dims.index(dim))
    if part is None or dim in parts:
        return None
    parts[dim] = part
    inner = [other for other in dims if other != dim] if part.selected else dims
    if source.target in (aten.slice_scatter.default, aten.select_scatter.default):
        view = source.args[0]
        assert isinstance(view, Node)
        return _replaced_part(view, inner, source, parts) if _shows(_behind_copy(view), base, args) else None
    return _behind_copy(source)


def _part(value: Node, args: dict[str, Any], size: Any, source: Node, dim: int) -> _Part | None:
    """Return the part of a dimension that ``value`` replaces, which has as many places as what replaces it.

    None if it is not known whether it begins at a place counted from the end.
    """
    selected = "index" in args
    start, step = (args["index"], 1) if selected else (args["start"] or 0, args["step"])
    if isinstance(start, int) and start < 0 and isinstance(size, int):
        start = max(start + size, 0)
    if not statically_known_true((start.meta["val"] if isinstance(start, Node) else start) >= 0):
        return None
    return _Part(start, 1 if selected else size_node(value, source, dim), step, selected)


def _shows(view: Any, base: Node, args: dict[str, Any]) -> bool:
    """Return whether a node is the part of ``base`` that a scatter with these arguments replaces."""
    names = ("dim", "index") if "index" in args else ("dim", "start", "end", "step")
    expected = aten.select.int if "index" in args else aten.slice.Tensor
    if not isinstance(view, Node) or view.target is not expected or view.args[0] is not base:
        return False
    own = arguments(view)
    return all(own[name] == args[name] for name in names)


def _behind_copy(node: Node) -> Node:
    """Return the tensor that was copied to close its gaps; the node itself if it is no copy."""
    return node.args[0] if node.target is aten.clone.default else node  # type: ignore[return-value]


def _count(node: Node) -> int:
    """Return a hint of how many elements a tensor has."""
    return math.prod(map(hint, node.meta["val"].shape))


def _places(value: Node, part: _Part, trailing: int) -> Node:
    """Insert the indices of a part's places, with as many dimensions of size 1 behind as there are further indices."""
    with value.graph.inserting_before(value):
        places = value.graph.call_function(prims.iota.default, (part.count,), {
            "start": part.start, "step": part.step, "dtype": torch.int64, "device": value.meta["val"].device,
            "requires_grad": False})
    count, start = map_arg((part.count, part.start), lambda operand: operand.meta["val"])
    meta = {key: entry for key, entry in value.meta.items() if key != IN_PLACE}
    places.meta = meta | {"val": places.target(count, **{**places.kwargs, "start": start})}  # type: ignore[operator]
    for _ in range(trailing):
        places = insert(value, aten.unsqueeze.default, (places, -1))
    return places
