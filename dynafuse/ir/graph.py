"""An FX graph with what is known of each of its nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from dynafuse.fx import Size, looked_at, shares_memory
from dynafuse.ops.table import Call, Kind, Row, is_library

if TYPE_CHECKING:  # it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

Dims: TypeAlias = tuple[tuple[int, ...], ...]
"""A tensor's dimensions in a region's axes: per dimension the axes that it runs over, outermost first."""


ALIGNED = 16
"""Bytes of which the address of all that is allocated is a multiple; lanes move no more at once."""


@dataclass(frozen=True)
class Tensor:
    """Sizes, strides (in elements), dtype and device of a strided tensor; ``hint`` is its number of elements for costs."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    hint: int

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements, each counted once (a stride of zero repeats an element without moving it)."""
        return self.hint * self.dtype.itemsize

    @property
    def innermost(self) -> int | None:
        """Return the dimension along which neighbours are next to each other in memory; None if there is none."""
        sizes = zip(self.shape, self.stride, strict=True)
        return next((dim for dim, (size, stride) in enumerate(sizes) if stride == 1 and size != 1), None)

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]}[{', '.join(map(str, self.shape))}]"


class Role(str, Enum):
    """What a node of a graph is to the planner."""

    INPUT = "input"  # a tensor that is there before the graph runs
    HOST = "host"  # a number that Python computes
    VIEW = "view"  # launches nothing: an index rewrite in the kernels that read it
    FUSED = "fused"  # belongs into a region
    EAGER = "eager"  # a call of its own, with the reason in the facts
    OUTPUT = "output"

    def __str__(self) -> str:
        return self.value


class Accuracy(Enum):
    """How exactly a kernel computes an op."""

    QUICK = "quick"  # its result only becomes 16-bit floats, so that float32 need not be exact to the last bits
    USUAL = ""  # float32 is exact, and 16-bit floats are held in it
    ROUNDED = "rounded"  # its result, of 16-bit floats, is rounded, as in eager

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Facts:
    """What is known of one node. ``tensor`` is None for scalars and for ops with several outputs."""

    role: Role
    tensor: Tensor | None
    row: Row | None = None
    call: Call | None = None
    reason: str = ""  # why a node that computes runs eager
    forced: str | None = None  # the executor that the user's code or options hold it to
    accuracy: Accuracy = Accuracy.USUAL
    fallback: str = ""  # which executor it was forced to without `strict`, and why that one does not run it
    alignment: int = ALIGNED  # bytes that the address of an input was a multiple of when the graph was seen

    @property
    def scatters_into(self) -> Node | None:
        """Return the node whose memory a fused scatter writes into; None for any other node."""
        if self.role is not Role.FUSED or self.row is None or self.call is None or self.row.kind is not Kind.SCATTER:
            return None
        assert self.row.scatter is not None
        base: Node = self.call.args[self.row.scatter.base]
        return base

    @property
    def is_fused(self) -> bool:
        """Return whether the node belongs into a region."""
        return self.role is Role.FUSED

    def __str__(self) -> str:
        forced = f"forced to {self.forced}" if self.forced else ""
        said = "; ".join(filter(None, (self.reason, forced, self.fallback)))
        return f"{self.role!s:6s} {self.tensor or ''} {said}".rstrip()


def is_piece(node: Node) -> bool:
    """Return whether a node is one of several results of a call that returns new memory for each."""
    return node.target is operator.getitem and returns_new(node.all_input_nodes[0])


def returns_new(node: Node) -> bool:
    """Return whether a node calls one of ATen's library ops: they return new memory, and are done with their operands."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == "aten" and is_library(target) and not (
        target._schema.is_mutable or any(returned.alias_info for returned in target._schema.returns))


@dataclass(frozen=True)
class Annotated:
    """An FX graph with facts about each of its nodes."""

    graph: Graph
    facts: Mapping[Node, Facts]
    environment: ShapeEnv | None = field(default=None, compare=False)  # what torch knows of the sizes, if some are dynamic

    def turns(self, node: Node) -> bool:
        """Return whether a pointwise op's neighbours in memory are no neighbours in an operand's: it transposes that."""
        facts = self.facts[node]
        if facts.row is None or facts.row.kind is not Kind.POINTWISE or facts.tensor is None:
            return False
        shape, operands = facts.tensor.shape, (self.facts[argument].tensor for argument in node.all_input_nodes)
        innermost = {operand.innermost for operand in operands if operand is not None and operand.shape == shape}
        return not innermost <= {None, facts.tensor.innermost}

    def is_view(self, node: Node) -> bool:
        """Return whether a node launches nothing: kernels that read it rewrite the index."""
        return self.facts[node].role is Role.VIEW

    def base(self, node: Node) -> Node:
        """Return the node that a value is read from: through the views of the plan, not those that eager calls make.

        What a kernel loads, and what a view is made from before an eager call takes it.
        """
        return looked_at(node, self.is_view)

    def memory(self, node: Node) -> Node:
        """Return the node whose memory a value may be in: through every view, also those that eager calls make.

        Two values with one memory may not be reordered around what writes to it. Of several results of a library's call
        each is in memory of its own.
        """
        return looked_at(node, self._shares_memory)

    def _shares_memory(self, node: Node) -> bool:
        return self.is_view(node) or (self.facts[node].role is Role.EAGER and shares_memory(node) and not is_piece(node))

    def __str__(self) -> str:
        return "\n".join(f"{node.name:24s} {facts}" for node, facts in self.facts.items())


@dataclass(frozen=True)
class Axis:
    """One axis of a region's iteration space: its size, and whether a reduction of the region closes over it.

    Where sizes are only those of example inputs, ``is_known`` is false.
    """

    size: Size
    reduced: bool = False
    is_known: bool = True
