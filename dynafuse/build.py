"""From a planned region to its kernel, on the executor that the region was given to.

Worked example: ``request(bound, 90, config)`` is a future; a region on Triton is compiled in a worker process meanwhile, one
on nvFuser was compiled when the future is returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeAlias, TypeVar

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.cache import persist
from dynafuse.cache.canonical import Bound, canonical, rekeyed
from dynafuse.cache.memory import Store
from dynafuse.config import Config
from dynafuse.fallback import Guard
from dynafuse.forks import Lock, in_child
from dynafuse.ir import Option, Plan, Region, Spec
from dynafuse.lowering.inductor import compiler as inductor_compiler
from dynafuse.lowering.inductor import lower as inductor
from dynafuse.lowering.inductor.kernel import DelegateKernel
from dynafuse.lowering.nvfuser import availability, replay
from dynafuse.lowering.nvfuser import lower as nvfuser
from dynafuse.lowering.nvfuser.kernel import FusionKernel
from dynafuse.lowering.nvfuser.recipe import Recipe
from dynafuse.lowering.triton import pool
from dynafuse.lowering.triton.launch import Kernel
from dynafuse.lowering.triton.lower import lower
from dynafuse.runtime.demotion import turned_down
from dynafuse.select.data import NoData
from dynafuse.select.runners import runner
from dynafuse.select.tuner import hints_of
from dynafuse.select.validation import check

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

Built: TypeAlias = Kernel | FusionKernel | DelegateKernel

STORE: Store[Built] = Store()
"""Compiled kernels of this process, by key."""
in_child(STORE.forget_pending)

_LOWERING = Lock()
"""Lowering is not made for threads, and who has waited for another process's kernel may have to lower it in one."""

REFUSES: Mapping[str, Callable[[Spec], str]] = {"nvfuser": nvfuser.refusal, "inductor": inductor.refusal}
"""Why an executor cannot take a region whose every op it can."""

ORIGINS: dict[str, str] = {}
"""Whether the kernels of the store were compiled or on disk, by key."""

TURNED_DOWN: dict[str, str] = {}
"""What an executor's library has said, in this process, against regions that another executor can take, by key."""


def bind(plan: Plan, config: Config, capability: int | None) -> tuple[Plan, dict[str, Bound]]:
    """The canonical form of every region, decided between the executors that can take it as a whole.

    Where none can, and nobody has forced the region, its ops are ``unplaced`` in a plan without steps.
    """
    facts = plan.annotated.facts
    bounds: dict[str, Bound] = {}
    unplaced: dict[Node, str] = {}
    for region in plan.regions:
        bound = canonical(plan.annotated, region, config.key(), target_of(region, capability), config.size_classes)
        options = region.decision.options
        reasons = {o.executor: reason for o in options if (reason := _obstacle(bound, o.executor, capability))}
        left = [option for option in options if option.executor not in reasons]
        if reasons and left:
            bound = _left_to(left, bound, reasons, capability)
        elif reasons and not any(facts[node].forced for node in region.nodes):
            told = "; ".join(_told(reasons))
            unplaced |= {node: told for node in region.nodes if facts[node].role == "fused"}
        bounds[region.name] = bound
    if unplaced:
        return replace(plan, steps=(), unplaced=unplaced), {}
    return replace(plan, steps=tuple(bounds[s.name].region if isinstance(s, Region) else s for s in plan.steps)), bounds


def _obstacle(bound: Bound, executor: str, capability: int | None) -> str:
    """Why an executor cannot take a region, or "". What its library says counts where there is a choice."""
    reason = REFUSES[executor](bound.spec) if executor in REFUSES else ""
    if reason or not TURNED_DOWN or len(bound.region.decision.options) < 2:
        return reason
    return TURNED_DOWN.get(moved(bound, executor, capability).key, "")


def _left_to(left: Sequence[Option], bound: Bound, reasons: Mapping[str, str], capability: int | None) -> Bound:
    """A region on its executor, or on the fastest of those that are left."""
    region = bound.region
    options = tuple(sorted(left, key=lambda option: (option.executor != region.executor, option.device_us)))
    unsure = tuple(name for name in region.decision.unsure if name not in reasons)
    decision = replace(region.decision, options=options, unsure=unsure if len(unsure) > 1 else (),
                       margin=region.decision.margin if len(options) > 1 else float("inf"))
    told = _told({name: reason for name, reason in reasons.items() if name == region.executor})
    region = replace(region, decision=decision, predicted_us=options[0].device_us, reasons=(*region.reasons, *told))
    return moved(replace(bound, region=region), options[0].executor, capability)


