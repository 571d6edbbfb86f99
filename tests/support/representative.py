"""Functions whose regions stand for the kernel classes: the goldens show their source, and they compile for a GPU.

Worked example: ``bounds("softmax_persistent")`` is the list of that function's regions in canonical form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta

from dynafuse.cache.canonical import CanonicalRegion, canonical, family
from dynafuse.config import resolve
from dynafuse.ir import Spec
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.tiles import Schedule
from tests.support import graphs

prims = torch.ops.prims
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


@dataclass(frozen=True)
class Case:
    """A function with the sizes and dtypes of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    dynamic: bool = False
    family: bool = False  # as its regions run on the kernels that other lengths of their folds share


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rms_norm_backward(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(rms_norm, x, weight)[1](grad)


def rope(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries ``[batch, positions, heads, 64]`` as the projection leaves them, rotated."""
    heads = q.view(4, 512, 16, 64).transpose(1, 2)
    turned = torch.cat([-heads[..., 32:], heads[..., :32]], -1)
    return heads * cos[:, None] + turned * sin[:, None]


def embedding_backward(grad: torch.Tensor, at: torch.Tensor, weight: torch.Tensor) -> Any:
    """The gradients of rows and of what scales them."""
    rows = (grad * weight).float()
    return torch.ops.aten.index_put(rows.new_zeros(32000, 512), [at], rows, True), (grad * rows).sum(-1)


def dropout(x: torch.Tensor, residual: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    seed = prims.inductor_lookup_seed(seeds, 1)
    kept = prims.inductor_random(list(x.shape), seed, "rand") > 0.1
    return residual + kept * x * (1 / 0.9)


def running_mean(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    torch.ops.aten.copy_.default(mean, mean * 0.9 + x.mean((0, 2, 3)) * 0.1)
    return mean


def residual_sum(x: torch.Tensor, *branches: torch.Tensor) -> torch.Tensor:
    for branch in branches:
        x = x + branch.relu()
    return torch.tanh(x)


def gated_images(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Images under a gate for each of their channels, without the mean of the channel."""
    gated = x * gate
    return gated - gated.mean((0, 2, 3), keepdim=True)


def rows_and_steps(q: torch.Tensor, k: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of the rows of two tensors, and one step of an optimizer for three, in one launch."""
    return q.softmax(-1), k.softmax(-1), *(parameter * 0.9 - 0.3 for parameter in parameters)


CASES: dict[str, Case] = {
    "pointwise_flat": Case(
        lambda x, y, b: F.gelu(x + b) * y, (((4096, 512), BF16), ((4096, 512), BF16), ((512,), BF16))),
    "pointwise_broadcast": Case(lambda x, y: torch.where(x > y, x, 0), (((64, 1, 96), F32), ((80, 1), F32))),
    "signs_and_casts": Case(lambda x, y: ((x * y).half().float() / -0.0, torch.where(x * y > 0.1, -x, -0.0)),
                            (((4096,), BF16), ((4096,), BF16))),
    "transpose_tiled": Case(lambda x, y: x + y.t(), (((1024, 768), F32), ((768, 1024), F32))),
    "softmax_persistent": Case(lambda x: x.softmax(-1), (((8192, 1024), BF16),)),
    "softmax_looped": Case(lambda x: x.softmax(-1), (((1024, 131072), F32),)),
    "layer_norm_forward": Case(
        lambda x, w, b: torch.ops.aten.native_layer_norm(x, [1000], w, b, 1e-5),
        (((4096, 1000), BF16), ((1000,), BF16), ((1000,), BF16))),
    "rms_norm_backward": Case(rms_norm_backward, (((8192, 2048), BF16), ((2048,), BF16), ((8192, 2048), BF16))),
    "column_sum_split": Case(lambda x: x.sum(0), (((8192, 512), BF16),)),
    "full_sum_split": Case(lambda x: x.square().sum(), (((4096, 4096), F32),)),
    "column_sum_small": Case(lambda x, b: x.sum(0) + b, (((4096, 32), BF16), ((32,), F32))),
    "mean_of_positions": Case(lambda x, m: (x * m.rsqrt()).mean(1), (((64, 784, 768), BF16), ((64, 784, 1), F32))),
    "argmax_rows": Case(lambda x: x.argmax(-1), (((4096, 300), F32),)),
    "cumulative_softmax": Case(lambda x: x.softmax(-1).cumsum(-1), (((8192, 1000), BF16),)),
    "cumulative_columns": Case(lambda x, y: torch.logcumsumexp(x, 0) * y, (((8192, 1024), F32), ((1024,), F32))),
    "variance_of_channels": Case(lambda x: torch.var_mean(x, (0, 2, 3)), (((16, 64, 56, 56), F32),)),
    "gated_images": Case(gated_images, (((64, 512, 28, 28), BF16), ((64, 512, 1, 1), BF16))),
    "rope": Case(rope, (((4, 512, 1024), BF16), ((4, 512, 64), BF16), ((4, 512, 64), BF16))),
    "cat_of_slices": Case(lambda x, y: torch.cat([x[:, 8:], y.relu()], 1), (((512, 72), F32), ((512, 100), F32))),
    "stack_of_blocks": Case(lambda q, k: torch.stack([q * 2, k[:, 1:].cos(), torch.zeros_like(q)], 1),
                            (((4, 2048, 128), BF16), ((4, 2049, 128), BF16))),
    "embedding_gather": Case(lambda w, at: F.embedding(at, w) * 32, (((32000, 512), BF16), ((4, 128), I64))),
    "scatter_of_rows": Case(embedding_backward, (((4, 128, 512), BF16), ((4, 128), I64), ((512,), BF16))),
    "dropout_with_seed": Case(dropout, (((4096, 1024), BF16), ((4096, 1024), BF16), ((2,), I64))),
    "softmax_dynamic": Case(lambda x, y: (x + y).softmax(-1), (((48, 130), F32), ((48, 130), F32)), dynamic=True),
    "pointwise_dynamic": Case(lambda x, y: x.relu() * y, (((48, 130), F32), ((130,), F32)), dynamic=True),
    "reduction_unrolled": Case(lambda x: x.view(-1, 4, 64).mean(1) + 1, (((4096, 64), BF16),)),
    "overwritten_input": Case(running_mean, (((16, 64, 14, 14), F32), ((64,), F32))),
    "side_by_side": Case(rows_and_steps, (
        ((4, 16, 512, 64), BF16), ((4, 8, 512, 64), BF16), ((1000,), F32), ((64, 72), F32), ((3000,), F32))),
    "fold_family": Case(residual_sum, (((4096, 512), BF16),) * 6, family=True),
}


def traced(case: Case) -> GraphModule:
    """The ATen graph of a case."""
    made = [torch.empty(shape, dtype=dtype) for shape, dtype in case.arguments]
    with preserve_node_meta():  # which casts are those of decompositions
        return graphs.traced(case.function, *made, dynamic=case.dynamic)


def bounds(name: str, classes: bool = False) -> list[CanonicalRegion]:
    """The regions of a case, for a described H200; with ``classes`` as their sizes share kernels."""
    return bounds_of(CASES[name], classes)


def bounds_of(case: Case, classes: bool = False) -> list[CanonicalRegion]:
    """The same, of a case that has no name."""
    plan = graphs.planned(traced(case))
    found = [canonical(plan.annotated, region, resolve(environ={}).key(), "sm90", classes) for region in plan.regions]
    return [shared for one in found if (shared := family(one, 3))] if case.family else found


def spec_of(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> Spec:
    """The spec of the only region of a function."""
    (spec,) = _specs(function, *inputs, dynamic=dynamic)
    return spec


def scheduled(function: Callable[..., Any], *inputs: torch.Tensor) -> Schedule:
    """The schedule of the first region of a function."""
    return choose_schedule(_specs(function, *inputs)[0])


def _specs(function: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> list[Spec]:
    plan = graphs.planned(graphs.traced(function, *inputs, dynamic=dynamic))
    return [canonical(plan.annotated, region, (), "sm90").spec for region in plan.regions]


def text(name: str) -> str:
    """Every region of a case: its spec, its source, its launches."""
    return "\n\n".join(_section(bound) for bound in bounds(name)) + "\n"


def _section(bound: CanonicalRegion) -> str:
    lowered = lower(bound.code)
    spec = "\n".join(f"# {line}" for line in str(bound.code).splitlines())
    lines = [f"# {launch.entry}: grid {launch.grid}, {dict(launch.constants)}, {launch.warps} warps"
             for launch in lowered.launches]
    lines += [f"# {space.name}: {space.dtype}[{space.size}]" for space in lowered.workspaces]
    return f"{spec}\n\n{lowered.source}\n" + "\n".join(lines)


def everything() -> str:
    """The text of all cases."""
    return "\n".join(f"{name}\n{text(name)}" for name in CASES)
