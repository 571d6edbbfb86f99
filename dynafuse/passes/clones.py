"""Copies that nobody can tell from what they copy: dropout of probability 0 copies, and so do calls of ``clone`` in models.

Kernels make such a copy besides its original, and the backward may keep both. It stays if the caller could see, by what is
written to one of them, that they are two: if either is, or shares memory with, an input, a result, or what the graph
writes to.

Worked example: of attention in training, ``p = softmax(s)`` and ``clone(p)``, which is what multiplies the values, the
backward keeps ``p`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from dynafuse.ops.overloads import written_to
from dynafuse.passes.duplicates import clone, memories, writes
from dynafuse.passes.strides import place_views, same_layout


def remove_clones(module: GraphModule) -> None:
    """Replace copies in the same strides by what they copy, in place, where nothing can tell them apart."""
    copies = module.graph.find_nodes(op="call_function", target=clone)
    if not copies or any(writes(node) and not list(written_to(node)) for node in module.graph.nodes):
        return
    seen, replaced = _seen(module.graph), set[Node]()
    for node in copies:
        source = node.args[0]
        if same_layout(source.meta["val"], node.meta["val"]) and seen.isdisjoint(memories((node, source))):
            node.replace_all_uses_with(source)
            module.graph.erase_node(node)
            replaced.add(source)
    if replaced:
        place_views(module, replaced)


def _seen(graph: Graph) -> set[Node | StorageWeakRef]:
    """Return the memory of inputs and results, and of what is written to."""
    given: Iterable[Node] = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    written = (value for node in graph.nodes for value in written_to(node))
    return {*memories((*given, *graph.output_node().all_input_nodes, *written))}
