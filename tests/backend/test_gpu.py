"""The same numerics natively on a GPU: every case in three dtypes, the small models, several devices, a whole mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.backend.test_channels_last import NETS, check_batch_norm, check_net
from tests.backend.test_models import MODELS, check_model
from tests.backend.test_numerics import masks_agree, parameters
from tests.support.cases import CASES, Case, Maker
from tests.support.differential import check, compiled, regions
from tests.support.graphs import recorded

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.mark.parametrize(("case", "dtype"), parameters(torch.float32, torch.bfloat16, torch.float16))
def test_case(case: Case, dtype: torch.dtype, device: str) -> None:
    arguments = case.build(Maker(device, dtype))
    check(case.function, *arguments, grad=case.grad, precise=case.precise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, dtype: torch.dtype, device: str) -> None:
    check_model(name, dtype, device)


@pytest.mark.parametrize("name", NETS)
def test_channels_last(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):  # setting it fails where torch's own tests were imported
        check_net(name, device, monkeypatch)


def test_batch_norm_in_channels_last(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):
        check_batch_norm(device, monkeypatch)


@pytest.mark.parametrize("shape", [(2048, 4096), (4, 100_003), (16384, 64), (3, 1 << 20)])
def test_large_reductions(shape: tuple[int, int], device: str) -> None:
    x = Maker(device, torch.bfloat16)(*shape)
    check(lambda x: (x.softmax(-1) * 2, x.sum(0), x.float().var(1), x.amax(), F.layer_norm(x, (shape[1],))), x)


def test_more_than_two_to_the_31_elements(device: str) -> None:
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    x = torch.ones((1 << 31) + 256, dtype=torch.int8, device=device)
    y = compiled(lambda x: x * 2 + 1)(x)
    assert y[-1] == 3 and y[1 << 31] == 3 and bool((y[:: 1 << 20] == 3).all())


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_has_one_mask_for_forward_and_backward(probability: float, device: str) -> None:
    masks_agree(probability, torch.randn(512, 1030, device=device).abs().add(0.1).requires_grad_())


def test_scalars_of_the_cpu_and_tensors_of_both(device: str) -> None:
    here, there = torch.randn(7, 130, device=device), torch.randn(7, 130)
    check(lambda a, b, s: (a * s + 1, b.sin() * s, a + b.to(a.device), (a * 2).cpu() + b), here, there, torch.tensor(1.5))


@pytest.mark.parametrize("draw", [
    torch.bernoulli, lambda p: F.dropout(p, 0.3), lambda p: torch.rand_like(p) * p, lambda p: p.clone().normal_(),
    lambda p: torch.randint_like(p, 7), lambda p: p.clone().exponential_(), lambda p: torch.multinomial(p, 3),
], ids=["bernoulli", "dropout", "rand", "normal", "randint", "exponential", "multinomial"])
def test_fallback_random_draws_what_eager_draws(draw: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    check(draw, torch.full((1030,), 0.3, device=device), fallback_random=True, precise=False)


@pytest.mark.parametrize("capture", ["never", "always"])
@pytest.mark.parametrize("start", [0, 2, 3, 4])
def test_dropout_as_in_eager_of_inputs_that_begin_anywhere(start: int, capture: str, device: str) -> None:
    """Eager's draws for as many elements at a time as it can load."""
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, F.dropout(x, 0.4), F.dropout(x.t(), 0.4)

    x = torch.randn(1030, device=device)[start:start + 1024].view(32, 32)
    call = compiled(function, fallback_random=True, capture=capture)
    for _ in range(4):
        torch.manual_seed(3)
        found = call(x)
        torch.manual_seed(3)
        torch.testing.assert_close(found, function(x))


def test_graphs_that_make_all_their_tensors(device: str) -> None:
    graphs = check(lambda: (torch.arange(9, device=device) * 2, torch.ones(9, device=device).cumsum(0) + 1), executors="triton")
    assert regions(graphs) > 0
    check(lambda n: torch.ones(n, device=device) * 2, 5, dynamic=True, executors="triton")


def test_two_devices_in_one_graph() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    a, b = torch.randn(7, 130, device="cuda:0"), torch.randn(7, 130, device="cuda:1")
    check(lambda a, b: (a.softmax(-1), b.exp() + 1, a.to(b.device) * b, b.sum(0).to(a.device) + a), a, b)


def test_the_other_device_of_two() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    check(lambda x: x.softmax(-1) * 2, torch.randn(7, 130, device="cuda:1", requires_grad=True))
    check(lambda x, s: x.softmax(-1) * s, torch.randn(7, 130, device="cuda:1"), torch.tensor(2.5))
    check(lambda x: x.to("cuda:1").softmax(-1) * 2, torch.randn(7, 130, device="cuda:0"))


