"""Numbers that a graph is given in tensors on the host, where tensors on a device meet them, sent to that device together.

With ``torch.compile(dynamic=True)`` each float that a model holds, such as a norm's epsilon, comes as a tensor on the host
that has no dimensions. Eager takes it for its number where it meets a tensor on a device. A kernel reads no memory of the
host: what reads the number would be a call of its own, amid each norm. Numbers that are known become constants
(``host_numbers.py``).

Worked example: of two norms with epsilons ``a`` and ``b``, ``add(x, convert_element_type(a, float32))`` becomes
``add(x, convert_element_type(select(sent, 0, 0), float32))``, where ``sent`` is ``_to_copy(stack([a, b]), device="cuda")``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import base, fake_mode_of, insert, needed_by
from dynafuse.ops import Kind, lookup
from dynafuse.ops.overloads import written_to
from dynafuse.passes.host_numbers import is_elsewhere, is_number

aten = torch.ops.aten


def send_numbers(module: GraphModule) -> None:
    """Replace numbers, in place, by copies on the device whose tensors they meet; those that meet none stay as they are."""
    graph = module.graph
    written = {base(value) for node in graph.nodes for value in written_to(node)}
    given = {node for node in graph.find_nodes(op="placeholder") if is_number(node.meta.get("val")) and node not in written}
    numbers = _computed_of(graph, given) if given else given
    readers = [node for node in graph.nodes
               if is_elsewhere(node.meta.get("val")) and not numbers.isdisjoint(node.all_input_nodes)]
    if not readers:
        return
    device = readers[0].meta["val"].device
    readers = [node for node in readers if node.meta["val"].device == device]
    needed = needed_by(readers, numbers)
    with fake_mode_of(readers):
        sent = _sent([node for node in graph.nodes if node in needed & given], device)
        for node in [node for node in graph.nodes if node in needed - given]:
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: sent[operand])
            sent[node] = insert(node, node.target, args, **kwargs)
    for reader in readers:
        for operand in [operand for operand in reader.all_input_nodes if operand in sent]:
            reader.replace_input_with(operand, sent[operand])


def is_sent(node: Node) -> bool:
    """Return whether a node is a number on the host that is only sent to a device, or some of them together."""
    is_stack = node.target is aten.stack.default
    numbers = node.all_input_nodes if is_stack else [node]
    are_given = all(number.op == "placeholder" and is_number(number.meta.get("val")) for number in numbers)
    return are_given and all(map(_sends, node.users))


def _sends(node: Node) -> bool:
    """Return whether a node sends its operand to a device, or puts it beside others that are sent."""
    if node.target is aten.stack.default:
        return is_sent(node)
    return node.target is aten._to_copy.default and is_elsewhere(node.meta.get("val"))


def _computed_of(graph: Graph, given: set[Node]) -> set[Node]:
    """Return numbers on the host, and those that are computed there of nothing else."""
    numbers = set(given)
    for node in graph.nodes:
        row = lookup(node.target) if node.op == "call_function" else None
        is_moved = node.kwargs.get("device") is not None
        if row is None or row.kind not in (Kind.POINTWISE, Kind.VIEW) or is_moved or not is_number(node.meta.get("val")):
            continue
        if node.all_input_nodes and numbers.issuperset(node.all_input_nodes):
            numbers.add(node)
    return numbers


def _sent(given: Sequence[Node], device: torch.device) -> dict[Node, Node]:
    """Insert copies of numbers on a device, at the beginning of their graph: one copy for those of a dtype."""
    before = next(node for node in given[0].graph.nodes if node.op != "placeholder")
    by_dtype: Mapping[torch.dtype, list[Node]] = {
        dtype: [node for node in given if node.meta["val"].dtype == dtype]
        for dtype in dict.fromkeys(node.meta["val"].dtype for node in given)}
    sent: dict[Node, Node] = {}
    for nodes in by_dtype.values():
        if len(nodes) == 1:
            sent[nodes[0]] = insert(before, aten._to_copy.default, (nodes[0],), device=device)
            continue
        together = insert(before, aten._to_copy.default, (insert(before, aten.stack.default, (nodes,)),), device=device)
        sent |= {node: insert(before, aten.select.int, (together, 0, k)) for k, node in enumerate(nodes)}
    return sent
