"""What a call of a library op costs: matrix products and attention by their arithmetic, any other op by its bytes.

Flops come from torch's own formulas (``torch.utils.flop_counter``), those of attention and of products with a vector from
here: torch's differ between its versions, and some refuse grouped heads. A count that nobody knows is a value as well, None:
such a call is priced by its bytes, which it takes at least, and its prediction says so (``partial``).

Worked example, on an H200: ``mm`` of two ``bfloat16[8192, 8192]`` takes 1.1e12 flops, at 780 TFLOP/s 1410 µs; the 403 MB
that it moves would take 94 µs.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from dynafuse.cost.attention import Attention, backward_us, forward_us
from dynafuse.cost.depthwise import Wanted, depthwise_of, library_us
from dynafuse.cost.device import Device
from dynafuse.cost.model import LEAST, NOTHING, Prediction, Work, predict, streaming, total, work_us
from dynafuse.cost.products import PRODUCTS, Product, aligned_dtype, product_of, product_tflops
from dynafuse.fallback import answered
from dynafuse.fx import hint, is_view, moved_by
from dynafuse.ir import Facts, Plan, Region, Role
from dynafuse.lowering.registry import EAGER
from dynafuse.ops import is_library, lookup


def call_flops(target: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    """Predict the floating-point operations of a call.

    Args:
        target: The op's overload, or whatever else is called.
        args: Its arguments, tensors among them, fake or real; a dynamic size counts as its example.
        kwargs: Its arguments by name.
        result: What it returns.

    Returns:
        0 for an op of little arithmetic per byte; None if it is not known.
    """
    packet = getattr(target, "overloadpacket", None)
    own, torchs = FORMULAS.get(packet), flop_registry.get(packet)
    if own is not None:
        return answered(lambda: own(_bound(target, args, kwargs)))
    if torchs is None:
        return None if is_library(target) else 0.0
    return answered(lambda: _torchs(torchs, args, kwargs, result))


def _torchs(formula: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> float:
    """Return what a formula of torch's says."""
    args, kwargs, out = map_aggregate((args, kwargs, result), _sizes)
    return float(formula(*args, **kwargs, out_val=out))


