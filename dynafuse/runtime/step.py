"""A region as it runs in the function of its graph: its kernel, and what that is given there.

Worked example: of two layers of one model the steps have the same kernel, and each its own inputs and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.ir import Region, Size
from dynafuse.lowering.triton.launch import Places


@dataclass(frozen=True)
class Step:
    """A region as it runs: its kernel, and the kernel's arguments in this graph."""

    region: Region
    kernel: Any  # one with launches, or any lowering.base.Kernel
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    symbols: tuple[Size, ...]  # what the kernel's symbols are, over those of the graph
    hoisted: tuple[float, ...] = ()  # values of the kernel's hoisted scalars
    count: int | None = None  # terms of the kernel's fold, if the kernel asks
    places: Places = field(default_factory=dict)

    @staticmethod
    def of(region: CanonicalRegion, kernel: Any, places: Places) -> Step:
        """Return a region as it runs on its kernel.

        Args:
            region: The region in canonical form.
            kernel: Its kernel.
            places: The user's lines that index by loaded values, by op.
        """
        symbols = (*region.symbols, *region.sizes)
        return Step(region.region, kernel, region.arguments, region.outputs, symbols, region.hoisted, region.count, places)
