"""What torch calls: ``torch.compile(model, backend="dynafuse")``, its reset, and what a process counts.

A Dynamo graph goes through :func:`dynafuse`: options, rewrites that need whole ops, repeated layers, AOTAutograd. What
becomes of the ATen graphs that AOTAutograd makes of it says ``pipeline.py``.

Worked example::

    compiled = torch.compile(model, backend="dynafuse", options={"strict": True})
    compiled(x).sum().backward()
    print(dynafuse.stats())             # {"kernels": 12, "launch_sites": 96, "hits": 84, "misses": 12}
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.utils import dynamo_timed, preserve_rng_state
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynafuse import pipeline
from dynafuse.cache import kernels
from dynafuse.config import Config, resolve
from dynafuse.fallback import Guard, left_out
from dynafuse.lowering.registry import executor
from dynafuse.lowering.triton import pool
from dynafuse.partition.annotate import annotate
from dynafuse.partition.forcing import Forcing
from dynafuse.passes.decompositions import decompositions, whole_in_autograd
from dynafuse.passes.early import rewrite
from dynafuse.passes.fixed_sizes import fix_sizes, size_arguments
from dynafuse.passes.joint import NotSplit, split_joint
from dynafuse.passes.layers import take_apart
from dynafuse.passes.rematerialize import Sides, saved_values
from dynafuse.passes.snapshot import Snapshot
from dynafuse.passes.written_products import join_products
from dynafuse.runtime import cuda_graphs, observers
from dynafuse.runtime.capture import recorder
from dynafuse.runtime.capture.decide import Shared, marked_inputs
from dynafuse.runtime.catchable import catchable
from dynafuse.runtime.observers import Compiled, listening
from dynafuse.runtime.repro import guard_of
from dynafuse.runtime.setting import allowing, device_of, executors_for, fused_device, values_of
from dynafuse.runtime.specialized import Specialized, compiling, of_some
from dynafuse.runtime.subclasses import is_called_with_fakes, returns_plain_tensors, without_subclasses
from dynafuse.select import MEASUREMENTS
from dynafuse.select.families import LENGTHS
from dynafuse.select.place import REJECTED

__all__ = ["Compiled", "dynafuse", "listening", "reset", "stats"]

log = logging.getLogger(__name__)

LEAST_SAVED = 40
"""Calls of a Dynamo graph that have to stand there again for it to be taken apart: a piece more costs a few at run time."""


@catchable
@pipeline.without_garbage_collection()
def dynafuse(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
             options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a Dynamo graph.

    Whatever subclass of ``DynafuseError`` it raises can be caught as such around the call of the compiled function.

    Args:
        gm: Dynamo's graph. It is rewritten in place.
        example_inputs: An example of each of its inputs, in order: tensors, fake or real, and sizes.
        mode: A mode of ``torch.compile``; None is the default.
        options: Options by name, as ``docs/options.md`` lists them; None for none. They win over the environment, which wins
            over the mode.

    Returns:
        A function of the graph's inputs that returns its outputs.

    Raises:
        OptionError: A mode, an option or a ``DYNAFUSE_`` variable is unknown, or a value is not one that it takes.
        ForceError: Ops are forced, strictly, to an executor that cannot run them or that is not enabled.
        ExecutorError: Under ``strict``, an executor that is asked for cannot be used here.
    """
    config = resolve(mode, options)
    before = Snapshot.of(gm)
    guard = guard_of(config, before.restored, differentiable=True)
    guard.stage("worker processes", lambda: start_workers(config), left_out)
    values = list(_dynamo_values(gm, example_inputs))
    enabled = guard.stage("choice of executors", lambda: executors_for(values, config)[1], left_out)
    if enabled is None or (is_called_with_fakes(gm) and not observers.plan_only()):
        return without_subclasses(before.restored().forward, example_inputs)
    if not any(executor(name).draws_random for name in enabled):
        config = replace(config, fallback_random=True)
    forcing = Forcing.of(config.force, config.executors or ())
    guard.stage("force patterns", lambda: forcing.check(gm.graph, config.strict), left_out)

    def compiled(gm: GraphModule, before: Snapshot, inputs: Sequence[Any]) -> Callable[..., Any]:
        def rewritten() -> GraphModule:
            joins = config.join_attention and not torch.are_deterministic_algorithms_enabled()
            return rewrite(gm, device_of(_dynamo_values(gm, inputs), config) if joins else None, forcing.orders(gm.graph))

        module = guard.stage("rewrites of the Dynamo graph", rewritten, before.restored)
        return without_subclasses(_compile_rewritten(module, inputs, config, forcing, guard), inputs)

    positions = size_arguments(gm) if config.specialize_after and not observers.plan_only() else ()
    function = compiled(gm, before, example_inputs)
    if not positions:
        return function
    return Specialized(function, positions, config.specialize_after, lambda arguments: guard.stage(
        "specialization", lambda: _specialized(before.restored(), positions, arguments, compiled), left_out))


