"""What torch knows of sizes, without a graph."""

from __future__ import annotations

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def environment_of(*sizes: int) -> tuple[ShapeEnv, list[sympy.Symbol]]:
    """An environment with a symbol for each size."""
    environment = ShapeEnv()
    sources = [torch._dynamo.source.ConstantSource(f"size{k}") for k in range(len(sizes))]
    return environment, [environment.create_symbol(size, source, DimDynamic.DYNAMIC) for size, source in zip(sizes, sources, strict=True)]
