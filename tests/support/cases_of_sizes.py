"""Functions of a number of rows, for tests of kernels that serve many of them.

Worked example: ``traced(CASES["softmax"], 65, torch.float32)`` is the ATen graph of a softmax of 65 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from dynafuse.passes.decompositions import decompositions

aten, prims = torch.ops.aten, torch.ops.prims
I64 = torch.int64


@dataclass(frozen=True)
class Case:
    """A function of tensors whose sizes follow from a number. ``shares`` says that sizes of a class are to share kernels;
    ``plain`` that eager computes the same."""

    function: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    shares: bool = True
    plain: bool = True


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def added_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    total = x + residual
    return total, norm(total, weight)


def gradient_of_norm(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(lambda x: F.layer_norm(x, x.shape[-1:], weight, None), x)[1](grad)


def gradients_of_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(lambda *args: F.layer_norm(args[0], x.shape[-1:], *args[1:]), x, weight, bias)[1](grad)


def losses(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), target, reduction="none")


def gradient_of_losses(logits: torch.Tensor, target: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(lambda x: losses(x, target), logits)[1](grad)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = q.view(-1, 6, 4, 8).transpose(1, 2)
    turned = torch.cat([-heads[..., 4:], heads[..., :4]], -1)
    return heads * cos[:, None] + turned * sin[:, None]


def dropout(x: torch.Tensor, residual: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    kept = prims.inductor_random(list(x.shape), prims.inductor_lookup_seed(seeds, 1), "rand") > 0.3
    return residual + kept * x * (1 / 0.7)


def overwritten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    aten.copy_.default(x, x * 0.9 + y)
    return y.exp()


def flattened(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y.view(-1, 6, 40)).relu().view(-1, 40)


def positions(x: torch.Tensor) -> torch.Tensor:
    return x + prims.iota(x.shape[0], start=3, step=2, dtype=torch.int64, device="cpu", requires_grad=False)[:, None]


CASES: dict[str, Case] = {
    "pointwise": Case(lambda x, y, b: F.gelu(x + b) * y, lambda n: ((n, 64), (n, 64), (64,))),
    "vector": Case(lambda x, y: torch.where(x > y, x, 2.5), lambda n: ((n,), (n,))),
    "broadcast": Case(lambda x, y, z: x * y + z, lambda n: ((n, 1, 24), (5, 1), (1, 5, 24))),
    "flattened": Case(flattened, lambda n: ((n, 6, 40), (6 * n, 40))),
    "sizes_left_open": Case(lambda x, y: x.view(x.shape[0], 6, -1) * y, lambda n: ((n, 24), (6, 1))),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (40,), w, b), lambda n: ((n, 40), (40,), (40,))),
    "gradient_of_norm": Case(gradient_of_norm, lambda n: ((n, 40), (40,), (n, 40))),
    "gradients_of_norm": Case(gradients_of_norm, lambda n: ((n, 40), (40,), (40,), (n, 40)), shares=False),
    "of_one_batch": Case(lambda x, y: (x * y).softmax(-1), lambda n: ((1, n, 40), (40,))),
    "softmax": Case(lambda x: x.softmax(-1), lambda n: ((n, 130),)),
    "long_softmax": Case(lambda x: x.softmax(-1), lambda n: ((n, 9000),)),
    "rms_norm": Case(added_norm, lambda n: ((n, 40), (n, 40), (40,))),
    "losses": Case(losses, lambda n: ((n, 60), ((n,), I64))),
    "gradient_of_losses": Case(gradient_of_losses, lambda n: ((n, 60), ((n,), I64), (n,))),
    "loss": Case(lambda x, t: losses(x, t).mean(), lambda n: ((n, 60), ((n,), I64)), shares=False),
    "dropout": Case(dropout, lambda n: ((n, 40), (n, 40), ((2,), I64)), plain=False),
    "rope": Case(rope, lambda n: ((n, 6, 32), (n, 6, 8), (n, 6, 8))),
    "shared_rope": Case(rope, lambda n: ((n, 6, 32), (1, 6, 8), (1, 6, 8))),
    "columns": Case(lambda x: x.sum(0) * 2, lambda n: ((n, 40),), shares=False),
    "rows_and_columns": Case(lambda x: (x.sum(0), x.sum(1)), lambda n: ((n, 40),), shares=False),
    "split_rows": Case(lambda x: (x.sum(1), x.amax(1)), lambda n: ((n, 4100),)),
    "batched_columns": Case(lambda x: x.mean(1), lambda n: ((n, 300, 24),)),
    "arguments": Case(lambda x: x.argmax(-1), lambda n: ((n, 130),)),
    "unrolled": Case(lambda x: x.view(-1, 4, 16).mean(1) + 1, lambda n: ((n, 64),)),
    "overwritten": Case(overwritten, lambda n: ((n, 40), (n, 40))),
    "transposed": Case(lambda x, y: x + y.t(), lambda n: ((n, 40), (40, n)), shares=False),
    "itself_transposed": Case(lambda x: x + x.t(), lambda n: ((n, n),), shares=False),
    "first_row": Case(lambda x: x + x[0], lambda n: ((n, 40),), shares=False),
    "reversed_rows": Case(lambda x: x.flip(0) * 2, lambda n: ((n, 40),), shares=False),
    "rows_in_one": Case(lambda x, y: torch.cat([x, y.relu()]), lambda n: ((n, 40), (n, 40)), shares=False),
    "columns_in_one": Case(lambda x, y: torch.cat([x[:, 3:], y.relu()], 1), lambda n: ((n, 20), (n, 24))),
    "stacked": Case(lambda x, y: torch.stack([x, y.relu()], 1), lambda n: ((n, 20), (n, 20))),
    "selected": Case(lambda x: x[:, 2] * x[:, 3], lambda n: ((n, 5, 20),)),
    "embedding": Case(lambda w, at: F.embedding(at, w) * 3, lambda n: ((50, 24), ((n, 6), I64))),
    "gathered": Case(lambda x, at: x.gather(1, at) * 3, lambda n: ((n, 24), ((n, 6), I64))),
    "gathered_rows": Case(lambda x, at: x.gather(0, at) * 3, lambda n: ((n, 24), ((n, 24), I64)), shares=False),
    "positions": Case(positions, lambda n: ((n, 40),)),
    "squares": Case(lambda x: x.exp().sum((0, 1)), lambda n: ((n, n, 40),), shares=False),
    "as_many_columns": Case(lambda x: (x * 2).softmax(-1), lambda n: ((n, n),), shares=False),
}


def traced(case: Case, size: int, dtype: torch.dtype) -> GraphModule:
    """The ATen graph of a case at a size; ``dtype`` is that of its floats."""
    given = [one if isinstance(one[-1], torch.dtype) else (one, dtype) for one in case.arguments(size)]
    made = [torch.empty(shape, dtype=kind) for shape, kind in given]
    with preserve_node_meta():  # which casts are those of decompositions
        return make_fx(case.function, decomposition_table=decompositions(), tracing_mode="fake")(*made)
