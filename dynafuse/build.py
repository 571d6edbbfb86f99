"""From a planned region to its kernel, on the executor that the region was given to.

Worked example: ``request(bound, 90, config)`` is a future; a region on Triton is compiled in a worker process meanwhile, one
on nvFuser was compiled when the future is returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.cache.key import Bound, canonical
from dynafuse.cache.store import Store
from dynafuse.config import Config
from dynafuse.ir import Layout, Plan, Region
from dynafuse.lowering.nvfuser import availability, replay
from dynafuse.lowering.nvfuser import lower as nvfuser
from dynafuse.lowering.triton import pool
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.lowering.triton.lower import lower
from dynafuse.runtime.fusion import FusionKernel
from dynafuse.runtime.launch import Kernel

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

STORE: Store[Kernel | FusionKernel] = Store()
"""Compiled kernels of this process, by key."""


def usable(names: Sequence[str], device: str, planning: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Of the executors that the options name, those that run on a device type; why not, for the others.

    With ``planning`` nothing will run: then it is enough that an executor could.
    """
    reasons = {name: reason for name in names if (reason := _unusable(name, device, planning))}
    return tuple(name for name in names if name not in reasons), reasons


def _unusable(name: str, device: str, planning: bool) -> str:
    if name == "nvfuser":
        if device != "cuda" and not planning:
            return "nvFuser runs on CUDA devices"
        found = availability.find()
        return "" if found.available else str(found)
    if name == "triton" and device != "cuda" and not planning and not interpreting():
        return "Triton runs on CUDA devices"
    return ""


def bind(plan: Plan, config: Config, capability: int | None) -> tuple[Plan, dict[str, Bound]]:
    """The canonical form of every region. A region whose layouts nvFuser cannot take goes to Triton if it can."""
    bounds: dict[str, Bound] = {}
    steps = []
    for step in plan.steps:
        if isinstance(step, Region):
            bound = canonical(plan.annotated, step, config.key(), _target(step.executor, capability))
            reason = nvfuser.refusal(bound.spec) if step.executor == "nvfuser" else ""
            if reason and any(option.executor == "triton" for option in step.decision.options):
                step = replace(step, executor="triton", reasons=(*step.reasons, f"not on nvFuser: {reason}"))
                bound = canonical(plan.annotated, step, config.key(), _target("triton", capability))
            bounds[step.name] = bound
        steps.append(step)
    return replace(plan, steps=tuple(steps)), bounds


def _target(executor: str, capability: int | None) -> str:
    """What a kernel runs on, as part of its key."""
    if executor == "triton":
        return f"sm{capability}"
    found = availability.find()
    return f"{executor} {found.distribution} {found.version} sm{capability}"


def request(bound: Bound, capability: int | None, config: Config) -> Future[Kernel | FusionKernel]:
    """The kernel of a region, from the store or built now."""
    if bound.region.executor == "nvfuser":
        return STORE.request(bound.key, lambda: _done(lambda: _fusion(bound)))

    def start() -> Future[Kernel | FusionKernel]:
        lowered = lower(bound.spec)
        return _then(pool.submit(lowered, capability, config.workers), lambda compiled: Kernel(
            bound.key, lowered.source, lowered.launches, lowered.workspaces, compiled, capability is None))

    return STORE.request(bound.key, start)


def _fusion(bound: Bound) -> FusionKernel:
    """An nvFuser kernel, compiled for the sizes at hand when they are static: a failure is known before the first call."""
    kernel = FusionKernel(bound.key, nvfuser.lower(bound.spec), replay.define).prepare()
    if torch.cuda.is_available() and not bound.spec.symbols:
        device = bound.region.inputs[0].meta["val"].device.index or 0 if bound.region.inputs else 0
        try:
            with _disable_current_modes():  # the graph's own fake tensors are being traced around us
                kernel.run([_blank(layout, device) for layout in bound.spec.inputs], device)
        except torch.OutOfMemoryError:
            log.info("no memory to compile %s ahead: it is compiled at its first call", bound.key)
    return kernel


def _blank(layout: Layout, device: int) -> torch.Tensor:
    """A tensor of zeros, which no index leads out of."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    memory = torch.zeros(int(extent), dtype=layout.dtype, device=torch.device("cuda", device))
    return memory.as_strided([int(s) for s in layout.shape], [int(s) for s in layout.stride])


def _done(make: Callable[[], T]) -> Future[T]:
    """A future that is over: of a result or of a failure."""
    future: Future[T] = Future()
    try:
        future.set_result(make())
    except Exception as error:  # whatever nvFuser raises is this region's failure
        future.set_exception(error)
    return future


def _then(future: Future[T], function: Callable[[T], U]) -> Future[U]:
    """A future of ``function`` applied to a future's result."""
    after: Future[U] = Future()

    def copy(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            after.set_exception(error)
        else:
            after.set_result(function(done.result()))

    future.add_done_callback(copy)
    return after

