"""A Dynamo graph with dynamic sizes as Dynamo would have made it for the sizes at hand.

Every size on which a dynamic graph depends is an argument of its own (``s77: SymInt``), the strides of tensors that are not
contiguous among them. With numbers in their place all shapes are numbers, so are those that nodes compute, and the examples
that nodes carry are made anew.

Worked example: of ``f(s77, x)`` with ``mul = s77 * 2; reshape = x.reshape(mul, -1)`` called with ``4`` and a tensor of four
rows, there remains ``f(x)`` with ``reshape = x.reshape(8, -1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

Number = int | float | bool


def size_arguments(module: GraphModule) -> tuple[int, ...]:
    """Return the positions of a Dynamo graph's arguments that are sizes; none if its shapes depend on anything else.

    Shapes may depend on data, and on numbers that are no sizes.

    Args:
        module: The graph, with an example of each node's value.
    """
    inputs = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    sizes = {i: example.node.expr for i, example in enumerate(inputs) if isinstance(example, torch.SymInt)}
    given = frozenset(sizes.values())
    values = (value for node in module.graph.nodes for value in tree_leaves(node.meta.get("example_value")))
    return tuple(sizes) if sizes and all(_symbols(value) <= given for value in values) else ()


def _symbols(value: Any) -> frozenset[Any]:
    """Return the symbols that a number, or the layout of a tensor, depends on."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return frozenset(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return frozenset()
    layout = (*value.shape, *value.stride(), value.storage_offset()) if value.layout is torch.strided else value.shape
    return frozenset[Any]().union(*map(_symbols, layout))


def fix_sizes(module: GraphModule, positions: Sequence[int], arguments: Sequence[Any], mode: FakeTensorMode) -> None:
    """Put numbers in the place of a Dynamo graph's sizes, in place; these arguments are gone afterwards.

    Args:
        module: The graph.
        positions: Which arguments are sizes.
        arguments: All arguments of a call.
        mode: Whose tensors the examples of the graph's nodes become.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    for position in positions:
        _put(inputs[position], arguments[position])
    others = [argument for i, argument in enumerate(arguments) if i not in positions]
    with mode:
        fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in others]
        _Examples(module).run(*fakes)
    for node in list(module.graph.nodes):
        example = node.meta.get("example_value")
        if node.op in ("call_function", "call_method") and isinstance(example, Number):
            _put(node, example)
    module.recompile()


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
