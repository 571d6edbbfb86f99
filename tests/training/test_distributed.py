"""Training on several processes: data parallel, sharded whole and by block, split by tensors; losses as eager's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

# The benchmarks are run from the checkout and not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import distributed

every_way = pytest.mark.parametrize("way", distributed.WAYS)


def losses_agree(way: str, out: Path, *more: str) -> None:
    """Train a small Llama with grouped heads in two processes, eager and compiled, in one precision."""
    small = ["--scale", "tiny", "--layers", "1", "--dtype", "float32", "--steps", "1", "--systems", "eager,dynafuse"]
    failed = distributed.main(["--ways", way, *small, "--out", str(out), *more])
    rows = {row["system"]: row["metrics"] for row in json.loads(out.read_text())["rows"]}
    assert not failed, rows
    assert len(set(rows["dynafuse"]["losses"])) == distributed.CHECKED, "the weights do not move"


@every_way
def test_losses_are_those_of_eager(way: str, tmp_path: Path) -> None:
    losses_agree(way, tmp_path / "rows.json", "--device", "cpu")


@pytest.mark.gpu
@every_way
def test_losses_on_two_gpus(way: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    losses_agree(way, tmp_path / "rows.json")


def test_a_way_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        distributed.main(["--ways", "pipeline"])
    assert "known: ddp, fsdp2, fsdp2_blocks, tensor" in capsys.readouterr().err


def test_a_rank_that_fails_is_a_row_with_its_error(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert distributed.main(["--ways", "ddp", "--systems", "dynafuse@DYNAFUSE_NONSENSE=1", "--scale", "tiny", "--layers", "1",
                             "--processes", "1", "--device", "cpu", "--dtype", "float32", "--out", str(out)]) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert "DYNAFUSE_NONSENSE" in row["metrics"]["error"]
