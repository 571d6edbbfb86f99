"""Matrix products that a model writes out, as a multiplication of what is spread and a sum, run by the library.

State-space models do so, and so do gradients of whatever is spread: ``(c[:, :, None] * b[:, None]).sum(-1)``. A kernel
computes each of the product's terms by itself, and loads two numbers for it; a library's kernel keeps tiles of both
operands at hand. Dimensions are told apart by who has them: in both operands and in the sum's result (a batch), in one of
them (rows, columns), in both and summed over. Where the library's product, with what it costs to lay its operands out and
not to fuse with what is around it, is predicted to be faster, it takes the place of both ops. In float32 it computes in
float32: where the user lets products run as TensorFloat-32, terms of a sum stay what they are.

Worked example: of ``c`` and ``b`` of 8 × 128 × 256 float32 elements above, 34 million terms become ``bmm(c, permute(b))``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import product_prediction
from dynafuse.cost.model import FLOPS_OF_TERM, Work, streaming, work_us
from dynafuse.cost.products import COLUMNS, ROWS, Product, uses_tf32
from dynafuse.fx import arguments, fake_mode_of, insert, looked_at
from dynafuse.ops.reductions import keepdim, reduced_dims
from dynafuse.passes.strides import same_layout

aten = torch.ops.aten

WRITTEN_OUT = "written_out"
"""The metadata of a product that is written out: a line that says at what price the library computes it."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TILE = 64
"""Rows and columns of a result that a library's kernel computes at least."""

FLOPS = 2 + FLOPS_OF_TERM
"""Instructions of a kernel for each term: of two loads one is of what the lane has, or its neighbours load, already."""


@dataclass(frozen=True)
class Written:
    """A sum of products, with the operands as they are before they are spread, and its dimensions by who has them."""

    node: Node
    terms: Node
    left: Node
    right: Node
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inner: tuple[int, ...]
    sizes: tuple[int, ...]  # of the multiplication's result

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return batch, rows, inner size and columns of the product."""
        batch, m, k, n = (math.prod(self.sizes[dim] for dim in dims) for dims in (
            self.batch, self.rows, self.inner, self.columns))
        return batch, m, k, n


def join_products(module: GraphModule, device: Device, device_type: str | None, eager: Collection[Node] = ()) -> None:
    """Run products that are written out by the library where that is predicted to be faster, in place.

    Args:
        module: The graph: a joint one, or a normalized one.
        device: The device that prices are of.
        device_type: The type of device whose tensors are fused; None if nothing is.
        eager: Nodes that are to stay as they are.
    """
    is_changed = False
    for node in module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        if node not in eager and node.meta["val"].device.type == device_type:
            written = _written(node)
            if written is not None and written.terms not in eager and (reason := _reason(written, device)) is not None:
                with fake_mode_of([node]):
                    _replace(written, reason)
                is_changed = True
    if is_changed:
        module.graph.eliminate_dead_code()


def _written(node: Node) -> Written | None:
    """Return the product that a sum computes; None if it computes none."""
    given, result = arguments(node), node.meta["val"]
    terms = given["self"]
    if terms.target is not aten.mul.Tensor or len(terms.users) > 1:
        return None
    operands = [looked_at(operand, lambda node: node.target is aten.expand.default)
                for operand in terms.args if isinstance(operand, Node)]
    values = [operand.meta["val"] for operand in (*operands, terms)]
    if len(operands) < 2 or not all(isinstance(value, torch.Tensor) and _is_plain(value, result.dtype) for value in values):
        return None
    sizes = tuple(terms.meta["val"].shape)
    spread = [{dim for dim, size in enumerate(sizes) if _size(value, dim, len(sizes)) != size} for value in values[:2]]
    rows, columns = sorted(spread[1] - spread[0]), sorted(spread[0] - spread[1])
    reduced = set(reduced_dims(given, len(sizes)))
    if spread[0] & spread[1] or reduced & (spread[0] | spread[1]) or not rows or not columns:
        return None
    if columns[0] < rows[0]:
        rows, columns, operands = columns, rows, operands[::-1]
    both = [dim for dim in range(len(sizes)) if dim not in spread[0] | spread[1]]
    batch, inner = ([dim for dim in both if (dim in reduced) == is_reduced] for is_reduced in (False, True))
    return Written(node, terms, operands[0], operands[1], tuple(batch), tuple(rows), tuple(columns), tuple(inner), sizes)


def _is_plain(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is of known sizes, not empty, and of the result's dtype, which products are computed in."""
    is_exact = dtype is not torch.float32 or not uses_tf32()
    return value.dtype is dtype and dtype in DTYPES and is_exact and all(isinstance(n, int) and n > 0 for n in value.shape)


