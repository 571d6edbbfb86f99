"""Strides of a graph's tensors where a pass changes some: propagated to readers, restored in results, reported to torch.

Results that the caller sees keep eager's strides. Tensors saved for the backward keep the new ones, and AOTAutograd is told
these; a backward adopts the strides of what it is given.

Worked example: a pass has ``y = mm(x, w)`` return rows of 16 elements of which 13 are read. ``propagate`` gives views of
``y`` the new strides, and what pointwise ops make of them stays as it was; ``restore_outputs`` returns a copy of ``y``
without gaps.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import GraphModule, Node

from dynafuse.fx import environment_of, fake_mode_of, hint_of, is_view, looked_at, makes_memory, shares_memory
from dynafuse.ops import Kind, lookup
from dynafuse.ops.indexing_math import as_expr
from dynafuse.passes.stride_readers import may_look_at_strides, places_by_strides, wants_dense_rows, wants_eagers_strides

aten = torch.ops.aten
CHANNELS_LAST = [0, 2, 3, 1]
"""The dimensions of a batch of images from the outermost in memory to the innermost."""
AS_THEY_ARE = {OutputType.non_alias, OutputType.unsafe_view_alias}
"""Kinds of results that AOTAutograd returns as the graph does."""

Strides = tuple[Any, ...]
"""Integers, or expressions over size symbols."""


def strides_of(module: GraphModule) -> dict[Node, Strides]:
    """Return the strides of every strided tensor of a graph, as in the fake values."""
    return {node: _strides_of(node.meta["val"]) for node in module.graph.nodes if _has_strides(node)}


def layout(value: Any) -> Any:
    """Return a value with the strides of tensors in their place."""
    if isinstance(value, (list, tuple)):
        return [layout(v) for v in value]
    return _strides_of(value) if isinstance(value, torch.Tensor) else value


def _strides_of(value: torch.Tensor) -> Strides:
    return tuple(s if isinstance(s, int) else s.node.expr for s in value.stride())


def _has_strides(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


# ---------------------------------------------------------------------- the change


def propagate(module: GraphModule, changed: set[Node], before: Mapping[Node, Strides],
              bases: Collection[Node] = ()) -> None:
    """Recompute the fake values of all that reads a tensor whose strides have changed.

    Ops that address the memory of such a tensor get a copy with its strides of ``before``, and so do ops of others, ops that
    eager has wrong in channels-last, and attention where the elements of a row no longer lie side by side, which its kernels
    refuse.

    Args:
        module: The graph, which is changed in place.
        changed: The nodes whose values have new strides; those that come to have some are added.
        before: The strides of every tensor before the change, in elements.
        bases: Views that the pass has put in the place of tensors with memory of their own.
    """
    mode = detect_fake_mode([n.meta.get("val") for n in module.graph.nodes])
    assert mode is not None
    restored = Restored(before, lambda node: False, bases)
    for node in module.graph.nodes:
        with mode:
            _restore_operands(node, restored)
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes) or node in changed:
            continue
        if node.meta.get("unbacked_bindings"):  # sizes that depend on data, and not on strides, would get new symbols
            continue
        with mode:
            value = _evaluate(node, changed)
        if layout(value) != layout(node.meta.get("val")):
            changed.add(node)
        node.meta["val"] = value


def _restore_operands(node: Node, restored: Restored) -> None:
    """Have a call read tensors with their strides of before, if it depends on them."""
    if places_by_strides(node):
        node.update_arg(0, restored.at(node.args[0], node.prev))  # type: ignore[arg-type]
    elif wants_eagers_strides(node):
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: restored.at(n, node.prev) if _has_strides(n) else n)
        node.args, node.kwargs = args, kwargs
    elif wants_dense_rows(node):
        for operand in node.all_input_nodes:
            if restored.has_torn_rows(operand):
                node.replace_input_with(operand, restored.at(operand, node.prev))


def _evaluate(node: Node, changed: set[Node]) -> Any:
    """Return the fake value of a call; a view that the new strides do not allow becomes one of a contiguous copy."""
    try:
        return _computed(node)
    except (RuntimeError, ValueError):
        source = node.all_input_nodes[0]
        copy = _insert(after_of(source), aten.clone.default, source, memory_format=torch.contiguous_format)
        changed.add(copy)
        node.replace_input_with(source, copy)
        return _computed(node)


def _computed(node: Node) -> Any:
    """Return the fake value of a call."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _insert(after: Node, target: Any, source: Node, *args: Any, **kwargs: Any) -> Node:
    """Insert a call on ``source`` behind another node, with its fake value."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, (source, *args), kwargs)
    node.meta = {"val": _computed(node)}
    return node


def after_of(source: Node) -> Node:
    """Return the node behind which ``source`` can be read: itself, or the last input if it is an input."""
    place = source
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    return place


def in_order(source: Node, order: Sequence[int], after: Node, share: bool = True) -> Node:
    """Return a tensor dense in an order of its dimensions: a view if its memory is so and may be shared, else a copy.

    Args:
        source: The tensor.
        order: Its dimensions from the outermost in memory to the innermost.
        after: The node behind which the ops are inserted.
        share: Whether the result may be a view of ``source``.
    """
    value, inverse = source.meta["val"], [order.index(dim) for dim in range(len(order))]
    if share and is_static(value) and value.is_contiguous() and value.permute(order).is_contiguous():
        flat = _insert(after, aten.view.default, source, [value.numel()])
        permuted = _insert(flat, aten.view.default, flat, [value.shape[dim] for dim in order])
        return _insert(permuted, aten.permute.default, permuted, inverse)
    if order == CHANNELS_LAST:
        return _insert(after, aten.clone.default, source, memory_format=torch.channels_last)
    if order == sorted(order):
        return _insert(after, aten.clone.default, source, memory_format=torch.contiguous_format)
    turned = _insert(after, aten.permute.default, source, order)
    permuted = _insert(turned, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return _insert(permuted, aten.permute.default, permuted, inverse)


def _is_in_table(node: Node) -> bool:
    """Return whether a call is of an op that kernels compute; others may want strides that are aligned, or of some order."""
    row = lookup(node.target)
    return row is not None and row.kind is not Kind.OPAQUE


def renew(node: Node, value: torch.Tensor) -> bool:
    """Give a node, and what are views of it, values with other strides; do nothing where other readers can tell.

    Args:
        node: The node, whose readers' values are known.
        value: Its fake value with other strides, computed in the graph's fake mode, as all here.

    Returns:
        Whether nothing can.
    """
    values, pending = {node: value}, [node]
    while pending and layout(value) != layout(node.meta["val"]):
        for user in pending.pop().users:
            if isinstance(user.meta.get("val"), (int, torch.SymInt)):
                continue  # a size
            if user.meta.get("unbacked_bindings") or may_look_at_strides(user) or not _is_in_table(user):
                return False
            args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: values.get(n, n.meta["val"]))
            try:
                renewed = user.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, ValueError):  # a view that the other strides do not allow
                return False
            if is_view(user):
                values[user] = renewed
                pending.append(user)
            elif layout(renewed) != layout(user.meta.get("val")):
                return False
    for reader, renewed in values.items():
        reader.meta["val"] = renewed
    return True


def place_views(module: GraphModule, sources: set[Node]) -> None:
    """Recompute the fake values of all views of ``sources``, which have replaced tensors whose memory began elsewhere."""
    mode, moved = fake_mode_of(module.graph.nodes), set(sources)
    for node in module.graph.nodes:
        if shares_memory(node) and node.args[0] in moved and not node.meta.get("unbacked_bindings"):
            moved.add(node)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same sizes and strides, of dynamic ones those that are known to be.

    Tensors that torch marks as conjugated or negated by whoever reads them are laid out as others that are marked so.
    """
    if (left.is_conj(), left.is_neg()) != (right.is_conj(), right.is_neg()):
        return False
    shapes = [tuple(map(as_expr, value.shape)) for value in (left, right)]
    return shapes[0] == shapes[1] and _strides_of(left) == _strides_of(right)


