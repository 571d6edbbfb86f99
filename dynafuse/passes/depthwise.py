"""Convolutions that keep channels apart, written out where a library has no quick kernel for them.

An element of such a convolution is a weighted sum of a few of its operand's: an op like pooling, in one kernel with what is
around it, a causal model's slice, its activation and transposes, say. So is the gradient of what is convolved. The gradient
of a weight of few elements for each channel is so many sums of products. Each is written out by itself where it is predicted
to be faster so (``cost/depthwise.py``). Where channels lie side by side, so do a weight's then, in a copy.

Worked example: ``convolution(x[8, 1536, 1024], w[1536, 1, 4], …, groups=1536)`` of a state-space model takes a library
130 µs on an H200, and becomes ``depthwise_convolution(x, w, …)``, which takes 35.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.cost.depthwise import Depthwise, Wanted, depthwise_of, library_us, written_us
from dynafuse.cost.device import Device
from dynafuse.cost.model import streaming, work_us
from dynafuse.fx import arguments, fake_mode_of, insert, size_node
from dynafuse.ops.depthwise import DEPTHWISE, DEPTHWISE_BACKWARD, MOST_TAPS
from dynafuse.ops.windows import per_dim
from dynafuse.passes.strides import is_static, same_layout

aten = torch.ops.aten

WRITTEN = "depthwise"
"""The metadata of a convolution that is written out: a line that says at what price the library would compute it."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_COPIES = 4
"""Channels of the result for each of the operand's up to which it is written out: more are a product of matrices."""

MOST_SUMS = 4
"""Elements of a weight for each channel up to which its gradient is written out: a kernel keeps a sum for each."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that keeps channels apart, or its gradients: the node, with its operands and sizes."""

    node: Node
    given: dict[str, Any]
    sizes: Depthwise

    @property
    def numbers(self) -> tuple[list[int], list[int], list[int]]:
        """Return strides, paddings and dilations, each in every dimension."""
        rank = self.given["weight"].meta["val"].dim() - 2
        stride, padding, dilation = (list(per_dim(self.given[name], rank)) for name in ("stride", "padding", "dilation"))
        return stride, padding, dilation


def write_out_convolutions(
    module: GraphModule, device: Device, device_type: str | None, eager: Collection[Node] = (),
) -> None:
    """Write out convolutions that keep channels apart where that is predicted to be faster, in place.

    Args:
        module: A normalized graph, in its final layout.
        device: The device that prices are of.
        device_type: The type of device whose tensors are fused; None if nothing is.
        eager: Nodes that are to stay as they are.
    """
    writers = {aten.convolution.default: _write_result, aten.convolution_backward.default: _write_gradients}
    is_changed = False
    for target, write in writers.items():
        for node in module.graph.find_nodes(op="call_function", target=target):
            if node not in eager and (convolution := _convolution(node, device_type)) is not None:
                with fake_mode_of([convolution.given["weight"]]):
                    write(convolution, device)
                is_changed = True
    if is_changed:
        module.graph.eliminate_dead_code()


def can_be_written_out(node: Node) -> bool:
    """Return whether a convolution, or its gradients, keeps channels apart so that it can be written out."""
    return _convolution(node, node.args[0].meta["val"].device.type) is not None  # type: ignore[union-attr]


def _convolution(node: Node, device_type: str | None) -> Convolution | None:
    """Return a convolution that keeps channels apart, or its gradients; None if it does not, or cannot be written out."""
    given = arguments(node)
    values: dict[str, Any] = map_arg(given, lambda operand: operand.meta["val"])
    x, weight, sizes = values["input"], values["weight"], depthwise_of(values, node.meta["val"])
    if sizes is None or x.device.type != device_type or x.dtype not in DTYPES or weight.dtype is not x.dtype:
        return None
    numbers = (*given["stride"], *given["padding"], *given["dilation"], x.shape[1], *weight.shape)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or 0 in given["stride"]:
        return None
    can_be = sizes.taps <= MOST_TAPS and sizes.copies <= MOST_COPIES and sizes.inputs and sizes.outputs
    return Convolution(node, given, sizes) if can_be else None


def _reason(sizes: Depthwise, wanted: Wanted, device: Device) -> str | None:
    """Return a line with both prices; None unless ours is predicted to be faster, by more than the model's error."""
    library, written = library_us(sizes, wanted, device), written_us(sizes, wanted, device)
    if library <= (1 + device.model_error) * written:
        return None
    return f"written out, {written:.1f} µs, instead of {library:.1f} in a library"


# The rewrites ---------------------------------------------------------------------------------------------------------


def _write_result(convolution: Convolution, device: Device) -> None:
    node, given = convolution.node, convolution.given
    reason = _reason(convolution.sizes, Wanted.RESULT, device)
    if reason is None:
        return
    new = insert(node, DEPTHWISE, (given["input"], _weight(convolution), *convolution.numbers))
    new.meta[WRITTEN] = reason
    if given["bias"] is not None:
        spread = insert(node, aten.view.default, (given["bias"], [-1, *[1] * (new.meta["val"].dim() - 2)]))
        new = insert(node, aten.add.Tensor, (new, spread))
    _replace(node, new)


