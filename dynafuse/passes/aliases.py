"""Results that are views of an input that the graph writes to: views of the input, not of its new value.

AOTAutograd hands over a graph that computes the input's new value, and views of that as results. Of such a result it takes
sizes, strides and the offset only, to make it anew as a view of the input; and the new value's offset is not the input's.
Where sizes are symbols, what it makes so lies elsewhere in memory. Views of the input itself lie where eager's do, and the
new value need not have memory of its own.

Worked example::

    new = slice_scatter(x, y, 1, 0, 4)
    copy_(x, new)
    return slice(new, 1, 0, 1)

returns ``slice(x, 1, 0, 1)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._guards import TracingContext, detect_fake_mode
from torch.fx import GraphModule, Node

from dynafuse.fx import is_view
from dynafuse.ops.overloads import COPIES_INTO


def return_views_of_inputs(module: GraphModule) -> GraphModule:
    """Return the module of a forward or inference graph with results that are views of the inputs that it writes to."""
    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    inputs = module.graph.find_nodes(op="placeholder")
    if metadata is None or len(inputs) != len(metadata.input_info) or _has_subclasses(metadata):
        return module
    output = module.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    written = metadata.mutated_inp_runtime_indices
    new = {inputs[i]: results[k] for k, i in enumerate(written)} | _copied_into(module)
    for place, info in enumerate(metadata.output_info, len(written)):
        if info.output_type is OutputType.alias_of_input and isinstance(results[place], Node):
            source = inputs[info.base_idx]
            results[place] = _view_of(source, new.get(source), results[place]) or results[place]
    output.args = (tuple(results),)
    module.graph.eliminate_dead_code()
    return module


def _has_subclasses(metadata: Any) -> bool:
    """Return whether some arguments or results are made of several of the graph's."""
    described = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta)
    return bool(metadata.tokens) or not all(isinstance(meta, PlainTensorMeta) for meta in described)


def _copied_into(module: GraphModule) -> dict[Node, Any]:
    """Return the new values of inputs that the graph itself writes to."""
    copies = module.graph.find_nodes(op="call_function", target=COPIES_INTO)
    return {copy.args[0]: copy.args[1] for copy in copies if isinstance(copy.args[0], Node)}


def _view_of(source: Node, new: Any, result: Node) -> Node | None:
    """Return the view of an input that a result is of its new value; None if it is none, or if the input allows none."""
    chain, node = list[Node](), result
    while node is not new and is_view(node):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node is not new:
        return None
    mode = detect_fake_mode(source.meta["val"])
    assert mode is not None
    graph, view = source.graph, source
    for node in reversed(chain):
        args = torch.fx.map_arg(node.args[1:], lambda n: n.meta["val"])
        try:
            with mode:
                value = node.target(view.meta["val"], *args, **node.kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # strides of the input that the new value does not have
            return None
        with graph.inserting_before(graph.output_node()):
            view = graph.call_function(node.target, (view, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
        view.meta = node.meta | {"val": value}
    return view
