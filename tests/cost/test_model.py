"""The cost model: its formulas, its monotonicity, that constants flip choices, and how it compares with measurements."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynafuse.cost import model as cost
from dynafuse.cost.device import CLASSES, EXECUTORS, LENGTHS, describe
from dynafuse.cost.model import (
    Prediction,
    Work,
    choose,
    family_gain_us,
    family_loss_us,
    meanwhile,
    objective,
    predict,
)

# The shipped description, with prices of rows that these tests tell apart whatever is measured next.
H200 = describe("h200").overridden({
    "efficiency_triton_row": 0.86, "efficiency_nvfuser_row": 0.92, "length_triton_row_16384": 1.0,
    "length_nvfuser_row_16384": 0.87, "length_triton_row_256": 0.7, "length_nvfuser_row_256": 0.7,
    "host_us_triton": 6.1, "host_us_nvfuser": 11.0, "launch_us_triton": 2.0, "launch_us_nvfuser": 2.0,
    "allocation_us": 0.9, "host_us_eager": 7.1, "efficiency_eager_pointwise": 0.9, "launch_us_eager": 2.0,
    "efficiency_triton_pointwise": 0.98, "efficiency_inductor_row": 0.86, "compile_s_nvfuser": 0.3,
})
MB = 1_000_000

works = st.builds(
    Work,
    bytes=st.integers(1, 10**11),
    flops=st.floats(0, 1e13),
    programs=st.integers(1, 10**7),
    kernel_class=st.sampled_from(CLASSES),
    launches=st.integers(1, 3),
    width=st.sampled_from((1, 2, 4, 8)),
    length=st.integers(0, 10**6),
    outputs=st.integers(1, 4),
)
executors = st.sampled_from(EXECUTORS)
times = st.floats(0, 1e6)
predictions = st.builds(Prediction, times, times, st.floats(0, 100), times)


def row(bytes_: int = 134 * MB, length: int = 4096, rows: int = 8192) -> Work:
    return Work(bytes_, 0.0, rows, "row", length=length)


def region_us(work: Work, device: cost.Device, executor: str = "triton") -> float:
    return predict(work, device, executor).device_us


def all_of(work: Work, device: cost.Device = H200) -> dict[str, Prediction]:
    return {executor: predict(work, device, executor) for executor in EXECUTORS}


# ---------------------------------------------------------------------- the formulas


def test_the_worked_example() -> None:
    """Two bfloat16[8192, 4096] added: 201 MB at the share of the bandwidth that pointwise kernels reach."""
    work = Work(3 * 8192 * 4096 * 2, 3.4e7, 131072, "pointwise")
    expected = 3 * 8192 * 4096 * 2 / (4.12e6 * 0.98) + 2.0
    assert region_us(work, H200) == pytest.approx(expected, rel=1e-3) == pytest.approx(52, rel=0.01)


def test_arithmetic_bounds_when_it_takes_longer() -> None:
    work = Work(1000, 4e9, 10**6, "pointwise")
    assert region_us(work, H200) == pytest.approx(4e9 / 40e6 + 2.0, rel=1e-3)


@pytest.mark.parametrize(("length", "programs", "expected"), [
    (1023, 132, 20.0), (1024, 132, 30.0 + 0.25 * 5.0), (65536, 3167, 30.0 + 0.25 * 5.0), (65536, 3168, 20.0)])
def test_few_programs_of_long_rows_load_and_compute_in_turns(length: int, programs: int, expected: float) -> None:
    """By itself the arithmetic takes 20 µs, or 30 so; memory 5."""
    device = H200.overridden({"efficiency_triton_row": 1.0, "bandwidth_tbs": 1.0} | {f"length_triton_row_{n}": 1.0 for n in LENGTHS})
    assert cost.work_us(Work(5_000_000, 8e8, programs, "row", length=length), device) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("us", [16.0, 20.0, 60.0])
def test_an_efficiency_to_match_is_one_of_memory_and_arithmetic_in_turns(us: float) -> None:
    """Whichever takes longer: the arithmetic 15 µs with its launch."""
    work = Work(5_000_000, 3.5e8, 132, "row", length=4096)
    needed = cost.efficiency_to_match(work, H200, "triton", us)
    assert needed is not None
    assert region_us(work, H200.overridden({"efficiency_triton_row": needed})) == pytest.approx(us, rel=1e-6)


def test_few_programs_use_a_share_of_the_device() -> None:
    some, all_, more = (cost.work_us(dataclasses.replace(row(), programs=n), H200) for n in (33, 132, 133))
    assert some == pytest.approx(4 * all_) and more == all_


def test_a_kernel_of_next_to_no_work_takes_half_of_a_launch() -> None:
    """What filling the device takes, and the last programs, comes with the work."""
    none, little, much = (region_us(Work(n, 0.0, 10**6, "pointwise"), H200) - n / (4.12e6 * 0.98) for n in (0, MB // 2, 90 * MB))
    assert none == pytest.approx(0.55 * 2.0) and much == pytest.approx(2.0, rel=0.01) and none < little < much


def test_what_combines_the_results_of_programs_waits_for_them() -> None:
    one, split = (region_us(Work(90 * MB, 0.0, 10**6, "split", launches=n), H200) for n in (1, 2))
    assert split - one == pytest.approx(H200.launch_us_triton, rel=0.01)
    waiting = cost.launched_us(Work(90 * MB, 0.0, 10**6, "split"), H200) - cost.launched_us(Work(90 * MB, 0.0, 10**6, "row"), H200)
    assert waiting == pytest.approx(H200.combine_us, rel=0.01), "whether a second kernel does, or the last program"
    assert region_us(Work(90 * MB, 0.0, 10**6, "split", launches=2), H200, "nvfuser") == pytest.approx(
        region_us(Work(90 * MB, 0.0, 10**6, "split"), H200, "nvfuser")), "all in one kernel"


def test_triton_launches_and_allocates_and_others_do_it_in_their_call() -> None:
    work = Work(1000, 0.0, 1, "rowcol", launches=2, outputs=3)
    assert predict(work, H200, "triton").host_us == pytest.approx(2 * 6.1 + 4 * 0.9)
    assert predict(work, H200, "nvfuser").host_us == 11.0
    assert predict(work, H200, "inductor").host_us == 2 * 10.0
    assert predict(work, H200, "eager").host_us == 7.1
    further = region_us(work, H200, "triton") - region_us(dataclasses.replace(work, launches=1), H200, "triton")
    assert 0.55 * H200.launch_us_triton < further < H200.launch_us_triton
    assert region_us(work, H200, "nvfuser") == region_us(dataclasses.replace(work, launches=1), H200, "nvfuser")


def test_captured_nodes_cost_a_replay_instead_of_a_launch() -> None:
    found = predict(row(), H200)
    assert found.device_us - found.captured_us == pytest.approx(H200.launch_us_triton - H200.replay_us, rel=0.01)


def test_what_is_compiled_needs_no_compiling() -> None:
    assert predict(row(), H200, "nvfuser").compile_s == 0.3
    assert predict(row(), H200, "nvfuser", compiled=True).compile_s == 0


def test_eager_ops_are_priced_as_pointwise_ones() -> None:
    work = Work(90 * MB, 0.0, 1 << 30, "pointwise")
    assert region_us(work, H200, "eager") == pytest.approx(90 / (4.12 * 0.9) + 2.0, rel=1e-3)


def test_objective_by_hand() -> None:
    one = Prediction(device_us=30, host_us=10, compile_s=2, captured_us=29)
    assert objective(one, H200) == pytest.approx(30 + 0.1 * 10 + 2)
    assert objective(dataclasses.replace(one, host_us=100), H200) == pytest.approx(100 + 0.1 * 30 + 2)
    assert objective(one, H200, captured=True) == pytest.approx(29 + 2)


CPU = describe("cpu")


def test_on_a_cpu_inductor_beats_eager_where_it_saves_ops() -> None:
    """Eager runs a chain op by op, each with its own traffic; an op by itself is not worth compiling."""
    one = Work(2 * 4 * 10**6, 1e6, 10**4, "pointwise", width=4)
    fused = dataclasses.replace(one, flops=4e6)
    chain = Prediction()
    for _ in range(4):
        chain += predict(one, CPU, "eager")
    found = {"inductor": predict(fused, CPU, "inductor"), "eager": chain, "triton": predict(fused, CPU, "triton")}
    assert choose(found, CPU).executor == "inductor"
    tiny = Work(2 * 4 * 64, 64.0, 1, "pointwise", width=4)
    alone = {name: predict(tiny, CPU, name) for name in ("inductor", "eager", "triton")}
    assert choose(alone, CPU).executor == "eager"
    assert objective(alone["triton"], CPU) > 100 * objective(alone["inductor"], CPU), "it is interpreted"


def test_on_a_cpu_calls_and_work_add_up() -> None:
    found = predict(Work(8 * MB, 0.0, 10**4, "pointwise", width=4), CPU, "inductor", compiled=True)
    assert objective(found, CPU) == pytest.approx(found.device_us + found.host_us)


# ---------------------------------------------------------------------- properties


@given(works, executors)
def test_predictions_are_finite_and_positive(work: Work, executor: str) -> None:
    found = predict(work, H200, executor)
    assert 0 < found.device_us < math.inf and 0 < found.host_us < math.inf and 0 < found.captured_us < math.inf
    assert found.device_us == region_us(work, H200, executor)


@given(works, executors, st.integers(0, 10**10), st.floats(0, 1e12))
def test_more_work_never_costs_less(work: Work, executor: str, more: int, flops: float) -> None:
    larger = dataclasses.replace(work, bytes=work.bytes + more, flops=work.flops + flops)
    assert region_us(larger, H200, executor) >= region_us(work, H200, executor)


@given(works, executors, st.integers(0, 10**6))
def test_more_programs_never_cost_more(work: Work, executor: str, more: int) -> None:
    wider = dataclasses.replace(work, programs=work.programs + more)
    assert region_us(wider, H200, executor) <= region_us(work, H200, executor)


@given(works, executors, st.sampled_from(["bandwidth_tbs", "flops_tflops", "efficiency"]), st.floats(1.01, 100))
def test_better_constants_never_cost_more(work: Work, executor: str, name: str, factor: float) -> None:
    constant = f"efficiency_{executor}_{work.kernel_class}" if name == "efficiency" else name
    better = H200.overridden({constant: H200.constants[constant] * factor})
    assert region_us(work, better, executor) <= region_us(work, H200, executor)


@given(works, executors)
def test_memory_time_is_inverse_to_the_bandwidth(work: Work, executor: str) -> None:
    work = dataclasses.replace(work, flops=0.0)
    half = H200.overridden({"bandwidth_tbs": H200.bandwidth_tbs / 2})
    assert cost.work_us(work, half, executor) == pytest.approx(2 * cost.work_us(work, H200, executor))


@given(predictions, predictions, st.booleans())
def test_adding_work_never_lowers_the_objective(one: Prediction, other: Prediction, captured: bool) -> None:
    both = objective(one + other, H200, captured)
    assert both >= objective(one, H200, captured) - 1e-6
    assert both <= objective(one, H200, captured) + objective(other, H200, captured) + 1e-6 * max(1.0, both)


@given(predictions, times)
def test_the_hidden_side_matters_less_than_the_bound(one: Prediction, more: float) -> None:
    """With the device as the bound, host time up to it costs its hidden share; captured, it costs nothing."""
    device_bound = dataclasses.replace(one, host_us=0.0, device_us=more + 1)
    with_host = dataclasses.replace(device_bound, host_us=more)
    difference = objective(with_host, H200) - objective(device_bound, H200)
    assert difference == pytest.approx(0.1 * more, abs=1e-3)
    assert objective(with_host, H200, captured=True) == objective(device_bound, H200, captured=True)


# ---------------------------------------------------------------------- choices


def test_large_rows_go_to_nvfuser_and_tiny_ones_do_not() -> None:
    assert choose(all_of(row()), H200).executor == "nvfuser"
    tiny = row(bytes_=8 * 1024, length=64, rows=32)
    assert choose(all_of(tiny), H200).executor != "nvfuser"
    assert choose(all_of(tiny), H200, captured=True).executor == "eager", "captured, nothing but compile time differs"


FLIPS = [
    # constant, value that makes nvFuser win, value that makes Triton win
    ("efficiency_nvfuser_row", 0.95, 0.5),
    ("efficiency_triton_row", 0.5, 0.95),
    ("length_nvfuser_row_16384", 1.2, 0.3),
    ("length_triton_row_16384", 0.5, 1.2),
    ("launch_us_nvfuser", 0.5, 20.0),
    ("launch_us_triton", 20.0, 0.5),
    ("host_us_nvfuser", 1.0, 300.0),
    ("host_us_triton", 300.0, 1.0),
    ("compile_s_nvfuser", 0.0, 30.0),
    ("compile_s_triton", 30.0, 0.0),
]


@pytest.mark.parametrize(("constant", "for_nvfuser", "for_triton"), FLIPS)
def test_every_price_flips_the_choice_both_ways(constant: str, for_nvfuser: float, for_triton: float) -> None:
    work = row(201 * MB, length=12288, rows=4096)
    # Level terms, so that the constant at hand is what decides.
    level = H200.overridden({"efficiency_nvfuser_row": 0.86, "length_nvfuser_row_16384": 1.0, "host_us_nvfuser": 7.0,
                             "compile_s_nvfuser": 0.22})
    for value, winner in ((for_nvfuser, "nvfuser"), (for_triton, "triton")):
        device = level.overridden({constant: value})
        candidates = {name: predict(work, device, name) for name in ("triton", "nvfuser")}
        assert choose(candidates, device).executor == winner


@pytest.mark.parametrize("width", [1, 4, 8])
def test_width_factors_flip_the_choice(width: int) -> None:
    work = dataclasses.replace(row(), width=width)
    for value, winner in ((2.0, "triton"), (0.5, "nvfuser")):
        device = H200.overridden({f"width_triton_{width}": value})
        candidates = {name: predict(work, device, name) for name in ("triton", "nvfuser")}
        assert choose(candidates, device).executor == winner


def test_what_bounds_the_plan_decides_between_executors() -> None:
    """nvFuser's kernel is shorter by more than its call is longer: alone, it wins; where the host bounds, it loses."""
    candidates = all_of(row(50 * MB))
    assert choose(candidates, H200).executor == "nvfuser"
    host_bound = Prediction(device_us=100, host_us=1000)
    assert choose(candidates, H200, rest=host_bound).executor == "triton"
    assert choose(candidates, H200, captured=True, rest=host_bound).executor == "nvfuser"


