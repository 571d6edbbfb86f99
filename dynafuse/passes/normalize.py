"""Normalization of an ATen graph before it is partitioned; each step leaves a graph that computes the same.

In order: zeros without memory become zeros in memory; casts that the user wrote become ops that round; outputs of
multi-output ops become ops of their own (``var_mean(x)[1]`` is ``mean(x)``); batches of one matrix product become that
product; strides that tracing reports wrong are corrected; numbers in tensors on the host become constants
(``host_numbers.py``), or are sent to the device (``given_numbers.py``); what is made on the host of nothing is made on
the device that reads it (``host_tensors.py``); copies into parts of tensors get memory of their own (``copies.py``);
reads of what scatters and pads put together become reads of what was put there (``cut_outs.py``); reductions of one
element become copies (``lone_elements.py``); ops that do nothing are removed; sums of rows that are 0 but in one place
become that element (``one_hots.py``); gathers move before what computes much more than they pick (``picks.py``); equal
calls are merged; reductions over more dimensions than others of the same are made of these (``nested_reductions.py``);
constants that must be in memory are made again for those that compute with them (``creations.py``);
dead code is removed. A new step is a call in :func:`normalize`.

Worked example: ``a, b = split(x, 4)`` with only ``b`` used becomes one ``slice`` of ``x``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from dynafuse.fx import arguments, fake_mode_of, insert, is_one, is_returned, is_view, makes_memory
from dynafuse.ops.indexing_math import as_expr
from dynafuse.ops.pooling import maxima_and_offsets
from dynafuse.passes.casts import keep_written_casts
from dynafuse.passes.copies import close_gaps
from dynafuse.passes.creations import make_again
from dynafuse.passes.cut_outs import take_pieces
from dynafuse.passes.duplicates import merge_duplicates
from dynafuse.passes.given_numbers import send_numbers
from dynafuse.passes.host_numbers import move_numbers
from dynafuse.passes.host_tensors import make_on_device
from dynafuse.passes.lone_elements import copy_lone_elements
from dynafuse.passes.nested_reductions import nest_reductions
from dynafuse.passes.one_hots import sum_one_hots
from dynafuse.passes.picks import pick_early
from dynafuse.passes.strides import place_views, same_layout

aten = torch.ops.aten
prims = torch.ops.prims

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
NOOPS = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
SAME_SHAPE = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}


def normalize(module: GraphModule, merge_equal: bool = True) -> GraphModule:
    """Run all steps in order on the module's graph, in place, and return the module.

    The module's Python code is left stale, because nothing calls it.

    Args:
        module: The graph.
        merge_equal: Whether equal calls are merged: of forward and backward that was done in their joint graph.
    """
    store_zeros(module)
    begin_memory(module)
    keep_written_casts(module)
    dissolve_multiple_outputs(module)
    unbatch(module)
    settle_strides(module)
    move_numbers(module)
    send_numbers(module)
    make_on_device(module)
    close_gaps(module)
    take_pieces(module)
    copy_lone_elements(module)
    remove_noops(module)
    sum_one_hots(module)
    pick_early(module)
    if merge_equal:
        merge_duplicates(module.graph)
    nest_reductions(module)
    make_again(module)
    module.graph.eliminate_dead_code()
    return module


def store_zeros(module: GraphModule) -> None:
    """Replace zeros without memory, as in the gradient of a sign, by zeros in memory: kernels and replays read addresses."""
    stored: set[Node] = set()
    for node in module.graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default):
        value = node.meta["val"]
        with value.fake_mode:
            zeros = insert(node, aten.full.default, (arguments(node)["size"], 0), dtype=value.dtype, device=value.device)
        node.replace_all_uses_with(zeros)
        module.graph.erase_node(node)
        stored.add(zeros)
    if stored:
        place_views(module, stored)


def begin_memory(module: GraphModule) -> None:
    """Have memory begin with the first element of what an op makes: a scatter into a slice has eager's offset of the whole.

    What replaces it has none, and views count from there.
    """
    begun: set[Node] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not makes_memory(node):
            continue
        if as_expr(value.storage_offset()) != 0:
            with fake_mode_of((node,)):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            begun.add(node)
    if begun:
        place_views(module, begun)


def dissolve_multiple_outputs(module: GraphModule) -> None:
    """Replace each ``getitem`` of an op whose outputs can be computed one by one."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], Node):
            rewrite = _single_output(node.args[0], node.args[1])
            if rewrite is not None:
                _replace(node, *rewrite)


