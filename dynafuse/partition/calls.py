"""What a call of a library op costs: matrix products and attention by their arithmetic, any other op by its bytes.

Flops come from torch's own formulas (``torch.utils.flop_counter``).

Worked example, on an H200: ``mm`` of two ``bfloat16[8192, 8192]`` takes 1.1e12 flops, at 780 TFLOP/s 1410 µs; the 403 MB
that it moves would take 94 µs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dynafuse.ir import Facts, Plan
from dynafuse.partition.annotate import hint
from dynafuse.partition.cost import LEAST, Prediction, Work, predict
from dynafuse.partition.device import Device
from dynafuse.partition.normalize import is_view


def call_flops(target: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations of a matrix product, a convolution or an attention; 0 for any other op."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None or result is None:
        return 0.0
    args, kwargs, out = pytree.tree_map(_sizes, (args, kwargs, result))
    return float(formula(*args, **kwargs, out_val=out))


def _sizes(value: Any) -> Any:
    """A tensor as its sizes, a dynamic size as its example; whatever else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.Size([hint(size) for size in value.shape])
    return hint(value) if isinstance(value, torch.SymInt) else value


def call_prediction(node: Node, moved: int, device: Device) -> Prediction:
    """What a node that runs eager costs; ``moved`` are the bytes of its tensors."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    return op_prediction(node.target, args, kwargs, node.meta.get("val"), moved, device)


def op_prediction(target: Any, args: Any, kwargs: Any, result: Any, moved: int, device: Device) -> Prediction:
    """What an op costs that runs eager on the tensors among its arguments."""
    memory = predict(Work(moved, 0.0, 1 << 30, "pointwise"), device, "eager")
    flops = call_flops(target, args, kwargs, result)
    if not flops:
        return memory
    rate = device.contraction_tflops if _width((args, kwargs)) <= 2 else device.contraction_tflops_float32
    busy = max(flops / max(rate * 1e6, LEAST), memory.device_us - device.launch_us_eager)
    return Prediction(busy + device.launch_us_eager, memory.host_us, 0.0, busy + device.replay_us)


def calls_prediction(facts: Mapping[Node, Facts], device: Device) -> Prediction:
    """What all ops of a graph cost that run eager."""
    total = Prediction()
    for node, found in facts.items():
        if found.role == "eager" and launches(node):
            tensors = [facts[n].tensor for n in {node: None, **dict.fromkeys(node.all_input_nodes)}]
            total += call_prediction(node, sum(t.bytes for t in tensors if t is not None), device)
    return total


def plan_prediction(plan: Plan, device: Device) -> Prediction:
    """What a call of a planned graph costs, its kernels compiled."""
    chosen = (o for region in plan.regions for o in region.decision.options if o.executor == region.executor)
    return sum((Prediction(o.device_us, o.host_us, 0.0, o.device_us) for o in chosen),
               calls_prediction(plan.annotated.facts, device))


def launches(node: Node) -> bool:
    """Whether a call does something: views and picking one of several outputs do not."""
    return node.target is not operator.getitem and not is_view(node)


def base(node: Node) -> Node:
    """What a value is a view of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _width(operands: Any) -> int:
    """Bytes per element of the operands."""
    tensors = [t for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)]
    return max((t.dtype.itemsize for t in tensors if t.dtype.is_floating_point), default=4)
