"""Views, index rewrites, gathers and creation ops against eager, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynafuse.ops as ops
from dynafuse.ops import Kind, Row
from dynafuse.ops.overloads import overload
from tests.support.reference_builder import lowered
from tests.support.samples import nearest, smooth

X = torch.arange(24.0).view(2, 3, 4)
IMAGE = torch.randn(2, 2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS_AT = torch.tensor([[1, 0], [-1, 1]])
COLUMNS_AT = torch.tensor([2, -4])


def pooled(**kwargs: Any) -> list[Any]:
    values = {"kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 0], "ceil_mode": False, "count_include_pad": True,
              "divisor_override": None, **kwargs}
    return list(values.values())


POOLS = [
    pooled(),
    pooled(ceil_mode=True),
    pooled(count_include_pad=False),
    pooled(divisor_override=5),
    pooled(stride=[]),
    pooled(kernel_size=[3], padding=[1], stride=[1]),
    pooled(ceil_mode=True, count_include_pad=False, stride=[3, 1]),
]
MAX_POOLS = [
    [[3, 2], [2, 2], [1, 0], [1, 1], False],
    [[3, 2], [2, 1], [1, 1], [1, 1], True],
    [[2], [], [0], [1], False],
    [[2, 3], [1, 1], [1, 1], [2, 1], False],
]


TIES = IMAGE.round()
VOLUME = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
VOLUMES = [
    [[3, 2, 2], [2, 2, 1], [1, 0, 1], [1, 1, 1], False],
    [[2], [], [0], [1], True],
    [[2, 2, 2], [1, 2, 1], [1, 1, 0], [1, 2, 1], False],
]


DEPTHWISE = [
    (1, [[1, 1], [1, 0], [1, 1]]), (1, [[2, 3], [1, 1], [1, 1]]), (3, [[2, 1], [2, 1], [1, 2]]), (2, [[1, 4], [0, 0], [1, 1]]),
]
"""Channels of a result for each of its operand's, with strides, paddings and dilations."""


def weights(copies: int) -> torch.Tensor:
    return torch.arange(12.0 * copies, dtype=torch.float64).view(2 * copies, 1, 3, 2).cos()


def depthwise_grad(copies: int, numbers: list[Any]) -> list[Any]:
    result = torch.ops.dynafuse.depthwise_convolution.default(IMAGE, weights(copies), *numbers)
    return [result.cos(), weights(copies), list(IMAGE.shape), *numbers]


def grad_of(pool: list[Any]) -> torch.Tensor:
    return torch.ops.aten.avg_pool2d.default(IMAGE, *pool).cos()


def in_full(pool: list[Any]) -> list[Any]:
    """A window as the ops that take each number for each dimension are given it."""
    rank = 2 if pool in MAX_POOLS else 3
    size, stride, padding, dilation = ((value * rank)[:rank] for value in (pool[0], pool[1] or pool[0], pool[2], pool[3]))
    return [size, stride, padding, dilation, pool[4]]


def max_grad(image: torch.Tensor, pool: list[Any]) -> list[Any]:
    """The arguments of the gradient of a max pooling."""
    op = torch.ops.aten.max_pool2d_with_indices if pool in MAX_POOLS else torch.ops.aten.max_pool3d_with_indices
    maxima, indices = op(image, *pool)
    return [maxima.cos(), image, *pool, indices]


def offsets_grad(image: torch.Tensor, pool: list[Any]) -> list[Any]:
    """The same of the gradient that takes places in windows."""
    *window, ceil_mode = in_full(pool)
    maxima, offsets = torch.ops.prims._low_memory_max_pool_with_offsets(image, *window, ceil_mode)
    return [maxima.cos(), offsets, list(image.shape[-len(window[0]):]), *window]


