"""Offsets and numbers of elements beyond 32 bits, and grids beyond CUDA's limits, in every class of kernels.

A tensor of few elements that lie far apart tells whether offsets are wide: of its gigabytes only the pages of the elements
are ever touched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton.builder import MOST_PROGRAMS
from dynafuse.lowering.triton.lower import lower
from tests.support import graphs

GIGABYTES = 2**31
Shape = tuple[int, ...]


def apart(shape: Shape, dim: int, scale: int = 1) -> torch.Tensor:
    """int8 numbers whose offsets pass 2**31 along one dimension; the others are dense."""
    dense = shape[:dim] + shape[dim + 1:]
    stride = list(torch.empty(dense, device="meta").stride())
    stride.insert(dim, max(math.prod(dense), GIGABYTES // shape[dim] + 64))
    made = torch.empty_strided(shape, tuple(stride), dtype=torch.int8)
    return made.copy_((torch.arange(math.prod(shape)) * scale % 97).view(shape))


def near(shape: Shape) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) % 89).to(torch.int8).view(shape)


def total(x: torch.Tensor, dim: list[int]) -> torch.Tensor:
    return torch.ops.aten.sum.dim_IntList(x, dim, False, dtype=torch.int32)


CASES: dict[str, tuple[str, Callable[..., Any], Callable[[], Sequence[torch.Tensor]]]] = {
    "elements": ("flat", lambda x: x + 1, lambda: [apart((4096,), 0)]),
    "rows": ("flat", lambda x: x + 1, lambda: [apart((64, 32), 0)]),
    "transposed": ("tiled", lambda x, y: x.t() + y, lambda: [apart((512, 256), 0), near((256, 512))]),
    "columns of few rows": ("looped", lambda x: total(x, [0]), lambda: [apart((1024, 64), 0)]),
    "rows read along and across": ("persistent", lambda x, y: total(x * y, [1]), lambda: [near((400, 256)), apart((400, 256), 1)]),
    "long columns": ("split", lambda x: total(x, [0]), lambda: [apart((4096, 4), 0)]),
    "the largest of all": ("split", torch.max, lambda: [apart((2**16,), 0)]),
    "rows and columns": ("rowcol", lambda x, y: (total(x * y, [1]), total(x * y, [0])),
                         lambda: [near((400, 256)), apart((400, 256), 1)]),
}


def lowerings(module: torch.fx.GraphModule) -> list[Lowered]:
    """The kernels of a graph for a described device."""
    plan = graphs.planned(module)
    return [lower(canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").code) for region in plan.regions]


@pytest.mark.parametrize("name", CASES)
def test_offsets_beyond_32_bits(name: str) -> None:
    kernel_class, function, make = CASES[name]
    inputs = make()

    def several(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = function(*tensors)
        return made if isinstance(made, tuple) else (made,)

    module = make_fx(several, tracing_mode="fake")(*inputs)
    run = graphs.compiled(module, inputs, resolve(options={"strict": True, "executors": "triton"}))
    assert [lower(bound.code).schedule_class for bound in run.bounds.values()] == [kernel_class]
    for ours, theirs in zip(run.call(list(inputs)), several(*inputs), strict=True):
        assert torch.equal(ours, theirs)


def test_parts_of_an_offset_wrap_around_where_their_sum_needs_32_bits() -> None:
    """A row of what is put together of 16 pieces is 45 rows of one further than where that begins."""
    x = torch.empty_strided((3, 16, 4), (2**27, 2**23, 1), dtype=torch.int8).copy_(near((3, 16, 4)))

    def joined(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.cat(x.split(1, 1)) + 1,)

    module = make_fx(joined, tracing_mode="fake")(x)
    run = graphs.compiled(module, [x], resolve(options={"strict": True, "executors": "triton"}))
    (source,) = (lower(bound.code).source for bound in run.bounds.values())
    assert ".to(tl.int64)" not in source and max(map(int, re.findall(r"\b\d+\b", source))) < 2**31
    assert torch.equal(run.call([x])[0], joined(x)[0])


# Numbers of elements ----------------------------------------------------------------------------------------------------


def outer(reduce: Callable[[graphs.Builder, Node], Any]) -> Callable[..., Any]:
    return lambda b, x, y: reduce(b, b.op("aten.add.Tensor", x, y))


SUMS: dict[str, Callable[..., Any]] = {
    "all": outer(lambda b, x: b.op("aten.max.default", x)),
    "rows": outer(lambda b, x: b.op("aten.amax.default", x, [1])),
    "columns": outer(lambda b, x: b.op("aten.amax.default", x, [0])),
    "rows and columns": outer(lambda b, x: (b.op("aten.amax.default", x, [1]), b.op("aten.amax.default", x, [0]))),
}


def wide(lowered: Lowered) -> bool:
    """Whether all that counts programs and places of the whole is in 64 bits."""
    first = lowered.source.split("@triton.jit")[1]  # a second kernel combines some hundreds of partial results
    numbers = re.findall(r"tl\.program_id\(\d\)(\S*)", first) + re.findall(r"tl\.arange\(0, \wBLOCK\)(\S*)", first)
    bare_bounds = re.search(r" in (?:tl\.)?range\((?:\d|.*, \d+, \w*BLOCK)", first)
    return all(".to(tl.int64)" in number for number in numbers) and bare_bounds is None


@pytest.mark.parametrize(("name", "shape", "kernel_class"), [
    ("all", (2**16, 2**16), "split"), ("all", (2**20, 2**12), "split"), ("rows", (2**16, 2**16), "looped"),
    ("columns", (2**15, 2**17), "looped"), ("rows", (2**22, 2**11), "persistent"),
])
def test_more_elements_than_32_bits_count(name: str, shape: tuple[int, int], kernel_class: str) -> None:
    """Of broadcast operands, each of which is small."""
    write = SUMS[name]
    inputs = torch.empty((1, shape[1]), dtype=torch.int8), torch.empty((shape[0], 1), dtype=torch.int8)
    (made,) = lowerings(graphs.built(write, *inputs))
    assert made.schedule_class == kernel_class and wide(made)


@pytest.mark.parametrize(("start", "step"), [(2**31 - 8, 1), (0, 2**28), (-2**31, -1), (2**31 + 5, 3), (2**40, -2**33)])
def test_ranges_of_large_numbers(start: int, step: int) -> None:
    def write(b: graphs.Builder, x: Node) -> Node:
        return b.op("aten.add.Tensor", b.op("prims.iota.default", 64, start=start, step=step, dtype=torch.int64,
                                            device=torch.device("cpu"), requires_grad=False), x)

    x = torch.arange(64)
    run = graphs.compiled(graphs.built(write, x), [x], resolve(options={"strict": True, "executors": "triton"}))
    assert run.bounds and torch.equal(run.call([x])[0], start + step * x + x)


# Grids ------------------------------------------------------------------------------------------------------------------


def across(b: graphs.Builder, x: Node, y: Node) -> Node:
    return b.op("aten.add.Tensor", b.op("aten.permute.default", x, [1, 0]), y)


def fits(launch: Launch) -> bool:
    x, *others = launch.grid
    return (not isinstance(x, int) or x < 2**31) and all(isinstance(size, int) and size <= MOST_PROGRAMS for size in others)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(2**24, 65), (65, 2**24), (2**22 + 1, 64), (4096, 4096)], ids=str)
def test_grids_fit_the_device(shape: tuple[int, int], dynamic: bool) -> None:
    x, y = torch.empty(shape, dtype=torch.int8), torch.empty(shape[::-1], dtype=torch.int8)
    (made,) = lowerings(graphs.built(across, x, y, dynamic=dynamic))
    assert made.schedule_class == "tiled" and all(map(fits, made.launches))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("shape", [(2**24, 8), (8, 2**24), (1, 2**26), (2**26, 1), (2**22, 32)], ids=str)
def test_grids_of_reductions_fit_the_device(name: str, shape: tuple[int, int]) -> None:
    inputs = torch.empty(shape, dtype=torch.int8), torch.empty(shape, dtype=torch.int8)
    for made in lowerings(graphs.built(SUMS[name], *inputs)):
        assert all(map(fits, made.launches))


@pytest.mark.parametrize("shape", [(100, 200), (129, 64)], ids=str)
def test_one_dimension_of_the_grid_walks_all_tiles(shape: tuple[int, int]) -> None:
    """As of sizes that are not known."""
    x, y = near(shape), near(shape[::-1])
    module = graphs.built(across, x, y, dynamic=True)
    ((launch,),) = [made.launches for made in lowerings(module)]
    assert launch.grid[1:] == (1, 1)
    compiled = torch.compile(lambda a, b: a.t() + b, backend="dynafuse", dynamic=True,
                             options={"strict": True, "executors": "triton"})
    assert torch.equal(compiled(x, y), x.t() + y)