def test_expected_calls_weigh_compile_time() -> None:
    work = Work(3 * 10**5, 0.0, 10**4, "pointwise")
    for calls, winner in ((1e3, "eager"), (1e9, "triton")):
        device = H200.overridden({"expected_calls": calls, "host_us_eager": 7.5})
        assert choose(all_of(work, device), device).executor == winner


def test_rows_longer_than_any_that_were_measured_are_unsure_sooner() -> None:
    """The lengths that the model knows end at 65536; beyond, a difference of a quarter says little."""
    device = H200.overridden({"efficiency_nvfuser_row": 0.7, "length_nvfuser_row_65536": 0.7, "length_triton_row_65536": 0.7})
    for length, unsure in ((65536, ()), (128256, ("triton", "nvfuser"))):
        work = row(length=length)
        assert choose({name: predict(work, device, name) for name in ("triton", "nvfuser")}, device).unsure == unsure


def test_unsure_is_within_the_models_error() -> None:
    a, b, c = (Prediction(device_us=us, captured_us=us) for us in (100.0, 110.0, 130.0))
    found = choose({"eager": c, "triton": b, "nvfuser": a}, H200)
    assert (found.executor, found.unsure) == ("nvfuser", ("nvfuser", "triton"))
    assert found.margin == pytest.approx(0.1)
    assert choose({"triton": b, "nvfuser": a}, H200.overridden({"model_error": 0.05})).unsure == ()
    everyone = choose({"eager": c, "triton": b, "nvfuser": a}, H200.overridden({"model_error": 0.3}))
    assert everyone.unsure == ("nvfuser", "triton", "eager")