CASES: list[tuple[str, list[Any]]] = [
    ("aten.view.default", [X, [4, 6]]),
    ("aten.view.default", [X, [2, 12]]),
    ("aten.view.default", [X, [-1]]),
    ("aten.reshape.default", [X, [8, 1, 3]]),
    ("aten.reshape.default", [torch.ones(()), [1, 1]]),
    ("aten.permute.default", [X, [2, 0, -2]]),
    ("aten.transpose.int", [X, 0, -1]),
    ("aten.t.default", [X[0]]),
    ("aten.t.default", [X[0, 0]]),
    ("aten.expand.default", [X[:, :1], [5, 2, 3, 4]]),
    ("aten.squeeze.default", [X[:1, :, :1]]),
    ("aten.squeeze.dim", [X[:1], 0]),
    ("aten.squeeze.dim", [X, 0]),
    ("aten.squeeze.dims", [X[:1, :, :1], [0, 1, -1]]),
    ("aten.unsqueeze.default", [X, -1]),
    ("aten.unsqueeze.default", [X, 1]),
    ("aten.slice.Tensor", [X, 2, 1, 3, 1]),
    ("aten.slice.Tensor", [X, -1, -3, 9223372036854775807, 2]),
    ("aten.slice.Tensor", [X, 1, -100, -1, 1]),
    ("aten.slice.Tensor", [X, 1, None, 100, 2]),
    ("aten.select.int", [X, 1, -1]),
    ("aten.select.int", [X, -1, 2]),
    ("aten.diagonal.default", [X, 1, 1, 2]),
    ("aten.diagonal.default", [X, -1, 2, 0]),
    ("aten.unfold.default", [X, 2, 2, 1]),
    ("aten.unfold.default", [X, 1, 2, 2]),
    ("aten.alias.default", [X]),
    ("prims.broadcast_in_dim.default", [X[0, :, :1], [3, 2, 5], [0, 2]]),
    ("prims.transpose.default", [X, [2, 0, 1]]),
    ("prims.squeeze.default", [X[:1], [0]]),
    ("aten.cat.default", [[X, X[:, :1] * 2, X[:, :2] + 100], 1]),
    ("aten.cat.default", [[X, torch.ones(0), X.int()], -1]),
    ("aten.cat.default", [[X[:, :0], X], 1]),
    ("aten.stack.default", [[X, X + 1, X * 2], 1]),
    ("aten.stack.default", [[X], -1]),
    ("aten.constant_pad_nd.default", [X, [1, 2], 7.0]),
    ("aten.constant_pad_nd.default", [X, [1, -2, -1, 3], 0.5]),
    ("aten.constant_pad_nd.default", [X, [0, -1], 0]),
    ("aten.flip.default", [X, [0, -1]]),
    ("prims.rev.default", [X, [1]]),
    ("aten.roll.default", [X, [1, -2], [0, 2]]),
    ("aten.roll.default", [X, [5], []]),
    ("aten.repeat.default", [X, [2, 1, 3, 1]]),
    ("aten.slice_scatter.default", [X, X[:, :, :2] * 10, 2, 1, 3, 1]),
    ("aten.slice_scatter.default", [X, X[:, :2] * 10, 1, 0, 9223372036854775807, 2]),
    ("aten.slice_scatter.default", [X, X * 10, 1, 0, 9223372036854775807, 1]),
    ("aten.slice_scatter.default", [X, X[:, :, :2] * 10, -1, -2, None, 1]),
    ("aten.select_scatter.default", [X, X[:, 0] * 10, 1, -1]),
    ("aten.triu.default", [X, 1]),
    ("aten.tril.default", [X, -1]),
    ("aten.glu.default", [X / 10, -1]),
    *(("aten.avg_pool2d.default", [IMAGE, *pool]) for pool in POOLS),
    ("aten.avg_pool2d.default", [IMAGE[0], *pooled()]),
    *(("aten.max_pool2d.default", [IMAGE, *pool]) for pool in MAX_POOLS),
    ("aten.max_pool2d.default", [IMAGE[0], *MAX_POOLS[0]]),
    *(("aten.max_pool3d.default", [VOLUME, *pool]) for pool in VOLUMES),
    *(("dynafuse.max_pool_offsets.default", [image, *in_full(pool)])
      for image in (TIES, torch.full_like(TIES, -torch.inf)) for pool in MAX_POOLS),
    *(("dynafuse.max_pool_offsets.default", [VOLUME.round(), *in_full(pool)]) for pool in VOLUMES),
    *(("aten.max_pool2d_with_indices_backward.default", max_grad(TIES, pool)) for pool in MAX_POOLS),
    *(("aten.max_pool3d_with_indices_backward.default", max_grad(VOLUME.round(), pool)) for pool in VOLUMES),
    *(("dynafuse.max_pool_offsets_backward.default", offsets_grad(TIES, pool)) for pool in MAX_POOLS),
    *(("dynafuse.max_pool_offsets_backward.default", offsets_grad(VOLUME.round(), pool)) for pool in VOLUMES),
    ("aten.avg_pool3d.default", [VOLUME, [2, 3, 2], [1, 2, 1], [1, 1, 0], True, False, None]),
    ("aten.avg_pool3d_backward.default",
     [torch.ops.aten.avg_pool3d(VOLUME, [2, 3, 2], [1, 2, 1], [1, 1, 0], True, False).cos(), VOLUME, [2, 3, 2], [1, 2, 1],
      [1, 1, 0], True, False, None]),
    *(("aten.avg_pool2d_backward.default", [grad_of(pool), IMAGE, *pool]) for pool in POOLS),
    ("aten._adaptive_avg_pool2d.default", [IMAGE[..., :6, :], [3, 2]]),
    ("aten._adaptive_avg_pool2d_backward.default", [torch.randn(2, 2, 3, 2), torch.randn(2, 2, 6, 6)]),
    ("aten._adaptive_avg_pool3d.default", [VOLUME, [2, 1, 3]]),
    ("aten._adaptive_avg_pool3d_backward.default", [torch.randn(2, 2, 1, 3), torch.randn(2, 4, 5, 3)]),
    *(("aten.upsample_nearest1d_backward.default", make(IMAGE)) for make in nearest(1)),
    *(("aten._upsample_nearest_exact2d_backward.default", make(IMAGE)) for make in nearest(2)),
    *(("aten.upsample_bilinear2d_backward.default", make(IMAGE)) for make in smooth(2)),
    *(("aten.upsample_trilinear3d_backward.default", make(IMAGE)) for make in smooth(3)),
    *(("aten.upsample_bicubic2d_backward.default", make(IMAGE)) for make in smooth(2)),
    *(("dynafuse.depthwise_convolution.default", [IMAGE, weights(copies), *numbers])
      for copies, numbers in DEPTHWISE),
    *(("dynafuse.depthwise_convolution_backward.default", depthwise_grad(copies, numbers)) for copies, numbers in DEPTHWISE),
    ("prims._low_memory_max_pool_offsets_to_indices.default",
     [torch.arange(6, dtype=torch.int8).view(1, 3, 2), [2, 3], [9, 9], [2, 1], [1, 0], [1, 2]]),
    ("aten.embedding.default", [X[0], torch.tensor([[2, 0], [1, 1]])]),
    ("aten.gather.default", [X, -1, torch.tensor([[[3], [0]], [[1], [1]]])]),
    ("aten.gather.default", [torch.ones(()), 0, torch.tensor(0)]),
    ("aten.scatter.value", [torch.arange(6.0).view(2, 3), 1, torch.tensor([[2], [0]]), 7.0]),
    ("aten.scatter.src", [torch.arange(6.0).view(2, 3), 1, torch.tensor([[2], [0]]), torch.tensor([[8.0], [9.0]])]),
    ("aten.scatter_add.default", [torch.arange(6.0).view(2, 3), 1, torch.tensor([[2], [0]]), torch.tensor([[8.0], [9.0]])]),
    ("aten.index_select.default", [X, 1, torch.tensor([2, 2, 0])]),
    ("aten.index_select.default", [X, -1, torch.tensor(3)]),
    ("aten.index.Tensor", [X, [ROWS_AT]]),
    ("aten.index.Tensor", [X, [None, ROWS_AT]]),
    ("aten.index.Tensor", [X, [None, ROWS_AT, COLUMNS_AT]]),
    ("aten.index.Tensor", [X, [ROWS_AT, None, COLUMNS_AT]]),
    ("aten.index.Tensor", [X, [ROWS_AT, ROWS_AT, COLUMNS_AT]]),
    ("aten.index.Tensor", [X, [None, None, torch.tensor(-1)]]),
    ("aten._unsafe_index.Tensor", [X, [None, COLUMNS_AT[:, None] % 3, COLUMNS_AT]]),
    ("aten._unsafe_masked_index.default",
     [X, torch.tensor([True, False, True]), [None, None, torch.tensor([1, 99, 3])], 0.5]),
    ("aten.full.default", [[2, 3], 1.5]),
    ("aten.full_like.default", [X, 3]),
    ("aten.scalar_tensor.default", [2.5]),
    ("aten.ones.default", [[2]]),
    ("aten.zeros_like.default", [X]),
    ("aten.eye.m", [3, 4]),
    ("aten.arange.start_step", [1, 11, 3]),
    ("aten.arange.start_step", [0.5, 3.0, 0.25]),
    ("aten.arange.default", [4]),
    ("prims.inductor_lookup_seed.default", [torch.arange(5), 3]),
]


