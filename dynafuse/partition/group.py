"""A region while it grows.

Worked example: ``relu`` of ``x`` is a group of one node that reads ``x``; merged with its reader it has two nodes, the reads
of both, and the pair along which they were merged.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from dynafuse.cost.model import NOTHING, Prediction
from dynafuse.partition.iteration_space import Read
from dynafuse.partition.kernels import Kernel
from dynafuse.partition.pricing import Priced


@dataclass(eq=False)
class Group:
    """A region while it grows."""

    nodes: list[Node]
    reads: list[Read]
    inlined: frozenset[Node] = frozenset()
    merges: list[tuple[str, str]] = field(default_factory=list)
    priced: Priced | None = None

    @property
    def prediction(self) -> Prediction:
        """Return what the region costs; nothing yet if it has no price."""
        return self.priced.prediction if self.priced else NOTHING

    @property
    def kernel(self) -> Kernel:
        """Return what the region's kernel does and costs, once it has a price."""
        assert self.priced is not None
        return self.priced.kernel
