"""Regions on executors that take them as a whole, and ops that no executor takes."""

from __future__ import annotations

import torch

from dynafuse.config import resolve
from dynafuse.cost import device
from dynafuse.partition.executors import Executors
from dynafuse.partition.search import partition
from dynafuse.select.place import place
from tests.support import graphs


def test_what_no_executor_takes_stays_unplaced() -> None:
    """A plan without steps says so: its ops are then left to eager, and the graph is planned again."""
    facts = graphs.annotated(graphs.built(lambda build, x: build.op("aten.atanh.default", x), torch.rand(8)))
    plan = partition(facts, device.describe("cpu"), Executors(facts.facts, ("inductor",)))
    placed = place(plan, resolve(None, {}), None)
    assert not placed.steps and [node.name for node in placed.unplaced] == ["atanh_default"]
