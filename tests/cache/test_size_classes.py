"""Sizes of a class share Triton's kernels: which sizes and which regions do, and that the kernels are right for all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node

from dynafuse import backend
from dynafuse.cache import canonical as key
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cache.hoisted import hoist_scalars
from dynafuse.config import resolve
from dynafuse.ir import Classed, Layout, Spec
from dynafuse.lowering.interpret import eager
from dynafuse.lowering.triton.compiler import load
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.select.data import inputs_for
from dynafuse.select.runners import runner
from tests.support import graphs
from tests.support.cases_of_sizes import CASES, Case, traced

CPU = torch.device("cpu")
GROUPS = [(torch.float32, (17, 30)), (torch.bfloat16, (32, 48)), (torch.bfloat16, (2, 3)), (torch.float32, (1,))]
"""Sizes of a class, or that have none; the first are no multiples of a block. Cases take turns at every other of them."""


def bounds(case: Case, size: int, dtype: torch.dtype = torch.float32, classes: bool = True) -> list[CanonicalRegion]:
    """The regions of a function at a size."""
    plan = graphs.planned(traced(case, size, dtype))
    return [key.canonical(plan.annotated, region, resolve(environ={}).key(), "sm90", classes) for region in plan.regions]


def regions(write: Callable[..., Any], *shapes: tuple[int, ...], classes: bool = True,
            dtype: torch.dtype = torch.float32) -> list[CanonicalRegion]:
    """The regions of a graph over tensors of some sizes."""
    plan = graphs.planned(graphs.built(write, *(torch.empty(shape, dtype=dtype) for shape in shapes)))
    return [key.canonical(plan.annotated, region, resolve(environ={}).key(), "sm90", classes) for region in plan.regions]


def relu(b: graphs.Builder, x: Node) -> Node:
    return b.op("aten.relu.default", x)


def one(write: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> CanonicalRegion:
    (found,) = regions(write, *shapes, **options)
    return found


def has_class(bound: CanonicalRegion) -> bool:
    assert isinstance(bound.code, Classed) == bool(bound.sizes)
    return isinstance(bound.code, Classed)


# Which sizes share a key ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 48, 64, 100, 4096, 5000, 8176])
def test_a_class_is_a_factor_of_two_and_whether_16_divides(size: int) -> None:
    first = one(relu, (size, 40))
    for other in (2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 48, 64, 100, 4096, 5000, 8176):
        alike = (size % 16 == 0, size.bit_length()) == (other % 16 == 0, other.bit_length())
        second = one(relu, (other, 40))
        assert (first.key == second.key) == alike == (key.diff(first, second) == [])


@pytest.mark.parametrize("size", [0, 1])
def test_zero_and_one_are_classes_of_their_own(size: int) -> None:
    for bound in regions(lambda b, x: (b.op("aten.relu.default", x), b.op("aten.exp.default", x)), (size, 40)):
        assert bound.code.inputs[0].shape[0] == size


def test_of_one_row_the_next_dimension_has_the_class() -> None:
    first, second = (one(relu, (1, size, 40)) for size in (65, 100))
    assert has_class(first) and first.key == second.key


@pytest.mark.parametrize("shapes", [((65, 40), (65, 44)), ((4, 65), (4, 66)), ((65, 4, 8), (65, 5, 8))])
def test_inner_extents_stay_exact(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    first, second = (one(relu, shape) for shape in shapes)
    assert first.key != second.key and key.diff(first, second)


def test_reduced_extents_stay_exact() -> None:
    rows = lambda b, x: b.op("aten.sum.dim_IntList", x, [1])  # noqa: E731
    columns = lambda b, x: b.op("aten.sum.dim_IntList", x, [0])  # noqa: E731
    assert one(rows, (65, 300)).key == one(rows, (100, 300)).key != one(rows, (65, 301)).key
    assert not has_class(one(columns, (65, 300))) and one(columns, (65, 300)).key != one(columns, (100, 300)).key


def test_without_the_option_every_size_is_its_own() -> None:
    first, second = (one(relu, (size, 40), classes=False) for size in (65, 100))
    assert first.key != second.key and not has_class(first) and first.code == first.spec


@pytest.mark.parametrize("executor", ["nvfuser", "inductor"])
def test_other_executors_keep_their_sizes(executor: str) -> None:
    made = one(relu, (65, 40))
    moved = key.rekeyed(made, replace(made.region, executor=executor), executor)
    assert moved.code == moved.spec and moved.sizes == ()
    assert key.rekeyed(moved, made.region, made.target) == made


@pytest.mark.parametrize("size", [65, 100, 127])
def test_the_order_of_operands_does_not_follow_from_sizes(size: int) -> None:
    def sum_of_views(size: int) -> CanonicalRegion:
        def write(b: graphs.Builder, x: Node, y: Node) -> Node:
            views = (b.op("aten.view.default", t, [size * 2, 40]) for t in (b.op("aten.exp.default", x), y))
            return b.op("aten.add.Tensor", *(b.op("aten.sin.default", view) for view in views))

        return one(write, (size, 80), (size, 2, 40))

    assert sum_of_views(size).key == sum_of_views(99).key


# What is said of classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "told"), [
    (65, 300, ["size s0 from 64 to 127 against 256 to 511"]),
    (64, 128, ["size s0 from 4 to 7 against 8 to 15"]),
    (65, 64, ["input 0: size (s0, 40) against (16*s0, 40)", "op 0: size (s0, 40) against (16*s0, 40)",
              "axis 0: size s0 against 16*s0", "output 0: size (s0, 40) against (16*s0, 40)",
              "size s0 from 64 to 127 against 4 to 7"]),
])
def test_differences_of_classes_are_told(first: int, second: int, told: list[str]) -> None:
    assert key.diff(one(relu, (first, 40)), one(relu, (second, 40))) == told


def test_a_class_says_which_sizes_it_has() -> None:
    assert str(one(relu, (48, 100)).code).splitlines()[:2] == ["s0: 2 to 3", "in0: float32[16*s0, 100] (100, 1)"]


# What kernels are made of ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("size", [64, 65, 2])
def test_the_spec_of_a_class_is_at_each_size_that_sizes(what: str, size: int) -> None:
    for bound in bounds(CASES[what], size):
        if has_class(bound):
            assert _reached(bound.code.at(*bound.sizes)) == _reached(hoist_scalars(bound.spec)[0])
            assert bound.code.least <= bound.sizes[0] <= bound.code.most


def _reached(spec: Spec) -> Spec:
    """The spec without strides that lead nowhere."""
    def layout(one: Layout) -> Layout:
        return replace(one, stride=tuple(step * (size != 1) for size, step in zip(one.shape, one.stride, strict=True)))

    return replace(spec, inputs=tuple(map(layout, spec.inputs)),
                   stores=tuple(replace(store, layout=layout(store.layout)) for store in spec.stores))


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("size", [64, 65])
def test_sizes_only_bound_kernels(what: str, size: int) -> None:
    for bound in filter(has_class, bounds(CASES[what], size)):
        mentions = [line for line in lower(bound.code).source.splitlines() if re.search(r"\bs0\b", line)]
        assert all(re.match(r"def |    [xy]_mask = [xy] < |.*tl\.(load|store)\(tmp", line) for line in mentions), mentions


@pytest.mark.parametrize("what", ["pointwise", "layer_norm", "softmax", "rms_norm"])
def test_a_power_of_two_has_the_kernel_that_it_would_have_alone(what: str) -> None:
    (bound,) = bounds(CASES[what], 4096)
    assert isinstance(bound.code, Classed)
    made, alone = lower(bound.code), lower(bound.code.at(*bound.sizes))
    assert re.sub(r"\bs0, ", "", made.source) == alone.source
    assert [launch.constants for launch in made.launches] == [launch.constants for launch in alone.launches]


@pytest.mark.parametrize("what", [name for name, case in CASES.items() if case.shares])
def test_schedules_are_those_of_powers_of_two(what: str) -> None:
    for made, alone in zip(bounds(CASES[what], 100), bounds(CASES[what], 64, classes=False), strict=True):
        (first, *_), (second, *_) = (lower(bound.code).launches for bound in (made, alone))
        assert (first.constants, first.warps) == (second.constants, second.warps)


@pytest.mark.parametrize(("rows", "wide", "classed"), [
    (16384, False, False),  # fits, as the class does not
    (21840, False, False),
    (30000, True, True),  # fits as little as the class
    (8192, False, True),
])
def test_offsets_stay_as_narrow_as_they_are(rows: int, wide: bool, classed: bool) -> None:
    made = one(relu, (rows, 98304), dtype=torch.int8)
    assert made.spec.wide == made.code.wide == wide and has_class(made) == classed
    kinds = dict(lower(made.code).launches[0].signature)
    assert kinds.get("s0") == (None if not classed else "i64" if wide else "i32")


# Right for all of them ------------------------------------------------------------------------------------------------


def interpreted(bound: CanonicalRegion) -> Kernel:
    lowered = lower(bound.code)
    return Kernel(bound.key, lowered.source, lowered.launches, lowered.workspaces, load(lowered, None), True)


def check(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.shape == right.shape and mine.dtype is right.dtype
        rounding = {torch.bfloat16: 2e-2, torch.float32: 1e-4}.get(right.dtype, 0.0)
        torch.testing.assert_close(mine, right, rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize(("what", "dtype", "sizes"), [
    (what, *group) for number, what in enumerate(CASES) for group in GROUPS[number % 2::2]], ids=str)
def test_one_kernel_is_right_for_every_size(what: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    check_sizes(what, dtype, sizes)


@pytest.mark.parametrize("what", ["softmax", "layer_norm"])
def test_rows_that_share_programs_may_be_any_number(what: str) -> None:
    (bound,) = bounds(CASES[what], 1060)
    assert dict(lower(bound.code).launches[0].constants)["XBLOCK"] > 1
    check_sizes(what, torch.float32, (1025, 1060))


def check_sizes(what: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """A case's regions have one kernel for all of the sizes, if they are to, and it is right."""
    kernels: dict[str, Kernel] = {}
    found = {size: bounds(CASES[what], size, dtype) for size in sizes}
    for size in sizes:
        for bound in found[size]:
            if bound.key not in kernels:
                kernels[bound.key] = interpreted(bound)
            inputs = inputs_for(bound.spec, {}, CPU)
            copies = [t.clone() for t in inputs]
            theirs = eager(bound.spec, {}, CPU)(copies) if CASES[what].plain else _alone(CASES[what], size, dtype, bound)
            check(runner(kernels[bound.key], bound.spec, {}, CPU, bound.family, bound.classes)(inputs), theirs)
    assert len(kernels) == len(found[sizes[0]]) or not CASES[what].shares


