"""Statements that compute by more than a row: casts, masks, normalizations, products of matrices, random numbers, new tensors."""

from __future__ import annotations

import torch

from tests.fuzz.grammar import maker, proposed
from tests.fuzz.state import State, any_dtype

DRAWN = (
    "torch.rand_like({0})", "torch.randn_like({0})", "F.dropout({0}, 0.4)", "torch.bernoulli(torch.full_like({0}, 0.3))",
    "torch.randint_like({0}, 5)", "torch.rand({0}.shape, device={0}.device)", "torch.randint(0, 7, {0}.shape, device={0}.device)",
    "{0} * F.dropout(torch.ones_like({0}), 0.3)",
)


@maker(5)
def cast(state: State) -> bool:
    """A cast that the user writes, there or there and back."""
    name = state.pick()
    if name is None:
        return False
    dtype = any_dtype(state.rng)
    wanted = getattr(torch, dtype)
    if state.dtype(name).is_floating_point and not wanted.is_floating_point and wanted is not torch.bool:
        low = 0 if wanted is torch.uint8 else -100
        if not all(_between(value, low, 100) for value in state.values(name)):
            return False  # undefined, and different between machines
    text = f"{name}.to(torch.{dtype})"
    if state.dtype(name).is_floating_point and wanted.is_floating_point and state.rng.random() < 0.3:
        text += f".to({name}.dtype)"
    return proposed(state, text)


def _between(value: torch.Tensor, low: float, high: float) -> bool:
    value = value.detach()  # autograd refuses to look at views that were overtaken by a write
    return value.numel() == 0 or bool(value.isfinite().all() and low <= value.min() and value.max() <= high)


@maker(4)
def masked(state: State) -> bool:
    """Choices by a mask, by positions, or by a comparison."""
    name = state.pick()
    if name is None:
        return False
    rng = state.rng
    other = state.partner(name) or name
    made = [f"torch.where({name} > 0, {name}, {other})", f"{name}.masked_fill({name} < 0, {rng.choice((0, 1, -2))})",
            f"torch.where({other} == {other}, {other}, 1)", f"torch.maximum({name}, {other}) - {other}",
            f"{name}.clamp(min={rng.choice((-1, 0, 0.5))})", f"({name} != 0) & ({other} > 0)", f"{name}.nan_to_num(0.5)"]
    if state.rank(name) >= 2:
        made.append(f"{name}.masked_fill(torch.ones_like({name}, dtype=torch.bool).triu(1), {rng.choice((0, -1000.0))})")
    if state.rank(name) >= 1:
        made.append(f"torch.where(torch.arange({name}.shape[-1], device={name}.device) < {rng.randint(0, 5)}, {name}, {other})")
    return proposed(state, rng.choice(made))


@maker(5)
def normalized(state: State) -> bool:
    """What models are full of, over a float value.

    Norms count dimensions from the front: up to torch 2.11 tracing keeps one of size 1 that is counted from the end.
    """
    name = state.pick(lambda t: t.is_floating_point() and t.dim() > 0 and t.numel() > 0)
    if name is None:
        return False
    dim = state.rng.randrange(-state.rank(name), 0)
    made = [
        f"F.softmax({name}, {dim})", f"F.log_softmax({name}, {dim})", f"torch.logsumexp({name}, {dim})",
        f"F.layer_norm({name}, {name}.shape[-1:])", f"F.normalize({name}, dim={dim})", f"torch.linalg.vector_norm({name}, dim={dim + state.rank(name)})",
        f"{name} * torch.rsqrt({name}.square().mean({dim}, keepdim=True) + 1e-5)",
        f"({name} - {name}.mean({dim}, keepdim=True)) / ({name}.std({dim}, keepdim=True, correction=0) + 0.1)",
        f"{name}.max({dim}).values", f"{name}.min({dim}, keepdim=True)[0]", f"torch.cumsum({name}, {dim})",
        f"{name}.sort({dim}).values", f"{name}.sum({dim}, keepdim=True) * {name}", f"{name}.softmax({dim}).to(torch.float32)",
        f"{name} - {name}.amax({dim}, keepdim=True)", f"F.gelu({name}.clamp(-1e4, 1e4)) * {name}.sigmoid()", f"F.silu({name})",
        f"torch.std_mean({name}, {dim})[1]", f"{name}.logsumexp({dim}, keepdim=True) - {name}", f"{name}.var({dim}, correction=0)",
        f"{name}.topk(1, {dim}).values", f"F.smooth_l1_loss({name}, {name}.flip({dim}))", f"F.mse_loss({name}, {name}.roll(1, {dim}))",
    ]
    if state.rank(name) == 3:
        made += [f"F.interpolate({name}, scale_factor=2)", f"F.avg_pool1d({name}, 2)", f"F.instance_norm({name})"]
    if state.rank(name) == 4:
        made += [f"F.interpolate({name}, scale_factor=2)", f"F.avg_pool2d({name}, 2)", f"F.max_pool2d({name}, 2)",
                 f"F.adaptive_avg_pool2d({name}, 1)", f"F.adaptive_avg_pool2d({name}, {state.rng.randint(1, 4)})",
                 f"F.instance_norm({name})", f"F.interpolate({name}, scale_factor=2, mode='bilinear')",
                 f"F.batch_norm({name}, None, None, training=True)"]
    return proposed(state, state.rng.choice(made))


