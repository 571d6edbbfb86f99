"""Fusible regions from files: what their inputs are, how they are measured, and what is said of many.

Example:
    python -m pytest tests/bench/test_regions.py
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import region_file, region_steps, region_subject, regions, run, table
from bench.region_file import Region, TensorSpec
from bench.region_subject import difference_of_norms
from bench.region_summary import summary_of
from bench.worker import Failed
from dynafuse.report import ReportedGraph, ReportedStep


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def region(name: str, inputs: dict[str, list[Any]], ops: list[list[Any]], *outputs: str, **more: Any) -> Region:
    listed = [[op[0], op[1], op[2], op[3] if len(op) > 3 else {}] for op in ops]
    return Region({"name": name, "models": ["m"], "params": list(inputs), "inputs": list(inputs.values()), "alias_bytes": None,
                   "ops": listed, "outputs": [ref(output) for output in outputs], **more})


SOFTMAX = region("amax_sum_1", {"x": [[4, 8], "f32"], "shape": ["S", [2, 2, 8]]}, [
    ["amax", "aten.amax.default", [ref("x"), [-1], True]],
    ["sub", "aten.sub.Tensor", [ref("x"), ref("amax")]],
    ["exp", "aten.exp.default", [ref("sub")]],
    ["sum", "aten.sum.dim_IntList", [ref("exp"), [-1], True]],
    ["div", "aten.div.Tensor", [ref("exp"), ref("sum")]],
    ["view", "aten.view.default", [ref("div"), ref("shape")]],
], "view")
SCALED = region("pointwise_2", {"x": [[4, 8], "f32"]}, [
    ["full", "aten.full.default", [[4, 8], {"float": "inf"}], {"dtype": {"torch": "float32"}, "device": {"device": "cuda"}}],
    ["least", "aten.minimum.default", [ref("x"), ref("full")]],
    ["half", "prims.convert_element_type.default", [ref("least"), {"torch": "bfloat16"}]],
], "half")
PARTS = region("pointwise_3", {"x": [[4, 8], "f32"]}, [
    ["split", "aten.split.Tensor", [ref("x"), 4, 1]],
    ["add", "aten.add.Tensor", [{"item": [ref("split"), 0]}, {"item": [ref("split"), 1]}]],
], "add")
DROPOUT = region("pointwise_4", {"x": [[4, 8], "f32"]}, [
    ["rand", "aten.rand_like.default", [ref("x")]], ["mul", "aten.mul.Tensor", [ref("x"), ref("rand")]]], "mul")
BROKEN = region("pointwise_5", {"x": [[4, 8], "f32"], "y": [[3], "f32"]}, [
    ["add", "aten.add.Tensor", [ref("x"), ref("y")]]], "add")


def file_of(folder: Path, *listed: Region, suffix: str = ".jsonl") -> Path:
    path = folder / f"regions{suffix}"
    region_file.write(path, listed)
    return path


def measured(path: Path, *more: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit status of a run, and its rows."""
    out = path.with_suffix(".json")
    status = regions.main([str(path), "--device", "cpu", "--in-process", "--samples", "2", "--out", str(out), *more])
    return status, {(row["case"], row["system"]): row["metrics"] for row in json.loads(out.read_text())["rows"]}


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_files_are_read_as_written(tmp_path: Path, suffix: str) -> None:
    path = file_of(tmp_path, SOFTMAX, SCALED, suffix=suffix)
    assert region_file.read(path) == [SOFTMAX, SCALED]
    assert path.read_bytes().startswith(b"\xfd7zXZ") is (suffix == ".jsonl.xz")


def test_modules_compute_what_stands_there() -> None:
    (x,) = SOFTMAX.inputs("cpu")
    torch.testing.assert_close(SOFTMAX.module("cpu")(x), (torch.softmax(x, -1).view(2, 2, 8),))
    assert SCALED.module("cpu")(x)[0].equal(x.bfloat16())
    assert PARTS.module("cpu")(x)[0].equal(x[:, :4] + x[:, 4:])
    assert SOFTMAX.inputs("cpu")[0].equal(x), "the same at every call"


