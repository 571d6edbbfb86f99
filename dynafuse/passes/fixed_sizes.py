"""A Dynamo graph with dynamic sizes as Dynamo would have made it for the sizes at hand.

Every size on which a dynamic graph depends is an argument of its own (``s77: SymInt``), the strides of tensors that are not
contiguous among them. With numbers in their place all shapes are numbers, so are those that nodes compute, and the examples
that nodes carry are made anew.

Worked example: of ``f(s77, x)`` with ``mul = s77 * 2; reshape = x.reshape(mul, -1)`` called with ``4`` and a tensor of four
rows, there remains ``f(x)`` with ``reshape = x.reshape(8, -1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from dynafuse.fx import numbers_of

Number = int | float | bool

ARITHMETIC = frozenset({"_operator", "math", "builtins"})
"""Modules of Python's own functions of numbers."""

ASKS_FOR_SIZES = frozenset({"size", "stride", "dim", "numel", "storage_offset"})
"""Methods of a tensor."""


def size_arguments(module: GraphModule) -> tuple[int, ...]:
    """Return the positions of a Dynamo graph's arguments that are sizes; none if its shapes depend on anything else.

    Args:
        module: The graph, with an example of each node's value.
    """
    inputs = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    sizes = {i: example.node.expr for i, example in enumerate(inputs) if isinstance(example, torch.SymInt)}
    given = frozenset(sizes.values())
    values = (value for node in module.graph.nodes for value in tree_leaves(node.meta.get("example_value")))
    numbers = chain.from_iterable(map(numbers_of, values))
    return tuple(sizes) if sizes and all(_is_given(number, given) for number in numbers) else ()


def _is_given(number: object, given: frozenset[Any]) -> bool:
    """Return whether a number is known from some symbols; a float may also be that of an argument."""
    if isinstance(number, torch.SymFloat):
        return bool(number.node.has_hint())
    return not isinstance(number, torch.SymInt | torch.SymBool) or bool(number.node.expr.free_symbols <= given)


def fix_sizes(module: GraphModule, positions: Sequence[int], arguments: Sequence[Any],
              mode: FakeTensorMode) -> dict[int, Any]:
    """Put numbers in the place of a Dynamo graph's sizes, in place; these arguments are gone afterwards.

    Args:
        module: The graph.
        positions: Which arguments are sizes.
        arguments: All arguments of a call.
        mode: Whose tensors the examples of the graph's nodes become.

    Returns:
        An example of each argument that is left, by its position among all.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    examples = {i: _example(arguments[i], node, mode) for i, node in enumerate(inputs) if i not in positions}
    for position in positions:
        _put(inputs[position], arguments[position])
    with mode:
        _Examples(module).run(*examples.values())
    for node in list(module.graph.nodes):
        example = node.meta.get("example_value")
        if isinstance(example, Number) and _is_arithmetic(node):
            _put(node, example)
    module.recompile()
    return examples


def _example(argument: Any, node: Node, mode: FakeTensorMode) -> Any:
    """Return a fake tensor of fixed sizes; of a number that Dynamo hands over as a tensor one that has the same number.

    Torch gives such a number a symbol if it is told where it comes from, and an example that is finite.
    """
    if not isinstance(argument, Tensor):
        return argument
    if any(user.op == "call_method" and user.target == "item" for user in node.users):
        finite = argument if argument.isfinite() else torch.ones_like(argument)
        return mode.from_tensor(finite, static_shapes=False, source=ConstantSource(node.name))
    return mode.from_tensor(argument, static_shapes=True)


def _is_arithmetic(node: Node) -> bool:
    """Return whether a node does nothing but compute a number: one that enters a transform returns how deep that is."""
    if node.op == "call_method":
        return node.target in ASKS_FOR_SIZES
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ARITHMETIC


def _put(node: Node, number: Number) -> None:
    """Put a number in the place of a node."""
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda operand: number if operand is node else operand)
    node.graph.erase_node(node)


class _Examples(Interpreter):
    """Gives each node of a graph the example that it computes from those of its operands."""

    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value
