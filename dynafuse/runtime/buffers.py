"""Which results a graph's function writes over operands that nothing reads any more, instead of into new memory.

A kernel says which of its outputs may be one tensor with which of its inputs (``overwrites`` of a ``Launch``). The operand
has to be memory that this call of the function has made, of which nothing else is left: no other view, no result of the
graph. A backward may also overwrite what the forward has saved for it alone: its function asks each time whether the graph
is retained, or somebody else holds the tensor, and then takes new memory. Such a tensor may have gaps between its rows,
which the result fills: what a padded product saved, of which the backward was told the part without padding.

Worked example: of ``tanh(x @ w)`` the product dies with the kernel of ``tanh``, so that ``reused_buffers`` prints as
``tanh written over mm``.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload
from torch.fx import Node

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion
from dynafuse.ir import ALIGNED, Facts, Launch, Role, is_piece, returns_new
from dynafuse.lowering.registry import executor

UNLESS = ", unless the graph is retained"
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # True outside of a backward
_users: Callable[[int], int] = torch._C._storage_Use_Count


@dataclass(frozen=True)
class Buffers:
    """The results that are written over an operand, each with that operand."""

    over: Mapping[Node, Node]

    def in_given_memory(self, results: Collection[Node], writable: Container[Node]) -> tuple[Buffers, frozenset[Node]]:
        """Return what is given memory from outside so that some results are made there, and the rest of this with it.

        What such a result is written over is made there already, as far as steps write it to memory that they are given.
        Else the result is written over nothing.

        Args:
            results: The results.
            writable: The values that steps write to memory which they are given.
        """
        over, given = dict(self.over), set[Node]()
        for node in results:
            owner = self._owner(node)
            if owner not in writable:
                owner = node
                over.pop(node, None)
            given.add(owner)
        return Buffers(over), frozenset(given)

    def _owner(self, node: Node) -> Node:
        """Return the value that a result's memory was made for."""
        while node in self.over:
            node = self.over[node]
        return node

    def noted(self, plan: CanonicalPlan) -> CanonicalPlan:
        """Return a plan whose regions say which of their results are written over what."""
        def told(bound: CanonicalRegion) -> CanonicalRegion:
            notes = [self._told(node) for node in bound.outputs if node in self.over]
            return replace(bound, region=replace(bound.region, reasons=(*bound.region.reasons, *notes)))

        return plan.mapped(told)

    def _told(self, node: Node) -> str:
        operand = self.over[node]
        return f"{node} written over {operand}" + (UNLESS if operand.op == "placeholder" else "")

    def __str__(self) -> str:
        return "\n".join(map(self._told, self.over))


NEW_MEMORY = Buffers({})
"""Every result gets memory of its own."""


def reused_buffers(plan: CanonicalPlan, launches: Callable[[CanonicalRegion], Sequence[Launch]],
                   offered: Collection[int] = ()) -> Buffers:
    """Return which results of a plan are written over dead operands.

    Args:
        plan: The plan.
        launches: Returns the launches of a region's kernel.
        offered: Positions of inputs that the function may be alone in holding, which it finds out when it runs.
    """
    memory = _Memory(plan, offered)
    over: dict[Node, Node] = {}
    for number, step in enumerate(plan.steps):
        if isinstance(step, CanonicalRegion) and not executor(step.region.executor).allocates:
            over.update(_of_region(memory, number, step, launches))
    return Buffers(over)


def _of_region(memory: _Memory, number: int, bound: CanonicalRegion,
               launches: Callable[[CanonicalRegion], Sequence[Launch]]) -> Iterator[tuple[Node, Node]]:
    """Yield the outputs of a region that are written over an operand, each with that operand; no operand twice.

    Of several operands an input is the last choice: it may turn out to be held by others.
    """
    operands = sorted(dict.fromkeys(bound.arguments), key=lambda operand: operand.op == "placeholder")
    dead = {operand: [f"in{i}" for i, node in enumerate(bound.arguments) if node is operand]
            for operand in operands if memory.dies_with(number, operand, bound.arguments)}
    if not dead:
        return
    pairs = _overwrites(launches(bound))
    for i, node in enumerate(bound.outputs):
        fitting = (operand for operand, names in dead.items()
                   if all((f"out{i}", name) in pairs for name in names) and memory.has_room(operand, node))
        operand = next(fitting, None)
        if operand is not None:
            del dead[operand]
            yield node, operand


