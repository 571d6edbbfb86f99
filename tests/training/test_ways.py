"""Ways of training and serving, compiled against eager: the same losses, parameters, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dynafuse import backend
from dynafuse.lowering.inductor import availability
from tests.support.ways import WAYS, Net, Seen, Way, batches, modes_of_grad, net

needs_cpp = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))


def compiler(executors: str | None, **settings: Any) -> Callable[[Any], Any]:
    """What a way is compiled by."""
    options = {"executors": executors} if executors else None
    return lambda function: torch.compile(function, backend=backend.dynafuse, options=options, **settings)


def compare(ours: Seen, eager: Seen) -> None:
    """Every tensor is eager's, but for the rounding of a few steps."""
    assert len(ours) == len(eager)
    for position, (actual, expected) in enumerate(zip(ours, eager, strict=True)):
        tolerance = 3e-2 if expected.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance,
                                   msg=lambda text, position=position: f"value {position}: {text}")


def follow(way: Way, executors: str | None, device: str) -> None:
    """Go a way in eager and compiled. Under autocast, products round to bfloat16 on both sides, in other orders."""
    eager, ours = way(lambda function: function, device), way(compiler(executors), device)
    if "autocast" in way.__name__:
        ours, eager = ([value.bfloat16() if value.is_floating_point() else value for value in s] for s in (ours, eager))
    compare(ours, eager)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_way(way: Way) -> None:
    follow(way, "triton", "cpu")


@needs_cpp
def test_way_in_cpp() -> None:
    """The one with the most graphs of one model, whose gradients add up, by the CPU's default executor."""
    follow(modes_of_grad, "inductor", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_way_on_a_gpu(way: Way) -> None:
    follow(way, None, "cuda")


def random_states(device: str, executors: str | None) -> None:
    """A state of the generator that was kept gives the same masks again; another one gives others."""
    step = compiler(executors)(lambda x: nn.functional.dropout(x, 0.5) * torch.rand_like(x))
    x = torch.ones(64, device=device, requires_grad=True)
    module: Any = torch.cuda if device == "cuda" else torch.random
    kept = module.get_rng_state()
    first, second = step(x), step(x)
    module.set_rng_state(kept)
    assert torch.equal(step(x), first) and torch.equal(step(x), second) and not torch.equal(first, second)
    with torch.random.fork_rng():
        inside = step(x)
    assert torch.equal(step(x), inside)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient != 0, first != 0)


def test_random_states() -> None:
    random_states("cpu", "triton")


@pytest.mark.gpu
def test_random_states_on_a_gpu() -> None:
    random_states("cuda", None)


def test_a_compiled_model_saves_and_loads_like_the_model() -> None:
    model = net("cpu")
    step = compiler("triton")(model)
    (x, y), = batches("cpu", 1)
    step(x, y).backward()
    fresh = Net()
    fresh.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in step.state_dict().items()})
    compare(list(fresh.parameters()), list(model.parameters()))