def test_another_stream(device: str) -> None:
    x = torch.randn(512, 512, device=device)
    call = compiled(lambda x: (x @ x).softmax(-1) * 2)
    expected = (x @ x).softmax(-1) * 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = call(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(found, expected)


def test_captured_in_a_graph_by_the_caller(device: str) -> None:
    x = torch.randn(64, 130, device=device)
    call = compiled(lambda x: x.softmax(-1) * 2 + x.sum(0))
    call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(found, x.softmax(-1) * 2 + x.sum(0))


@pytest.mark.parametrize("name", MODELS)
def test_reduce_overhead_trains_and_replays(name: str, device: str) -> None:
    from torch._inductor.cudagraph_trees import get_manager

    build, make = MODELS[name]
    arguments = tuple(a.to(device) for a in make())
    losses = []
    for compile in (False, True):
        torch.manual_seed(0)
        model = build().to(device).train()
        call = torch.compile(model, backend="dynafuse", mode="reduce-overhead") if compile else model
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        losses.append([])
        for _ in range(6):
            optimizer.zero_grad(set_to_none=True)
            loss = call(*arguments)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    manager = get_manager(0, create_if_none_exists=False)
    assert manager is not None and manager.roots, "nothing was recorded"


def test_misaligned_inputs(device: str) -> None:
    memory = torch.randn(5000, device=device, dtype=torch.bfloat16)
    call = compiled(lambda x: x * 2 + x.float().sum())
    for start in (0, 1, 4, 8):
        x = memory[start:start + 4096]
        torch.testing.assert_close(call(x), x * 2 + x.float().sum())


def test_misaligned_inputs_that_are_overwritten(device: str) -> None:
    memory = torch.randn(5000, device=device, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.float().sum()

    for start in (0, 1, 4, 8):
        ours, eager = (memory.clone()[start:start + 4096] for _ in range(2))
        torch.testing.assert_close(compiled(step)(ours), step(eager))
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("seen", [1, 2, 4, 12])
def test_inputs_that_were_seen_misaligned(seen: int, device: str) -> None:
    """Kernels access as many bytes at once as the first call's input allows; one that begins elsewhere is as right."""
    memory = torch.randn(70_000, device=device, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        return x.softmax(-1), x.float().sum(0), x.t().contiguous() + 1, x.float().sum(), x.relu()

    call = compiled(step)
    for start in (seen, 0, 1, 2, 4, 8):
        ours, eager = (memory.clone()[start:start + 256 * 264].view(256, 264) for _ in range(2))
        torch.testing.assert_close(call(ours), step(eager))
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("width", [13, 20, 26, 32])
def test_saved_slices_of_channels(width: int, device: str) -> None:
    """Slices of channels that lie side by side begin at multiples of 2, 8, 4 and 16 bytes; a convolution has each saved."""
    make = Maker(device, torch.bfloat16)
    image = make(4, 4 * width, 14, 14).to(memory_format=torch.channels_last)
    weights = [make(width, width, 3, 3) / (9 * width) ** 0.5 for _ in range(3)]

    def step(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        first, *others = x.relu().split(width, 1)
        parts = [first.sigmoid()]
        for weight, part in zip(weights, others, strict=True):
            parts.append(F.conv2d(part + parts[-1], weight, padding=1) * part.tanh())
        return torch.cat(parts, 1)

    check(step, image, *weights)


def test_autocast(device: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.layer_norm((x @ w).relu(), (64,)).softmax(-1)

    with recorded() as graphs:
        check(function, torch.randn(32, 64, device=device, requires_grad=True), torch.randn(64, 64, device=device, requires_grad=True), precise=False)
    assert regions(graphs)


def test_every_case_is_here() -> None:
    assert len(CASES) > 150


@pytest.mark.parametrize("training", [True, False])
def test_sizes_that_keep_coming(training: bool, device: str) -> None:
    """What serves any size, what is compiled for one, and recordings of either give the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(module for _ in range(6) for module in (
        torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()))).to(device)
    call = compiled(model, dynamic=True, specialize_after=3)
    for rows in (33, 33, 33, 47, 33, 33, 33, 33, 33, 33, 47, 47, 47, 47, 47, 47, 12):
        x = torch.randn(rows, 64, device=device, requires_grad=training)
        with torch.set_grad_enabled(training):
            ours, expected = call(x), model(x)
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4)
        if training:
            parameters = [x, *model.parameters()]
            found = [torch.autograd.grad(result.square().sum(), parameters) for result in (ours, expected)]
            torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