def _single_output(source: Node, position: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return the call that computes output ``position`` of ``source`` alone; None if there is none."""
    target = source.target
    if target in SPLITS:
        args = arguments(source)
        if target is aten.unbind.int:
            return aten.select.int, (args["self"], args["dim"], position)
        return aten.slice.Tensor, (args["self"], args["dim"], *_ends(source, args, position))
    if target is aten.var_mean.correction:
        args = arguments(source)
        if position == 1:
            return aten.mean.dim, (args["self"], args["dim"], args["keepdim"])
        return aten.var.correction, (args["self"], args["dim"])
    if target in (aten.max.dim, aten.min.dim):
        args = arguments(source)
        value, index = (aten.amax, aten.argmax) if target is aten.max.dim else (aten.amin, aten.argmin)
        if position == 0:
            return value.default, (args["self"], [args["dim"]], args["keepdim"])
        if args["self"].meta["val"].dtype is torch.bool:
            return None  # any op may fall back to eager, which has no argmax of bools
        return index.default, (args["self"], args["dim"], args["keepdim"])
    if target is aten.max_pool2d_with_indices.default and all(user.args[1:] == (0,) for user in source.users):
        return aten.max_pool2d.default, tuple(arguments(source).values())
    if target is prims._low_memory_max_pool_with_offsets.default:
        args = arguments(source)
        both = maxima_and_offsets(args, args["self"].meta["val"].dtype)
        return None if both is None else (both[position], tuple(args.values()))
    return None


def _ends(split: Node, args: dict[str, Any], position: int) -> tuple[int | Node, int | Node]:
    """Return where a piece of a split starts and ends."""
    if "split_sizes" in args:
        start: int | Node = 0
        for size in args["split_sizes"][:position]:
            start = _computed(split, operator.add, start, size)
        return start, _computed(split, operator.add, start, args["split_sizes"][position])
    first, end = (_computed(split, operator.mul, count, args["split_size"]) for count in (position, position + 1))
    whole = args["self"].meta["val"].shape[args["dim"]]
    last = isinstance(end, int) and isinstance(whole, int) and end > whole  # else a slice ends where its tensor does
    return first, whole if last else end


def _computed(origin: Node, function: Callable[[Any, Any], Any], left: int | Node, right: int | Node) -> int | Node:
    """Return a sum or product, as a number or as a node before ``origin`` that computes it at run time."""
    if left == (0 if function is operator.add else 1):
        return right
    value = function(*(side.meta["val"] if isinstance(side, Node) else side for side in (left, right)))
    expr = as_expr(value)
    if expr.is_Integer:
        return int(expr)
    with origin.graph.inserting_before(origin):
        node = origin.graph.call_function(function, (left, right))
    node.meta = {"val": value}
    return node


def _replace(node: Node, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Replace a node by a call of ``target`` with the same metadata."""
    kwargs: dict[str, Any] = {}
    if target is aten.var.correction:
        source = arguments(node.args[0])  # type: ignore[arg-type]
        kwargs = {"correction": source["correction"], "keepdim": source["keepdim"]}
    with node.graph.inserting_before(node):
        new = node.graph.call_function(target, args, kwargs)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def unbatch(module: GraphModule) -> None:
    """Replace batches of one matrix product by ``mm`` with views around it, which launches faster."""
    for node in list(module.graph.nodes):
        if node.target is not aten.bmm.default or not is_one(node.meta["val"].shape[0]):
            continue
        left, right = (insert(node, aten.squeeze.dim, (operand, 0)) for operand in node.args)
        product = insert(node, aten.mm.default, (left, right))
        _replace(node, aten.unsqueeze.default, (product, 0))


def settle_strides(module: GraphModule) -> None:
    """Give results that own their memory strides without overlap where tracing reports that elements do.

    Tracing some ops on expanded tensors reports the operand's zero strides, although the result has memory for every
    element, in the order of the operand's dimensions. Views of these results are traced again. What is called with strides
    has those.
    """
    settled: set[Node] = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and makes_memory(node) and _overlaps(value) and not _is_told_strides(node):
            node.meta["val"] = torch.empty_like(value)
            settled.add(node)
    if settled:
        place_views(module, settled)


def _is_told_strides(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and any(given.name == "stride" for given in node.target._schema.arguments)


def _overlaps(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided:
        return False
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size < 2)
               for size, stride in pairs)


def remove_noops(module: GraphModule) -> None:
    """Remove aliases, views that change nothing or undo others, casts to the same dtype, scatters of nothing or of all.

    A no-op stays if it is returned and reads an input, because an output that *is* an input means something else to the
    caller; if what it reads is returned too, because of two outputs one may be detached; and if it makes memory of its own
    that is returned, itself or through a view.
    """
    output = module.graph.output_node()
    moved: set[Node] = set()
    for node in list(module.graph.nodes):
        source = _same_as(node)
        if source is None:
            continue
        is_another = output in node.users and (source.op in ("placeholder", "get_attr") or output in source.users)
        if is_another or (makes_memory(node) and is_returned(node)):
            continue
        if makes_memory(node):
            moved.add(source)
        node.replace_all_uses_with(source)
        module.graph.erase_node(node)
    if moved:
        place_views(module, moved)


def _same_as(node: Node) -> Node | None:
    """Return an argument that a call's result equals, strides included; None if there is none."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is aten.slice_scatter.default:
        return _scattered(node)
    operand, result = source.meta.get("val"), node.meta.get("val")
    if not (isinstance(operand, torch.Tensor) and isinstance(result, torch.Tensor)):
        return None
    if node.target in NOOPS:
        return source
    if node.target in SAME_SHAPE and same_layout(operand, result):
        return source
    if is_view(node):
        return _undone(source, result)
    if node.target is prims.convert_element_type.default:
        return source if operand.dtype == result.dtype else None
    first_power = node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 and operand.dtype == result.dtype
    return source if first_power else None


def _undone(view: Node, value: torch.Tensor) -> Node | None:
    """Return a tensor that a chain of views starts from, if ``value`` at its end is the same view of the same memory."""
    while is_view(view) and isinstance(view.args[0], Node):
        view = view.args[0]
        start = view.meta.get("val")
        if isinstance(start, torch.Tensor) and _reads_alike(start, value):
            return view
    return None


def _reads_alike(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two views of one memory have the same elements at the same indices."""
    offsets = [as_expr(value.storage_offset()) for value in (left, right)]
    return offsets[0] == offsets[1] and left.dtype == right.dtype and same_layout(left, right)


def _scattered(node: Node) -> Node | None:
    """Return what a ``slice_scatter`` equals: its tensor if nothing is put into it, the slice if that replaces all of it."""
    args = arguments(node)
    into, piece = args["self"], args["src"]
    result, slice_value = node.meta["val"], piece.meta["val"]
    if isinstance(slice_value.numel(), int) and slice_value.numel() == 0:
        return into if same_layout(into.meta["val"], result) else None
    return piece if slice_value.dtype == result.dtype and same_layout(slice_value, result) else None
