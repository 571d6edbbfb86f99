"""From an ATen graph to the function that runs it.

:func:`compile_graph` is the whole way, a line a stage; :func:`plan_graph` is its middle, from a graph to regions that have
an executor each. Every value between two stages prints, and ``DYNAFUSE_TRACE`` writes them all (``runtime/trace.py``). A
stage that fails falls back to what ``fallback.STAGES`` says, with a warning.

Nobody waits here for kernels that worker processes compile: the first call of the function does, in :func:`finish`. Kernels
that fail are left out there, and the graph is planned again without them.

Worked example: ``compile_graph("inference", resolve(), module, inputs)`` returns ``call``; ``call([x, y])`` returns the
outputs of ``module`` and empties the list.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch._dynamo.utils import dynamo_timed
from torch.fx import GraphModule, Node

from dynafuse.cache import kernels as kernel_cache
from dynafuse.cache import plans
from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion
from dynafuse.config import Config
from dynafuse.cost.model import Meanwhile
from dynafuse.cost.products import uses_tf32
from dynafuse.fallback import left_out
from dynafuse.futures import has_failed, outcome
from dynafuse.ir import Launch, Plan
from dynafuse.lowering.base import Executor
from dynafuse.lowering.calls import terms_in_code
from dynafuse.lowering.registry import executor
from dynafuse.partition.annotate import annotate, signature, unknown_to_device
from dynafuse.partition.executors import Executors
from dynafuse.partition.forcing import Forcing, index_lines
from dynafuse.partition.search import quickest
from dynafuse.partition.units import Units
from dynafuse.passes.aliases import return_views_of_inputs
from dynafuse.passes.channels_last import optimize_layout
from dynafuse.passes.clones import remove_clones
from dynafuse.passes.depthwise import write_out_convolutions
from dynafuse.passes.embedding_gradients import scatter_gradients
from dynafuse.passes.in_place import note_in_place
from dynafuse.passes.joint import replace_random
from dynafuse.passes.normalize import normalize
from dynafuse.passes.padded_products import pad_products
from dynafuse.passes.permutations import gather_by_inverses
from dynafuse.passes.scatters import give_bases
from dynafuse.passes.snapshot import Snapshot
from dynafuse.passes.staged_reductions import stage_reductions
from dynafuse.passes.strides import begins_of, named_results
from dynafuse.passes.written_products import join_products
from dynafuse.runtime.alike import sharing_of
from dynafuse.runtime.buffers import NEW_MEMORY, Buffers, reused_buffers
from dynafuse.runtime.capture.decide import Shared
from dynafuse.runtime.capture.gradients import writable
from dynafuse.runtime.capture.graphs import Intent, intent_of
from dynafuse.runtime.cuda_graphs import capture
from dynafuse.runtime.deferred import deferred
from dynafuse.runtime.demotion import Demoted, demote
from dynafuse.runtime.devices import cuda_devices, on_device
from dynafuse.runtime.eager import eager
from dynafuse.runtime.interim import interim_plan
from dynafuse.runtime.observers import Compiled, plan_only, tell
from dynafuse.runtime.repro import guard_of
from dynafuse.runtime.setting import Setting, keep_saved_tensors, setting_of
from dynafuse.runtime.step import Step
from dynafuse.runtime.trace import Trace
from dynafuse.runtime.written import Written, write
from dynafuse.select.compile import request
from dynafuse.select.families import fold_families
from dynafuse.select.measure import measured
from dynafuse.select.place import place, reject

MOST_PLANNED_AGAIN = 4000
"""The most nodes of a graph that is planned again because it will be captured: a second or two."""

Requests: TypeAlias = Mapping[str, Future[Any]]
"""Kernels that were asked for, by the names of their regions."""

log = logging.getLogger(__name__)

_launch_sites = 0


def compile_graph(kind: str, config: Config, module: GraphModule, example_inputs: Sequence[Any],
                  shared: Shared | None = None, forcing: Forcing | None = None,
                  calls: int = 1) -> Callable[[list[Any]], Any]:
    """Return the function of an ATen graph.

    Args:
        kind: forward, backward or inference.
        config: The options.
        module: The graph; it is changed.
        example_inputs: An example of each of its inputs, in order; only layouts are chosen by them.
        shared: What the graphs of one model tell each other about capture; None for a graph inside another.
        forcing: What the user forces onto which executor; None: as the options say.
        calls: How often a step calls the function.

    Returns:
        A function that takes the graph's inputs as one list, which it empties, and returns the outputs.
    """
    forcing = forcing or Forcing.of(config.force, config.executors or ())
    before = Snapshot.of(module)
    guard = guard_of(config, before.restored)
    trace = Trace.of(config.trace, kind, guard)
    stage = guard.stage

    trace.note("aten", lambda: signature(module.graph))
    results = named_results(module)
    if kind == "forward":
        offered = keep_saved_tensors()
        if shared is not None:
            shared.offered = offered
    normal = stage("normalization", lambda: _normalized(kind, config, module, forcing, whole=shared is not None), left_out)
    if normal is None:
        return eager(before.restored())
    if shared is not None:
        normal = _with_layout(kind, normal, example_inputs, results, shared, stage)
    trace.note("normalized", lambda: signature(normal.graph))
    setting = stage("choice of executors", lambda: setting_of(kind, normal, config, forcing, calls, guard, trace), left_out)
    if setting is None:
        return eager(normal)
    setting = _with_written_convolutions(_with_joined_products(setting))
    if shared is not None:
        setting = _with_padded_products(setting, shared.may_spread)
    setting = replace(_with_bases(_with_staged_reductions(setting)), shared=shared)
    with dynamo_timed("dynafuse.plan"):
        planned = stage("planning", lambda: plan_graph(setting, Demoted()), left_out)
    if planned is None:
        return eager(setting.module)
    if plan_only():
        _report(setting, planned[0], intent=_intent(setting, planned[0].plan))
        return eager(setting.module)
    with dynamo_timed("dynafuse.lower"):
        requests = stage("requests for kernels", lambda: _requests(setting, planned[0]), left_out)
    if requests is None:
        return eager(setting.module)
    call = _call(setting, *planned, requests)
    return call if shared is None or not config.cudagraphs else _recorded(setting, call, shared.by_trees)


def plan_graph(setting: Setting, demoted: Demoted) -> tuple[CanonicalPlan, Demoted]:
    """Return a plan whose regions have an executor each, and what runs eager, or not on some executor, for all that.

    Args:
        setting: The graph with all that its plan depends on.
        demoted: The nodes that are kept from some executors, or from all, and whether regions may share launches.
    """
    config, device, trace = setting.config, setting.device, setting.trace
    eager_nodes = {**unknown_to_device(setting.module, setting.capability), **demoted.to_eager}
    facts = annotate(setting.module, setting.fused_device, eager_nodes, setting.forcing)
    trace.note("facts", lambda: str(facts))
    executors = Executors(facts.facts, setting.forcing.enabled, demoted.denied)
    options: dict[str, Any] = {
        "recompute": config.recompute, "max_ops": config.max_region_ops,
        "joins": not config.size_classes and not demoted.apart}  # of several nests none is for a class of sizes

    @cache
    def units() -> Units:
        return Units(facts, device, executors, **options)

    def grown(captured: bool) -> Plan:
        depends = (device.capability, sorted(device.constants.items()), str(executors),
                   sorted((options | {"captured": captured}).items()), uses_tf32())

        def grow() -> Plan:
            return quickest(units(), captured)

        return grow() if plan_only() else plans.get_or_make(facts, depends, config, setting.guard, grow)

    plan = grown(config.cudagraphs)
    if not config.cudagraphs and len(facts.graph.nodes) <= MOST_PLANNED_AGAIN:
        intent = _intent(setting, plan)
        if intent is not None and intent.verdict.may_be_recorded:
            recorded = grown(True)  # the host's time does not count any more
            plan = recorded if intent.pays_as(recorded, plan, device) else plan
    trace.note("plan", lambda: str(plan))
    placed = place(plan, config, setting.capability)
    if placed.unplaced:
        return plan_graph(setting, demoted.without_executor(placed.unplaced))
    trace.note("regions", lambda: str(placed))
    shared = setting.guard.stage("fold families", lambda: fold_families(placed, config, device), lambda: placed)
    if plan_only():
        return shared, demoted
    final = setting.guard.stage("measuring", lambda: measured(shared, device, setting.compilation), lambda: shared)
    trace.note("decided", lambda: str(final))
    return final, demoted


def finish(setting: Setting, plan: CanonicalPlan, demoted: Demoted, requests: Requests) -> Callable[..., Any]:
    """Return the function of a plan once its kernels are there, or that of one without the regions whose kernels fail.

    Args:
        setting: The graph with all that its plan depends on.
        plan: The plan.
        demoted: What that plan already keeps from some executors.
        requests: A future of each region's kernel, by the region's name; they are waited for.
    """
    if os.getpid() != setting.process:
        requests = _requests(setting, plan)  # who asked before is another process, with the threads that would answer
    kernels, errors = _awaited(requests)
    while errors:
        demoted = demote(plan, reject(plan, errors), setting.config, demoted)
        plan, demoted = plan_graph(setting, demoted)
        kernels, errors = _awaited(_requests(setting, plan))
    _count_sites(len(plan.regions) * setting.calls)
    return _function(setting, plan, kernels)


# The stages that are more than a call ---------------------------------------------------------------------------------


def _normalized(kind: str, config: Config, module: GraphModule, forcing: Forcing, whole: bool) -> GraphModule:
    """Return a graph after the passes that every graph goes through; what they are given is changed.

    Args:
        kind: forward, backward or inference.
        config: The options.
        module: The graph.
        forcing: What the user forces onto which executor.
        whole: Whether it is no graph inside another.
    """
    _compile_regions_inside(kind, config, module, forcing)
    inference = kind == "inference"  # of forward and backward the same is done in their joint graph
    if inference and not config.fallback_random:
        replace_random(module, forcing)
    with dynamo_timed("dynafuse.normalize"):
        if inference:
            gather_by_inverses(module.graph, forcing.forced_to_eager(module.graph))
        normal = normalize(module, merge_equal=inference)
        if inference:
            remove_clones(normal)
    return return_views_of_inputs(normal) if whole and kind != "backward" else normal


def _compile_regions_inside(kind: str, config: Config, module: GraphModule, forcing: Forcing) -> None:
    """Compile the graphs of ``invoke_subgraph`` calls, each distinct one once; other higher-order ops stay eager."""
    invoke = torch.ops.higher_order.invoke_subgraph
    names = {node.args[0].target for node in module.graph.nodes if node.target is invoke}
    for name in sorted(map(str, names)):
        inner = getattr(module, name)
        if isinstance(inner, GraphModule):
            setattr(module, name, CompiledSubgraph(compile_graph(kind, config, inner, (), forcing=forcing)))


class CompiledSubgraph(torch.nn.Module):
    """A compiled subgraph in the place of its graph module."""

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(list(args))


def _with_layout(kind: str, module: GraphModule, example_inputs: Sequence[Any], results: Sequence[str], shared: Shared,
                 stage: Callable[..., Any]) -> GraphModule:
    """Return the graph with convolutions in the layout that pays.

    Where a forward's results, given by name, begin in memory then, its backward is told.
    """
    before = Snapshot.of(module)

    def optimized() -> GraphModule:
        with dynamo_timed("dynafuse.normalize"):
            optimize_layout(kind, module, example_inputs, shared.begins)
            if kind == "forward":
                shared.begins = begins_of(results, module)
        return module

    laid_out: GraphModule = stage("layout", optimized, before.restored)
    return laid_out


def _rewritten(setting: Setting, stage: str, rewrite: Callable[[GraphModule, frozenset[Node]], object],
               takes: Callable[[Executor], bool] = attrgetter("fuses")) -> Setting:
    """Return a setting whose graph has been rewritten in place, or is as it was where that fails.

    Args:
        setting: The graph with all that its plan depends on.
        stage: What the rewriting is called where it fails.
        rewrite: Rewrites the graph, given its nodes that are forced to executors that do not take what it writes.
        takes: Tells whether an executor takes that; without it all do but eager.
    """
    module, before = setting.module, Snapshot.of(setting.module)
    forced = setting.forcing.forced_to(module.graph, lambda executor: not takes(executor))

    def rewritten() -> GraphModule:
        rewrite(module, forced)
        return module

    return replace(setting, module=setting.guard.stage(stage, rewritten, before.restored))


def _with_joined_products(setting: Setting) -> Setting:
    """Return a setting whose graph has the library run matrix products that the model writes out."""
    if not setting.config.join_products:
        return setting
    return _rewritten(setting, "products that are written out", lambda module, forced: join_products(
        module, setting.device, setting.fused_device, forced))


def _with_written_convolutions(setting: Setting) -> Setting:
    """Return a setting whose graph writes out convolutions that keep channels apart where libraries are slow."""
    if not any(executor(name).pools for name in setting.forcing.enabled):
        return setting
    return _rewritten(setting, "convolutions that keep channels apart", lambda module, forced: write_out_convolutions(
        module, setting.device, setting.fused_device, forced), attrgetter("pools"))


def _with_padded_products(setting: Setting, may_spread: bool) -> Setting:
    """Return a setting whose graph's matrix products run in the sizes in which they are fastest.

    ``may_spread`` tells whether rows of results may be further apart than eager's.
    """
    if not setting.config.pad_products:
        return setting

    def pad(module: GraphModule, forced: frozenset[Node]) -> None:
        captured = setting.config.cudagraphs
        pad_products(setting.kind, module, setting.device, setting.fused_device, captured, forced, may_spread)

    return _rewritten(setting, "sizes of matrix products", pad)


def _with_staged_reductions(setting: Setting) -> Setting:
    """Return a setting whose graph reduces rows first where their kernel has read all that is to be reduced."""
    if setting.fused_device is None:
        return setting
    processors = int(setting.device.processors)
    return _rewritten(setting, "reductions by rows", lambda module, forced: stage_reductions(module, processors, forced))


def _with_bases(setting: Setting) -> Setting:
    """Return a setting whose graph's scatters run in the memory of inputs, or have bases that kernels may write into."""
    def give(module: GraphModule, forced: frozenset[Node]) -> None:
        note_in_place(module)
        if any(executor(name).scatters for name in setting.forcing.enabled):
            scatter_gradients(module, setting.device, setting.fused_device, forced)
            give_bases(module, setting.fused_device, forced)

    return _rewritten(setting, "bases of scatters", give)


