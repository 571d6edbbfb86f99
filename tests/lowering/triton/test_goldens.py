"""The generated source of representative regions, against text that people have read.

``REWRITE_GOLDENS=1 pytest tests/lowering/triton/test_goldens.py`` writes the files anew; read the difference first.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import representative
from tests.support.processes import environment, python

FOLDER = Path(__file__).parent / "goldens"
REWRITE = os.environ.get("REWRITE_GOLDENS") == "1"

CLASSES = {  # what each case is there to show
    "pointwise_flat": "flat", "pointwise_broadcast": "flat", "transpose_tiled": "tiled",
    "softmax_persistent": "persistent", "softmax_looped": "looped", "layer_norm_forward": "persistent",
    "rms_norm_backward": "rowcol",
    "column_sum_split": "split", "column_sum_small": "split", "full_sum_split": "split", "argmax_rows": "persistent", "softmax_dynamic": "looped",
    "pointwise_dynamic": "flat", "reduction_unrolled": "flat", "embedding_gather": "flat", "dropout_with_seed": "flat",
    "cumulative_softmax": "persistent", "cumulative_columns": "looped",
    "variance_of_channels": "split", "gated_images": "looped", "fold_family": "flat",
    "side_by_side": "side_by_side",
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
    assert [representative.lower(bound.code).schedule_class for bound in representative.bounds(name)] == [CLASSES[name]]


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.expected")} == set(representative.CASES)


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_source_is_the_same_in_another_process(seed: str) -> None:
    code = "import sys; from tests.support import representative; sys.stdout.write(representative.everything())"
    printed = python("-c", code, env=environment(PYTHONHASHSEED=seed))
    read = (f"{name}\n{(FOLDER / f'{name}.expected').read_text(encoding='utf-8')}" for name in representative.CASES)
    assert printed == "\n".join(read)
