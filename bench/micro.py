"""Memory-bound kernels as a table of cases: device time and TB/s of ideal traffic, checked against float64.

Example:
    >>> case = CASES["rms_norm/8192x4096/bwd"]
    >>> case.op.name, case.backward
    ('rms_norm', True)

Ideal traffic reads every input once and writes every output once. A backward adds: the incoming gradient and what it
has to read again (`rereads`: inputs, outputs, or constants, which are inputs without a gradient), and the gradients it
writes. Device time is the sum of the profiler's kernel times. Every call takes the next of several input sets that
together exceed the L2 cache several times over.
"""
from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import measure, systems
from bench.measure import Metrics

Function = Callable[..., Any]
# More than six times the 60 MB of L2 of an H200.
ROTATED_BYTES = 400e6


@dataclasses.dataclass(frozen=True)
class Op:
    """A kernel: the function as users write it, its inputs by shape, which get gradients, what backward rereads."""

    name: str
    fn: Function
    make: Callable[..., tuple[Tensor, ...]]
    dtype: torch.dtype
    grads: tuple[int, ...] = ()
    rereads: str = "inputs"


@dataclasses.dataclass(frozen=True)
class Micro:
    """One row: an op at a shape, forward alone or forward and backward."""

    op: Op
    shape: tuple[int, ...]
    backward: bool

    @property
    def name(self) -> str:
        """op/shape/pass, as the command line and the result rows call it."""
        return f"{self.op.name}/{'x'.join(map(str, self.shape))}/{'bwd' if self.backward else 'fwd'}"


