"""The units of a graph that is planned: what is the same however regions grow from them.

Worked example: in ``relu(x @ a) @ b`` ``relu`` is the only unit; it reads the first product, and the second one reads it,
outside all regions, so that whatever kernel computes it stores it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import calls_prediction
from dynafuse.ir import Annotated, Refusal, Role
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.partition.executors import Executors
from dynafuse.partition.group import Group
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.kernels import Kernel, Kernels
from dynafuse.partition.order import Dependencies
from dynafuse.partition.releases import Release, Releases


class Units:
    """A graph's units on a device, with what each reads, and who reads each.

    Attributes:
        max_ops: The most nodes of a region.
        joins: Whether regions that have nothing in common may share a launch.
        reads: What each unit reads, and where.
        readers: Per tensor in memory or to be the units, eager nodes and outputs that read it.
        dependencies: Which units run after which.
        releases: What lets go of which memory.
        alone: The kernel of each unit that has one.
        unplaced: Why the others have none.
        calls: What the graph's calls cost.
    """

    def __init__(self, annotated: Annotated, device: Device, executors: Executors, *,
                 recompute: bool = True, max_ops: int = 200, joins: bool = True) -> None:
        self.device = device
        self.max_ops = max_ops
        self.joins = joins
        self.spaces = Spaces(annotated, recompute)
        self.reads = {unit: self.spaces.reads(unit) for unit in self.spaces.dims}
        self.readers = self._readers()
        self.dependencies = Dependencies(self.spaces)
        self.releases = Releases(self.spaces, self.dependencies.after)
        self.kernels = Kernels(self.spaces, self.dependencies, device, executors, self.outputs)
        alone = {unit: self.kernels.of([unit], reads, frozenset()) for unit, reads in self.reads.items()}
        self.alone = {unit: kernel for unit, kernel in alone.items() if isinstance(kernel, Kernel)}
        self.unplaced = {unit: f"{why.kind} ({why.detail})" for unit, why in alone.items() if isinstance(why, Refusal)}
        self.calls = calls_prediction(annotated.facts, device)
        self._apart = self.spaces.unifier.mark()

    def apart(self) -> dict[Node, Group]:
        """Return a group for each unit, none of whose axes is another one's any more."""
        self.spaces.unifier.undo(self._apart)
        return {unit: Group([unit], reads) for unit, reads in self.reads.items()}

    def outputs(self, nodes: Sequence[Node]) -> frozenset[Node]:
        """Return those of some nodes that a kernel that computes them all stores."""
        inside = set(nodes)
        return frozenset(n for n in nodes if not inside.issuperset(self.readers.get(n, ())) or n.target is COPIES_INTO
                         or self.spaces.is_scatter(n))

    def release(self, nodes: Sequence[Node]) -> Release:
        """Return what a kernel that computes some units lets go of, by their places in the graph."""
        sources = {read.source for node in nodes for read in self.reads[node]}
        return self.releases.of(nodes, sources, self.outputs(nodes), self.dependencies.position)

    def _readers(self) -> dict[Node, set[Node]]:
        readers: dict[Node, set[Node]] = {}
        for unit, reads in self.reads.items():
            for read in reads:
                readers.setdefault(read.source, set()).add(unit)
        for node in self.spaces.needed:
            outside = [u for u in node.users if self.spaces.facts[u].role in (Role.EAGER, Role.OUTPUT, Role.HOST)]
            readers.setdefault(self.spaces.annotated.base(node), set()).update(outside)
            if node.target is COPIES_INTO:
                readers.setdefault(node, set()).add(node.graph.output_node())
        return readers