def _requests(setting: Setting, plan: CanonicalPlan) -> Requests:
    """Ask for the kernel of every region, by name; for what takes a compiler longest first."""
    largest_first = sorted(plan.regions, key=lambda region: -terms_in_code(region.spec))
    return {region.name: request(region, setting.compilation) for region in largest_first}


def _call(setting: Setting, plan: CanonicalPlan, demoted: Demoted, requests: Requests) -> Callable[..., Any]:
    """Return the function of a plan, made now if nobody has to wait for kernels, else at its first call."""
    stage, pending = setting.guard.stage, frozenset(requests.values())

    def made() -> Callable[..., Any]:
        with without_garbage_collection():
            return stage("first call", lambda: finish(setting, plan, demoted, requests), lambda: eager(setting.module))

    if all(future.done() for future in pending) or any(map(has_failed, pending)):
        return made()
    return deferred(made, pending, stage("interim plan", lambda: _meanwhile(setting, plan, requests), left_out))


def _meanwhile(setting: Setting, plan: CanonicalPlan, requests: Requests) -> Callable[..., Any] | None:
    """Return the function of an interim plan, to run while the graph's own kernels are compiled; None without one."""
    if not setting.config.interim_plan or setting.config.cudagraphs:
        return None
    missing = [name for name, future in requests.items() if not future.done()]
    interim = interim_plan(plan, missing, setting.module, setting.device, setting.compilation)
    if interim is None or not interim.meanwhile.pays:
        log.info("%s graph: %s", setting.kind, interim or "no interim plan")
        return None
    kernels = _requests(setting, interim.plan)
    if not all(future.done() and not has_failed(future) for future in kernels.values()):
        return None  # a damaged entry on disk
    log.info("%s graph: %s", setting.kind, interim)
    return _function(setting, interim.plan, outcome(kernels)[0], interim.meanwhile)


