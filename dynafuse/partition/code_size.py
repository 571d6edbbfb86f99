"""How much a kernel computes in its code: every node as often as there are different offsets at which it is read.

What is read at another offset is computed there anew, and so is all that it is computed from. Of values that each read two
neighbours of the one before, as differences of slices do, the code grows with every step, and a compiler takes minutes. So
it does where each of many columns is computed from the one before: a kernel that puts them side by side computes each one
under a condition of its own, with all that precede it.

An op that reads a window counts once for each element of it.

Worked example: in ``d = x[1:] - x[:-1]`` a fused ``x`` is computed at offsets 0 and 1, and in ``d[1:] - d[:-1]`` at 0, 1
and 2: three times.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import sympy
import torch
from torch.fx import Node

from dynafuse.fx import UNKNOWN_SIZE, hint
from dynafuse.ir import Role, Size
from dynafuse.ops import Index
from dynafuse.ops.indexing_math import IndexSymbol
from dynafuse.partition.iteration_space import Spaces

MOST_EXPRESSIONS = 400  # of a kernel; of code several times as long Triton takes ten seconds
ONCE: Mapping[Node, int] = {}
FEW_MOVES = 6  # nodes that read elsewhere, of which no code becomes that large
FEW_READS = 64  # if, one reading the other, they make an element of no more elements than this


class CodeSize:
    """Counts what kernels compute in their code: at which offsets nodes read operands, and at how many the most read one."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self._offsets = {node: offsets for node in spaces.graph.nodes if any((offsets := self._offsets_of(node)).values())}
        self._reads = {node: max(map(len, offsets.values())) for node, offsets in self._offsets.items()}

    def times(self, nodes: Iterable[Node], closure: Sequence[Node]) -> Mapping[Node, int] | None:
        """Return how often the code of a kernel computes each node; nothing of those that move little; None if too often.

        Args:
            nodes: What is computed along the kernel's axes.
            closure: All that it computes, operands first.
        """
        if sum(node in self._offsets for node in closure) <= FEW_MOVES and self._most_reads(closure) <= FEW_READS:
            return ONCE
        at: dict[Node, set[int]] = {node: set() for node in closure} | {node: {0} for node in nodes}
        total = 0
        for node in reversed(closure):
            total += len(at[node]) * self._reads.get(node, 1)
            if total > MOST_EXPRESSIONS:
                return None
            for argument in node.all_input_nodes:
                if argument in at:
                    at[argument] |= self._read_at(node, argument, at[node])
        return {node: len(offsets) for node, offsets in at.items()}

    def _most_reads(self, closure: Sequence[Node]) -> int:
        """Return how many elements an element is made of at most, by way of nodes of which one reads the other."""
        most: dict[Node, int] = {}
        for node in closure:
            operands = [most[argument] for argument in node.all_input_nodes if argument in most]
            most[node] = self._reads.get(node, 1) * max(operands, default=1)
        return max(most.values(), default=1)

    def _read_at(self, node: Node, argument: Node, at: Collection[int]) -> set[int]:
        """Return at which offsets a node that is computed at some reads an operand: a mixed part at one of its own."""
        operand = self.spaces.operands[node].get(argument)
        if operand is not None and operand.is_mixed:
            return {_own(node)}
        offsets = self._offsets.get(node, {}).get(argument, (0,))
        return {here + offset for here in at for offset in offsets}

    def _offsets_of(self, node: Node) -> Mapping[Node, tuple[int, ...]]:
        """Return at which offsets a node reads operands that it moves, in elements; of loaded ones a number of its own."""
        spaces = self.spaces
        if spaces.facts[node].role is Role.VIEW:
            source, *_ = node.all_input_nodes
            return {source: (_offset(node) - _offset(source),)}
        offsets = {}
        for argument, reading in (spaces.moves(node) or {}).items():
            strides = _strides(spaces.tensor(argument).shape)
            starts = {_start(index, strides) for index in reading.indices}
            told = tuple(start for start in starts if start is not None)
            offsets[argument] = told if reading.told and len(told) == len(starts) else (_own(node),)
        return offsets


def _own(node: Node) -> int:
    """Return an offset that no other node has."""
    return zlib.crc32(node.name.encode()) << 40


def _start(index: Index, strides: Sequence[int]) -> int | None:
    """Return the offset at the first element of a result, with an example of dynamic sizes; None if that has no number."""
    symbols = frozenset[sympy.Symbol]().union(*(part.free_symbols for part in index))
    first = {symbol: sympy.Integer(0 if isinstance(symbol, IndexSymbol) else UNKNOWN_SIZE) for symbol in symbols}
    try:
        return sum(int(part.xreplace(first)) * stride for part, stride in zip(index, strides, strict=True))
    except (ZeroDivisionError, AssertionError, TypeError):  # torch's Mod of a negative number, and the like
        return None


def _offset(node: Node) -> int:
    value = node.meta["val"]
    return hint(value.storage_offset()) if isinstance(value, torch.Tensor) and value.layout is torch.strided else 0


def _strides(shape: Sequence[Size]) -> list[int]:
    """Return strides of a contiguous tensor of some sizes; a size that is a symbol counts as much as any."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size if isinstance(size, int) else 1 << 10
    return strides[::-1]
