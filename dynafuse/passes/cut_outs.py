"""Reads of what was put together, as reads of what was put there; scatters over what nobody reads, without it.

Where a model writes into parts of a tensor, as recurrences do, each write arrives as a scatter into a copy of all of it, and
what reads a part reads the last copy. Attention kernels want biases whose rows are aligned, so torch puts a bias into a
larger tensor and hands over the part of that which is the bias. A read that lies within what was put there reads that
instead (in the literature, store-to-load forwarding); one that lies beside it reads what it was put into; and a scatter
over the places of the one before goes into what that one went into. Kernels then need not wait for the larger tensor.

Worked example: with ``a = select_scatter(x, first, 1, 0)`` and ``b = select_scatter(a, second, 1, 1)``, ``select(b, 1, 0)``
is ``first``, ``slice(b, 1, 2, 8)`` is ``slice(x, 1, 2, 8)``, and ``select_scatter(b, third, 1, 1)`` is one into ``a``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import GraphModule, Node

from dynafuse.fx import arguments, base, fake_mode_of, hint, insert, is_returned, is_view
from dynafuse.ops.indexing_math import as_expr
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.passes.strides import place_views, renew, same_layout

aten = torch.ops.aten
ALIGNED = 16  # elements: new memory begins at a multiple of as many, whatever they are
MOST_WRITES = 64  # that one read is carried past
SCATTERS = {aten.slice_scatter.default, aten.select_scatter.default}
PUTS = {*SCATTERS, aten.constant_pad_nd.default}


class _Span(NamedTuple):
    """Places along a dimension: the first, and how many."""

    dim: int
    first: sympy.Expr
    count: sympy.Expr

    def holds(self, other: _Span) -> bool:
        """Return whether the other's places are known to be among these."""
        ends = self.first + self.count - other.first - other.count
        return bool(self.dim == other.dim and (other.first - self.first).is_nonnegative and ends.is_nonnegative)

    def is_beside(self, other: _Span) -> bool:
        """Return whether the two are known to share no place, of the same dimension."""
        before, behind = self.first - other.first - other.count, other.first - self.first - self.count
        return bool(self.dim == other.dim and (before.is_nonnegative or behind.is_nonnegative))


class _Part(NamedTuple):
    """A tensor at some places of another: what is put there, or what is read there.

    ``is_one_less`` says that it does not have the dimension, as what ``select`` returns and ``select_scatter`` takes.
    """

    tensor: Node
    span: _Span
    is_one_less: bool


def take_pieces(module: GraphModule) -> None:
    """Replace reads of what was put together by reads of the pieces, in place, where nothing can tell."""
    nodes, taken = list(module.graph.nodes), set[Node]()
    if not any(node.target in PUTS for node in nodes):
        return
    with fake_mode_of(nodes):
        for node in nodes:
            _skip_overwritten(node)
            read = None if is_returned(node) else _cut(node)
            piece = None if read is None else _piece(read)
            if piece is not None and _may_be(node, piece):
                node.replace_all_uses_with(piece)
                taken.add(piece)
    if taken:
        place_views(module, taken)


def _skip_overwritten(scatter: Node) -> None:
    """Let a scatter go into what the one before went into, if that put something only where this one does."""
    into, put = scatter.args[0] if scatter.target in SCATTERS else None, _put(scatter)
    while put is not None and isinstance(into, Node) and into.target in SCATTERS:
        hidden, under = _put(into), into.args[0]
        assert isinstance(under, Node)
        if hidden is None or not put.span.holds(hidden.span) or not same_layout(under.meta["val"], into.meta["val"]):
            return
        scatter.update_arg(0, under)
        into = under


def _piece(read: _Part) -> Node | None:
    """Return what reads the same places of what was put there, or of what that was put into; None if that is not known."""
    whole: Any = read.tensor.args[0]
    span, is_changed = read.span, False
    for _ in range(MOST_WRITES):
        put = _put(whole)
        if put is None:
            break
        if put.span.holds(span):
            return _read_of(put, read, span)
        into = whole.args[0]
        if whole.target not in SCATTERS or not put.span.is_beside(span) or _is_written(into):
            break
        whole, is_changed = into, True
    node = read.tensor
    return insert(node, node.target, (whole, *node.args[1:]), **node.kwargs) if is_changed else None


