"""Results that are views of inputs which are written to lie where eager's lie, and cost no memory for the new values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dynafuse import backend
from dynafuse.runtime.observers import Compiled
from tests.support.differential import compiled

Function = Callable[[Tensor], object]


def scaled(x: Tensor) -> Tensor:
    x.mul_(2)
    return x


FUNCTIONS: dict[str, Function] = {
    "slice": lambda x: scaled(x)[:, 1:],
    "made before": lambda x: (x[1:], scaled(x).sum())[0],
    "pieces": lambda x: (x.split([1, x.shape[1] - 1], 1), x[:, :2].mul_(3))[0],
    "transposed and selected": lambda x: (scaled(x).t()[1], x.unsqueeze(0)),
    "of another shape": lambda x: scaled(x).view(-1)[1:],
    "every second": lambda x: scaled(x)[:, ::2],
    "bits": lambda x: scaled(x).view(torch.int32)[1],
    "itself": lambda x: (scaled(x), x[0], x.shape[1]),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.arange(1.0, 13).view(3, 4),
    "offset": lambda: torch.arange(1.0, 30)[5:17].view(3, 4),
    "rows apart": lambda: torch.arange(1.0, 30)[2:].as_strided((3, 4), (7, 1)),
    "columns apart": lambda: torch.arange(1.0, 40).as_strided((3, 4), (8, 2), 3),
    "columns first": lambda: torch.arange(1.0, 30)[3:15].view(4, 3).t(),
}


@pytest.mark.parametrize(("layout", "grad", "dynamic"), [
    *((layout, False, True) for layout in LAYOUTS), ("offset", True, True), ("offset", False, False), ("columns apart", True, False)])
def test_views_lie_where_eagers_lie(layout: str, grad: bool, dynamic: bool) -> None:
    weight = torch.ones((), requires_grad=grad)
    functions = [function for name, function in FUNCTIONS.items() if layout in ("dense", "offset") or name != "of another shape"]

    def call(xs: list[Tensor], weight: Tensor) -> tuple[list[object], Tensor]:
        return [function(x) for function, x in zip(functions, xs, strict=True)], weight.exp()

    ours, theirs = ([LAYOUTS[layout]() for _ in functions] for _ in range(2))
    (found, product), (expected, _) = compiled(call, dynamic=dynamic)(ours, weight), call(theirs, weight)
    assert product.requires_grad == grad
    for ours_of_one, theirs_of_one, mine, eagers in zip(ours, theirs, found, expected, strict=True):
        assert torch.equal(ours_of_one, theirs_of_one)
        for a, b in zip(torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(eagers), strict=True):
            if not isinstance(b, Tensor):
                assert a == b
                continue
            assert torch.equal(a, b) and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
            assert a.untyped_storage()._cdata == ours_of_one.untyped_storage()._cdata


def test_the_new_value_is_computed_in_place() -> None:
    graphs: list[Compiled] = []
    with backend.listening(graphs.append, plan_only=False):
        compiled(FUNCTIONS["slice"])(LAYOUTS["dense"]())
    (region,) = graphs[0].plan.regions
    assert [into.op for into in region.copies.values()] == ["placeholder"], "no memory of its own"
