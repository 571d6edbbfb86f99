"""Regions of graphs made by hand, in canonical form, with their kernels: what tests of measuring start from."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dynafuse.cache.canonical import CanonicalRegion, canonical
from dynafuse.config import resolve
from dynafuse.cost import device as devices
from dynafuse.lowering.triton import pool
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.partition.annotate import annotate
from dynafuse.partition.search import partition
from dynafuse.passes.normalize import normalize
from tests.support import graphs


def bounds(module: GraphModule, device_type: str = "cpu") -> list[CanonicalRegion]:
    """The regions of a graph."""
    plan = partition(annotate(normalize(module), device_type), devices.describe("h200"))
    return [canonical(plan.annotated, region, resolve().key(), device_type) for region in plan.regions]


def native_kernel(bound: CanonicalRegion) -> Any:
    """Triton's kernel of a region, for the GPU at hand or for the interpreter."""
    lowered = lower(bound.code)
    target = None if interpreting() else devices.at_hand(0).capability
    compiled = pool.submit(lowered, target, 0).result()
    return Kernel(bound.key, lowered.source, lowered.launches, lowered.workspaces, compiled, target is None)


def softmax(build: graphs.Builder, x: Node) -> Node:
    """A softmax of the last dimension."""
    top = build.op("aten.amax.default", x, [-1], True)
    wide = build.op("aten.exp.default", build.op("aten.sub.Tensor", x, top))
    return build.op("aten.div.Tensor", wide, build.op("aten.sum.dim_IntList", wide, [-1], True))
