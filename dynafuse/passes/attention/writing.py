"""Calls that are written into a Dynamo graph before another one, each with the value that it has for fake tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from dynafuse.fx import is_one
from dynafuse.ops.indexing_math import as_expr, known_equal
from dynafuse.passes.attention.products import Operand, Order, value_of
from dynafuse.passes.shown_strides import called

Sizes: TypeAlias = "Sequence[Any]"


def equal(left: Sizes, right: Sizes) -> bool:
    """Return whether sizes are known to be equal, and as many."""
    return len(left) == len(right) and all(known_equal(as_expr(a), as_expr(b)) for a, b in zip(left, right, strict=True))


def static(sizes: Sizes) -> tuple[int, ...]:
    """Return sizes that are known.

    Args:
        sizes: The sizes.

    Raises:
        ValueError: They are not.
    """
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError("sizes are dynamic")
    return tuple(sizes)


class Writer:
    """Writes calls before a product, each with the value that it has for fake tensors."""

    def __init__(self, product: Node) -> None:
        self.product = product
        self.mode = value_of(product).fake_mode
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write a call of a function, and return it.

        Args:
            target: The function.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
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

    def operand(self, operand: Operand) -> Node:
        """Return a batch of matrices whose dimensions are in order."""
        return operand.node if operand.order is None else self.ordered(operand.node, operand.order)

    def ordered(self, node: Node, order: Order) -> Node:
        """Return a node with its dimensions in another order.

        Args:
            node: The node.
            order: The dimensions; None is a new one.
        """
        node = self.call(torch.permute, node, tuple(dim for dim in order if dim is not None))
        for place, dim in enumerate(order):
            node = self.call(torch.unsqueeze, node, place) if dim is None else node
        return node

    def with_lead(self, node: Node, broadcast: Sizes, lead: Sizes) -> Node:
        """Return a batch of matrices with other dimensions in front.

        Args:
            node: The batch.
            broadcast: The dimensions in front that it is broadcast to.
            lead: The dimensions that views make of these.

        Raises:
            ValueError: They are not known.
        """
        value = value_of(node)
        if not equal(value.shape[:-2], broadcast):
            node = self.call(torch.Tensor.expand, node, (*static(broadcast), -1, -1))
        if equal(broadcast, lead):
            return node
        return self.call(torch.reshape, node, (*static(lead), *static(value.shape[-2:])))

    def with_lead_of_bias(self, node: Node, broadcast: Sizes, lead: Sizes) -> Node:
        """Return a bias with other dimensions in front.

        Args:
            node: The bias.
            broadcast: The dimensions in front that it is broadcast to.
            lead: The dimensions that views make of these.

        Raises:
            ValueError: It differs along some of them only.
        """
        value = value_of(node)
        own, matrix = value.shape[:-2], value.shape[-2:]
        if equal(broadcast, lead):
            return node
        if all(map(is_one, own)):
            return self.call(torch.reshape, node, (*(1 for _ in lead), *static(matrix))) if own else node
        if not equal(own, broadcast):
            raise ValueError(f"{node} has other dimensions than its scores")
        return self.with_lead(node, broadcast, lead)

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
        flat = (math.prod(static(own[:-1])), own[-1]) if equal(own, lead) else (1, 1)
        return self.call(torch.reshape, node, static((*flat, *value_of(node).shape[-2:])))

    def out_of_four(self, node: Node, lead: Sizes, after: Sizes) -> Node:
        """Return what attention returns with the dimensions in front that it has written out.

        Args:
            node: The result, with two dimensions in front.
            lead: Those in front of the operands before they were two.
            after: Those in front of the result.

        Raises:
            ValueError: They are not known.
        """
        if equal(after, lead) and len(lead) in (1, 2):
            return node if len(lead) == 2 else self.call(torch.squeeze, node, 1)
        return self.call(torch.reshape, node, static((*after, *value_of(node).shape[-2:])))
