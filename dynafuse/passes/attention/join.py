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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from dynafuse.cost.attention import Attention, forward_us
from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import ATTENTION
from dynafuse.fallback import answered
from dynafuse.fx import hint
from dynafuse.passes.attention.bias import Biases, with_lost_rows
from dynafuse.passes.attention.price import joined_us, written_us
from dynafuse.passes.attention.products import Operand, Product, given_to, product_of, value_of
from dynafuse.passes.attention.scores import SAME, SOFTMAXES, Reader, Scores, has_same_numbers, same_matrices
from dynafuse.passes.attention.writing import Writer
from dynafuse.passes.constants import Constants, bodies, is_written_among
from dynafuse.passes.shown_strides import shows_strides

HALF = (torch.float16, torch.bfloat16)
"""Dtypes of operands. The products of others are exact in ways that torch's kernels are not."""

JOINED = "dynafuse_joined"
"""Under which key of a node's annotation a line says why attention was joined."""

GAIN = 0.95
"""Share of the time of what is written out that a kernel has to take at most."""

DROPOUTS = (F.dropout, torch.dropout)
CASTS = frozenset({"float", "to", "type", "type_as"})
ATTRIBUTES = frozenset({"mT", "T"})
VIEWS = frozenset({getattr, "transpose", "permute", "view", "reshape", "unsqueeze", "expand", "contiguous", torch.transpose,
                   torch.permute})
"""Calls whose result has the elements of the first argument, each once or more often; of attributes, ATTRIBUTES."""

KERNELS: Mapping[Any, str] = {packet.default: kernel for packet, (kernel, us) in ATTENTION.items() if us is forward_us}
"""Torch's kernels for attention, by the op that runs them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """An attention that is written out: a product of probabilities, the softmax of scores, and values."""

    scores: Scores
    softmax: Node
    between: tuple[Node, ...]  # calls between the softmax and the product
    last: Node
    product: Product  # which the last call computes

    @property
    def calls(self) -> tuple[Node, ...]:
        """Return the calls that go, in the order of the graph."""
        return (*self.scores.path, self.softmax, *self.between, self.last)

    @property
    def is_read_later(self) -> bool:
        """Return whether the last call would find something else in what the first ones read."""
        scores = self.scores
        read = [scores.query.node, scores.turned.node, *(by for _, by in scores.over), *(term.node for term in scores.terms)]
        return is_written_among(self.calls, read)


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
    if softmaxes:
        _join_all(softmaxes, Constants(module, inner), device, forced)
        module.recompile()
    for body in inner.values():
        join_attention(body, device, forced)


def _join_all(softmaxes: Sequence[Node], constants: Constants, device: Device, forced: Collection[Node]) -> None:
    reader, biases = Reader(constants), Biases(constants)
    for softmax in softmaxes:
        parts = answered(lambda softmax=softmax: _found(softmax, reader))  # type: ignore[misc]
        if parts is not None and not parts.is_read_later and not any(call in forced for call in parts.calls):
            answered(lambda parts=parts: _join(parts, biases, device))  # type: ignore[misc]


def _found(softmax: Node, reader: Reader) -> Parts | None:
    """Return the attention around a softmax; None if it is in none."""
    given = given_to(softmax)
    dim, value = given.get(1, given.get("dim")), value_of(softmax)
    if not isinstance(value, torch.Tensor) or dim not in (-1, value.dim() - 1):
        return None
    scores = reader.scores(given.get(0, given.get("input")))
    node, between = softmax, list[Node]()
    while scores is not None and len(node.users) == 1:
        (user,) = node.users
        product = product_of(user)
        if product is not None:
            is_left = product.left == Operand(node) and product.right.node is not node
            return Parts(scores, softmax, tuple(between), user, product) if is_left else None
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
    return user.target in SAME and has_same_numbers(user, node)


def _join(parts: Parts, biases: Biases, device: Device) -> None:
    """Replace an attention by a call of torch's if that is possible and faster."""
    writer = Writer(parts.last)
    joined = None
    try:
        joined = _written(parts, biases, writer, device)
    finally:
        if joined is None:
            writer.undo()
    if joined is None:
        return
    joined.meta["example_value"] = value_of(parts.last)
    parts.last.replace_all_uses_with(joined)
    if shows_strides(joined):
        joined.replace_all_uses_with(parts.last)
        writer.undo()
        return
    for call in reversed(parts.calls):
        parts.last.graph.erase_node(call)