def case_id(case: tuple[str, list[Any]]) -> str:
    return (
        case[0]
        + "-"
        + "-".join("x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else str(a)[:40] for a in case[1])
    )


def bound(row: Row, args: list[Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    names = row.target._schema.arguments
    return {a.name: args[k] if k < len(args) else a.default_value for k, a in enumerate(names)}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_value_at_every_index(case: tuple[str, list[Any]]) -> None:
    name, args = case
    target = overload(name)
    if target is None:
        pytest.skip(f"this torch has no {name}")
    row = ops.lookup(target)
    assert row is not None and row.fusible
    expected = target(*args)
    torch.testing.assert_close(lowered(row, bound(row, args), expected), expected)


def test_iota() -> None:
    row = ops.lookup(torch.ops.prims.iota.default)
    assert row is not None
    named = {"start": 3, "step": -2, "dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
    assert lowered(row, {"length": 4, **named}, torch.empty(4, dtype=torch.int64)).tolist() == [3, 1, -1, -3]


def test_every_lowered_row_has_a_case() -> None:
    kinds = (Kind.VIEW, Kind.INDEX, Kind.GATHER)
    lowers = {row.lower for row in ops.rows() if row.kind in kinds}
    tested = {ops.lookup(overload(name)).lower for name, _ in CASES if overload(name)}  # type: ignore[union-attr]
    shared = {row.lower: str(row.target) for row in ops.rows() if row.kind in kinds}
    assert not [shared[lower] for lower in lowers - tested]
