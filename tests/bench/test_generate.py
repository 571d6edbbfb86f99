"""The decoding benchmark in small, on a CPU."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import generate, systems

SMALL = ("--scale", "tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "4", "--rounds", "1", "--inside")


@pytest.mark.parametrize(("system", "graphs"), [("eager", 0), ("aot_eager", 1)])
def test_a_row(system: str, graphs: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "row.json"
    assert generate.main([*SMALL, "--cases", "llama/1", "--systems", system, "--out", str(out)]) == 0
    row = json.loads(out.read_text())
    assert (row["tokens_equal"], row["equal_until"], row["graphs"], row["graphs_later"]) == (1, 4, graphs, 0)
    assert row["cold_s"] > 0


def test_what_generate_compiles_with() -> None:
    pytest.importorskip("transformers")
    config = generate.compiling(systems.find("inductor-reduce-overhead"))["compile_config"]
    assert (config.backend, config.mode) == ("inductor", "reduce-overhead")
    assert generate.compiling(systems.find("eager")) == {"disable_compile": True}


def test_unknown_cases_end_the_run() -> None:
    with pytest.raises(SystemExit, match="no case is called nobody"):
        generate.main(["--cases", "nobody"])
