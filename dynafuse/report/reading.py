"""Reading of plans into the values of a report.

Worked example: a plan of ``relu(x @ w)`` has an eager step ``mm``, priced by its arithmetic, and a region ``r0`` that reads
it: ``ReportedStep("r0", "triton", ("aten.relu.default",), ..., reads=("mm",))``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.cost import device as devices
from dynafuse.cost.library_calls import call_prediction, is_call
from dynafuse.fx import base, moved_by, user_line
from dynafuse.ir import Annotated, Option, Override, Plan, Region, Role
from dynafuse.lowering.registry import EAGER
from dynafuse.ops import lookup
from dynafuse.passes.attention.join import JOINED
from dynafuse.passes.depthwise import WRITTEN
from dynafuse.passes.padded_products import PADDED
from dynafuse.passes.written_products import WRITTEN_OUT
from dynafuse.report.data import Kept, Price, Report, ReportedGraph, ReportedStep
from dynafuse.report.relatives import Kernels
from dynafuse.runtime.observers import Compiled

SAVED = "SavedForBackwards"  # AOTAutograd's descriptions of what it saves begin so
PARTIAL = "priced by its bytes alone: how much it computes is not known"
MOST_LINES = 8  # of the user's code that a step names


def report_of(compiled: Sequence[Compiled], device: str | None, captured: bool) -> Report:
    """Return the report of graphs.

    Args:
        compiled: The graphs, in the order in which they were compiled.
        device: The name of the described device that was planned for; None if there is none.
        captured: Whether the graphs are to be replayed as CUDA graphs.
    """
    named = devices.describe(device) if device else _planned_for(compiled)
    kernels = Kernels()
    graphs = tuple(_graph(graph, number, named is not None, captured, kernels) for number, graph in enumerate(compiled, 1))
    unusable = {name: reason for graph in compiled for name, reason in graph.unusable.items()}
    title = named.title if named else "CPU, where nothing is fused"
    return Report(named.name if named else "cpu", title, graphs, unusable)


def graph_of(compiled: Compiled) -> ReportedGraph:
    """Return a graph by itself. Eager steps get no price: finding one takes longer than all the rest."""
    return _graph(compiled, 1, False, compiled.captured, Kernels())


def _planned_for(compiled: Sequence[Compiled]) -> devices.Device | None:
    """Return the device whose costs decided; None if no graph had anything to fuse and there is no GPU."""
    return next((graph.device for graph in compiled if graph.plan.regions or torch.cuda.is_available()), None)


def _graph(compiled: Compiled, number: int, priced: bool, captured: bool, kernels: Kernels) -> ReportedGraph:
    """Return a graph's report. ``kernels`` are those of earlier graphs, and grows. Eager steps are priced if ``priced``."""
    plan = compiled.plan
    reads = _reads(plan)
    steps: list[ReportedStep] = []
    for step in compiled.regions.steps:
        if isinstance(step, CanonicalRegion):
            reused, relative = kernels.add(step, step.name, number)
            fused = _fused_step(step.region, plan.annotated, step.key, reads[step.name])
            family = step.region.decision.family if step.family else None
            steps.append(replace(fused, reused=reused, relative=relative, family=family))
        elif is_call(step, plan.annotated.facts):
            steps.append(_eager_step(step, plan.annotated, compiled.device if priced else None, reads[step.name]))
    computed = {node for region in plan.regions for node in _computing(region, plan.annotated)}
    calls = sum(step.key is None for step in steps)
    outputs = plan.annotated.graph.output_node().meta.get("desc")  # a subgraph's are not described
    kept_bytes = _kept(plan.annotated, outputs) if compiled.kind == "forward" and outputs is not None else None
    graph = ReportedGraph(compiled.kind, tuple(steps), len(computed) + calls, plan.refusals, captured or compiled.captured,
                          compiled.calls, kept_bytes, compiled.capture, compiled.replays, compiled.sizes)
    bound_by = graph.bound_by
    return replace(graph, steps=tuple(replace(step, prices=_ordered(step, bound_by)) for step in steps))


def _kept(annotated: Annotated, descriptions: Sequence[Any]) -> Kept:
    """Count the tensors that a forward returns for its backward; views of one tensor count once, inputs do not."""
    output = annotated.graph.output_node()
    pairs = zip(output.args[0], descriptions, strict=True)  # type: ignore[arg-type]
    saved = (value for value, kind in pairs if isinstance(value, Node) and type(kind).__name__.startswith(SAVED))
    tensors = {node: tensor for node in map(base, saved)
               if node.op != "placeholder" and (tensor := annotated.facts[node].tensor) is not None}
    return Kept(len(tensors), sum(tensor.bytes for tensor in tensors.values()))


def _ordered(step: ReportedStep, bound_by: str | None) -> tuple[Price, ...]:
    """Sort the prices by the time that bounds the graph, the chosen executor's first.

    Where the host bounds the graph, an executor that takes more of the host loses its ``flip``: no device time that the
    constant could save would make up for it.
    """
    if bound_by != "host":
        return tuple(sorted(step.prices, key=lambda p: (p.executor != step.executor, p.device_us)))
    prices = (replace(p, flip=None) if p.host_us > (step.host_us or 0.0) else p for p in step.prices)
    return tuple(sorted(prices, key=lambda p: (p.executor != step.executor, p.host_us)))


# ---------------------------------------------------------------------- one step


