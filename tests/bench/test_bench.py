"""The benchmarks in small, on a CPU: the runner's rows and verdicts, its survival of failures, and the tables.

Example:
    python -m pytest tests/bench
"""
from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench import depthwise, host, indices, measure, micro, run, subject, systems, table
from bench.measure import Outcome
from bench.run import split
from bench.worker import Failed, Process, compile_package


def rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["system"]): row["metrics"] for row in json.loads(path.read_text())["rows"]}


def small(suite: str, case: str, *more: str) -> list[str]:
    fixed = ["--scale", "tiny", "--device", "cpu", "--steps", "2", "--rounds", "2", "--warmup", "1"]
    return ["--suite", suite, "--case", case, *fixed, *more]


def test_model_rows_have_times_and_agree_with_float32(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ["--modes", "train,infer", "--systems", "eager", "--in-process", "--out", str(out)]
    assert run.main(small("models", "llama", *more)) == 0
    found = rows(out)
    train, infer = found["llama/train", "eager"], found["llama/infer", "eager"]
    assert train["right"] is True and infer["right"] is True
    assert train["grad_norm_max"] == 0 and train["loss"] == train["eager_loss"]
    assert 1e-4 < train["grad_rmse"] < 0.1, "bfloat16 must differ from the float32 reference, by its rounding"
    assert train["samples"] == 2 and len(train["rounds"]) == 2 and train["step_ms"] > 0
    assert "llama/train" in table.render([out])


def test_host_rows_go_round_the_systems(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ["--systems", "eager,aot_eager", "--in-process", "--out", str(out)]
    assert run.main(small("host", "einsum/bij jk/2x16x16", *more)) == 0
    found = list(rows(out).values())
    assert len(found) == 4 and all(row["right"] and row["samples"] == 2 and row["host_us"] > 0 for row in found)
    assert "aot_eager µs" in table.render([out])


def test_layers_are_measured_cold_case_by_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STACKS", {name: replace(graph, calls=2) for name, graph in host.STACKS.items()})
    out = tmp_path / "out.json"
    more = ["--systems", "eager,aot_eager", "--in-process", "--out", str(out)]
    assert run.main(small("residual", "residual/2,growing/4", *more)) == 0
    found = rows(out)
    assert list(found) == [(case, system) for case in ("residual/2", "growing/4") for system in ("eager", "aot_eager")]
    for row in found.values():
        assert row["right"] is True and row["samples"] == 2 and row["host_us"] > 0 and row["cold_s"] > 0
    assert "| residual/2 | aot_eager | " in table.render([out])


def test_compiled_kernels_are_counted_from_the_last_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    monkeypatch.delitem(sys.modules, "dynafuse.backend", raising=False)  # a process measures one system
    subject.reset()
    metrics.generated_kernel_count = 5
    counters["inductor"].update({"async_compile_cache_miss": 4, "async_compile_cache_hit": 1})
    assert measure.compile_stats() == {"kernels": 5, "sources": 3}
    subject.reset()
    assert measure.compile_stats() == {}


def test_every_layer_of_a_growing_stack_has_one_input_more() -> None:
    x, *weights = (0.1 * torch.randn(10, 10) for _ in range(4))
    outs = [x]
    for weight in weights:
        outs.append(torch.tanh(torch.stack(outs).sum(0)) @ weight)
    torch.testing.assert_close(host.growing(3)(x, *weights), outs[-1].sum())


def test_names_of_layers() -> None:
    assert host.named(["growing"], host.STACKS) == [f"growing/{n}" for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert host.named(["growing/64", "residual/128"], host.STACKS) == ["residual/128", "growing/64"]
    assert [host.STACKS[f"residual/{n}"].calls for n in (1, 16, 128)] == [100, 25, 5]
    with pytest.raises(SystemExit, match="no graph is called nope; known: residual/1, "):
        host.named(["nope"], host.STACKS)


def test_a_worker_measures_and_one_that_dies_leaves_its_error(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ["--systems", "eager,eager@PYTHONHOME=/nowhere", "--out", str(out)]
    assert run.main(small("micro", "softmax/8192x4096/bwd", *more)) == 1
    good, bad = rows(out).values()
    assert good["right"] is True and good["wall_us"] > 0
    assert bad.keys() == {"error"} and "the process ended" in bad["error"]


def test_a_second_process_finds_the_caches_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "out.json"
    system = "dynafuse-second@DYNAFUSE_CACHE=1"
    assert run.main(small("residual", "residual/1", "--rounds", "1", "--systems", system, "--out", str(out))) == 0
    (row,) = rows(out).values()
    assert row["compiled"] == 0 and row["disk_hits"] == row["kernels"] > 0


def test_a_cold_start_finds_the_package_as_an_installation_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dynafuse" / "part"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    spec = SimpleNamespace(submodule_search_locations=[str(package.parent)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    compile_package.__wrapped__()
    assert len(list(tmp_path.rglob("*.pyc"))) == 2


def test_a_worker_that_does_not_answer_is_ended() -> None:
    worker = Process(systems.find("eager"))
    with pytest.raises(Failed, match="no answer to 'hello'"):
        worker.ask({"do": "hello"}, timeout=0.01)
    assert worker.process.returncode is not None


def test_micro_verdict_can_fail() -> None:
    case = micro.tiny(micro.CASES["rms_norm/8192x4096/bwd"])
    inputs = micro.inputs_of(case)
    assert micro.errors(case, case.op.fn, inputs)["right"] is True

    def careless(x: Tensor, weight: Tensor) -> Tensor:
        return micro.rms_norm(x, weight) * 1.05

    assert micro.errors(case, careless, inputs)["right"] is False


def test_ideal_traffic() -> None:
    rows_, n = 8192, 4096
    case = micro.CASES["softmax/8192x4096/bwd"]
    inputs = [torch.empty(rows_, n, dtype=torch.bfloat16, device="meta", requires_grad=True)]
    assert micro.ideal_bytes(case, inputs, [inputs[0]]) == 5 * rows_ * n * 2


class Scaled(nn.Module):
    """Returns the mean of a product, with a gradient that a test can spoil."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 9.0))
        self.factor = factor

    def outcome(self) -> Outcome:
        loss = (self.weight * self.factor).square().mean()
        loss.backward()
        return Outcome(loss, self)


def test_verdict_is_none_where_eager_is_noise() -> None:
    got, eager, reference = (Scaled(value).outcome() for value in (1.0, 2.0, 1.0))
    assert measure.compare(got, eager, reference)["right"] is None


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.001, True), (1.1, False), (float("nan"), False)])
def test_gradient_verdict(factor: float, right: bool) -> None:
    got, eager, reference = (Scaled(value).outcome() for value in (factor, 1.001, 1.0))
    assert measure.compare(got, eager, reference)["right"] is right


def test_nan_in_another_place_is_an_infinite_error() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert measure.relative_rmse(nan, nan) == 0
    assert measure.relative_rmse(nan, torch.tensor([1.0, 2.0])) == float("inf")


@pytest.mark.parametrize(("kernel", "group"), [
    ("triton_per_fused_add_mean_0", "triton"),
    ("triton_poi_fused_convolution_3", "triton"),
    ("dynafuse_softmax_bwd_1", "triton"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "gemm"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "gemm"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
    ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
    ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "convolution"),
    ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>", "convolution"),
    ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ("Memcpy DtoD (Device -> Device)", "other"),
])
def test_kernel_groups(kernel: str, group: str) -> None:
    assert measure.group(kernel) == group


def test_profile_totals_by_group() -> None:
    times = [("triton_a", 50.0)] * 6 + [("dynafuse_b", 20.0)] * 3 + [("nvjet_x", 1000.0)] * 3
    kernels = [measure.Ran(name, 2000.0 * place, us) for place, (name, us) in enumerate(times)]
    totals = measure.summarize(kernels, steps=3)
    assert totals["triton_ms"] == pytest.approx(0.12) and totals["gemm_ms"] == pytest.approx(1.0)
    assert totals["device_ms"] == pytest.approx(1.12)
    assert totals["launches"] == 4 and totals["triton_kernels"] == 2
    assert [(row["name"], row["us"], row["count"]) for row in totals["top_kernels"]] == [
        ("nvjet_x", 1000.0, 1), ("triton_a", 100.0, 2), ("dynafuse_b", 20.0, 1)]


def test_kernels_that_run_at_once_count_once() -> None:
    def busy(*spans: tuple[float, float]) -> float:
        return measure.busy_us([measure.Ran("kernel", begin, us) for begin, us in spans])

    assert busy() == 0 and busy((5, 2), (8, 1)) == 3
    assert busy((0, 4), (2, 4), (3, 1), (8, 1)) == 7
    assert busy((0, 10), (1, 2), (4, 3)) == 10


def test_system_names() -> None:
    assert systems.find("dynafuse@A=1;B=x=y").env == {"A": "1", "B": "x=y"}
    with pytest.raises(SystemExit, match="unknown system 'nope'; known: eager"):
        run.parse(["--systems", "eager,nope"])
    with pytest.raises(SystemExit, match="unknown case nope"):
        run.parse(["--case", "nope"])


FIXTURE = {
    "machine": {"gpu": "NVIDIA H200", "driver": "580", "cpu_cores": 16},
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "date": "2026-11-21T00:00:00",
    "rows": [
        {"suite": "models", "case": "llama/train", "system": "inductor",
         "metrics": {"step_ms": 50.0, "triton_ms": 6.0, "cold_s": 20.0, "right": True}},
        {"suite": "models", "case": "llama/train", "system": "dynafuse",
         "metrics": {"step_ms": 45.0, "triton_ms": 6.6, "cold_s": 15.0, "right": False}},
        {"suite": "models", "case": "vit_b/train", "system": "dynafuse",
         "metrics": {"error": "ValueError: a | b\nmore"}},
        {"suite": "layers", "case": "llama/8", "system": "dynafuse", "metrics": {"kernels": 21, "cold_s": 8.0}},
        {"suite": "residual", "case": "residual/64", "system": "inductor",
         "metrics": {"kernels": 130, "sources": 12, "cold_s": 20.0, "host_us": 800.0, "right": True}},
        {"suite": "residual", "case": "residual/64", "system": "dynafuse",
         "metrics": {"kernels": 3, "cold_s": 5.0, "host_us": 600.0, "right": False}},
        {"suite": "micro", "case": "softmax/8x8/fwd", "system": "inductor",
         "metrics": {"tb_per_s": 1.7, "device_us": 30.0, "right": True}},
        {"suite": "micro", "case": "softmax/8x8/fwd", "system": "dynafuse",
         "metrics": {"tb_per_s": 3.4, "device_us": 15.0, "right": True}},
    ],
}


def test_tables_show_ratios_errors_and_wrong_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(FIXTURE))
    lines = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in table.render([path]).splitlines()}
    cells = [cell.strip() for cell in lines["llama/train", "dynafuse"].split("|")[1:-1]]
    assert cells[2:4] == ["45", "0.90"] and cells[6] == "1.10" and cells[11] == "0.75" and cells[-1] == "**no**"
    failed = lines["vit_b/train", "dynafuse"]
    assert "failed: ValueError: a / b" in failed and "more" not in failed
    assert lines["softmax/8x8/fwd", "1.7"] == "| softmax/8x8/fwd | 1.7 | **3.4** | 0.50 |"
    assert "21" in lines["llama/8", "dynafuse"]
    assert lines["residual/64", "inductor"] == "| residual/64 | inductor | 12 | 20 | 1.00 | 800 | 1.00 | yes |"
    assert lines["residual/64", "dynafuse"] == "| residual/64 | dynafuse | 3 | 5 | 0.25 | 600 | 0.75 | **no** |"
    widths = {line.count("|") for line in table.models(table.load([path])[1]["models"]).splitlines()}
    assert len(widths) == 1, "every line has every column"


def test_readme_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.update(readme, "new\n")
    assert readme.read_text() == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    readme.write_text("nothing")
    with pytest.raises(SystemExit, match="to write between"):
        table.update(readme, "new")


def test_newest_file_of_each_suite(tmp_path: Path) -> None:
    for name, suite, day in (("a", "models", 1), ("b", "models", 2), ("c", "micro", 1)):
        rows_ = [{"suite": suite, "case": "x", "system": "eager", "metrics": {}}]
        data = {**FIXTURE, "date": f"2026-01-0{day}", "rows": rows_}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert {path.name for path in table.newest(tmp_path)} == {"b.json", "c.json"}


def test_checks_of_indices_are_measured_beside_none(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    fixed = ["--scale", "tiny", "--device", "cpu", "--rounds", "1", "--steps", "1", "--out", str(out)]
    assert indices.main(["--case", "embedding,cross_entropy and backward", *fixed]) == 0
    found = rows(out)
    assert {case for case, _ in found} == {"embedding", "cross_entropy and backward"}
    assert all(row["ratio"] == pytest.approx(row["checked_us"] / row["unchecked_us"], rel=1e-4) for row in found.values())


def test_convolutions_that_keep_channels_apart_are_measured_both_ways(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    fixed = ["--scale", "tiny", "--device", "cpu", "--samples", "1", "--out", str(out)]
    assert split(",".join(depthwise.CASES)) == list(depthwise.CASES)
    assert depthwise.main(["--case", "sequence,doubled", *fixed]) == 0
    found = rows(out)
    assert {case for case, _ in found} == {f"{name}/{layout}" for name in ("sequence", "doubled") for layout in depthwise.LAYOUTS}
    wanted = {"result", "input", "weight"}
    assert all({f"{name}_library_us" for name in wanted} <= row.keys() for row in found.values())
    written = {case: {name for name in wanted if f"{name}_written_us" in row} for (case, _), row in found.items()}
    assert written["sequence/planes"] == wanted and written["doubled/channels"] == {"result", "input"}


def test_memory_that_captured_graphs_keep_counts_though_nothing_is_allocated_in_it() -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1 << 21, "allocated_size": 0},
        {"segment_pool_id": (0, 3), "total_size": 1 << 21, "allocated_size": 1 << 20},
        {"segment_pool_id": (1, 0), "total_size": 512, "allocated_size": 0},
    ]
    assert measure.idle_in_pools(segments) == (1 << 20) + 512
