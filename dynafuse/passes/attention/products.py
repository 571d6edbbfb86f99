"""Products of matrices, or of batches of them, as models call them: ``matmul``, ``bmm`` and ``einsum``.

Worked example: ``einsum("bihd,bjhd->bhij", q, k)`` is a product of ``q`` in the order (0, 2, 1, 3) and of ``k`` in the order
(0, 2, 3, 1), whose result is in the order of batches, rows and columns.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

Given: TypeAlias = Mapping[str | int, Any]
"""A call's arguments by position, and by name."""

Order: TypeAlias = "tuple[int | None, ...]"
"""Dimensions of a tensor, as another has them; None is a new one, of one element."""


def value_of(node: Any) -> Any:
    """Return what Dynamo traced a node with; whatever else as it is."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def given_to(node: Node) -> Given:
    """Return a call's arguments by position, and by name."""
    given: dict[str | int, Any] = dict(enumerate(node.args))
    return given | node.kwargs


@dataclass(frozen=True)
class Operand:
    """A batch of matrices: a node, and its dimensions in ``order`` if they are in another one."""

    node: Node
    order: Order | None = None


@dataclass(frozen=True)
class Product:
    """A product of two operands; ``order`` are the dimensions of batches, rows and columns as the call returns them."""

    left: Operand
    right: Operand
    order: Order | None = None


def product_of(node: Node) -> Product | None:
    """Return the product that a call computes; None if it computes none, or is none."""
    if node.op not in ("call_function", "call_method"):
        return None
    given = given_to(node)
    if node.target in EINSUMS:
        operands = node.args[1:] if len(node.args) != 2 else node.args[1]
        return _by_letters(node.args[0], *operands) if isinstance(operands, (list, tuple)) and len(operands) == 2 else None
    if node.target not in PRODUCTS:
        return None
    left: Any = given.get(0, given.get("input"))
    right: Any = given.get(1, given.get("other", given.get("mat2")))
    return Product(Operand(left), Operand(right)) if is_matrix(left) and is_matrix(right) else None


def is_matrix(operand: Any) -> bool:
    """Return whether an argument is a matrix, or a batch of some."""
    value = value_of(operand)
    return isinstance(operand, Node) and isinstance(value, torch.Tensor) and value.dim() >= 2


def _by_letters(equation: Any, left: Any, right: Any) -> Product | None:
    """Return the product that an equation of ``einsum`` says; its columns are the right operand's."""
    if not isinstance(equation, str) or not is_matrix(left) or not is_matrix(right):
        return None
    terms, _, result = equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    if not all(term.isalpha() and len(set(term)) == len(term) for term in (first, second, result)):
        return None
    if len(first) != value_of(left).dim() or len(second) != value_of(right).dim():
        return None
    if result[-1] in first and result[-1] not in second:
        first, second, left, right = second, first, right, left
    summed = "".join(letter for letter in first if letter in second and letter not in result)
    columns = "".join(letter for letter in second if letter not in first)
    if len(summed) != 1 or len(columns) != 1 or {*result} != {*first, *second} - {summed}:
        return None
    batch = _batch(first.replace(summed, ""), second, result, columns)
    if batch is None:
        return None
    (row,) = set(first) - {*batch, summed}
    orders = (_order(first, batch + row + summed), _order(second, batch + summed + columns),
              _order(batch + row + columns, result))
    return Product(Operand(left, orders[0]), Operand(right, orders[1]), orders[2])


def _batch(first: str, second: str, result: str, columns: str) -> str | None:
    """Return the letters of an equation's batches, in the order of the result or, if its rows are elsewhere, of the operand.

    Args:
        first: The letters of the left operand but the one that is summed over.
        second: Those of the right one.
        result: Those of the result.
        columns: The one of its columns.
    """
    alone = [letter for letter in first if letter not in second]
    if not alone:
        return None
    if result[-1] == columns and result[-2] in alone:
        return result[:-2]
    return first.replace(alone[-1], "")


def _order(letters: str, wanted: str) -> Order | None:
    """Return in which order a tensor's dimensions have the letters that are wanted; None for its own."""
    order = tuple(letters.index(letter) if letter in letters else None for letter in wanted)
    return None if order == tuple(range(len(letters))) else order


EINSUMS = frozenset({torch.einsum, torch.functional.einsum})
PRODUCTS = frozenset({torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__"})
"""Calls of two matrices, or batches of them, that return their product."""
