"""Memory layout of convolution nets: channels-last, if their convolutions run in it.

cuDNN's tensor-core kernels read channels-last; in any other layout they transpose operands and results of every
convolution. Inductor's heuristic decides per graph. Results that the caller sees keep eager's strides; tensors saved for
the backward keep the new ones, and AOTAutograd is told these.

Worked example: in ``relu(conv(conv(x)))`` the first convolution's input is copied to channels-last once, everything in
between stays channels-last, and the result is copied back. The weight of a 1×1 convolution has the same memory in both
layouts: it gets the other strides, and is not copied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import GraphModule, Node

from dynafuse.fx import is_view, makes_memory
from dynafuse.ops import lookup

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""Positions of the arguments that a convolution reads in its layout."""
CHANNELS_LAST = [0, 2, 3, 1]
"""The dimensions of a batch of images from the outermost in memory to the innermost."""
Strides = tuple[Any, ...]
"""Integers, or expressions over size symbols."""


def optimize_layout(kind: str, module: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Adopt the strides that inputs really have, go channels-last if it pays, and report the outputs' strides; in place.

    ``kind`` is forward, backward or inference; ``example_inputs`` are the graph's inputs, real or fake.
    """
    restrided = restrided_inputs(module, example_inputs) if kind == "backward" else {}
    if not restrided and not convolutions(module):
        return
    before = strides_of(module)
    adopt(module, restrided, before)
    moves = pays(kind, module)
    if moves:
        to_channels_last(module, before)
    if moves or restrided:
        restore_outputs(kind, module, before)
        module.graph.eliminate_dead_code()  # copies and views that have been replaced
    if moves and kind == "forward":
        report_strides(module)


def convolutions(module: GraphModule) -> list[Node]:
    """Return the convolutions of a graph, those of a backward included."""
    return [node for node in module.graph.nodes if node.target in CONVOLUTIONS]


def pays(kind: str, module: GraphModule) -> bool:
    """Return whether Inductor's heuristic would move this graph's convolutions to channels-last."""
    nodes = convolutions(module)
    if not nodes or not all(_may_move(node) for node in nodes):
        return False
    if kind == "backward":  # its forward decided: follow the tensors that it saved
        return any(_is_channels_last(operand.meta["val"]) for node in nodes for operand in _operands(node))
    from torch._inductor.graph import GraphLowering  # slow to import

    return bool(GraphLowering.decide_layout_opt(module, is_inference=kind == "inference"))


def _may_move(node: Node) -> bool:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return value.dim() == 4 and value.is_cuda and all(isinstance(s, int) for s in value.shape)


def _operands(node: Node) -> list[Node]:
    return [a for i in CONVOLUTIONS[node.target] if isinstance(a := node.args[i], Node)]  # type: ignore[index]


def _is_channels_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return bool(value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous())


# ---------------------------------------------------------------------- the change


def to_channels_last(module: GraphModule, before: Mapping[Node, Strides]) -> None:
    """Copy what convolutions read to channels-last, and propagate the new strides through the graph."""
    copies: dict[Node, Node] = {}
    for node in convolutions(module):
        for i in CONVOLUTIONS[node.target]:  # type: ignore[index]
            source = node.args[i]
            if isinstance(source, Node) and source.meta["val"].dim() == 4:
                if source not in copies:
                    copies[source] = _in_order(source, CHANNELS_LAST, _after(source))
                node.update_arg(i, copies[source])
    propagate(module, set(copies.values()), before)
    _drop_idle_copies(module, copies)


def _after(source: Node) -> Node:
    """Return the node behind which ``source`` can be read: itself, or the last input if it is an input."""
    place = source
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    return place


def _in_order(source: Node, order: Sequence[int], after: Node, share: bool = True) -> Node:
    """Return ``source`` dense in an order of its dimensions: a view if its memory is so and may be shared, else a copy."""
    value, inverse = source.meta["val"], [order.index(dim) for dim in range(len(order))]
    if share and value.is_contiguous() and value.permute(order).is_contiguous():
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


def _insert(after: Node, target: Any, source: Node, *args: Any, **kwargs: Any) -> Node:
    """Insert a call on ``source`` behind another node, with its fake value."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, (source, *args), kwargs)
    node.meta = {"val": _computed(node)}
    return node


def _computed(node: Node) -> Any:
    """Return the fake value of a call."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _drop_idle_copies(module: GraphModule, copies: dict[Node, Node]) -> None:
    """Remove the copies of sources that have become channels-last themselves."""
    for source, copy in copies.items():
        if source.meta["val"].stride() == copy.meta["val"].stride():
            copy.replace_all_uses_with(source)
            module.graph.erase_node(copy)


def propagate(module: GraphModule, changed: set[Node], before: Mapping[Node, Strides]) -> None:
    """Recompute the fake values of all that reads a tensor whose strides have ``changed``, to which they are added.

    Ops that address the memory of such a tensor get a copy with its strides of ``before``, and so do ops of others.
    """
    mode = detect_fake_mode([n.meta.get("val") for n in module.graph.nodes])
    assert mode is not None
    restored = Restored(before, lambda node: False)
    for node in module.graph.nodes:
        with mode:
            _restore_operands(node, restored)
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes) or node in changed:
            continue
        with mode:
            value = _evaluate(node, changed)
        if _layout(value) != _layout(node.meta.get("val")):
            changed.add(node)
        node.meta["val"] = value


def _restore_operands(node: Node, restored: Restored) -> None:
    """Have a call read tensors with their strides of before, if it depends on them."""
    row = lookup(node.target)
    if row is not None and row.by_strides:
        node.update_arg(0, restored.at(node.args[0], node.prev))  # type: ignore[arg-type]
    elif _may_look_at_strides(node.target):
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: restored.at(n, node.prev) if _has_strides(n) else n)
        node.args, node.kwargs = args, kwargs


def _may_look_at_strides(target: Any) -> bool:
    """Return whether a call was written or traced for eager's strides: calls of graphs and kernels, others' ops."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return False
    return torch.Tag.flexible_layout not in target.tags


def _has_strides(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _evaluate(node: Node, changed: set[Node]) -> Any:
    """Return the fake value of a call; a view that the new strides do not allow becomes one of a contiguous copy."""
    try:
        return _computed(node)
    except (RuntimeError, ValueError):
        source = node.all_input_nodes[0]
        copy = _insert(_after(source), aten.clone.default, source, memory_format=torch.contiguous_format)
        changed.add(copy)
        node.replace_input_with(source, copy)
        return _computed(node)


def _layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_layout(v) for v in value]
    return _strides_of(value) if isinstance(value, torch.Tensor) else value


def _strides_of(value: torch.Tensor) -> Strides:
    return tuple(s if isinstance(s, int) else s.node.expr for s in value.stride())


# ---------------------------------------------------------------------- the original strides


class Restored:
    """Tensors with their strides of ``before`` restored; views are restored by the same views of their restored bases."""

    def __init__(self, before: Mapping[Node, Strides], may_share: Callable[[Node], bool]) -> None:
        self.before, self.may_share = before, may_share
        self.restored: dict[Node, Node] = {}

    def at(self, node: Node, after: Node) -> Node:
        """Return ``node`` if it and its base have their strides of before, else a restored tensor behind ``after``."""
        if node not in self.restored:
            self.restored[node] = self._restore(node, after)
        return self.restored[node]

    def _restore(self, node: Node, after: Node) -> Node:
        if node not in self.before:  # a copy that this pass has made
            return self.at(node.args[0], after)  # type: ignore[arg-type]
        if is_view(node):
            source = node.args[0]
            base = self.at(source, after)  # type: ignore[arg-type]
            if base is source:
                return node
            return _insert(base, node.target, base, *node.args[1:], **node.kwargs)
        value = node.meta["val"]
        if _strides_of(value) == self.before[node]:
            return node
        return _in_order(node, _order(value, self.before[node]), after, share=self.may_share(node))


# ---------------------------------------------------------------------- inputs and outputs of the graph


def restrided_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, torch.Tensor]:
    """Return the inputs of a backward to which the forward gives other strides than tracing knew, with their values."""
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    return {node: example for node, example in zip(placeholders, example_inputs, strict=True)
            if isinstance(example, torch.Tensor) and _layout(example) != _layout(node.meta["val"])}


