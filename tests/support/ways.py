"""How people train and serve: each way is a function that a model goes through, compiled or not.

A way takes ``compile`` (what ``torch.compile`` is to it, or the identity) and a device, does what its name says with seeds
of its own, and returns every tensor that its user would look at: losses, parameters, gradients, buffers.

Worked example::

    compare(accumulation(lambda f: f, "cpu"), accumulation(compiled, "cpu"))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Compile: TypeAlias = Callable[[Any], Any]
Seen: TypeAlias = list[Tensor]
Way: TypeAlias = Callable[[Compile, str], Seen]

WIDTH, BATCH = 24, 6


class Block(nn.Module):
    """Norm, two products with a nonlinearity between, a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks with batch norm behind them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(F.relu(self.norm(x))), labels)


def net(device: str, seed: int = 0) -> Net:
    """The same network every time."""
    torch.manual_seed(seed)
    return Net().to(device)


def batches(device: str, count: int, rows: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels, the same every time."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        inputs = torch.randn(rows, WIDTH, generator=generator)
        yield inputs.to(device), torch.randint(0, 5, (rows,), generator=generator).to(device)


def state(model: nn.Module) -> Seen:
    """Parameters, buffers and gradients."""
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())] + gradients


# ---------------------------------------------------------------------- steps


def accumulation(compile: Compile, device: str) -> Seen:
    """Gradients of several backwards add up, and are zeroed in place."""
    model, seen = net(device), []
    step = compile(model)
    for x, y in batches(device, 3):
        step(x, y).div(3).backward()
    seen += state(model)
    model.zero_grad(set_to_none=False)
    for x, y in batches(device, 2):
        step(x, y).backward()
    return seen + state(model)


def forwards_before_backwards(compile: Compile, device: str) -> Seen:
    """Several forwards, then their backwards in another order."""
    model = net(device)
    step = compile(model)
    losses = [step(x, y) for x, y in batches(device, 3)]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    return [*losses, *state(model)]


def retained_graph(compile: Compile, device: str) -> Seen:
    """A graph that is kept for further backwards."""
    model = net(device)
    step = compile(model)
    (x, y), (other, labels) = batches(device, 2)
    loss = step(x.requires_grad_(), y)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    step(other, labels).backward()
    return [loss, gradient, x.grad, *state(model)]


def reentrant_checkpoint(compile: Compile, device: str) -> Seen:
    """Activation checkpointing that runs the backward inside the backward, around compiled blocks."""
    return _checkpointed(compile, device, use_reentrant=True)


def checkpoint_around(compile: Compile, device: str) -> Seen:
    """Activation checkpointing by saved-tensor hooks, around compiled blocks."""
    return _checkpointed(compile, device, use_reentrant=False)


def _checkpointed(compile: Compile, device: str, use_reentrant: bool) -> Seen:
    model = net(device)
    blocks = [compile(block) for block in model.blocks]
    losses = []
    for x, y in batches(device, 2):
        x = x.requires_grad_()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        losses.append(F.cross_entropy(model.head(x), y))
        losses[-1].backward()
    return [*losses, *state(model)]


def checkpoint_inside(compile: Compile, device: str) -> Seen:
    """Activation checkpointing in what is compiled."""
    model = net(device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(model.head(x), y)

    step = compile(forward)
    losses = []
    for x, y in batches(device, 2):
        losses.append(step(x, y))
        losses[-1].backward()
    return [*losses, *state(model)]


def autocast(compile: Compile, device: str) -> Seen:
    """Mixed precision around what is compiled, with a scaler for the loss."""
    model = net(device)
    step, scaler = compile(model), torch.amp.GradScaler(device, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches(device, 3):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            losses.append(step(x, y))
        scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        scaler.update()
    return [*losses, *state(model)]


def autocast_inside(compile: Compile, device: str) -> Seen:
    """Mixed precision entered in what is compiled, for a part of it."""
    model = net(device)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            x = model.blocks[0](x)
        return F.cross_entropy(model.head(model.blocks[1](x.float())), y)

    step = compile(forward)
    losses = []
    for x, y in batches(device, 2):
        losses.append(step(x, y))
        losses[-1].backward()
    return [*losses, *state(model)]


# ---------------------------------------------------------------------- optimizers


def _optimized(make: Callable[[Any], torch.optim.Optimizer], whole: bool = False) -> Way:
    """Three steps with an optimizer, clipped gradients and a schedule; ``whole`` compiles the optimizer's step too."""

    def way(compile: Compile, device: str) -> Seen:
        model = net(device)
        step, optimizer = compile(model), make(model.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        update = compile(lambda: optimizer.step()) if whole else optimizer.step
        losses = []
        for x, y in batches(device, 3):
            optimizer.zero_grad()
            losses.append(step(x, y))
            losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            update()
            schedule.step()
        return [*losses, *state(model)]

    return way


sgd = _optimized(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01))
# A large epsilon: what batch norm takes away again has gradients that are rounding alone, and Adam divides by their size.
foreach = _optimized(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-2, foreach=True))
fused = _optimized(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-2, fused=True))
compiled_sgd = _optimized(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), whole=True)
compiled_adamw = _optimized(lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-2, foreach=True), whole=True)