# ---------------------------------------------------------------------- the original strides


class Restored:
    """Tensors with their strides of ``before`` restored; views are restored by the same views of their restored bases."""

    def __init__(self, before: Mapping[Node, Strides], may_share: Callable[[Node], bool],
                 bases: Collection[Node] = ()) -> None:
        self.before, self.may_share, self.bases = before, may_share, bases
        self.restored: dict[Node, Node] = {}

    def at(self, node: Node, after: Node) -> Node:
        """Return ``node`` if it and its base have their strides of before, else a restored tensor behind ``after``."""
        if node not in self.restored:
            self.restored[node] = self._restore(node, after)
        return self.restored[node]

    def has_torn_rows(self, node: Node) -> bool:
        """Return whether the elements of a tensor's innermost dimension lay side by side before, and do no longer."""
        now, before = _strides_of(node.meta["val"]) if _has_strides(node) else (), self.before.get(node, ())
        return before[-1:] == (1,) and now[-1:] != (1,)

    def _restore(self, node: Node, after: Node) -> Node:
        if node not in self.before:  # a copy that this pass has made
            return self.at(node.args[0], after)  # type: ignore[arg-type]
        if is_view(node) and node not in self.bases:
            source = node.args[0]
            base = self.at(source, after)  # type: ignore[arg-type]
            if base is source:
                return node
            return _insert(base, node.target, base, *node.args[1:], **node.kwargs)
        value = node.meta["val"]
        if _strides_of(value) == self.before[node]:
            return node
        return in_order(node, order_of(value, self.before[node]), after, share=self.may_share(node))


