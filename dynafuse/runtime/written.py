"""The function of a graph, compiled from the text that ``wrapper.py`` writes, and that of its first steps.

Worked example: of a decoder whose last product is to be launched and all before it replayed, ``written.head.call`` runs all
but that product, and ``written.with_head(replay)`` is the whole function with ``replay`` in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.products import PRODUCTS
from dynafuse.ir import Plan, Tensor
from dynafuse.runtime.alike import Sharing
from dynafuse.runtime.step import Step
from dynafuse.runtime.wrapper import Part, Writer

Call: TypeAlias = Callable[[list[Any]], Any]
"""A boxed function: it takes its arguments in a list, which it empties."""


@dataclass(frozen=True)
class Head:
    """The first steps of a graph's function."""

    call: Call
    inputs: tuple[int, ...]  # of the graph, by position
    staying: frozenset[int]  # positions of results of which nothing leaves the graph's function
    bytes: int  # of these


@dataclass(frozen=True)
class Placed:
    """A result that a graph's function may be given memory for."""

    maker: str  # the global that makes it: allocates it, or computes it as well
    tensor: Tensor
    computes: bool

    def into(self, memory: torch.Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a maker that makes it in some memory, instead of in new one.

        Args:
            memory: A tensor of its sizes, strides and dtype.
            function: The maker.
        """
        return partial(function, out=memory) if self.computes else lambda *args, **named: memory


@dataclass(frozen=True)
class Written:
    """The function of a graph, with its text, and that of its first steps if that is one of its own."""

    call: Call
    source: str
    head: Head | None
    with_head: Callable[[Call], Call]
    """Returns the function with another one in the place of its first steps."""

    placed: tuple[Placed, ...] = ()
    """The results that the function may be given memory for."""

    def with_memory(self, memory: Sequence[torch.Tensor]) -> Call:
        """Return the function such that every call makes those results in the same memory.

        Args:
            memory: A tensor for each of them.
        """
        call: Any = self.call
        makers = dict(call.__globals__)
        for result, tensor in zip(self.placed, memory, strict=True):
            makers[result.maker] = result.into(tensor, makers[result.maker])
        return FunctionType(call.__code__, makers)


def write(plan: Plan, module: GraphModule, steps: Mapping[str, Step], static: frozenset[int],
          over: Mapping[Node, Node], sharing: Sharing, apart: int = 0, placed: Collection[Node] = ()) -> Written:
    """Write the function that runs a plan, and compile it.

    Args:
        plan: The plan.
        module: The module of its graph, which has the constants.
        steps: The plan's regions with their kernels, by name.
        static: Positions of inputs whose addresses do not change from call to call.
        over: The results that kernels write over an operand, each with that operand.
        sharing: Makes results that share memory with others.
        apart: How many of the first steps are to be a function of their own, if they can be.
        placed: Values of known sizes, of kernels and products, that the function may be given memory for.
    """
    writer = Writer(plan, module, steps, static, over, sharing, apart, placed)
    source, namespace = writer.write()
    exec(compile(source, "<dynafuse graph>", "exec"), namespace)
    call = namespace["call"]
    call._boxed_call, call.source = True, source

    def with_head(head: Call) -> Call:
        assert writer.head is not None
        namespace[writer.head.name] = head
        return call  # type: ignore[no-any-return]

    head = None if writer.head is None else _head(writer.head, namespace, plan)
    return Written(call, source, head, with_head, tuple(_placed(plan, name, node) for name, node in writer.makers.items()))


def _placed(plan: Plan, maker: str, node: Node) -> Placed:
    tensor = plan.annotated.facts[node].tensor
    assert tensor is not None
    return Placed(maker, tensor, node.target in PRODUCTS)


def _head(part: Part, namespace: Mapping[str, Any], plan: Plan) -> Head:
    tensors = (plan.annotated.facts[part.results[i]].tensor for i in part.staying)
    return Head(namespace[part.name], part.inputs, part.staying, sum(t.bytes for t in tensors if t is not None))