def _alone(case: Case, size: int, dtype: torch.dtype, made: CanonicalRegion) -> Sequence[torch.Tensor]:
    """What the kernel for that size alone computes: of random numbers the same ones."""
    (alone,) = (bound for bound in bounds(case, size, dtype, classes=False) if bound.spec == made.spec)
    return runner(interpreted(alone), alone.spec, {}, CPU)(inputs_for(alone.spec, {}, CPU))


# Through the backend --------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(32), torch.nn.RMSNorm(32)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        turned = torch.cat([-q[..., 4:], q[..., :4]], -1) * 0.6 + q * 0.8
        mixed = (turned @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend.dynafuse, dynamic=False, options={"size_classes": True, **options})


def test_the_second_batch_compiles_no_kernel() -> None:
    backend.reset()
    block = Block()
    call = compiled(block)
    with torch.no_grad():
        counts = []
        for batch in (5, 7, 8):
            x = torch.randn(batch, 6, 32)
            torch.testing.assert_close(call(x), block(x), rtol=1e-4, atol=1e-5)
            counts.append(backend.stats()["compiled"])
    assert counts[0] == counts[1] < counts[2]
    backend.reset()


@pytest.mark.usefixtures("cached")
def test_kernels_on_disk_serve_their_class() -> None:
    found = []
    for size in (17, 30, 40):
        backend.reset()
        x, y = torch.randn(size, 40), torch.randn(40)
        torch.testing.assert_close(compiled(lambda x, y: (x * y).softmax(-1))(x, y), (x * y).softmax(-1))
        found.append((backend.stats()["disk_hits"], backend.stats()["compiled"]))
    assert found == [(0, 1), (1, 0), (0, 1)]
    backend.reset()


