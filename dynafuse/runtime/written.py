"""The function of a graph, compiled from the text that ``wrapper.py`` writes, and that of its first steps.

Worked example: of a decoder whose last product is to be launched and all before it replayed, ``written.head.call`` runs all
but that product, and ``written.with_head(replay)`` is the whole function with ``replay`` in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from dynafuse.ir import Plan
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
class Written:
    """The function of a graph, with its text, and that of its first steps if that is one of its own."""

    call: Call
    source: str
    head: Head | None
    with_head: Callable[[Call], Call]
    """Returns the function with another one in the place of its first steps."""


def write(plan: Plan, module: GraphModule, steps: Mapping[str, Step], static: frozenset[int],
          over: Mapping[Node, Node], sharing: Sharing, apart: int = 0) -> Written:
    """Write the function that runs a plan, and compile it.

    Args:
        plan: The plan.
        module: The module of its graph, which has the constants.
        steps: The plan's regions with their kernels, by name.
        static: Positions of inputs whose addresses do not change from call to call.
        over: The results that kernels write over an operand, each with that operand.
        sharing: Makes results that share memory with others.
        apart: How many of the first steps are to be a function of their own, if they can be.
    """
    writer = Writer(plan, module, steps, static, over, sharing, apart)
    source, namespace = writer.write()
    exec(compile(source, "<dynafuse graph>", "exec"), namespace)
    call = namespace["call"]
    call._boxed_call, call.source = True, source

    def with_head(head: Call) -> Call:
        assert writer.head is not None
        namespace[writer.head.name] = head
        return call  # type: ignore[no-any-return]

    return Written(call, source, None if writer.head is None else _head(writer.head, namespace, plan), with_head)


def _head(part: Part, namespace: Mapping[str, Any], plan: Plan) -> Head:
    tensors = (plan.annotated.facts[part.results[i]].tensor for i in part.staying)
    return Head(namespace[part.name], part.inputs, part.staying, sum(t.bytes for t in tensors if t is not None))
