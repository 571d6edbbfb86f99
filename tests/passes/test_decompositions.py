"""What ops are decomposed into, where torch's own decomposition is not right in every version."""

from __future__ import annotations

import pytest
import torch

from tests.support import graphs


@pytest.mark.parametrize("keepdim", [False, True], ids=["gone", "kept"])
@pytest.mark.parametrize("dim", [None, [], [-1], [1], [-3], [0, -2], [-1, 0]], ids=str)
@pytest.mark.parametrize("ord", [2, 3.5, 0, float("inf")], ids=str)
def test_norms_over_dimensions_of_one_element(ord: float, dim: list[int] | None, keepdim: bool) -> None:
    for shape in ((1, 4, 1), (3, 1, 1), (1, 1, 1)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

        def norm(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.linalg_vector_norm.default(x, ord, dim, keepdim)

        made = graphs.traced(norm, x)
        assert "linalg_vector_norm" not in made.code
        torch.testing.assert_close(made(x), norm(x))


@pytest.mark.parametrize("limit", [-0.5, -3.7, 2.7, 1])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float32], ids=str)
def test_numbers_of_thresholds(dtype: torch.dtype, limit: float) -> None:
    x = torch.arange(-5, 6).to(dtype)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.aten.threshold(x, limit, 2.9), torch.ops.aten.threshold_backward(x, x, limit)

    made = graphs.traced(both, x)
    assert "threshold" not in made.code
    torch.testing.assert_close(made(x), both(x))