def test_margin_is_of_the_region_and_not_of_the_plan() -> None:
    a, b = (Prediction(device_us=us, captured_us=us) for us in (100.0, 150.0))
    around = Prediction(device_us=1e5, captured_us=1e5)
    assert choose({"triton": a, "nvfuser": b}, H200, rest=around).margin == pytest.approx(0.5)


def test_one_candidate_is_sure_and_none_is_an_error() -> None:
    only = choose({"triton": predict(row(), H200)}, H200)
    assert only == cost.Choice("triton", math.inf, ())
    with pytest.raises(ValueError, match="no executor"):
        choose({}, H200)


@given(works, executors, st.floats(1.5, 4))
def test_the_efficiency_to_match_matches(work: Work, executor: str, factor: float) -> None:
    us = factor * region_us(work, H200, executor)
    needed = cost.efficiency_to_match(work, H200, executor, us)
    assert needed is not None
    changed = H200.overridden({f"efficiency_{executor}_{work.kernel_class}": needed})
    assert region_us(work, changed, executor) == pytest.approx(us, rel=1e-6)


def test_no_efficiency_matches_less_than_a_launch() -> None:
    assert cost.efficiency_to_match(row(), H200, "triton", 1.0) is None
    heavy = Work(1000, 4e9, 10**6, "pointwise")
    assert cost.efficiency_to_match(heavy, H200, "triton", 50.0) is None


