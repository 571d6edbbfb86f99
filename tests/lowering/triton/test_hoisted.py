"""Kernels that take floats as arguments compute, to the bit, what kernels compute that have them in their code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynafuse import backend
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.kernels import STORE
from dynafuse.lowering.triton.compiler import load
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.ops import Cast, Row
from dynafuse.select.runners import runner
from tests.support.numbered import NUMBER, ROWS, bound, calls

CPU = torch.device("cpu")


def run(spec: Any, made: CanonicalRegion, tensors: list[torch.Tensor]) -> torch.Tensor:
    lowered = lower(spec)
    kernel = Kernel("key", lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), True)
    (found,) = runner(kernel, made.spec, {}, CPU)(tensors)
    return found


def number_of(row: Row, dtype: torch.dtype) -> float:
    """What a kernel is handed: the number, its reciprocal, or what is compared with values of a dtype in that dtype."""
    if row.hoists_inverse:
        return 1 / NUMBER
    return float(torch.tensor(NUMBER, dtype=dtype)) if row.cast is Cast.PROMOTED and dtype is torch.bfloat16 else NUMBER


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.target))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits(row: Row, dtype: torch.dtype) -> None:
    for given in calls(row):
        made, tensors = bound(row, given, dtype)
        assert made.hoisted == (number_of(row, dtype),)
        assert "k0" in lower(made.code).source
        with_argument, with_literal = (run(spec, made, tensors) for spec in (made.code, made.spec))
        assert torch.equal(with_argument.nan_to_num(7), with_literal.nan_to_num(7)), given


def test_rows_that_take_numbers_are_tested() -> None:
    assert len(ROWS) >= 40


# Layers ---------------------------------------------------------------------------------------------------------------


class Norms(torch.nn.Module):
    """Layers that differ only in their epsilons, each behind a product so that it is a region of its own."""

    def __init__(self, *eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for eps in self.eps:
            x = torch.mm(x, weight)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x


X, W = torch.randn(16, 32) * 1e-2, torch.randn(32, 32) * 1e-2


@pytest.fixture
def fresh() -> Iterator[None]:
    """No kernel is known, and nothing is compiled for torch."""
    torch._dynamo.reset()
    STORE.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("fresh")
def test_layers_with_other_epsilons_have_one_kernel(dynamic: bool) -> None:
    model = Norms(1e-3, 1e-5, 3e-1)
    before = backend.stats()["compiled"]
    found = torch.compile(model, backend=backend.dynafuse, dynamic=dynamic)(X, W)
    assert backend.stats()["compiled"] - before == 1
    assert torch.allclose(found, model(X, W), rtol=1e-4)
    assert not torch.allclose(found, Norms(1e-3, 1e-5, 1e-5)(X, W), rtol=1e-2)


@pytest.mark.usefixtures("fresh")
def test_a_kernel_from_disk_takes_other_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAFUSE_CACHE", "1")
    monkeypatch.setenv("DYNAFUSE_CACHE_DIR", str(tmp_path))
    torch.compile(Norms(1e-3), backend=backend.dynafuse)(X, W)
    STORE.clear()
    torch._dynamo.reset()
    hits = backend.stats()["disk_hits"]
    found = torch.compile(Norms(3e-1), backend=backend.dynafuse)(X, W)
    assert backend.stats()["disk_hits"] - hits == 1
    assert torch.allclose(found, Norms(3e-1)(X, W), rtol=1e-4)


@pytest.mark.usefixtures("fresh")
def test_float64_has_every_bit_of_a_number() -> None:
    x = torch.randn(64, 64, dtype=torch.float64)
    found = torch.compile(lambda x: torch.sin(x) * 0.1, backend=backend.dynafuse)(x)
    assert torch.allclose(found, torch.sin(x) * 0.1, rtol=1e-15, atol=0)


# Seeds ----------------------------------------------------------------------------------------------------------------


class Dropouts(torch.nn.Module):
    """Layers that drop out, each behind a product; all of their outputs."""

    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.rates = rates

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for rate in self.rates:
            x = torch.nn.functional.dropout(torch.mm(x, weight), rate)
            found.append(x)
        return found


@pytest.mark.usefixtures("fresh")
def test_layers_that_draw_from_other_seeds_have_one_kernel() -> None:
    rates = (0.1, 0.15, 0.3)
    found = torch.compile(Dropouts(*rates), backend=backend.dynafuse)(torch.ones(64, 32), torch.eye(32))
    assert len(STORE) == 1
    kept = [64 * 32, *(int(x.count_nonzero()) for x in found)]  # with one mask for all, nothing would go after the first layer
    for before, after, rate in zip(kept, kept[1:], rates, strict=False):
        assert abs(1 - after / before - rate) < 0.04


@pytest.mark.usefixtures("fresh")
def test_the_number_of_a_seed_leads_to_it() -> None:
    seen: list[backend.Compiled] = []
    with backend.listening(seen.append, plan_only=True), torch.no_grad():
        torch.compile(Dropouts(0.1, 0.15, 0.3), backend=backend.dynafuse, options={"device": "h200"})(X, W)
    regions = list(seen[0].bounds.values())
    assert [made.hoisted[0] for made in regions] == [0.0, 1.0, 2.0] and len({made.key for made in regions}) == 1
    seeds, x = torch.tensor([3, 5, 7]), torch.ones(16, 32)
    found = [run(made.code, made, [seeds, x]) for made in regions]
    for made, got in zip(regions, found, strict=True):
        assert torch.equal(got, run(made.spec, made, [seeds, x]))
    assert not torch.equal(found[0] != 0, found[1] != 0)