def _bound(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by schema name, tensors as their sizes."""
    given: dict[str, Any] = map_aggregate(_named(target, args, kwargs), _sizes)
    return given


def _named(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by schema name."""
    names = (argument.name for argument in target._schema.arguments)
    named: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    return named


def _attention(given: Mapping[str, Any], of_query: int, of_value: int) -> float:
    """Count flops of the products of an attention, of which so many have the width of a query's row, and of a value's.

    Keys and values may have fewer heads than queries: a head of them then serves several.
    """
    *batch, rows, width = given["query"]
    *_, columns, value_width = given["value"]
    return float(2 * math.prod(batch) * rows * columns * (of_query * width + of_value * value_width))


def _forward(given: Mapping[str, Any]) -> float:
    """Count scores, and their product with the values."""
    return _attention(given, 1, 1)


def _backward(given: Mapping[str, Any]) -> float:
    """Count scores again, the gradients of queries and keys; of scores and values."""
    return _attention(given, 3, 2)


def _by_vector(matrix: str) -> Callable[[Mapping[str, Any]], float]:
    """Return a product in which each element of an operand is used once."""
    return lambda given: 2.0 * math.prod(given[matrix])


aten = torch.ops.aten
ATTENTION: Mapping[Any, tuple[str, Callable[[Attention, str, Device], float]]] = {
    aten._scaled_dot_product_flash_attention: ("flash", forward_us),
    aten._scaled_dot_product_efficient_attention: ("efficient", forward_us),
    aten._scaled_dot_product_cudnn_attention: ("cudnn", forward_us),
    aten._scaled_dot_product_flash_attention_for_cpu: ("cpu", forward_us),
    aten._scaled_dot_product_flash_attention_backward: ("flash", backward_us),
    aten._scaled_dot_product_efficient_attention_backward: ("efficient", backward_us),
    aten._scaled_dot_product_cudnn_attention_backward: ("cudnn", backward_us),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: ("cpu", backward_us),
}
"""Torch's kernels for attention, by op, each with its price."""


FORMULAS: Mapping[Any, Callable[[Mapping[str, Any]], float]] = {
    **{packet: _forward if us is forward_us else _backward for packet, (_, us) in ATTENTION.items()},
    aten.dot: _by_vector("self"), aten.mv: _by_vector("self"), aten.addmv: _by_vector("mat"),
}
"""Flops of an op from its arguments by name, tensors as their sizes."""


SORTED = frozenset({aten.index_put.default, aten._unsafe_index_put.default,
                    aten._unsafe_masked_index_put_accumulate.default})
"""Ops that sort their indices, to add the values of each in order."""


SELECTIONS = frozenset({aten.sort, aten.argsort, aten.msort, aten.topk, aten.kthvalue, aten.median, aten.nanmedian,
                        aten.mode, aten._unique2, aten.unique_dim})
"""Ops that order values, all of them or some."""


def _sizes(value: Any) -> Any:
    """Return a tensor as its sizes, a dynamic size as its example; whatever else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.Size([hint(size) for size in value.shape])
    return hint(value) if isinstance(value, torch.SymInt) else value


def call_prediction(node: Node, moved: int, device: Device) -> Prediction:
    """Predict what a node costs that runs eager.

    Args:
        node: The node; its operands' values and its own are those of its metadata.
        moved: The bytes of the tensors that it reads and returns.
        device: The device that is priced.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    return op_prediction(node.target, args, kwargs, node.meta.get("val"), moved, device)


def op_prediction(target: Any, args: Any, kwargs: Any, result: Any, moved: int, device: Device) -> Prediction:
    """Predict what an op costs that runs eager on the tensors among its arguments.

    Args:
        target: The op's overload, or whatever else is called.
        args: Its arguments.
        kwargs: Its arguments by name.
        result: What it returns.
        moved: The bytes of the tensors that it reads and returns.
        device: The device that is priced.

    Returns:
        The prediction; a ``partial`` one, of the bytes alone, where it is not known how much is computed.
    """
    passes, further = _ordering(target, args, kwargs, device)
    moving = streaming(passes * moved)
    memory = predict(moving, device, EAGER)
    if further:
        return replace(memory, device_us=memory.device_us + further, captured_us=memory.captured_us + further)
    flops = call_flops(target, args, kwargs, result)
    if not flops:
        return replace(memory, partial=flops is None)
    host_us = library_host_us(target, args, kwargs, device)
    known_us = _attention_us(target, args, kwargs, device) or _depthwise_us(target, args, kwargs, result, device)
    if known_us is not None:
        busy = max(known_us, work_us(moving, device, EAGER))
        return Prediction(busy + device.launch_us_eager, host_us, 0.0, busy + device.replay_us)
    return _computing(flops, _tflops(target, args, kwargs, device), moving, host_us, device)


def _attention_us(target: Any, args: Any, kwargs: Any, device: Device) -> float | None:
    """Return what a kernel for attention takes in floats of 16 bits, in microseconds; None for anything else."""
    packet = getattr(target, "overloadpacket", None)
    if packet not in ATTENTION:
        return None
    kernel, us = ATTENTION[packet]
    given = _named(target, args, kwargs)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.dtype not in (torch.float16, torch.bfloat16):
        return None
    *batch, rows, width = map(hint, query.shape)
    is_biased = any(given.get(name) is not None for name in ("attn_bias", "attn_mask"))
    sizes = hint(key.shape[-2]), width, hint(value.shape[-1])
    is_causal = bool(given.get("is_causal", False))
    return us(Attention(math.prod(batch), rows, *sizes, query.dtype, is_biased, is_causal), kernel, device)


def _depthwise_us(target: Any, args: Any, kwargs: Any, result: Any, device: Device) -> float | None:
    """Return what a convolution that keeps channels apart takes, or its gradients, in microseconds; None for others."""
    if target not in (aten.convolution.default, aten.convolution_backward.default):
        return None
    given = _named(target, args, kwargs)
    sizes = depthwise_of(given, result)
    if sizes is None:
        return None
    mask = given.get("output_mask")
    wanted = [Wanted.RESULT] if mask is None else list(itertools.compress((Wanted.INPUT, Wanted.WEIGHT), mask))
    return sum(library_us(sizes, which, device) for which in wanted)


def product_prediction(product: Product, device: Device) -> Prediction:
    """Predict what a matrix product of floats costs."""
    moving = streaming(product.bytes)
    return _computing(product.flops, product_tflops(product, device), moving, device.host_us_contraction, device)


def library_host_us(target: Any, args: Any, kwargs: Any, device: Device) -> float:
    """Return the host's time for a call of a library, which looks for a kernel before it launches one, in microseconds.

    Args:
        target: The op's overload.
        args: Its arguments.
        kwargs: Its arguments by name.
        device: The device that is priced.
    """
    row = lookup(target)
    each = device.constants.get(f"host_us_{row.library}" if row else "", device.host_us_eager)
    wanted = _named(target, args, kwargs).get("output_mask", (True,)) if row and row.library == "convolution" else (True,)
    return each * max(sum(map(bool, wanted[:2])), 1)


def _computing(flops: float, tflops: float, moving: Work, host_us: float, device: Device) -> Prediction:
    """Predict what a library's kernel costs that computes, and moves."""
    busy = max(flops / max(tflops * 1e6, LEAST), work_us(moving, device, EAGER))
    return Prediction(busy + device.launch_us_eager, host_us, 0.0, busy + device.replay_us)


def _tflops(target: Any, args: Any, kwargs: Any, device: Device) -> float:
    """Return the rate at which a library's kernel computes, TFLOP/s."""
    product = product_of(target, _named(target, args, kwargs)) if target in PRODUCTS else None
    if product is not None and aligned_dtype(product.dtype):
        return product_tflops(product, device)
    return device.contraction_tflops if _width((args, kwargs)) <= 2 else device.contraction_tflops_float32


SORT_LAUNCHES = 16
"""Kernels in which eager checks and sorts indices, before those that add."""


SELECTION_LAUNCHES, SELECTION_PASSES = 10, 8
"""What ordering values takes in launches beside one, and in passes over them, estimated: a sort of 4,000 and the 4 largest
in each of 1,000 rows of 32 took 50 microseconds on an H200; of many, a radix sort moves 8 bits at a time."""


def _ordering(target: Any, args: Any, kwargs: Any, device: Device) -> tuple[int, float]:
    """Return how often an op moves its tensors, and the microseconds that it takes besides to bring values into an order."""
    if getattr(target, "overloadpacket", None) in SELECTIONS:
        return SELECTION_PASSES, SELECTION_LAUNCHES * device.launch_us_eager
    if (count := _sorted_adds(target, args, kwargs)):
        return 2, SORT_LAUNCHES * device.launch_us_eager + count / max(device.sorted_adds_gops * 1e3, LEAST)
    if target is aten.embedding_dense_backward.default:
        return 1, _gradient_of_rows(_bound(target, args, kwargs), device)
    return 1, 0.0


def _sorted_adds(target: Any, args: Any, kwargs: Any) -> int:
    """Return how many values an op adds at indices that it sorts first; 0 if it is no such op."""
    given = _bound(target, args, kwargs) if target in SORTED else {}
    return math.prod(given["values"]) if given and given.get("accumulate", True) else 0


MOST_UNSORTED = 3072
"""Indices up to which eager's gradient of an embedding does not sort them: a program walks all rows of some columns."""

WALKED_ROW_US = 0.04
"""Microseconds per row that is walked, estimated: 32 rows at a time are loaded, then added, 0.6 microseconds either."""


SEGMENTED_GOPS = 90.0
"""Values per nanosecond that eager's gradient of an embedding adds once they are sorted, estimated: what ``index_put`` was
measured to add where few rows repeat; this kernel takes apart those that do."""


def _gradient_of_rows(given: Mapping[str, Any], device: Device) -> float:
    """Predict the microseconds that eager's gradient of an embedding takes beyond moving its tensors once."""
    count: int = math.prod(given["indices"])
    if count <= MOST_UNSORTED:
        return float(device.launch_us_eager + count * WALKED_ROW_US)
    added: int = math.prod(given["grad_output"])
    return float(SORT_LAUNCHES * device.launch_us_eager + added / (SEGMENTED_GOPS * 1e3))


def torch_prediction(work: Work, device: Device) -> Prediction:
    """Predict what torch's kernel costs for an op that could be fused. Its sums are no faster than fused ones."""
    moving = replace(work, kernel_class="pointwise")
    unfused, fused = predict(moving, device, EAGER), 0.0 if work.kernel_class == "pointwise" else work_us(work, device)
    slower = max(fused - work_us(moving, device, EAGER), 0.0) + (device.combine_us if work.launches > 1 else 0.0)
    further = predict(Work(0, 0.0, work.programs, "pointwise"), device, EAGER)
    return sum([further] * (work.launches - 1), unfused + Prediction(slower, 0.0, 0.0, slower))


def calls_prediction(facts: Mapping[Node, Facts], device: Device) -> Prediction:
    """Predict what all ops of a graph cost that run eager.

    Args:
        facts: The facts of the graph's nodes.
        device: The device that is priced.
    """
    return total(step_prediction(node, facts, device) for node in facts)


def step_prediction(step: Region | Node, facts: Mapping[Node, Facts], device: Device) -> Prediction:
    """Predict what a step of a planned graph costs, its kernel compiled.

    Args:
        step: A region, which costs what was predicted for the executor that it was given to, or a node.
        facts: The facts of the graph's nodes.
        device: The device that eager ops are priced for.
    """
    if isinstance(step, Region):
        chosen = (option for option in step.decision.options if option.executor == step.executor)
        return total(Prediction(option.device_us, option.host_us, 0.0, option.device_us) for option in chosen)
    if not is_call(step, facts):
        return NOTHING
    tensors = [facts[node].tensor for node in moved_by(step)]
    return call_prediction(step, sum(tensor.bytes for tensor in tensors if tensor is not None), device)


def plan_prediction(plan: Plan, device: Device) -> Prediction:
    """Predict what a call of a planned graph costs, its kernels compiled.

    Args:
        plan: The plan.
        device: The device that the eager ops are priced for.
    """
    facts = plan.annotated.facts
    return total([calls_prediction(facts, device), *(step_prediction(region, facts, device) for region in plan.regions)])


def is_call(node: Node, facts: Mapping[Node, Facts]) -> bool:
    """Return whether a node outside the regions does something: views and picking one of several outputs do not.

    Args:
        node: The node.
        facts: The facts of the graph's nodes.
    """
    return facts[node].role is Role.EAGER and node.target is not operator.getitem and not is_view(node)


def _width(operands: Any) -> int:
    """Return the bytes per element of the operands."""
    tensors = [t for t in pytree.tree_leaves(operands) if isinstance(t, torch.Tensor)]
    return max((t.dtype.itemsize for t in tensors if t.dtype.is_floating_point), default=4)
