"""Graphs through the planner, their regions run by Inductor, everything else eager.

Worked example::

    plan = Delegated(module)                  # annotated, partitioned, every region canonical
    plan.run([x, y])                          # compiles at the first call
    plan.kernels                              # by region
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import graphs
import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from dynafuse.cache.key import Bound, canonical
from dynafuse.config import resolve
from dynafuse.ir import Region
from dynafuse.lowering.inductor.compiler import build
from dynafuse.lowering.inductor.lower import lower
from dynafuse.runtime.delegate import DelegateKernel


class Delegated:
    """A graph's plan with a kernel of Inductor's for each region."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.plan = graphs.planned(module)
        key = resolve(environ={}).key()
        self.bounds: dict[str, Bound] = {
            region.name: canonical(self.plan.annotated, region, key, "cpu") for region in self.plan.regions
        }
        self.kernels = {name: DelegateKernel(b.key, lower(b.spec), build) for name, b in self.bounds.items()}

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
        """Run a region; its outputs are what the stores promise, in memory of their own."""
        bound, kernel = self.bounds[region.name], self.kernels[region.name]
        symbols = [int(expr.xreplace(dict(sizes))) for expr in bound.symbols]
        inputs = [env[n] for n in bound.inputs]
        made = kernel.run([*inputs, *symbols], None)
        strides = iter(kernel.program.strides(symbols))
        seen = {t.untyped_storage().data_ptr() for t in inputs}
        for node, value, store in zip(bound.outputs, made, bound.spec.stores, strict=True):
            assert value.dtype is store.layout.dtype
            if store.into is not None:
                assert value is inputs[store.into]
            else:
                for size, have, want in zip(value.shape, value.stride(), next(strides), strict=True):
                    assert size < 2 or have == want, f"{node}: strides {value.stride()}"
                assert value.untyped_storage().data_ptr() not in seen, f"{node} shares memory"
                seen.add(value.untyped_storage().data_ptr())
            env[node] = value


def size_values(env: Mapping[Node, Any]) -> dict[sympy.Symbol, int]:
    """The size symbols that inputs show."""
    found: dict[sympy.Symbol, int] = {}
    for node, value in env.items():
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            pairs = [*zip(fake.shape, value.shape, strict=True), *zip(fake.stride(), value.stride(), strict=True)]
            found.update({a.node.expr: b for a, b in pairs if isinstance(a, torch.SymInt) and a.node.expr.is_Symbol})
    return found