@pytest.mark.parametrize("name", ["bandwidth_tbs", "flops_tflops", "processors", "programs_per_processor",
                                  "efficiency_triton_row", "expected_calls"])
def test_a_constant_of_zero_is_no_division_by_zero(name: str) -> None:
    device = H200.overridden({name: 0.0})
    work = dataclasses.replace(row(), flops=1.0)
    assert math.isfinite(objective(predict(work, device), device))


# ---------------------------------------------------------------------- against measurements

MEASURED = [
    # executor, class, rows, length, element bytes, tensors of full size moved, TB/s measured on an H200
    ("nvfuser", "row", 8192, 4096, 2, 2, 3.76),  # RMSNorm forward
    ("nvfuser", "row", 4096, 12288, 2, 2, 3.78),
    ("nvfuser", "row", 8192, 4096, 2, 2, 3.73),  # softmax forward
    ("nvfuser", "row", 4096, 12288, 2, 2, 3.16),
    ("triton", "row", 8192, 4096, 2, 2, 3.62),
    ("triton", "row", 4096, 12288, 2, 2, 3.27),
    ("triton", "row", 8192, 4096, 2, 2, 3.39),  # bias + bias + LayerNorm
    ("triton", "row", 8192, 12288, 2, 2, 3.70),
    ("triton", "row", 8192, 16384, 2, 2, 3.67),
    ("triton", "pointwise", 8192, 5632, 2, 3, 4.2),  # SwiGLU
    ("nvfuser", "pointwise", 8192, 5632, 2, 3, 4.1),
    ("eager", "row", 4096, 12288, 2, 2, 2.15),  # LayerNorm forward
    ("eager", "row", 4096, 12288, 2, 2, 1.91),  # softmax forward
]