def _written(parts: Parts, biases: Biases, writer: Writer, device: Device) -> Node | None:
    """Write the call of torch's attention, and return what takes the place of the last product; None where that is none."""
    scores, lead = parts.scores, parts.scores.lead
    operands = scores.query, scores.turned, parts.product.right
    dtype = value_of(parts.last).dtype
    if dtype not in HALF or any(_exact_dtype(operand.node) != dtype for operand in operands):
        return None
    query, turned, values = (writer.cast(writer.operand(operand), dtype) for operand in operands)
    for how, by in scores.over:
        query = writer.cast(writer.call(how, query, by), dtype)
    after = tuple(value_of((parts.softmax, *parts.between)[-1]).shape[:-2])
    query = writer.with_lead(query, scores.batches, lead)
    keys = writer.with_lead(writer.call(torch.transpose, turned, -2, -1), scores.batches, lead)
    bias, is_causal = biases.of(scores, writer, dtype)
    if bias is not None:
        query, bias = with_lost_rows(query, bias, writer, dtype)
    four = [writer.in_four(batch, lead) for batch in (query, keys, writer.with_lead(values, after, lead))]
    options: dict[str, Any] = {"attn_mask": None if bias is None else writer.in_four(bias, lead), "scale": scores.factor}
    if is_causal:
        options["is_causal"] = True
    kernel = _kernel_of(four, options)
    why = None if kernel is None else _what_pays(parts, four, bias is not None, kernel, device)
    if why is None:
        return None
    call = writer.call(F.scaled_dot_product_attention, *four, **options)
    call.meta["custom"] = (call.meta.get("custom") or {}) | {JOINED: why}  # which torch hands on to the ops of the call
    joined = writer.out_of_four(call, lead, after)
    return joined if parts.product.order is None else writer.ordered(joined, parts.product.order)


def _exact_dtype(node: Node) -> torch.dtype:
    """Return a dtype that has all elements of a node: one of 16 bits that it was widened from, else its own."""
    dtype: torch.dtype = value_of(node).dtype
    while dtype is torch.float32 and node.op in ("call_function", "call_method"):
        is_cast = node.target in CASTS
        if not (is_cast or node.target in VIEWS) or (node.target is getattr and node.args[1] not in ATTRIBUTES):
            break
        before = node.args[0] if node.args else None
        if not isinstance(before, Node) or not isinstance(value_of(before), torch.Tensor):
            break
        if is_cast and value_of(before).dtype in HALF:
            return value_of(before).dtype  # type: ignore[no-any-return]
        node = before
    return dtype


def _what_pays(parts: Parts, operands: Sequence[Node], biased: bool, kernel: str, device: Device) -> str | None:
    """Return what a kernel saves, if it is predicted to be faster than what is written out."""
    query, keys, values = map(value_of, operands)
    *batch, rows, width = map(hint, query.shape)
    trained = torch.is_grad_enabled() and any(operand.requires_grad for operand in (query, keys, values))
    sizes = hint(keys.shape[-2]), width, hint(values.shape[-1])
    attention = Attention(math.prod(batch), rows, *sizes, query.dtype, biased)
    joined, written = joined_us(attention, trained, kernel, device), written_us(attention, trained, device)
    gradient = ", gradient included" if trained else ""
    said = f"attention that is written out: {written:.0f} µs{gradient}, by {kernel} {joined:.0f}"
    log.info("%s (%s)", said, parts.softmax)
    return said if joined <= GAIN * written else None


def _kernel_of(operands: Sequence[Node], options: Mapping[str, Any]) -> str | None:
    """Return which of KERNELS torch runs an attention by; None if by none."""
    named = {name: value_of(option) for name, option in options.items()}
    with value_of(operands[0]).fake_mode, _Called() as seen:
        F.scaled_dot_product_attention(*map(value_of, operands), **named)
    return next((KERNELS[op] for op in seen.ops if op in KERNELS), None)


class _Called(TorchDispatchMode):
    """Notes the ops that are called while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