def _awaited(requests: Requests) -> tuple[dict[str, Any], dict[str, BaseException]]:
    """Return the kernels that were asked for, once there is none to wait for, and the errors of the others."""
    with dynamo_timed("dynafuse.wait"):
        return outcome(requests)


def _function(setting: Setting, plan: CanonicalPlan, kernels: Mapping[str, Any],
              meanwhile: Meanwhile | None = None) -> Callable[..., Any]:
    """Return the function of a plan with its kernels."""
    intent = _intent(setting, plan.plan) if meanwhile is None else None
    buffers = _buffers(setting, plan, lambda region: kernels[region.name].launches)
    placed = frozenset[Node]()
    if intent is not None and intent.placed:
        buffers, placed = buffers.in_given_memory(intent.placed, writable(plan.plan))
    plan = buffers.noted(plan)
    _report(setting, plan, meanwhile, intent)
    setting.trace.note("kernels", lambda: _sources(plan, kernels))
    setting.trace.note("buffers", lambda: str(buffers))

    def written() -> Callable[..., Any]:
        text = _written(setting, plan, kernels, buffers, 0 if intent is None else intent.apart, placed)
        call = text.call if intent is None else setting.guard.stage(
            "CUDA graphs", lambda: intent.apply(text, setting.kind, setting.config.strict), lambda: text.call)
        devices = cuda_devices(plan.plan) if torch.cuda.device_count() > 1 else ()
        return on_device(call, devices[0]) if len(devices) == 1 else call

    return setting.guard.stage("generated function", written, lambda: eager(setting.module))


