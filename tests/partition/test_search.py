"""Plans that are better than what greedy growth finds, and how long they are looked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Node

from dynafuse.cost.device import describe
from dynafuse.cost.model import Prediction
from dynafuse.ir import Annotated, Plan
from dynafuse.partition import search
from dynafuse.partition.executors import Executors
from dynafuse.partition.grow import Candidate, Growth, Way
from dynafuse.partition.kernels import Kernels
from dynafuse.partition.units import Units
from tests.support import graphs

H200 = describe("h200")
IMAGES = torch.empty(32, 256, 784, dtype=torch.bfloat16)


def centred(g: graphs.Builder, x: Node, y: Node) -> list[Node]:
    """The worked example: a sum over channels, and one over the positions of each image of what needs it."""
    difference = g.op("aten.sub.Tensor", x, g.op("aten.sum.dim_IntList", x, [0, 2], True))
    return [difference, g.op("aten.sum.dim_IntList", g.op("aten.mul.Tensor", difference, y), [2])]


def many(g: graphs.Builder, x: Node, y: Node, *, count: int) -> list[Node]:
    return [output for _ in range(count) for output in centred(g, g.op("aten.neg.default", x), y)]


def grown(write: Any, *inputs: torch.Tensor, way: Way) -> tuple[Plan, Growth]:
    annotated = graphs.annotated(graphs.built(write, *inputs))
    growth = Growth(units_of(annotated), way)
    return growth.run(), growth


def units_of(annotated: Annotated) -> Units:
    return Units(annotated, H200, Executors(annotated.facts, ("triton",)))


def searched(write: Any, *inputs: torch.Tensor) -> Plan:
    annotated = graphs.annotated(graphs.built(write, *inputs))
    return search.partition(annotated, H200, Executors(annotated.facts, ("triton",)))


def regions(plan: Plan) -> list[list[str]]:
    return [[node.name for node in region.nodes] for region in plan.regions]


def test_a_merge_that_keeps_better_ones_apart_is_left_out() -> None:
    greedy, growth = grown(centred, IMAGES, IMAGES, way=Way())
    plan = searched(centred, IMAGES, IMAGES)
    assert regions(greedy) == [["sum_dim_int_list"], ["sub_tensor", "mul_tensor", "sum_dim_int_list_1"]]
    assert regions(plan) == [["sum_dim_int_list", "sub_tensor"], ["mul_tensor", "sum_dim_int_list_1"]]
    assert sum(region.predicted_us for region in plan.regions) < 0.95 * growth.pricing.now.device_us


def test_the_report_says_that_others_merge_better() -> None:
    plan, _ = grown(centred, IMAGES, IMAGES, way=Way(apart=frozenset({("sub_tensor", "mul_tensor")})))
    assert [str(refusal) for refusal in plan.refusals] == [
        "sub_tensor | mul_tensor: does not pay (others merge better without it)"]


def test_what_is_merged_first_stays_together() -> None:
    """There is no plan of that way where it cannot be: what would walk whole long rows waits for what else may share them."""
    _, growth = grown(centred, IMAGES, IMAGES, way=Way())
    _, _, product, last = growth.group
    (missed,) = growth.missed(0.03)
    assert (missed.first.name, missed.second.name) == ("sum_dim_int_list", "sub_tensor")

    def merged(first: Candidate) -> list[list[str]]:
        return regions(Growth(growth.units, Way(first=(first,))).run())

    assert merged(Candidate(0, product, last, product, vertical=True))[-1][-2:] == ["mul_tensor", "sum_dim_int_list_1"]
    assert merged(missed) == []


def test_ways_that_were_tried_before_do_not_change_a_plan() -> None:
    annotated = graphs.annotated(graphs.built(lambda g, x, y: many(g, x, y, count=3), IMAGES, IMAGES))
    ways = [Way(), Way(one_pass=False), Way(apart=frozenset({("sub_tensor", "mul_tensor")})), Way()]
    shared = units_of(annotated)

    def merged(way: Way, units: Units) -> list[list[str]]:
        return regions(Growth(units, way).run())

    assert [merged(way, shared) for way in ways] == [merged(way, units_of(annotated)) for way in ways]


def test_a_kernel_that_several_ways_come_to_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Node, ...]] = []
    make = Kernels.of

    def counted(kernels: Kernels, nodes: list[Node], *arguments: Any) -> Any:
        asked.append(tuple(nodes))
        return make(kernels, nodes, *arguments)

    monkeypatch.setattr(Kernels, "of", counted)
    units = units_of(graphs.annotated(graphs.built(centred, IMAGES, IMAGES)))
    Growth(units, Way()).run()
    before = len(asked)
    Growth(units, Way()).run()
    assert len(asked) == before > 4


@pytest.mark.parametrize(("count", "most"), [(1, 2 + search.MOST_TRIED), (60, 2)])
def test_large_graphs_are_not_searched(count: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Way] = []

    class Counted(Growth):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.way)

    monkeypatch.setattr(search, "Growth", Counted)
    searched(lambda g, x, y: many(g, x, y, count=count), IMAGES, IMAGES)
    assert (len(made) > 2) == (count == 1) and len(made) <= most


def test_what_is_known_of_kernels_is_there_for_a_plan_without_the_hosts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    units = units_of(graphs.annotated(graphs.built(centred, IMAGES, IMAGES)))
    plan = search.quickest(units)
    monkeypatch.setattr(Kernels, "of", lambda *_: pytest.fail("a kernel is asked for that is known"))
    assert regions(search.quickest(units, captured=True)) == regions(plan)


def test_of_plans_that_are_about_as_quick_the_device_is_least_busy_in_one() -> None:
    """One kernel keeps the host busy for less time, two the device: what the host takes depends on the host."""
    def plan(us: float, device_us: float) -> Any:
        return None, SimpleNamespace(us=us, pricing=SimpleNamespace(now=Prediction(device_us=device_us)))

    quick, idle, slow = plan(10.0, 9.5), plan(10.9, 6.0), plan(11.2, 3.0)
    assert search._least_busy([quick, idle, slow]) is idle
    assert search._least_busy([quick, slow]) is quick
