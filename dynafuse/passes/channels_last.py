"""Memory layout of convolution nets: channels-last, when that is what their convolutions run in.

cuDNN's tensor-core kernels read channels-last; given anything else they transpose on the way in and out, for every
convolution. torch's own heuristic (Inductor's) decides per graph. What the caller sees keeps eager's strides; tensors
saved for the backward keep the new ones, and AOTAutograd is told so.

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
    """Adopt the strides that inputs really have, go channels-last if it pays, and report the outputs' strides."""
    others = strange_inputs(module, example_inputs) if kind == "backward" else {}
    if not others and not convolutions(module):
        return
    before = strides_of(module)
    adopt(module, others, before)
    moves = pays(kind, module)
    if moves:
        to_channels_last(module, before)
    if moves or others:
        restore_outputs(kind, module, before)
        module.graph.eliminate_dead_code()  # copies and views that others took the place of
    if moves and kind == "forward":
        report_strides(module)


def convolutions(module: GraphModule) -> list[Node]:
    """The calls whose layout this is about."""
    return [node for node in module.graph.nodes if node.target in CONVOLUTIONS]


def pays(kind: str, module: GraphModule) -> bool:
    """Whether torch's heuristic would move this graph's convolutions to channels-last."""
    found = convolutions(module)
    if not found or not all(_may_move(n) for n in found):
        return False
    if kind == "backward":  # its forward decided: follow the tensors that it saved
        return any(_is_channels_last(a.meta["val"]) for n in found for a in _read(n))
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=kind == "inference"))


def _may_move(node: Node) -> bool:
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return value.dim() == 4 and value.is_cuda and all(isinstance(s, int) for s in value.shape)


def _read(node: Node) -> list[Node]:
    return [a for i in CONVOLUTIONS[node.target] if isinstance(a := node.args[i], Node)]  # type: ignore[index]


def _is_channels_last(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    only = value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()
    return bool(only)


# ---------------------------------------------------------------------- the change


def to_channels_last(module: GraphModule, before: Mapping[Node, Strides]) -> None:
    """Copy what convolutions read to channels-last, and let the new strides flow through the graph."""
    copies: dict[Node, Node] = {}
    for node in convolutions(module):
        for i in CONVOLUTIONS[node.target]:  # type: ignore[index]
            source = node.args[i]
            if isinstance(source, Node) and source.meta["val"].dim() == 4:
                if source not in copies:
                    copies[source] = _laid_out(source, CHANNELS_LAST, _after(source))
                node.update_arg(i, copies[source])
    propagate(module, set(copies.values()), before)
    _drop_idle_copies(module, copies)


def _after(source: Node) -> Node:
    """The node after which ``source`` can be read: itself, or the last input if it is one."""
    place = source
    while place.op == "placeholder" and place.next.op == "placeholder":
        place = place.next
    return place


def _laid_out(source: Node, order: Sequence[int], after: Node, share: bool = True) -> Node:
    """``source`` densely in an order of its dimensions: a view if its elements lie so already and ``share``, else a copy."""
    value, back = source.meta["val"], [order.index(dim) for dim in range(len(order))]
    if share and value.is_contiguous() and value.permute(order).is_contiguous():
        flat = _called(after, aten.view.default, source, [value.numel()])
        inside = _called(flat, aten.view.default, flat, [value.shape[dim] for dim in order])
        return _called(inside, aten.permute.default, inside, back)
    if order == CHANNELS_LAST:
        return _called(after, aten.clone.default, source, memory_format=torch.channels_last)
    if order == sorted(order):
        return _called(after, aten.clone.default, source, memory_format=torch.contiguous_format)
    turned = _called(after, aten.permute.default, source, order)
    inside = _called(turned, aten.clone.default, turned, memory_format=torch.contiguous_format)
    return _called(inside, aten.permute.default, inside, back)


def _called(after: Node, target: Any, source: Node, *args: Any, **kwargs: Any) -> Node:
    """A call on ``source``, behind another node, with its fake value."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(target, (source, *args), kwargs)
    node.meta = {"val": _computed(node)}
    return node


def _computed(node: Node) -> Any:
    """The fake value of a call."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _drop_idle_copies(module: GraphModule, copies: dict[Node, Node]) -> None:
    """A source that became channels-last itself needs no copy."""
    for source, copy in copies.items():
        if source.meta["val"].stride() == copy.meta["val"].stride():
            copy.replace_all_uses_with(source)
            module.graph.erase_node(copy)


def propagate(module: GraphModule, changed: set[Node], before: Mapping[Node, Strides]) -> None:
    """Compute the fake values anew of what reads a tensor whose strides changed.

    What reads the memory of one gets a copy that lies as ``before``.
    """
    mode = detect_fake_mode([n.meta.get("val") for n in module.graph.nodes])
    assert mode is not None
    restored = Restored(before, lambda node: False)
    for node in module.graph.nodes:
        row = lookup(node.target)
        if row is not None and row.by_strides:
            with mode:
                node.update_arg(0, restored.at(node.args[0], node.prev))
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes) or node in changed:
            continue
        with mode:
            value = _evaluate(node, changed)
        if _layout(value) != _layout(node.meta.get("val")):
            changed.add(node)
        node.meta["val"] = value


