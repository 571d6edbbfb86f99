"""Bases of scatters: each scatter gets one that nothing else reads, so that a kernel may write into it.

``index_put(x, [i], v, accumulate=True)`` returns ``x`` with ``v`` added in some places. A kernel does that in memory, so it
needs a tensor that holds ``x`` and that may be overwritten: ``x`` itself if the scatter is all that reads it, else a copy.
What is added in 16 bits is added in float32, as accurately as eager does it, and rounded at the end. Sums of scatters into
zeros become a chain of scatters into the same zeros.

Worked example, in bfloat16::

    y = index_put(x, [i], v, accumulate=True)

becomes ``a = convert(x, float32)``, ``b = index_put(a, [i], convert(v, float32), accumulate=True)`` and
``y = convert(b, bfloat16)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import OWNS_BASE, arguments, in_place, insert, is_zeros, makes_memory, owns_base
from dynafuse.ops import Call, Combine, Kind, Row, Scatter, lookup, refusal
from dynafuse.ops.indexing_math import as_expr
from dynafuse.ops.literals import opmath

aten, prims = torch.ops.aten, torch.ops.prims

VALUES = frozenset({"values", "src", "source"})
"""Names of what scatters write."""


def give_bases(module: GraphModule, device_type: str | None, eager: Collection[Node] = ()) -> GraphModule:
    """Give a base of its own to each scatter that a kernel may take, in place, and return the module.

    Args:
        module: A normalized graph.
        device_type: The type of device whose tensors are fused; None if nothing is.
        eager: Nodes that are to stay as they are.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    for node in list(module.graph.nodes):
        scatter = scatter_of(node)
        if scatter is not None and node not in eager and _may_fuse(node, scatter, device_type, deterministic):
            if in_place(node):
                node.meta[OWNS_BASE] = True
            else:
                _give_base(node, scatter)
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in places:
        _chain(node, places)
    module.graph.eliminate_dead_code()
    return module


def scatter_of(node: Node) -> Scatter | None:
    """Return what a node scatters, unless it is fused in another way."""
    row = lookup(node.target)
    if row is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if row.otherwise is not None:
        return row.otherwise.scatter if refusal(row, _call(node, node.meta["val"].dtype)) else None
    return row.scatter


def _call(node: Node, dtype: torch.dtype) -> Call:
    shape = tuple(map(as_expr, node.meta["val"].shape))
    return Call(node.target, arguments(node), shape, dtype)  # type: ignore[arg-type]


def _may_fuse(node: Node, scatter: Scatter, device_type: str | None, deterministic: bool) -> bool:
    """Return whether a kernel may compute a scatter; whether it is going to, the partitioner says."""
    row = lookup(node.target)
    assert row is not None
    values = (operand.meta.get("val") for operand in (node, *node.all_input_nodes))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if any(value.device.type != device_type or value.layout is not torch.strided for value in tensors):
        return False
    if any(isinstance(size, int) and size == 0 for value in tensors for size in value.shape):
        return False
    if refusal(_scattering(row), _call(node, opmath(node.meta["val"].dtype))):
        return False
    combine, adds_floats = scatter.combine(arguments(node)), node.meta["val"].dtype.is_floating_point
    shows_order = combine is Combine.STORE or (combine is Combine.ADD and adds_floats)
    return not (deterministic and shows_order)


def _scattering(row: Row) -> Row:
    return row if row.kind is Kind.SCATTER else row.otherwise or row


def _wide(node: Node, scatter: Scatter) -> torch.dtype:
    """Return the dtype in which a scatter is computed: of 16-bit floats that are added, float32."""
    dtype: torch.dtype = node.meta["val"].dtype
    return opmath(dtype) if dtype.is_floating_point and scatter.combine(arguments(node)) is Combine.ADD else dtype


# The base -------------------------------------------------------------------------------------------------------------