def _told(reasons: Mapping[str, str]) -> list[str]:
    return [f"not on {executor}: {reason}" for executor, reason in reasons.items()]


def failures(bounds: Mapping[str, Bound], errors: Mapping[str, BaseException]) -> dict[str, BaseException]:
    """The errors of some regions without those that only tell where a region cannot run: :func:`bind` knows them then."""
    found: dict[str, BaseException] = {}
    for name, error in errors.items():
        region = bounds[name].region
        reason = turned_down(region, error)
        if reason and len(region.decision.options) > 1:
            TURNED_DOWN[bounds[name].key] = reason
            log.info("%s: not on %s: %s", region, region.executor, reason)
        else:
            found[name] = error
    return found


def moved(bound: Bound, executor: str, capability: int | None) -> Bound:
    """A region on another executor: what it computes is the same, its kernel is not."""
    region = replace(bound.region, executor=executor)
    return rekeyed(bound, region, target_of(region, capability))


def target_of(region: Region, capability: int | None) -> str:
    """What a region's kernel runs on, as part of its key."""
    if region.executor == "triton":
        return f"sm{capability}"
    if region.executor == "inductor":
        return f"inductor {_device(region)}"
    found = availability.find()
    return f"{region.executor} {found.distribution} {found.version} sm{capability}"


def _device(region: Region) -> torch.device:
    device: torch.device = region.outputs[0].meta["val"].device
    return device


def request(bound: Bound, capability: int | None, config: Config, guard: Guard | None = None) -> Future[Built]:
    """The kernel of a region: from this process's store, from the disk, or built now. A ``guard`` tells what else fails."""
    guard = guard or Guard(config.strict)
    makers: Mapping[str, Callable[[], Future[Built]]] = {
        "triton": lambda: _kernel(bound, capability, config),
        "nvfuser": lambda: _done(lambda: _fusion(bound, nvfuser.lower(bound.spec))),
        "inductor": lambda: _done(lambda: _delegate(bound, guard)),
    }

    def make() -> Future[Built]:
        ORIGINS[bound.key] = "compiled"
        with _LOWERING:
            return makers[bound.region.executor]()

    def start() -> Future[Built]:
        ORIGINS[bound.key] = "disk"  # unless it has to be made
        return persist.kernel(bound, capability, config, make, lambda recipe: _fusion(bound, recipe), guard)

    return STORE.request(bound.key, start)


def is_there(bound: Bound, capability: int | None, config: Config) -> bool:
    """Whether a region's kernel need not be compiled: this process has it, or it is on disk."""
    asked = STORE.asked(bound.key)
    if asked is None:
        return persist.has(bound, capability, config)
    return asked.done() and asked.exception() is None


def _kernel(bound: Bound, capability: int | None, config: Config) -> Future[Built]:
    """A Triton kernel, compiled in a worker process if there are some."""
    lowered = lower(bound.code)
    return _then(pool.submit(lowered, capability, config.workers), lambda compiled: Kernel(
        bound.key, lowered.source, lowered.launches, lowered.workspaces, compiled, capability is None))


def _fusion(bound: Bound, recipe: Recipe) -> FusionKernel:
    """An nvFuser kernel, run once at the example's sizes: a failure or a wrong result is known before the first call."""
    kernel = FusionKernel(bound.key, recipe, replay.define).prepare()
    device = _device(bound.region)
    if device.type == "cuda" and torch.cuda.is_available():
        hints = hints_of(bound)
        try:
            with _disable_current_modes():  # the graph's own fake tensors are being traced around us
                check(runner(kernel, bound.spec, hints, device), bound.spec, hints, device)
        except (NoData, torch.OutOfMemoryError) as error:
            log.info("%s is compiled at its first call: %s", bound.key, error)
    return kernel


def _delegate(bound: Bound, guard: Guard) -> DelegateKernel:
    """A kernel that Inductor makes, for the example's sizes if some are dynamic."""
    device = _device(bound.region)
    index = device.index or 0 if device.type == "cuda" else None
    kernel = DelegateKernel(bound.key, inductor.lower(bound.spec), inductor_compiler.build, _of_ops(guard, bound.spec))
    return kernel.prepare(list(hints_of(bound).values()), index)


def _of_ops(guard: Guard, spec: Spec) -> Guard:
    """A guard for what is kept longer than the graph: it names the ops instead of holding what a script needs."""
    ops = ", ".join(dict.fromkeys(op.target for op in spec.ops))
    return Guard(guard.strict, lambda error: [f"ops: {ops}"])


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
        try:
            after.set_result(function(done.result()))
        except BaseException as error:  # for whoever waits: an error here would be logged, and waited for forever
            after.set_exception(error)

    future.add_done_callback(copy)
    return after