def _intent(setting: Setting, plan: Plan) -> Intent | None:
    """Return whether a graph is captured; None where that is out of the question."""
    return setting.guard.stage("CUDA graphs", lambda: intent_of(setting, plan), left_out)


def _is_captured(setting: Setting, intent: Intent | None) -> bool:
    return setting.config.cudagraphs or (intent is not None and intent.verdict.captured)


def _sources(plan: CanonicalPlan, kernels: Mapping[str, Any]) -> str:
    """Return what was generated for each distinct kernel, with its launches and the regions that run on it."""
    sites: dict[str, list[CanonicalRegion]] = {}
    for region in plan.regions:
        sites.setdefault(region.key, []).append(region)
    texts = []
    for key, regions in sites.items():
        name, kernel = regions[0].region.executor, kernels[regions[0].name]
        names = ", ".join(region.name for region in regions)
        texts.append(f"# {key} on {name}, launches: {executor(name).launches(kernel)}, regions: {names}\n{kernel.source}")
    return "\n\n".join(texts)


def _buffers(setting: Setting, plan: CanonicalPlan, launches: Callable[[CanonicalRegion], Sequence[Launch]]) -> Buffers:
    """Return which results are written over dead operands, given the launches of a region's kernel.

    A function that torch's trees record is recorded in one call and replayed in others: it cannot ask who holds an operand.
    Our own recordings are alone in holding one when they are made only if each replay makes sure that they are.
    """
    if not setting.config.reuse_buffers:
        return NEW_MEMORY
    shared = setting.shared if setting.kind == "backward" and not setting.config.cudagraphs else None
    offered = frozenset[int]() if shared is None else shared.offered
    return setting.guard.stage("reuse of buffers", lambda: reused_buffers(plan, launches, offered), lambda: NEW_MEMORY)