def _read_of(put: _Part, read: _Part, span: _Span) -> Node | None:
    """Return the places of ``span`` from among those of what was put there, by calls before the read."""
    dim, first = span.dim, span.first - put.span.first
    if put.is_one_less:
        return put.tensor if read.is_one_less else insert(read.tensor, aten.unsqueeze.default, (put.tensor, dim))
    if span == put.span and not read.is_one_less:
        return put.tensor
    if not (first.is_Integer and span.count.is_Integer):
        return None
    if read.is_one_less:
        return insert(read.tensor, aten.select.int, (put.tensor, dim, int(first)))
    return insert(read.tensor, aten.slice.Tensor, (put.tensor, dim, int(first), int(first + span.count)))


def _is_written(node: Node) -> bool:
    """Return whether a tensor is in an input that the graph writes to: that may happen early if nothing reads it late."""
    start = base(node)
    return start.op == "placeholder" and any(user.target is COPIES_INTO for user in start.users)


def _cut(node: Node) -> _Part | None:
    """Return which places a call returns of its operand, along the one dimension that it shortens; None for other calls."""
    if node.target is aten.slice.Tensor:
        args = arguments(node)
        return _part(args["self"], args["dim"], args["start"], node) if args["step"] == 1 else None
    if node.target is aten.select.int:
        args = arguments(node)
        return _part(args["self"], args["dim"], args["index"], node, is_one_less=True)
    if node.target is aten.constant_pad_nd.default:
        changed = _changed(node)
        if changed is not None and changed[1] <= 0 >= changed[2]:
            return _part(node.args[0], changed[0], -changed[1], node)  # type: ignore[arg-type]
    return None


def _put(node: Node) -> _Part | None:
    """Return what a call puts into something larger, and where."""
    if node.target in SCATTERS:
        args = arguments(node)
        if args.get("step", 1) != 1 or args["src"].meta["val"].dtype is not node.meta["val"].dtype:
            return None
        is_one_less = node.target is aten.select_scatter.default
        return _part(node, args["dim"], args["index" if is_one_less else "start"], args["src"], is_one_less)
    if node.target is aten.constant_pad_nd.default:
        changed = _changed(node)
        if changed is not None and changed[1] >= 0 <= changed[2]:
            return _part(node, changed[0], changed[1], node.args[0])  # type: ignore[arg-type]
    return None


def _part(whole: Node, dim: int, start: Any, tensor: Node, is_one_less: bool = False) -> _Part | None:
    """Return where a tensor is in another; None if it may be empty, or if its start may be clamped."""
    shape = whole.meta["val"].shape
    dim %= len(shape)
    size, first = as_expr(shape[dim]), as_expr(start or 0)
    first = first + size if first.is_negative else first
    count = sympy.S.One if is_one_less else as_expr(tensor.meta["val"].shape[dim])
    is_known = first.is_nonnegative and count.is_positive
    return _Part(tensor, _Span(dim, first, count), is_one_less) if is_known else None


def _changed(pad: Node) -> tuple[int, int, int] | None:
    """Return the one dimension that a call pads or shortens, by how much before and behind; None unless it is one."""
    pads: Any = pad.args[1]
    if not all(isinstance(count, int) for count in pads):
        return None
    rank = pad.meta["val"].dim()
    changed = [(rank - 1 - i // 2, pads[i], pads[i + 1]) for i in range(0, len(pads), 2) if pads[i] or pads[i + 1]]
    return changed[0] if len(changed) == 1 else None


def _may_be(node: Node, piece: Node) -> bool:
    """Return whether a piece may take the place of what was cut out: it has its layout, or no reader can tell."""
    value = piece.meta["val"]
    if same_layout(value, node.meta["val"]):
        return is_view(node) or hint(value.storage_offset()) % ALIGNED == 0
    return renew(node, value)
