"""Snapshots of graphs before a pass, to be restored if the pass fails halfway.

Worked example::

    before = Snapshot.of(module)      # a microsecond a node: operands are kept by reference
    module.graph.erase_node(...)      # then the pass fails
    before.restored()                 # a new module with the old graph
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


@dataclass(frozen=True)
class _NodeCopy:
    """The fields of a node."""

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
    """The nodes of a graph, and the attributes of its module that it names; nested graphs are snapshots too."""

    nodes: tuple[_NodeCopy, ...]
    attributes: Mapping[str, Any]
    meta: Mapping[str, Any]
    training: bool
    codegen: Any

    @classmethod
    def of(cls, module: GraphModule) -> Snapshot:
        """Take a snapshot of a module's graph."""
        nodes = tuple(_NodeCopy(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, dict(n.meta))
                      for n in module.graph.nodes)
        names = dict.fromkeys(str(copy.target) for copy in nodes if copy.op in ("get_attr", "call_module"))
        attributes = {name: _attribute(operator.attrgetter(name)(module)) for name in names}
        return cls(nodes, attributes, dict(module.meta), module.training, module.graph._codegen)

    def restored(self) -> GraphModule:
        """Return a new module with the graph."""
        graph, new = Graph(), dict[Node, Node]()
        for copy in self.nodes:
            args, kwargs = map_arg((copy.args, copy.kwargs), new.__getitem__)
            node = graph.create_node(copy.op, copy.target, args, kwargs, copy.name, copy.type)
            node.meta = dict(copy.meta)
            new[copy.node] = node
        graph.set_codegen(self.codegen)
        attributes = {name: value.restored() if isinstance(value, Snapshot) else value
                      for name, value in self.attributes.items()}
        module = GraphModule(attributes, graph)
        module.meta.update(self.meta)
        module.train(self.training)
        return module


def _attribute(value: Any) -> Any:
    return Snapshot.of(value) if isinstance(value, GraphModule) else value
