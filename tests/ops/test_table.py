"""Every row is well formed, and the ops that real graphs are made of have rows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

import dynafuse.ops as ops
from dynafuse.lowering.triton.reductions import recurrence
from dynafuse.ops import Call, Kind, Row, View
from dynafuse.ops.overloads import overload
from dynafuse.ops.reductions import correction, keepdim, reduced_dims

FREQUENT = (Path(__file__).parent / "op_frequency.txt").read_text(encoding="utf-8").split()
LOWERED = (Kind.VIEW, Kind.INDEX, Kind.GATHER, Kind.CREATION, Kind.RANDOM)
every_row = pytest.mark.parametrize("row", ops.rows(), ids=lambda row: str(row.target))


@pytest.mark.parametrize("name", FREQUENT)
def test_frequent_ops_have_rows(name: str) -> None:
    target = overload(name)
    assert target is None or ops.lookup(target) is not None


@every_row
def test_a_row_is_made_in_the_way_of_its_kind(row: Row) -> None:
    assert (row.emit is not None) == (row.kind is Kind.POINTWISE)
    assert (row.lower is not None) == (row.kind in LOWERED)
    assert (row.reduction is not None) == (row.kind in (Kind.REDUCTION, Kind.SCAN))
    assert bool(row.reason) == (row.kind is Kind.OPAQUE) == (not row.fusible)
    assert row.flops > 0


@every_row
def test_templates_and_raw_positions_name_arguments(row: Row) -> None:
    count = len(row.target._schema.arguments)
    used = re.findall(r"\{(\d+)\}", row.emit) if isinstance(row.emit, str) else []
    assert all(int(position) < count for position in used)
    assert all(position < count for position in row.raw)


@every_row
def test_what_a_row_says_of_its_kind(row: Row) -> None:
    assert (row.indices is not None) == (row.kind in (Kind.GATHER, Kind.SCATTER))
    assert (row.scatter is not None) == (row.kind is Kind.SCATTER)
    assert row.otherwise is None or row.otherwise.kind is Kind.SCATTER
    assert row.view is None or row.kind in (Kind.VIEW, Kind.INDEX)
    assert (row.order is not None) == (row.view is View.PERMUTE)
    assert row.kind is Kind.OPAQUE or not (row.library or row.unfilled or row.by_strides)


@pytest.mark.parametrize("row", [row for row in ops.rows() if row.reduction not in (None, "var_mean")],
                         ids=lambda row: str(row.target))
def test_rows_count_the_states_of_their_recurrences(row: Row) -> None:
    assert row.reduction is not None
    assert row.states == len(recurrence(row.reduction, torch.float32, torch.float32).states)


@pytest.mark.parametrize(("name", "args"), [
    ("aten.permute.default", {"dims": [2, -3, 1]}), ("aten.transpose.int", {"dim0": 0, "dim1": -1}),
    ("prims.transpose.default", {"permutation": [1, 2, 0]}),
])
def test_the_order_of_a_permutation(name: str, args: dict[str, Any]) -> None:
    target, x = overload(name), torch.arange(24).view(2, 3, 4)
    row = ops.lookup(target)
    assert target is not None and row is not None and row.order is not None
    assert torch.equal(target(x, *args.values()), x.permute(row.order(args, 3)))


@pytest.mark.parametrize("name", ["aten.mm.default", "aten.convolution.default", "aten._fft_c2c.default",
                                  "aten._scaled_dot_product_flash_attention.default", "aten.linear.default"])
def test_calls_of_libraries(name: str) -> None:
    assert ops.is_library(overload(name))
    assert not ops.is_library(torch.ops.aten.add.Tensor) and not ops.is_library(torch.ops.aten.sort.default)


@pytest.mark.parametrize(
    ("args", "rank", "dims", "kept"),
    [
        ({"self": None}, 3, (0, 1, 2), False),
        ({"self": None, "dim": [-1, 0], "keepdim": True}, 3, (0, 2), True),
        ({"self": None, "dim": [], "keepdim": False}, 2, (0, 1), False),
        ({"self": None, "dim": None, "keepdim": False}, 2, (0, 1), False),
        ({"self": None, "dim": -2, "keepdim": False}, 2, (0,), False),
        ({"self": None, "dim": [-1], "keepdim": False}, 0, (), False),
        ({"inp": None, "dims": [1]}, 2, (1,), False),
    ],
)
def test_reduced_dims(args: dict[str, object], rank: int, dims: tuple[int, ...], kept: bool) -> None:
    assert reduced_dims(args, rank) == dims
    assert keepdim(args) is kept


def test_correction() -> None:
    assert correction({"correction": None}) == 1.0 and correction({"correction": 0}) == 0.0 and correction({}) == 1.0


def call_of(target: torch._ops.OpOverload, shape: tuple[int, ...], **args: object) -> Call:
    return Call(target, args, tuple(sympy.Integer(size) for size in shape), torch.float32)


def test_refusals_say_why() -> None:
    row = ops.lookup(torch.ops.aten.avg_pool2d.default)
    assert row is not None and row.accepts is not None
    assert row.accepts(call_of(row.target, (1, 1, 2, 2), kernel_size=[3, 3], stride=[], padding=[0])) == ""
    assert "36 elements" in row.accepts(call_of(row.target, (1, 1, 2, 2), kernel_size=[6, 6], stride=[], padding=[0]))
    masks = ops.lookup(torch.ops.aten.index.Tensor)
    assert masks is not None and masks.accepts is not None
    assert "mask" in masks.accepts(call_of(masks.target, (3,), indices=[torch.ones(3, dtype=torch.bool)]))
    assert masks.accepts(call_of(masks.target, (3,), indices=[torch.ones(3, dtype=torch.int64)])) == ""


@pytest.mark.parametrize("name", ["sub.Tensor", "sub.Scalar", "rsub.Scalar", "neg.default"])
def test_differences_of_bools_are_left_to_eager_which_raises(name: str) -> None:
    packet, overload = name.split(".")
    row = ops.lookup(getattr(getattr(torch.ops.aten, packet), overload))
    assert row is not None and row.accepts is not None
    call = call_of(row.target, (3,))
    assert row.accepts(call) == "" and "bools" in row.accepts(dataclasses.replace(call, dtype=torch.bool))


def test_a_user_can_add_a_row() -> None:
    with torch.library._scoped_library("dynafuse_rows", "DEF") as library:
        library.define("softcap(Tensor x, float cap) -> Tensor")
        target = torch.ops.dynafuse_rows.softcap.default
        assert ops.lookup(target) is None
        ops.register(ops.pointwise(target, "{1} * lm.tanh({0} / {1})"))
        row = ops.lookup(target)
        assert row is not None and row.fusible
        ops.table._TABLE.pop(target)
