"""The generated source of representative regions, against text that people have read.

``REWRITE_GOLDENS=1 pytest tests/lowering/test_goldens.py`` writes the files anew; read the difference first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import representative

FOLDER = Path(__file__).parent / "goldens"
REWRITE = os.environ.get("REWRITE_GOLDENS") == "1"

CLASSES = {  # what each case is there to show
    "pointwise_flat": "flat", "pointwise_broadcast": "flat", "transpose_tiled": "tiled",
    "softmax_persistent": "persistent", "softmax_looped": "looped", "layer_norm_forward": "persistent",
    "rms_norm_backward": "rowcol",
    "column_sum_split": "split", "full_sum_split": "split", "argmax_rows": "persistent", "softmax_dynamic": "looped",
    "pointwise_dynamic": "flat", "reduction_unrolled": "flat", "embedding_gather": "flat", "dropout_with_seed": "flat",
    "variance_of_channels": "split", "fold_family": "flat",
}


@pytest.mark.parametrize("name", representative.CASES)
def test_source(name: str) -> None:
    path, made = FOLDER / f"{name}.expected", representative.text(name)
    if REWRITE:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(made, encoding="utf-8")
    assert path.exists(), "REWRITE_GOLDENS=1 writes it"
    assert made == path.read_text(encoding="utf-8"), "REWRITE_GOLDENS=1 rewrites the file if this is meant"


@pytest.mark.parametrize("name", CLASSES)
def test_kernel_class(name: str) -> None:
    assert [representative.lower(bound.code).kernel_class for bound in representative.bounds(name)] == [CLASSES[name]]


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.expected")} == set(representative.CASES)


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_source_is_the_same_in_another_process(seed: str) -> None:
    code = "import representative, sys; sys.stdout.write(representative.everything())"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    read = (f"{name}\n{(FOLDER / f'{name}.expected').read_text(encoding='utf-8')}" for name in representative.CASES)
    assert found.stdout == "\n".join(read)
