"""Regions that share nothing but a launch: results beside eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.differential import check, compiled, regions
from tests.support.graphs import recorded

Function = Callable[..., Any]
Make = Callable[..., Tensor]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes a random tensor of a shape."""
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=request.param).to(dtype)


def steps(*parameters: Tensor) -> tuple[Tensor, ...]:
    """The same for tensors of different sizes, with numbers that are arguments."""
    return tuple(parameter * 0.9 + parameter.sign() * 0.1 - 0.3 for parameter in parameters)


def of_all_kinds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    return (a.softmax(-1), b.relu(), c.sum(0), F.layer_norm(d, d.shape[-1:]), b.cumsum(1), torch.full((5,), 2.0, device=a.device),
            c.t() + 1, torch.arange(7, device=a.device), d.amax(), b.double() / 3, d[:, ::2].exp())


def in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One nest reads what another overwrites, which therefore comes later; a third does neither."""
    read = a * 2
    a.copy_(b.sin())
    c.mul_(3)
    return read


def picked(table: Tensor, other: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return table[index] * 2, other[index[:2]] + 1, other.exp()


def transposed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a + a.t(), (b + b.t()) * 2


def empty_too(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * 2, b * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1000, 2048), (1000, 2000, 300, 301, 7, 4096), (3,) * 40, (64, 1, 65)], ids=str)
def test_one_step_for_many_sizes(make: Make, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(steps, *(make(size, dtype=dtype) for size in sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_nests_of_all_kinds(make: Make, dtype: torch.dtype) -> None:
    inputs = [make(*shape, dtype=dtype) for shape in ((3, 50), (9, 40), (31, 17), (2, 96))]
    with recorded() as graphs:
        check(of_all_kinds, *inputs)
    assert any(region.nests for graph in graphs for region in graph.plan.regions)


def test_what_another_nest_overwrites_is_read_before(make: Make) -> None:
    check(in_place, make(33), make(33), make(70))


def test_an_operand_that_two_nests_read_is_not_written_over(make: Make) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        product = a @ b
        return product.relu(), product.flip(0)[:, :5].exp()

    with recorded() as graphs:
        check(function, make(64, 32), make(32, 48))
    assert [len(region.nests) for region in graphs[0].plan.regions] == [2]


def test_an_operand_of_one_nest_is_written_over(make: Make) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return (a @ b).relu(), c.exp()

    with recorded() as graphs:
        check(function, make(64, 32), make(32, 48), make(70))
    (bound,) = graphs[0].bounds.values()
    assert len(bound.region.nests) == 2
    assert any("over" in reason for reason in bound.region.reasons), bound.region.reasons


def test_indices_are_checked_in_each_nest(make: Make) -> None:
    index = torch.tensor([2, 0, 5, 1], device=make(1).device)
    check(picked, make(6, 5), make(8, 3), index)


def test_tiles_of_two_dimensions(make: Make) -> None:
    check(transposed, make(96, 96), make(160, 160))


def test_empty_tensors(make: Make) -> None:
    check(empty_too, make(0, 3), make(4, 3))


def test_gradients(make: Make) -> None:
    def norms(q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(q, (16,), w), F.rms_norm(k, (16,), w)

    check(norms, make(2, 4, 6, 16), make(2, 2, 6, 16), make(16), grad=True)


def test_equal_text_for_other_types(make: Make) -> None:
    check(lambda x, y: (torch.zeros_like(x), torch.zeros_like(y), x.sign(), y.sign()), make(9), make(11).long())


def test_nests_that_do_the_same_share_their_code(make: Make) -> None:
    """Of forty parameters the code is there once or twice, not forty times: with masks and without."""
    parameters = [make(size) for size in range(100, 4100, 100)]
    with recorded() as graphs:
        got = compiled(steps)(*parameters)
    torch.testing.assert_close(got, steps(*parameters))
    assert regions(graphs) == 2
    assert sum(len(region.nests) for region in graphs[0].plan.regions) == 40
