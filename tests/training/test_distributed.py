"""Training on several processes: data parallel, sharded whole and by block, split by tensors; losses as eager's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import distributed
from tests.support.processes import environment, python

RANKS = 2
SMALL = ["--scale", "tiny", "--layers", "1", "--dtype", "float32", "--steps", "1"]


def test_losses_are_those_of_eager(tmp_path: Path) -> None:
    """Every way with a small Llama with grouped heads, in one pair of processes."""
    pytest.importorskip("transformers")
    python("-m", "tests.support.ranks", str(RANKS), str(tmp_path), env=environment(OMP_NUM_THREADS="1"), timeout=300)
    for rank in range(RANKS):
        losses = dict(map(json.loads, (tmp_path / str(rank)).read_text().splitlines()))
        assert losses.keys() == distributed.WAYS.keys()
        for way, found in losses.items():
            assert found["dynafuse"] == pytest.approx(found["eager"], rel=distributed.TOLERANCE["float32"]), way
            assert len(set(found["dynafuse"])) > 1, f"{way}: the weights do not move"


def run(out: Path, ways: str, systems: str, *more: str) -> tuple[int, dict[str, Any]]:
    """The command's status and its metrics by system."""
    status = distributed.main(["--ways", ways, "--systems", systems, *SMALL, "--out", str(out), *more])
    return status, {row["system"]: row["metrics"] for row in json.loads(out.read_text())["rows"]}


@pytest.mark.gpu
@pytest.mark.parametrize("way", distributed.WAYS)
def test_losses_on_two_gpus(way: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    failed, rows = run(tmp_path / "rows.json", way, "eager,dynafuse")
    assert not failed, rows
    assert len(set(rows["dynafuse"]["losses"])) == distributed.CHECKED, "the weights do not move"


def test_a_way_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        distributed.main(["--ways", "pipeline"])
    assert "known: ddp, fsdp2, fsdp2_blocks, tensor" in capsys.readouterr().err


def test_a_rank_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    """Beside the row of one that does not."""
    wrong = "dynafuse@DYNAFUSE_NONSENSE=1"
    failed, rows = run(tmp_path / "rows.json", "ddp", f"eager,{wrong}", "--processes", "1", "--device", "cpu")
    assert failed and rows["eager"]["right"] and len(set(rows["eager"]["losses"])) == distributed.CHECKED
    assert "DYNAFUSE_NONSENSE" in rows[wrong]["error"]


def test_ranks_that_are_not_done_in_time_do_not_go_on(tmp_path: Path) -> None:
    failed, rows = run(tmp_path / "rows.json", "ddp", "eager", "--processes", "1", "--device", "cpu", "--steps", "100000",
                       "--limit", "8")
    assert failed and rows["eager"] == {"error": "not done after 8.0 s"}
    ranks = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _content(path)]
    assert not ranks


def _content(path: Path) -> bytes:
    with suppress(OSError):  # a process that has ended meanwhile
        return path.read_bytes()
    return b""


@pytest.mark.parametrize(("ours", "right"), [([2.0, 1.0], True), ([2.0, 1.1], False)])
def test_losses_are_judged_by_eagers(ours: list[float], right: bool) -> None:
    assert distributed.judged({"losses": ours}, {"losses": [2.0, 1.0]}, 1e-2)["right"] is right
