"""What models are made of, a few statements at a time: what a pass looks for is among these, and others write into their middle."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tests.fuzz.grammar import Maker, maker
from tests.fuzz.program import Argument, Statement
from tests.fuzz.state import State

LOWEST = ("float('-inf')", "-1e4", "torch.finfo({0}.dtype).min")


def chain(state: State, *expressions: str) -> str | None:
    """Bind expressions one after the other, each over the names of those before as {0}, {1} …; the last one's name."""
    names: list[str] = []
    for expression in expressions:
        made = state.add(expression.format(*names))
        if made is None:
            return None
        names.append(made)
    return names[-1]


def images(state: State, name: str) -> str | None:
    """A value as images of channels: itself, or with dimensions of one element before it."""
    return name if state.rank(name) == 4 else state.add(f"{name}[{'None, ' * (4 - state.rank(name))}...]")


def over(weight: float, fewest: int, most: int) -> Callable[[Callable[[State, str], bool]], Maker]:
    """Register what makes something of a float value that has elements and so many dimensions, where there is one."""
    def register(function: Callable[[State, str], bool]) -> Maker:
        @maker(weight)
        def made(state: State) -> bool:
            name = state.pick(lambda t: t.is_floating_point() and fewest <= t.dim() <= most and t.numel() > 0)
            return name is not None and function(state, name)

        return made

    return register


@over(4, 2, 4)
def attention(state: State, name: str) -> bool:
    """Scores or attention under a mask: of positions, cut out of a larger one, written to, of bools or numbers."""
    rng, on = state.rng, f"device={name}.device"
    rows, columns = f"{name}.shape[-2]", f"{name}.shape[-1]"
    lowest = rng.choice(LOWEST).format(name)
    takes_scores = rng.random() < 0.5
    columns = columns if takes_scores else rows
    mask = rng.choice((
        f"torch.arange({rows}, {on})[:, None] >= torch.arange({columns}, {on})", f"torch.ones({rows}, {columns}, {on}, dtype=torch.bool).tril()",
        f"torch.arange({columns}, {on})[None] <= torch.arange({rows}, {on})[:, None] + {rng.randint(0, 2)}",
        f"~torch.ones(40, 40, {on}, dtype=torch.bool).triu(1)[:{rows}, :{columns}]",
        f"(torch.arange({rows}, {on})[:, None] - torch.arange({columns}, {on})).abs() < {rng.randint(1, 4)}",
        f"torch.ones({rows}, {columns}, {on}, dtype=torch.bool)"))
    made = state.add(mask)
    if made is None:
        return False
    if rng.random() < 0.4:
        made = state.add(f"torch.where({made}, 0.0, {lowest}).to({name}.dtype)") or made
    if rng.random() < 0.3:
        made = state.add(f"{made}[None, None].expand(1, 1, {rows}, {columns})[0, 0]") or made
    if rng.random() < 0.3:
        written = rng.choice((f"{made}[:, :1] = {made}[:, -1:]", f"{made}.logical_not_()", f"{made}.mul_({made}[:1])", f"{made}[0].fill_(1)"))
        state.propose(Statement(written, writes=True))
    if takes_scores:
        is_bool = state.dtype(made) is torch.bool
        scores = f"{name}.masked_fill(~{made}, {lowest})" if is_bool else f"{name} + {made}"
        return state.add(f"F.softmax({scores}, -1{rng.choice(('', ', dtype=torch.float32'))})") is not None
    if rng.random() < 0.3:
        layer = "lambda x, mask: F.scaled_dot_product_attention(x, x * 0.5, x, attn_mask=mask) + x"
        return state.add(f"torch.utils.checkpoint.checkpoint({layer}, {name}, {made}, use_reentrant=False)") is not None
    how = rng.choice((f"attn_mask={made}", f"attn_mask={made}, scale=0.5", "is_causal=True"))
    return state.add(f"F.scaled_dot_product_attention({name}, {name} * 0.5, {name}, {how})") is not None


