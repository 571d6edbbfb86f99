"""Captured graphs beside eager: whatever is held, replaced, mutated or called at once, results are eager's.

On the CPU a fake recorder stands in for CUDA graphs, with their hazards (tests/support/fake_recorder.py).
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.measure import idle_in_pools
from dynafuse import backend, explain
from dynafuse.cost import replay
from dynafuse.cost.replay import Copies
from dynafuse.errors import DynafuseWarning
from dynafuse.runtime.capture import calls, decide, graphs
from dynafuse.runtime.capture.recorder import CudaRecorder
from tests.runtime.conftest import Machine
from tests.support.differential import compiled
from tests.support.fake_recorder import together

STEPS = 7  # of which the first ones warm up


class Block(nn.Module):
    """A small network with a residual connection."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def close(ours: Any, eager: Any) -> None:
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def twins(machine: Machine, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A model and its copy."""
    model = make().to(machine.device)
    return model, copy.deepcopy(model)


def same_parameters(ours: nn.Module, eager: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), eager.parameters(), strict=True):
        close(a, b)
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            close(a.grad, b.grad)
    for a, b in zip(ours.buffers(), eager.buffers(), strict=True):
        close(a, b)


def train_alike(call: Callable[[Tensor], Tensor], ours: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """A step of a compiled model and of its twin gives the same results and gradients."""
    found, expected = call(x), eager(x)
    found.square().mean().backward()
    expected.square().mean().backward()
    close(found, expected)
    same_parameters(ours, eager)


# Inference ------------------------------------------------------------------------------------------------------------


def test_results_that_are_held_stay_as_they_are(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    with torch.no_grad():
        inputs = [machine.randn(3, 16) for _ in range(STEPS)]
        outputs = [call(x) for x in inputs]
        close(outputs, [model(x) for x in inputs])
    assert machine.recordings == 1 and machine.replayed() >= 3, "inputs are read, outputs are held"


def test_inputs_that_stay_where_they_are_are_read_there(machine: Machine) -> None:
    """Until one is elsewhere: from then on inputs are copied, so that no call after that is launched."""
    model = Block().to(machine.device)
    call = machine.compile(model)
    x, others = machine.randn(3, 16), [machine.randn(3, 16) for _ in range(STEPS)]
    with torch.no_grad():
        for _ in range(STEPS):
            close(call(x.normal_()), model(x))
        replayed, (function,) = machine.replayed(), machine.functions
        (slot,) = function.slots.values()
        assert machine.recordings == 1 and replayed >= 3
        assert slot.recording is not None and slot.recording.inputs.bytes == 0
        for other in (*others, x, *others):
            close(call(other), model(other))
        assert (machine.recordings, slot.recording.inputs.bytes) == (2, x.nbytes)
        assert machine.replayed() - replayed == 2 * STEPS - calls.WARM_UPS  # of one call more, the first is launched as well


def test_inputs_that_move_one_after_the_other_are_recorded_once_more(machine: Machine) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.sin() * b.exp() + c

    call = machine.compile(function)
    given = [machine.randn(4, 8) for _ in range(3)]
    for step in range(8 * STEPS):
        if step % STEPS == STEPS - 1:
            given[step // STEPS % 3] = machine.randn(4, 8)
        close(call(*given), function(*given))
    assert machine.recordings == 2


def test_views_are_of_what_they_are_of_in_eager(machine: Machine) -> None:
    """Torch guards the sizes of that where views are given to another graph, which would be compiled anew."""
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        computed = (x + 1).reshape(6, 4)
        return computed.t(), computed[1:].flatten()

    call = machine.compile(function)
    for _ in range(STEPS):
        x = machine.randn(2, 3, 4)
        for ours, eager in zip(call(x), function(x), strict=True):
            close(ours, eager)
            assert ours._base is not None and eager._base is not None and ours._base.shape == eager._base.shape
    assert machine.replayed() >= 3


def test_an_input_that_is_read_in_place_is_not_kept(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    x = machine.randn(3, 16)
    with torch.no_grad():
        for _ in range(STEPS):
            call(x)
    ended = weakref.ref(x.untyped_storage()), weakref.ref(x)
    del x
    gc.collect()
    assert [reference() for reference in ended] == [None, None] and machine.replayed() >= 3


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()[1:]], ids=["whole", "part"])
def test_an_input_that_is_saved_is_copied_once(machine: Machine, view: Callable[[Tensor], Tensor]) -> None:
    """The backward reads what the forward has copied, which nothing that is done to the input changes."""
    weight = machine.randn(24, 24, grad=True)

    def function(x: Tensor) -> Tensor:
        return (view(x) @ weight[: view(x).shape[1]]).sin()

    call = machine.compile(function)
    for _ in range(STEPS):
        x = machine.randn(24, 24)
        expected, = torch.autograd.grad(function(x).sum(), weight)
        gradient, = torch.autograd.grad(call(x).sum(), weight)
        close(gradient, expected)
    (backward,) = {recorded for recorded in machine.functions if recorded.kind == "backward"}
    (slot,) = backward.slots.values()
    assert machine.replayed("backward") >= 3 and slot.recording is not None
    assert slot.recording.inputs.bytes <= 24 * 24 * 4  # the gradient of the result


def test_saved_inputs_of_two_forwards(machine: Machine) -> None:
    weight = machine.randn(8, 8, grad=True)
    call = machine.compile(lambda x: (x @ weight).sin())
    for _ in range(STEPS):
        x, y = machine.randn(8, 8), machine.randn(8, 8)
        ours, = torch.autograd.grad((call(x) * call(y)).sum(), weight)
        expected, = torch.autograd.grad(((x @ weight).sin() * (y @ weight).sin()).sum(), weight)
        close(ours, expected)
    assert machine.replayed("forward") >= 3


def test_memory_that_was_given_back_does_not_stay() -> None:
    """A later storage does not have the number of one that a recording read in place, and that is no more."""
    place = frozenset({0})
    args = [torch.zeros(4)]
    layout = calls.Layout(place, frozenset(), frozenset(), frozenset(), frozenset(), (), (), Copies(), 0)
    inputs, _ = calls.inputs_of(args, layout, place, torch.device("cpu"), torch.zeros)
    number, = (storage.cdata for storage in inputs.storages)
    args.clear()
    later = [torch.zeros(4) for _ in range(64)]
    assert number not in {tensor.untyped_storage()._cdata for tensor in later}


def test_results_are_inputs_of_the_next_call(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    with torch.no_grad():
        ours = eager = machine.randn(3, 16)
        for _ in range(STEPS):
            ours, eager = call(ours), model(eager)
        close(ours, eager)
    assert machine.replayed() >= 3


def test_modes_without_gradients(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    for step in range(3 * STEPS):
        x = machine.randn(3, 16)
        mode = (torch.no_grad, torch.inference_mode, torch.enable_grad)[step % 3]
        with mode():
            ours, eager = call(x), model(x)
        assert ours.is_inference() == eager.is_inference() and ours.requires_grad == eager.requires_grad
        close(ours, eager)
    assert machine.replayed() >= 4 and machine.replayed("forward") >= 2


def test_inputs_in_other_layouts(machine: Machine) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a.sin() * b + c).cumsum(0) + d

    call = machine.compile(function)
    for _ in range(STEPS):
        base = machine.randn(6, 10)
        given = base.t()[1:9], base[:, 2:3].t().expand(8, 6), machine.randn(1).expand(8, 6), machine.randn(16, 6)[::2]
        close(call(*given), function(*given))
    assert machine.replayed() >= 3


def test_inputs_that_share_memory(machine: Machine) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.mul_(2)
        return a + b, b * 3

    call = machine.compile(function)
    for _ in range(STEPS):
        base = machine.randn(8)
        other = base.clone()
        close(call(base[:6], base[2:]), function(other[:6], other[2:]))
        close(base, other)


def test_results_that_share_memory(machine: Machine) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1], y.t(), x.expand(2, *x.shape), x, (x + 1).t()[1:], x[1:]

    call = machine.compile(function)
    for _ in range(STEPS):
        x, other = (lambda x: (x, x.clone()))(machine.randn(3, 4))
        ours, eager = call(x), function(other)
        for found, expected in zip(ours, eager, strict=True):
            assert found.stride() == expected.stride() and found.storage_offset() == expected.storage_offset()
        ours[0].add_(1)
        eager[0].add_(1)
        ours[4].mul_(3)
        eager[4].mul_(3)
        close(ours, eager)
        close(x, other)
    assert machine.replayed() >= 3


def test_views_among_results_are_views_of_what_they_are_in_eager(machine: Machine) -> None:
    """Whichever comes first: a later graph that writes to one looks at the base."""
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, x * 3
        return y.unsqueeze(0), y, z, z.t()

    call = machine.compile(function)
    for _ in range(2 * STEPS):  # inputs may be elsewhere, for which it is recorded anew
        view, base, other_base, other_view = call(machine.randn(3, 4))
        assert base._base is None and view._base is base
        assert other_base._base is None and other_view._base is other_base
    assert machine.replayed() >= 3


def test_a_result_that_shares_memory_with_what_is_saved(machine: Machine) -> None:
    """Writing to it is the error that it is in eager, and no wrong gradient."""
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.detach().t(), y.sum()

    call = machine.compile(function)
    for step in range(STEPS):
        x = machine.randn(3, 4, grad=True)
        detached, total = call(x)
        if step % 2:
            detached.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                total.backward()
        else:
            total.backward()
            close(x.grad, x.exp())
    assert machine.replayed("forward") >= 3


def test_odd_results(machine: Machine) -> None:
    def function(x: Tensor, n: int) -> tuple[Any, ...]:
        return None, x.argmax(-1), n, x > 0, x[:0] + 1, x.shape[0], x.sum(), x.to(torch.float64), "text"

    call = machine.compile(function)
    for _ in range(STEPS):
        x = machine.randn(3, 4)
        ours = call(x, 5)
        assert ours[0] is None and ours[2] == 5 and ours[8] == "text"
        close(ours[1], function(x, 5)[1])
        for found, expected in zip(ours[3:8], function(x, 5)[3:8], strict=True):
            close(found, expected)
    assert machine.replayed() >= 3


def test_gradients_without_memory(machine: Machine) -> None:
    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.scale = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sgn(self.factor) * self.scale  # autograd's zeros for the factor have no address

    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(inputs[0])
        out.square().sum().backward()
        return out

    train(machine, Signs, step)
    assert machine.replayed("backward") >= 2


def test_an_empty_result_that_begins_behind_its_memory(machine: Machine) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y[:, 3:], y[:, -1:-1]

    call = machine.compile(function)
    for _ in range(STEPS):
        x = machine.randn(2, 3)
        close(call(x), function(x))
    assert machine.replayed()


def test_empty_inputs(machine: Machine) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x * 2, y.sin()])

    call = machine.compile(function)
    for _ in range(STEPS):
        x, y = machine.randn(0, 4), machine.randn(3, 4)
        close(call(x, y), function(x, y))
    assert machine.replayed() >= 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_changing_sizes(machine: Machine, dynamic: bool) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model, dynamic=dynamic)
    with torch.no_grad():
        for step in range(24):
            x = machine.randn(2 + step % 3, 16)
            close(call(x), model(x))
    assert machine.recordings == 3 and machine.replayed() >= 9


def test_more_sizes_than_are_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_SIZES", 2)
    call = machine.compile(torch.sin, dynamic=True)
    for step in range(24):
        x = machine.randn(2 + step % 4)
        close(call(x), x.sin())
    assert machine.recordings == 2


# Writes ---------------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Statistics, a counter and a cache, all of them buffers."""

    cache: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(3, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        self.cache.copy_(self.cache.roll(1, 0))
        self.cache[0] = x.mean(0)
        out: Tensor = self.norm(x) + self.cache.sum(0)
        return out


@pytest.mark.parametrize("train", [False, True])
def test_buffers_are_written(machine: Machine, train: bool) -> None:
    ours, eager = twins(machine, Counting)
    call = machine.compile(ours)
    for _ in range(STEPS):
        x = machine.randn(5, 4)
        with torch.set_grad_enabled(train):
            found, expected = call(x), eager(x)
        close(found, expected)
        if train:
            found.square().sum().backward()
            expected.square().sum().backward()
        same_parameters(ours, eager)
    assert machine.replayed("forward" if train else "inference") >= 3


def test_inputs_are_written(machine: Machine) -> None:
    def function(x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(x)
        return state.tanh()

    call = machine.compile(function)
    kept, other = (lambda x: (x, x.clone()))(machine.randn(4))
    for step in range(4 * STEPS):
        x = machine.randn(4)
        if step % STEPS == STEPS - 1:  # elsewhere, once in a while
            kept = kept.clone()
        close(call(x, kept), function(x, other))
        close(kept, other)
    assert machine.replayed() >= 3


# Training -------------------------------------------------------------------------------------------------------------


def train(machine: Machine, make: Callable[[], nn.Module], step: Callable[[Any, nn.Module, list[Tensor]], Any],
          steps: int = STEPS, **options: Any) -> None:
    """Take steps with a compiled model and its twin, and compare what each returns, and all parameters."""
    ours, eager = twins(machine, make)
    call, results = machine.compile(ours, **options), []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9) for model in (ours, eager)]
    for _ in range(steps):
        inputs = [machine.randn(5, 16) for _ in range(3)]
        others = [x.clone() for x in inputs]
        results.append((step(call, ours, inputs), step(eager, eager, others)))
        same_parameters(ours, eager)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close([found for found, _ in results], [expected for _, expected in results])


def test_training(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(inputs[0])
        out.square().mean().backward()
        return out

    train(machine, Block, step)
    assert machine.recordings == 2 and machine.replayed("forward") >= 3 and machine.replayed("backward") >= 2
    assert machine.taken >= 3, "what was normalized, and both activations"


def test_several_forwards_before_the_backwards(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        outs = [call(x) for x in inputs]
        for out in (outs[1], outs[0], outs[2]):
            out.square().mean().backward()
        return outs

    train(machine, Block, step, steps=3 * STEPS)
    assert machine.replayed("forward") >= 3


def test_a_module_that_is_called_twice(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(call(inputs[0]).tanh())
        out.square().mean().backward()
        return out

    train(machine, Block, step, steps=2 * STEPS)


def test_a_retained_graph(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        x = inputs[0].requires_grad_()
        out = call(x)
        first = torch.autograd.grad(out.sum(), [x, *model.parameters()], retain_graph=True)
        again = call(inputs[1])
        out.square().mean().backward(retain_graph=True)
        out.sum().backward()
        return out, again, first, x.grad

    train(machine, Block, step, steps=2 * STEPS)
    assert machine.taken and machine.replayed("forward") >= 2 and machine.replayed("backward") >= 4


def test_graphs_that_are_always_retained(machine: Machine) -> None:
    """A backward that may never leave nothing of what was saved is recorded so that it does not."""
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(inputs[0])
        out.square().mean().backward(retain_graph=True)
        return out.detach()

    train(machine, Block, step, steps=3 * STEPS)
    assert machine.recordings == 3 and machine.replayed("forward") >= STEPS and machine.replayed("backward") >= 4


def test_saved_tensors_outlive_their_recording(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    for _ in range(STEPS):
        train_alike(call, ours, eager, machine.randn(5, 16))
    x = machine.randn(5, 16)
    out, expected = call(x), eager(x)
    assert machine.taken and machine.replayed("backward")
    for function in machine.functions:
        function.slots.clear()
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()
    others = [machine.randn(size, 16) for size in range(1, 200)]  # what takes freed memory
    out.square().mean().backward()
    expected.square().mean().backward()
    same_parameters(ours, eager)
    assert len(others) == 199


def peak(model: nn.Module, x: Tensor, capture: str) -> int:
    """The most bytes that are allocated in a step, with what recordings keep."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = compiled(model, capture=capture, executors="triton", dynamic=False, fullgraph=True)
    for _ in range(STEPS):
        call(x).square().mean().backward()
        model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call(x).square().mean().backward()
    model.zero_grad()
    return torch.cuda.max_memory_allocated() + idle_in_pools(torch.cuda.memory_snapshot())


@pytest.mark.gpu
def test_a_backward_takes_the_memory_of_what_was_saved() -> None:
    """A recorded step needs little more memory than one that is launched: copies of the gradients."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.1))]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(16384, 256).cuda()
    launched, replayed = peak(model, x, "never"), peak(model, x, "always")
    copies = 16384 * 256 * 4 + 6 * 256 * 257 * 4  # of the result and of the gradients
    assert replayed < 1.15 * launched + 2 * copies, f"{replayed / 1e6:.0f} MB instead of {launched / 1e6:.0f}"


@pytest.mark.gpu
def test_a_recording_leaves_few_gaps() -> None:
    """Tensors of many sizes lie in one piece of memory: each in one of its own would leave a third of it unused."""
    widths = [700 + 37 * (7 * k % 19) for k in range(20)]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(2048, widths[0]).cuda()
    launched, replayed = peak(model, x, "never"), peak(model, x, "always")
    copies = sum(p.nbytes for p in model.parameters())  # of the gradients
    assert replayed < 1.1 * launched + copies, f"{replayed / 1e6:.0f} MB instead of {launched / 1e6:.0f}"


@pytest.mark.gpu
def test_a_recorded_backward_writes_over_what_was_saved() -> None:
    """The gradient of logits takes their place: they are not there twice."""
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 16384)

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), torch.arange(4096, device=x.device))

    model, x = Loss().cuda(), torch.randn(4096, 64).cuda()
    launched, replayed = peak(model, x, "never"), peak(model, x, "always")
    assert replayed < launched + 4096 * 16384 * 4 / 4, f"{replayed / 1e6:.0f} MB instead of {launched / 1e6:.0f}"


def test_accumulated_gradients(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        return [call(x).square().mean().backward() for x in inputs] and [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]

    train(machine, Block, step)
    assert machine.replayed("backward") >= 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_call(machine: Machine, reentrant: bool) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        x = inputs[0].requires_grad_()
        out = checkpoint(call, checkpoint(call, x, use_reentrant=reentrant), use_reentrant=reentrant)
        out.square().mean().backward()
        return out, x.grad

    train(machine, Block, step, steps=2 * STEPS)


def test_a_checkpoint_inside(machine: Machine) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out * 2

    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        call(inputs[0]).square().mean().backward()

    train(machine, Outer, step)
    assert machine.replayed("backward") >= 2


def test_hooks_on_saved_tensors(machine: Machine) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor, tensor.detach().clone()))
        return tensor

    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = call(inputs[0])
        out.square().mean().backward()
        for tensor, before in kept:
            if not isinstance(tensor, nn.Parameter):
                assert torch.equal(tensor.detach(), before), "a saved tensor that is held was overwritten"
        kept[:] = [pair for pair in kept if not any(pair[0].data_ptr() == p.data_ptr() for p in model.parameters())]

    train(machine, Block, step)
    assert machine.replayed("forward") >= 3


def test_saved_tensors_that_are_held(machine: Machine) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(inputs[0])
        places = {p.data_ptr() for p in model.parameters()}
        saved = [t for t in getattr(out.grad_fn, "saved_tensors", ()) if t is not None and t.data_ptr() not in places]
        kept.extend((t, t.detach().clone()) for t in saved if call is not model)
        out.square().mean().backward()
        assert all(torch.equal(tensor, before) for tensor, before in kept)

    train(machine, Block, step, steps=2 * STEPS)


def test_inference_between_training_steps(machine: Machine) -> None:
    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out = call(inputs[0])
        with torch.no_grad():
            checked = call(inputs[1])
        out.square().mean().backward()
        return out, checked

    train(machine, Block, step)
    assert machine.replayed() >= 3 and machine.replayed("forward") >= 3


def test_parameters_that_are_replaced(machine: Machine) -> None:
    ours, eager = twins(machine, Block)
    call = machine.compile(ours)
    for step in range(6 * STEPS):
        x = machine.randn(5, 16)
        train_alike(call, ours, eager, x)
        if step % STEPS == STEPS - 1:
            for model in (ours, eager):
                for p in model.parameters():
                    with torch.no_grad():
                        p.data = p.data.clone() + 0.01
        elif step % STEPS == 2:
            for model in (ours, eager):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.9)
    assert machine.replayed("forward") >= 6


def test_layers_that_share_their_code(machine: Machine) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    ours, eager = twins(machine, Stack)
    for layer in ours.layers:  # type: ignore[union-attr]
        layer.compile(backend=backend.dynafuse, options={"capture": "always", "executors": "triton"}, dynamic=False)
    for _ in range(STEPS):
        x = machine.randn(5, 16)
        train_alike(ours, ours, eager, x)
    assert machine.recordings == 6 and machine.replayed("forward") >= 9 and machine.replayed("backward") >= 6


def test_unused_and_integer_inputs(machine: Machine) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = nn.Embedding(7, 16), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            index = (x.abs() * 3).long().clamp(max=6)[:, 0]
            out: Tensor = self.table(index) * x
            return out, index

    def step(call: Any, model: nn.Module, inputs: list[Tensor]) -> Any:
        out, index = call(inputs[0])
        out.square().mean().backward()
        return out, index

    train(machine, Embedded, step)
    assert machine.replayed("forward") >= 3


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fallback", [False, True])
def test_random_numbers_are_those_of_launches(machine: Machine, fallback: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x.exp(), 0.5) * torch.rand_like(x)

    def drawn(capture: str) -> list[Tensor]:
        torch._dynamo.reset()
        call = machine.compile(function, capture=capture, fallback_random=fallback)
        results = []
        torch.manual_seed(5)
        for step in range(2 * STEPS):
            x = torch.ones(40, device=machine.device, requires_grad=True)
            out = call(x)
            out.sum().backward()
            with torch.no_grad():
                results += [out, x.grad, call(x), torch.rand(3, device=machine.device)]
            if step == STEPS:
                torch.manual_seed(6)
        return results

    for ours, launched in zip(drawn("always"), drawn("never"), strict=True):
        assert torch.equal(ours, launched)
    assert machine.replayed("forward") >= 3 and machine.replayed() >= 3 and machine.replayed("backward") >= 3


# Threads, other captures, failures --------------------------------------------------------------------------------------


def test_threads(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    x = machine.randn(3, 16)
    with torch.no_grad():
        call(x)
    inputs = [[machine.randn(3, 16) for _ in range(3 * STEPS)] for _ in range(2)]
    found: list[list[Tensor]] = [[], []]

    def work(number: int) -> None:
        with torch.no_grad():
            found[number] += [call(x) for x in inputs[number]]

    together(lambda: work(0), lambda: work(1))
    for ours, given in zip(found, inputs, strict=True):
        close(ours, [model(x).detach() for x in given])
    assert machine.replayed() >= 3


def test_a_thread_does_not_record_its_first_call(machine: Machine) -> None:
    """Libraries make a handle for it in that call, which the device does not allow during a capture."""
    model = Block().to(machine.device)
    call = machine.compile(model)

    def work() -> None:
        with torch.no_grad():
            close(call(x := machine.randn(3, 16)), model(x))

    for _ in range(calls.WARM_UPS):
        work()

    def first_and_second() -> None:
        work()
        assert machine.recordings == 0
        work()

    together(first_and_second)
    assert machine.recordings == 1 and machine.replayed() == 1


def test_a_recording_that_is_in_use_is_left_alone(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    with torch.no_grad():
        for _ in range(STEPS):
            call(x := machine.randn(3, 16))
        replays = machine.replayed()
        recording = list(calls._STAYING.values())[-1]  # others may be left of other tests
        with recording.pool.lock:
            close(call(x), model(x))
        assert machine.replayed() == replays
        close(call(x), model(x))
        assert machine.replayed() == replays + 1


def test_another_capture(machine: Machine) -> None:
    model = Block().to(machine.device)
    call = machine.compile(model)
    x = machine.randn(3, 16)
    with torch.no_grad():
        for _ in range(STEPS):
            call(machine.randn(3, 16))
        replays = machine.replayed()
        if machine.fake is not None:
            machine.fake.capturing = True
            found = call(x)
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = call(x)
            x.copy_(machine.randn(3, 16))
            graph.replay()
        close(found, model(x))
    assert machine.replayed() == replays


def test_a_recording_that_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, *args: Any) -> Any:
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(calls.Captured, "_record", fails)
    model = Block().to(machine.device)
    x = machine.randn(3, 16)
    with torch.no_grad():
        call = machine.compile(model, strict=False)
        with pytest.warns(DynafuseWarning, match="launched kernel by kernel") as told:
            for _ in range(STEPS):
                close(call(x), model(x))
        assert len(told) == 1
        torch._dynamo.reset()
        call = machine.compile(model, strict=True)
        with pytest.raises(RuntimeError, match="cannot be captured"):
            for _ in range(STEPS):
                call(x)
    assert machine.replayed() == 0


@pytest.mark.gpu
def test_a_capture_that_the_device_ends_leaves_nothing_behind() -> None:
    recorder = CudaRecorder(0)
    stream = recorder.stream()
    assert stream is not None
    x = torch.arange(8.0, device="cuda")

    def waits(args: list[Any]) -> Any:
        args.clear()
        y = torch.rand(8, device="cuda")
        torch.cuda.synchronize()
        return [y]

    with pytest.raises(RuntimeError):
        recorder.record(waits, [x], recorder.pool(stream, shared=True))
    torch.manual_seed(3)
    first, second = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    torch.manual_seed(3)
    recorded = recorder.record(lambda args: [args.pop() + torch.rand(8, device="cuda")], [x], recorder.pool(stream, shared=True))
    for expected in (first, second):
        recorded.replay()
        torch.testing.assert_close(recorded.outputs[0] - x, expected, atol=1e-6, rtol=0)
    held = torch.empty(1 << 24, device="cuda")
    other = torch.cuda.Stream()
    held.record_stream(other)
    del held
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(8):  # what other streams used is only given again while the allocator knows of no capture
        again = torch.empty(1 << 24, device="cuda")
        again.record_stream(other)
        del again
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + (1 << 26)


@pytest.mark.gpu
@pytest.mark.parametrize("product", [torch.mm, lambda x, y: torch.addmm(y[0], x, y)], ids=["mm", "addmm"])
def test_replays_of_a_stream_share_one_workspace_which_nothing_else_is_given(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    recorder = CudaRecorder(0)
    stream = recorder.stream()
    assert stream is not None
    x, y = torch.randn(2, 512, 512, device="cuda")
    expected = product(x, y)
    pools = [recorder.pool(stream, shared=False) for _ in range(4)]
    recorded, reserved = [], []
    for pool in pools:
        recorded.append(recorder.record(lambda args: [product(x, y)], [], pool))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved) - reserved[0] <= 4 * 2 * 1024**2  # what a result of 1 MB reserves in a pool
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(256)]
    for one in recorded:
        one.replay()
        torch.testing.assert_close(one.outputs[0], expected)
    assert all(bool((other == 7).all()) for other in others)
    one = pool = others = recorded = pools = []  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved[0]


def test_floats_that_change_are_sent_before_a_replay(machine: Machine) -> None:
    """Dynamo traces them as numbers in tensors on the host."""
    def compute(x: Tensor, scale: float, shift: float) -> Tensor:
        return torch.softmax(x * scale + shift, -1) @ x.t() @ x

    call = machine.compile(compute, dynamic=True)
    with torch.no_grad():
        for step in range(1, 2 * STEPS):
            x = machine.randn(6, 6)
            close(call(x, 0.5 * step, 1 / step), compute(x, 0.5 * step, 1 / step))
    assert machine.replayed() > 0


# What is not captured -------------------------------------------------------------------------------------------------


@torch.library.custom_op("dynafuse_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    COUNTS.append(1)
    return x * 2


@counted.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


COUNTS: list[int] = []
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "custom op": (lambda x: counted(x) + 1, "may do more than launch kernels"),
    "as_strided": (lambda x: x.as_strided((2,), (1,), 1) * 2, "looks around in an input's memory"),
    "counts": (lambda x: torch.bincount((x > 0).flatten().long(), minlength=2) * 2, "asks the device how large its result is"),
    "index by a mask": (lambda x: x[x > 0] * 2, "asks the device how large its result is"),
    "dropout as in eager": (
        lambda x: F.dropout(x, 0.5) * 2, "draws random numbers by where an input begins"),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5),
        "draws random numbers of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_what_is_refused(machine: Machine, name: str) -> None:
    if name == "attention with dropout" and machine.device == "cpu":
        pytest.skip("is taken apart on the CPU")
    function, reason = REFUSED[name]
    call = machine.compile(function, fallback_random=name == "dropout as in eager")
    COUNTS.clear()
    for _ in range(STEPS):
        x = machine.randn(8, 16)
        found = call(x)
        if "dropout" not in name:
            close(found, function(x))
    assert machine.replayed() == 0
    assert any(reason in text and "not captured" in text for text in machine.captures), machine.captures
    if name == "custom op":
        assert len(COUNTS) >= 2 * STEPS


def test_an_index_by_positions_is_captured(machine: Machine) -> None:
    """It has the tag of ops that ask the device for a size, because an index by a mask does."""
    table = machine.randn(9, 8)

    def function(x: Tensor, positions: Tensor) -> Tensor:
        return x @ table[positions] + 1

    call = machine.compile(function, capture="always")
    for _ in range(STEPS):
        x, positions = machine.randn(4, 3), torch.randint(9, (3,), device=machine.device)
        close(call(x, positions), function(x, positions))
    assert machine.replayed() >= 3


@pytest.mark.parametrize("may_be_twice", [False, True])
def test_a_backward_whose_forward_is_launched_keeps_no_large_copies(
        machine: Machine, monkeypatch: pytest.MonkeyPatch, may_be_twice: bool) -> None:
    """What the forward has saved would be in memory twice."""
    monkeypatch.setattr(decide, "MOST_TWICE", 4 * 64 * 64 * (4 if may_be_twice else 1))

    def function(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.exp(x.sin() + counted(x.detach())) @ x)

    call = machine.compile(function, capture="auto")
    x = machine.randn(64, 64, grad=True)
    found = torch.autograd.grad(call(x).sum(), x)
    close(found, torch.autograd.grad(function(x).sum(), x))
    launched = [why for why in machine.captures if "may do more than launch kernels" in why]
    (backward,) = (why for why in machine.captures if why not in launched)  # whichever is compiled first
    assert len(launched) == 1
    assert ("would be in memory twice" in backward) is not may_be_twice, backward


def test_a_tensor_of_another_device_is_refused() -> None:
    said: list[str] = []
    with backend.listening(lambda graph: said.append(graph.capture), plan_only=False):
        for mode in ("always", "auto", "never"):
            compiled(lambda x: x.sin(), capture=mode, executors="triton")(torch.randn(4))
    assert said == ["not captured: nothing is captured on cpu", "", ""]


def test_whether_a_graph_is_captured_is_decided_by_the_plan_that_would_be() -> None:
    """A plan that spares the host launches takes the device longer: as a replay it saves nothing, another one does."""
    def normalized(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(12):
            x = ((x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5) @ w).relu()
        return x

    def planned(capture: str) -> Any:
        arguments = torch.randn(8192, 192, dtype=torch.bfloat16), torch.randn(192, 192, dtype=torch.bfloat16)
        (graph,) = explain(normalized, *arguments, device="h200", options={"executors": "triton", "capture": capture}).graphs
        return graph

    launched, captured = planned("never"), planned("auto")
    assert captured.capture.startswith("captured as a CUDA graph, saves")
    assert [step.ops for step in captured.steps] == [step.ops for step in planned("always").steps]
    assert len(launched.steps) < len(captured.steps)
    assert sum(s.predicted_us for s in launched.steps) > 1.5 * sum(s.predicted_us for s in captured.steps)


def test_a_graph_that_does_not_pay_is_not_captured(machine: Machine) -> None:
    call = machine.compile(torch.sin, capture="auto")
    for _ in range(STEPS):
        close(call(x := machine.randn(4)), x.sin())
    assert machine.recordings == 0 and "it does not pay" in machine.captures[0]


@pytest.mark.parametrize("slow", [True, False])
def test_the_clock_of_the_host_decides_what_predictions_leave_open(
        machine: Machine, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    monkeypatch.setattr(replay.Saving, "pays", property(lambda self: False))
    monkeypatch.setattr(replay.Saving, "least_host_us", property(lambda self: 1e-3 if slow else 1e9))
    monkeypatch.setattr(replay.Saving, "is_open", property(lambda self: True))
    model, eager = twins(machine, Block)
    call = machine.compile(model, capture="auto")
    for _ in range(2 * STEPS):
        train_alike(call, model, eager, machine.randn(3, 16, grad=True))
    assert all("once its calls take the host" in why for why in machine.captures)
    assert machine.recordings == (2 if slow else 0)
    assert bool(machine.replayed("forward") and machine.replayed("backward")) == slow


@pytest.mark.parametrize(("busy_from", "recordings"), [(1, 2), (10, 2), (23, 2), (27, 0)])
def test_the_clock_is_asked_again_but_not_for_ever(
        machine: Machine, monkeypatch: pytest.MonkeyPatch, busy_from: int, recordings: int) -> None:
    """With five calls that are timed: calls 6, 15, and 26 are recorded if those before them took long."""
    monkeypatch.setattr(replay.Saving, "pays", property(lambda self: False))
    monkeypatch.setattr(replay.Saving, "least_host_us", property(lambda self: 100.0))
    monkeypatch.setattr(replay.Saving, "is_open", property(lambda self: True))
    monkeypatch.setattr(calls, "ASKED_AGAIN", (3, 5))
    timed, steps = calls.Captured._timed, itertools.count(1)

    def timed_by_the_test(self: calls.Captured, slot: calls.Slot, *call: Any) -> Any:
        results = timed(self, slot, *call)
        slot.host_us = 1e6 if step >= busy_from else 1.0
        return results

    monkeypatch.setattr(calls.Captured, "_timed", timed_by_the_test)
    model, eager = twins(machine, Block)
    call = machine.compile(model, capture="auto")
    while (step := next(steps)) <= 40:
        train_alike(call, model, eager, machine.randn(3, 16, grad=True))
    assert machine.recordings == recordings


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_are_recorded_for_the_clock_alone_only_where_they_are_one(
        machine: Machine, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    """Each of several would keep memory for itself."""
    monkeypatch.setattr(replay.Saving, "pays", property(lambda self: False))
    monkeypatch.setattr(replay.Saving, "least_host_us", property(lambda self: 1e-3))
    monkeypatch.setattr(replay.Saving, "is_open", property(lambda self: True))
    model, eager = twins(machine, lambda: nn.Sequential(*(Block() for _ in range(layers))))
    for block in model:
        block.forward = machine.compile(block.forward, capture="auto")
    for _ in range(2 * STEPS):
        train_alike(model, model, eager, machine.randn(3, 16, grad=True))
    assert machine.recordings == (2 if layers == 1 else 0)


def test_a_backward_is_not_recorded_by_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would copy all that it is handed."""
    is_worth_it = calls.Captured._is_worth_it
    monkeypatch.setattr(calls.Captured, "_is_worth_it", lambda self, slot, args: (
        self.kind != "forward" and is_worth_it(self, slot, args)))
    monkeypatch.setattr(replay.Saving, "pays", property(lambda self: True))
    model, eager = twins(machine, Block)
    call = machine.compile(model, capture="auto")
    for _ in range(3 * STEPS):
        train_alike(call, model, eager, machine.randn(3, 16, grad=True))
    assert machine.recordings == 0


def test_a_backward_that_takes_much_more_than_it_copies_is_recorded_with_its_forward(
        machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncaptured it would leave the memory of what was saved unused."""
    decided = graphs.verdict

    def verdict(price: Any, layout: Any, *args: Any, **named: Any) -> Any:
        monkeypatch.setattr(replay.Saving, "pays", property(lambda self: not layout.handed))
        monkeypatch.setattr(replay.Saving, "is_open", property(lambda self: False))
        return decided(price, layout, *args, **named)

    class Mean(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :16]).square().mean()

    monkeypatch.setattr(graphs, "verdict", verdict)
    for width, recordings in ((16, 2), (2048, 1)):  # the gradient of a wide input is larger than what was saved
        machine.recordings = 0
        model, eager = twins(machine, Mean)
        call = machine.compile(model, capture="auto")
        for _ in range(2 * STEPS):
            train_alike(call, model, eager, machine.randn(64, width, grad=width > 16))
        assert machine.recordings == recordings, machine.captures


def test_recordings_keep_a_part_of_the_memory_at_most(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Block().to(machine.device), Block().to(machine.device)
    first, second = machine.compile(model), machine.compile(other)

    def run() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                x = machine.randn(3, 16)
                close([first(x), second(x)], [model(x), other(x)])

    with monkeypatch.context() as patch:
        memory = machine.fake.memory if machine.fake else torch.cuda.get_device_properties(0).total_memory
        patch.setattr(calls, "MOST_KEPT", 100 / memory)  # less than an input and an output
        run()
    assert machine.recordings == 0
    run()
    assert machine.recordings == 2
    assert calls.kept_bytes(machine.randn(1).device) >= 4 * 3 * 16 * 4, "an input and an output of either"


def test_pooling_is_captured(machine: Machine) -> None:
    model, eager = twins(machine, lambda: nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)))
    call = machine.compile(model)
    for _ in range(STEPS):
        train_alike(call, model, eager, machine.randn(2, 1, 8, 8, grad=True))
    assert machine.replayed("forward") and machine.replayed("backward")


def test_a_graph_of_many_launches_is_captured(machine: Machine) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(40):
            x = (x @ w).tanh()
        return x

    call = machine.compile(function, capture="auto", device="h200")
    for _ in range(STEPS):
        x, w = machine.randn(4, 4), machine.randn(4, 4)
        close(call(x, w), function(x, w))
    assert machine.recordings == 1 and "saves about" in machine.captures[0]
