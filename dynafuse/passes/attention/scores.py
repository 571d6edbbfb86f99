"""What the scores of an attention are: products of queries and keys, times a factor, plus what is added by place.

A Dynamo graph has torch's functions, methods and Python's operators, as the model calls them. :data:`CALLS` says which of
them make or change scores, and a :class:`Reader` follows them from a softmax back to the product. Nothing else may read
what lies in between: it would not be there any more.

Worked example: ``(q @ k.transpose(-1, -2) / 8 + bias).masked_fill(mask, -1e9)`` are scores of ``q`` and of what is to be
transposed, with the factor 1/8 and two terms: ``bias`` and, where ``mask`` holds, -1e9.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.fx import Node

from dynafuse.fallback import answered
from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.passes.attention.products import EINSUMS, PRODUCTS, Given, Operand, given_to, is_matrix, product_of, value_of
from dynafuse.passes.constants import Constants

MOST_CALLS = 16
"""Calls between the product and the softmax that are followed."""

FILLS = -1e4
"""The largest value that a mask may fill in: a score that has it added instead has no weight either."""


LOST = -1e8
"""A bias up to which a score that it is added to makes no difference in float32."""


@dataclass(frozen=True)
class Term:
    """What is added to scores: ``factor`` times a tensor or, with ``fill``, that number where a bool tensor holds.

    ``fills_where`` is the value that the bool has there: a mask may say what is left out, or what is kept. ``lead`` are the
    dimensions that the scores have in front where it is added. ``finite`` tells that infinities count as low numbers.
    """

    node: Node
    factor: float = 1.0
    fill: float | None = None
    fills_where: bool = True
    lead: tuple[Any, ...] = ()
    finite: bool = False


@dataclass(frozen=True)
class Scores:
    """Scores, whose last two dimensions are queries and keys.

    ``turned`` are the keys as the product reads them, with the last two dimensions exchanged. ``batches`` are the dimensions
    in front as the product has them, ``lead`` those that views have made of them, and ``over`` what queries are multiplied
    with besides ``factor``.
    """

    query: Operand
    turned: Operand
    batches: tuple[Any, ...]
    lead: tuple[Any, ...]
    factor: float = 1.0
    over: tuple[tuple[Callable[..., Any], Node], ...] = ()
    terms: tuple[Term, ...] = ()
    path: tuple[Node, ...] = field(default=(), compare=False)  # the calls, the product first

    def plus(self, *terms: Term) -> Scores:
        """Return these scores with something added."""
        return replace(self, terms=(*self.terms, *(replace(term, lead=self.lead) for term in terms)))

    def times(self, factor: float) -> Scores | None:
        """Return these scores times a number; None where that cannot be told."""
        if any(term.fill is not None and term.fill * factor > FILLS for term in self.terms):
            return None
        terms = tuple(replace(t, factor=t.factor * factor, fill=None if t.fill is None else t.fill * factor)
                      for t in self.terms)
        return replace(self, factor=self.factor * factor, terms=terms)


Change: TypeAlias = "Callable[[Node, Given, Scores, Reader], Scores | None]"
"""Returns what scores become by a call, given the call, its arguments, the scores and who reads them."""

Row: TypeAlias = "Callable[[Node, Reader], Scores | None]"
"""Returns the scores that a call computes."""


@dataclass(frozen=True)
class Reader:
    """Reads scores out of a graph, whose ``constants`` it knows, along up to so many ``calls``."""

    constants: Constants
    calls: int = MOST_CALLS

    def scores(self, node: Any) -> Scores | None:
        """Return what scores a node computes, which nothing but what asks reads; None if it is not known to compute any."""
        if not isinstance(node, Node) or not self.calls or len(node.users) != 1 or (
                not isinstance(value_of(node), torch.Tensor)):
            return None
        row = CALLS.get(node.target) if node.op in ("call_function", "call_method") else None
        scores = None if row is None else row(node, replace(self, calls=self.calls - 1))
        return None if scores is None else replace(scores, path=(*scores.path, node))

    def beside(self, node: Node, operands: Sequence[Any]) -> tuple[Scores, Any] | None:
        """Return the scores among two operands of a call that returns as many, and the other operand; None without any."""
        for place in (0,) if node.target in IN_PLACE else (0, 1):
            scores = self.scores(operands[place])
            if scores is not None and same_matrices(operands[place], node) and _same_lead(node, scores):
                return scores, operands[1 - place]
        return None

    def number(self, given: Any) -> float | None:
        """Return the number that a call is given, maybe as a constant tensor of one element; None if it is none."""
        if _is_number(given):
            return float(given)
        value = value_of(given)
        if not isinstance(given, Node) or not isinstance(value, torch.Tensor) or value.dim():
            return None
        sources = self.constants.sources(given)
        if sources is None or self.constants.sizes(sources):
            return None
        return answered(lambda: float(self.constants.value(given, sources)))


# Products -------------------------------------------------------------------------------------------------------------


def _product(node: Node, reader: Reader) -> Scores | None:
    product = product_of(node)
    if product is None or product.order is not None:
        return None
    lead = tuple(value_of(node).shape[:-2])
    return Scores(product.left, product.right, lead, lead)


def _added_product(node: Node, reader: Reader) -> Scores | None:
    """Return the scores that ``baddbmm`` computes."""
    given = given_to(node)
    added, query, turned = (given.get(i, given.get(name)) for i, name in enumerate(("input", "batch1", "batch2")))
    alpha, beta = given.get("alpha", 1), given.get("beta", 1)
    if not (is_matrix(query) and is_matrix(turned) and isinstance(added, Node) and _is_number(alpha) and _is_number(beta)):
        return None
    lead = tuple(value_of(node).shape[:-2])
    scores = Scores(Operand(query), Operand(turned), lead, lead, float(alpha))
    return scores.plus(Term(added, float(beta))) if beta else scores


# What scores become ---------------------------------------------------------------------------------------------------


def _by(change: Change) -> Row:
    """Return a row of calls on scores that are the first argument, and that keep the sizes of the last two dimensions."""
    def row(node: Node, reader: Reader) -> Scores | None:
        given = given_to(node)
        first = given.get(0, given.get("input"))
        scores = reader.scores(first)
        return None if scores is None or not same_matrices(first, node) else change(node, given, scores, reader)

    return row


def same_matrices(before: Node, after: Node) -> bool:
    """Return whether the last two dimensions of two nodes have equal sizes, and the others as many elements."""
    shapes = [value.shape if isinstance(value := value_of(node), torch.Tensor) else () for node in (before, after)]
    if min(map(len, shapes)) < 2:
        return False
    return all(known_equal(*map(as_expr, pair)) for pair in zip(shapes[0][-2:], shapes[1][-2:], strict=True)) and (
        known_equal(_count(shapes[0][:-2]), _count(shapes[1][:-2])))


def _count(sizes: Sequence[Any]) -> Any:
    product = as_expr(1)
    for size in sizes:
        product *= as_expr(size)
    return product


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_lead(node: Node, scores: Scores) -> bool:
    """Return whether a call's result has the scores' dimensions, and not more by broadcasting."""
    lead = value_of(node).shape[:-2]
    return len(lead) == len(scores.lead) and all(
        known_equal(as_expr(a), as_expr(b)) for a, b in zip(lead, scores.lead, strict=True))


def _sum(node: Node, reader: Reader) -> Scores | None:
    """Return the scores that a sum is: of scores and something else."""
    given = given_to(node)
    alpha = given.get("alpha", 1)
    pair = reader.beside(node, _operands(given)) if _is_number(alpha) and alpha == 1 else None
    if pair is None:
        return None
    scores, added = pair
    if isinstance(added, Node) and isinstance(value_of(added), torch.Tensor):
        return scores.plus(Term(added))
    return scores if _is_number(added) else None  # which a softmax does not see


def _operands(given: Given) -> tuple[Any, Any]:
    """Return the two operands of a call."""
    return given.get(0, given.get("input")), given.get(1, given.get("other"))


def _times(node: Node, reader: Reader) -> Scores | None:
    pair = reader.beside(node, _operands(given_to(node)))
    return None if pair is None else _scaled(pair[0], operator.mul, pair[1])


def _quotient(node: Node, given: Given, scores: Scores, reader: Reader) -> Scores | None:
    if given.get("rounding_mode") is not None or not _same_lead(node, scores):
        return None
    return _scaled(scores, operator.truediv, given.get(1, given.get("other")))


def _scaled(scores: Scores, how: Callable[..., Any], by: Any) -> Scores | None:
    """Return scores times, or by, a number or a tensor that is the same for all queries and keys."""
    if _is_number(by):
        return scores.times(float(how(1.0, by))) if by > 0 else None
    value = value_of(by)
    if not isinstance(by, Node) or not isinstance(value, torch.Tensor) or scores.terms:
        return None
    is_same = value.dim() == 0 or (value.dim() >= 2 and all(size == 1 for size in value.shape[-2:]))
    is_early = scores.batches == scores.lead or value.dim() == 0
    return replace(scores, over=(*scores.over, (how, by))) if is_same and is_early else None


def _filled(node: Node, given: Given, scores: Scores, reader: Reader) -> Scores | None:
    mask, fill = given.get(1, given.get("mask")), given.get(2, given.get("value"))
    return _masked(node, scores, mask, reader.number(fill), True)


def _chosen(node: Node, reader: Reader) -> Scores | None:
    """Return the scores that ``where`` chooses, which has scores in one place and a number in the other."""
    given = given_to(node)
    mask, *choices = (given.get(i, given.get(name)) for i, name in enumerate(("condition", "input", "other")))
    for scores_at in (0, 1):
        scores = reader.scores(choices[scores_at])
        if scores is not None and same_matrices(choices[scores_at], node):
            return _masked(node, scores, mask, reader.number(choices[1 - scores_at]), scores_at == 1)
    return None


def _masked(node: Node, scores: Scores, mask: Any, fill: float | None, fills_where: bool) -> Scores | None:
    value = value_of(mask)
    is_mask = isinstance(mask, Node) and isinstance(value, torch.Tensor) and value.dtype is torch.bool
    if not is_mask or fill is None or not fill <= FILLS or not _same_lead(node, scores):
        return None
    return scores.plus(Term(mask, 1.0, fill, fills_where))


def _raised(node: Node, reader: Reader) -> Scores | None:
    """Return the scores of which the largest is taken with a number that none but masks reach."""
    pair = reader.beside(node, _operands(given_to(node)))
    number = None if pair is None else reader.number(pair[1])
    if pair is None or number is None or not number <= LOST:  # which NaN is not
        return None
    return replace(pair[0], terms=tuple(replace(term, finite=True) for term in pair[0].terms))


def _same(node: Node, given: Given, scores: Scores, reader: Reader) -> Scores | None:
    """Return the same scores: in another dtype, in memory of their own, or with other dimensions in front."""
    lead = tuple(value_of(node).shape[:-2])
    return replace(scores, lead=lead) if has_same_numbers(node, given.get(0, given.get("input"))) else None


def has_same_numbers(node: Node, before: Any) -> bool:
    """Return whether a call of SAME returns what it is given as numbers, and not as bits, on the same device.

    Args:
        node: The call.
        before: What it is given.
    """
    value, given = value_of(node), value_of(before)
    is_other_memory = node.target == "view" and value.dtype != given.dtype
    return value.dtype.is_floating_point and value.device == given.device and not is_other_memory


IN_PLACE = frozenset({operator.iadd, operator.imul, "add_", "mul_"})
"""Sums and products that are written to their first argument, which others may see if it is none of scores."""

SAME = frozenset({"float", "half", "bfloat16", "to", "type", "type_as", "contiguous", "view", "reshape", "unsqueeze",
                  "squeeze", torch.reshape, torch.unsqueeze, torch.squeeze})
"""Calls whose result has the elements of their first argument, in its order."""

CALLS: Mapping[Any, Row] = {
    **dict.fromkeys((*PRODUCTS, *EINSUMS), _product),
    **dict.fromkeys((torch.baddbmm, "baddbmm"), _added_product),
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), _sum),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_"), _times),
    **dict.fromkeys((operator.truediv, operator.itruediv, torch.div, "div", "div_"), _by(_quotient)),
    **dict.fromkeys((torch.masked_fill, "masked_fill", "masked_fill_"), _by(_filled)),
    torch.where: _chosen,
    **dict.fromkeys((torch.max, torch.maximum, "max", "maximum"), _raised),
    **dict.fromkeys(SAME, _by(_same)),
}
"""What calls make of scores, by what is called."""

SOFTMAXES = frozenset({torch.softmax, F.softmax, "softmax"})
"""Calls that make probabilities of scores."""