# ---------------------------------------------------------------------- around a model


def hooks(compile: Compile, device: str) -> Seen:
    """Hooks of modules, of parameters and of tensors see and change what they would in eager, in whatever order."""
    model, of_bias, of_input = net(device), [], []
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.head.bias.register_post_accumulate_grad_hook(lambda p: of_bias.append(p.grad.clone()))
    step = compile(model)
    for x, y in batches(device, 2):
        x = x.requires_grad_()
        x.register_hook(lambda gradient: of_input.append(gradient.clone()))
        step(x, y).backward()
    return [*of_bias, *of_input, *state(model)]


def moving_average(compile: Compile, device: str) -> Seen:
    """Averaged copies of the weights beside what is trained, evaluated through the same compiled object's kind."""
    model = net(device)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    step, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(device, 2):
        optimizer.zero_grad()
        step(x, y).backward()
        optimizer.step()
        average.update_parameters(model)
    evaluate = compile(average)
    with torch.no_grad():
        losses = [evaluate(x, y) for x, y in batches(device, 1)]
    return [*losses, *state(average), *state(model)]


def deep_copies(compile: Compile, device: str) -> Seen:
    """Copies of a model, made before and after it was compiled, are models of their own."""
    model = net(device)
    step = compile(model)
    (x, y), = batches(device, 1)
    step(x, y).backward()
    twin = copy.deepcopy(model)
    other = compile(twin)
    with torch.no_grad():
        twin.head.weight.mul_(2)
    loss = other(x, y)
    loss.backward()
    whole = copy.deepcopy(step)
    return [loss, whole(x, y), step(x, y), *state(twin), *state(model)]


def state_dicts(compile: Compile, device: str) -> Seen:
    """Weights loaded in place, or assigned, are those that the next call computes with."""
    model, source = net(device), net(device, seed=1)
    step = compile(model)
    (x, y), = batches(device, 1)
    losses = [step(x, y)]
    model.load_state_dict({name: value.clone() for name, value in source.state_dict().items()})
    losses.append(step(x, y))
    again = net(device, seed=2)
    again.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    losses.append(compile(again)(x, y))
    losses[-1].backward()
    return [*losses, *state(again), *state(model)]


def modes_of_grad(compile: Compile, device: str) -> Seen:
    """Inference mode, no_grad and grad in turn, and train and eval, on one object."""
    model, seen = net(device), []
    step = compile(model)
    for training in (True, False, True):
        model.train(training)
        (x, y), = batches(device, 1)
        with torch.inference_mode():
            seen.append(step(x, y).clone())
        with torch.no_grad():
            seen.append(step(x, y))
        seen.append(step(x, y))
        seen[-1].backward()
        with torch.no_grad(), torch.enable_grad():
            step(x, y).backward()
    return [*map(torch.clone, seen), *state(model)]


def frozen_base(compile: Compile, device: str) -> Seen:
    """Low-rank adapters beside frozen weights, then another part frozen."""
    model = net(device)
    down, up = (nn.Parameter(torch.randn(shape, device=device) * 0.1) for shape in ((WIDTH, 3), (3, WIDTH)))
    model.requires_grad_(False)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        return model(model.blocks[0](x) + x @ down @ up, y)

    step = compile(forward)
    (x, y), (other, labels) = batches(device, 2)
    losses = [step(x, y)]
    losses[0].backward()
    model.head.requires_grad_(True)
    down.requires_grad_(False)
    losses.append(step(other, labels))
    losses[1].backward()
    return [*losses, down.grad, up.grad, *state(model)]


