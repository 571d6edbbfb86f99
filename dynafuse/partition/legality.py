"""What one kernel can compute: the classes of iteration space, and why a set of nodes fits none.

- ``pointwise``: no reduction; every output runs along all axes.
- ``row``: every reduction closes over the same axes R; outputs run along all axes or along all but R.
- ``rowcol``: some reductions close over R, others over all axes but R (a norm's backward: dx and dgamma in one read).

Worked example: softmax over the last of two axes is ``row`` with R = {last}; adding a column sum of its output to the
same kernel would need that sum before it is complete, so the refusal ``used before it is complete`` comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from torch.fx import Node

from dynafuse.ir import Refusal, RefusalKind, Role
from dynafuse.partition.axes import Axis, leaves
from dynafuse.partition.iteration_space import Spaces
from dynafuse.partition.kernel_class import estimate


@dataclass(frozen=True)
class Shape:
    """The iteration space of a region: its axes, those that are reduced, and those of column reductions."""

    kind: str  # pointwise | row | rowcol
    axes: tuple[Axis, ...]
    reduced: frozenset[Axis]
    columns: frozenset[Axis] = frozenset()

    @property
    def rows(self) -> int:
        """Return how many independent rows there are, for the choice of a class."""
        return product(a for a in self.axes if a not in self.reduced)

    @property
    def length(self) -> int:
        """Return how many elements a row has, for the choice of a class."""
        return product(self.reduced)


def product(axes: Iterable[Axis]) -> int:
    """Return the number of points of some axes, as schedules count them: of a dynamic axis by its stand-in."""
    return math.prod(estimate(axis.size) for axis in axes)


@dataclass(frozen=True)
class Member:
    """A node of a candidate region with its axes resolved."""

    node: Node
    axes: tuple[Axis, ...]
    reduced: frozenset[Axis]  # of a reduction or a scan
    stored: bool
    scanned: tuple[Axis, ...] = ()  # of a scan the same, outermost first

    @property
    def out(self) -> frozenset[Axis]:
        """Return the axes that its output runs along."""
        return frozenset(self.axes) - (frozenset() if self.scanned else self.reduced)


def members_of(spaces: Spaces, nodes: Sequence[Node], inlined: frozenset[Node], outputs: frozenset[Node]) -> list[Member]:
    """Return the nodes that run along axes of the region; inlined ones are computed at other indices and have none.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        nodes: The region's nodes, operands first.
        inlined: Those among them that are inlined.
        outputs: Those that are stored.
    """
    members = []
    for node in nodes:
        if node not in inlined:
            axes = tuple(leaves(chain.from_iterable(spaces.dims[node])))
            row = leaves(chain.from_iterable(spaces.reduced_axes(node))) if spaces.takes_rows(node) else ()
            scanned = tuple(row) if spaces.is_scan(node) else ()
            members.append(Member(node, axes, frozenset(row), node in outputs, scanned))
    return members


def classify(spaces: Spaces, members: Sequence[Member]) -> Shape | Refusal:
    """Return the iteration space that all members fit, or why there is none.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        members: The members of the region, with their axes resolved.
    """
    for member in members:
        if len(set(member.axes)) != len(member.axes):
            return _refuse(RefusalKind.REPEATED_AXIS, member, members[0])
    scans = list({member.scanned: member for member in members if member.scanned}.values())
    if len(scans) > 1:
        return _refuse(RefusalKind.SCANNED_APART, scans[0], scans[1])
    full = tuple(dict.fromkeys(axis for m in sorted(members, key=lambda m: -len(m.axes)) for axis in m.axes))
    sets = list(dict.fromkeys(m.reduced for m in members if m.reduced))
    if not sets:
        return _pointwise(members, full)
    if len(sets) == 1:
        return _row(members, full, sets[0])
    if len(sets) == 2:
        return _rowcol(spaces, members, full, sets)
    return Refusal(RefusalKind.DIFFERENT_REDUCTIONS, members[0].node.name, members[-1].node.name, f"{len(sets)} sets")


def _refuse(kind: RefusalKind, first: Member, second: Member, detail: str = "") -> Refusal:
    return Refusal(kind, first.node.name, second.node.name, detail)


def _pointwise(members: Sequence[Member], full: tuple[Axis, ...]) -> Shape | Refusal:
    for member in members:
        if member.stored and len(member.axes) != len(full):
            return _refuse(RefusalKind.SIZES_DIFFER, member, members[-1], f"{product(member.axes)} against {product(full)}")
    return Shape("pointwise", full, frozenset())


def _row(members: Sequence[Member], full: tuple[Axis, ...], reduced: frozenset[Axis]) -> Shape | Refusal:
    everything = frozenset(full)
    for member in members:
        if member.reduced and len(member.axes) != len(full):
            return _refuse(RefusalKind.FEWER_ROWS, member, members[-1])
        if member.stored and member.out not in (everything, everything - reduced):
            return _refuse(RefusalKind.SIZES_DIFFER, member, members[-1], f"{product(member.out)} against {product(full)}")
    return Shape("row", full, reduced)


def _rowcol(
    spaces: Spaces, members: Sequence[Member], full: tuple[Axis, ...], sets: list[frozenset[Axis]]
) -> Shape | Refusal:
    everything = frozenset(full)
    first, second = sets
    if first & second or first | second != everything:
        return Refusal(RefusalKind.DIFFERENT_REDUCTIONS, members[0].node.name, members[-1].node.name)
    row, column = (first, second) if innermost(spaces, members, first) else (second, first)
    if not innermost(spaces, members, row):
        return Refusal(RefusalKind.NOT_CONTIGUOUS, members[0].node.name, members[-1].node.name)
    if not all(isinstance(axis.size, int) for axis in row):
        return Refusal(RefusalKind.UNKNOWN_LENGTH, members[0].node.name, members[-1].node.name)
    scan = next((m for m in members if m.scanned and m.reduced == column), None)
    if scan is not None:
        return _refuse(RefusalKind.SCANNED_ACROSS, scan, members[-1])
    early = _used_early(spaces, members, column, row)
    if early:
        return Refusal(RefusalKind.INCOMPLETE, early[0].name, early[1].name)
    for member in members:
        table_row = spaces.facts[member.node].row
        if member.reduced == column and table_row is not None and table_row.states > 1:
            return _refuse(RefusalKind.SEVERAL_STATES, member, members[-1])
        if member.reduced and len(member.axes) != len(full):
            return _refuse(RefusalKind.FEWER_ROWS, member, members[-1])
        if member.stored and member.out not in (everything, everything - row, everything - column):
            return _refuse(RefusalKind.SIZES_DIFFER, member, members[-1])
    return Shape("rowcol", full, row, column)


def innermost(spaces: Spaces, members: Sequence[Member], axes: frozenset[Axis]) -> bool:
    """Return whether what the reductions read is contiguous along one of some axes.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        members: The region's members, in order; the first reduction whose operand has a stride of 1 decides.
        axes: The axes that are asked about.
    """
    for member in members:
        if member.reduced:
            operand = spaces.tensor(member.node.all_input_nodes[0])
            dims = spaces.dims[member.node]
            for dim, stride in zip(dims, operand.stride, strict=True):
                if stride == 1 and dim:
                    return leaves(dim)[-1] in axes
    return False


def _used_early(
    spaces: Spaces, members: Sequence[Member], column: frozenset[Axis], row: frozenset[Axis]
) -> tuple[Node, Node] | None:
    """Return a column reduction whose result feeds a node that runs along rows or another reduction, with that node."""
    late = [m.node for m in members if m.reduced == column]
    after_it = after(spaces, members, frozenset(late))
    early = next((m.node for m in members if m.node in after_it and (m.reduced or not m.out <= row)), None)
    return None if early is None else (late[0], early)


def after(spaces: Spaces, members: Sequence[Member], reductions: frozenset[Node]) -> set[Node]:
    """Return the members that need a result of some reductions, directly or through views, cheap nodes and other members.

    Args:
        spaces: The iteration spaces of the graph's nodes.
        members: The region's members, operands first.
        reductions: The reductions.
    """
    reached: set[Node] = set()
    for member in members:
        if any(_reaches(spaces, argument, reached | reductions) for argument in member.node.all_input_nodes):
            reached.add(member.node)
    return reached


def _reaches(spaces: Spaces, node: Node, targets: set[Node] | frozenset[Node]) -> bool:
    if node in targets:
        return True
    looked_through = spaces.facts[node].role is Role.VIEW or node in spaces.cheap
    return looked_through and any(_reaches(spaces, argument, targets) for argument in node.all_input_nodes)


def computes_anywhere(spaces: Spaces, nodes: Iterable[Node]) -> Node | None:
    """Return a node that cannot be computed at any index: a reduction, a scan, a scatter, an overwriting copy; else None."""
    for node in nodes:
        if spaces.takes_rows(node) or spaces.is_scatter(node) or node.target is spaces.copies_into:
            return node
    return None
