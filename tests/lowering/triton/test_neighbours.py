"""Loads of one element for a group of neighbours along a row: which loads are such, and that kernels with them are right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from dynafuse.ir import Layout, Spec
from dynafuse.lowering.triton import lower
from dynafuse.lowering.triton.eviction import keep_what_is_loaded_again
from dynafuse.lowering.triton.kernels import write_kernels
from dynafuse.lowering.triton.neighbours import Neighbours
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.scopes import Line, Scope
from dynafuse.lowering.triton.tiles import Schedule, power_of_two
from dynafuse.ops import Value
from dynafuse.ops.indexing_math import symbol
from tests.support import graphs
from tests.support.differential import check
from tests.support.representative import spec_of

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CHANNELS = (0, 2, 3)
"""The dimensions of an image that a row of a batch norm is made of."""

Function = Callable[..., Any]
Change = Callable[[Spec], Schedule]


def images(count: int, *sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, 3, *sizes).to(dtype)


def gate(count: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(count, 3, 1, 1).to(dtype)


def normed(x: Tensor, *gates: Tensor) -> Tensor:
    """What is gated is summed, and stored."""
    for each in gates:
        x = x * each
    return x - x.mean(CHANNELS, keepdim=True)


def summed(x: Tensor, *gates: Tensor) -> tuple[Tensor, Tensor]:
    """What is gated is only summed: several programs may share a row."""
    wide = x.float()
    for each in gates:
        wide = wide * each
    return wide.sum(CHANNELS), (wide * x).sum(CHANNELS)


def row_length(spec: Spec) -> int:
    return math.prod(int(axis.size) for axis in spec.axes if axis.reduced)


def looped(spec: Spec) -> Schedule:
    return replace(choose_schedule(spec), schedule_class="looped", block={"x": 1, "r": 256}, warps=1, stages=1, splits=1,
                   deferred=frozenset(), running=0, loads_early=False, parts=1)


def persistent(spec: Spec) -> Schedule:
    return replace(looped(spec), schedule_class="persistent", block={"x": 2, "r": power_of_two(row_length(spec))}, loads_early=True)


def split(spec: Spec) -> Schedule:
    return replace(looped(spec), schedule_class="split", splits=2, deferred=frozenset(op for op, _ in spec.reductions))


def split_in_tiles(spec: Spec) -> Schedule:
    """Each program has one tile of a row."""
    return replace(split(spec), splits=-(-row_length(spec) // 256))


def several_rows(spec: Spec) -> Schedule:
    return replace(looped(spec), block={"x": 2, "r": 256}, warps=2)


def with_running_states(spec: Spec) -> Schedule:
    return replace(looped(spec), running=128)


CLASSES: dict[str, tuple[Change, Function]] = {
    "looped": (looped, normed), "persistent": (persistent, normed), "split": (split, summed), "tiles": (split_in_tiles, summed),
    "several rows": (several_rows, normed), "running": (with_running_states, summed),
}

SIZES = {  # of images, with how many neighbours are loaded for at a time, of 16 bits and of 32
    "eights": ((9, 8, 8), 8, 4), "of two axes": ((11, 6, 12), 8, 4), "fours": ((31, 2, 6), 4, 4), "pairs": ((61, 3, 2), 2, 2),
    "none": ((7, 7, 7), 0, 0), "whole tiles": ((16, 8, 8), 8, 4),
}


def sources(function: Function, *inputs: Tensor, **options: Any) -> list[str]:
    """The text of kernels that are right."""
    compiled = check(function, *inputs, **options)
    return [lower.lower(bound.code).source for graph in compiled for bound in graph.bounds.values()]


def groups(source: str) -> list[tuple[str, int]]:
    """The tensors that a kernel loads for groups of neighbours, with how many are in one."""
    loads = re.findall(r"lm\.repeated\(tl\.load\((in\d).*, (\d)\)$", source, re.M)
    return [(tensor, int(size)) for tensor, size in loads]


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    torch.manual_seed(0)
    return lambda change: monkeypatch.setattr(lower, "choose_schedule", change)


@pytest.mark.parametrize("kernels", CLASSES)
@pytest.mark.parametrize("sizes", SIZES)
def test_gates_of_images(kernels: str, sizes: str, scheduled: Callable[[Change], None]) -> None:
    change, function = CLASSES[kernels]
    scheduled(change)
    (count, height, width), expected, _ = SIZES[sizes]
    found = sources(function, images(count, height, width), gate(count))
    assert {size for source in found for _, size in groups(source)} == ({expected} if expected else set())


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("sizes", ["eights", "fours", "pairs"])
def test_as_many_as_a_lane_loads_at_once(dtype: torch.dtype, sizes: str, scheduled: Callable[[Change], None]) -> None:
    scheduled(looped)
    (count, height, width), _, expected = SIZES[sizes]
    (source,) = sources(normed, images(count, height, width, dtype=dtype), gate(count, dtype))
    assert {size for _, size in groups(source)} == {min(expected, 16 // dtype.itemsize)}


def chosen(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A gate of another dtype tells which of two others holds."""
    return normed(torch.where(second > 0, x, -x), first.to(x.dtype))


