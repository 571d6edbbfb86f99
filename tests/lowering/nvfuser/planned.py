"""Graphs through the planner, their regions run by recipe over torch.

Worked example::

    plan = Planned(module)                    # annotated, partitioned, every region canonical
    plan.run([x, y])                          # regions by recipe, everything else eager
    plan.recipes                              # what was lowered
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import graphs
import sympy
import torch
import torch_recorder
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from dynafuse.cache.key import Bound, canonical
from dynafuse.config import resolve
from dynafuse.ir import Region
from dynafuse.lowering.nvfuser.lower import lower, refusal
from dynafuse.lowering.nvfuser.recipe import Recipe, decode, encode
from dynafuse.lowering.nvfuser.replay import Recording, replay

HAS_NVFUSER = importlib.util.find_spec("nvfuser_direct") is not None


class Planned:
    """A graph's plan with the specs of its regions."""

    def __init__(self, module: GraphModule, **options: Any) -> None:
        self.module = module
        self.plan = graphs.planned(module)
        key = resolve(options=options, environ={}).key()
        self.bounds: dict[str, Bound] = {
            region.name: canonical(self.plan.annotated, region, key, "sm90") for region in self.plan.regions
        }
        self.refused = [reason for bound in self.bounds.values() if (reason := refusal(bound.spec))]
        self.recipes: dict[str, Recipe] = {} if self.refused else {
            name: kept(lower(bound.spec)) for name, bound in self.bounds.items()}

    @property
    def eager(self) -> list[Node]:
        """Ops that no region computes."""
        facts = self.plan.annotated.facts
        return [s for s in self.plan.steps if isinstance(s, Node) and facts[s].role == "eager"]

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs; an input that a region overwrites is overwritten."""
        graph = self.plan.annotated.graph
        env: dict[Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
        sizes = size_values(env)
        for step in self.plan.steps:
            if isinstance(step, Region):
                self._region(step, env, sizes)
            elif step.op == "get_attr":
                env[step] = getattr(self.module, str(step.target))
            else:
                args, kwargs = tree_map(lambda a: env[a] if isinstance(a, Node) else a, (step.args, step.kwargs))
                env[step] = step.target(*args, **kwargs)  # type: ignore[operator]
        outputs = graph.output_node().args[0]
        return [env[n] if isinstance(n, Node) else n for n in outputs]  # type: ignore[union-attr]

    def _region(self, region: Region, env: dict[Node, Any], sizes: Mapping[sympy.Symbol, int]) -> None:
        bound = self.bounds[region.name]
        symbols = [int(expr.xreplace(dict(sizes))) for expr in bound.symbols]
        made = torch_recorder.run(self.recipes[region.name], [env[n] for n in bound.inputs], symbols)
        for node, value, store in zip(bound.outputs, made, bound.spec.stores, strict=True):
            wanted = [int(s.xreplace(dict(zip(map(_symbol, bound.spec.symbols), symbols, strict=True)))
                          if isinstance(s, sympy.Expr) else s) for s in store.layout.stride]
            for size, have, want in zip(value.shape, value.stride(), wanted, strict=True):
                assert size < 2 or have == want, f"{node}: strides {value.stride()}, promised {wanted}"
            assert value.dtype is store.layout.dtype
            env[node] = value


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def size_values(env: Mapping[Node, Any]) -> dict[sympy.Symbol, int]:
    """The size symbols that inputs show."""
    found: dict[sympy.Symbol, int] = {}
    for node, value in env.items():
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            pairs = [*zip(fake.shape, value.shape, strict=True), *zip(fake.stride(), value.stride(), strict=True)]
            found.update({a.node.expr: b for a, b in pairs if isinstance(a, torch.SymInt) and a.node.expr.is_Symbol})
    return found


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
        backend = Recording(nvfuser_direct, fd)
        values = replay(recipe, backend)
        for step in recipe.steps:
            for number in step.results:
                if step.dtype is not None:
                    assert values[number].dtype() == backend.types[step.dtype], f"{step}: {values[number]}"
    return fd
