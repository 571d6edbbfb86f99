"""FSDP2 around blocks that are compiled one by one: it trains as eager does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fsdp_blocks.py")
ROOT = PROGRAM.parents[2]
NEAR = 1e-4  # float32, summed in another order, over a few steps


@pytest.mark.parametrize(("ranks", "executors"), [(1, ""), (2, "triton")], ids=["default", "triton"])
def test_blocks_compiled_one_by_one_train_as_eager(ranks: int, executors: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not executors:
        environment.pop("TRITON_INTERPRET", None)
    workers = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), str(ranks), str(tmp_path / "meeting"), executors],
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        printed, errors = worker.communicate(timeout=300)
        assert worker.returncode == 0, errors[-4000:]
        eager, compiled = map(json.loads, printed.strip().splitlines()[-2:])
        assert eager == pytest.approx(compiled, rel=NEAR) and eager[-1] < eager[0]