def parametrized(compile: Compile, device: str) -> Seen:
    """Weights that are computed from others: weight norm, and one weight in two places."""
    model = net(device)
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)
    model.blocks[1].up.weight = model.blocks[0].down.weight  # not of the same shape, so it is used transposed
    first, second = model.blocks

    def forward(x: Tensor, y: Tensor) -> Tensor:
        x = first(x)
        return F.cross_entropy(model.head(x + F.linear(F.relu(x @ second.up.weight), second.down.weight)), y)

    step = compile(forward)
    losses = []
    for x, y in batches(device, 2):
        losses.append(step(x, y))
        losses[-1].backward()
    return [*losses, *state(model)]


def changing_batches(compile: Compile, device: str) -> Seen:
    """Batch sizes that change from call to call, one row and none among them."""
    model, seen = net(device).eval(), []
    step = compile(model)
    for rows in (6, 4, 9, 1, 2, 6):
        (x, y), = batches(device, 1, rows)
        seen.append(step(x, y))
        seen[-1].backward()
    return [*map(torch.clone, seen), *state(model)]


# ---------------------------------------------------------------------- serving, and shapes that depend on data


def decoding(compile: Compile, device: str) -> Seen:
    """A loop that appends what a model says, with a cache that grows."""
    torch.manual_seed(0)
    embedding, project = nn.Embedding(11, WIDTH, device=device), nn.Linear(WIDTH, 11, device=device)

    def token(last: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        query = embedding(last)
        keys = torch.cat([keys, query[:, None]], 1)
        weights = torch.softmax((keys @ query[..., None]).squeeze(-1) / WIDTH**0.5, -1)
        return project((weights[..., None] * keys).sum(1)).argmax(-1), keys

    step = compile(token)
    tokens, keys = torch.tensor([1, 2], device=device), torch.zeros(2, 0, WIDTH, device=device)
    said = []
    with torch.inference_mode():
        for _ in range(6):
            tokens, keys = step(tokens, keys)
            said.append(tokens.clone())
    return [*said, keys.clone()]


def experts(compile: Compile, device: str) -> Seen:
    """A mixture of experts: which rows an expert gets depends on data."""
    torch.manual_seed(0)
    gate = nn.Linear(WIDTH, 3, device=device)
    parts = nn.ModuleList(Block() for _ in range(3)).to(device)

    def forward(x: Tensor) -> Tensor:
        scores, chosen = gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, part in enumerate(parts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, part(x[rows]) * scores[rows, places, None])
        return out.square().mean()

    step = compile(forward)
    losses = []
    for x, _ in batches(device, 2):
        losses.append(step(x))
        losses[-1].backward()
    return [*losses, *state(gate), *state(parts)]


def exported(compile: Compile, device: str) -> Seen:
    """A module that went through torch.export."""
    model = net(device).eval()
    (x, y), (other, labels) = batches(device, 2)
    step = compile(torch.export.export(model, (x, y)).module())
    with torch.no_grad():
        return [step(x, y), step(other, labels)]


def functional(compile: Compile, device: str) -> Seen:
    """torch.func around and inside what is compiled: other parameters, gradients, a batch of samples."""
    model = net(device).eval()
    (x, y), = batches(device, 1)
    parameters = {name: value.detach() * 0.5 for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None], y[None]))

    called = compile(lambda p, a, b: torch.func.functional_call(model, p, (a, b)))(parameters, x, y)
    per_sample = compile(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0)))(parameters, x, y)
    return [called, *per_sample.values()]


WAYS: tuple[Way, ...] = (
    accumulation, forwards_before_backwards, retained_graph, reentrant_checkpoint, checkpoint_around, checkpoint_inside,
    autocast, autocast_inside, sgd, foreach, fused, compiled_sgd, compiled_adamw, hooks, moving_average, deep_copies,
    state_dicts, modes_of_grad, frozen_base, parametrized, changing_batches, decoding, experts, exported, functional,
)
for _name, _way in [(name, value) for name, value in globals().items() if value in WAYS]:
    _way.__name__ = _name
