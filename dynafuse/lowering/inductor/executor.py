"""Inductor as an executor: a spec becomes a program over torch, which Inductor compiles; by default for CPU tensors."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from dynafuse.fallback import Guard
from dynafuse.futures import finished
from dynafuse.lowering.base import AVAILABLE, Availability, Compilation, Executor, Use
from dynafuse.lowering.inductor import availability, compiler
from dynafuse.lowering.inductor.kernel import DelegateKernel
from dynafuse.lowering.inductor.lower import lower, refusal
from dynafuse.ops import inductor_rows

if TYPE_CHECKING:
    import torch
    from torch.fx import Node

    from dynafuse.cache.canonical import CanonicalRegion
    from dynafuse.ir import Facts, Spec


class Inductor(Executor):
    """Torch's own compiler, a region at a time. What it makes is in its own cache, not in ours."""

    name = "inductor"
    device_types = frozenset({"cuda", "cpu"})
    default_on = frozenset({"cpu"})
    remedy = "`dynafuse doctor` tries the compiler"
    splits = True

    def available(self, use: Use) -> Availability:
        """Return whether the compilers that it calls are here."""
        if use.config.round_like_eager:
            return Availability(False, "Inductor does not round as eager does (round_like_eager)", ruled_out=True)
        compilers = availability.find("cuda" if use.on_gpu else use.device_type)
        return AVAILABLE if compilers.available else Availability(False, str(compilers))

    def refuses_node(self, node: Node, facts: Mapping[Node, Facts]) -> str:
        """Return which ops Inductor gets wrong, or has no lowering for."""
        own = facts[node]
        if not own.is_fused or own.row is None or own.call is None:
            return own.reason
        return inductor_rows.refusal(own.row, own.call)

    def refuses_spec(self, spec: Spec) -> str:
        """Return why a region is no program for Inductor."""
        return refusal(spec)

    def target(self, device: torch.device, capability: int | None) -> str:
        """Return the device: Inductor's code is for one."""
        return f"{self.name} {device}"

    def compile(self, region: CanonicalRegion, compilation: Compilation) -> Future[DelegateKernel]:
        """Compile here, for the example's sizes if some are dynamic."""
        index = region.device.index or 0 if region.device.type == "cuda" else None

        def compiled() -> DelegateKernel:
            guard = _of_ops(compilation.guard, region.spec)
            kernel = DelegateKernel(region.key, lower(region.spec), compiler.build, guard)
            return kernel.prepare(list(region.hints.values()), index, region.has_unknown_sizes)

        return finished(compiled)


def _of_ops(guard: Guard, spec: Spec) -> Guard:
    """Return a guard for what is kept longer than the graph: it names the ops instead of holding what a script needs."""
    ops = ", ".join(dict.fromkeys(op.target for op in spec.ops))
    return Guard(guard.strict, lambda error: [f"ops: {ops}"])


INDUCTOR = Inductor()
