"""Which executors can take which nodes: asked per node, then for a group of nodes as one kernel.

The table and each executor's own rules say what it can do; nothing is tried out. Eager is not asked: a node that nobody
else takes runs eager.

Worked example: ``Executors(facts, ("nvfuser", "triton")).of(nodes)`` is ``("nvfuser", "triton")`` for a softmax over
``bfloat16`` and ``("triton",)`` once a ``flip`` is among the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from dynafuse.ir import Facts
from dynafuse.ops import Kind
from dynafuse.partition.forcing import ABLE

NVFUSER_MAX_OPS = 60  # its segmenter's time grows faster than the region
MOVES = (Kind.INDEX, Kind.GATHER)


class Executors:
    """What the enabled executors can do with the nodes of a graph. ``enabled`` is in the order of preference."""

    def __init__(self, facts: Mapping[Node, Facts], enabled: Sequence[str],
                 denied: frozenset[tuple[str, Node]] = frozenset()) -> None:
        """``denied`` are pairs of an executor and a node that it has failed on."""
        self._facts = facts
        self._denied = denied
        self.enabled = tuple(name for name in enabled if name != "eager")
        self._reasons: dict[str, dict[Node, str]] = {}

    def __str__(self) -> str:
        failed = sorted(f"{name} failed on {node.name}" for name, node in self._denied)
        return "; ".join([", ".join(self.enabled), *failed])

    def of(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """The executors that can run all of the nodes as one kernel."""
        return tuple(name for name in self.enabled if not self.reason(name, nodes))

    def reason(self, name: str, nodes: Sequence[Node]) -> str:
        """Why an executor cannot run the nodes as one kernel, or ""."""
        refused = self._refused(name)
        if refused:
            for node in nodes:
                if node in refused:
                    return refused[node]
        return self._together(nodes) if name == "nvfuser" else ""

    def _refused(self, name: str) -> Mapping[Node, str]:
        """The nodes that an executor cannot run, asked once."""
        if name not in self._reasons:
            computed = (node for node, facts in self._facts.items() if facts.role in ("fused", "view"))
            self._reasons[name] = {node: reason for node in computed if (reason := self._of_node(name, node))}
        return self._reasons[name]

    def _of_node(self, name: str, node: Node) -> str:
        facts = self._facts[node]
        if (name, node) in self._denied:
            return f"{name} failed on {node.name}"
        if facts.forced not in (None, name):
            return f"{node.name} is forced to {facts.forced}"
        return ABLE[name](node, self._facts)

    def _together(self, nodes: Sequence[Node]) -> str:
        """What nvFuser would cut into several kernels, each a launch that costs it more than any other executor."""
        if len(nodes) > NVFUSER_MAX_OPS:
            return f"{len(nodes)} ops, nvFuser takes {NVFUSER_MAX_OPS}"
        kinds = {row.kind for node in nodes if (row := self._facts[node].row) is not None}
        moves = any(kind in kinds for kind in MOVES) or any(map(self._narrows, nodes))
        if moves and Kind.REDUCTION in kinds:
            return "nvFuser has no kernel that both moves and reduces"
        return "nvFuser has no kernel that both moves and transposes" if moves and any(map(self._permutes, nodes)) else ""

    def _narrows(self, node: Node) -> bool:
        """Whether a view takes a part of what it looks at."""
        facts = self._facts[node]
        if facts.role != "view" or facts.tensor is None:
            return False
        source = self._facts[node.all_input_nodes[0]].tensor
        return source is not None and facts.tensor.hint < source.hint and 0 not in facts.tensor.stride

    def _permutes(self, node: Node) -> bool:
        """Whether a view has the elements of what it looks at in another order of dimensions."""
        facts = self._facts[node]
        if facts.role != "view" or facts.tensor is None:
            return False
        source = self._facts[node.all_input_nodes[0]].tensor
        strides = [s for size, s in zip(facts.tensor.shape, facts.tensor.stride, strict=True) if size != 1]
        return source is not None and len(strides) > 1 and all(isinstance(s, int) for s in strides) and strides != sorted(
            strides, key=int, reverse=True)
