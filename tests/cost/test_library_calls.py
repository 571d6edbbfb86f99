"""Prices of library calls: by their arithmetic where it is known, by their bytes where it is not. Nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import flop_counter

from dynafuse.cost import device as devices
from dynafuse.cost.library_calls import FORMULAS, call_flops, op_prediction
from dynafuse.fx import UNKNOWN_SIZE, hint
from dynafuse.report import explain

aten = torch.ops.aten
H200 = devices.describe("h200")
BATCH, ROWS, COLUMNS, WIDTH, VALUE_WIDTH = 2, 16, 24, 8, 4
FORWARD = 2 * BATCH * 8 * ROWS * COLUMNS * (WIDTH + VALUE_WIDTH)
BACKWARD = 2 * BATCH * 8 * ROWS * COLUMNS * (3 * WIDTH + 2 * VALUE_WIDTH)
ATTENTIONS = [
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
]
BACKWARDS = [
    aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward,
]


def operands(heads: int) -> list[torch.Tensor]:
    query = torch.empty(BATCH, 8, ROWS, WIDTH, device="meta")
    key = torch.empty(BATCH, heads, COLUMNS, WIDTH, device="meta")
    return [query, key, torch.empty(BATCH, heads, COLUMNS, VALUE_WIDTH, device="meta")]


@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_attention_is_priced_whatever_the_heads_of_its_keys(attention: Any, heads: int) -> None:
    result = torch.empty(BATCH, 8, ROWS, VALUE_WIDTH, device="meta")
    assert call_flops(attention.default, operands(heads), {}, result) == FORWARD
    query, key, value = operands(heads)
    assert call_flops(attention.default, (query, key), {"value": value}, result) == FORWARD


@pytest.mark.parametrize("heads", [8, 2, 1])
@pytest.mark.parametrize("attention", BACKWARDS, ids=str)
def test_the_backward_of_attention_too(attention: Any, heads: int) -> None:
    gradient = torch.empty(BATCH, 8, ROWS, VALUE_WIDTH, device="meta")
    assert call_flops(attention.default, [gradient, *operands(heads)], {}, tuple(operands(heads))) == BACKWARD


def test_with_as_many_heads_the_count_is_torchs() -> None:
    for attention, found in ((ATTENTIONS[0], FORWARD), (BACKWARDS[0], BACKWARD)):
        gradient = [] if attention in ATTENTIONS else [(BATCH, 8, ROWS, VALUE_WIDTH)]
        given = [*gradient, *(tuple(one.shape) for one in operands(8))]
        assert flop_counter.flop_registry[attention](*given, out_val=None) == found


def _refuses(*args: Any, **kwargs: Any) -> int:
    raise AssertionError("not these shapes")


@pytest.mark.parametrize("formula", [_refuses, lambda *args, **kwargs: None, lambda *args, **kwargs: int("no")])
def test_a_formula_that_fails_leaves_a_price_by_bytes(formula: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_counter.flop_registry, aten.mm, formula)
    a = torch.empty(64, 64, device="meta")
    assert call_flops(aten.mm.default, (a, a), {}, a) is None
    found = op_prediction(aten.mm.default, (a, a), {}, a, 1 << 30, H200)
    moved = op_prediction(aten.relu.default, (a,), {}, a, 1 << 30, H200)
    assert found.partial and not moved.partial and found.device_us == moved.device_us > 0


def test_own_formulas_need_no_shapes_that_fit() -> None:
    for packet in FORMULAS:
        for name in packet.overloads():
            assert call_flops(getattr(packet, name), (), {}, None) is None
            assert call_flops(getattr(packet, name), (torch.empty(()),) * 4, {}, None) in (None, 2.0)


def test_ops_without_a_formula_are_known_to_compute_little_unless_a_library_runs_them() -> None:
    a = torch.empty(4, 4)
    assert call_flops(aten.sort.default, (a,), {}, None) == 0
    assert call_flops(aten._fft_c2c.default, (a, [0], 0, True), {}, a) is None
    assert call_flops(aten.mv.default, (a, a[0]), {}, a[0]) == 32


def test_ordering_values_takes_more_than_reading_them() -> None:
    x = torch.empty(1000, 32, device="meta")

    def us(op: Any, *args: Any) -> float:
        return op_prediction(op, (x, *args), {}, (x, x), 1 << 18, H200).device_us

    for op, *args in ((aten.sort.default,), (aten.sort.stable,), (aten.topk.default, 4), (aten.median.dim, 1)):
        assert us(op, *args) > 5 * us(aten.relu.default), op


def test_sizes_that_nobody_knows_have_a_price() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    assert mode.shape_env is not None
    size = mode.shape_env.create_unbacked_symint()
    torch._check(size >= 2)
    with mode:
        a = torch.empty(size, 64)
        b = a.t()
    assert hint(size) == hint(size * 2) == UNKNOWN_SIZE
    assert call_flops(aten.mm.default, (a, b), {}, a) == 2 * UNKNOWN_SIZE * 64 * UNKNOWN_SIZE
    assert not op_prediction(aten.mm.default, (a, b), {}, a, 1, H200).partial


def test_the_report_tells_that_a_price_is_of_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_counter.flop_registry, aten.mm, _refuses)
    report = explain(lambda x: torch.relu(x @ x), torch.randn(32, 32), device="h200")
    (step,) = (step for step in report.graphs[0].steps if step.ops == ("aten.mm.default",))
    assert step.notes == ("priced by its bytes alone: how much it computes is not known",) and step.predicted_us
    assert "priced by its bytes alone" in str(report).replace("\n", " ")


def test_the_host_takes_longer_for_a_library_than_for_a_plain_kernel() -> None:
    x, w = torch.empty(2, 8, 4, 4, device="meta"), torch.empty(8, 8, 1, 1, device="meta")
    conv = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    matrix = torch.empty(8, 8, device="meta")

    def host_us(op: Any, *args: Any) -> float:
        return op_prediction(op, args, {}, matrix, 1 << 10, H200).host_us

    def gradients(*wanted: bool) -> float:
        return op_prediction(aten.convolution_backward.default, (x, x, w, None, *conv, list(wanted)), {}, (x, w, None),
                             1 << 10, H200).host_us

    assert host_us(aten.relu.default, matrix) == H200.host_us_eager
    assert host_us(aten.mm.default, matrix, matrix) == H200.host_us_contraction
    assert op_prediction(aten.convolution.default, (x, w, None, *conv), {}, x, 1 << 10, H200).host_us == H200.host_us_convolution
    assert [gradients(True, True, False), gradients(False, True, True)] == [2 * H200.host_us_convolution, H200.host_us_convolution]