@pipeline.without_garbage_collection()
def _specialized(
    gm: GraphModule, positions: Sequence[int], arguments: Sequence[Any],
    compiled: Callable[[GraphModule, Snapshot, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any] | None:
    """Compile a Dynamo graph with dynamic sizes for those of a call, as if Dynamo had made it for these alone.

    Args:
        gm: The graph. It is rewritten in place.
        positions: Which of its arguments are sizes.
        arguments: The arguments of the call.
        compiled: Compiles a graph, given a snapshot of it and an example of each of its inputs.

    Returns:
        A function of all arguments; None if it would depend on numbers that are arguments, too.
    """
    numbers = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=numbers)
    with compiling(mode):
        with dynamo_timed("dynafuse.specialize"), preserve_rng_state():
            examples = fix_sizes(gm, positions, arguments, mode)
        try:
            with observers.compiling_for(tuple(arguments[i] for i in positions)):
                function = compiled(gm, Snapshot.of(gm), list(examples.values()))
        except TensorifyScalarRestartAnalysis:  # Dynamo would trace again with the number in its place
            return None
    if numbers.guards:
        return None
    return of_some(list(examples), without_subclasses(function, [arguments[i] for i in examples]))


def _compile_rewritten(gm: GraphModule, example_inputs: Sequence[Any], config: Config, forcing: Forcing,
                       guard: Guard) -> Callable[..., Any]:
    """Compile a Dynamo graph after its rewrites: piece by piece, or as a whole."""
    before = Snapshot.of(gm)

    def apart() -> tuple[Callable[..., Any] | None, GraphModule]:
        return compile_layers(gm, example_inputs, config, forcing), gm

    pieces, whole = guard.stage("repeated layers", apart, lambda: (None, before.restored()))
    return pieces or _compile_joint(whole, example_inputs, config, forcing, may_spread=returns_plain_tensors(whole))


def start_workers(config: Config) -> None:
    """Start the processes that compile kernels, if there is a GPU to compile for."""
    if not observers.plan_only() and torch.cuda.is_available():
        pool.warm(config.workers)


def compile_layers(gm: GraphModule, example_inputs: Sequence[Any], config: Config,
                   forcing: Forcing) -> Callable[..., Any] | None:
    """Compile a Dynamo graph piece by piece, if it repeats itself and the options allow it; captured graphs stay whole.

    Args:
        gm: Dynamo's graph.
        example_inputs: An example of each of its inputs, in order.
        config: The options: ``reuse_layers`` "never" and ``cudagraphs`` leave the graph whole; "always" asks for no price.
        forcing: What the user forces onto which executor.

    Returns:
        A function of the graph's inputs; None for a graph that stays whole.
    """
    context = TracingContext.try_get()
    if config.reuse_layers == "never" or config.cudagraphs or context is None or context.fake_mode is None:
        return None
    device = None if config.reuse_layers == "always" else device_of(_dynamo_values(gm, example_inputs), config)
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
            functions[piece] = _compile_joint(piece.module(gm), inputs, config, forcing, len(piece.sites))
    return pieces.assemble(functions)


def _compile_joint(gm: GraphModule, example_inputs: Sequence[Any], config: Config, forcing: Forcing,
                   calls: int = 1, may_spread: bool = False) -> Callable[..., Any]:
    """Compile a Dynamo graph by way of AOTAutograd.

    Args:
        gm: The graph.
        example_inputs: An example of each of its inputs, in order.
        config: The options.
        forcing: What the user forces onto which executor.
        calls: How often a step calls it.
        may_spread: Whether rows of its results may be further apart than eager's.
    """
    before = Snapshot.of(gm)
    guard = guard_of(config, before.restored, differentiable=True)
    enabled = executors_for(list(_dynamo_values(gm, example_inputs)), config)[1]
    pools = any(executor(name).pools for name in enabled)

    def through() -> Callable[..., Any]:
        return _through_aot(config, forcing, guard, calls, pools, Shared(marked_inputs(gm), may_spread))

    # A new object per graph: it keeps state.
    compile_aot = guard.stage("set-up of AOTAutograd", through, left_out)
    # The backward is planned while worker processes compile the forward's kernels, not when it is first run.
    with (torch._functorch.config.patch(force_non_lazy_backward_lowering=True), _draws_as(config),
          whole_in_autograd() if pools else nullcontext(), suppress(NotSplit)):
        if compile_aot is not None:
            compiled: Callable[..., Any] = compile_aot(gm, example_inputs)
            return compiled
    return before.restored().forward


def _draws_as(config: Config) -> AbstractContextManager[Any]:
    """Have torch's passes keep draws that nothing reads where the option promises eager's numbers: they move the generator.

    Torch asks Inductor's own option, whoever compiles.
    """
    from torch._inductor import config as inductor  # private to torch

    patched: AbstractContextManager[Any] = inductor.patch(fallback_random=config.fallback_random)
    return patched


def _through_aot(config: Config, forcing: Forcing, guard: Guard, calls: int, pools: bool,
                 shared: Shared) -> Callable[..., Any]:
    """Return AOTAutograd with the pipeline behind it.

    ``pools`` tells whether an executor has kernels of windows, ``shared`` is what forward and backward tell each other.
    """
    def compiler(kind: str) -> Callable[..., Any]:
        return functools.partial(pipeline.compile_graph, kind, config, shared=shared, forcing=forcing, calls=calls)

    own_cut = functools.partial(_cut, config, forcing) if config.rematerialize == "cost" else None
    join = functools.partial(_join, config, forcing) if config.join_products else None
    split = functools.partial(
        split_joint, fallback_random=config.fallback_random, forcing=forcing, cut=own_cut, join=join, guard=guard)
    compile_aot: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
        partition_fn=split, decompositions=decompositions(config.fallback_random, pools),
        keep_inference_input_mutations=True)
    return compile_aot