@maker(1.5)
def gathered(state: State) -> bool:
    """A reduction of all of what rows, or other parts, were reduced for."""
    name = state.pick(lambda t: t.is_floating_point() and t.dim() > 1 and t.numel() > 0)
    if name is None:
        return False
    dim = state.rng.randrange(-state.rank(name), 0)
    made = (f"F.log_softmax({name}, {dim})", f"({name}.softmax({dim}) * {name})", f"F.layer_norm({name}, {name}.shape[-1:])",
            f"({name} - {name}.mean({dim}, keepdim=True)).square()", f"({name} * torch.rsqrt({name}.square().mean({dim}, keepdim=True) + 1e-3))",
            f"({name}.amax({dim}, keepdim=True) - {name})")
    ends = ("sum()", "mean()", "abs().max()", "amin()", "sum((0, -1), keepdim=True)", "std()", "logsumexp((0, -1))")
    return proposed(state, f"{state.rng.choice(made)}.{state.rng.choice(ends)}")


@maker(2)
def product(state: State) -> bool:
    """A product of matrices, which a library computes between regions."""
    name = state.pick(lambda t: t.is_floating_point() and t.dim() >= 2 and t.numel() > 0)
    if name is None:
        return False
    made = [f"{name} @ {name}.mT", f"torch.matmul({name}.mT, {name}) / {name}.shape[-2]",
            f"torch.einsum('...ij,...kj->...ik', {name}, {name})", f"F.linear({name}, {name}.reshape(-1, {name}.shape[-1])[:3])",
            f"F.scaled_dot_product_attention({name}, {name}, {name})"]
    return proposed(state, state.rng.choice(made))


@maker(3)
def created(state: State) -> bool:
    """A tensor from nothing but a shape."""
    name = state.pick()
    if name is None:
        return False
    rng, dtype = state.rng, any_dtype(state.rng)
    on = f"device={name}.device"
    made = [f"torch.zeros_like({name})", f"torch.full_like({name}, {rng.choice((1, -2, 3))})", f"{name}.new_ones((2, 3))",
            f"torch.full({name}.shape, {rng.choice((1.5, -1))}, {on})", f"torch.ones((), {on}, dtype=torch.{dtype})",
            f"torch.tensor({rng.choice((1.25, 3, -2.0))}, {on})", f"{name}.new_zeros({name}.shape)",
            f"torch.linspace(0, 1, 5, {on})"]
    if state.rank(name):
        made += [f"torch.arange({name}.shape[-1], {on})", f"torch.arange({name}.shape[0], {on}, dtype=torch.float32)[:, None]",
                 f"torch.arange({name}.shape[0] - 1, -1, -1, {on})", f"torch.eye({name}.shape[-1], {on})",
                 f"torch.arange(0, {name}.shape[-1] * 2, 2, {on})", f"torch.tril(torch.ones({name}.shape[-1], {name}.shape[-1], {on}))"]
    return proposed(state, rng.choice(made))


@maker(1.5)
def random_numbers(state: State) -> bool:
    """Random numbers."""
    name = state.pick(lambda t: t.is_floating_point())
    return bool(name and proposed(state, state.rng.choice(DRAWN).format(name)))