@over(3, 2, 3)
def loss(state: State, name: str) -> bool:
    """A loss over rows of scores."""
    rng, on = state.rng, f"device={name}.device"
    scores = state.add(f"{name}.reshape(-1, {name}.shape[-1])")
    if scores is None:
        return False
    classes, places = f"{scores}.shape[1]", f"torch.arange({scores}.shape[0], {on})"
    target = state.add(rng.choice((f"{places} * 3 % {classes}", f"torch.where({places} % 3 == 1, -100, {places} % {classes})")))
    if target is None:
        return False
    how = rng.choice(("", ", reduction='sum'", ", reduction='none'", ", label_smoothing=0.1", ", ignore_index=0"))
    plain = how if "label" not in how else ""
    made = rng.choice((f"F.cross_entropy({scores}, {target}{how})", f"F.cross_entropy({scores}.float(), {target}{how})",
                       f"F.nll_loss(F.log_softmax({scores}, -1), {target}{plain})",
                       f"F.binary_cross_entropy_with_logits({scores}, ({scores}.detach() > 0.5).to({scores}.dtype))",
                       f"F.kl_div(F.log_softmax({scores}, -1), F.softmax({scores}.detach().flip(0), -1), reduction='batchmean')",
                       f"F.huber_loss({scores}, {scores}.detach().flip(-1))"))
    return state.add(made) is not None


@over(2, 2, 2)
def embedded(state: State, name: str) -> bool:
    """Rows of a table, with padding, by the number of a row, or by a one-hot product."""
    rng = state.rng
    state.argue(Argument(f"i{len(state.arguments)}", (str(rng.randint(1, 3)), str(rng.randint(1, 5))), "int64", rng.randrange(1000), "index"))
    ids = state.add(f"{state.parameters[-1][0]} % {name}.shape[0]")
    if ids is None:
        return False
    how = rng.choice(("", ", padding_idx=0", ", scale_grad_by_freq=True", ", padding_idx=-1"))
    return state.add(rng.choice((
        f"F.embedding({ids}, {name}{how})", f"F.embedding({ids}, {name}{how}) * 2 + {name}[0]",
        f"F.one_hot({ids}, {name}.shape[0]).to({name}.dtype) @ {name}", f"F.embedding_bag({ids}, {name}, mode='mean')",
        f"F.one_hot({ids}, {name}.shape[0]).sum((0, 1))"))) is not None


@over(4, 2, 4)
def convolved(state: State, name: str) -> bool:
    """A convolution with what follows it: a norm, whose statistics may be kept, an activation, a pool."""
    image = images(state, name)
    if image is None:
        return False
    rng, like = state.rng, f"device={image}.device, dtype={image}.dtype"
    outputs, side = rng.choice((2, 3)), rng.choice((1, 3))
    places = f"torch.arange({outputs} * {image}.shape[1] * {side * side}, device={image}.device)"
    weight = state.add(f"(({places} * 5 % 7 - 3) / 4).to({image}.dtype).reshape({outputs}, -1, {side}, {side})")
    if weight is None:
        return False
    made = chain(state, f"F.conv2d({image}, {weight}, padding={side // 2}, stride={rng.choice((1, 1, 2))})", _norm(state, outputs, like),
                 rng.choice(("F.relu({1})", "F.silu({1})", "F.hardswish({1})", "F.relu({1}, inplace=True)", "{1} + {0}", "F.gelu({1})")))
    if made is not None and rng.random() < 0.7:
        dense = f"{made}.contiguous()"  # in channels-last eager's gradient of padded averages is wrong on a GPU (pytorch#188344)
        state.add(rng.choice((
            f"F.max_pool2d({made}, 3, {rng.randint(1, 2)}, 1)", f"F.avg_pool2d({dense}, 3, 1, 1, count_include_pad={rng.random() < 0.5})",
            f"F.adaptive_avg_pool2d({made}, {rng.randint(1, 3)})", f"F.adaptive_max_pool2d({made}, 1)", f"{made}.mean((2, 3))",
            f"F.max_pool2d({made}, 2, ceil_mode=True)", f"F.pad({made}, (1, 0, 2, 1), mode='reflect')", f"F.pixel_shuffle({made}[:, :1].repeat(1, 4, 1, 1), 2)",
            f"F.interpolate({made}, scale_factor=2, mode='nearest')", f"F.max_pool2d({made}, 2, return_indices=True)[1]",
            f"F.lp_pool2d({made}.abs() + 1, 2, 2)", f"F.unfold({made}, 2)", f"F.dropout2d({made}, 0.0)")))
    return made is not None


