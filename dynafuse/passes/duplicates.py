"""Merging of equal calls, where nothing can tell that there were two.

Two calls are equal if they call one op with the same operands and the same literals: ``0.0`` and ``-0.0`` differ, so do
``1``, ``1.0`` and ``True``. They are not merged where a second call is more than the first one's value:

* ops whose operands do not determine their result: random ones, uninitialized memory, and ops that are not torch's own, of
  which nothing is known;
* ops that write, and ops that read on different sides of one that writes;
* ops whose result has a size or a value that depends on data: each has symbols of its own, which later sizes contain;
* values that share memory with what the graph returns: two results of the user's code are two tensors. Of those that take
  longer to compute than to copy (products, reductions, whatever is no loop over elements) the second becomes a copy.

Worked example: ``sigmoid`` of one value in the forward and again in the backward becomes one ``sigmoid``; of ``x[x > 1]``
twice one comparison is left, and both ``nonzero``; of the gradients of two biases that are added to one tensor, which are
sums of the same rows, one sum and its copy.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from dynafuse.fx import fake_mode_of, looked_at, makes_memory, shares_memory
from dynafuse.ops import is_unfilled, lookup
from dynafuse.passes.strides import same_layout

clone = torch.ops.aten.clone.default

TORCH_NAMESPACES = ("aten", "prims")
PURE_MODULES = ("_operator", "math", "torch.fx.experimental.symbolic_shapes", "torch.utils._sympy.functions", "torch")


def merge_duplicates(graph: Graph) -> None:
    """Replace each call by an equal one before it, or by a copy of its result, in place."""
    returned = set(memories(graph.output_node().all_input_nodes))
    first, first_returned = dict[Hashable, Node](), dict[Hashable, Node]()
    for node in list(graph.nodes):
        if writes(node):
            first.clear()
            first_returned.clear()
        elif not is_determined(node):
            continue
        elif returned.isdisjoint(memories([node])):
            other = first.setdefault(_call(node), node)
            if other is not node:
                node.replace_all_uses_with(other)
                graph.erase_node(node)
        elif _is_copied_faster(node):
            other = first_returned.setdefault(_call(node), node)
            if other is not node:
                node.target, node.args, node.kwargs = clone, (other,), {}


def _is_copied_faster(node: Node) -> bool:
    """Return whether a copy takes less time than the call, and has its result's strides."""
    value, row = node.meta.get("val"), lookup(node.target)
    is_elementwise = row is not None and row.fusible and not row.kind.needs_rows
    if is_elementwise or not makes_memory(node) or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    with fake_mode_of((node,)):
        return same_layout(value, value.clone())


def is_determined(node: Node) -> bool:
    """Return whether operands and literals determine a call's result, and the call has no other effect."""
    target = node.target
    if node.op != "call_function" or _new_symbols(node):
        return False
    if isinstance(target, torch._ops.OpOverload):
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        has_no_value = not target._schema.returns or is_unfilled(target)
        return target.namespace in TORCH_NAMESPACES and not is_random and not has_no_value
    return getattr(target, "__module__", None) in PURE_MODULES  # arithmetic of sizes


def writes(node: Node) -> bool:
    """Return whether a call may write into memory that existed before it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return target is torch.ops.higher_order.triton_kernel_wrapper_mutation


def _new_symbols(node: Node) -> bool:
    """Return whether a result has symbols for values that depend on data, which no operand has."""
    if node.target is operator.getitem:
        return False  # its symbols are its operand's
    symbols = _unbacked(node)
    return bool(symbols) and not symbols <= {symbol for operand in node.all_input_nodes for symbol in _unbacked(operand)}


def _unbacked(node: Node) -> set[Any]:
    leaves = tree_leaves(node.meta.get("val"))
    return {symbol for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
            for symbol in free_unbacked_symbols(leaf)}


def memories(nodes: Iterable[Node]) -> Iterator[Node | StorageWeakRef]:
    """Yield the memory that nodes are in: by their fake values, of which some are renewed, and by the ops' schemas.

    That is the memory of each tensor among several results of a call, sparse ones excepted, and what a view looks into.
    """
    for node in nodes:
        yield looked_at(node, shares_memory)
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                with suppress(NotImplementedError):  # a sparse tensor
                    yield StorageWeakRef(value.untyped_storage())


def _call(node: Node) -> Hashable:
    """Return a key of a call that equal calls alone share."""
    return node.target, _literal(node.args), _literal(tuple(sorted(node.kwargs.items())))


def _literal(value: Any) -> Hashable:
    """Return a key of an argument that equal arguments alone share."""
    if isinstance(value, (list, tuple)):
        return "sequence", *map(_literal, value)
    if isinstance(value, slice):
        return "slice", *map(_literal, (value.start, value.stop, value.step))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), value.node.expr
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # tells 0.0 from -0.0, and a NaN equals itself
    return (value,) if isinstance(value, Node) else (type(value), value)