def order_of(value: torch.Tensor, strides: Strides) -> list[int]:
    """Return the dimensions from the outermost to the innermost under dense strides, which eager's results have.

    Args:
        value: A tensor of the sizes.
        strides: The strides, in elements.
    """
    order = list(range(value.dim()))
    if value.dim() == 4 and strides == _strides_of(torch.empty_like(value, memory_format=torch.channels_last)):
        return CHANNELS_LAST
    if strides == _strides_of(torch.empty_like(value, memory_format=torch.contiguous_format)):
        return order
    examples = _examples(strides, value)
    return sorted(order, key=lambda dim: -examples[dim])


def _examples(strides: Strides, value: torch.Tensor) -> list[int]:
    """Return strides that are made of a tensor's sizes, in the example inputs."""
    environment = environment_of(value.shape)
    return list(strides) if environment is None else [hint_of(as_expr(stride), environment) for stride in strides]


def is_static(value: torch.Tensor) -> bool:
    """Return whether a tensor's sizes and strides are numbers."""
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


# ---------------------------------------------------------------------- inputs and outputs of the graph


def named_results(module: GraphModule) -> list[str]:
    """Return the names of a graph's results, which are those of the backward's inputs; of what is no node, none."""
    return [output.name if isinstance(output, Node) else "" for output in _outputs(module)]


def begins_of(names: Sequence[str], module: GraphModule) -> dict[str, int]:
    """Return where in their memory results begin, in elements, by the names that they had; only what is known.

    Args:
        names: The names, in order.
        module: The graph as it is now.
    """
    begins: dict[str, int] = {}
    for name, output in zip(names, _outputs(module), strict=True):
        value = output.meta.get("val") if isinstance(output, Node) else None
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and isinstance(value.storage_offset(), int):
            begins[name] = int(value.storage_offset())
    return begins


def restrided_inputs(module: GraphModule, example_inputs: Sequence[Any],
                     begins: Mapping[str, int]) -> dict[Node, torch.Tensor]:
    """Return the inputs of a backward to which the forward gives other strides than tracing knew, with their values.

    Args:
        module: The graph.
        example_inputs: Its inputs, real or fake, with those strides.
        begins: Where in memory they begin, in elements, by name; where it is not told, it is as traced.
    """
    def placed(node: Node, example: torch.Tensor) -> torch.Tensor:
        return example.as_strided(example.size(), example.stride(), begins.get(node.name))

    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    return {node: placed(node, example) for node, example in zip(placeholders, example_inputs, strict=True)
            if isinstance(example, torch.Tensor) and layout(example) != layout(node.meta["val"])}


def adopt(module: GraphModule, inputs: Mapping[Node, torch.Tensor], before: Mapping[Node, Strides]) -> None:
    """Adopt the strides that inputs really have, and propagate them.

    Args:
        module: The graph, which is changed in place.
        inputs: What an input is really like, by its placeholder; may be empty.
        before: The strides of every tensor before the change, in elements.
    """
    for node, example in inputs.items():
        node.meta["val"] = example
    if inputs:
        propagate(module, set(inputs), before)


