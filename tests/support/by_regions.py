"""Graphs through the planner, run region by region by whatever a test puts in a kernel's place, everything else eager.

Worked example: a class that derives from :class:`ByRegions` and writes ``run_region(bound, inputs, symbols)``, the stored
tensors of a region; ``run([x, y])`` gives the graph's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from dynafuse.cache.canonical import CanonicalRegion, canonical
from dynafuse.config import resolve
from dynafuse.ir import Region
from tests.support import graphs


class ByRegions:
    """A graph's plan with the canonical form of each region for ``target``."""

    def __init__(self, module: GraphModule, target: str, **options: Any) -> None:
        self.module = module
        self.plan = graphs.planned(module)
        key = resolve(options=options, environ={}).key()
        self.bounds: dict[str, CanonicalRegion] = {
            region.name: canonical(self.plan.annotated, region, key, target) for region in self.plan.regions
        }

    def run_region(self, bound: CanonicalRegion, inputs: Sequence[Any], symbols: Sequence[int]) -> Sequence[torch.Tensor]:
        """The tensors that a region stores, in order; ``symbols`` are the values of its sizes."""
        raise NotImplementedError

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The graph's outputs; an input that a region overwrites is overwritten."""
        graph = self.plan.annotated.graph
        env: dict[Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
        sizes = size_values(env)
        for step in self.plan.steps:
            if isinstance(step, Region):
                bound = self.bounds[step.name]
                symbols = [int(expr.xreplace(dict(sizes))) for expr in bound.symbols]
                made = self.run_region(bound, [env[n] for n in bound.inputs], symbols)
                env.update(zip(bound.outputs, made, strict=True))
            elif step.op == "get_attr":
                env[step] = getattr(self.module, str(step.target))
            else:
                args, kwargs = tree_map(lambda a: env[a] if isinstance(a, Node) else a, (step.args, step.kwargs))
                env[step] = step.target(*args, **kwargs)  # type: ignore[operator]
        outputs = graph.output_node().args[0]
        return [env[n] if isinstance(n, Node) else n for n in outputs]  # type: ignore[union-attr]


def size_values(env: Mapping[Node, Any]) -> dict[sympy.Symbol, int]:
    """The size symbols that inputs show."""
    found: dict[sympy.Symbol, int] = {}
    for node, value in env.items():
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            pairs = [*zip(fake.shape, value.shape, strict=True), *zip(fake.stride(), value.stride(), strict=True)]
            found.update({a.node.expr: b for a, b in pairs if isinstance(a, torch.SymInt) and a.node.expr.is_Symbol})
    return found
