"""Matrix products in padded sizes, where rows in memory are no multiple of 16 bytes and the price of copies allows it.

The library's kernels for such rows are several times slower (``cost/products.py``). Operands get zeros behind their rows,
the product runs in the larger sizes, and its readers see a slice of the result. Zeros along the inner size meet zeros, so
they add nothing, whatever else is in the operands. An operand is padded once for all products that read it; a kernel that
makes it writes it padded, and other fused ops read it from there. What reads the result reads it in place. So does the
caller, if nothing else is in its memory: its rows are then further apart than eager's. What needs eager's strides gets a
copy, as ``strides.py`` says.

Worked example, in bfloat16, with ``x`` of 8192 × 768 and ``w`` of 50257 × 768::

    y = mm(x, permute(w, [1, 0]))

becomes ``p = constant_pad_nd(w, [0, 0, 0, 7])``, ``z = mm(x, permute(p, [1, 0]))`` and ``y = slice(z, 1, 0, 50257)``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.cost.products import ALIGNED, COLUMNS, PRODUCTS, ROWS, Product, aligned_dtype, runs_along
from dynafuse.fx import arguments, insert, is_view
from dynafuse.passes.cones import Cone
from dynafuse.passes.padding_price import Pad, Padding, Priced, may_read_padded, worthwhile
from dynafuse.passes.strides import alone_in_memory, num_seen, propagate, report_strides, restore_outputs, strides_of

aten = torch.ops.aten

PADDED = "padded"
"""The metadata of a product that runs in padded sizes: a line that says which, and at what price."""


def pad_products(kind: str, module: GraphModule, device: Device, device_type: str | None, captured: bool,
                 eager: Collection[Node] = (), may_spread: bool = False) -> None:
    """Run products of matrices in padded sizes where that is predicted to be faster; in place.

    Args:
        kind: forward, backward or inference.
        module: A normalized graph, as torch's AOTAutograd hands it over.
        device: The device that prices are of.
        device_type: The type of device whose tensors are fused; None if nothing is.
        captured: Whether the graph is to be recorded as a CUDA graph.
        eager: Nodes that are to stay as they are.
        may_spread: Whether rows of results that share memory with no others may be further apart than eager's.
    """
    candidates = [padding for node in module.graph.nodes if node not in eager and (padding := _padding(node, device_type))]
    if not candidates:
        return
    alone = alone_in_memory(kind, module) if may_spread else ()
    chosen = worthwhile(candidates, module, device, device_type, captured, num_seen(kind, module), alone)
    if chosen:
        rewrite(kind, module, chosen, may_spread)


def rewrite(kind: str, module: GraphModule, chosen: Collection[Priced], may_spread: bool = False) -> None:
    """Have products run in padded sizes, in place; what the caller sees keeps its strides, or their order.

    Args:
        kind: forward, backward or inference.
        module: The graph.
        chosen: The paddings that are made.
        may_spread: As for :func:`pad_products`.
    """
    before = strides_of(module)
    change = _Change()
    for priced in chosen:
        node = priced.padding.node
        view = change.replacement(priced)
        node.replace_all_uses_with(view)
        module.graph.erase_node(node)
    now, before = strides_of(module), before | {view: before[node] for node, view in change.views.items()}
    bases = set(change.views.values())
    strided = {view for view in bases if now[view] != before[view]}
    if strided:
        propagate(module, set(strided), before, bases)
        restore_outputs(kind, module, before, bases, may_spread)
    module.graph.eliminate_dead_code()
    if strided and kind == "forward":
        report_strides(module)


def _first_reader(source: Node) -> Node:
    """Return the first call of the graph that reads a node."""
    reader = source.next
    while reader not in source.users:
        reader = reader.next
    return reader


# What could be padded -------------------------------------------------------------------------------------------------


def _padding(node: Node, device_type: str | None) -> Padding | None:
    """Return the padding that lets a product run aligned; None for any other op, and if no known size is in the way."""
    if node.target not in PRODUCTS or not _is_plain(node, device_type):
        return None
    given = arguments(node)
    left, right = (given[name] for name in PRODUCTS[node.target])
    before = Product.of(left.meta["val"], right.meta["val"])
    (m, k), n = left.meta["val"].shape[ROWS:], right.meta["val"].shape[COLUMNS]
    unit = ALIGNED // before.dtype.itemsize
    sizes = zip((m, k, n), before.along, strict=True)
    more = tuple(-size % unit if runs and isinstance(size, int) else 0 for size, runs in sizes)
    if not any(more):
        return None
    after = before.padded(*(size + add for size, add in zip((before.m, before.k, before.n), more, strict=True)))
    pads = dict(_pads(node, given, more))
    return Padding(node, before, after, more, pads)


def _is_plain(node: Node, device_type: str | None) -> bool:
    """Return whether a product's tensors are strided, not empty, on one device, of one dtype that tensor cores take."""
    values = [value for operand in (node, *node.all_input_nodes)
              if isinstance(value := operand.meta.get("val"), torch.Tensor)]
    result = values[0]
    if result.device.type != device_type or not aligned_dtype(result.dtype) or runs_along(result) != COLUMNS:
        return False
    if any(isinstance(size, int) and size == 0 for value in values for size in value.shape):
        return False
    return all(value.layout is torch.strided and value.dtype is result.dtype and value.device == result.device
               for value in values)


