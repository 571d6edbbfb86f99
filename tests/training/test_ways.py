"""Ways of training and serving, compiled against eager: the same losses, parameters, gradients and buffers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from ways import WAYS, Net, Seen, Way, accumulation, batches, experts, modes_of_grad, net, retained_graph

from dynafuse import backend
from dynafuse.lowering.inductor import availability

needs_cpp = pytest.mark.skipif(not availability.find("cpu").available, reason=str(availability.find("cpu")))
EXECUTORS = ["triton", pytest.param("inductor", marks=needs_cpp)]


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
@pytest.mark.parametrize("way", [accumulation, retained_graph, modes_of_grad, experts], ids=lambda way: way.__name__)
def test_way_in_cpp(way: Way) -> None:
    """Those whose graphs run again, in another order or in other modes, by the CPU's default executor."""
    follow(way, "inductor", "cpu")


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


@pytest.mark.parametrize("executors", EXECUTORS)
def test_a_second_derivative_is_an_error_that_says_so(executors: str) -> None:
    """Torch has none of what AOTAutograd compiles."""
    (x, y), = batches("cpu", 1)
    loss = compiler(executors)(net("cpu"))(x.requires_grad_(), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("executors", EXECUTORS)
def test_threads_share_a_compiled_object(executors: str) -> None:
    model = net("cpu").eval()
    step = compiler(executors)(model)
    (x, y), = batches("cpu", 1)
    expected, found = model(x, y), []

    def call() -> None:
        with torch.no_grad():
            found.extend(step(x, y) for _ in range(3))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 12
    for loss in found:
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose samples a compiled function makes."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> torch.Tensor:
        return self.function(torch.full((8,), float(position)))


@pytest.mark.parametrize("executors", EXECUTORS)
def test_workers_of_a_data_loader_after_compiling(executors: str) -> None:
    """They are forks of a process that has compiled, and may call what it compiled."""
    function = compiler(executors)(lambda x: (x * 2 + 1).relu())
    function(torch.ones(8))
    loader = torch.utils.data.DataLoader(Rows(function), batch_size=2, num_workers=2, multiprocessing_context="fork",
                                         timeout=100)
    torch.testing.assert_close(torch.cat(list(loader))[:, 0], torch.tensor([1.0, 3.0, 5.0, 7.0]))


@pytest.mark.parametrize("executors", EXECUTORS)
def test_a_fork_compiles_by_itself(executors: str) -> None:
    """A process that was forked after something was compiled compiles something else."""
    compile = compiler(executors)
    compile(lambda x: (x * 2 + 1).relu())(torch.ones(8))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            made = compile(lambda x: (x * 3 - 1).exp())(torch.ones(8))
            status = 0 if torch.allclose(made, torch.full((8,), 2.0).exp()) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_compiled_model_saves_and_loads_like_the_model() -> None:
    model = net("cpu")
    step = compiler("triton")(model)
    (x, y), = batches("cpu", 1)
    step(x, y).backward()
    fresh = Net()
    fresh.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in step.state_dict().items()})
    compare(list(fresh.parameters()), list(model.parameters()))
