"""Graphs that run node by node, by torch's own ops, where they could not be compiled.

Worked example: ``eager(module)([x, y])`` returns what the compiled function of ``module`` would return, in the same strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Interpreter, Node

from dynafuse.fx import makes_memory
from dynafuse.runtime import random
from dynafuse.runtime.promised import as_planned


class _Eager(Interpreter):
    """Runs a graph, draws random numbers from seeds as kernels do, and returns results in the strides of their plan."""

    def __init__(self, module: GraphModule, given: Sequence[Any]) -> None:
        super().__init__(module)
        placeholders = (node for node in self.graph.nodes if node.op == "placeholder")
        self.sizes: dict[sympy.Symbol, sympy.Integer] = {}
        for node, value in zip(placeholders, given, strict=True):
            self.sizes.update(_sizes_of(node.meta.get("val"), value))

    def run_node(self, n: Node) -> Any:
        """Return a node's result, in the strides that the graph's other readers were planned for."""
        result, planned = super().run_node(n), n.meta.get("val")
        if not isinstance(result, torch.Tensor) or not isinstance(planned, torch.Tensor) or not _makes_memory(n):
            return result
        if result.layout is not torch.strided or planned.layout is not torch.strided:
            return result
        sizes, strides = self._known(planned.shape), self._known(planned.stride())
        if sizes is None or strides is None or result.stride() == strides:
            return result
        return as_planned(result, sizes, strides, str(n.target))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a call's result; random numbers come from :data:`random.EAGER`."""
        return super().call_function(random.EAGER.get(target, target), args, kwargs)

    def _known(self, sizes: Sequence[Any]) -> tuple[int, ...] | None:
        """Return sizes as numbers; None if one depends on data."""
        values = [_expression(size).xreplace(self.sizes) for size in sizes]
        return tuple(map(int, values)) if all(value.is_Integer for value in values) else None


def _sizes_of(planned: Any, given: Any) -> Iterator[tuple[sympy.Symbol, sympy.Integer]]:
    """Yield the size symbols among an input's sizes and strides, with their values."""
    pairs = [(planned, given)]
    if isinstance(planned, torch.Tensor):
        pairs = [*zip(planned.shape, given.shape, strict=True)]
        if planned.layout is torch.strided:
            pairs += [*zip(planned.stride(), given.stride(), strict=True)]
    for symbol, value in pairs:
        if isinstance(symbol, torch.SymInt) and isinstance(symbol.node.expr, sympy.Symbol):
            yield symbol.node.expr, sympy.Integer(value)


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _makes_memory(node: Node) -> bool:
    """Return whether a call returns memory of its own, by its schema; so do calls that return several tensors."""
    target = node.target
    if target is operator.getitem:
        return _makes_memory(node.all_input_nodes[0])
    return makes_memory(node)


def eager(module: GraphModule) -> Callable[[list[Any]], Any]:
    """Return the function of a graph of ATen ops. It is boxed: it takes its arguments in a list, which it empties."""
    def run(args: list[Any]) -> Any:
        return _Eager(module, args).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
