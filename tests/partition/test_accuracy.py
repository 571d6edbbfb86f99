"""Which values need not be exact to the last bits of float32: those that only become 16-bit floats."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse import backend
from dynafuse.ir import Accuracy
from dynafuse.lowering.triton.lower import lower
from dynafuse.runtime.observers import Compiled
from tests.support.differential import compiled

Function = Callable[[Tensor], object]


def planned(function: Function, x: Tensor, **options: object) -> tuple[set[str], str]:
    """The quick ops of a function's graph, and the source of its kernels."""
    graphs: list[Compiled] = []
    with backend.listening(graphs.append, plan_only=False):
        compiled(function, executors="triton", **options)(x)
    quick = {str(node.target).split(".")[1] for graph in graphs
             for node, facts in graph.plan.annotated.facts.items() if facts.accuracy is Accuracy.QUICK}
    return quick, "".join(lower(bound.code).source for graph in graphs for bound in graph.bounds.values())


X = torch.linspace(-3, 3, 64).view(8, 8)

QUICK: dict[str, tuple[Function, str]] = {
    "returned": (lambda x: (x.float() / 3.7 / (x.float().abs() + 9)).to(x.dtype), "div"),
    "activation": (lambda x: x.sigmoid() * x, "sigmoid"),
    "read by a library": (lambda x: x.float().sqrt().to(x.dtype) @ x, "sqrt"),
    "moved": (lambda x: torch.cat([x.sigmoid(), x])[1:].t(), "sigmoid"),
    "added up": (lambda x: x.sigmoid().sum(0), "sigmoid"),
    "softmax": (lambda x: torch.softmax(x, -1), "exp div"),
    "added up in 16 bits, and widened": (lambda x: x.sigmoid().sum(0).float(), "sigmoid"),
    "rounded by the user, and widened": (lambda x: x.sigmoid().double(), "sigmoid"),
    "copied into an input": (lambda x: x.copy_(x.sigmoid()), "sigmoid"),
    "normalized": (lambda x: ((x.float() - 1) * (x.float().square() + 1e-5).sqrt().reciprocal()).to(x.dtype), "sqrt reciprocal"),
}
EXACT: dict[str, Function] = {
    "returned in float32": lambda x: x.float().exp(),
    "added up in float32": lambda x: (x.float() / 3.7 / (x + 9).float()).sum(0),
    "added to float64": lambda x: x.sigmoid() + torch.ones(8, 8, dtype=torch.float64),
    "compared": lambda x: x.sigmoid() > 0.5,
    "compared, and returned": lambda x: (y := x.sigmoid(), (y > 0.5).to(x.dtype)),
    "selected by": lambda x: torch.where(x.sigmoid() > 0.5, x, 0),
    "stepped at": lambda x: (x.sigmoid() * 8).floor(),
    "the largest": lambda x: x.sigmoid().amax(0),
    "the place of the largest": lambda x: x.sigmoid().argmax(0),
    "a window's largest": lambda x: F.max_pool2d(x.sigmoid()[None], 2),
    "an integer": lambda x: (x.sigmoid() * 8).to(torch.int32),
}


def names(text: str) -> set[str]:
    return set(re.findall(r"lq\.(\w+)\(", text))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", QUICK)
def test_what_becomes_16_bits_is_quick(name: str, dtype: torch.dtype) -> None:
    function, functions = QUICK[name]
    quick, source = planned(function, X.to(dtype))
    assert names(source) == set(functions.split()) <= quick


@pytest.mark.parametrize("name", EXACT)
def test_what_decides_or_stays_is_exact(name: str) -> None:
    with torch.no_grad():
        _, source = planned(EXACT[name], X.bfloat16())
    assert not names(source) and "lm." in source


def test_float32_is_exact() -> None:
    quick, source = planned(lambda x: F.silu(x) * torch.softmax(x, -1), X)
    assert not quick and not names(source)


def test_so_are_roundings_like_eagers() -> None:
    _, source = planned(F.silu, X.bfloat16(), round_like_eager=True)
    assert not names(source)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in QUICK if name not in ("read by a library", "copied into an input")])
def test_bits_on_a_gpu_are_nearly_all_eagers(name: str, dtype: torch.dtype) -> None:
    """Of eager's bits, rounded once, all but one in a hundred; none is off by more than a unit or two."""
    function, _ = QUICK[name]
    x = (torch.randn(512, 512, generator=torch.Generator().manual_seed(0)) * 4).to(dtype).cuda()
    ours = compiled(function, executors="triton")(x)
    exact = function(x.double()) if "float" not in name else function(x.double()).double()
    off = (ours.double() - exact.double()).abs()
    unit = torch.finfo(dtype).eps * exact.double().abs().clamp(min=torch.finfo(dtype).tiny)
    assert (off <= 2 * unit).all() and (off <= 0.51 * unit).double().mean() > 0.98
