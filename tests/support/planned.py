"""Graphs through the planner, their regions run by recipe over torch.

Worked example::

    plan = Planned(module)                    # annotated, partitioned, every region canonical
    plan.run([x, y])                          # regions by recipe, everything else eager
    plan.recipes                              # what was lowered
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.lowering.nvfuser.lower import lower, refusal
from dynafuse.lowering.nvfuser.recipe import Recipe, decode, encode
from dynafuse.lowering.nvfuser.replay import FusionBackend, replay
from dynafuse.ops.symbols import symbol_of
from tests.support import torch_recorder
from tests.support.by_regions import ByRegions

HAS_NVFUSER = importlib.util.find_spec("nvfuser_direct") is not None


class Planned(ByRegions):
    """A graph's plan with the specs of its regions."""

    def __init__(self, module: GraphModule, **options: Any) -> None:
        super().__init__(module, "sm90", **options)
        self.refused = [reason for bound in self.bounds.values() if (reason := refusal(bound.spec))]
        self.recipes: dict[str, Recipe] = {} if self.refused else {
            name: kept(lower(bound.spec)) for name, bound in self.bounds.items()}

    @property
    def eager(self) -> list[Node]:
        """Ops that no region computes."""
        facts = self.plan.annotated.facts
        return [s for s in self.plan.steps if isinstance(s, Node) and facts[s].role == "eager"]

    def run_region(self, bound: CanonicalRegion, inputs: Sequence[Any], symbols: Sequence[int]) -> Sequence[torch.Tensor]:
        """Play a region's recipe over torch; its outputs have the strides that the stores promise."""
        made = torch_recorder.run(self.recipes[bound.region.name], inputs, symbols)
        for node, value, store in zip(bound.outputs, made, bound.spec.stores, strict=True):
            wanted = [int(s.xreplace(dict(zip(map(symbol_of, bound.spec.symbols), symbols, strict=True)))
                          if isinstance(s, sympy.Expr) else s) for s in store.layout.stride]
            for size, have, want in zip(value.shape, value.stride(), wanted, strict=True):
                assert size < 2 or have == want, f"{node}: strides {value.stride()}, promised {wanted}"
            assert value.dtype is store.layout.dtype
        return made


def kept(recipe: Recipe) -> Recipe:
    """A recipe as it comes back from the store; recorded in the real library where that is installed."""
    again = decode(encode(recipe))
    assert repr(again) == repr(recipe)  # the text knows NaN and the sign of zero
    if HAS_NVFUSER:
        recorded(again)
    return again


def recorded(recipe: Recipe) -> Any:
    """The FusionDefinition of a recipe; every tensor in it has the dtype and the rank that the recipe says."""
    import nvfuser_direct

    fd = nvfuser_direct.FusionDefinition()
    with fd:
        backend = FusionBackend(nvfuser_direct, fd)
        values = replay(recipe, backend)
        for step in recipe.steps:
            for number in step.results:
                if step.dtype is not None:
                    assert values[number].dtype() == backend.types[step.dtype], f"{step}: {values[number]}"
    return fd
