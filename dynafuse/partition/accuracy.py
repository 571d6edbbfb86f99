"""Where the last bits of float32 do not matter: what only becomes 16-bit floats.

Kernels compute in float32 what eager computes of 16-bit floats. A division that is off by two units in the last place of
float32 is rounded to the same 16-bit float nearly always, and takes half of the instructions; kernels of few bytes for
each element, such as activations in bfloat16, are bound by these.

Nothing that decides may differ between two kernels that both compute a value, or between a forward and its backward, which
computes it again: what is compared, stepped at, turned into an integer, or whose largest is taken, is exact. So this is
asked of the whole graph, and not of a kernel.

Worked example: of ``(x.float().exp() / 3).bfloat16()`` the exponential is quick; of ``(x.float().exp() > 3).bfloat16()`` it
is not, nor where the graph returns it in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from dynafuse.ir import Facts, Role
from dynafuse.ops import Kind
from dynafuse.ops.overloads import overloads

NARROW = frozenset({torch.float16, torch.bfloat16})
COMPUTED_IN_FLOAT32 = NARROW | {torch.float32}
MOVING = frozenset({Kind.VIEW, Kind.INDEX, Kind.GATHER, Kind.SCATTER})
"""Kinds of ops whose results are elements of operands, or sums of some."""

CHOOSING = frozenset(overloads("aten.max_pool2d.default aten.max_pool3d.default"))
"""Ops of these kinds that compare elements."""

ADDING = frozenset({"sum", "mean", "cumsum"})
"""Reductions and scans that choose no element."""


def ends_narrow(graph: Graph, facts: Mapping[Node, Facts]) -> frozenset[Node]:
    """Return the nodes with quicker functions whose results only become 16-bit floats, and decide nothing on the way."""
    narrow: dict[Node, bool] = {}
    decides: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        tensor = facts[node].tensor
        if tensor is None or not tensor.dtype.is_floating_point:
            narrow[node], decides[node] = False, True
            continue
        computing = [user for user in node.users if user.op != "output" and facts[user].role in (Role.VIEW, Role.FUSED)]
        narrow[node] = tensor.dtype in NARROW or (len(computing) == len(node.users) > 0 and all(map(narrow.get, computing)))
        decides[node] = any(_decides(node, user, facts[user]) or decides[user] for user in computing)
    return frozenset(node for node in graph.nodes
                     if narrow[node] and not decides[node] and _has_quicker_functions(facts[node]))


def _has_quicker_functions(facts: Facts) -> bool:
    """Return whether a call is of functions that have quicker forms: not a division by a number, which is a product."""
    row, call, tensor = facts.row, facts.call, facts.tensor
    if facts.role is not Role.FUSED or row is None or call is None or tensor is None or not row.smooth:
        return False
    return tensor.dtype in COMPUTED_IN_FLOAT32 and not any(isinstance(value, int | float) for value in call.args.values())


def _decides(node: Node, user: Node, use: Facts) -> bool:
    """Return whether a user does anything but compute, or move, what becomes of a node's value."""
    row, call = use.row, use.call
    if use.role is Role.VIEW:
        return False
    if row is None or call is None:
        return True
    if row.kind in (Kind.REDUCTION, Kind.SCAN):
        return row.reduction not in ADDING
    if row.kind is Kind.POINTWISE:
        at = {position for position, value in enumerate(call.args.values()) if value is node}
        return not at.isdisjoint((*row.steps, *row.raw))
    return row.kind not in MOVING or user.target in CHOOSING