def _fused_step(region: Region, annotated: Annotated, key: str, reads: tuple[str, ...]) -> ReportedStep:
    nodes = _computing(region, annotated)
    forced, fallback = _forcing(nodes, annotated, region.executor)
    prices = _prices(region)
    price = next((price for price in prices if price.executor == region.executor), None)
    margin, eager = region.decision.margin, region.decision.eager
    return ReportedStep(
        region.name, region.executor, tuple(str(node.target) for node in nodes), key, region.bytes,
        price.device_us if price else region.predicted_us,
        host_us=price.host_us if price else None,
        eager_us=eager.device_us if eager else None,
        eager_host_us=eager.host_us if eager else None,
        prices=prices,
        margin=margin if margin != float("inf") else None,
        unsure=region.decision.unsure,
        measured_us=dict(region.decision.measured),
        kernel_class=region.decision.kernel_class,
        merges=tuple(" + ".join(pair) for pair in region.merges),
        notes=(*region.reasons, *[f"{node.name} {node.meta[WRITTEN]}" for node in nodes if WRITTEN in node.meta]),
        forced=forced, fallback=fallback, reads=reads,
        nodes=tuple(node.name for node in nodes), lines=_lines(nodes),
    )


def _eager_step(node: Node, annotated: Annotated, device: devices.Device | None, reads: tuple[str, ...]) -> ReportedStep:
    """Return the step of an op that runs eager, priced as the planner does: by its arithmetic, or by the bytes known."""
    sizes = _tensor_bytes(node, annotated)
    prices: tuple[Price, ...] = ()
    notes: tuple[str, ...] = ()
    if device is not None:
        prediction = call_prediction(node, sum(size for size in sizes if size is not None), device)
        prices = (Price(EAGER, prediction.device_us, prediction.host_us),)
        notes = (PARTIAL,) if prediction.partial else ()
    notes = (*notes, *[node.meta[key] for key in (WRITTEN_OUT, WRITTEN, PADDED) if key in node.meta])
    joined = (node.meta.get("custom") or {}).get(JOINED)
    if joined is not None and (row := lookup(node.target)) is not None and row.library == "attention":
        notes = (*notes, joined)
    forced, fallback = _forcing([node], annotated, EAGER)
    return ReportedStep(
        node.name, EAGER, (str(node.target),), None, None if None in sizes else sum(filter(None, sizes)),
        prices[0].device_us if prices else None,
        reason=annotated.facts[node].reason,
        host_us=prices[0].host_us if prices else None,
        eager_us=prices[0].device_us if prices else None,
        eager_host_us=prices[0].host_us if prices else None,
        prices=prices, notes=notes, forced=forced, fallback=fallback, reads=reads, nodes=(node.name,), lines=_lines([node]),
    )


def _computing(region: Region, annotated: Annotated) -> Sequence[Node]:
    """Return the nodes of a region that compute, without its views."""
    return [node for node in region.nodes if annotated.facts[node].role is Role.FUSED]




def _tensor_bytes(node: Node, annotated: Annotated) -> Sequence[int | None]:
    """Return the bytes of each tensor that an eager call reads or writes; None where unknown, as of several outputs."""
    facts = [annotated.facts[n] for n in moved_by(node)]
    return [f.tensor.bytes if f.tensor is not None else None for f in facts if f.role is not Role.HOST]


def _prices(region: Region) -> tuple[Price, ...]:
    """Return the prices of a region's options, that of the executor that runs it first."""
    options = sorted(region.decision.options, key=lambda option: option.executor != region.executor)
    return tuple(Price(o.executor, o.device_us, o.host_us, _flip(o, options[0])) for o in options)


def _flip(option: Option, chosen: Option) -> Override | None:
    """Return an option's override; None for an executor that is as fast on the device and lost by host time."""
    return option.override if option.device_us > chosen.device_us else None


def _forcing(nodes: Iterable[Node], annotated: Annotated, executor: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the executor that the nodes are forced to, if it runs them, and the requests that are not met, with reasons."""
    facts = [annotated.facts[node] for node in nodes]
    forced = next((f.forced for f in facts if f.forced == executor), None)
    elsewhere = (f"{f.forced}: {f.reason or f'runs on {executor}'}" for f in facts if f.forced not in (None, executor))
    return forced, tuple(dict.fromkeys((*(f.fallback for f in facts if f.fallback), *elsewhere)))


def _lines(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the user's lines that the nodes come from, each once, in order."""
    return tuple(dict.fromkeys(filter(None, map(user_line, nodes))))[:MOST_LINES]


# ---------------------------------------------------------------------- who reads whom


def _reads(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Return per step the names of the earlier steps whose results it reads, also through views and ``getitem``."""
    annotated = plan.annotated
    launching = [step for step in plan.steps if isinstance(step, Region) or is_call(step, annotated.facts)]
    results = {node for step in launching for node in ([step] if isinstance(step, Node) else step.outputs)}
    roots = _roots(annotated, results)
    maker: dict[Node, str] = {}  # the latest step that has written a tensor
    reads: dict[str, tuple[str, ...]] = {}
    for step in launching:
        sources = step.inputs if isinstance(step, Region) else step.all_input_nodes
        makers = (maker.get(root) for source in sources for root in roots.get(source, ()))
        reads[step.name] = tuple(dict.fromkeys(name for name in makers if name is not None))
        written = (*step.outputs, *step.copies.values()) if isinstance(step, Region) else [step]
        maker.update(dict.fromkeys(written, step.name))
    return reads


def _roots(annotated: Annotated, results: set[Node]) -> Mapping[Node, tuple[Node, ...]]:
    """Return the tensors that each node is a view of: itself for a step's result or an input, else its operands' roots."""
    roots: dict[Node, tuple[Node, ...]] = {}
    for node in annotated.graph.nodes:
        computes = node.op == "call_function" and node not in results
        is_view = computes and annotated.facts[node].role in (Role.VIEW, Role.EAGER)
        viewed = [root for source in node.all_input_nodes for root in roots[source]] if is_view else [node]
        roots[node] = tuple(dict.fromkeys(viewed))
    return roots
