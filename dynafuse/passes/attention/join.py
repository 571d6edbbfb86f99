"""Joining the two products and the softmax of an attention that a model writes out into one call of torch's attention.

Torch's kernels keep no matrix of scores, neither for the softmax nor for the gradient. Which kernel torch would take is
asked of torch, with the operands' fake tensors, so that the user's ``sdpa_kernel`` holds. Where it would take none, or one
that is predicted to be slower than what the model writes, nothing changes. Nor does it where probabilities are dropped at
random, where a bias has a gradient (with which torch's kernels are slow), or where other strides reach a result.

What is added to scores the kernel adds as well, as a bias. A query that a mask leaves no key has equal probabilities where
it is written out, and no gradient, or NaN if the mask is infinite; kernels return other values then, and gradients that are
far too large. So it becomes zero, or NaN, with a bias of zero: then its scores are equal.

Worked example: ``softmax(q @ k.transpose(-1, -2) / 8 + bias, -1) @ v`` of 512 tokens in 8 × 16 heads becomes
``scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1 / 8)``, 154 instead of 238 µs on an H200, where ``q`` and
``bias`` are zero wherever ``bias.amax(-1, True) <= -1e8``.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from dynafuse.cost.attention import Attention, joined_us, written_us
from dynafuse.cost.device import Device
from dynafuse.fallback import answered
from dynafuse.fx import hint
from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.passes.attention.scores import (
    FILLS,
    SAME,
    SOFTMAXES,
    Scores,
    Term,
    given_to,
    operands_of_product,
    same_matrices,
    scores_of,
    value_of,
)
from dynafuse.passes.constants import Constants, bodies
from dynafuse.passes.masks.recovery import Masks
from dynafuse.passes.shown_strides import called, shows_strides

HALF = (torch.float16, torch.bfloat16)
"""Dtypes of operands. The products of others are exact in ways that torch's kernels are not."""

GAIN = 0.95
"""Share of the time of what is written out that a kernel has to take at most."""

LOST = -1e8
"""A bias up to which a score that it is added to makes no difference in float32."""

DROPOUTS = (F.dropout, torch.dropout)
CASTS = frozenset({"float", "to", "type", "type_as"})
VIEWS = frozenset({getattr, "transpose", "permute", "view", "reshape", "unsqueeze", "expand", "contiguous", torch.transpose,
                   torch.permute})
"""Calls whose result has the elements of the first argument, each once or more often; of attributes, ``mT`` and ``T``."""

aten = torch.ops.aten
KERNELS: Mapping[Any, str] = {
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
    aten._scaled_dot_product_flash_attention.default: "flash",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "cpu",
}
"""Torch's kernels for attention, by the op that runs them."""

log = logging.getLogger(__name__)

Sizes = Sequence[Any]


@dataclass(frozen=True)
class Parts:
    """An attention that is written out: a product of probabilities, the softmax of scores, and values."""

    scores: Scores
    softmax: Node
    between: tuple[Node, ...]  # calls between the softmax and the product
    product: Node
    values: Node

    @property
    def calls(self) -> tuple[Node, ...]:
        """Return the calls that go, in the order of the graph."""
        return (*self.scores.path, self.softmax, *self.between, self.product)


def join_attention(module: GraphModule, device: Device, forced: Collection[Node] = ()) -> None:
    """Replace attention that is written out by calls of torch's, in place, in graphs inside the graph as well.

    Args:
        module: A Dynamo graph.
        device: The device that is priced.
        forced: Calls that stay as they are.
    """
    inner = bodies(module)
    softmaxes = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")
                 and node.target in SOFTMAXES]
    masks = Masks(Constants(module, inner)) if softmaxes else None
    for node in softmaxes:
        parts = _found(node)
        if masks is not None and parts is not None and not any(call in forced for call in parts.calls):
            answered(lambda parts=parts: _join(parts, masks, device))  # type: ignore[misc]
    if softmaxes:
        module.recompile()
    for body in inner.values():
        join_attention(body, device, forced)