def _pads(node: Node, given: Mapping[str, Any], more: tuple[int, ...]) -> Iterator[tuple[str, Pad]]:
    """Yield what has to be padded, by argument name."""
    m, k, n = more
    left, right = PRODUCTS[node.target]
    for name, amounts in ((left, (m, k)), (right, (k, n))):
        if any(amounts):
            yield name, _matrix(given[name], amounts)
    bias = given["self"] if "self" not in (left, right) else None
    if bias is not None and any(of_bias := _of_bias(bias, node, (m, n))):
        yield "self", Pad(bias, False, of_bias)


def _matrix(operand: Node, amounts: tuple[int, int]) -> Pad:
    """Return how a matrix is padded in the order of its memory: if that runs along its rows, what it is the transpose of."""
    if runs_along(operand.meta["val"]) == COLUMNS:
        return Pad(operand, False, amounts)
    of = transposed(operand)
    return Pad(operand if of is None else of, of is None, (amounts[1], amounts[0]))


def transposed(node: Node) -> Node | None:
    """Return what a node is the transpose of in its last two dimensions, as a view; None if it is none."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        dims = [dim % rank for dim in arguments(node)["dims"]]
        is_turned = dims == _swapped(rank)
    elif node.target is aten.transpose.int:
        is_turned = {dim % rank for dim in node.args[1:]} == {rank - 2, rank - 1}
    else:
        is_turned = node.target is aten.t.default and rank == 2
    source = node.args[0] if is_turned else None
    return source if isinstance(source, Node) else None


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _of_bias(bias: Node, node: Node, more: tuple[int, int]) -> tuple[int, ...]:
    """Return by how much the last dimensions of what is added to a product grow, where they are not broadcast."""
    shape, result = bias.meta["val"].shape, node.meta["val"].shape
    dims = range(-min(len(shape), 2), 0)
    return tuple(more[dim] if isinstance(shape[dim], int) and shape[dim] == result[dim] != 1 else 0 for dim in dims)


# The change -----------------------------------------------------------------------------------------------------------


class _Change:
    """The change of a graph: ``views`` has the part of something padded that stands for a tensor, by the latter."""

    def __init__(self) -> None:
        self.views: dict[Node, Node] = {}
        self._padded: dict[Pad, Node] = {}

    def replacement(self, priced: Priced) -> Node:
        """Insert a product in padded sizes before the product, and return the part of it that is the product's result."""
        padding = priced.padding
        node, value = padding.node, padding.node.meta["val"]
        operands = {name: self._operand(priced, name, pad) for name, pad in padding.pads.items()}
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        args = tuple(operands.get(name, arg) for name, arg in zip(names, node.args, strict=False))
        kwargs = {name: operands.get(name, arg) for name, arg in node.kwargs.items()}
        result = insert(node, node.target, args, **kwargs)
        result.meta[PADDED] = str(priced)
        for dim, more in ((ROWS, padding.more[0]), (COLUMNS, padding.more[2])):
            if more:
                result = insert(node, aten.slice.Tensor, (result, value.dim() + dim, 0, value.shape[dim]))
        self.views[node] = result
        return result

    def _operand(self, priced: Priced, name: str, pad: Pad) -> Node:
        """Return an operand of a product padded, in the order in memory that it has; one pad serves all products."""
        node = priced.padding.node
        turn = _swapped(pad.source.meta["val"].dim())
        if pad not in self._padded:
            before = _first_reader(pad.source) if pad in priced.reread else node
            source = self._apart(pad.source, before) if pad in priced.apart else self.views.get(pad.source, pad.source)
            source = insert(before, aten.permute.default, (source, turn)) if pad.turned else source
            self._padded[pad] = insert(before, aten.constant_pad_nd.default, (source, pad.from_last))
            if pad in priced.reread:
                self._reread(pad, before)
        runs = dict(zip(PRODUCTS[node.target], priced.padding.before.runs, strict=True)).get(name, COLUMNS)
        padded = self._padded[pad]
        return padded if runs == COLUMNS else insert(node, aten.permute.default, (padded, turn))

    def _reread(self, pad: Pad, before: Node) -> None:
        """Have fused ops read a part of the padded tensor, inserted before a node, instead of the tensor."""
        view, shape = self._padded[pad], pad.source.meta["val"].shape
        for dim, amount in enumerate(pad.amounts, len(shape) - len(pad.amounts)):
            if amount:
                view = insert(before, aten.slice.Tensor, (view, dim, 0, shape[dim]))
        for reader in [reader for reader in pad.source.users if may_read_padded(reader, pad)]:
            if reader is not self._padded[pad]:
                reader.replace_input_with(pad.source, view)
        self.views[pad.source] = view

    def _apart(self, source: Node, node: Node) -> Node:
        """Return a tensor computed once more before a node, by ops that nothing else reads."""
        views = [source]
        while is_view(views[-1]):
            views.append(views[-1].all_input_nodes[0])
        copies = dict(Cone.of(views.pop()).copied(node))
        with node.graph.inserting_before(node):
            for view in reversed(views):
                copies[view] = node.graph.node_copy(view, lambda operand: copies.get(operand, operand))
        return copies[source]