def _size(value: torch.Tensor, dim: int, rank: int) -> int:
    """Return a size by its place in a result of more dimensions."""
    place = dim - (rank - value.dim())
    return int(value.shape[place]) if place >= 0 else 1


# Prices ---------------------------------------------------------------------------------------------------------------


def _reason(written: Written, device: Device) -> str | None:
    """Return a line with both prices; None unless the library is predicted to be faster by more than the model's error."""
    batch, m, k, n = written.shape
    dtype = written.node.meta["val"].dtype
    if k == 1:
        return None
    filled = Product(batch, -(-m // TILE) * TILE, k, -(-n // TILE) * TILE, (COLUMNS, COLUMNS), (k, n), dtype)
    stored = 2 * batch * (m * k + k * n + m * n) * dtype.itemsize  # what would be fused is written, and read
    library = product_prediction(filled, device).device_us + work_us(streaming(stored), device)
    terms = work_us(Work(0, FLOPS * batch * m * k * n, 1 << 30, "row"), device)
    if terms <= (1 + device.model_error) * library:
        return None
    return f"instead of a sum of {batch * m * k * n} products that is written out, {terms:.1f} µs, in {library:.1f}"


# The rewrite ----------------------------------------------------------------------------------------------------------


def _replace(written: Written, reason: str) -> None:
    """Put the library's product in the place of a sum."""
    node, (batch, m, k, n) = written.node, written.shape
    matrices = (_matrix(written, written.left, (written.batch, written.rows, written.inner), (batch, m, k)),
                _matrix(written, written.right, (written.batch, written.inner, written.columns), (batch, k, n)))
    product = insert(node, aten.bmm.default, matrices)
    product.meta[WRITTEN_OUT] = reason
    dims = (*written.batch, *written.rows, *written.columns)
    spread = insert(node, aten.view.default, (product, [written.sizes[dim] for dim in dims]))
    ordered = insert(node, aten.permute.default, (spread, [dims.index(dim) for dim in sorted(dims)]))
    result = node.meta["val"]
    if keepdim(arguments(node)):
        for dim in written.inner:
            ordered = insert(node, aten.unsqueeze.default, (ordered, dim))
    if not same_layout(ordered.meta["val"], result):
        ordered = insert(node, aten.clone.default, (ordered,), memory_format=torch.contiguous_format)
    if not same_layout(ordered.meta["val"], result):
        return  # its result lies as no product's does: the sum stays, and this is dead code
    node.replace_all_uses_with(ordered)
    node.graph.erase_node(node)


def _matrix(written: Written, operand: Node, order: Sequence[Sequence[int]], sizes: Sequence[int]) -> Node:
    """Return an operand as a batch of matrices, laid out as the library takes it."""
    node, rank = written.node, len(written.sizes)
    value = operand.meta["val"]
    for _ in range(rank - value.dim()):
        operand = insert(node, aten.unsqueeze.default, (operand, 0))
    has = [dim for dims in order for dim in dims]
    missing = [dim for dim in range(rank) if dim not in has]
    if missing:
        operand = insert(node, aten.squeeze.dims, (operand, missing))
    places = sorted(has)
    moved = insert(node, aten.permute.default, (operand, [places.index(dim) for dim in has]))
    if not _is_taken(moved.meta["val"], sizes):
        moved = insert(node, aten.clone.default, (moved,), memory_format=torch.contiguous_format)
    return insert(node, aten.view.default, (moved, list(sizes)))


def _is_taken(value: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return whether a library's kernel reads matrices of some sizes as they lie: along rows or columns, without overlap."""
    try:
        matrices = value.view(sizes)
    except (RuntimeError, ValueError):  # dimensions of one size are not neighbours in memory
        return False
    rows, columns = matrices.stride(ROWS), matrices.stride(COLUMNS)
    along_columns = columns == 1 and rows >= sizes[COLUMNS]
    return along_columns or (rows == 1 and columns >= sizes[ROWS])
