"""Upsampling and its gradient against eager and float64: factors and sizes, up and down, layouts, neighbours, what stays eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dynafuse import backend
from dynafuse.ir import Role
from dynafuse.passes.decompositions import EARLY, UPSAMPLING, whole_in_autograd
from tests.support.differential import check, compare, compiled, copies, run
from tests.support.graphs import recorded

WAYS: dict[str, dict[str, Any]] = {
    "nearest, twice": {"scale_factor": 2},
    "nearest, eight times": {"scale_factor": 8},
    "nearest to sizes": {"size": (13, 5)},
    "nearest by a fraction": {"scale_factor": (1.3, 2.3)},
    "nearest to one": {"size": (1, 1)},
    "nearest to the same": {"size": (6, 7)},
    "exact by a fraction": {"scale_factor": 2.5, "mode": "nearest-exact"},
    "exact, half": {"scale_factor": 0.5, "mode": "nearest-exact"},
    "bilinear, twice": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear, three times": {"scale_factor": 3, "mode": "bilinear"},
    "bilinear, half": {"scale_factor": 0.5, "mode": "bilinear"},
    "bilinear to sizes": {"size": (13, 5), "mode": "bilinear"},
    "bilinear between corners": {"size": (13, 15), "mode": "bilinear", "align_corners": True},
    "bilinear to one row": {"size": (1, 3), "mode": "bilinear", "align_corners": True},
    "bilinear by a fraction": {"scale_factor": (1.3, 2.1), "mode": "bilinear"},
    "bilinear by the sizes' fraction": {"scale_factor": (1.3, 2.1), "mode": "bilinear", "recompute_scale_factor": True},
    "bicubic, twice": {"scale_factor": 2, "mode": "bicubic"},
    "bicubic between corners": {"size": (5, 13), "mode": "bicubic", "align_corners": True},
}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def image(*shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    return x.to(memory_format=LAYOUTS[layout]).requires_grad_()


def eager_steps(graphs: list[backend.Compiled]) -> list[str]:
    facts = {node: fact for graph in graphs for node, fact in graph.plan.annotated.facts.items()}
    return [step.name for graph in graphs for step in graph.plan.steps if isinstance(step, Node) and facts[step].role is Role.EAGER]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_beside_their_neighbours(way: str, dtype: torch.dtype, layout: str) -> None:
    graphs = check(lambda x: F.interpolate(x.relu(), **WAYS[way]).sin().sum((2, 3)), image(2, 3, 6, 7, dtype=dtype, layout=layout),
                   executors="triton")
    assert not eager_steps(graphs)


@pytest.mark.parametrize("way", ["nearest, twice", "bilinear, twice", "bicubic, twice"])
def test_the_gradient_is_one_kernel_with_its_neighbours(way: str) -> None:
    """No index is made beforehand, none is kept, and nothing is added to memory."""
    forward, backward = check(lambda x: F.interpolate(x * 2, **WAYS[way]) * 3, image(2, 3, 6, 7), executors="triton")
    assert len(forward.plan.regions) == len(backward.plan.regions) == 1
    assert not eager_steps([forward, backward])


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("size", [1, 5, 11, 24])
def test_one_dimension(mode: str, size: int) -> None:
    check(lambda x: F.interpolate(x.cos(), size, mode=mode).cos(), image(2, 3, 11), executors="triton")


@pytest.mark.parametrize("way", [
    {"scale_factor": 2}, {"size": (5, 3, 7)}, {"scale_factor": 1.5, "mode": "nearest-exact"}, {"scale_factor": 2, "mode": "trilinear"},
    {"size": (5, 3, 7), "mode": "trilinear", "align_corners": True}], ids=str)
def test_three_dimensions(way: dict[str, Any]) -> None:
    check(lambda x: F.interpolate(x.cos(), **way).cos(), image(1, 2, 3, 4, 5), executors="triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("way", ["nearest by a fraction", "bilinear, three times", "bilinear between corners", "bicubic between corners"])
def test_other_dtypes(way: str, dtype: torch.dtype) -> None:
    check(lambda x: F.interpolate(x.cos(), **WAYS[way]).cos(), image(1, 2, 6, 7, dtype=dtype), executors="triton")


@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 1, 1, 5), (2, 1, 2, 2), (3, 17, 4, 4)])
@pytest.mark.parametrize("way", ["nearest, twice", "bilinear, twice", "bilinear between corners", "bicubic, twice"])
def test_images_of_one_element_or_row(way: str, shape: tuple[int, ...]) -> None:
    check(lambda x: F.interpolate(x.cos(), **WAYS[way]).cos(), image(*shape), executors="triton")


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_no_images(mode: str) -> None:
    check(lambda x: F.interpolate(x.cos(), scale_factor=2, mode=mode).cos(), image(0, 3, 4, 4), executors="triton")


def test_infinite_gradients_stay_where_their_outputs_read() -> None:
    """An output gives nothing to elements beside those that it reads, whatever its gradient."""
    def scaled(x: Tensor) -> Tensor:
        return F.interpolate(x, size=(9, 11), mode="bilinear") * torch.arange(99.0).view(9, 11).where(torch.arange(99).view(9, 11) != 40, torch.inf)

    check(scaled, image(1, 1, 6, 7), precise=False, executors="triton")


@pytest.mark.parametrize("way", [
    {"scale_factor": 4, "mode": "bilinear", "align_corners": True}, {"scale_factor": 8, "mode": "bilinear"},
    {"scale_factor": 9}, {"scale_factor": 3, "mode": "bicubic"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_readers_are_summed_dimension_by_dimension(way: dict[str, Any], dtype: torch.dtype) -> None:
    """No kernel adds all of them in its code."""
    graphs = check(lambda x: F.interpolate(x.cos(), **way).cos(), image(1, 2, 5, 4, dtype=dtype), executors="triton")
    gradients = [node for node in graphs[-1].plan.annotated.graph.nodes if "upsample" in str(node.target)]
    assert len(gradients) == 2 and not eager_steps(graphs)


def test_more_readers_than_are_written_out_stay_eager() -> None:
    graphs = check(lambda x: F.interpolate(x.cos(), scale_factor=65, mode="nearest").cos(), image(1, 1, 2, 2), executors="triton")
    assert eager_steps(graphs) == ["upsample_nearest2d_backward"]
    facts = graphs[-1].plan.annotated.facts
    reasons = [fact.reason for node, fact in facts.items() if node.name == "upsample_nearest2d_backward"]
    assert reasons == ["elements that 4225 outputs read, more than 64"]


def doubled(mode: str) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x.cos(), scale_factor=2, mode=mode).cos()


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("dim", [0, 2])
def test_dynamic_sizes(mode: str, dim: int) -> None:
    """The second size makes it dynamic, and is not the last one."""
    fn = compiled(doubled(mode), dynamic=None, executors="triton")
    torch._dynamo.reset()
    for size in (4, 5, 7):
        x = image(*(size if k == dim else 6 for k in range(4)))
        with recorded() as graphs:
            ours = run(fn, copies((x,)))
        compare(ours, run(doubled(mode), copies((x,))), run(doubled(mode), copies((x,), torch.float64)))
        assert bool(graphs) is (size < 7) and not eager_steps(graphs)


def test_inference() -> None:
    x = image(2, 3, 6, 7).detach()
    for way in ("nearest, twice", "bilinear between corners", "bicubic, twice"):
        graphs = check(lambda x, way=way: F.interpolate(x.relu(), **WAYS[way]) + 1, x, executors="triton")
        assert not eager_steps(graphs)


def test_ops_are_themselves_again_after_tracing() -> None:
    ops = [op for packet in UPSAMPLING for op in (packet.vec, packet.default)]
    before = [dict(op.py_kernels) for op in ops]
    with pytest.raises(ZeroDivisionError), whole_in_autograd():
        assert all(key not in op.py_kernels for op in ops[1::2] for key in EARLY)
        raise ZeroDivisionError
    assert [dict(op.py_kernels) for op in ops] == before
