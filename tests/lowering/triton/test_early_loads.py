"""Loads that come before the first point at which threads wait for each other."""

from __future__ import annotations

import re

import pytest
import sympy
import torch
from torch.fx import Node

from dynafuse.cache.canonical import canonical
from dynafuse.config import resolve
from dynafuse.lowering.triton.early_loads import load_early
from dynafuse.lowering.triton.lower import lower
from dynafuse.lowering.triton.scopes import Line, Scope
from tests.support import graphs

ROWS, BOTH = frozenset("x"), frozenset("xr")
INDEX = sympy.Symbol("i0")


def moved(lines: list[Line | Scope], first_wait: int, along_rows: bool = True) -> list[str]:
    scope = Scope(lines)
    load_early(scope, first_wait, along_rows=along_rows)
    return [line.text for line in scope.lines if isinstance(line, Line)]


def load(name: str, tiles: frozenset[str], index: sympy.Expr = INDEX, mask: str = "x_mask") -> Line:
    return Line(f"{name} = tl.load(in0 + ({{0}}), {mask})", (index,), tiles=tiles)


def test_loads_that_need_nothing_come_first_in_order() -> None:
    lines = [load("v0", BOTH), Line("v1 = tl.sum(v0, 1)"), load("v2", BOTH), Line("v3 = v1 + v2"), load("v4", ROWS)]
    assert moved(list(lines), 1) == [lines[k].text for k in (0, 2, 4, 1, 3)]
    assert moved(list(lines), 1, along_rows=False) == [lines[k].text for k in (0, 4, 1, 2, 3)]


def test_loads_for_groups_of_neighbours_come_first_too() -> None:
    group = Line("v2 = lm.repeated(tl.load(in1 + ({0}), r_eights_mask).to(tl.float32), 8)", (INDEX,), tiles=BOTH)
    assert moved([load("v0", BOTH), Line("v1 = tl.sum(v0, 1)"), group], 1)[1] == group.text


@pytest.mark.parametrize("late", [
    load("v9", BOTH, sympy.Symbol("v0")),  # at a place that was loaded
    load("v9", BOTH, mask="v1 & x_mask"),  # under a condition that was computed
    Line("v9 = tl.where(r_mask, tl.load(in0 + (r)), 0)"),
    Scope([load("v9", BOTH)]),
], ids=["place", "condition", "computed", "branch"])
def test_what_depends_on_values_stays(late: Line | Scope) -> None:
    lines: list[Line | Scope] = [load("v0", BOTH), Line("c0, v1 = lm.argmax(v0, 1)"), late]
    scope = Scope(list(lines))
    load_early(scope, 1, along_rows=True)
    assert scope.lines == lines


@pytest.mark.parametrize(("rows", "length", "is_early"), [(64, 1024, True), (1 << 17, 1024, False), (200, 6272, True), (200, 12544, False)])
def test_rows_are_loaded_early_where_few_programs_run(rows: int, length: int, is_early: bool) -> None:
    """The gradient of a norm reads a second tensor only after the first sum."""
    def centred(g: graphs.Builder, x: Node, y: Node) -> Node:
        return g.op("aten.mul.Tensor", g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [1], True)), y)

    x = torch.empty(rows, length, dtype=torch.bfloat16)
    module = graphs.built(centred, x, x)
    plan = graphs.planned(module)
    (region,) = plan.regions
    source = lower(canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").spec).source
    places = [match.start() for match in re.finditer(r"tl\.load\(", source)]
    assert len(places) == 2
    assert (places[-1] < source.index("tl.sum(")) == is_early


def test_a_second_kernel_loads_all_partial_states_at_once() -> None:
    module = graphs.built(lambda g, x: (g.op("aten.sum.dim_IntList", x, [0]), g.op("aten.amax.default", x, [0])),
                          torch.empty(1 << 16, 256))
    plan = graphs.planned(module)
    (region,) = plan.regions
    combine = lower(canonical(plan.annotated, region, resolve(environ={}).key(), "sm90").spec).source.split("@triton.jit")[-1]
    loads = [match.start() for match in re.finditer(r"tl\.load\(tmp", combine)]
    assert len(loads) == 2 and max(loads) < min(combine.index("tl.sum("), combine.index("lm.amax("))
