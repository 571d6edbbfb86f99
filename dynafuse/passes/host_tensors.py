"""Tensors that a graph makes on the host of nothing but sizes and literals, made on the device that reads them.

Models forget to say where: ``table[torch.arange(n) % k]`` has its indices on the host, and ``torch.tensor(scales)`` begins
there whatever device it names. The host makes them in every call, a copy waits for it, and a graph with tensors in two
places is not captured. What follows from the graph alone is computed where it is read, in the kernel that reads it; literals
of several numbers are sent once, when the graph is compiled. Lone numbers are constants of kernels (``host_numbers.py``).
Random numbers stay: a device draws others.

Worked example: ``index(table, [remainder(arange(196), 14)])``, with the indices on the host and ``table`` on a GPU, becomes
the same with an ``arange`` on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import base, fake_mode_of, insert, needed_by
from dynafuse.ops import Kind, lookup
from dynafuse.ops.overloads import written_to
from dynafuse.passes.host_numbers import MOVES, constant_of, is_elsewhere, is_number
from dynafuse.passes.strides import same_layout

aten = torch.ops.aten

KINDS = (Kind.CREATION, Kind.POINTWISE, Kind.VIEW, Kind.INDEX, Kind.GATHER, Kind.REDUCTION, Kind.SCAN)
"""Kinds of ops whose results follow from their operands."""

PLACES = ("device", "pin_memory", "non_blocking")
"""Arguments that say where memory is and how it gets there."""

PREFIX = "sent_constant"
"""What the names of literals on a device begin with."""


def make_on_device(module: GraphModule) -> None:
    """Make what depends on nothing on the devices that read it, in place; who reads it on the host keeps what is there."""
    readers = [node for node in module.graph.nodes
               if is_elsewhere(node.meta.get("val")) and any(map(_is_misplaced, node.all_input_nodes))]
    known = _known(module) if readers else set()
    readers = [node for node in readers if not known.isdisjoint(node.all_input_nodes)]
    for device in dict.fromkeys(node.meta["val"].device for node in readers):
        reading = [node for node in readers if node.meta["val"].device == device]
        with fake_mode_of(reading):
            copies = _copies(module, needed_by(reading, known), device)
            for reader in reading:
                _give(reader, copies)


def _is_on_host(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _is_misplaced(node: Node) -> bool:
    """Return whether a node is a tensor on the host that has to be sent to a device, as a lone number has not."""
    return _is_on_host(node) and not is_number(node.meta["val"])


def _known(module: GraphModule) -> set[Node]:
    """Return the tensors on the host that depend on nothing but sizes, and that nothing writes to."""
    written = {base(value) for node in module.graph.nodes for value in written_to(node)}
    known = set[Node]()
    for node in module.graph.nodes:
        if _is_on_host(node) and base(node) not in written and (
                constant_of(module, node) is not None if node.op == "get_attr" else _follows(node, known)):
            known.add(node)
    return known


def _follows(node: Node, known: set[Node]) -> bool:
    row = lookup(node.target)
    tensors = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]
    return row is not None and row.fusible and row.kind in KINDS and known.issuperset(tensors)


def _copies(module: GraphModule, needed: set[Node], device: torch.device) -> dict[Node, Node]:
    """Insert nodes that make some tensors on a device; return them by those on the host."""
    copies: dict[Node, Node] = {}
    for node in [node for node in module.graph.nodes if node in needed]:
        if node.op == "get_attr":
            copies[node] = _sent(module, node, device)
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: copies.get(operand, operand))
        kwargs = {name: value for name, value in kwargs.items() if name not in PLACES}
        row = lookup(node.target)
        if row is not None and row.kind is Kind.CREATION:
            kwargs["device"] = device
        copies[node] = insert(node, node.target, args, **kwargs)
    return copies


def _sent(module: GraphModule, node: Node, device: torch.device) -> Node:
    """Insert a constant of the graph that is a copy of another's on a device."""
    constant, graph = constant_of(module, node), module.graph
    assert constant is not None
    name = next(name for k in range(len(graph.nodes)) if not hasattr(module, name := f"{PREFIX}{k}"))
    module.register_buffer(name, copy_on(device, constant), persistent=False)
    with graph.inserting_before(node):
        sent = graph.get_attr(name)
    sent.meta = dict(node.meta) | {"val": node.meta["val"].to(device)}
    return sent


def copy_on(device: torch.device, constant: torch.Tensor) -> torch.Tensor:
    """Return a copy of a constant in a device's memory."""
    with unset_fake_temporarily():
        return constant.to(device)


def _give(reader: Node, copies: Mapping[Node, Node]) -> None:
    """Have a call read tensors on its device; one that moves a tensor there becomes a copy, or a cast."""
    if reader.target not in MOVES:
        for operand in [operand for operand in reader.all_input_nodes if operand in copies]:
            reader.replace_input_with(operand, copies[operand])
        return
    on_device = copies[reader.args[0]]  # type: ignore[index]
    how: dict[str, Any] = {name: value for name, value in reader.kwargs.items() if name not in (*PLACES, "layout")}
    copy = insert(reader, aten._to_copy.default if "dtype" in how else aten.clone.default, (on_device,), **how)
    if same_layout(copy.meta["val"], reader.meta["val"]):
        reader.replace_all_uses_with(copy)
        reader.graph.erase_node(reader)
    else:
        reader.replace_input_with(reader.args[0], on_device)  # type: ignore[arg-type]