def _write_gradients(convolution: Convolution, device: Device) -> None:
    """Write out those gradients for which that pays, each by itself; the library makes the others."""
    node, given = convolution.node, convolution.given
    mask = list(given["output_mask"])
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(results) < len(node.users):
        return
    for place, make in enumerate((_gradient_of_input, _gradient_of_weight)):
        if place in results and mask[place]:
            new = make(convolution, device)
            mask[place] = new is None or not _replace(results[place], new)
    node.update_arg(list(given).index("output_mask"), mask)
    node.meta["val"] = tuple(value if is_made else None for value, is_made in zip(node.meta["val"], mask, strict=True))


def _gradient_of_input(convolution: Convolution, device: Device) -> Node | None:
    node, given, sizes = convolution.node, convolution.given, convolution.sizes
    can_be = sizes.overlaps * sizes.copies <= MOST_TAPS
    reason = _reason(sizes, Wanted.INPUT, device) if can_be else None
    if reason is None:
        return None
    x = given["input"]
    shape = [size_node(node, x, dim) for dim in range(x.meta["val"].dim())]
    new = insert(node, DEPTHWISE_BACKWARD, (given["grad_output"], _weight(convolution), shape, *convolution.numbers))
    new.meta[WRITTEN] = reason
    return new


def _gradient_of_weight(convolution: Convolution, device: Device) -> Node | None:
    sizes = convolution.sizes
    can_be = sizes.taps <= MOST_SUMS and sizes.copies == 1 and is_static(convolution.given["grad_output"].meta["val"])
    reason = _reason(sizes, Wanted.WEIGHT, device) if can_be else None
    if reason is None:
        return _gradient_in_planes(convolution, device)
    new = _sums_of_products(convolution)
    new.meta[WRITTEN] = reason
    return new


def _gradient_in_planes(convolution: Convolution, device: Device) -> Node | None:
    """Return the gradient of the weight as the library makes it of copies in which each channel is a plane by itself.

    None if it is made so already, or if that is not predicted to be faster than group by group.
    """
    node, given, sizes = convolution.node, convolution.given, convolution.sizes
    planes = library_us(replace(sizes, beside=False), Wanted.WEIGHT, device)
    copied = work_us(streaming(2 * sizes.bytes), device)
    apart = library_us(sizes, Wanted.WEIGHT, device)
    if not sizes.beside or apart <= (1 + device.model_error) * (planes + copied):
        return None
    operands = {name: insert(node, aten.clone.default, (given[name],), memory_format=torch.contiguous_format)
                for name in ("grad_output", "input", "weight")}
    both = insert(node, node.target, tuple({**given, **operands, "output_mask": [False, True, False]}.values()))
    both.meta[WRITTEN] = f"in planes, {planes + copied:.1f} µs with copies, instead of {apart:.1f} group by group"
    return insert(node, operator.getitem, (both, 1))


def _sums_of_products(convolution: Convolution) -> Node:
    """Return the gradient of the weight, a sum over all windows for each of its elements."""
    node, given = convolution.node, convolution.given
    weight, grad = given["weight"].meta["val"], given["grad_output"]
    stride, padding, dilation = convolution.numbers
    counts = grad.meta["val"].shape[2:]
    padded = insert(node, aten.constant_pad_nd.default, (
        given["input"], [number for number in reversed(padding) for _ in range(2)], 0.0))
    sums = []
    for place in itertools.product(*(range(length) for length in weight.shape[2:])):
        seen = padded
        for dim, (step, apart, every, count) in enumerate(zip(place, dilation, stride, counts, strict=True), 2):
            begin = step * apart
            seen = insert(node, aten.slice.Tensor, (seen, dim, begin, begin + (count - 1) * every + 1, every))
        terms = insert(node, aten.mul.Tensor, (_cast(node, grad, torch.float32), _cast(node, seen, torch.float32)))
        sums.append(insert(node, aten.sum.dim_IntList, (terms, [0, *range(2, weight.dim())])))
    together = insert(node, aten.cat.default, ([insert(node, aten.unsqueeze.default, (total, 1)) for total in sums], 1))
    return insert(node, aten.view.default, (_cast(node, together, weight.dtype), list(weight.shape)))


def _cast(before: Node, node: Node, dtype: torch.dtype) -> Node:
    """Return a value in some type."""
    return node if node.meta["val"].dtype is dtype else insert(before, aten._to_copy.default, (node,), dtype=dtype)


def _weight(convolution: Convolution) -> Node:
    """Return the weight; where channels lie side by side in what is read, laid out like that."""
    node, weight = convolution.node, convolution.given["weight"]
    read: Node = convolution.given.get("grad_output", convolution.given["input"])
    if read.meta["val"].stride(1) != 1:
        return weight  # type: ignore[no-any-return]
    rank = weight.meta["val"].dim()
    behind = insert(node, aten.permute.default, (weight, [*range(1, rank), 0]))
    copied = insert(node, aten.clone.default, (behind,), memory_format=torch.contiguous_format)
    return insert(node, aten.permute.default, (copied, [rank - 1, *range(rank - 1)]))


def _replace(node: Node, new: Node) -> bool:
    """Put a new value in the place of one, in the same layout if it can be; what is in vain then is dead code."""
    value = node.meta["val"]
    if not same_layout(new.meta["val"], value):
        new = insert(node, aten.clone.default, (new,), memory_format=suggest_memory_format(value))
    fits = same_layout(new.meta["val"], value)
    if fits:
        node.replace_all_uses_with(new)
    return fits
