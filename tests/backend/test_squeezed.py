"""Dimensions that are squeezed although only a guard says that their dynamic size is 1."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dynafuse.fx import size_of
from tests.support.differential import check


@pytest.mark.parametrize("offset", [0, 1])
def test_size_of_one_by_a_guard(offset: int) -> None:
    def squeezed(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, 0, 1).diagonal(offset, -2, -1).squeeze(-1) * 2

    check(squeezed, torch.randn(3, 5, 4), executors="triton", dynamic=True)


def test_sizes_that_a_quotient_tells() -> None:
    """Where two sizes are one symbol, torch leaves the last size of a view as a quotient."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x = mode.from_tensor(torch.empty(3, 4, 3), symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * 3))
    s, t, _ = x.shape
    assert [str(size_of(size)) for size in (s * s // s, (s * t + s) // s, s * t // (2 * s), s * s // t)] == [
        str(size_of(s)), f"{size_of(t)} + 1", f"({size_of(t)}//2)", f"(({size_of(s)}**2)//{size_of(t)})"]
