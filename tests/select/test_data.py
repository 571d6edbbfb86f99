"""Data that is made up for measuring: its layouts, its indices, and that kernels on it compute what torch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.ir import Layout, Spec
from dynafuse.lowering.interpret import Interpreter, eager
from dynafuse.ops import lookup, table
from dynafuse.select import data, indices
from dynafuse.select.runners import runner
from tests.support import graphs
from tests.support.tuning_bounds import bounds, native_kernel, softmax

CPU = torch.device("cpu")
I64 = torch.int64


def region(write: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> CanonicalRegion:
    found = bounds(graphs.built(write, *inputs, dynamic=dynamic))
    assert len(found) == 1, found
    return found[0]


# ---------------------------------------------------------------------- layouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.bool, torch.uint8,
                                   torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize(("shape", "stride", "elements"), [
    ((8, 4), (4, 1), 32), ((8, 4), (1, 8), 32), ((8, 4), (0, 1), 4), ((8, 4), (0, 0), 1), ((), (), 1), ((0, 3), (3, 1), 0),
    ((3, 4), (2, 1), 8), ((2, 3, 4, 5), (60, 1, 15, 3), 120), ((4, 3), (10, 2), 35),
], ids=str)
def test_tensors_have_their_layout(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], elements: int
) -> None:
    for alignment in {16, 8, dtype.itemsize} - set(range(1, dtype.itemsize)):
        layout = Layout(dtype, shape, stride, alignment)
        spec = Spec((layout,), (), (), (), (), ())
        (made,) = data.inputs_for(spec, {}, CPU)
        (other,) = data.copies([made])
        for tensor in (made, other):
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (shape, stride, dtype)
        assert data.extent_at(layout, {}) == elements
        assert elements == 0 or made.data_ptr() % 16 == alignment % 16
        if elements and dtype is not torch.float8_e4m3fn:
            assert torch.equal(made, other)
            assert made.data_ptr() != other.data_ptr()
        if elements > 30 and dtype is not torch.float8_e4m3fn:
            assert len(set(made.flatten().tolist())) > 1


def test_dynamic_sizes_are_taken_from_the_hints() -> None:
    bound = region(softmax, torch.randn(24, 40), dynamic=True)
    (made,) = data.inputs_for(bound.spec, {"s0": 3, "s1": 5}, CPU)
    assert made.shape == (3, 5) and made.stride() == (5, 1)
    assert data.needed_bytes(bound.spec, {"s0": 3, "s1": 5}) == 2 * 15 * 4


def test_the_same_data_every_time_and_no_global_random_numbers() -> None:
    bound, before = region(softmax, torch.randn(8, 4)), torch.get_rng_state()
    (one,), (other,) = (data.inputs_for(bound.spec, {}, CPU) for _ in range(2))
    assert torch.equal(one, other) and torch.equal(before, torch.get_rng_state())


# ---------------------------------------------------------------------- indices

ROWS, COLUMNS = 7, 5
TABLE = torch.randn(ROWS, COLUMNS)


def ints(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def embedding(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.embedding.default", table, at))


def gather(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.gather.default", table, 0, at))


def gather_last(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.gather.default", table, -1, at))


def select(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.index_select.default", table, 1, at))


def index(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.index.Tensor", table, [None, at]))


def index_both(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.index.Tensor", table, [at, at]))


def scatter(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.relu.default", g.op("aten.scatter.value", table, 1, at, 1.0))


def ignoring(g: graphs.Builder, table: Node, at: Node) -> Node:
    """As a loss ignores targets."""
    kept = g.op("aten.where.self", g.op("aten.ne.Scalar", at, -100), at, g.op("aten.full_like.default", at, 0))
    return gather(g, table, kept)


def cast(g: graphs.Builder, table: Node, at: Node) -> Node:
    return gather(g, table, g.op("prims.convert_element_type.default", at, I64))


def shifted(g: graphs.Builder, table: Node, at: Node) -> Node:
    """Positions that begin at two: from zero on, all but the last two are in range."""
    return embedding(g, table, g.op("aten.add.Tensor", at, 2))


def used_twice(g: graphs.Builder, table: Node, at: Node) -> Node:
    return g.op("aten.add.Tensor", embedding(g, table, at), g.op("aten.unsqueeze.default", g.op(
        "aten.gather.default", g.op("aten.select.int", table, 0, 0), 0, at), 1))


def nested(g: graphs.Builder, table: Node, at: Node) -> Node:
    again = g.op("aten.index_select.default", at, 0, at)
    return embedding(g, table, again)


def negated(g: graphs.Builder, table: Node, at: Node) -> Node:
    return embedding(g, table, g.op("aten.sub.Tensor", at, 1))


def from_floats(g: graphs.Builder, table: Node, at: Node) -> Node:
    wide = g.op("prims.convert_element_type.default", g.op("aten.mul.Tensor", at, 3.0), I64)
    return embedding(g, table, wide)


def random(g: graphs.Builder, table: Node, at: Node) -> Node:
    drawn = g.op("prims.inductor_randint.default", 0, 3, [4], g.op("prims.inductor_lookup_seed.default", at, 0))
    return embedding(g, table, drawn)


SOUND: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = [
    (embedding, (TABLE, ints(50)), ROWS),
    (embedding, (TABLE, ints(50, dtype=torch.int32)), ROWS),
    (embedding, (torch.randn(300, 3), ints(50, 4)), 300),
    (gather, (TABLE, ints(50, COLUMNS)), ROWS),
    (gather_last, (TABLE, ints(ROWS, 60)), COLUMNS),
    (select, (TABLE, ints(50)), COLUMNS),
    (index, (TABLE, ints(50)), COLUMNS),
    (index_both, (TABLE, ints(50)), COLUMNS),
    (scatter, (TABLE, ints(ROWS, 1)), COLUMNS),
    (ignoring, (TABLE, ints(50, COLUMNS)), ROWS),
    (cast, (TABLE, ints(50, COLUMNS, dtype=torch.uint8)), ROWS),
    (cast, (torch.randn(1000, COLUMNS), ints(50, COLUMNS, dtype=torch.int8)), 1000),
    (shifted, (TABLE, ints(50)), ROWS),
    (used_twice, (TABLE, ints(50)), COLUMNS),
    (nested, (TABLE, ints(4)), 4),
]


def check_indices(spec: Spec, hints: dict[str, int]) -> None:
    """Every index of every op is within what it indexes, and torch, which checks, evaluates all of it."""
    inputs = data.inputs_for(spec, hints, CPU)
    values = Interpreter(spec, hints, inputs)
    for position in range(len(spec.ops)):
        for use in indices.uses(spec, position, hints):
            at = values.value(use.index).to(I64)
            assert at.numel() == 0 or (int(at.min()) >= 0 and int(at.max()) < use.size), (use, at)
    values.stored()


@pytest.mark.parametrize(("write", "inputs", "limit"), SOUND, ids=lambda value: getattr(value, "__name__", ""))
def test_indices_stay_within_what_they_index(write: Any, inputs: Any, limit: int) -> None:
    spec = region(write, *inputs).spec
    (number,) = [i for i, layout in enumerate(spec.inputs) if not layout.dtype.is_floating_point]
    assert indices.rules(spec, {}).limits == {number: limit}
    check_indices(spec, {})


@pytest.mark.parametrize(("write", "at", "reason"), [
    (negated, ints(50), "from -1 to -1, not within 7 elements"),
    (from_floats, torch.randn(50), "is computed from in1, which is not of integers"),
    (random, ints(3), "its index is random"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_indices_that_are_not_sure_are_not_made_up(write: Any, at: torch.Tensor, reason: str) -> None:
    with pytest.raises(data.NoData, match=reason):
        data.inputs_for(region(write, TABLE, at).spec, {}, CPU)


def test_an_index_that_is_overwritten_is_not_trusted() -> None:
    """After some runs it would be anywhere."""
    spec = region(embedding, TABLE, ints(50)).spec
    (number,) = indices.rules(spec, {}).limits
    counted = replace(spec, stores=(*spec.stores, replace(spec.stores[0], into=number)))
    assert indices.rules(counted, {}).reason.endswith(f"its index depends on in{number}, which is overwritten")


def test_a_gather_that_is_not_known_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = region(gather, TABLE, ints(50, COLUMNS)).spec
    row = lookup(torch.ops.aten.gather.default)
    assert row is not None
    monkeypatch.setitem(table._TABLE, row.target, replace(row, indices=None))
    assert "is not known" in indices.rules(spec, {}).reason


def test_an_index_that_torch_cannot_evaluate_is_not_trusted() -> None:
    spec = region(shifted, TABLE, ints(50)).spec
    ops = [replace(op, args=(("self", op.args[0][1]),)) if op.target == "aten.add.Tensor" else op for op in spec.ops]
    with pytest.raises(data.NoData, match="cannot be evaluated"):
        data.inputs_for(replace(spec, ops=tuple(ops)), {}, CPU)


def test_an_index_that_depends_on_no_input_is_left_alone() -> None:
    def write(g: graphs.Builder, table: Node) -> Node:
        return embedding(g, table, g.op("aten.arange.start_step", 0, ROWS, 2, dtype=I64))

    rules = indices.rules(region(write, TABLE).spec, {})
    assert (rules.limits, rules.checks, rules.reason) == ({}, (), "")


def test_a_region_without_inputs_has_no_data_and_nothing_to_check() -> None:
    def write(g: graphs.Builder) -> Node:
        return g.op("aten.full.default", [8, 4], 2.0)

    assert data.inputs_for(region(write).spec, {}, CPU) == []


SIZES = st.integers(1, 40)
KINDS = st.sampled_from([embedding, gather, select, index, ignoring, shifted, nested])


@settings(max_examples=60, deadline=None)
@given(KINDS, SIZES, SIZES, SIZES, st.sampled_from([torch.int32, I64]), st.booleans())
def test_no_index_ever_leaves_what_it_indexes(
    write: Any, rows: int, columns: int, count: int, dtype: torch.dtype, dynamic: bool
) -> None:
    dtype = I64 if write in (gather, ignoring) else dtype
    at = ints(count, columns, dtype=dtype) if write in (gather, ignoring) else ints(count, dtype=dtype)
    for bound in bounds(graphs.built(write, torch.randn(rows, columns), at, dynamic=dynamic)):
        try:
            check_indices(bound.spec, bound.hints)
        except data.NoData:
            assert (write is shifted and rows <= 2) or (write is nested and rows < count)


# ---------------------------------------------------------------------- kernels on it


def updated(g: graphs.Builder, x: Node, y: Node) -> tuple[Node, Node]:
    return g.op("aten.copy_.default", x, g.op("aten.add.Tensor", x, y)), g.op("aten.exp.default", g.op("aten.add.Tensor", x, y))


def total(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.sum.default", x)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("write", "inputs"), [
    (softmax, (torch.randn(9, 33),)), (updated, (torch.randn(9, 33), torch.randn(9, 33))), (total, (torch.randn(3, 70_000),)),
    (embedding, (TABLE, ints(50))),
], ids=lambda value: getattr(value, "__name__", ""))
def test_kernels_get_their_arguments(write: Any, inputs: Any, dynamic: bool) -> None:
    for bound in bounds(graphs.built(write, *inputs, dynamic=dynamic)):
        hints = bound.hints
        made = data.inputs_for(bound.spec, hints, CPU)
        mine, theirs = data.copies(made), data.copies(made)
        found = runner(native_kernel(bound), bound.spec, hints, CPU)(mine)
        expected = eager(bound.spec, hints)(theirs)
        for one, other in zip([*found, *mine], [*expected, *theirs], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_kernels_that_allocate_get_tensors_then_sizes() -> None:
    class Foreign:
        scalars = (1, 0)

        def run(self, inputs: list[Any], device: Any) -> list[torch.Tensor]:
            self.given = inputs, device
            return [inputs[0]]

    bound, kernel = region(softmax, torch.randn(24, 40), dynamic=True), Foreign()
    hints = bound.hints
    made = data.inputs_for(bound.spec, hints, CPU)
    runner(kernel, bound.spec, hints, torch.device("cuda", 1))(made)
    assert kernel.given == ([made[0], 40, 24], 1)
