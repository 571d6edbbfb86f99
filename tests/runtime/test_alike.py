"""Results that share memory are related as eager's are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.differential import compiled
from tests.support.fake_recorder import recording_on_cpu


def aliases(x: Tensor) -> tuple[Tensor, ...]:
    y = x.cos()
    return y, y[1:], y.t()


def bases(results: Sequence[Tensor]) -> list[bool]:
    """Whether each result is a view of the first."""
    return [result._base is results[0] for result in results]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("capture", ["never", "always"])
def test_results_without_gradients_are_views(capture: str, mode: type) -> None:
    call, weight = compiled(aliases, capture=capture), torch.ones((), requires_grad=True)
    with recording_on_cpu():
        for _ in range(5):
            with mode():
                found, expected = call(torch.ones(3, 4)), aliases(torch.ones(3, 4))
            assert bases(found) == bases(expected)
            if mode is torch.enable_grad:
                for results in found, expected:
                    results[1].mul_(weight)  # views know each other's gradients
                assert [result.requires_grad for result in found] == [result.requires_grad for result in expected]


def test_results_of_a_training_graph_keep_gradients_of_their_own() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.cos()
        return y.detach(), y, y.detach()[1:]

    found, expected = (call(torch.ones(3, 4, requires_grad=True)) for call in (compiled(function), function))
    assert [result.requires_grad for result in found] == [result.requires_grad for result in expected]
    found[2].add_(1)
    expected[2].add_(1)
    assert [result._version for result in found] == [result._version for result in expected]
