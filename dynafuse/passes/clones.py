"""Copies that nobody can tell from what they copy: dropout of probability 0, calls of ``clone``, padding by nothing.

Kernels make such a copy besides its original, and the backward may keep both. It stays if the caller could see, by what is
written to one of them, that they are two: if either is, or shares memory with, an input, a result, or what the graph
writes to.

Worked example: of attention in training, ``p = softmax(s)`` and ``clone(p)``, which is what multiplies the values, the
backward keeps ``p`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from dynafuse.fx import arguments
from dynafuse.ops.overloads import written_to
from dynafuse.passes.duplicates import clone, memories, writes
from dynafuse.passes.strides import place_views, same_layout

aten = torch.ops.aten

COPIES: Mapping[Callable[..., Any], Callable[[Mapping[str, Any]], Node | None]] = {
    clone: lambda given: given["self"],
    aten.constant_pad_nd.default: lambda given: given["self"] if not any(given["pad"]) else None,
    aten.cat.default: lambda given: given["tensors"][0] if len(given["tensors"]) == 1 else None,
    aten.repeat.default: lambda given: given["self"] if set(given["repeats"]) <= {1} else None,
}
"""What an op copies, by its arguments; None if it does more than that. In which sizes and strides is another question."""


def remove_clones(module: GraphModule) -> None:
    """Replace copies in the same strides by what they copy, in place, where nothing can tell them apart."""
    copies = [node for node in module.graph.nodes if node.target in COPIES and _copied(node) is not None]
    if not copies or any(writes(node) and not list(written_to(node)) for node in module.graph.nodes):
        return
    seen, replaced = _seen(module.graph), set[Node]()
    for node in copies:
        source = _copied(node)  # which may be what a copy before it was of
        assert source is not None
        if same_layout(source.meta["val"], node.meta["val"]) and seen.isdisjoint(memories((node, source))):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
            replaced.add(source)
    if replaced:
        place_views(module, replaced)


def _copied(node: Node) -> Node | None:
    return COPIES[node.target](arguments(node))  # type: ignore[index]


def _seen(graph: Graph) -> set[Node | StorageWeakRef]:
    """Return the memory of inputs and results, and of what is written to."""
    given: Iterable[Node] = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    written = (value for node in graph.nodes for value in written_to(node))
    return {*memories((*given, *graph.output_node().all_input_nodes, *written))}