# ------ functions and inputs
def bias_bias_layer_norm(x: Tensor, b1: Tensor, b2: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + b1 + b2, x.shape[-1:], weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face writes it: statistics in float32, the weight applied after the cast back."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """With the cast to float32 that language models put before their loss."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As Hugging Face writes it, on projections of shape (batch, tokens, heads, width) that it views head first."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def litgpt_rope(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """As LitGPT writes it, on a projection of shape (batch, tokens, groups, queries per group + 2, width).

    The first `cos.shape[-1]` elements of a head turn. Keys and values are repeated for every query of their group; where
    there is one query, values are a view of the projection, and not among the results.
    """
    batch, tokens, groups, parts, width = qkv.shape
    q, k, v = qkv.permute(0, 2, 3, 1, 4).split((parts - 2, 1, 1), dim=2)
    if parts > 3:
        k, v = (x.expand(batch, groups, parts - 2, tokens, width) for x in (k, v))
    q, k, v = (x.reshape(batch, -1, tokens, width) for x in (q, k, v))
    n = cos.shape[-1]

    def turned(x: Tensor) -> Tensor:
        roped = x[..., :n] * cos + rotate_half(x[..., :n]) * sin
        return torch.cat((roped, x[..., n:]), dim=-1)

    return (turned(q), turned(k), v) if parts > 3 else (turned(q), turned(k))


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _rows(vectors: int, matrices: int = 1) -> Callable[..., tuple[Tensor, ...]]:
    """`matrices` inputs of (rows, n), then `vectors` of (n,)."""
    def make(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [(rows, n)] * matrices + [(n,)] * vectors
        return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)

    return make


def _logits(rows: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch.randn(rows, n, dtype=dtype), torch.randint(n, (rows,))


def _heads(batch: int, tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    angles = torch.rand(batch, tokens, width // 2).repeat(1, 1, 2) * 6.28
    shapes = ((batch, tokens, heads, width), (batch, tokens, kv_heads, width))
    q, k = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def _projection(
    batch: int, tokens: int, groups: int, queries: int, width: int, turned: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    angles = torch.rand(tokens, turned // 2).repeat(1, 2) * 6.28
    qkv = torch.randn(batch, tokens, groups, queries + 2, width, dtype=dtype)
    return qkv, angles.cos().to(dtype), angles.sin().to(dtype)


# ------ the table
_BF16, _FP16 = torch.bfloat16, torch.float16
_NORMS = ((8192, 4096), (4096, 12288))
_LOGITS = ((4096, 32000), (4096, 128256), (2048, 256000))
_GATED = ((8192, 5632), (8192, 14336))
_HEADS = ((2, 4096, 32, 8, 128), (4, 2048, 16, 4, 128))
# Llama-3-8B, Llama-2-7B, Pythia-6.9B, Dolly-v2-3B, Phi-2, Gemma-7B:
# batch, tokens, groups, queries per group, width, turned width
_PROJECTIONS = ((2, 4096, 8, 4, 128, 128), (2, 4096, 32, 1, 128, 128), (2, 2048, 32, 1, 128, 32), (2, 2048, 32, 1, 80, 20),
                (2, 2048, 32, 1, 80, 32), (2, 4096, 16, 1, 256, 256))
_FORWARD, _BOTH = (False,), (False, True)

TABLE: tuple[tuple[Op, tuple[bool, ...], Sequence[tuple[int, ...]]], ...] = (
    (Op("bias_bias_layer_norm", bias_bias_layer_norm, _rows(4), _FP16, grads=(0, 1, 2, 3, 4)), _BOTH,
     [(8192, n) for n in (2048, 4096, 5140, 12288, 16384, 20480)]),
    (Op("rms_norm", rms_norm, _rows(1), _BF16, grads=(0, 1)), _BOTH, _NORMS),
    (Op("add_rms_norm", add_rms_norm, _rows(1, 2), _BF16), _FORWARD, _NORMS),
    (Op("layer_norm", layer_norm, _rows(2), _BF16, grads=(0, 1, 2)), _BOTH, _NORMS),
    (Op("softmax", softmax, _rows(0), _BF16, grads=(0,), rereads="outputs"), _BOTH, _NORMS),
    (Op("cross_entropy", cross_entropy, _logits, _BF16, grads=(0,)), _BOTH, _LOGITS),
    (Op("swiglu", swiglu, _rows(0, 2), _BF16, grads=(0, 1)), _BOTH, _GATED),
    (Op("geglu", geglu, _rows(0, 2), _BF16, grads=(0, 1)), _BOTH, _GATED),
    (Op("bias_gelu", bias_gelu, _rows(1), _BF16, grads=(0, 1)), _BOTH, [(8192, 8192)]),
    (Op("rope", rope, _heads, _BF16, grads=(0, 1), rereads="constants"), _BOTH, _HEADS),
    (Op("litgpt_rope", litgpt_rope, _projection, _BF16, grads=(0,), rereads="constants"), _BOTH, _PROJECTIONS),
)


def _cases() -> Iterator[Micro]:
    for op, passes, shapes in TABLE:
        yield from (Micro(op, tuple(shape), backward) for shape, backward in itertools.product(shapes, passes))


CASES: dict[str, Micro] = {case.name: case for case in _cases()}


def tiny(case: Micro) -> Micro:
    """The same case with every extent above 64 cut down to between 32 and 64, odd lengths staying odd multiples."""
    return dataclasses.replace(case, shape=tuple(extent if extent <= 64 else 32 + extent % 32 for extent in case.shape))


# ------ measuring
def measure_case(request: dict[str, Any]) -> Metrics:
    """Metrics of one case under one system; the request names case, system, device, scale and steps."""
    case, device = CASES[request["case"]], request["device"]
    case = tiny(case) if request["scale"] == "tiny" else case
    torch.compiler.reset()
    torch.manual_seed(0)
    system = systems.find(request["system"])
    with torch.device(device):
        first = inputs_of(case)
    compiled = system.compile(case.op.fn)
    cold = cold_seconds(case, compiled, copied(first), device)
    numbers = errors(case, compiled, first)
    if device == "cuda":
        torch.cuda.empty_cache()  # float64 copies are large, and other systems' processes share the device
    return {"cold_s": cold, **numbers, **timings(case, compiled, first, device, request["steps"])}


def cold_seconds(case: Micro, compiled: Function, inputs: Sequence[Tensor], device: str) -> float:
    """Wall time of the first call, which compiles."""
    return measure.timed_once(lambda: call(case, compiled, inputs), device)


def inputs_of(case: Micro) -> tuple[Tensor, ...]:
    """One set of random inputs, with gradients asked for where the case has a backward."""
    inputs = case.op.make(*case.shape, dtype=case.op.dtype)
    if case.backward:
        for index in case.op.grads:
            inputs[index].requires_grad_()
    return inputs


def copied(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same inputs in other memory, for a system that may write over them."""
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def call(case: Micro, fn: Function, inputs: Sequence[Tensor], seeds: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Outputs, then gradients where asked for. `torch.autograd.grad` keeps accumulation out of the measurement."""
    if not case.backward:
        with torch.no_grad():
            return _listed(fn(*inputs))
    outputs = _listed(fn(*inputs))
    seeds = seeds or _seeds(outputs)
    return [*outputs, *torch.autograd.grad(outputs, [inputs[i] for i in case.op.grads], seeds)]


def _listed(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _seeds(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Incoming gradients: random where there are many elements (ones would hide mistakes), one for a loss."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)

    def seed(out: Tensor) -> Tensor:
        if out.dim() == 0:
            return torch.ones_like(out)
        return torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)

    return [seed(out) for out in outputs]


def errors(case: Micro, compiled: Function, inputs: Sequence[Tensor]) -> Metrics:
    """Relative RMSE against float64 of the system and of eager, the worst output of each."""
    with torch.no_grad():
        seeds = _seeds(_listed(case.op.fn(*inputs)))
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    truth = call(case, case.op.fn, wide, [seed.double() for seed in seeds])
    outputs, eager_out = call(case, compiled, copied(inputs), copied(seeds)), call(case, case.op.fn, inputs, seeds)
    mine = [measure.relative_rmse(out, ref) for out, ref in zip(outputs, truth, strict=True)]
    eager = [measure.relative_rmse(out, ref) for out, ref in zip(eager_out, truth, strict=True)]
    slack = [_slack(out) for out in outputs]
    right = all(m <= 2 * e + s for m, e, s in zip(mine, eager, slack, strict=True))
    return {"rmse": max(mine), "eager_rmse": max(eager), "right": right}


def _slack(out: Tensor) -> float:
    """A scalar may be rounded to the nearest value by luck, so it is allowed one rounding; many elements are not."""
    return torch.finfo(out.dtype).eps if out.dim() == 0 else 1e-6


def ideal_bytes(case: Micro, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Bytes that any implementation must move; `outputs` are the forward's."""
    forward = size(inputs) + size(outputs)
    if not case.backward:
        return forward
    again = {"inputs": inputs, "outputs": outputs, "constants": [x for x in inputs if not x.requires_grad]}
    return forward + size(again[case.op.rereads]) + size(outputs) + size([inputs[i] for i in case.op.grads])


def size(tensors: Sequence[Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def timings(case: Micro, compiled: Function, first: tuple[Tensor, ...], device: str, steps: int) -> Metrics:
    """Device and host time of a call over rotated inputs, in microseconds; TB/s of ideal traffic from device time."""
    rotation = _rotation(case, first, device)
    with torch.no_grad():
        outputs = _listed(case.op.fn(*first))
    seeds = _seeds(outputs) if case.backward else None
    moved = ideal_bytes(case, first, outputs)
    del outputs

    def step() -> None:
        call(case, compiled, next(rotation), seeds)

    for _ in range(5):
        step()
    wall = [1e6 * measure.timed_once(step, device) for _ in range(steps)]
    found: Metrics = {"wall_us": statistics.median(wall), "ideal_mb": moved / 1e6}
    if device == "cuda":
        profile = measure.device_profile(step, lambda: None, device, steps)
        found |= {"launches": profile["launches"], "top_kernels": profile["top_kernels"][:5]}
        found |= {"device_us": 1e3 * profile["device_ms"], "tb_per_s": moved / profile["device_ms"] / 1e9}
    return found


def _rotation(case: Micro, first: tuple[Tensor, ...], device: str) -> Iterator[tuple[Tensor, ...]]:
    """Input sets in a cycle; one is enough where there is no cache to defeat."""
    count = min(64, max(2, int(ROTATED_BYTES / max(1, size(first))) + 1)) if device == "cuda" else 1
    with torch.device(device):
        return itertools.cycle([first, *(inputs_of(case) for _ in range(count - 1))])