@pytest.mark.parametrize(("spec", "low", "high"), [
    ([[64], "i64", {"gen": ["index", 3, 5]}], 3, 4),
    ([[64], "i32", {"gen": ["index", 2, 4, [-100]]}], -100, 3),
    ([[64], "i64", {"gen": ["perm"]}], 0, 63),
    ([[64], "f32", {"gen": ["const", 7]}], 7, 7),
    ([[64], "u8"], 0, region_file.HIGHEST_INTEGER - 1),
    ([[64], "i64", {"gen": ["offsets", 40]}], 0, 39),
])
def test_values_are_in_their_range(spec: list[Any], low: int, high: int) -> None:
    torch.manual_seed(0)
    tensor = TensorSpec.from_json(spec).tensor("cpu", {})
    assert tensor.dtype == region_file.DTYPE_NAMES[spec[1]] and tensor.shape == (64,)
    assert low <= tensor.min() and tensor.max() <= high and (low == tensor.min() or spec[1] == "u8" or low == 0)
    if "gen" in str(spec) and spec[2]["gen"][0] == "index" and len(spec[2]["gen"]) > 3:
        assert set(tensor.tolist()) == {-100, 2, 3}
    if "offsets" in str(spec):
        assert tensor[0] == 0 and tensor.equal(tensor.sort().values)


def test_layout_of_inputs() -> None:
    spec = TensorSpec.from_json([[2, 3], "bf16", {"st": [1, 4], "off": 5}])
    tensor = spec.tensor("cpu", {})
    assert (tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()) == ((1, 4), 5, 2 * (5 + 10))
    assert TensorSpec.from_json(spec.to_json()) == spec
    shared = region("r", {"x": [[8], "f32", {"alias": 0}], "y": [[4], "f32", {"alias": 0, "off": 4}]},
                    [["add", "aten.add.Tensor", [ref("x"), 1]]], "add", alias_bytes=[32])
    x, y = shared.inputs("cpu")
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x[4:].equal(y)


# ---------------------------------------------------------------------- rows