def _norm(state: State, channels: int, like: str) -> str:
    """A norm of what {0} names, as text; the statistics that it keeps are values that others may read and write."""
    if state.rng.random() < 0.5:
        mean, spread = state.add(f"torch.zeros({channels}, {like})"), state.add(f"torch.ones({channels}, {like})")
        if mean is not None and spread is not None:
            return f"F.batch_norm({{0}}, {mean}, {spread}, training={state.rng.random() < 0.7}, momentum=0.2)"
    return state.rng.choice((f"F.group_norm({{0}}, {channels})", "F.group_norm({0}, 1)", "F.batch_norm({0}, None, None, training=True)",
                             f"F.layer_norm({{0}}.permute(0, 2, 3, 1), ({channels},)).permute(0, 3, 1, 2)", "F.instance_norm({0})", "{0} * 1.5"))


@over(2, 2, 4)
def rotated(state: State, name: str) -> bool:
    """Rotary positions: halves swapped or pairs, with angles of positions."""
    even = state.add(f"{name}[..., :{name}.shape[-1] // 2 * 2]")
    if even is None:
        return False
    half, on = f"{even}.shape[-1] // 2", f"device={even}.device"
    angle = state.add(f"torch.arange({even}.shape[-2], {on})[:, None] * 0.5 ** torch.arange({half}, {on})")
    if angle is None:
        return False
    both = f"torch.cat(({angle}, {angle}), -1)"
    swapped = state.add(state.rng.choice((f"torch.cat((-{even}[..., {half}:], {even}[..., :{half}]), -1)",
                                          f"torch.stack((-{even}[..., 1::2], {even}[..., ::2]), -1).flatten(-2)",
                                          f"{even}.unflatten(-1, (2, -1)).flip(-2).flatten(-2)")))
    return swapped is not None and state.add(f"{even} * {both}.cos().to({even}.dtype) + {swapped} * {both}.sin().to({even}.dtype)") is not None


@over(2, 2, 2)
def routed(state: State, name: str) -> bool:
    """Rows sent to the best of a few experts, computed there, and added up again."""
    rng = state.rng
    best = state.add(f"F.softmax({name}.float(), -1)")
    if best is None:
        return False
    weight, chosen = state.fresh(), state.fresh()
    if not state.propose(Statement(f"{weight}, {chosen} = {best}.topk(1, -1)", (weight, chosen))):
        return False
    rows = f"{chosen}[:, 0] % {name}.shape[0]"
    return state.add(rng.choice((
        f"torch.zeros_like({name}).index_add(0, {rows}, {name} * {weight}.to({name}.dtype))",
        f"F.one_hot({chosen}, {name}.shape[-1]).sum(1).to({name}.dtype) * {name}", f"torch.zeros_like({best}).scatter(1, {chosen}, {weight})",
        f"{name}.new_zeros({name}.shape).scatter_add(1, {chosen}, {name}[:, :1])", f"torch.bincount({chosen}.flatten(), minlength={name}.shape[-1])",
        f"{name}.gather(1, {chosen}) / {weight}.to({name}.dtype)"))) is not None


@over(3, 1, 3)
def cached(state: State, name: str) -> bool:
    """A tensor that keeps what is written to it at a place, and is read up to there."""
    rng, size = state.rng, f"{name}.shape[0]"
    kept = state.add(f"{name}.new_zeros(({size} + 3, *{name}.shape[1:]))")
    if kept is None:
        return False
    at = rng.randint(0, 3)
    places = f"torch.arange({size}, device={name}.device) + {at}"
    state.propose(Statement(rng.choice((
        f"{kept}[{at}:{at} + {size}] = {name}", f"{kept}.index_copy_(0, {places}, {name})", f"{kept}.narrow(0, {at}, {size}).copy_({name})",
        f"{kept}[{places}] = {name}", f"{kept}.index_put_(({places},), {name}, accumulate=True)", f"{kept}[{at}:][:{size}].add_({name})")), writes=True))
    return state.add(rng.choice((f"{kept}[:{at} + {size}]", f"{kept} * 2", f"{kept}.sum(0)", f"{kept}[{at}:].flip(0)", f"{kept}.roll(-1, 0)"))) is not None


