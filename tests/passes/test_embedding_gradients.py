"""Gradients of embeddings as scatters: what the graph is afterwards, and where eager's op is left alone, by the prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from dynafuse.cost import device as devices
from dynafuse.passes.embedding_gradients import scatter_gradients
from dynafuse.passes.normalize import normalize
from tests.passes.test_normalize import text
from tests.support import graphs

H200 = devices.describe("h200")


def gradient(count: int, table: tuple[int, int], dtype: torch.dtype, *options: Any) -> GraphModule:
    """The graph of a gradient of ``count`` rows, after the pass."""
    def write(build: graphs.Builder, rows: Any, at: Any) -> Any:
        return build.op("aten.embedding_dense_backward.default", rows, at, table[0], *(options or (-1, False)))

    inputs = torch.empty(count, table[1], dtype=dtype, device="meta"), torch.empty(count, dtype=torch.int64, device="meta")
    module = normalize(graphs.built(write, *inputs))
    scatter_gradients(module, H200, "meta")
    return module


def is_scattered(module: GraphModule) -> bool:
    return "embedding_dense_backward" not in text(module)


def test_rows_of_the_padding_are_masked() -> None:
    assert text(gradient(40, (10, 8), torch.float32, 3, False)) == (
        "full_default = aten.full.default([10, 8], 0, dtype=torch.float32, layout=torch.strided, device=meta, pin_memory=False)\n"
        "ne_scalar = aten.ne.Scalar(arg1, 3)\n"
        "unsqueeze_default = aten.unsqueeze.default(ne_scalar, -1)\n"
        "_unsafe_masked_index_put_accumulate_default = "
        "aten._unsafe_masked_index_put_accumulate.default(full_default, unsqueeze_default, [arg1], arg0)\n"
        "return _unsafe_masked_index_put_accumulate_default")


@pytest.mark.parametrize(("count", "table", "dtype", "pays"), [
    (4096, (32000, 1024), torch.float32, True),  # zeros are filled in either case
    (1024, (32000, 1024), torch.float32, True),
    (16384, (4000, 1024), torch.bfloat16, True),  # a small table is soon rounded
    (4096, (128000, 4096), torch.bfloat16, False),  # a large one costs more than the sorting of few rows
    (0, (10, 8), torch.float32, False),
])
def test_eagers_op_stays_where_it_is_cheaper(count: int, table: tuple[int, int], dtype: torch.dtype, pays: bool) -> None:
    assert is_scattered(gradient(count, table, dtype)) is pays


def test_gradients_that_are_scaled_by_counts_stay() -> None:
    assert not is_scattered(gradient(40, (10, 8), torch.float32, -1, True))
