"""A graph as it was before a pass, to be built again if the pass fails halfway.

Worked example::

    before = Snapshot.of(module)      # a microsecond a node: operands are kept by reference
    module.graph.erase_node(...)      # and then something raises
    before.restored()                 # a new module with the graph that there was
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


@dataclass(frozen=True)
class _Copy:
    """What a node was."""

    node: Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    type: Any
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The nodes of a graph, and what it names of its module: those of graphs inside are snapshots too."""

    nodes: tuple[_Copy, ...]
    held: Mapping[str, Any]
    meta: Mapping[str, Any]
    training: bool
    codegen: Any

    @classmethod
    def of(cls, module: GraphModule) -> Snapshot:
        """A module's graph as it is now."""
        nodes = tuple(_Copy(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta)) for n in module.graph.nodes)
        names = dict.fromkeys(str(copy.target) for copy in nodes if copy.op in ("get_attr", "call_module"))
        held = {name: _held(operator.attrgetter(name)(module)) for name in names}
        return cls(nodes, held, dict(module.meta), module.training, module.graph._codegen)

    def restored(self) -> GraphModule:
        """A module of its own with that graph."""
        graph, new = Graph(), dict[Node, Node]()
        for copy in self.nodes:
            args, kwargs = map_arg((copy.args, copy.kwargs), new.__getitem__)
            node = graph.create_node(copy.op, copy.target, args, kwargs, copy.name, copy.type)
            node.meta = dict(copy.meta)
            new[copy.node] = node
        graph.set_codegen(self.codegen)
        held = {name: value.restored() if isinstance(value, Snapshot) else value for name, value in self.held.items()}
        module = GraphModule(held, graph)
        module.meta.update(self.meta)
        module.train(self.training)
        return module


def _held(value: Any) -> Any:
    return Snapshot.of(value) if isinstance(value, GraphModule) else value