def adopt(module: GraphModule, inputs: Mapping[Node, torch.Tensor], before: Mapping[Node, Strides]) -> None:
    """Adopt the strides that inputs really have, and propagate them."""
    for node, example in inputs.items():
        node.meta["val"] = example
    if inputs:
        propagate(module, set(inputs), before)


def _outputs(module: GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def strides_of(module: GraphModule) -> dict[Node, Strides]:
    """Return the strides of every strided tensor of a graph, as in the fake values."""
    return {node: _strides_of(node.meta["val"]) for node in module.graph.nodes if _has_strides(node)}


def restore_outputs(kind: str, module: GraphModule, before: Mapping[Node, Strides]) -> None:
    """Restore eager's strides of the results that the caller sees, which share memory where eager's share it.

    Tensors that a forward saves for its backward are not seen.
    """
    outputs, after = _outputs(module), module.graph.output_node().prev
    seen = _num_returned(len(outputs)) if kind == "forward" else len(outputs)
    restored = Restored(before, lambda node: _is_only(node, outputs))
    is_tensor = [isinstance(output, Node) and output in before for output in outputs[:seen]]
    results = [restored.at(output, after) if tensor else output for output, tensor in zip(outputs, is_tensor, strict=False)]
    module.graph.output_node().args = ((*results, *outputs[seen:]),)


def _is_only(output: Node, outputs: Sequence[Any]) -> bool:
    """Return whether only the caller can reach a result's memory: made here, returned once, read by no other node."""
    maker = output.args[0] if output.target is operator.getitem else output
    return isinstance(maker, Node) and makes_memory(maker) and len(output.users) == 1 and outputs.count(output) == 1


def _order(value: torch.Tensor, strides: Strides) -> list[int]:
    """Return the dimensions from the outermost to the innermost under dense strides, which eager's results have."""
    order = list(range(value.dim()))
    if value.dim() == 4 and strides == _strides_of(torch.empty_like(value, memory_format=torch.channels_last)):
        return CHANNELS_LAST
    if strides == _strides_of(torch.empty_like(value, memory_format=torch.contiguous_format)):
        return order
    return sorted(order, key=lambda dim: -strides[dim]) if all(isinstance(stride, int) for stride in strides) else order


def _num_returned(default: int) -> int:
    """Return how many results of a forward its caller sees: those before the saved tensors."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return default if metadata is None else min(default, metadata.num_forward_returns)


def report_strides(module: GraphModule) -> None:
    """Report the strides of a forward's outputs to AOTAutograd, which traces the backward's inputs with them."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(_reported(o) for o in _outputs(module))


def _reported(output: Any) -> tuple[Any, ...] | None:
    value = output.meta.get("val") if isinstance(output, Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.stride()):
        return None  # AOTAutograd takes numbers only
    return tuple(value.stride())