def test_training_is_right_at_every_batch() -> None:
    block, other = Block(), Block()
    other.load_state_dict(block.state_dict())
    call = compiled(block)
    for batch in (5, 7):
        x = torch.randn(batch, 6, 32)
        call(x).square().sum().backward()
        other(x).square().sum().backward()
        for (name, ours), theirs in zip(block.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_dynamic_graphs_have_no_classes() -> None:
    with graphs.recorded() as found:
        call = torch.compile(lambda x, y: (x + y).softmax(-1), backend=backend.dynafuse, dynamic=True,
                             options={"size_classes": True})
        for size in (5, 70, 33):
            x, y = torch.randn(size, 50), torch.randn(50)
            torch.testing.assert_close(call(x, y), (x + y).softmax(-1))
    bounds = [bound for graph in found for bound in graph.bounds.values()]
    assert len(found) == 1 and bounds and not any(map(has_class, bounds))


def test_folds_of_a_class_share_their_family() -> None:
    def fold(b: graphs.Builder, x: Node, *rest: Node) -> Node:
        for other in rest:
            x = b.op("aten.add.Tensor", x, other)
        return b.op("aten.tanh.default", x)

    found = [key.family(one(fold, *[(size, 40)] * terms), 3) for size, terms in ((65, 5), (100, 7), (127, 8))]
    assert all(found) and len({member.key for member in found if member}) == 1
    for member in found:
        assert member is not None and isinstance(member.code, Classed)
        inputs = inputs_for(member.spec, {}, CPU)
        ours = runner(interpreted(member), member.spec, {}, CPU, member.family, member.classes)(inputs)
        check(ours, eager(member.spec, {}, CPU)(inputs))


def test_a_spec_is_its_own_typical_one() -> None:
    spec = one(relu, (65, 40), classes=False).spec
    assert spec.typical is spec and type(one(relu, (65, 40)).code.typical) is Spec
