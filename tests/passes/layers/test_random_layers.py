"""Random programs of repeated layers: whatever their layers do to each other, results and gradients are eager's."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse import backend

WIDTH = 6
SEEDS = 4

Line = Callable[[list[Tensor], list[Tensor], Tensor], list[Tensor]]
"""A line of a layer: from the values so far, those of before the layers and the layer's weight to the values after it."""

LINES: tuple[Line, ...] = (
    lambda v, c, w: [*v[:-1], v[-1] @ w],
    lambda v, c, w: [*v[:-1], torch.tanh(v[-1])],
    lambda v, c, w: [*v, F.layer_norm(v[-1], (WIDTH,), w[0])],
    lambda v, c, w: [*v[:-1], v[-1] + v[0]],
    lambda v, c, w: [v[-1], *v[1:-1], v[0]],  # change places
    lambda v, c, w: [*v, v[0].t()],
    lambda v, c, w: [*v[:-1], v[-1] * c[0] + c[1].sum()],
    lambda v, c, w: [*v[:-1], *v[-1].chunk(2, -1)],
    lambda v, c, w: [*v[:-1], v[-1].clone().mul_(0.5).add_(w)],
    lambda v, c, w: [*v[:-1], F.relu(v[-1] - 0.1, inplace=True)],
    lambda v, c, w: [*v[:-1], v[-1].detach() + v[0]],
    lambda v, c, w: [*v, v[0].view(-1)[: WIDTH * WIDTH].view(WIDTH, WIDTH)],
    lambda v, c, w: [*v[:-1], v[-1].add_(w)],
    lambda v, c, w: [*v[:-1], v[-1] + c[2].mul_(0.5).sum()],
)


def squared(values: list[Tensor]) -> list[Tensor]:
    """At most three matrices, so that every layer begins alike."""
    kept = [v if v.shape == (WIDTH, WIDTH) else torch.cat([v, -v], -1)[:, :WIDTH] for v in values]
    return kept[-3:]


def program(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    """Equal layers of random lines, some of which may differ or see a layer from long ago."""
    dice = random.Random(seed)
    lines = dice.choices(LINES, k=dice.randint(3, 7))
    period = dice.choice((1, 1, 2))
    odd = dice.choice((None, None, 5))
    far = dice.random() < 0.3

    def fn(x: Tensor, gate: Tensor, buffer: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        constants = [torch.sin(gate), gate * 2, buffer]
        values, old = [x * 1.5], x
        for i, weight in enumerate(weights):
            if far and i % 3 == 0:
                values, old = [*values[:-1], values[-1] + old], values[-1]
            for line in lines[: len(lines) - i % period]:
                values = line(values, constants, weight if i != odd else weight * 2)
            values = squared([v * 0.7 for v in values])
        return tuple(values)

    return fn


def outcome(call: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
    """The results, the gradients of all inputs, and the buffer after it."""
    torch.manual_seed(0)
    inputs = [torch.randn(WIDTH, WIDTH, dtype=torch.float64).requires_grad_() for _ in range(2)]
    buffer = torch.rand(WIDTH, dtype=torch.float64)
    weights = [(0.4 * torch.randn(WIDTH, WIDTH, dtype=torch.float64)).requires_grad_() for _ in range(9)]
    results = call(*inputs, buffer, *weights)
    results_sum = sum((k + 1) * result.sum() for k, result in enumerate(results))
    gradients = torch.autograd.grad(results_sum, [*inputs, *weights], materialize_grads=True, allow_unused=True)
    return [*(r.detach() for r in results), *gradients, buffer]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_layers_are_computed_as_in_eager(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "LEAST_SAVED", 6)
    fn = program(seed)
    try:
        expected = outcome(fn)
    except RuntimeError as error:
        pytest.skip(f"eager raises: {error}")
    torch._dynamo.reset()
    options = {"reuse_layers": "always", "executors": "eager"}
    ours = outcome(torch.compile(fn, backend=backend.dynafuse, fullgraph=True, options=options))
    for got, value in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-7, atol=1e-9)