@over(2, 2, 4)
def windowed(state: State, name: str) -> bool:
    """Windows of a value, shifted, computed with, and put together again."""
    even = state.add(f"{name}[:{name}.shape[0] // 2 * 2, :{name}.shape[1] // 2 * 2]")
    if even is None:
        return False
    made = chain(state, f"{even}.roll(({state.rng.choice((0, -1))}, -1), (0, 1))", "{0}.unflatten(1, (-1, 2)).unflatten(0, (-1, 2)).transpose(1, 2)",
                 "{1}.flatten(2, 3).flatten(0, 1)", state.rng.choice(("F.softmax({2}, 1)", "{2} - {2}.mean(1, keepdim=True)", "{2}.cumsum(1)", "{2}.square()")),
                 "{3}.reshape({1}.shape).transpose(1, 2).flatten(2, 3).flatten(0, 1)")
    return made is not None


@over(2, 1, 4)
def gated(state: State, name: str) -> bool:
    """Halves of a value, one through an activation times the other."""
    rng, one, other = state.rng, state.fresh(), state.fresh()
    halves = f"{name}[..., :{name}.shape[-1] // 2 * 2].{rng.choice(('chunk(2, -1)', 'tensor_split(2, -1)', 'unflatten(-1, (-1, 2)).unbind(-1)'))}"
    if not state.propose(Statement(f"{one}, {other} = {halves}", (one, other))):
        return False
    return state.add(rng.choice((f"F.silu({one}) * {other}", f"F.gelu({one}, approximate='tanh') * {other}", f"torch.cat(({other}, {one}), -1)",
                                 f"{one}.sigmoid().mul_({other})", f"torch.stack(({one}, {other})).amax(0)"))) is not None


@over(2, 1, 4)
def quantized(state: State, name: str) -> bool:
    """A value rounded to few levels by the scale of its rows, with the gradient going straight through."""
    scale = state.add(f"{name}.detach().abs().amax(-1, keepdim=True).clamp(min=0.1) / 7")
    if scale is None:
        return False
    rounded = f"({name}.detach() / {scale} * 0.99).round().clamp(-8, 7)"
    return state.add(state.rng.choice((f"{name} + ({rounded} * {scale} - {name}).detach()", f"{rounded}.to(torch.int8)",
                                       f"{rounded}.to(torch.int8).to({name}.dtype) * {scale}", f"torch.fake_quantize_per_tensor_affine({name}.float(), 0.25, 0, -8, 7)"))) is not None


@over(2, 1, 3)
def updated(state: State, name: str) -> bool:
    """Running averages and lists of tensors, as optimizers and norms write them."""
    average, moment = state.add(f"torch.zeros_like({name}[0])"), state.add(f"{name}.detach().clone()")
    if average is None or moment is None:
        return False
    return state.propose(Statement(state.rng.choice((
        f"{average}.lerp_({name}.detach().mean(0), 0.1)", f"{moment}.mul_(0.9).addcmul_({moment}, {moment}, value=0.1)",
        f"torch._foreach_mul_([{average}, {moment}], 0.5)", f"torch._foreach_add_([{moment}, {average}], [{moment}, {average}], alpha=0.5)",
        f"{moment}.addcdiv_({moment}, {moment}.abs().sqrt().add_(1), value=-0.1)", f"{average}.copy_({moment}.sum(0) * 0.1 + {average})")), writes=True))


@over(1.5, 1, 4)
def checkpointed(state: State, name: str) -> bool:
    """What is computed again in the backward, or without gradients."""
    inside = state.rng.choice(("torch.tanh(x) * x.sum(-1, keepdim=True)", "F.gelu(x.clamp(-50, 50)) + x", "F.softmax(x, -1).mul(x)", "x.sin().cos()"))
    if state.rng.random() < 0.6:
        return state.add(f"torch.utils.checkpoint.checkpoint(lambda x: {inside}, {name}, use_reentrant=False)") is not None
    made, computed = state.fresh(), re.sub(r"\bx\b", name, inside)
    return state.propose(Statement(f"with torch.no_grad():\n    {made} = {computed}", (made,)))