def _outputs(module: GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def restore_outputs(kind: str, module: GraphModule, before: Mapping[Node, Strides], bases: Collection[Node] = (),
                    may_spread: bool = False) -> None:
    """Restore eager's strides of the results that the caller sees, which share memory where eager's share it.

    Tensors that a forward saves for its backward are not seen: they are restored only if AOTAutograd cannot be told their
    strides.

    Args:
        kind: forward, backward or inference.
        module: The graph, which is changed in place.
        before: Eager's strides of every tensor, in elements.
        bases: As for :func:`propagate`.
        may_spread: Whether rows of results that share memory with no others may be further apart than eager's.
    """
    outputs, after = _outputs(module), module.graph.output_node().prev
    seen, alone = num_seen(kind, module), alone_in_memory(kind, module) if may_spread else frozenset()
    restored = Restored(before, lambda node: _is_only(node, outputs), bases)

    def result(place: int, output: Any) -> Any:
        if not isinstance(output, Node) or output not in before or (place >= seen and _reported(output) is not None):
            return output
        if output in alone and is_spread(output.meta["val"], before[output]):
            return output
        return restored.at(output, after)

    module.graph.output_node().args = (tuple(result(place, output) for place, output in enumerate(outputs)),)


def alone_in_memory(kind: str, module: GraphModule) -> frozenset[Node]:
    """Return the results that share memory with no other, and that are given to the caller as they are.

    AOTAutograd makes some anew, by eager's strides, of one whose memory they are in. A gradient is copied if its strides are
    not those of what it is the gradient of.
    """
    context = TracingContext.try_get()
    if kind == "backward" or context is None or context.fw_metadata is None:
        return frozenset()
    metadata, outputs = context.fw_metadata, _outputs(module)
    own = outputs[len(metadata.mutated_inp_runtime_indices):][:len(metadata.output_info)]
    if len(own) != len(metadata.output_info):
        return frozenset()
    given = [output for output, info in zip(own, metadata.output_info, strict=True) if info.output_type in AS_THEY_ARE]
    memory = Counter(looked_at(output, is_view) for output in outputs if isinstance(output, Node))
    return frozenset(output for output in given if isinstance(output, Node) and memory[looked_at(output, is_view)] == 1)


def is_spread(value: torch.Tensor, before: Strides) -> bool:
    """Return whether a tensor has its rows further apart than under dense strides, with its dimensions in the same order."""
    now, shape = _strides_of(value), [as_expr(size) for size in value.shape]
    order = [dim for dim in order_of(value, before) if shape[dim] != 1]
    gaps = [(_gap(before, shape, *dims), _gap(now, shape, *dims)) for dims in pairwise(order)]
    return (all(dense == 0 and spread.is_nonnegative for dense, spread in gaps)
            and all(now[dim] == before[dim] for dim in order[-1:]))


def _gap(strides: Strides, shape: Sequence[sympy.Expr], outer: int, inner: int) -> sympy.Expr:
    """Return how many elements are between two slices along ``outer``, of which ``inner`` is the outermost dimension."""
    return sympy.expand(strides[outer] - strides[inner] * shape[inner])


def num_seen(kind: str, module: GraphModule) -> int:
    """Return how many of a graph's results its caller sees: all, but of a forward those before the saved tensors."""
    count = len(_outputs(module))
    return _num_returned(count) if kind == "forward" else count


def _is_only(output: Node, outputs: Sequence[Any]) -> bool:
    """Return whether only the caller can reach a result's memory: made here, returned once, read by no other node."""
    maker = output.args[0] if output.target is operator.getitem else output
    return isinstance(maker, Node) and makes_memory(maker) and len(output.users) == 1 and outputs.count(output) == 1


def _num_returned(default: int) -> int:
    """Return how many results of a forward its caller sees: those before the saved tensors."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return default if metadata is None else min(default, metadata.num_forward_returns)


def report_strides(module: GraphModule) -> None:
    """Report the strides of a forward's outputs to AOTAutograd, which traces the backward's inputs with them.

    What a pass before reported is replaced.
    """
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides[:] = [_reported(output) for output in _outputs(module)]


def _reported(output: Any) -> tuple[Any, ...] | None:
    value = output.meta.get("val") if isinstance(output, Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.stride()):
        return None  # AOTAutograd takes numbers only
    return tuple(value.stride())
