"""Pieces that are cut out of what they were put into, as the pieces.

Attention kernels want biases whose rows are aligned, so torch pads a bias and hands over the part of that which is the bias,
and does the same with its gradient: each is put into a larger tensor, and cut out again. Nothing of the larger tensor is
needed for that, and a kernel that makes the piece can go on with it.

Worked example: with ``x`` of ``float32[8, 197]`` and ``wide = slice_scatter(full([8, 200], 0), x, 1, 0, 197)``,
``constant_pad_nd(wide, [0, -3])`` is ``x``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import sympy
import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from dynafuse.fx import arguments, hint, is_returned, is_view
from dynafuse.ops.indexing_math import as_expr
from dynafuse.passes.strides import place_views, renew, same_layout

aten = torch.ops.aten
ALIGNED = 16  # elements: new memory begins at a multiple of as many, whatever they are


class _Span(NamedTuple):
    """Places along a dimension: the first, and how many."""

    dim: int
    first: sympy.Expr
    count: sympy.Expr


def take_pieces(module: GraphModule) -> None:
    """Replace what is cut out, in place, by the piece that had been put there, where nothing can tell."""
    taken: set[Node] = set()
    for node in list(module.graph.nodes):
        span = _cut(node)
        piece = None if span is None else next((piece for piece, place in _put(node.args[0]) if place == span), None)
        if piece is not None and not is_returned(node) and _may_be(node, piece):
            node.replace_all_uses_with(piece)
            taken.add(piece)
    if taken:
        place_views(module, taken)


def _cut(node: Node) -> _Span | None:
    """Return which places a call cuts out of its operand, along the one dimension that it shortens; None for other calls."""
    if node.target is aten.slice.Tensor:
        args = arguments(node)
        return _span(args["self"], args["dim"], args["start"], node) if args["step"] == 1 else None
    if node.target is aten.constant_pad_nd.default:
        changed = _changed(node)
        if changed is not None and changed[1] <= 0 >= changed[2]:
            return _span(node.args[0], changed[0], -changed[1], node)  # type: ignore[arg-type]
    return None


def _put(node: Node) -> Iterator[tuple[Node, _Span]]:
    """Yield the pieces that a call puts together, or into something larger, and where."""
    if node.target is aten.slice_scatter.default:
        args = arguments(node)
        if args["step"] == 1 and args["src"].meta["val"].dtype is node.meta["val"].dtype:
            yield args["src"], _span(node, args["dim"], args["start"], args["src"])
    elif node.target is aten.constant_pad_nd.default:
        changed = _changed(node)
        if changed is not None and changed[1] >= 0 <= changed[2]:
            piece: Node = node.args[0]  # type: ignore[assignment]
            yield piece, _span(node, changed[0], changed[1], piece)


def _span(whole: Node, dim: int, first: Any, piece: Node) -> _Span:
    """Return the span of a piece of a tensor."""
    shape = whole.meta["val"].shape
    start, dim = as_expr(first or 0), dim % len(shape)
    return _Span(dim, start + as_expr(shape[dim]) if start.is_negative else start, as_expr(piece.meta["val"].shape[dim]))


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
    with detect_fake_mode([value]) or nullcontext():
        return renew(node, value)
