"""How long the cache is to hold what kernels load."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.lowering.triton.eviction import LARGEST_KEPT
from dynafuse.lowering.triton.lower import lower
from tests.support import graphs

LOAD = re.compile(r'tl\.load\(in(\d) \+ .*?(?:eviction_policy="(\w+)")?\)(?:\.to|$)', re.M)
LAST, FIRST, NONE = "evict_last", "evict_first", ""


def policies(write: Callable[..., Any], *inputs: torch.Tensor) -> list[list[str]]:
    """The policies of the loads of each input, sorted: kernels name their inputs in an order of their own."""
    plan = graphs.planned(graphs.built(write, *inputs))
    (region,) = plan.regions
    found: dict[int, list[str]] = {}
    bound = canonical(plan.annotated, region, resolve(environ={}).key(), "sm90")
    for number, policy in LOAD.findall(lower(bound.spec).source):
        found.setdefault(int(number), []).append(policy)
    return sorted(found.values())


def sums(g: graphs.Builder, x: Node, y: Node) -> Node:
    return g.op("aten.add.Tensor", x, y)


def transposed(g: graphs.Builder, x: Node) -> Node:
    return g.op("aten.clone.default", g.op("aten.permute.default", x, [1, 0]), memory_format=torch.contiguous_format)


def normalized(g: graphs.Builder, x: Node, weight: Node) -> Node:
    centred = g.op("aten.sub.Tensor", x, g.op("aten.mean.dim", x, [1], True))
    return g.op("aten.mul.Tensor", centred, weight)


def test_what_is_spread_along_an_axis_stays() -> None:
    assert policies(sums, torch.empty(4096, 1000), torch.empty(1000)) == [[NONE], [LAST]]
    assert policies(sums, torch.empty(4096, 1000), torch.empty(4096, 1)) == [[NONE], [LAST]]
    assert policies(sums, torch.empty(4096, 1000), torch.empty(4096, 1000)) == [[NONE], [NONE]]


@pytest.mark.parametrize(("rows", "policy"), [(1024, LAST), (2 * LARGEST_KEPT // 4096, NONE)])
def test_what_lies_across_the_tile_stays_if_the_cache_holds_it(rows: int, policy: str) -> None:
    assert policies(transposed, torch.empty(rows, 1024)) == [[policy]]


def test_what_is_loaded_at_several_places_stays() -> None:
    def neighbours(g: graphs.Builder, x: Node) -> Node:
        return g.op("aten.add.Tensor", g.op("aten.slice.Tensor", x, 1, 0, 1000), g.op("aten.slice.Tensor", x, 1, 24, 1024))

    assert policies(neighbours, torch.empty(1024, 1024)) == [[LAST, LAST]]
    assert policies(neighbours, torch.empty(2 * LARGEST_KEPT // 4096, 1024)) == [[NONE, NONE]]


def test_where_loaded_indices_lead_is_not_known() -> None:
    def looked_up(g: graphs.Builder, table: Node, at: Node) -> Node:
        return g.op("aten.embedding.default", table, at)

    found = policies(looked_up, torch.empty(1000, 512), torch.zeros(4096, dtype=torch.int64))
    assert found == [[NONE], [LAST]]


@pytest.mark.parametrize(("length", "of_row"), [(1024, [NONE]), (1 << 17, [LAST, FIRST])])
def test_rows_stay_until_their_last_pass_and_weights_longer(length: int, of_row: list[str]) -> None:
    assert policies(normalized, torch.empty(4096, length), torch.empty(length)) == sorted([of_row, [LAST]])
