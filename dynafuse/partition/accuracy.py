"""How exactly kernels compute: where the last bits of float32 do not matter, and where 16-bit floats are rounded.

Kernels compute in float32 what eager computes of 16-bit floats. A division that is off by two units in the last place of
float32 is rounded to the same 16-bit float nearly always, and takes half of the instructions; kernels of few bytes for
each element, such as activations in bfloat16, are bound by these.

Nothing that decides may differ between two kernels that both compute a value, or between a forward and its backward, which
computes it again: what is compared, stepped at, turned into an integer, or whose largest is taken, is exact. Of two tensors
that are compared with each other, or an extreme that leaves the graph, all is rounded that they are computed from, and not
held in float32: of a gradient's ``x == x.amax()`` one kernel may load, as it was stored, what the other one has computed.
So this is asked of the whole graph, and not of a kernel.

Worked example: of ``(x.float().exp() / 3).bfloat16()`` the exponential is quick; of ``(x.float().exp() > 3).bfloat16()`` it
is not, nor where the graph returns it in float32. Of ``(x * y + 1).amax()`` in bfloat16 the product and the sum are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from dynafuse.fx import is_returned
from dynafuse.ir import Accuracy, Facts, Role
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


EXTREMES = frozenset({"max", "min"})
"""Reductions whose result is one of their operands' elements."""


def accuracies(graph: Graph, facts: Mapping[Node, Facts]) -> dict[Node, Accuracy]:
    """Return how exactly to compute the nodes that are not computed as usual."""
    quick, rounded = _ending_narrow(graph, facts), _compared(graph, facts)
    return dict.fromkeys(quick, Accuracy.QUICK) | dict.fromkeys(rounded, Accuracy.ROUNDED)


def _compared(graph: Graph, facts: Mapping[Node, Facts]) -> list[Node]:
    """Return the nodes of 16-bit floats that compared tensors, and extremes that leave the graph, are computed from."""
    compared: set[Node] = set()
    for node in reversed(graph.nodes):
        if facts[node].role in (Role.VIEW, Role.FUSED) and (node in compared or _compares(node, facts)):
            compared.update(node.all_input_nodes)
    return [node for node in compared if facts[node].is_fused and _dtype(facts[node]) in NARROW]


def _compares(node: Node, facts: Mapping[Node, Facts]) -> bool:
    """Return whether a node compares floats of two tensors, or is an extreme that may be compared with its operand."""
    row, dtype = facts[node].row, _dtype(facts[node])
    if row is None or dtype is None:
        return False
    if row.reduction in EXTREMES:
        return is_returned(node)
    floats = [a for a in node.all_input_nodes if (read := _dtype(facts[a])) is not None and read.is_floating_point]
    return row.kind is Kind.POINTWISE and not dtype.is_floating_point and len(floats) > 1


def _dtype(facts: Facts) -> torch.dtype | None:
    return facts.tensor.dtype if facts.tensor is not None else None


def _ending_narrow(graph: Graph, facts: Mapping[Node, Facts]) -> frozenset[Node]:
    """Return the nodes with quicker functions whose results only become 16-bit floats, and decide nothing on the way."""
    narrow: dict[Node, bool] = {}
    decides: dict[Node, bool] = {}
    for node in reversed(graph.nodes):
        tensor = facts[node].tensor
        if tensor is None or not tensor.dtype.is_floating_point:
            narrow[node], decides[node] = False, True
            continue
        computing = [user for user in node.users if user.op != "output" and facts[user].role in (Role.VIEW, Role.FUSED)]
        if tensor.dtype in NARROW:  # which float32 takes in as it is held, no worse than its own last bits, but not float64
            narrow[node] = all(_dtype(facts[user]) in COMPUTED_IN_FLOAT32 or _rounds(facts[user]) for user in computing)
        else:
            narrow[node] = len(computing) == len(node.users) > 0 and all(map(narrow.get, computing))
        decides[node] = any(_decides(node, user, facts[user]) or decides[user] for user in computing)
    return frozenset(node for node in graph.nodes
                     if narrow[node] and not decides[node] and _has_quicker_functions(facts[node]))


def _rounds(facts: Facts) -> bool:
    """Return whether a call is a cast that rounds its operand, as one that the user has written."""
    return facts.row is not None and facts.row.rounds


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
    if row.kind.needs_rows:
        return row.reduction not in ADDING
    if row.kind is Kind.POINTWISE:
        at = {position for position, value in enumerate(call.args.values()) if value is node}
        return not at.isdisjoint((*row.steps, *row.raw))
    return row.kind not in MOVING or user.target in CHOOSING