def _written(setting: Setting, plan: CanonicalPlan, kernels: Mapping[str, Any], buffers: Buffers,
             apart: int, placed: frozenset[Node]) -> Written:
    """Return the generated function, such that what is meant to be recorded of it can be.

    Its first steps are ``apart``, a function of their own, and it can be given memory for what is ``placed``.
    """
    steps = {region.name: Step.of(region, kernels[region.name], index_lines(region.region.nodes)) for region in plan.regions}
    with dynamo_timed("dynafuse.write"):
        text = write(plan.plan, setting.module, steps, setting.static_inputs, buffers.over, sharing_of(setting.kind),
                     apart, placed)
    setting.trace.note("function", lambda: text.source)
    log.debug("%s graph:\n%s\n%s", setting.kind, plan.plan, text.source)
    return text


def _recorded(setting: Setting, call: Callable[..., Any], captured: dict[str, bool]) -> Callable[..., Any]:
    """Return a graph's function, recorded as CUDA graphs where it can be, which ``captured`` tells the model's others."""
    def uncaptured() -> Callable[..., Any]:
        captured[setting.kind] = False
        return call

    static = sorted(setting.static_inputs)
    return setting.guard.stage(
        "CUDA graphs", lambda: capture(call, setting.module, setting.kind, static, captured), uncaptured)


def _report(setting: Setting, plan: CanonicalPlan, meanwhile: Meanwhile | None = None, intent: Intent | None = None) -> None:
    """Tell listeners and observers of a graph."""
    def compiled() -> Compiled:
        why = "" if intent is None else str(intent.verdict)
        replays = intent.replays if intent is not None and intent.verdict.may_be_recorded else None
        return Compiled(setting.kind, plan, setting.device, setting.unusable, _is_captured(setting, intent), setting.calls,
                        meanwhile, why, replays, setting.sizes)

    tell(compiled, kernel_cache.ORIGINS, setting.guard)


# What is counted ------------------------------------------------------------------------------------------------------


def launch_sites() -> int:
    """Return how many places in compiled graphs launch a kernel."""
    return _launch_sites


def reset() -> None:
    """Begin to count anew."""
    global _launch_sites
    _launch_sites = 0


def _count_sites(number: int) -> None:
    global _launch_sites
    _launch_sites += number


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Hold back Python's cyclic collector, which walks torch's millions of objects over and over.

    It takes a twentieth of the time in which 128 small layers are compiled.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