def _give_base(node: Node, scatter: Scatter) -> None:
    """Let a scatter write into what nothing else reads; leave it alone if that had not the strides of its result."""
    dtype, value = _wide(node, scatter), node.meta["val"]
    base = own = _argument(node, scatter.base)
    if dtype is not value.dtype:
        own = insert(node, prims.convert_element_type.default, (base, dtype))
    elif not _may_be_overwritten(base, node):
        own = _copied(base, node)
    if not _same_strides(own.meta["val"], value):
        own = insert(node, aten.clone.default, (own,), memory_format=torch.contiguous_format)
    if not _same_strides(own.meta["val"], value):
        return
    _replace_argument(node, scatter.base, own)
    node.meta[OWNS_BASE] = True
    if dtype is not value.dtype:
        _widen(node, dtype)


def _may_be_overwritten(base: Node, scatter: Node) -> bool:
    """Return whether a node's memory is its own, and read by one argument of a scatter alone."""
    row = lookup(base.target)
    known = row is not None and (row.library or row.unfilled or (row.fusible and row.kind is not Kind.VIEW))
    reads: list[Node] = []
    map_arg((scatter.args, scatter.kwargs), reads.append)
    return known and makes_memory(base) and list(base.users) == [scatter] and reads.count(base) == 1


def _copied(base: Node, scatter: Node) -> Node:
    """Return a copy of a base, before a scatter: constants are made once more."""
    row = lookup(base.target)
    if row is None or row.kind is not Kind.CREATION:
        return insert(scatter, aten.clone.default, (base,))
    with scatter.graph.inserting_before(scatter):
        return scatter.graph.node_copy(base)


def _widen(node: Node, dtype: torch.dtype) -> None:
    """Compute a scatter in a wider dtype, and round the result."""
    value = node.meta["val"]
    for name in VALUES & arguments(node).keys():
        _replace_argument(node, name, insert(node, prims.convert_element_type.default, (_argument(node, name), dtype)))
    node.meta["val"] = value.to(dtype)
    with node.graph.inserting_after(node):
        rounded = node.graph.call_function(prims.convert_element_type.default, (node, value.dtype))
    rounded.meta = {key: entry for key, entry in node.meta.items() if key != OWNS_BASE} | {"val": value}
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)


def _argument(node: Node, name: str) -> Node:
    argument: Node = arguments(node)[name]
    return argument


def _replace_argument(node: Node, name: str, new: Node) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(node.args):
        node.update_arg(position, new)
    else:
        node.update_kwarg(name, new)


def _same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    return tuple(map(as_expr, left.stride())) == tuple(map(as_expr, right.stride()))


# Sums -----------------------------------------------------------------------------------------------------------------


def _chain(add: Node, places: Mapping[Node, int]) -> None:
    """Replace a sum of two scatters, the later of which adds to zeros: it adds to the earlier one's result instead."""
    if add.target is not aten.add.Tensor or arguments(add)["alpha"] != 1:
        return
    operands = [operand for operand in add.args if isinstance(operand, Node) and _adds_alone(operand, add)]
    if len(operands) != 2 or operands[0] is operands[1]:
        return
    earlier, later = sorted(operands, key=places.__getitem__)
    base = arguments(later)["self"]
    if base.target is not aten.full.default or not is_zeros(base) or not _alike(earlier, add) or not _alike(later, add):
        return
    _replace_argument(later, "self", earlier)
    add.replace_all_uses_with(later)
    add.graph.erase_node(add)


def _adds_alone(node: Node, reader: Node) -> bool:
    """Return whether a node is a scatter that adds to a base of its own, and that only ``reader`` reads."""
    row = lookup(node.target)
    if row is None or not owns_base(node) or list(node.users) != [reader]:
        return False
    scatter = _scattering(row).scatter
    return scatter is not None and scatter.combine(arguments(node)) is Combine.ADD


def _alike(left: Node, right: Node) -> bool:
    """Return whether two nodes have the same sizes, strides and dtype."""
    first, second = left.meta["val"], right.meta["val"]
    same = tuple(map(as_expr, first.shape)) == tuple(map(as_expr, second.shape))
    return same and first.dtype is second.dtype and _same_strides(first, second)
