"""Numbers that stand in tensors on the host, where tensors on a device meet them, as constants on that device.

Beside tensors on a device eager takes a tensor on the host that has no dimensions for its number, and models write numbers
so: ``x * torch.tensor(0.5)``, ``y[:, 0] = 0``, ``torch.where(mask, x, torch.tensor(-inf))``. A kernel reads no memory of
the host, but where the graph tells the number, it can be a constant in the kernel. That holds for literals, for constants
of the graph that it does not write to, and for what is computed of such. What the graph is given is sent to the device
(``given_numbers.py``).

Worked example: ``mul(x, lift_fresh_copy(_tensor_constant0))``, with a constant of 0.5 in float32 on the host and ``x`` of
bfloat16 on a GPU, becomes ``mul(x, full([], 0.5))``, with a ``full`` of float32 on the GPU. The product stays bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.fx import base, fake_mode_of, insert
from dynafuse.ops import Kind, lookup
from dynafuse.ops.overloads import written_to

aten, prims = torch.ops.aten, torch.ops.prims
MOVES = {aten._to_copy.default, prims.device_put.default}


def move_numbers(module: GraphModule) -> None:
    """Replace numbers in tensors on the host, in place, where calls with results elsewhere read them."""
    if not any(is_elsewhere(node.meta.get("val")) for node in module.graph.nodes):
        return
    written = {base(value) for node in module.graph.nodes for value in written_to(node)}
    numbers: dict[Node, torch.Tensor] = {}
    for node in list(module.graph.nodes):
        if is_number(node.meta.get("val")):
            number = None if node in written else _number(module, node, numbers)
            if number is not None:
                numbers[node] = number
        elif is_elsewhere(node.meta.get("val")) and not numbers.keys().isdisjoint(node.all_input_nodes):
            with fake_mode_of([node]):
                _give_constants(node, numbers)


def is_number(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on the host without dimensions."""
    is_one = isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu"
    return is_one and not value.is_complex()


def is_elsewhere(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor on a device."""
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def constant_of(module: GraphModule, node: Node) -> torch.Tensor | None:
    """Return the tensor that a node of a graph holds; None if it is no constant, as a parameter is none."""
    held = getattr(module, str(node.target), None)
    return held if isinstance(held, torch.Tensor) and not isinstance(held, (FakeTensor, torch.nn.Parameter)) else None


def _number(module: GraphModule, node: Node, numbers: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor that a node computes on the host, whatever the graph is given; None if that is not known."""
    if node.op == "get_attr":
        constant = constant_of(module, node)
        return constant if is_number(constant) else None
    row = lookup(node.target)
    if row is None or row.kind not in (Kind.CREATION, Kind.POINTWISE, Kind.VIEW):
        return None
    if any(operand not in numbers for operand in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), numbers.__getitem__)
    with unset_fake_temporarily():
        return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]


def _give_constants(node: Node, numbers: Mapping[Node, torch.Tensor]) -> None:
    """Have a call on a device read constants there; a call that moves a number to the device becomes one."""
    if node.target in MOVES and node.args[0] in numbers:
        node.replace_all_uses_with(_constant(numbers[node.args[0]], node.meta["val"].dtype, node))  # type: ignore[index]
        return
    for operand in node.all_input_nodes:
        if operand in numbers:
            node.replace_input_with(operand, _constant(numbers[operand], numbers[operand].dtype, node))


def _constant(number: torch.Tensor, dtype: torch.dtype, node: Node) -> Node:
    """Insert a number of a dtype on a call's device, before the call."""
    with unset_fake_temporarily():
        value = number.to(dtype).item()
    return insert(node, aten.full.default, ([], value), dtype=dtype, device=node.meta["val"].device)
