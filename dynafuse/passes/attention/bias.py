"""What an attention adds to its scores, as the bias that a kernel of torch's adds, or as less than that.

A constant that keeps every key needs no bias, and one that is the causal triangle becomes ``is_causal``, as masks of
attention do (``passes/masks``). What else is added is summed up to one tensor in the dtype of the operands.

Worked example: of ``scores.masked_fill(mask, -1e9) + bias`` the kernel adds ``where(mask, low, 0.0) + bias``.
"""

from __future__ import annotations

import math
import operator
from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from dynafuse.passes.attention.products import value_of
from dynafuse.passes.attention.scores import FILLS, LOST, Scores, Term
from dynafuse.passes.attention.writing import Writer, equal
from dynafuse.passes.constants import Constants
from dynafuse.passes.masks.recovery import Masks


class Biases:
    """The biases of a graph's attentions, of which many may add the same."""

    def __init__(self, constants: Constants) -> None:
        self._masks = Masks(constants)
        self._meanings: dict[tuple[Any, ...], str] = {}

    def of(self, scores: Scores, writer: Writer, dtype: torch.dtype) -> tuple[Node | None, bool]:
        """Return what a kernel is to add to scores, if anything, and whether it is to leave out what lies behind a query.

        Args:
            scores: The scores.
            writer: Writes the bias.
            dtype: The dtype of the operands.

        Raises:
            ValueError: A kernel cannot add it.
        """
        terms = [term for term in scores.terms if value_of(term.node).dim()]  # a number makes no difference to a softmax
        if len(terms) == 1 and equal(value_of(terms[0].node).shape[-2:], value_of(scores.path[-1]).shape[-2:]):
            meaning = self._meaning(terms[0], writer)
            if meaning != "other":
                return None, meaning == "causal"
        tensors = [writer.with_lead_of_bias(_added(term, writer, dtype), term.lead, scores.lead) for term in terms]
        if not tensors:
            return None, False
        return writer.cast(reduce(lambda a, b: writer.call(operator.add, a, b), tensors), dtype), False

    def _meaning(self, term: Term, writer: Writer) -> str:
        """Return what a term does to scores if it is a constant: ``full``, ``causal`` or ``other``."""
        key = term.node, term.factor, term.fill is None, term.fills_where
        if key not in self._meanings:
            self._meanings[key] = self._told(term, writer)
        return self._meanings[key]

    def _told(self, term: Term, writer: Writer) -> str:
        if term.fill is None:  # what is not 0 has to be as good as infinite
            masks = [writer.call(operator.eq, term.node, 0), writer.call(operator.gt, term.node, FILLS / term.factor)]
        else:
            masks = [writer.call(torch.logical_not, term.node) if term.fills_where else term.node]
        meanings = {self._masks.meaning(mask) for mask in masks}
        if len(meanings) > 1 or "other" in meanings:
            return "other"
        for mask in masks:
            self._masks.rely_on(mask)
        return meanings.pop()


def _added(term: Term, writer: Writer, dtype: torch.dtype) -> Node:
    """Return a term as a tensor."""
    value, low = value_of(term.node), torch.finfo(dtype).min / 4  # a few of which are finite
    if term.fill is not None:
        fill = term.fill if math.isinf(term.fill) and not term.finite else low
        return writer.call(torch.where, term.node, *((fill, 0.0) if term.fills_where else (0.0, fill)))
    if value.dtype != dtype or (value.requires_grad and torch.is_grad_enabled()):
        raise ValueError(f"{term.node} would be rounded, or has a gradient")
    tensor = writer.call(torch.clamp, term.node, min=low) if term.finite else term.node
    return tensor if term.factor == 1 else writer.call(operator.mul, tensor, term.factor)


def with_lost_rows(query: Node, bias: Node, writer: Writer, dtype: torch.dtype) -> tuple[Node, Node]:
    """Return queries and their bias such that those which are left no key weigh all alike, or are NaN.

    Args:
        query: The queries.
        bias: What is added to their scores.
        writer: Writes calls.
        dtype: The dtype of both.
    """
    lowest = torch.finfo(dtype).min
    best = writer.call(torch.amax, bias, -1, True)
    is_lost = writer.call(operator.le, best, max(LOST, lowest / 4))
    nothing = writer.call(operator.mul, best, 0)  # or NaN
    finite = writer.call(torch.clamp, bias, min=lowest / 2)
    return writer.call(torch.where, is_lost, nothing, query), writer.call(torch.where, is_lost, 0.0, finite)