def _found(softmax: Node) -> Parts | None:
    """Return the attention around a softmax; None if it is in none."""
    given = given_to(softmax)
    dim, value = given.get(1, given.get("dim")), value_of(softmax)
    if not isinstance(value, torch.Tensor) or dim not in (-1, value.dim() - 1):
        return None
    scores = scores_of(given.get(0, given.get("input")))
    node, between = softmax, list[Node]()
    while scores is not None and len(node.users) == 1:
        (user,) = node.users
        operands = operands_of_product(user)
        if operands is not None:
            is_left = operands[0] is node and operands[1] is not node
            return Parts(scores, softmax, tuple(between), user, operands[1]) if is_left else None
        if not _keeps_probabilities(user, node):
            return None
        between.append(user)
        node = user
    return None


def _keeps_probabilities(user: Node, node: Node) -> bool:
    """Return whether a call returns the probabilities that it is given, maybe in another dtype or with other batches."""
    if user.op not in ("call_function", "call_method") or not isinstance(value_of(user), torch.Tensor):
        return False
    given = given_to(user)
    if given.get(0, given.get("input")) is not node or not same_matrices(node, user):
        return False
    if user.target in DROPOUTS:
        chance, trains = given.get(1, given.get("p", 0.5)), given.get(2, given.get("training", given.get("train", True)))
        return chance == 0 or trains is False
    is_other_memory = user.target == "view" and value_of(user).dtype != value_of(node).dtype
    return user.target in SAME and value_of(user).dtype.is_floating_point and not is_other_memory


def _join(parts: Parts, masks: Masks, device: Device) -> None:
    """Replace an attention by a call of torch's if that is possible and faster."""
    writer = _Writer(parts.product)
    joined = None
    try:
        joined = _written(parts, masks, writer, device)
    finally:
        if joined is None:
            writer.undo()
    if joined is None:
        return
    joined.meta["example_value"] = value_of(parts.product)
    parts.product.replace_all_uses_with(joined)
    if shows_strides(joined):
        joined.replace_all_uses_with(parts.product)
        writer.undo()
        return
    for call in reversed(parts.calls):
        parts.product.graph.erase_node(call)


def _written(parts: Parts, masks: Masks, writer: _Writer, device: Device) -> Node | None:
    """Write the call of torch's attention, and return what takes the place of the last product; None where that is none."""
    scores = parts.scores
    lead, traced = scores.lead, tuple(value_of(scores.path[0]).shape[:-2])
    operands = scores.query, scores.turned, parts.values
    dtype = _exact_dtype(scores.query)
    if dtype not in HALF or any(_exact_dtype(operand) != dtype for operand in operands):
        return None
    query, turned, values = (writer.cast(operand, dtype) for operand in operands)
    if value_of(parts.product).dtype not in (dtype, torch.float32):
        return None
    for how, by in scores.over:
        query = writer.cast(writer.call(how, query, by), dtype)
    keys = writer.call(torch.transpose, turned, -2, -1)
    after = tuple(value_of((parts.softmax, *parts.between)[-1]).shape[:-2])
    batches: list[Node] = [writer.with_lead(node, before, lead) for node, before in
               ((query, traced), (keys, traced), (values, after))]
    bias, is_causal = _bias(scores, masks, writer, dtype)
    if bias is not None:
        batches[0], bias = _with_lost_rows(batches[0], bias, writer, dtype)
    four = [writer.in_four(batch, lead) for batch in batches]
    options: dict[str, Any] = {"attn_mask": None if bias is None else writer.in_four(bias, lead), "scale": scores.factor}
    if is_causal:
        options["is_causal"] = True
    kernel = writer.kernel_of(*four, **options)
    if kernel is None or not _is_faster(parts, four, bias is not None, kernel, device):
        return None
    joined = writer.call(F.scaled_dot_product_attention, *four, **options)
    shape = value_of(parts.product).shape
    if value_of(joined).dim() != len(shape) or not _equal(value_of(joined).shape, shape):
        joined = writer.call(torch.reshape, joined, _static(shape)) if len(lead) != 1 or after != lead else (
            writer.call(torch.squeeze, joined, 1))
    return writer.cast(joined, value_of(parts.product).dtype)