def test_rows_of_regions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A region that fails is a row, one that draws random numbers is none, and the others go on."""
    path = file_of(tmp_path, SOFTMAX, DROPOUT, BROKEN, SCALED)
    status, rows = measured(path, "--systems", "eager,dynafuse")
    assert status == 1
    assert list(rows) == [(name, system) for name in ("amax_sum_1", "pointwise_5", "pointwise_2") for system in ("eager", "dynafuse")]
    assert all("must match the size" in rows["pointwise_5", system]["error"] for system in ("eager", "dynafuse"))
    own = rows["amax_sum_1", "dynafuse"]
    assert 0 < own["output_vs_eager"] < 1e-6 or own["output_vs_eager"] == 0
    assert own["cold_s"] > 0 and own["wall_us"] > 0 and own["steps"] == 1 and own["predicted_us"] > 0
    assert rows["pointwise_2", "dynafuse"]["output_vs_eager"] == 0 == rows["amax_sum_1", "eager"]["output_vs_eager"]
    printed = capsys.readouterr().out
    assert "skipped: pointwise_4 draws random numbers (aten.rand_like.default)" in printed
    assert "pointwise_5 dynafuse: RuntimeError" in printed and "6 rows" in printed and "2 failed" in printed


def test_regions_that_draw_random_numbers_are_compared_by_norms(tmp_path: Path) -> None:
    rows = measured(file_of(tmp_path, DROPOUT), "--systems", "eager,dynafuse", "--random")[1]
    assert set(rows) == {("pointwise_4", "eager"), ("pointwise_4", "dynafuse")}
    assert 0 < rows["pointwise_4", "dynafuse"]["output_vs_eager"] < 0.5, "other numbers, of much the same norm"
    assert difference_of_norms(torch.tensor([3.0, float("inf")]), torch.tensor([3.0, 4.0])) == float("inf")
    assert difference_of_norms(torch.zeros(3), torch.zeros(3)) == 0


@pytest.mark.parametrize(("more", "names"), [
    (("--names", "amax,pointwise_3"), ["amax_sum_1", "pointwise_3"]),
    (("--every", "2"), ["amax_sum_1", "pointwise_3"]),
    (("--every", "2", "--start", "1"), ["pointwise_2"]),
    (("--seconds", "0"), []),
])
def test_which_regions_are_measured(tmp_path: Path, more: tuple[str, ...], names: list[str],
                                    capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, SOFTMAX, SCALED, PARTS)
    if not names:
        regions.measure(options := regions.parse([str(path), "--in-process", *more]), regions.chosen([SOFTMAX, SCALED], options))
        assert "out of time: 2 regions" in capsys.readouterr().out
        return
    assert [case for case, _ in measured(path, "--systems", "eager", *more)[1]] == names


def test_no_region_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no region is asked for"):
        measured(file_of(tmp_path, SOFTMAX), "--names", "sum")


def test_plans_need_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regions.main([str(file_of(tmp_path, SOFTMAX, BROKEN)), "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "===== amax_sum_1 (m)\nplan for NVIDIA H200" in printed
    assert "Error: " in printed.split("===== pointwise_5 (m)\n")[1], "one that fails is not the end"


def test_an_op_that_torch_lacks_fails_alone(tmp_path: Path) -> None:
    unknown = region("pointwise_7", {"x": [[4], "f32"]}, [["y", "aten.no_such_op.default", [ref("x")]]], "y")
    status, rows = measured(file_of(tmp_path, unknown, SCALED), "--systems", "eager")
    assert status == 1 and "no_such_op" in rows["pointwise_7", "eager"]["error"]
    assert rows["pointwise_2", "eager"]["output_vs_eager"] == 0


def test_a_worker_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    class Mortal:
        """Dies of one region."""

        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            if request["name"] == SCALED.name:
                raise Failed("the process ended with -11")
            return {"worker": started.index(self)}

        def close(self) -> None:
            pass

    def start(self: regions.Lane, name: str) -> Mortal:
        worker = Mortal()
        started.append(worker)
        return worker

    monkeypatch.setattr(regions.Lane, "start", start)
    _, rows = measured(file_of(tmp_path, SOFTMAX, SCALED, PARTS), "--systems", "eager")
    assert [row.get("worker", row.get("error")) for row in rows.values()] == [0, "the process ended with -11", 1]


def test_every_lane_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert regions.gpus(argparse.Namespace(gpus=1)) == [None]
    assert regions.gpus(argparse.Namespace(gpus=3)) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert regions.gpus(argparse.Namespace(gpus=2)) == ["4", "6"]


# ---------------------------------------------------------------------- agreement


def test_differences_from_eager() -> None:
    x = torch.linspace(1, 2, 20000)
    assert region_subject.largest_difference([x, x * 1.5], [x, x]) == pytest.approx(0.5)
    assert region_subject.difference(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])) == 0.25
    assert region_subject.largest_difference([x[:3]], [x[:4]]) == float("inf")
    assert region_subject.largest_difference([x.double()], [x]) == float("inf")
    rarely, often = x.clone(), x.clone()
    rarely[0], often[:20] = float("nan"), float("inf")
    assert region_subject.difference(rarely, x) == 0, "one of twenty thousand may lie beyond the range"
    assert region_subject.difference(often, x) == float("inf")
    assert region_subject.difference(often, often) == 0


# ---------------------------------------------------------------------- steps


def step(name: str, predicted: float | None = 1.0, key: str | None = "k") -> ReportedStep:
    return ReportedStep(name, "triton" if key else "eager", (), key, None, predicted)


def test_kernels_belong_to_steps() -> None:
    steps = [(step("r0"), 2), (step("sort", 3.0, None), None), (step("mm", None, None), None), (step("r1", 5.0), 1)]
    kernels = [("Memset", 1.0), ("dynafuse_flat_a", 2.0), ("dynafuse_flat_a_2", 4.0), ("sort", 8.0), ("gemm", 16.0),
               ("dynafuse_flat_b", 32.0)]
    lines = region_steps.by_step(steps, kernels)
    assert [(line["steps"], line["kernels"], line["measured_us"], line["predicted_us"]) for line in lines] == [
        ("r0", 3, 7.0, 1.0), ("sort mm", 2, 24.0, None), ("r1", 1, 32.0, 5.0)]


def test_steps_of_a_graph_that_is_called_several_times_count_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    once = ReportedGraph("inference", (step("r0", 5.0),), 1, ())
    repeated = ReportedGraph("inference", (step("r0", 2.0), step("r1", 1.0)), 2, (), called=3)
    monkeypatch.setattr(region_steps.Watched, "_graphs", lambda self: [once, repeated])
    assert region_steps.Watched().predicted() == {"steps": 7, "predicted_us": 14.0}


def test_measured_steps_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"steps": "r0", "executor": "triton", "kernel_class": "row", "kernels": 2, "measured_us": 7.25, "predicted_us": None}
    regions.show_steps({("a", "inductor"): {}, ("a", "dynafuse"): {"by_step": [line]}})
    assert capsys.readouterr().out == "a dynafuse: r0 (triton row): 7.25 µs in 2 kernels, predicted –\n"


# ---------------------------------------------------------------------- many regions


def us(time: float, **more: Any) -> dict[str, Any]:
    return {"device_us": time, "cold_s": 2.0, "output_vs_eager": 0.001, **more}


ROWS: dict[tuple[str, str], dict[str, Any]] = {
    ("a", "inductor"): us(10.0), ("a", "dynafuse"): us(5.0, predicted_us=5.0, cold_s=1.0),
    ("b", "inductor"): us(10.0), ("b", "dynafuse"): us(20.0, predicted_us=10.0, output_vs_eager=0.5),
    ("c", "inductor"): us(9.0), ("c", "dynafuse"): us(10.0, predicted_us=4.0, replay_us=5.0),
    ("d", "inductor"): us(9.0), ("d", "dynafuse"): us(1.0, output_vs_eager="inf"),
    ("e", "inductor"): {"error": "no"}, ("e", "dynafuse"): us(1.0),
    ("f", "inductor"): us(9.0), ("f", "dynafuse"): {"error": "no"},
}


def test_summary_of_what_both_can_run() -> None:
    found = summary_of("dynafuse", ROWS)
    assert (found.regions, found.failed) == (3, 2)
    assert found.speed == pytest.approx((2 * 0.5 * 0.9) ** (1 / 3))
    assert found.below == {0.97: 2, 0.8: 1} and found.worst == ((0.5, "b"), (0.9, "c"), (2.0, "a"))
    assert (found.cold_s, found.base_cold_s) == (5.0, 6.0)
    assert found.off == 1.25 and found.near == pytest.approx(2 / 3) and found.largest_difference == (0.5, "b")
    said = str(found)
    assert "3 regions at 0.965 of inductor's speed" in said and "2 below 0.97, 1 below 0.8, 2 failed" in said
    assert "slowest: 0.50 b, 0.90 c" in said and "1.25 (median), 67 % within 1.3×" in said
    assert str(summary_of("eager", ROWS)) == "nothing to compare with inductor, 0 failed"


def test_table_has_a_line_a_system(tmp_path: Path) -> None:
    listed = [{"suite": "regions", "case": c, "system": s, "metrics": m} for (c, s), m in ROWS.items()]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"machine": {}, "versions": {}, "date": "2026-01-01", "rows": listed}))
    line = "| dynafuse | 3 | 0.965 | 2 | 1 | 0.5 | 5 | 0.83 | 1.25 | 67 % | 0.5 | 2 |"
    assert table.render([path]).splitlines()[-1] == line


def test_progress_shows_predictions() -> None:
    assert {"device_us", "predicted_us", "output_vs_eager", "error", "cold_s"} <= set(run.SHOWN)


# ---------------------------------------------------------------------- on a device


@pytest.mark.gpu
def test_times_of_regions_on_a_gpu(tmp_path: Path) -> None:
    large = region("amax_6", {"x": [[4096, 4096], "bf16"]}, SOFTMAX.data["ops"][:5], "div")
    path = file_of(tmp_path, large)
    out = tmp_path / "out.json"
    assert regions.main([str(path), "--device", "cuda", "--profile", "--out", str(out)]) == 0
    rows = {row["system"]: row["metrics"] for row in json.loads(out.read_text())["rows"]}
    own = rows["dynafuse"]
    assert own["output_vs_eager"] < 0.01 and 0.2 < (own["device_us"] - own["replay_us"]) / own["predicted_us"] < 5
    (line,) = own["by_step"]
    assert line["kernels"] >= 1 and 0 < line["measured_us"] < own["device_us"]
    assert rows["inductor"]["launched"] and rows["inductor"]["tb_per_s"] > 0.1
