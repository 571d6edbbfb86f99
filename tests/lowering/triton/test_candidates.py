"""Every schedule that a reduction may get computes the same: against eager and float64, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from dynafuse import backend, pipeline
from dynafuse.config import Config
from dynafuse.ir import Spec
from dynafuse.lowering.triton import lower
from dynafuse.lowering.triton.schedule import MOST_CANDIDATES, candidates
from dynafuse.lowering.triton.tiles import Schedule
from dynafuse.passes.snapshot import Snapshot
from tests.support.differential import compare, compiled, copies, run

BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape).to(dtype)


def special(x: torch.Tensor) -> torch.Tensor:
    """The same values, but for infinities and a NaN in rows and columns of their own."""
    x[1, 3], x[2, 5], x[0, 7], x[3, 7] = torch.inf, torch.nan, -torch.inf, -0.0
    return x


def extreme(x: torch.Tensor) -> torch.Tensor:
    """The same values, but for rows that begin with infinities, have nothing else, end in one, hold a NaN, and a large one late."""
    x[0, :20000], x[1], x[2, -1], x[3, 100], x[4, -2] = -torch.inf, -torch.inf, torch.inf, torch.nan, 3e38
    return x


def weighted(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Sums of exponentials whose shift is the maximum, and of others with weights."""
    shifted = (x - x.amax(-1, keepdim=True)).exp()
    return shifted.sum(-1), (shifted * weight).sum(-1), x.logsumexp(-1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def statistics(x: torch.Tensor) -> Any:
    return torch.var_mean(x, [0, 2, 3], correction=0)


def all_statistics(dim: int) -> Callable[[torch.Tensor], Any]:
    """What is finished from the same sums: a mean stays infinite where its variance is NaN."""
    return lambda x: (x.mean(dim), x.var(dim), x.sum(dim), x.std(dim, correction=0), x.amax(dim))


def shifted_sum(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """A sum whose row is that of several dimensions, with an operand that moves on along the outer ones."""
    return ((x - shift).exp() / 2).sum()


def joined(x: torch.Tensor, y: torch.Tensor) -> Any:
    """What is computed of two tensors that lie side by side, and its sum over all but the channels."""
    both = torch.cat([x.sigmoid() * y, x - y.exp()], 1)
    return both, both.sum([0, 2])


def norm_backward(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Any:
    return torch.func.vjp(lambda x, w: F.layer_norm(x, [x.shape[-1]], w), x, weight)[1](grad)


def scans(x: torch.Tensor) -> Any:
    """Scans of each kind, and what is reduced from one: an accumulation of whole numbers is exact in whatever order."""
    return x.cumsum(1), (x.cumsum(1) * 2).amax(1), x.clamp(-1, 1).cumprod(1), x.logcumsumexp(1)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "columns": (lambda x: x.sum(0), (random(37, 9, 21)[:, :, :20],)),
    "columns_of_odd_rows": (lambda x: x.float().sum(0), (random(130, 3, 65, dtype=BF16)[:, :, :63],)),
    "long_columns": (lambda x: (x * 2).sum([0, 1]), (random(5, 500, 70),)),
    "infinite_columns": (lambda x: (x.sum(0), x.amax(0)), (special(random(2500, 40)),)),
    "statistics_of_columns": (all_statistics(0), (special(random(2500, 40)),)),
    "statistics_of_rows": (all_statistics(1), (special(random(5, 3000)),)),
    "columns_with_positions": (lambda x: x.argmax(0), (random(3000, 33),)),
    "statistics": (statistics, (random(6, 7, 20, 21),)),
    "statistics_of_channels": (statistics, (channels_last(random(12, 24, 14, 14, dtype=BF16)),)),
    "infinite_variance": (lambda x: torch.var(x, [0, 2, 3]), (channels_last(special(random(6, 40, 20, 20)[0])[None].repeat(6, 1, 1, 1)),)),
    "mean_of_channels": (lambda x: x.relu().mean([2, 3]), (channels_last(random(3, 70, 7, 7, dtype=BF16)),)),
    "mean_of_planes": (lambda x, w: (x * w[:, None, None]).mean([2, 3]), (random(3, 70, 7, 7), random(70))),
    "channels_of_two": (joined, (random(3, 4, 3001), random(3, 4, 3001))),
    "columns_of_two": (lambda x, y: torch.cat([x.sin(), x * y], 1).sum(0), (random(40, 128), random(40, 128))),
    "scale_of_two": (lambda x, a, b: (x * torch.cat([a, b])[:, None]).sum(1), (random(8, 3001), random(4), random(4))),
    "both_orders": (lambda x, y: (x * y).sum([0, 2, 3]), (random(4, 36, 28, 28), channels_last(random(4, 36, 28, 28)))),
    "gated_channels": (lambda x, g: ((x * g).sum([0, 2, 3]), x * g), (channels_last(random(6, 24, 20, 20)), random(6, 24, 1, 1))),
    "whole": (shifted_sum, (random(200, 512), random(200, 1))),
    "whole_of_odd_rows": (shifted_sum, (random(200, 301), random(200, 1))),
    "rows": (lambda x: x.softmax(-1), (special(random(9, 1000)),)),
    "long_rows": (lambda x: x.log_softmax(-1), (special(random(4, 33000)),)),
    "extreme_rows": (lambda x: (x.softmax(-1), x.logsumexp(-1)), (extreme(random(6, 33000)),)),
    "extreme_rows_of_16_bits": (lambda x: (x.softmax(-1), x.logsumexp(-1)), (extreme(random(6, 33001, dtype=BF16)),)),
    "aligned_rows_of_16_bits": (weighted, (random(6, 34000, dtype=BF16), random(34000, dtype=BF16))),
    "long_rows_that_repeat": (weighted, (random(1, 33000).expand(5, 33000), random(5, 1))),
    "softmax_of_columns": (lambda x: x.softmax(0), (special(random(700, 40)),)),
    "sum_of_long_rows": (lambda x: (x.sum(-1), x.var(-1)), (random(2, 33001),)),
    "scans": (scans, (special(random(9, 1000)).round(),)),
    "scans_of_columns": (lambda x: scans(x.t()), (special(random(700, 40)).round(),)),
    "long_scans": (lambda x: x.cumsum(1).softmax(1), (random(3, 17000).round(),)),
    "rows_and_columns_of_a_scan": (lambda x: ((y := (x * 2).cumsum(1)), y.sum(0)), (random(300, 77),)),
    "rows_and_columns": (norm_backward, (random(70, 96), random(96), random(70, 96))),
    "rows_and_columns_of_odd_length": (norm_backward, (random(300, 77), random(77), random(300, 77))),
}


DYNAMIC = ["columns", "columns_of_odd_rows", "mean_of_channels", "rows", "rows_and_columns", "scans", "scans_of_columns",
           "softmax_of_columns", "whole"]
"""Cases that are also run with sizes that are known only at run time."""


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in CASES), *((name, True) for name in DYNAMIC)])
def test_every_candidate_is_right(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments = CASES[name]
    calls = lowered_by_each(monkeypatch)
    torch._dynamo.reset()
    ours = compiled(function, dynamic=dynamic, specialize_after=0)
    eager, truth = run(function, copies(arguments)), run(function, copies(arguments, torch.float64))
    compare(run(ours, copies(arguments)), eager, truth)
    for _ in calls[1:]:
        compare(run(ours, copies(arguments)), eager, truth)


def lowered_by_each(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[list[Any]], Any]]:
    """Have one graph, which is traced once, compiled with one candidate after the other: each call of it runs the next of the list."""
    calls: list[Callable[[list[Any]], Any]] = []
    compile_graph = pipeline.compile_graph

    def compile_each(kind: str, config: Config, module: GraphModule, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        assert not calls, "the function has more than one graph"
        graph = Snapshot.of(module)
        for number in range(MOST_CANDIDATES):
            counts: list[int] = []
            monkeypatch.setattr(lower, "choose_schedule", lambda spec: pick(spec, number, counts))  # noqa: B023
            backend.reset()
            calls.append(compile_graph(kind, config, graph.restored(), *args, **kwargs))
            assert counts
            if number + 1 >= max(counts):
                break
        turns = iter(calls)

        def call(values: list[Any]) -> Any:
            return next(turns)(values)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    monkeypatch.setattr(pipeline, "compile_graph", compile_each)
    return calls


def pick(spec: Spec, number: int, counts: list[int]) -> Schedule:
    """Return a spec's schedule of a number, or its last, and note how many it has."""
    schedules = candidates(spec)
    counts.append(len(schedules))
    return schedules[min(number, len(schedules) - 1)]
