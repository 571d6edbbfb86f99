"""Every fusible row of the op table as a recipe, run over torch against float64; refusals against a list that people read.

Where the real library is installed, every recipe is recorded in it too, and its dtypes compared (``planned.kept``).
``REWRITE_GOLDENS=1`` writes the list anew.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import dynafuse.ops as ops
from dynafuse.ops import Kind, Row
from tests.support import graphs
from tests.support.planned import Planned
from tests.support.row_calls import compare, copied, eager, reference, tensors, write
from tests.support.samples import Sample, samples

ROWS = [row for row in ops.rows() if row.fusible and row.kind is not Kind.RANDOM]
EVERY_ROW = pytest.mark.parametrize("row", ROWS, ids=[str(row.target) for row in ROWS])
LIST = Path(__file__).parent / "refused_rows.expected"
SKIPPED, REFUSED, LOWERED = "skipped", "refused", "lowered"
NO_DTYPE = "nvFuser has no torch."
NEVER_LOWERED = {
    "prims._low_memory_max_pool_offsets_to_indices.default": "its operand is int8",
    "dynafuse.max_pool_offsets.default": "its result is int8",
    "dynafuse.max_pool_offsets_backward.default": "its operand is int8",
}
"""Rows of which no sample reaches the lowering, with the reason."""
UNTRACEABLE = (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError)


def outcome(row: Row, sample: Sample) -> tuple[str, str]:
    """Compare one call; what became of it, and the refusal."""
    expected = eager(row, sample)
    if expected is None:
        return SKIPPED, ""
    inputs = tensors(sample)
    try:
        module = graphs.built(lambda build, *nodes: write(build, row, sample, nodes), *inputs, dynamic=sample.dynamic)
    except UNTRACEABLE:
        return SKIPPED, ""
    promised = module.graph.output_node().args[0][0].meta["val"]
    if (promised.dtype, tuple(map(int, promised.shape))) != (expected.dtype, tuple(expected.shape)):
        return SKIPPED, ""
    plan = Planned(module)
    if plan.eager or not plan.bounds:
        return SKIPPED, ""
    if plan.refused:
        return REFUSED, plan.refused[0].removeprefix(f"{row.target}: ")
    found, = plan.run([copied(t) for t in inputs])
    compare(found, expected, reference(row, sample, expected), f"{row.target} {sample}\n{plan.recipes}")
    return LOWERED, ""


def listed() -> dict[str, str]:
    """Rows of which nvFuser cannot do (some) calls, with the reasons."""
    lines = LIST.read_text(encoding="utf-8").splitlines() if LIST.exists() else []
    return dict(line.split(": ", 1) for line in lines)


@EVERY_ROW
def test_row(row: Row) -> None:
    found = [outcome(row, sample) for sample in samples(row)]
    lowered = any(what == LOWERED for what, _ in found)
    reasons = sorted({reason for what, reason in found if what == REFUSED and NO_DTYPE not in reason})
    text = "; ".join(reasons) + (" (some calls)" if lowered else "")
    if os.environ.get("REWRITE_GOLDENS") == "1":
        rewrite(str(row.target), text if reasons else None)
    assert listed().get(str(row.target)) == (text if reasons else None), "REWRITE_GOLDENS=1 rewrites the list if this is meant"
    assert lowered or reasons or all(NO_DTYPE in reason or what == SKIPPED for what, reason in found)
    assert lowered or reasons or str(row.target) in NEVER_LOWERED


def rewrite(name: str, text: str | None) -> None:
    kept = {key: value for key, value in listed().items() if key != name} | ({name: text} if text else {})
    LIST.write_text("".join(f"{key}: {kept[key]}\n" for key in sorted(kept)), encoding="utf-8")


def test_list_names_fusible_rows() -> None:
    assert set(listed()) <= {str(row.target) for row in ROWS}


def test_user_rows_serve_nvfuser() -> None:
    """A row that a user adds has one expression for both compilers."""
    before = ops.lookup(torch.ops.aten.atan2.default)
    try:
        ops.register(ops.pointwise(torch.ops.aten.atan2.default, "{1} * lm.tanh({0} / {1})"))
        module = graphs.built(lambda g, x, y: g.op("aten.atan2.default", x, y), torch.ones(8, 4), torch.ones(4))
        plan = Planned(module)
        x, y = torch.randn(8, 4), torch.rand(4) + 1
        assert not plan.refused
        torch.testing.assert_close(plan.run([x, y])[0], y * torch.tanh(x / y))
    finally:
        assert before is not None
        ops.register(before)