def _evaluate(node: Node, changed: set[Node]) -> Any:
    """The fake value of a call; a view that the new strides do not allow gets a contiguous copy to look at."""
    try:
        return _computed(node)
    except (RuntimeError, ValueError):
        source = node.all_input_nodes[0]
        copy = _called(_after(source), aten.clone.default, source, memory_format=torch.contiguous_format)
        changed.add(copy)
        node.replace_input_with(source, copy)
        return _computed(node)


def _layout(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_layout(v) for v in value]
    return _strides_of(value) if isinstance(value, torch.Tensor) else value


def _strides_of(value: torch.Tensor) -> Strides:
    return tuple(s if isinstance(s, int) else s.node.expr for s in value.stride())


# ---------------------------------------------------------------------- the strides of before


class Restored:
    """Tensors with the strides of ``before`` again, those of views by the same views of what they look at."""

    def __init__(self, before: Mapping[Node, Strides], may_share: Callable[[Node], bool]) -> None:
        self.before, self.may_share = before, may_share
        self.restored: dict[Node, Node] = {}

    def at(self, node: Node, after: Node) -> Node:
        """``node`` if it has its strides and those of what it looks at, else another tensor, made behind ``after``."""
        if node not in self.restored:
            self.restored[node] = self._again(node, after)
        return self.restored[node]

    def _again(self, node: Node, after: Node) -> Node:
        if node not in self.before:  # a copy that was made here stands for what it copies
            return self.at(node.args[0], after)  # type: ignore[arg-type]
        if is_view(node):
            source = node.args[0]
            base = self.at(source, after)  # type: ignore[arg-type]
            if base is source:
                return node
            return _called(base, node.target, base, *node.args[1:], **node.kwargs)
        value = node.meta["val"]
        if _strides_of(value) == self.before[node]:
            return node
        return _laid_out(node, _order(value, self.before[node]), after, share=self.may_share(node))


# ---------------------------------------------------------------------- the borders of the graph


def strange_inputs(module: GraphModule, example_inputs: Sequence[Any]) -> dict[Node, torch.Tensor]:
    """The inputs of a backward that have got other strides from the forward than tracing knew, as they are."""
    placeholders = (node for node in module.graph.nodes if node.op == "placeholder")
    return {node: example for node, example in zip(placeholders, example_inputs, strict=True)
            if isinstance(example, torch.Tensor) and _layout(example) != _layout(node.meta["val"])}


def adopt(module: GraphModule, inputs: Mapping[Node, torch.Tensor], before: Mapping[Node, Strides]) -> None:
    """Take over the strides that inputs really have."""
    for node, example in inputs.items():
        node.meta["val"] = example
    if inputs:
        propagate(module, set(inputs), before)


def _outputs(module: GraphModule) -> list[Any]:
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def strides_of(module: GraphModule) -> dict[Node, Strides]:
    """The strides of every tensor of a graph, as tracing found them."""
    values = ((node, node.meta.get("val")) for node in module.graph.nodes)
    return {node: _strides_of(value) for node, value in values
            if isinstance(value, torch.Tensor) and value.layout is torch.strided}


def restore_outputs(kind: str, module: GraphModule, before: Mapping[Node, Strides]) -> None:
    """Give what the caller sees eager's strides again, and shared memory where eager's results share it.

    A forward's saved tensors are not seen.
    """
    outputs, after = _outputs(module), module.graph.output_node().prev
    seen = _returned(len(outputs)) if kind == "forward" else len(outputs)
    restored = Restored(before, lambda node: _is_only(node, outputs))
    known = (isinstance(output, Node) and output in before for output in outputs[:seen])
    shown = [restored.at(output, after) if tensor else output for output, tensor in zip(outputs, known, strict=False)]
    module.graph.output_node().args = ((*shown, *outputs[seen:]),)


def _is_only(output: Node, outputs: Sequence[Any]) -> bool:
    """Whether the caller gets a tensor whose memory nothing else can reach: made here, returned once, read by nobody."""
    maker = output.args[0] if output.target is operator.getitem else output
    return isinstance(maker, Node) and makes_memory(maker) and len(output.users) == 1 and outputs.count(output) == 1


def _order(value: torch.Tensor, strides: Strides) -> list[int]:
    """The dimensions from the outermost to the innermost under dense strides, which are those of eager's results."""
    order = list(range(value.dim()))
    if value.dim() == 4 and strides == _strides_of(torch.empty_like(value, memory_format=torch.channels_last)):
        return CHANNELS_LAST
    if strides == _strides_of(torch.empty_like(value, memory_format=torch.contiguous_format)):
        return order
    return sorted(order, key=lambda dim: -strides[dim]) if all(isinstance(stride, int) for stride in strides) else order


def _returned(default: int) -> int:
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return default if metadata is None else min(default, metadata.num_forward_returns)


def report_strides(module: GraphModule) -> None:
    """Tell AOTAutograd the strides of a forward's outputs, from which it traces the backward's inputs."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(_reported(o) for o in _outputs(module))


def _reported(output: Any) -> tuple[Any, ...] | None:
    value = output.meta.get("val") if isinstance(output, Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.stride()):
        return None  # AOTAutograd takes numbers only
    return tuple(value.stride())
