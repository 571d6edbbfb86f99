"""Copies that change nothing, or copies of views: their memory is their own, also where a view of them is read or returned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.differential import check

aten = torch.ops.aten
Function = Callable[[torch.Tensor], torch.Tensor]

COPIES: dict[str, Function] = {
    "first power": lambda x: x.pow(1),
    "nothing put in": lambda x: torch.slice_scatter(x, x[:, 3:] * 2, 1, 3),
    "all put in": lambda x: torch.slice_scatter(x * 2, x, 1, 0),
    "slice_copy of all": lambda x: aten.slice_copy(x, 0, 0, 100),
    "slice_copy": lambda x: aten.slice_copy(x, 1, 1, 3),
    "select_copy": lambda x: aten.select_copy(x, 1, 1),
    "permute_copy": lambda x: aten.permute_copy(x, [2, 0, 1]),
    "expand_copy": lambda x: aten.expand_copy(x[:, :1], [5, 2, 3, 4]),
    "unfold_copy": lambda x: aten.unfold_copy(x, 2, 2, 1),
    "diagonal_copy": lambda x: aten.diagonal_copy(x, 0, 1, 2),
    "unsqueeze_copy": lambda x: aten.unsqueeze_copy(x, 1),
    "view_copy": lambda x: aten.view_copy(x, [4, 6]),
    "first power of a value": lambda x: x.exp()[1:].pow(1),
}
READ: dict[str, Function] = {
    "returned": lambda y: y,
    "a view returned": lambda y: y[1:],
    "views of views returned": lambda y: y[0].unsqueeze(0)[..., 1:],
    "read by a kernel": lambda y: y[:1].exp(),
    "read by an eager op": lambda y: y.cumsum(0),
    "a view read by an eager op": lambda y: y[-1:].cumsum(0),
}


PAIRS = [*((copy, "triton") for copy in COPIES), ("first power", "inductor"), ("slice_copy", "inductor")]


@pytest.mark.parametrize(("copy", "executor"), PAIRS)
def test_copy_and_views_of_it(copy: str, executor: str) -> None:
    memory = torch.randn(2 * 3 * 4 + 5)
    for read in READ.values():
        for x in (memory[:24].view(2, 3, 4), memory[5:].view(2, 3, 4)):
            check(lambda x, read=read: read(COPIES[copy](x)), x, executors=executor)


@pytest.mark.parametrize("dynamic", [False, True])
def test_two_views_returned_share_memory_only_if_eagers_do(dynamic: bool) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y[0], y.pow(1)[0], y[1]

    check(both, torch.randn(4, 6), dynamic=dynamic, executors="triton")