@pytest.mark.parametrize(("executor", "kind", "rows", "length", "width", "tensors", "measured"), MEASURED)
def test_predicted_rates_are_near_measured_ones(
    executor: str, kind: str, rows: int, length: int, width: int, tensors: int, measured: float
) -> None:
    bytes_ = tensors * rows * length * width
    work = Work(bytes_, 0.0, rows, kind, width=width, length=length)
    predicted = bytes_ / region_us(work, H200, executor) / 1e6
    assert predicted == pytest.approx(measured, rel=H200.model_error)


# ---------------------------------------------------------------------- kernels of several lengths


def test_what_a_family_loses_and_saves() -> None:
    device = H200.overridden({"argument_us": 0.05, "flops_tflops": 40.0, "compile_s_triton": 0.3, "expected_runs": 30_000.0})
    assert family_loss_us(4, 0, 1 << 20, device) == pytest.approx(0.2)
    assert family_loss_us(4, 3, 10_000_000, device) == pytest.approx(0.2 + 8 * 3 * 10_000_000 / 40e6)
    assert family_loss_us(4, 3, 10_000_000, device, captured=True) == pytest.approx(6.0)
    assert family_gain_us(1, 1, device) == 0.0
    assert family_gain_us(4, 1, device) == pytest.approx(7.5)
    assert family_gain_us(4, 25, device) == pytest.approx(0.3)


@pytest.mark.parametrize(("us", "calls", "pays"), [(40.0, 25_000, True), (5e5, 2, True), (9e5, 10 / 9, True), (2e6, 1, False)])
def test_what_stand_ins_lose_and_save(us: float, calls: float, pays: bool) -> None:
    """A call that takes longer than the compiler is one call: it ends after one that waited."""
    device = H200.overridden({"compile_s_triton": 0.5, "hidden_share": 0.0, "expected_runs": 30_000})
    found = meanwhile(Prediction(device_us=10.0), Prediction(device_us=us), 2, device)
    assert found.calls == pytest.approx(calls) and found.pays == pays
    assert found.loss_us == pytest.approx(us - 10.0) and found.saved_us == pytest.approx(1e6)


def test_no_more_calls_run_on_stand_ins_than_are_expected() -> None:
    found = meanwhile(Prediction(device_us=10.0), Prediction(device_us=20.0), 1, H200.overridden({"expected_runs": 100}))
    assert found.calls == 100
    assert str(found).startswith("100 calls lose 10.0 µs each, 0.22 s")
