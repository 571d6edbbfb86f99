"""Constants of a Dynamo graph: what depends on no input but sizes, and what its value is.

A graph may be in pieces: torch compiles one after the other for DDP, a piece for each bucket of gradients, and what is
checkpointed is a graph inside the graph. Pieces share the fake tensors that Dynamo traced them with, so that a constant
that one hands to the next is known there.

Worked example: in ``mask = arange(4)[None] <= arange(4)[:, None]; y = layer(x, mask)`` the mask is a constant, and after
``hand_on(mask)`` it is one in the graph of ``layer`` as well, where it is an input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.utils.weak import WeakTensorKeyDictionary

Memory: TypeAlias = frozenset[int | None]
"""Numbers of storages of the tensors that a graph was traced with; None for those that are not known."""

RUNS_BODY = ("tag_activation_checkpoint", "wrap")
"""Names of ops that run a graph on their operands, as they are."""

_handed_on: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Graphs that compute constants which are inputs of other pieces, by the fake tensors that stand for those."""


class Constants:
    """The constants of one graph."""

    def __init__(self, module: GraphModule, inner: Mapping[Node, GraphModule]) -> None:
        """Look through a graph for what it writes to.

        Args:
            module: The graph, which may be a piece of one.
            inner: Its :func:`bodies`.
        """
        self.module = module
        self.written = _written_memory(module, inner)
        for node in module.graph.find_nodes(op="placeholder"):
            if _is_known(node) and _memory(node) in self.written:
                del _handed_on[_example(node)]

    def sources(self, node: Node) -> set[Node] | None:
        """Return the nodes that a node is computed from, itself included; None if it is no constant.

        It is none if it depends on an input that is none, on random numbers, or on what something writes to. Sizes that are
        symbolic are among the nodes, and what they are computed from is not.
        """
        sources: set[Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current in sources:
                continue
            if _is_size(current):
                sources.add(current)
                continue
            if not _is_known(current) and (current.op not in ("call_function", "call_method") or not is_pure(current)):
                return None
            if isinstance(_example(current), torch.Tensor) and _memory(current) in self.written:
                return None
            sources.add(current)
            stack.extend(current.all_input_nodes)
        return sources

    def value(self, node: Node, sources: Collection[Node]) -> Any:
        """Compute a constant.

        Args:
            node: The constant.
            sources: What it is computed from: no sizes.
        """
        with torch.no_grad(), unset_fake_temporarily():
            return self.recipe(node, sources)()

    def sizes(self, sources: Collection[Node]) -> list[torch.SymInt]:
        """Return the sizes among what a constant is computed from, in the order of the graph."""
        return [_example(source) for source in self.module.graph.nodes if source in sources and _is_size(source)]

    def recipe(self, node: Node, sources: Collection[Node]) -> GraphModule:
        """Return a graph that computes a constant from its :meth:`sizes`, and that holds nothing of this one.

        Args:
            node: The constant.
            sources: What it is computed from.
        """
        return GraphModule(torch.nn.Module(), self._recipe(node, sources))

    def hand_on(self, node: Node) -> None:
        """Note what a node computes for the graphs that read it as an input, if it is a constant.

        Args:
            node: The node.
        """
        if not isinstance(_example(node), FakeTensor) or _is_known(node):
            return
        sources = self.sources(node)
        if sources is not None and not self.sizes(sources):
            _handed_on[_example(node)] = self._recipe(node, sources)

    def _recipe(self, node: Node, sources: Collection[Node]) -> Graph:
        recipe, copies = Graph(), dict[Node, Any]()
        for source in (n for n in self.module.graph.nodes if n in sources):
            if _is_size(source):
                copies[source] = recipe.placeholder(source.name)
            elif _is_known(source):
                copies[source] = recipe.graph_copy(_handed_on[_example(source)], {})
            else:
                copies[source] = recipe.node_copy(source, copies.__getitem__)
                copies[source].meta = {}
        recipe.output(copies[node])
        return recipe


def are_handed_on() -> bool:
    """Return whether any constants are known that are inputs of graphs."""
    return bool(_handed_on)


def bodies(module: GraphModule) -> dict[Node, GraphModule]:
    """Return the calls that run a graph on their operands, each with the graph, which no other call runs.

    Args:
        module: The graph that has the calls.
    """
    calls = Counter(str(held.target) for held in module.graph.find_nodes(op="get_attr") for _ in held.users)
    inside = {node: body for node in module.graph.nodes if (body := _body(module, node)) is not None}
    return {node: body for node, body in inside.items() if calls[str(node.args[0].target)] == 1}


def _body(module: GraphModule, node: Node) -> GraphModule | None:
    """Return the graph that a call runs, if it runs it on the very tensors that the graph was traced with."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in RUNS_BODY or not node.args:
        return None
    held, *operands = node.args
    body = getattr(module, str(held.target), None) if isinstance(held, Node) and held.op == "get_attr" else None
    if not isinstance(body, GraphModule):
        return None
    inputs = body.graph.find_nodes(op="placeholder")
    outer = [_example(operand) if isinstance(operand, Node) else None for operand in operands]
    is_same = len(inputs) == len(outer) and all(_example(node) is value for node, value in zip(inputs, outer, strict=True))
    return body if is_same else None


def _example(node: Node) -> Any:
    return node.meta.get("example_value")


def _is_size(node: Node) -> bool:
    return isinstance(_example(node), torch.SymInt)


def _is_known(node: Node) -> bool:
    return node.op == "placeholder" and isinstance(_example(node), FakeTensor) and _example(node) in _handed_on


def _written_memory(module: GraphModule, inner: Mapping[Node, GraphModule]) -> Memory:
    """Return the memory that something in a graph writes to, directly or through a view, or may write to: the unknown, too.

    Tracing has counted what torch's own ops write; what a kernel or a graph inside an op does with its operands it has not.
    """
    written: set[int | None] = {None}
    for node in module.graph.nodes:
        if node in inner:
            written |= _written_memory(inner[node], bodies(inner[node]))
        elif node.op in ("call_function", "call_method", "call_module") and not is_pure(node):
            written.update(map(_memory, node.all_input_nodes))
        value = _example(node)
        if isinstance(value, torch.Tensor) and (value.is_inference() or value._version):
            written.add(_memory(node))
    return frozenset(written)


def is_written_among(calls: Sequence[Node], read: Iterable[Node]) -> bool:
    """Return whether something may write to what some nodes are, directly or through a view, among calls but not by one.

    Args:
        calls: The calls, in the order of the graph.
        read: The nodes.
    """
    memory = {_memory(node) for node in read}
    node = calls[0].next
    while node is not calls[-1]:
        may_write = node.op.startswith("call") and node not in calls and not is_pure(node)
        if may_write and not memory.isdisjoint(map(_memory, node.all_input_nodes)):
            return True
        node = node.next
    return False


def _memory(node: Node) -> int | None:
    """Return the number of the memory that a node's tensor lies in; None where it is no tensor, or none that tells."""
    value = _example(node)
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
        return None
    number: int = value.untyped_storage()._cdata
    return number


IN_PLACE_OPERATORS = frozenset({
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor", "ipow", "imod", "ilshift", "irshift", "imatmul",
    "setitem", "delitem",
})
IMPURE = ("rand", "dropout", "bernoulli", "multinomial", "empty", "vmap", "batch_dim", "copy_")


def is_pure(node: Node) -> bool:
    """Return whether a call can be repeated without effects and with the same result, by its name; in doubt it cannot.

    Args:
        node: The call.
    """
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return False
    if getattr(node.target, "__module__", None) == "_operator":
        return node.target.__name__ not in IN_PLACE_OPERATORS  # type: ignore[union-attr]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    in_place = name.endswith("_") and not name.endswith("__")
    return not in_place and "out" not in node.kwargs and not any(word in name for word in IMPURE)
