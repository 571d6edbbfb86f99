"""Which executors can take which nodes: asked per node, then for a group of nodes as one kernel.

The table and each executor's own rules say what it can do; nothing is tried out. Eager is not asked: a node that nobody
else takes runs eager.

Worked example: ``Executors(facts, ("nvfuser", "triton")).of(nodes)`` is ``("nvfuser", "triton")`` for a softmax over
``bfloat16`` and ``("triton",)`` once a ``flip`` is among the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from dynafuse.ir import Facts, Role
from dynafuse.lowering.registry import executor


class Executors:
    """What the enabled executors can do with the nodes of a graph. ``enabled`` is in the order of preference."""

    def __init__(self, facts: Mapping[Node, Facts], enabled: Sequence[str],
                 denied: frozenset[tuple[str, Node]] = frozenset()) -> None:
        """Take executors by name; ``denied`` are pairs of an executor and a node that it has failed on."""
        self._facts = facts
        self._denied = denied
        self.enabled = tuple(name for name in enabled if executor(name).fuses)
        self._reasons: dict[str, dict[Node, str]] = {}

    def __str__(self) -> str:
        failed = sorted(f"{name} failed on {node.name}" for name, node in self._denied)
        return "; ".join([", ".join(self.enabled), *failed])

    def of(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Return the executors that can run all of the nodes as one kernel."""
        return tuple(name for name in self.enabled if not self.reason(name, nodes))

    def reason(self, name: str, nodes: Sequence[Node]) -> str:
        """Return why an executor cannot run the nodes as one kernel, or ""."""
        refused = self._refused(name)
        if refused:
            for node in nodes:
                if node in refused:
                    return refused[node]
        return executor(name).refuses_group(nodes, self._facts)

    def _refused(self, name: str) -> Mapping[Node, str]:
        """Return the nodes that an executor cannot run, asked once."""
        if name not in self._reasons:
            computed = (node for node, facts in self._facts.items() if facts.role in (Role.FUSED, Role.VIEW))
            self._reasons[name] = {node: reason for node in computed if (reason := self._of_node(name, node))}
        return self._reasons[name]

    def _of_node(self, name: str, node: Node) -> str:
        facts = self._facts[node]
        if (name, node) in self._denied:
            return f"{name} failed on {node.name}"
        if facts.forced not in (None, name):
            return f"{node.name} is forced to {facts.forced}"
        return executor(name).refuses_node(node, self._facts)