def _exact_dtype(node: Node) -> torch.dtype:
    """Return a dtype that has all elements of a node: one of 16 bits that it was widened from, else its own."""
    dtype: torch.dtype = value_of(node).dtype
    while dtype is torch.float32 and node.op in ("call_function", "call_method"):
        is_cast = node.target in CASTS
        if not is_cast and node.target not in VIEWS:
            break
        before = node.args[0] if node.args else None
        if not isinstance(before, Node) or not isinstance(value_of(before), torch.Tensor):
            break
        if is_cast and value_of(before).dtype in HALF:
            return value_of(before).dtype  # type: ignore[no-any-return]
        node = before
    return dtype


def _is_faster(parts: Parts, operands: Sequence[Node], biased: bool, kernel: str, device: Device) -> bool:
    """Return whether a kernel is predicted to be faster than what is written out."""
    query, keys, values = map(value_of, operands)
    *batch, rows, width = map(hint, query.shape)
    trained = torch.is_grad_enabled() and any(operand.requires_grad for operand in (query, keys, values))
    sizes = hint(keys.shape[-2]), width, hint(values.shape[-1])
    attention = Attention(math.prod(batch), rows, *sizes, query.dtype, biased, trained)
    joined, written = joined_us(attention, kernel, device), written_us(attention, device)
    log.info("attention written out around %s: %.0f µs, by %s %.0f µs", parts.softmax, written, kernel, joined)
    return joined <= GAIN * written


# What is added to scores ----------------------------------------------------------------------------------------------


def _bias(scores: Scores, masks: Masks, writer: _Writer, dtype: torch.dtype) -> tuple[Node | None, bool]:
    """Return what a kernel is to add to scores, if anything, and whether it is to leave out what lies behind a query.

    Raises:
        ValueError: A kernel cannot add it.
    """
    terms = [term for term in scores.terms if value_of(term.node).dim()]  # a number makes no difference to a softmax
    if len(terms) == 1:
        meaning = _meaning(terms[0], scores, masks, writer)
        if meaning != "other":
            return None, meaning == "causal"
    tensors = [writer.with_lead_of_bias(_added(term, writer, dtype), term.lead, scores.lead) for term in terms]
    if not tensors:
        return None, False
    return writer.cast(reduce(lambda a, b: writer.call(operator.add, a, b), tensors), dtype), False


def _with_lost_rows(query: Node, bias: Node, writer: _Writer, dtype: torch.dtype) -> tuple[Node, Node]:
    """Return queries and their bias such that those which are left no key weigh all alike, or are NaN."""
    lowest = torch.finfo(dtype).min
    best = writer.call(torch.amax, bias, -1, True)
    is_lost = writer.call(operator.le, best, max(LOST, lowest / 4))
    nothing = writer.call(operator.mul, best, 0)  # or NaN
    finite = writer.call(torch.clamp, bias, min=lowest / 2)
    return writer.call(torch.where, is_lost, nothing, query), writer.call(torch.where, is_lost, 0.0, finite)


def _added(term: Term, writer: _Writer, dtype: torch.dtype) -> Node:
    """Return a term as a tensor."""
    value = value_of(term.node)
    if term.fill is not None:
        fill = term.fill if math.isinf(term.fill) else torch.finfo(dtype).min / 4  # a few of which are finite
        choices = (fill, 0.0) if term.fills_where else (0.0, fill)
        return writer.call(torch.where, term.node, *choices)
    if value.dtype != dtype or (value.requires_grad and torch.is_grad_enabled()):
        raise ValueError(f"{term.node} would be rounded, or has a gradient")
    return term.node if term.factor == 1 else writer.call(operator.mul, term.node, term.factor)


def _meaning(term: Term, scores: Scores, masks: Masks, writer: _Writer) -> str:
    """Return what a term does to scores if it is a constant: ``full``, ``causal`` or ``other``."""
    value = value_of(term.node)
    if not _equal(value.shape[-2:], value_of(scores.path[-1]).shape[-2:]):
        return "other"
    if term.fill is not None:
        return masks.meaning(writer.call(torch.logical_not, term.node) if term.fills_where else term.node)
    stays, untouched = (writer.call(how, term.node, number) for how, number in ((operator.gt, FILLS / term.factor),
                                                                            (operator.eq, 0)))
    meaning = masks.meaning(untouched)
    return meaning if meaning != "other" and masks.meaning(stays) == meaning else "other"


