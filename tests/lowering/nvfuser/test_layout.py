"""How layouts are described to nvFuser, against nvFuser's own description where it is installed."""

from __future__ import annotations

import pytest
import sympy
import torch

from dynafuse.ir import Layout
from dynafuse.lowering.nvfuser.layout import fusion_input, is_dense, stride_order

S, T = (sympy.Symbol(f"s{i}", integer=True, positive=True) for i in range(2))

LAYOUTS = [
    ((), (), (), ()),
    ((4, 8), (8, 1), (True, True), (1, 0)),
    ((4, 8), (1, 4), (True, True), (0, 1)),
    ((4, 8), (16, 2), (True, False), (1, 0)),
    ((4, 8), (20, 1), (False, True), (1, 0)),
    ((1, 8), (8, 1), (None, True), (1, 0)),
    ((3, 1), (1, 1), (True, None), (1, 0)),
    ((4, 1, 8), (1, 77, 4), (None, True, True), (0, 2, 1)),
    ((2, 3, 4, 5), (60, 1, 15, 3), (True, True, True, True), (3, 0, 2, 1)),
    ((4, 5, 8), (8, 0, 1), (True, None, True), (2, 1, 0)),
    ((5, 8), (0, 1), (None, True), (1, 0)),
    ((4, 5), (1, 0), (True, None), (1, 0)),
    ((2, 3, 4), (0, 0, 1), (None, None, True), (2, 1, 0)),
    ((2, 3), (0, 0), (None, None), (1, 0)),
]


@pytest.mark.parametrize(("shape", "stride", "contiguity", "order"), LAYOUTS)
def test_static(shape: tuple[int, ...], stride: tuple[int, ...], contiguity: tuple[bool, ...], order: tuple[int, ...]) -> None:
    found = fusion_input(Layout(torch.float32, shape, stride))
    assert (found.shape, found.contiguity, found.stride_order) == (shape, contiguity, order)


@pytest.mark.nvfuser
@pytest.mark.parametrize(("shape", "stride", "contiguity", "order"), LAYOUTS)
def test_static_as_the_library_has_it(shape: tuple[int, ...], stride: tuple[int, ...], contiguity: tuple[bool, ...],
                                      order: tuple[int, ...]) -> None:
    import nvfuser_direct

    assert nvfuser_direct.compute_tensor_descriptor(list(shape), list(stride)) == (list(contiguity), list(order))


@pytest.mark.parametrize(("shape", "stride", "contiguity", "order"), [
    ((S, T), (T, 1), (True, True), (1, 0)),
    ((S, 8), (1, S), (True, True), (0, 1)),
    ((S, 8), (16, 1), (False, True), (1, 0)),
    ((S, T, 4), (4 * T, 4, 1), (True, True, True), (2, 1, 0)),
    ((S, T, 4), (T, 1, S * T), (True, True, True), (1, 0, 2)),
    ((S, 4), (sympy.Max(1, T), 1), (False, True), (1, 0)),
    ((4, S), (sympy.Max(1, S), 1), (True, True), (1, 0)),
    ((S, 4), (0, 1), (None, True), (1, 0)),
])
def test_symbolic(shape: tuple[object, ...], stride: tuple[object, ...], contiguity: tuple[bool, ...],
                  order: tuple[int, ...]) -> None:
    """A dimension is contiguous where it is so for all sizes."""
    found = fusion_input(Layout(torch.float32, shape, stride))  # type: ignore[arg-type]
    assert found.shape == tuple(size if isinstance(size, int) else -1 for size in shape)
    assert (found.contiguity, found.stride_order) == (contiguity, order)


def test_density() -> None:
    dense = [((4, 8), (8, 1)), ((4, 8), (1, 4)), ((4, 1, 8), (8, 3, 1)), ((), ())]
    gaps = [((4, 8), (16, 1)), ((4, 8), (16, 2)), ((4, 8), (0, 1))]
    assert [is_dense(Layout(torch.float32, *layout)) for layout in dense + gaps] == [True] * 4 + [False] * 3
    assert stride_order(Layout(torch.float32, (2, 3, 4), (12, 1, 3))) == (2, 0, 1)
