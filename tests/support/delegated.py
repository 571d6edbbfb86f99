"""Graphs through the planner, their regions run by Inductor, everything else eager.

Worked example::

    plan = Delegated(module)                  # annotated, partitioned, every region canonical
    plan.run([x, y])                          # compiles at the first call
    plan.kernels                              # by region
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.lowering.inductor.compiler import build
from dynafuse.lowering.inductor.kernel import DelegateKernel
from dynafuse.lowering.inductor.lower import lower
from tests.support.by_regions import ByRegions


class Delegated(ByRegions):
    """A graph's plan with a kernel of Inductor's for each region."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, "cpu")
        self.kernels = {name: DelegateKernel(b.key, lower(b.spec), build) for name, b in self.bounds.items()}

    def run_region(self, bound: CanonicalRegion, inputs: Sequence[Any], symbols: Sequence[int]) -> Sequence[torch.Tensor]:
        """Run a region; its outputs are what the stores promise, in memory of their own."""
        kernel = self.kernels[bound.region.name]
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
        return made