# Writing --------------------------------------------------------------------------------------------------------------


def _equal(left: Sizes, right: Sizes) -> bool:
    return len(left) == len(right) and all(known_equal(as_expr(a), as_expr(b)) for a, b in zip(left, right, strict=True))


def _static(sizes: Sizes) -> tuple[int, ...]:
    """Return sizes that are known.

    Raises:
        ValueError: They are not.
    """
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError("sizes are dynamic")
    return tuple(sizes)


class _Writer:
    """Writes calls before a product, each with the value that it has for fake tensors."""

    def __init__(self, product: Node) -> None:
        self.product = product
        self.mode = value_of(product).fake_mode
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write a call of a function."""
        graph = self.product.graph
        with graph.inserting_before(self.product):
            node = graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in self.product.meta.items() if key != "example_value"}
        self.made.append(node)
        node.meta["example_value"] = self._value(node)
        return node

    def _value(self, node: Node) -> Any:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
        with self.mode:
            return called(node, args, kwargs)

    def undo(self) -> None:
        """Remove what was written."""
        for node in reversed(self.made):
            self.product.graph.erase_node(node)
        self.made.clear()

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return a node in a dtype."""
        return node if value_of(node).dtype == dtype else self.call(torch.Tensor.to, node, dtype)

    def with_lead(self, node: Node, broadcast: Sizes, lead: Sizes) -> Node:
        """Return a batch of matrices with other dimensions in front, which views have made of what they are broadcast to."""
        value = value_of(node)
        if not _equal(value.shape[:-2], broadcast):
            node = self.call(torch.Tensor.expand, node, (*_static(broadcast), -1, -1))
        if _equal(broadcast, lead):
            return node
        return self.call(torch.reshape, node, (*_static(lead), *_static(value.shape[-2:])))

    def with_lead_of_bias(self, node: Node, broadcast: Sizes, lead: Sizes) -> Node:
        """Return a bias with other dimensions in front.

        Raises:
            ValueError: It differs along some of them only.
        """
        value = value_of(node)
        own, matrix = value.shape[:-2], value.shape[-2:]
        if _equal(broadcast, lead):
            return node
        if all(isinstance(size, int) and size == 1 for size in own):
            return self.call(torch.reshape, node, (*(1 for _ in lead), *_static(matrix))) if own else node
        if not _equal(own, broadcast):
            raise ValueError(f"{node} has other dimensions than its scores")
        return self.call(torch.reshape, node, (*_static(lead), *_static(matrix)))

    def in_four(self, node: Node, lead: Sizes) -> Node:
        """Return a batch of matrices, or a bias, with two dimensions in front.

        Args:
            node: The batch; a bias may have fewer dimensions.
            lead: The dimensions in front that it has, or is broadcast to.
        """
        own = value_of(node).shape[:-2]
        if len(lead) == 2 or not own:
            return node if own or len(lead) else self.call(operator.getitem, node, (None, None))
        if len(lead) == 1:
            return self.call(torch.unsqueeze, node, 1)
        flat = (math.prod(_static(own[:-1])), own[-1]) if _equal(own, lead) else (1, 1)
        return self.call(torch.reshape, node, _static((*flat, *value_of(node).shape[-2:])))

    def kernel_of(self, query: Node, keys: Node, values: Node, **options: Any) -> str | None:
        """Return which of KERNELS torch runs an attention by; None if by none."""
        operands = map(value_of, (query, keys, values))
        with self.mode, _Called() as seen:
            F.scaled_dot_product_attention(*operands, **{name: value_of(option) for name, option in options.items()})
        return next((KERNELS[op] for op in seen.ops if op in KERNELS), None)


class _Called(TorchDispatchMode):
    """Notes the ops that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
