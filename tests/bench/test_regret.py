"""Regret: its arithmetic, its rows in a results file, and the cases that it compares, in small."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import micro, regret, systems

HEAD = {"machine": {"gpu": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}, "date": "2026-11-21T00:00:00"}


def us(time: float, **more: Any) -> dict[str, Any]:
    return {"device_us": time, "wall_us": 1000.0, "right": True, **more}


ROWS = {
    ("softmax/8x8/fwd", "dynafuse-all"): us(30.0),
    ("softmax/8x8/fwd", "dynafuse-nvfuser"): us(20.0),
    ("softmax/8x8/fwd", "inductor"): us(10.0, right=False),
    ("softmax/8x8/fwd", "nvfuser"): {"error": "ModuleNotFoundError: thunder"},
    ("rope/8/fwd", "inductor"): us(12.0),
    ("rope/8/fwd", "dynafuse-all"): us(12.0),
    ("gelu/8/fwd", "dynafuse-all"): us(5.0, right=False),
    ("gelu/8/fwd", "eager"): us(7.0),
}


def written(path: Path, rows: dict[tuple[str, str], dict[str, Any]] = ROWS) -> Path:
    listed = [{"suite": "micro", "case": c, "system": s, "metrics": m} for (c, s), m in rows.items()]
    path.write_text(json.dumps({**HEAD, "rows": listed}))
    return path


def test_regret_is_against_the_best_right_time() -> None:
    found = regret.regrets(ROWS)
    assert found["softmax/8x8/fwd"] == {
        "device_us": 30.0, "best_us": 20.0, "best": "dynafuse-nvfuser", "regret": 1.5,
        "times": {"dynafuse-all": 30.0, "dynafuse-nvfuser": 20.0},
    }
    assert (found["rope/8/fwd"]["regret"], found["rope/8/fwd"]["best"]) == (1.0, "dynafuse-all"), "a tie is none"
    assert "gelu/8/fwd" not in found, "wrong numbers have no regret"
    summary = found["all"]
    assert summary["regret"] == pytest.approx(1.5**0.5) and summary["worst"] == "softmax/8x8/fwd"
    assert (summary["worst_regret"], summary["cases"], summary["never_beaten"]) == (1.5, 2, 1)


def test_nothing_measured_is_nothing() -> None:
    assert regret.regrets({}) == {}
    assert regret.regrets({("a", "eager"): us(1.0)}) == {}


def test_rows_join_the_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "rows.json")
    assert regret.main(["--from", str(path)]) == 1, "gelu has no regret"
    assert regret.main(["--from", str(path)]) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows if row["suite"] == "regret"] == ["softmax/8x8/fwd", "rope/8/fwd", "all"]
    assert sum(row["suite"] == "micro" for row in rows) == len(ROWS)
    printed = capsys.readouterr().out
    assert "| softmax/8x8/fwd | 30 | 20 | dynafuse-nvfuser | 1.5 |" in printed
    assert "regret of 2 cases, none of gelu/8/fwd" in printed


def test_complete_files_end_with_0(tmp_path: Path) -> None:
    complete = {key: value for key, value in ROWS.items() if not key[0].startswith("gelu")}
    assert regret.main(["--from", str(written(tmp_path / "rows.json", complete))]) == 0


def test_measuring_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(systems.SYSTEMS, "dynafuse-all", systems.System("dynafuse-all", backend="aot_eager"))
    out = tmp_path / "out.json"
    more = ["--case", "softmax/8192x4096/fwd", "--systems", "dynafuse-all,eager", "--scale", "tiny", "--device", "cpu"]
    assert regret.main([*more, "--steps", "2", "--in-process", "--out", str(out)]) == 0
    (row,) = [row for row in json.loads(out.read_text())["rows"] if row["case"] != "all" and row["suite"] == "regret"]
    assert row["metrics"]["times"].keys() == {"dynafuse-all", "eager"} and row["metrics"]["regret"] >= 1


def test_systems_of_one_executor() -> None:
    assert systems.find("dynafuse-nvfuser").env == {"DYNAFUSE_EXECUTORS": "nvfuser"}
    assert systems.find("dynafuse-triton@A=1").env == {"DYNAFUSE_EXECUTORS": "triton", "A": "1"}
    assert all(systems.find(name).name == name for name in regret.SYSTEMS.split(","))


# ---------------------------------------------------------------------- the cases


def test_names_of_cases_are_their_own() -> None:
    count = sum(len(passes) * len(shapes) for _, passes, shapes in micro.TABLE)
    assert len(micro.CASES) == count
    assert len([name for name in micro.CASES if name.startswith("litgpt_rope")]) == 12
    assert len([name for name in micro.CASES if name.startswith("bias_bias_layer_norm")]) == 12


@pytest.mark.parametrize("name", [name for name in micro.CASES if name.startswith(("litgpt_rope", "bias_gelu", "bias_bias"))])
def test_new_cases_are_right_in_eager_and_their_traffic_is_counted(name: str) -> None:
    case = micro.tiny(micro.CASES[name])
    inputs = micro.inputs_of(case)
    assert micro.errors(case, case.op.fn, inputs)["right"] is True
    outputs = case.op.fn(*inputs)
    moved = micro.ideal_bytes(case, inputs, outputs if isinstance(outputs, tuple) else [outputs])
    assert moved >= micro.size(inputs) * (2 if case.backward else 1)


@pytest.mark.parametrize(("queries", "turned"), [(1, 8), (1, 16), (4, 16)])
def test_litgpt_rope_turns_pairs_and_repeats_groups(queries: int, turned: int) -> None:
    qkv, cos, sin = micro._projection(2, 5, 3, queries, 16, turned, torch.float64)
    results = micro.litgpt_rope(qkv, cos, sin)
    assert len(results) == (3 if queries > 1 else 2)
    assert all(result.shape == (2, 3 * queries, 5, 16) for result in results)
    q, k = results[:2]
    half = turned // 2
    pair = torch.complex(qkv[..., :half], qkv[..., half:turned]) * torch.complex(cos, sin)[:, None, None, :half]
    expected = torch.cat((pair.real, pair.imag, qkv[..., turned:]), -1)
    torch.testing.assert_close(q, expected[..., :-2, :].permute(0, 2, 3, 1, 4).flatten(1, 2))
    torch.testing.assert_close(k, expected[..., [-2] * queries, :].permute(0, 2, 3, 1, 4).flatten(1, 2))
    if queries > 1:
        torch.testing.assert_close(results[2], qkv[..., [-1] * queries, :].permute(0, 2, 3, 1, 4).flatten(1, 2))