def _overwrites(launches: Sequence[Launch]) -> set[tuple[str, str]]:
    """Return the pairs of an output and an input that may be one tensor in all launches of a kernel."""
    pairs: set[tuple[str, str]] = set()
    for launch in launches:
        others = {name for other in launches if other is not launch for name, _ in other.signature}
        pairs |= {pair for pair in launch.overwrites if others.isdisjoint(pair)}
    return pairs


class _Memory:
    """What is known of the memory behind the values of a graph while its function runs."""

    def __init__(self, plan: CanonicalPlan, offered: Collection[int]) -> None:
        self.annotated = plan.annotated
        self.facts = plan.annotated.facts
        self.into = {node: into for bound in plan.regions for node, into in bound.region.copies.items()}
        self.stored = {node for bound in plan.regions if not executor(bound.region.executor).allocates
                       for node in bound.outputs}
        inputs = plan.annotated.graph.find_nodes(op="placeholder")
        self.offered = {node for i, node in enumerate(inputs) if i in offered and self.facts[node].alignment == ALIGNED}
        self.last = {self.of(node): number for number, step in enumerate(plan.steps) for node in _used(step)}
        self.escaped = set(map(self.of, plan.annotated.graph.output_node().all_input_nodes))
        for node in self.facts:
            if not self._lets_go(node):
                self.escaped.update(map(self.of, (node, *node.all_input_nodes)))

    def of(self, node: Node) -> Node:
        """Return the node whose memory a value is in."""
        while True:
            source = self.annotated.memory(node)
            source = self.into.get(source, source)
            if source is node:
                return node
            node = source

    def dies_with(self, number: int, node: Node, arguments: Sequence[Node]) -> bool:
        """Return whether only a step's kernel still uses a value's memory, which the function has made for it alone.

        Of the kernel's arguments no other may be in that memory.
        """
        owns = node in self.stored or node in self.offered or is_piece(node) or returns_new(node)
        return (owns and self.of(node) is node and self.last[node] == number and node not in self.escaped
                and all(other is node or self.of(other) is not node for other in arguments))

    def has_room(self, operand: Node, node: Node) -> bool:
        """Return whether an operand's memory has room for a result, or the function finds out when it runs."""
        return operand in self.offered or not has_more_elements(self.facts[node], self.facts[operand])

    def _lets_go(self, node: Node) -> bool:
        """Return whether a call neither returns nor writes to its operands, but as its schema says, nor keeps them.

        Ops outside ATen may still read an operand when they have returned; those that are made of others may return one.
        """
        if self.facts[node].role is not Role.EAGER or node.target is operator.getitem or returns_new(node):
            return True
        return isinstance(node.target, OpOverload) and node.target.is_view  # through which ``of`` looks


def _used(step: CanonicalRegion | Node) -> Sequence[Node]:
    """Return the values that a step uses."""
    if isinstance(step, CanonicalRegion):
        return [*step.arguments, *step.outputs, *step.region.copies.values()]
    return [*step.all_input_nodes, step]


def has_more_elements(result: Facts, operand: Facts) -> bool:
    """Return whether a result has more elements than an operand of the same strides: it fills gaps between its rows."""
    assert result.tensor is not None and operand.tensor is not None
    return result.tensor.stride == operand.tensor.stride and result.tensor.shape != operand.tensor.shape


def is_given_up(tensor: torch.Tensor, references: int, elements: int = 0) -> bool:
    """Return whether a tensor is held by the variable of one function alone, in a backward that keeps no saved tensors.

    Args:
        tensor: The value of the variable.
        references: What ``sys.getrefcount`` counts of it in the function itself, as the second argument of this call: how
            many references a call of a Python function takes depends on who runs Python's frames.
        elements: How many elements its memory has to have from its first one on.
    """
    if _keeps_graph() or references != ALONE or _users(tensor.untyped_storage()._cdata) != ALONE_IN_MEMORY:
        return False
    return (tensor.storage_offset() + elements) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _counted(tensor: torch.Tensor, references: int) -> tuple[int, int]:
    return references, _users(tensor.untyped_storage()._cdata)


def _of_one_variable() -> tuple[int, int]:
    """Return the references to a tensor in one variable, and to its memory, those that counting takes included."""
    tensor = torch.empty(1)
    return _counted(tensor, sys.getrefcount(tensor))


ALONE, ALONE_IN_MEMORY = _of_one_variable()
