"""Dimensions that are squeezed although only a guard says that their dynamic size is 1."""

from __future__ import annotations

import pytest
import torch

from tests.support.differential import check


@pytest.mark.parametrize("offset", [0, 1])
def test_size_of_one_by_a_guard(offset: int) -> None:
    def squeezed(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(1, 0, 1).diagonal(offset, -2, -1).squeeze(-1) * 2

    check(squeezed, torch.randn(3, 5, 4), executors="triton", dynamic=True)
