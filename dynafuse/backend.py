"""The backend: ``torch.compile(model, backend="dynafuse")``.

The way of a graph is :func:`compile_graph` and the steps of its :class:`Graph`; every value between two of them prints.

Worked example::

    compiled = torch.compile(model, backend="dynafuse", options={"strict": True})
    compiled(x).sum().backward()
    print(dynafuse.stats())             # {"kernels": 12, "launch_sites": 96, "hits": 84, "misses": 12}
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import dynamo_timed
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from dynafuse.build import ORIGINS, STORE, TURNED_DOWN, bind, failures, request
from dynafuse.cache import persist
from dynafuse.cache.canonical import Bound
from dynafuse.cache.memory import outcome
from dynafuse.cache.persist import TRAFFIC
from dynafuse.config import Config, resolve
from dynafuse.cost import device as devices
from dynafuse.cost.model import Meanwhile
from dynafuse.fallback import Guard
from dynafuse.ir import Plan
from dynafuse.lowering.triton import pool
from dynafuse.lowering.triton.compiler import interpreting
from dynafuse.partition.annotate import annotate
from dynafuse.partition.executors import Executors
from dynafuse.partition.forcing import Forcing, index_lines
from dynafuse.partition.grow import partition
from dynafuse.passes.attention_masks import rewrite
from dynafuse.passes.channels_last import optimize_layout
from dynafuse.passes.decompositions import decompositions
from dynafuse.passes.joint import NotSplit, replace_random, split_joint
from dynafuse.passes.layers import take_apart
from dynafuse.passes.normalize import normalize
from dynafuse.passes.rematerialize import Sides, kept
from dynafuse.passes.snapshot import Snapshot
from dynafuse.runtime import cuda_graphs
from dynafuse.runtime.catchable import catchable
from dynafuse.runtime.cuda_graphs import capture
from dynafuse.runtime.deferred import deferred
from dynafuse.runtime.demotion import Demoted, demote
from dynafuse.runtime.eager import eager
from dynafuse.runtime.interim import stand_in
from dynafuse.runtime.repro import guard_of
from dynafuse.runtime.subclasses import without_subclasses
from dynafuse.runtime.wrapper import Step, write
from dynafuse.select import VERDICTS
from dynafuse.select.choose import how_to_enable, tell, tuned, usable
from dynafuse.select.families import LENGTHS, near

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

LEAST_SAVED = 40
"""Calls of a Dynamo graph that have to stand there again for it to be taken apart: a piece more costs a few at run time."""

_launch_sites = 0


@dataclass(frozen=True)
class Compiled:
    """A graph that went through the backend, for reports."""

    kind: str  # forward | backward | inference
    plan: Plan
    bounds: Mapping[str, Bound]
    device: devices.Device
    unusable: Mapping[str, str]  # executors that the options name and that cannot be used, with the reason
    calls: int = 1  # how often a step calls it: more than once for layers that are compiled once
    meanwhile: Meanwhile | None = None  # what it loses and saves where it runs on stand-ins; without them it comes later


class Observer(Protocol):
    """Is told of every graph that this process runs, until it is reset."""

    def note(self, compiled: Compiled, captured: bool, origins: Mapping[str, str]) -> None:
        """Take a graph in. ``origins`` says of kernels, by key, where they came from when they were first asked for."""

    def clear(self) -> None:
        """Forget all graphs."""


OBSERVERS: list[Observer] = []
"""``report.history`` among them, as soon as it is imported."""

Listener: TypeAlias = Callable[[Compiled], None]
_listeners: list[Listener] = []
_own_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("own_listeners", default=())  # of what is only planned
_plan_only: ContextVar[bool] = ContextVar("plan_only", default=False)  # of a thread: others run what they compile


def without_garbage_collection(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` with Python's cyclic collector held back, which walks torch's millions of objects over and over.

    It takes a twentieth of the time in which 128 small layers are compiled.
    """
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if enabled:
                gc.enable()

    return run


