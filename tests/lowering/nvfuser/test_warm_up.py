"""What nvFuser's kernels are run on before the first call: data of the example's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.config import resolve
from dynafuse.fallback import STRICT
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.nvfuser import replay
from dynafuse.lowering.nvfuser.executor import NVFUSER
from dynafuse.select import validation
from dynafuse.select.data import inputs_for
from tests.support import graphs
from tests.support.by_regions import ByRegions

CPU = torch.device("cpu")


class Definition:
    """A stand-in for a FusionDefinition that keeps what it is run on."""

    def __init__(self) -> None:
        self.fec = self
        self.given: list[Any] = []

    def execute(self, inputs: list[Any], *, device: Any) -> list[torch.Tensor]:
        self.given.append(inputs)
        return [torch.empty(0)]


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> Definition:
    """A GPU that is none: data are made on the CPU, and nothing is compiled."""
    found = Definition()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CanonicalRegion, "device", torch.device("cuda", 0))
    monkeypatch.setattr(validation, "check", lambda run, spec, hints, device: run(inputs_for(spec, hints, CPU)))
    monkeypatch.setattr(replay, "define", lambda recipe: found)
    return found


def warmed_up(write: Any, *inputs: torch.Tensor, dynamic: bool = False) -> None:
    bound, = ByRegions(graphs.built(write, *inputs, dynamic=dynamic), "sm90").bounds.values()
    validation.validate(NVFUSER.compile(bound, Compilation(90, resolve(environ={}), STRICT)).result(), bound)


def summed(g: graphs.Builder, x: Any) -> Any:
    return g.op("aten.sum.dim_IntList", g.op("aten.exp.default", x), [1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_are_the_examples(definition: Definition, dynamic: bool) -> None:
    warmed_up(summed, torch.randn(6, 40), dynamic=dynamic)
    (given,) = definition.given
    assert [tuple(tensor.shape) for tensor in given] == [(6, 40)]


def test_sizes_that_no_input_shows_follow_the_tensors(definition: Definition) -> None:
    def write(g: graphs.Builder, x: Any) -> Any:
        size = g.op(torch.ops.aten.sym_size.int, x, 0)
        return g.op("aten.exp.default", g.op("aten.full.default", [size], 2.0))

    warmed_up(write, torch.randn(6), dynamic=True)
    assert definition.given == [[6]]


def test_a_region_without_inputs_is_compiled_as_well(definition: Definition) -> None:
    warmed_up(lambda g: g.op("aten.full.default", [8, 4], 2.0))
    assert definition.given == [[]]