def _cut(config: Config, forcing: Forcing, joint: GraphModule, sides: Sides) -> list[Node]:
    """Return what the backward of a joint graph keeps of the forward, by the cost model."""
    with dynamo_timed("dynafuse.cut"):
        use, enabled, _ = executors_for(values_of(joint), config)
        annotated = annotate(joint, fused_device(use, enabled), forcing=allowing(forcing, use, enabled))
        return saved_values(annotated, sides, device_of(values_of(joint), config))


def _join(config: Config, forcing: Forcing, joint: GraphModule) -> None:
    """Have the library run the products of a joint graph that the model writes out."""
    use, enabled, _ = executors_for(values_of(joint), config)
    forced = forcing.forced_to_eager(joint.graph)
    join_products(joint, device_of(values_of(joint), config), fused_device(use, enabled), forced)


def _dynamo_values(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    """Return examples of a Dynamo graph's values: a graph may make all its tensors by itself."""
    yield from example_inputs
    yield from (node.meta.get("example_value") for node in gm.graph.nodes)


# The process ----------------------------------------------------------------------------------------------------------


def reset() -> None:
    """Forget compiled kernels (``torch.compiler.reset`` calls this)."""
    kernels.clear()
    observers.clear()
    pipeline.reset()
    for cached in (REJECTED, LENGTHS, MEASUREMENTS):
        cached.clear()
    recorder.reset()
    if torch.cuda.is_available():
        cuda_graphs.reset()


dynafuse.reset = reset  # type: ignore[attr-defined]


def stats() -> dict[str, int]:
    """Return the distinct kernels, the places in graphs that launch one, and where kernels came from.

    ``hits`` and ``misses`` are those of this process's store. What it misses comes from the disk (``disk_hits``) or is
    ``compiled``; ``disk_misses`` are those that were looked for on disk and were not there.
    """
    store, counters, disk = kernels.STORE, kernels.STORE.counters, kernels.TRAFFIC
    return {"kernels": len(store), "launch_sites": pipeline.launch_sites(), "hits": counters.hits,
            "misses": counters.misses, "disk_hits": disk.hits, "disk_misses": disk.misses, "compiled": disk.compiled}