@catchable
@without_garbage_collection
def dynafuse(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
             options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a Dynamo graph. Unknown modes, options and ``DYNAFUSE_`` variables raise ``OptionError``.

    Whatever subclass of ``DynafuseError`` it raises can be caught as such around the call of the compiled function.
    """
    config = resolve(mode, options)
    before = Snapshot.of(gm)
    guard = guard_of(config, before.restored, differentiable=True)
    guard.stage("worker processes", lambda: start_workers(config), nothing)
    values = list(dynamo_values(gm, example_inputs))
    enabled = guard.stage("choice of executors", lambda: executors_for(values, config)[1], nothing)
    if enabled is None:
        return without_subclasses(before.restored().forward, example_inputs)
    if "triton" not in enabled:
        config = replace(config, fallback_random=True)  # only Triton draws random numbers from a seed
    forcing = Forcing.of(config.force, config.executors or ())
    guard.stage("force patterns", lambda: forcing.check(gm.graph, config.strict), nothing)
    rewritten = guard.stage("rewrites of the Dynamo graph", lambda: rewrite(gm), before.restored)
    return without_subclasses(compile_rewritten(rewritten, example_inputs, config, forcing, guard), example_inputs)


def compile_rewritten(gm: GraphModule, example_inputs: Sequence[Any], config: Config, forcing: Forcing,
                      guard: Guard) -> Callable[..., Any]:
    """A Dynamo graph after its rewrites: piece by piece, or as a whole."""
    before = Snapshot.of(gm)

    def apart() -> tuple[Callable[..., Any] | None, GraphModule]:
        return compile_layers(gm, example_inputs, config, forcing), gm

    pieces, whole = guard.stage("repeated layers", apart, lambda: (None, before.restored()))
    return pieces or compile_joint(whole, example_inputs, config, forcing)


def start_workers(config: Config) -> None:
    """Start the processes that compile kernels, if there is a GPU to compile for."""
    if not _plan_only.get() and torch.cuda.is_available():
        pool.warm(config.workers)


def compile_layers(gm: GraphModule, example_inputs: Sequence[Any], config: Config,
                   forcing: Forcing) -> Callable[..., Any] | None:
    """A Dynamo graph piece by piece, if it repeats itself and the options let that be used; captured graphs stay whole."""
    context = TracingContext.try_get()
    if config.reuse_layers == "never" or config.cudagraphs or context is None or context.fake_mode is None:
        return None
    device = None if config.reuse_layers == "always" else device_of(example_inputs, config)
    with dynamo_timed("dynafuse.take_apart"):
        pieces = take_apart(gm, forcing.orders(gm.graph), LEAST_SAVED, device)
    if pieces is None:
        return None
    log.info("repeated layers: %s", pieces)
    functions = {}
    # What a piece returns comes back as a gradient in the same layout; contiguous ones would be copies.
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=True):
        for piece in pieces.distinct:
            inputs = piece.inputs(gm, example_inputs, context.fake_mode)
            functions[piece] = compile_joint(piece.module(gm), inputs, config, forcing, len(piece.sites))
    return pieces.assemble(functions)


def compile_joint(gm: GraphModule, example_inputs: Sequence[Any], config: Config, forcing: Forcing,
                  calls: int = 1) -> Callable[..., Any]:
    """A Dynamo graph by way of AOTAutograd; ``calls`` is how often a step calls it."""
    before = Snapshot.of(gm)
    guard = guard_of(config, before.restored, differentiable=True)
    # A new object per graph: it keeps state.
    compile_aot = guard.stage("set-up of AOTAutograd", lambda: through_aot(config, forcing, guard, calls), nothing)
    # The backward is planned while worker processes compile the forward's kernels, not when it is first run.
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True), suppress(NotSplit):
        if compile_aot is not None:
            compiled: Callable[..., Any] = compile_aot(gm, example_inputs)
            return compiled
    return before.restored().forward


def through_aot(config: Config, forcing: Forcing, guard: Guard, calls: int) -> Callable[..., Any]:
    """AOTAutograd with the pipeline behind it."""
    captured: dict[str, bool] = {}

    def compiler(kind: str) -> Callable[..., Any]:
        return functools.partial(compile_graph, kind, config, captured=captured, forcing=forcing, calls=calls)

    own_cut = functools.partial(cut, config, forcing) if config.rematerialize == "cost" else None
    split = functools.partial(split_joint, fallback_random=config.fallback_random, forcing=forcing, cut=own_cut, guard=guard)
    made: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
        partition_fn=split, decompositions=decompositions(config.fallback_random), keep_inference_input_mutations=True)
    return made


def cut(config: Config, forcing: Forcing, joint: GraphModule, sides: Sides) -> list[Node]:
    """What the backward of a joint graph keeps of the forward, by the cost model."""
    with dynamo_timed("dynafuse.cut"):
        kind, enabled, _ = executors_for(values_of(joint), config)
        annotated = annotate(joint, fused_device(kind, enabled), forcing=allowing(forcing, kind, enabled, config))
        return kept(annotated, sides, device_of(values_of(joint), config))


def reset() -> None:
    """Forget compiled kernels (``torch.compiler.reset`` calls this)."""
    global _launch_sites
    STORE.clear()
    ORIGINS.clear()
    for observer in OBSERVERS:
        observer.clear()
    TURNED_DOWN.clear()
    LENGTHS.clear()
    VERDICTS.clear()
    TRAFFIC.clear()
    _launch_sites = 0
    if torch.cuda.is_available():
        cuda_graphs.reset()


dynafuse.reset = reset  # type: ignore[attr-defined]


def stats() -> dict[str, int]:
    """Distinct kernels, places in graphs that launch one, and where kernels came from.

    ``hits`` and ``misses`` are those of this process's store. What it misses comes from the disk (``disk_hits``) or is
    ``compiled``; ``disk_misses`` are those that were looked for on disk and were not there.
    """
    counters, disk = STORE.counters, TRAFFIC
    return {"kernels": len(STORE), "launch_sites": _launch_sites, "hits": counters.hits, "misses": counters.misses,
            "disk_hits": disk.hits, "disk_misses": disk.misses, "compiled": disk.compiled}


@contextmanager
def listening(listener: Listener, plan_only: bool) -> Iterator[None]:
    """Hand every graph that compiles to ``listener``.

    With ``plan_only`` those of this thread: nothing of them is lowered, and they run eager.
    """
    before = _plan_only.set(plan_only)
    own = _own_listeners.set((*_own_listeners.get(), listener) if plan_only else _own_listeners.get())
    _listeners.extend(() if plan_only else (listener,))
    try:
        yield
    finally:
        if not plan_only:
            _listeners.remove(listener)
        _own_listeners.reset(own)
        _plan_only.reset(before)


def compile_graph(kind: str, config: Config, module: GraphModule, example_inputs: Sequence[Any],
                  captured: dict[str, bool] | None = None, forcing: Forcing | None = None,
                  calls: int = 1) -> Callable[..., Any]:
    """One ATen graph, from FX to a function: the whole pipeline, in order. A step calls it ``calls`` times.

    Nobody waits here for kernels that worker processes compile: the function's first call does.
    """
    forcing = forcing or Forcing.of(config.force, config.executors or ())
    before = Snapshot.of(module)
    guard = guard_of(config, before.restored)
    if kind == "forward":
        keep_saved_tensors()
    normal = guard.stage("normalization", lambda: normalized(kind, config, module, forcing), nothing)
    if normal is None:
        return eager(before.restored())
    found = normal if captured is None else optimized_layout(kind, normal, example_inputs, guard)
    graph = guard.stage("choice of executors", lambda: graph_of(kind, found, config, forcing, calls, guard), nothing)
    if graph is None:
        return eager(found)
    call = graph.compiled_function()
    if captured is None or not config.cudagraphs or _plan_only.get():
        return call
    return captured_call(call, graph, captured)


def normalized(kind: str, config: Config, module: GraphModule, forcing: Forcing) -> GraphModule:
    """A graph after the passes that every graph goes through; what they are given is changed."""
    compile_regions_inside(kind, config, module, forcing)
    if kind == "inference" and not config.fallback_random:
        replace_random(module, forcing)
    with dynamo_timed("dynafuse.normalize"):
        return normalize(module, merge_equal=kind == "inference")


def optimized_layout(kind: str, module: GraphModule, example_inputs: Sequence[Any], guard: Guard) -> GraphModule:
    """The graph with convolutions in the layout that pays."""
    before = Snapshot.of(module)

    def optimized() -> GraphModule:
        with dynamo_timed("dynafuse.normalize"):
            optimize_layout(kind, module, example_inputs)
        return module

    return guard.stage("layout", optimized, before.restored)


def graph_of(kind: str, module: GraphModule, config: Config, forcing: Forcing, calls: int, guard: Guard) -> Graph:
    """A normalized graph with what decides about its plan."""
    device = device_of(values_of(module), config)
    tensors_on, enabled, unusable = executors_for(values_of(module), config)
    forcing = allowing(forcing, tensors_on, enabled, config)
    return Graph(kind, module, config, forcing, device, fused_device(tensors_on, enabled), unusable,
                 None if interpreting() else device.capability, calls, static_inputs(kind), guard)


@dataclass(frozen=True)
class Planned:
    """A plan with the canonical forms of its regions, and what was demoted on the way to it."""

    plan: Plan
    bounds: Mapping[str, Bound]
    demoted: Demoted
    meanwhile: Meanwhile | None = None  # for a plan with stand-ins: what it loses and saves


@dataclass(frozen=True)
class Graph:
    """A normalized graph with all that its plan depends on; its steps are those of the pipeline."""

    kind: str
    module: GraphModule
    config: Config
    forcing: Forcing
    device: devices.Device
    fused_device: str | None
    unusable: Mapping[str, str]
    target: int | None
    calls: int
    static_inputs: frozenset[int]
    guard: Guard
    process: int = field(default_factory=os.getpid)

    def compiled_function(self) -> Callable[..., Any]:
        """The function of the graph: kernels are asked for, and waited for at the first call."""
        guard, instead = self.guard, self.eager
        with dynamo_timed("dynafuse.plan"):
            planned = guard.stage("planning", lambda: self.planned(Demoted()), nothing)
        if planned is None or _plan_only.get():
            if planned is not None:
                self.report(planned)
            return instead()
        with dynamo_timed("dynafuse.lower"):
            requests = guard.stage("requests for kernels", lambda: self.requests(planned), nothing)
        if requests is None:
            return instead()

        def finish() -> Callable[..., Any]:
            return guard.stage("first call", lambda: self.finished(planned, requests), instead)

        if all(future.done() for future in requests.values()) or any(map(has_failed, requests.values())):
            return finish()
        meanwhile = guard.stage("stand-ins", lambda: self.meanwhile(planned, requests), nothing)
        return deferred(finish, frozenset(requests.values()), meanwhile)

    def eager(self) -> Callable[..., Any]:
        """The graph node by node."""
        return eager(self.module)

    def planned(self, demoted: Demoted) -> Planned:
        """Annotate, partition and bind until every region has an executor; then decide what is near or unsure."""
        config, enabled = self.config, self.forcing.enabled
        while True:
            annotated = annotate(self.module, self.fused_device, demoted.to_eager, self.forcing)
            executors = Executors(annotated.facts, enabled, demoted.denied)
            make = partition if _plan_only.get() else functools.partial(persist.plan, config, self.guard)
            plan = make(annotated, self.device, executors, captured=config.cudagraphs, recompute=config.recompute,
                        max_ops=config.max_region_ops)
            plan, bounds = bind(plan, config, self.target)
            if not plan.unplaced:
                break
            demoted = demoted.without_executor(plan.unplaced)
        return self.decided(Planned(plan, bounds, demoted))

    def decided(self, planned: Planned) -> Planned:
        """A plan with what is near decided, and what is unsure measured."""
        def nearby() -> Planned:
            plan, bounds = near(planned.plan, planned.bounds, self.config, self.device)
            return replace(planned, plan=plan, bounds=bounds)

        def measured() -> Planned:
            plan, bounds = tuned(found.plan, found.bounds, self.config, self.device, self.target)
            return replace(found, plan=plan, bounds=bounds)

        found = self.guard.stage("near matches", nearby, lambda: planned)
        return found if _plan_only.get() else self.guard.stage("measuring", measured, lambda: found)

    def requests(self, planned: Planned) -> dict[str, Future[Any]]:
        """The kernel of every region; what takes a compiler longest is asked for first."""
        largest_first = sorted(planned.bounds.items(), key=lambda item: -len(item[1].spec.ops))
        return {name: request(bound, self.target, self.config, self.guard) for name, bound in largest_first}

    @without_garbage_collection
    def finished(self, planned: Planned, requests: Mapping[str, Future[Any]]) -> Callable[..., Any]:
        """The function of a plan, or of one without the regions whose kernels fail."""
        if os.getpid() != self.process:
            requests = self.requests(planned)  # who has asked before is another process, with the threads that would answer
        kernels, errors = awaited(requests)
        while errors:
            demoted = demote(planned.plan, failures(planned.bounds, errors), self.config, planned.demoted)
            planned = self.planned(demoted)
            kernels, errors = awaited(self.requests(planned))
        _count_sites(len(planned.bounds) * self.calls)
        return self.function(planned, kernels)

    def meanwhile(self, planned: Planned, requests: Mapping[str, Future[Any]]) -> Callable[..., Any] | None:
        """The function of a plan whose kernels are there, while those of the graph's own are compiled; None without one."""
        if not self.config.stand_ins or self.config.cudagraphs:
            return None
        missing = [name for name, future in requests.items() if not future.done()]
        found = stand_in(planned.plan, planned.bounds, missing, self.module, self.config, self.device, self.target)
        if found is None or not found.numbers.pays:
            log.info("%s graph: %s", self.kind, found or "no stand-ins")
            return None
        instead = replace(planned, plan=found.plan, bounds=found.bounds, meanwhile=found.numbers)
        kernels = self.requests(instead)
        if not all(future.done() and not has_failed(future) for future in kernels.values()):
            return None  # a damaged entry on disk
        log.info("%s graph: %s", self.kind, found)
        return self.function(instead, outcome(kernels)[0])

    def function(self, planned: Planned, kernels: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of a plan with its kernels."""
        self.report(planned)
        return self.guard.stage("generated function", lambda: self.written(planned, kernels), self.eager)

    def written(self, planned: Planned, kernels: Mapping[str, Any]) -> Callable[..., Any]:
        """The generated function."""
        steps = {name: Step(b.region, kernels[name], b.arguments, b.outputs, (*b.symbols, *b.sizes), b.numbers, b.count,
                            index_lines(b.region.nodes)) for name, b in planned.bounds.items()}
        with dynamo_timed("dynafuse.write"):
            call = write(planned.plan, self.module, steps, self.static_inputs)
        log.debug("%s graph:\n%s\n%s", self.kind, planned.plan, call.source)  # type: ignore[attr-defined]
        return call

    def report(self, planned: Planned) -> None:
        """Tell the listeners, and note what this process runs from now on."""
        def note(compiled: Compiled) -> None:
            if planned.meanwhile is None and not _plan_only.get():
                for observer in OBSERVERS:
                    observer.note(compiled, self.config.cudagraphs, ORIGINS)

        for listener in (*_listeners, *_own_listeners.get(), note):
            self.guard.stage("reports", lambda: listener(self.compiled(planned)), nothing)  # noqa: B023

    def compiled(self, planned: Planned) -> Compiled:
        """What listeners are told."""
        return Compiled(self.kind, planned.plan, planned.bounds, self.device, self.unusable, self.calls,
                        planned.meanwhile)


def awaited(requests: Mapping[str, Future[Any]]) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """The kernels that were asked for, once there is none to wait for, and the errors of the others."""
    with dynamo_timed("dynafuse.wait"):
        return outcome(requests)


def has_failed(future: Future[Any]) -> bool:
    """Whether a kernel is known to have failed by now."""
    return future.done() and future.exception() is not None


def compile_regions_inside(kind: str, config: Config, module: GraphModule, forcing: Forcing) -> None:
    """Compile the graphs of ``invoke_subgraph`` calls, each distinct one once; other higher-order ops stay eager."""
    invoke = torch.ops.higher_order.invoke_subgraph
    names = {n.args[0].target for n in module.graph.nodes if n.target is invoke}
    for name in sorted(map(str, names)):
        inner = getattr(module, name)
        if isinstance(inner, GraphModule):
            setattr(module, name, Region(compile_graph(kind, config, inner, (), forcing=forcing)))


class Region(torch.nn.Module):
    """A compiled subgraph in the place of its graph module."""

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(list(args))


def values_of(module: GraphModule) -> Iterator[Any]:
    """Examples of a graph's values."""
    return (node.meta.get("val") for node in module.graph.nodes)


def dynamo_values(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    """Examples of a Dynamo graph's values: a graph may make all its tensors by itself."""
    yield from example_inputs
    yield from (node.meta.get("example_value") for node in gm.graph.nodes)


def device_of(values: Iterable[Any], config: Config) -> devices.Device:
    """What the cost model prices for: the described device if one is named, else the one that tensors are on."""
    if config.device:
        return devices.describe(config.device).overridden(config.cost)
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda" and torch.cuda.is_available():
            return devices.at_hand(value.device.index or 0).overridden(config.cost)
    described = devices.describe("h200") if interpreting() else devices.of_host()
    return described.overridden(config.cost)


def device_type(values: Iterable[Any]) -> str:
    """cuda if a tensor among some values is on a CUDA device, else cpu."""
    return "cuda" if any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values) else "cpu"


def executors_for(values: Iterable[Any], config: Config) -> tuple[str, tuple[str, ...], Mapping[str, str]]:
    """The device type of some values, the executors that can be used there, and why others of the options cannot."""
    kind = device_type(values)
    enabled, unusable = usable(config, kind, planning(config))
    if not _plan_only.get():
        tell(config, kind, enabled, unusable)
    return kind, enabled, unusable


def planning(config: Config) -> bool:
    """Whether a plan is made for a described device, and nothing else."""
    return _plan_only.get() and config.device is not None


def allowing(forcing: Forcing, kind: str, enabled: Sequence[str], config: Config) -> Forcing:
    """Orders with the executors that can be used for tensors on a type of device."""
    return replace(forcing, enabled=tuple(enabled),
                   how_to_enable=lambda name: how_to_enable(name, config, kind, planning(config)))


def fused_device(kind: str, enabled: Sequence[str]) -> str | None:
    """The device type whose tensors are fused; None if there is no executor to fuse them."""
    return kind if any(name != "eager" for name in enabled) else None


def static_inputs(kind: str) -> frozenset[int]:
    """Positions of inputs whose addresses do not change from call to call (parameters)."""
    context = TracingContext.try_get()
    if kind == "backward" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)


def keep_saved_tensors() -> None:
    """Tell torch that the backward does not write into what the forward saves for it, so that it may run once more.

    Torch offers that memory to the backward, which is compiled before anyone knows whether the graph will be retained, and
    would then refuse ``retain_graph``. No lowering writes there: nothing is lost. The list belongs to the metadata of
    plain tensors and of tensor subclasses alike.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None and context.fw_metadata.bw_donated_idxs:
        context.fw_metadata.bw_donated_idxs.clear()


def _count_sites(number: int) -> None:
    global _launch_sites
    _launch_sites += number


def captured_call(call: Callable[..., Any], graph: Graph, captured: dict[str, bool]) -> Callable[..., Any]:
    """A graph's function as CUDA graphs, where it can be; ``captured`` tells of the model's graphs whether they are."""
    def uncaptured() -> Callable[..., Any]:
        captured[graph.kind] = False
        return call

    static = sorted(graph.static_inputs)
    return graph.guard.stage("CUDA graphs", lambda: capture(call, graph.module, graph.kind, static, captured), uncaptured)


def nothing() -> None:
    """What is done in the place of a stage that only adds something."""
