"""Planning a dynamic graph asks nothing of sizes that would bind them: a size that was found to be 4 would be 4 for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynafuse import backend, pipeline
from tests.support.differential import check

X = torch.randn(2, 4)
AT = torch.tensor([1])

PROGRAMS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "index of a stepped slice": (lambda x, i: x.expand(2, -1, -1)[:, :, :5:3][:, i % 4], (X, AT)),
    "stepped slice": (lambda x: x[:, ::3] + 1, (X,)),
    "transposed pieces": (lambda x: torch.cat([x.t()[1:], x.t()[:1]], 1) * 2 if x.size(0) > 9 else x.t()[1:] * 2, (X,)),
    "channels last": (lambda x: x.relu() + 1, (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),)),
    "permuted": (lambda x: x.permute(2, 0, 1).sin(), (torch.randn(3, 4, 5),)),
    "padded, reshaped": (lambda x: torch.nn.functional.pad(x, (1, 2)).reshape(-1).exp(), (X,)),
    "merged and flipped": (lambda x: (x.t() * 2).reshape(-1).flip(0) + 1, (X,)),
    "reduced": (lambda x: x[:, 1::2].sum(-1, keepdim=True) * x, (torch.randn(4, 6),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("executor", ["triton", "inductor"])
def test_sizes_stay_free(name: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments = PROGRAMS[name]
    compile_graph, bound = pipeline.compile_graph, []
    replace = ShapeEnv._set_replacement
    planned: list[object] = []  # the shape environments of the graphs; Inductor has one of its own

    def watched(*args: object, **kwargs: object) -> object:
        planned.append(TracingContext.get().fake_mode.shape_env)
        return compile_graph(*args, **kwargs)

    def noted(self: ShapeEnv, symbol: object, target: object, why: str) -> None:
        if self in planned:
            bound.append((symbol, target, why))
        replace(self, symbol, target, why)

    monkeypatch.setattr(pipeline, "compile_graph", watched)
    monkeypatch.setattr(ShapeEnv, "_set_replacement", noted)
    check(function, *arguments, dynamic=True, executors=executor)
    assert not bound


@pytest.mark.parametrize("executor", ["triton", "inductor"])
def test_one_graph_serves_all_sizes(executor: str) -> None:
    """As in eager for sizes other than those that it was compiled for."""
    function = torch.compile(PROGRAMS["index of a stepped slice"][0], backend=backend.dynafuse, dynamic=True, fullgraph=True,
                             options={"executors": executor})
    for x in (X, torch.randn(5, 4), torch.randn(3, 3)):
        torch.testing.assert_close(function(x, AT), PROGRAMS["index of a stepped slice"][0](x, AT))