def of_first_columns(x: Tensor, first: Tensor) -> Tensor:
    """The gate is only read at some places along the row."""
    return normed(torch.cat([x[..., :2] * first, x[..., 2:]], -1))


def of_first_channel(x: Tensor, first: Tensor, shift: Tensor) -> Tensor:
    """It is read under a condition that is the same all over a row."""
    return normed(torch.cat([x[:, :1] * first[:, :1], x[:, 1:] + shift], 1))


def of_lines(x: Tensor, lines: Tensor, first: Tensor) -> Tensor:
    """Beside a gate of images, one of their lines, of which fewer neighbours have the same."""
    return normed(x, lines, first)


def looked_up(x: Tensor, table: Tensor, at: Tensor) -> Tensor:
    return normed(x * table[at][:, None, None, None])


def of_all_rows(x: Tensor, images: Tensor) -> Tensor:
    """All rows share it."""
    return normed(x, images[:, None, None, None])


def written(x: Tensor, first: Tensor) -> Tensor:
    x.copy_(normed(x, first))
    return x + 1


def ranked(x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Reductions with several states, and with positions."""
    gated = x.float() * first
    return torch.var(gated, CHANNELS), gated.transpose(0, 1).reshape(3, -1).argmax(1)


N = 9
CASES: dict[str, tuple[Function, Callable[[], list[Tensor]], list[int]]] = {
    "two gates": (normed, lambda: [images(N, 8, 8), gate(N), gate(N)], [8, 8]),
    "a bool and an int": (chosen, lambda: [images(N, 8, 8), gate(N) > 0, torch.randint(-3, 3, (N, 3, 1, 1))], [8, 8]),
    "under a mask": (of_first_columns, lambda: [images(N, 8, 8), gate(N)], []),
    "under a mask of rows": (of_first_channel, lambda: [images(N, 8, 8), gate(N), gate(N)[:, 1:]], [8, 8]),
    "lines": (of_lines, lambda: [images(N, 8, 4), torch.randn(N, 3, 8, 1).to(BF16), gate(N)], [4, 8]),
    "at loaded places": (looked_up, lambda: [images(N, 8, 8), torch.randn(4).to(BF16), torch.randint(0, 4, (N,))], [8]),
    "all rows": (of_all_rows, lambda: [images(N, 8, 8), torch.randn(N).to(BF16)], [8]),
    "overwritten": (written, lambda: [images(N, 8, 8), gate(N)], [8]),
    "other reductions": (ranked, lambda: [images(N, 8, 8), gate(N)], [8]),
}
"""By name the function, its inputs, and for how many neighbours one element of some of these is loaded."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("change", [looped, persistent])
def test_what_is_loaded_for_groups(name: str, change: Change, scheduled: Callable[[Change], None]) -> None:
    scheduled(change)
    function, inputs, expected = CASES[name]
    loads = {load for source in sources(function, *inputs()) for load in groups(source)}
    assert sorted(size for _, size in loads) == expected


def test_gradients_of_batch_norms(scheduled: Callable[[Change], None]) -> None:
    """Whatever is chosen for them."""
    def gated(x: Tensor, first: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(x * first, None, None, weight, training=True).relu()

    check(gated, images(N, 12, 12, dtype=F32).requires_grad_(), gate(N, F32).requires_grad_(), torch.randn(3).requires_grad_())


def test_dynamic_sizes_are_as_before(scheduled: Callable[[Change], None]) -> None:
    scheduled(lambda spec: replace(looped(spec), block={"x": 1, "r": 64}))
    found = sources(summed, images(N, 8, 8), gate(N), dynamic=True)
    assert found and not any(map(groups, found))


@pytest.mark.parametrize("change", [{"stages": 2}, {"lanes": "x"}, {"lanes_first": True}, {"warps": 8},
                                    {"schedule_class": "persistent", "parts": 3}], ids=str)
def test_other_tiles_are_as_before(change: dict[str, Any]) -> None:
    """Copied ahead, of lanes across rows, of fewer elements than lanes, and in parts."""
    spec = spec_of(normed, images(N, 8, 8), gate(N))
    schedule = looped(spec)
    assert groups(write_kernels(spec, schedule, False).source)
    assert not groups(write_kernels(spec, replace(schedule, **change), False).source)


def test_groups_walk_the_row_as_tiles_do() -> None:
    spec = spec_of(normed, images(N, 8, 8), gate(N))
    source = write_kernels(spec, looped(spec), False).source
    assert source.count("""
        r_eights = r_base // 8 + tl.arange(0, RBLOCK // 8)[None, :]
        r_eights_mask = r_eights < 72
        r_eights0 = (r_eights // 8)
""") == 2
    assert "lm.repeated(tl.load(in0 + (x + 3*r_eights0), r_eights_mask" in source


def test_offsets_of_64_bits(scheduled: Callable[[Change], None]) -> None:
    """Of the gigabytes between the elements of the gate nothing is touched."""
    scheduled(looped)
    apart = torch.empty_strided((N, 3, 1, 1), (2**28 + 64, 1, 1, 1), dtype=torch.int8)
    apart.copy_(torch.arange(3 * N).view(N, 3, 1, 1))
    inputs = [images(N, 8, 8, dtype=F32), apart]
    run = graphs.compiled(graphs.traced(lambda x, first: ((x * first).sum(CHANNELS),), *inputs), inputs)
    (source,) = (lower.lower(bound.code).source for bound in run.bounds.values())
    assert "r_fours = r_base // 4 + tl.arange(0, RBLOCK // 4).to(tl.int64)[None, :]" in source and groups(source)
    torch.testing.assert_close(run.call(list(inputs))[0], (inputs[0] * apart).sum(CHANNELS))


def test_axes_that_only_a_gate_tells_apart_are_one() -> None:
    """Of the tile, which no longer divides for each element."""
    spec = spec_of(lambda x, g: (x * g).float().sum((0, 1)), torch.empty(9, 64, dtype=BF16), torch.empty(9, 1, dtype=BF16))
    source = write_kernels(spec, looped(spec), False).source
    assert "tl.load(in1 + (r), r_mask" in source and "in0 + (r_eights0), r_eights_mask" in source


def test_what_is_loaded_at_several_places_stays_in_the_cache() -> None:
    layout, places = Layout(BF16, (9,), (1,)), [sympy.Symbol("a"), sympy.Symbol("b")]
    line = Line("v0 = lm.repeated(tl.load(in1 + ({0}), r_eights_mask).to(tl.float32), 8)", (places[0],))
    keep_what_is_loaded_again(Scope([line]), [("in1", layout, place) for place in places])
    assert line.text == 'v0 = lm.repeated(tl.load(in1 + ({0}), r_eights_mask, eviction_policy="evict_last").to(tl.float32), 8)'


i, j, k = symbol("i0", 6), symbol("i1", 12), symbol("i2", 20)
x, loaded, size = symbol("i3", 9), symbol("v3", 9), sympy.Symbol("s0", integer=True, positive=True)


@pytest.mark.parametrize(("offset", "beside", "expected"), [
    (i, 8, 8), (i, 4, 4), (i, 1, None), (j, 8, 4), (12 * i + j, 8, 4), (x + 5 * i, 8, 8), (size * i, 8, 8), (k, 8, None),
    (i + k, 8, None), (x, 8, None), (loaded, 8, None), (loaded + i, 8, None),
])
def test_how_many_neighbours_load_the_same(offset: sympy.Expr, beside: int, expected: int | None) -> None:
    group = Neighbours([i, j, k], beside).group(offset, offset.free_symbols & {i, j, k, loaded}, [])
    assert (group and group.size) == expected


def test_masks_along_the_row_are_of_elements() -> None:
    neighbours = Neighbours([i, j, k], 8)
    masks = [Value("v0", torch.bool, frozenset("xr")), Value("v1", torch.bool, frozenset("x"))]
    assert neighbours.group(i, [i], masks) is None and neighbours.group(i, [i], masks[1:])


def test_groups_walk_what_is_left_of_inner_axes() -> None:
    eights, fours = (Neighbours([i, j, k], beside).group(i, [i], []) for beside in (8, 4))
    assert eights and [(str(axis), axis.size) for axis in eights.axes] == [("i0_eights", 6), ("eights", 30)]
    assert fours and [(str(axis), axis.size) for axis in fours.axes] == [("i0_fours", 6), ("i1_fours", 12), ("fours", 5)]
