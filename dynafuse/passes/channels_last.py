"""Memory layout of convolution nets: channels-last, if their convolutions run in it.

cuDNN's tensor-core kernels read channels-last; in any other layout they transpose operands and results of every
convolution. Inductor's heuristic decides per graph. What becomes of results and of saved tensors, says
``strides.py``.

Worked example: in ``relu(conv(conv(x)))`` the first convolution's input is copied to channels-last once, everything in
between stays channels-last, and the result is copied back. The weight of a 1×1 convolution has the same memory in both
layouts: it gets the other strides, and is not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dynafuse.fx import fake_mode_of, hint
from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.passes.depthwise import can_be_written_out
from dynafuse.passes.strides import (
    CHANNELS_LAST,
    Strides,
    adopt,
    after_of,
    in_order,
    is_static,
    propagate,
    report_strides,
    restore_outputs,
    restrided_inputs,
    strides_of,
)

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: (0, 1), aten.convolution_backward.default: (0, 1, 2)}
"""Positions of the arguments that a convolution reads in its layout."""


def optimize_layout(kind: str, module: GraphModule, example_inputs: Sequence[Any], begins: Mapping[str, int]) -> None:
    """Adopt the strides that inputs really have, go channels-last if it pays, and report the outputs' strides; in place.

    Args:
        kind: forward, backward or inference.
        module: A normalized graph.
        example_inputs: Its inputs, real or fake; only a backward's may have other strides than were traced.
        begins: Where in memory these begin, as :func:`begins_of` has told of the forward's results.
    """
    restrided = restrided_inputs(module, example_inputs, begins) if kind == "backward" else {}
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
    """Return whether Inductor's heuristic would move this graph's convolutions to channels-last.

    Not if all of them can be written out, in any layout, where they are faster than between copies: of 128 images of
    144 × 56 × 56, in planes, that takes an H200 109 µs, not 222.
    """
    nodes = convolutions(module)
    if not nodes or not all(_may_move(node, kind) for node in nodes):
        return False
    if kind == "backward":  # its forward decided: follow the tensors that it saved, and gradients of its results
        return any(has_channels_innermost(operand.meta["val"]) for node in nodes for operand in _operands(node))
    if all(map(can_be_written_out, nodes)):
        return False
    from torch._inductor.graph import GraphLowering  # slow to import

    return bool(GraphLowering.decide_layout_opt(with_examples(module), is_inference=kind == "inference"))


def _may_move(node: Node, kind: str) -> bool:
    """Return whether a convolution can run in channels-last.

    In training, sizes beside the batch's have to be known: strides of what the forward keeps are made of them, and
    AOTAutograd takes numbers only.
    """
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    if value.dim() != 4 or not value.is_cuda or any(isinstance(part, Node) for part in chain(*map(_parts, node.args[3:]))):
        return False
    return kind == "inference" or all(isinstance(size, int) for size in value.shape[1:])


def _parts(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, (list, tuple)) else (argument,)


def with_examples(module: GraphModule) -> GraphModule:
    """Return a graph whose convolutions read tensors of the examples' sizes: the heuristic knows no dynamic ones.

    Args:
        module: The graph. It is returned itself if its convolutions have no dynamic sizes.
    """
    operands = dict.fromkeys(operand for node in convolutions(module) for operand in _operands(node))
    dynamic = [operand for operand in operands if not is_static(operand.meta["val"])]
    if not dynamic:
        return module
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    with fake_mode_of(dynamic):
        for operand in dynamic:
            value = operand.meta["val"]
            sizes, strides = (list(map(hint, numbers)) for numbers in (value.shape, value.stride()))
            example = value.new_empty_strided(sizes, strides)
            copies[operand].meta = {**operand.meta, "val": example}
    return GraphModule(module, graph)


def _operands(node: Node) -> list[Node]:
    return [a for i in CONVOLUTIONS[node.target] if isinstance(a := node.args[i], Node)]  # type: ignore[index]


def has_channels_innermost(value: Any) -> bool:
    """Return whether a value is a tensor whose channels lie side by side in memory, and that is in no other layout.

    Others may lie in between, as where a gradient is part of a sequence with a class token. Nothing is asked of sizes.
    """
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    _, channels, height, width = map(as_expr, value.shape)
    return channels != 1 and (height, width) != (1, 1) and known_equal(as_expr(value.stride(1)), 1)


# ---------------------------------------------------------------------- the change


def to_channels_last(module: GraphModule, before: Mapping[Node, Strides]) -> None:
    """Copy what convolutions read to channels-last, and propagate the new strides through the graph."""
    copies: dict[Node, Node] = {}
    for node in convolutions(module):
        for i in CONVOLUTIONS[node.target]:  # type: ignore[index]
            source = node.args[i]
            if isinstance(source, Node) and source.meta["val"].dim() == 4:
                if source not in copies:
                    copies[source] = in_order(source, CHANNELS_LAST, after_of(source))
                node.update_arg(i, copies[source])
    propagate(module, set(copies.values()), before)
    _drop_idle_copies(module, copies)


def _drop_idle_copies(module: GraphModule, copies: dict[Node, Node]) -> None:
    """Remove the copies of sources that have become channels-last themselves."""
    for source, copy in copies.items():
        if source.meta["val"].stride() == copy.meta["val"].stride():
            copy.replace_all_uses_with(source)
            module.graph.erase_node(copy)
