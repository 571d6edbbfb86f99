"""Random numbers that run eager are those that kernels draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynafuse.config import resolve
from dynafuse.runtime.random import EAGER
from tests.support import graphs

prims = torch.ops.prims
SEEDS = [0, 1, 12345678901234567, 2**63 - 2, 2**32 - 1]


def by_kernel(target: Any, before: tuple[Any, ...], seed: torch.Tensor, after: tuple[Any, ...]) -> torch.Tensor:
    """What a Triton kernel draws."""
    graph = graphs.built(lambda g, x: g.op(target, *before, x, *after), seed)
    run = graphs.compiled(graph, [seed], resolve(options={"strict": True, "executors": "triton", "workers": 0}))
    assert [region.executor for region in run.plan.regions] == ["triton"]
    found: torch.Tensor = run.call([seed])[0]
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [[1], [7], [3, 50]], ids=str)
def test_floats_are_those_of_kernels(size: list[int], seed: int) -> None:
    given = torch.tensor(seed)
    for mode in ("rand", "randn"):
        found = EAGER[prims.inductor_random.default](size, given, mode)
        torch.testing.assert_close(found, by_kernel(prims.inductor_random.default, (size,), given, (mode,)),
                                   rtol=0 if mode == "rand" else 1e-5, atol=0 if mode == "rand" else 1e-6)
        assert found.dtype is torch.float32


Use = Callable[[graphs.Builder, Any, Any], Any]


def rolled(b: graphs.Builder, drawn: Any, x: Any) -> Any:
    return b.op("aten.add.Tensor", b.op("aten.roll.default", drawn, [1], [1]), x)


def transposed(b: graphs.Builder, drawn: Any, x: Any) -> Any:
    return b.op("aten.add.Tensor", b.op("aten.permute.default", drawn, [1, 0]), b.op("aten.permute.default", x, [1, 0]))


def along(dim: int) -> Use:
    return lambda b, drawn, x: b.op("aten.sum.dim_IntList", b.op("aten.mul.Tensor", drawn, x), [dim])


def weighed(b: graphs.Builder, drawn: Any, x: Any) -> Any:
    exponentials = b.op("aten.exp.default", x)
    weights = b.op("aten.div.Tensor", exponentials, b.op("aten.sum.dim_IntList", exponentials, [1], True))
    return b.op("aten.mul.Tensor", weights, drawn)


USES: dict[str, Use] = {"rows": along(1), "columns": along(0), "weighed": weighed, "transposed": transposed, "rolled": rolled}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("size", [[40, 64], [13, 7], [2, 4099], [300, 12], [1, 5]], ids=str)
def test_tiles_of_all_kinds_draw_the_same(size: list[int], use: str, device: str = "cpu") -> None:
    """Whatever tiles walk a tensor, and whether four neighbours share a block in them or not."""
    x, seed = torch.randn(*size, device=device), torch.tensor(11, device=device)

    def write(b: graphs.Builder, x: Any, seed: Any) -> Any:
        return USES[use](b, b.op("prims.inductor_random.default", size, seed, "rand"), x)

    graph = graphs.built(write, x, seed)
    run = graphs.compiled(graph, [x, seed], resolve(options={"strict": True, "executors": "triton", "workers": 0}))
    assert run.plan.regions and not run.computed
    given: torch.Tensor = run.call([x, seed])[0]
    eager = graphs.built(lambda b, x, drawn: USES[use](b, drawn, x), x, x)
    drawn = EAGER[prims.inductor_random.default](size, seed, "rand")
    torch.testing.assert_close(given, eager(x, drawn)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0, 2), (-5, 1000), (-2**62, 2**62 - 5), (0, 2**63 - 1)])
def test_integers_are_those_of_kernels(low: int, high: int, seed: int) -> None:
    given = torch.tensor(seed)
    found = EAGER[prims.inductor_randint.default](low, high, [40], given)
    torch.testing.assert_close(found, by_kernel(prims.inductor_randint.default, (low, high, [40]), given, ()), rtol=0, atol=0)
    assert bool(((found >= low) & (found < high)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("size", [[400, 512], [1300, 49], [8, 40_000], [3000, 12]], ids=str)
def test_tiles_of_all_kinds_draw_the_same_on_a_gpu(size: list[int], use: str) -> None:
    test_tiles_of_all_kinds_draw_the_same(size, use, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_gpu_too(seed: int) -> None:
    given = torch.tensor(seed, device="cuda")
    found = EAGER[prims.inductor_random.default]([1000], given, "rand")
    torch.testing.assert_close(found, by_kernel(prims.inductor_random.default, ([1000],), given, ("rand",)), rtol=0, atol=0)
    found = EAGER[prims.inductor_randint.default](-5, 1000, [1000], given)
    torch.testing.assert_close(found, by_kernel(prims.inductor_randint.default, (-5, 1000, [1000]), given, ()), rtol=0, atol=0)


def test_they_are_spread_as_they_should_be() -> None:
    found = EAGER[prims.inductor_random.default]([100_000], torch.tensor(7), "rand")
    assert bool(((found >= 0) & (found < 1)).all()) and abs(float(found.mean()) - 0.5) < 5e-3
    found = EAGER[prims.inductor_random.default]([100_000], torch.tensor(7), "randn")
    assert abs(float(found.mean())) < 2e-2 and abs(float(found.std()) - 1) < 1e-2
