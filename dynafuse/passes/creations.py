"""Constants that must be in memory for one reader, made again for those that compute with them.

What is made of nothing costs nothing to compute with, and a kernel that knows its value loads and checks less. A constant
that the graph returns, or that is read outside of kernels, is in memory all the same; others would then load it.

Worked example: a graph returns ``ids = full([256, 128], 0)`` and looks rows of a table up by it. The lookup gets zeros
of its own, and loads row 0 without an index.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dynafuse.fx import insert
from dynafuse.ops import Kind, lookup


def make_again(module: GraphModule) -> None:
    """Give readers that compute with a constant one of their own where others need it in memory, in place."""
    for node in list(module.graph.nodes):
        row = lookup(node.target)
        if row is None or row.kind is not Kind.CREATION or not row.fusible:
            continue
        computing = [user for user in node.users if _computes(user)]
        if computing and len(computing) < len(node.users):
            own = insert(node, node.target, node.args, node, **node.kwargs)
            for user in computing:
                user.replace_input_with(node, own)


def _computes(node: Node) -> bool:
    """Return whether a kernel may compute a node, or all that is computed of what it shows."""
    row = lookup(node.target)
    if row is None or not row.fusible:
        return False
    return row.kind is not Kind.VIEW or (bool(node.users) and all(map(_computes, node.users)))
