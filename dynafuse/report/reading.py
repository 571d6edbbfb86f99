"""From plans to the values of a report.

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
from dynafuse.cost.library_calls import call_prediction, launches
from dynafuse.fx import base, user_line
from dynafuse.ir import Annotated, Option, Override, Plan, Region, Role
from dynafuse.report.data import Kept, Price, Report, ReportedGraph, ReportedStep
from dynafuse.report.relatives import Kernels
from dynafuse.runtime.observers import Compiled

SAVED = "SavedForBackwards"  # AOTAutograd's descriptions of what it saves begin so
PARTIAL = "priced by its bytes alone: how much it computes is not known"
MOST_LINES = 8  # of the user's code that a step names


def report_of(compiled: Sequence[Compiled], device: str | None, captured: bool) -> Report:
    """The report of graphs in the order in which they were compiled, planned for a described device if one is named."""
    named = devices.describe(device) if device else _planned_for(compiled)
    kernels = Kernels()
    graphs = tuple(_graph(one, number, named is not None, captured, kernels) for number, one in enumerate(compiled, 1))
    unusable = {name: reason for one in compiled for name, reason in one.unusable.items()}
    title = named.title if named else "CPU, where nothing is fused"
    return Report(named.name if named else "cpu", title, graphs, unusable)


def graph_of(compiled: Compiled) -> ReportedGraph:
    """A graph by itself; what runs eager has no price, which would take longer to find than all the rest."""
    return _graph(compiled, 1, False, compiled.captured, Kernels())


def _planned_for(compiled: Sequence[Compiled]) -> devices.Device | None:
    """The device whose costs decided; None if no graph had anything to fuse and no GPU is there."""
    found = [one.device for one in compiled if one.plan.regions or torch.cuda.is_available()]
    return found[0] if found else None


def _graph(compiled: Compiled, number: int, priced: bool, captured: bool, kernels: Kernels) -> ReportedGraph:
    """One graph's steps; ``kernels`` are those of the graphs before, and grows. Without a device eager has no price."""
    plan = compiled.plan
    reads = _reads(plan)
    steps: list[ReportedStep] = []
    for step in compiled.regions.steps:
        if isinstance(step, CanonicalRegion):
            reused, relative = kernels.add(step, step.name, number)
            fused = _fused_step(step.region, plan.annotated, step.key, reads[step.name])
            family = step.region.decision.family if step.near else None
            steps.append(replace(fused, reused=reused, relative=relative, family=family))
        elif _launches(step, plan.annotated):
            steps.append(_eager_step(step, plan.annotated, compiled.device if priced else None, reads[step.name]))
    computed = {node for region in plan.regions for node in _computing(region, plan.annotated)}
    calls = sum(step.key is None for step in steps)
    outputs = plan.annotated.graph.output_node().meta.get("desc")  # a subgraph's are not described
    kept = _kept(plan.annotated, outputs) if compiled.kind == "forward" and outputs is not None else None
    graph = ReportedGraph(compiled.kind, tuple(steps), len(computed) + calls, plan.refusals, captured, compiled.calls, kept)
    bound_by = graph.bound_by
    return replace(graph, steps=tuple(replace(step, prices=_ordered(step, bound_by)) for step in steps))


def _kept(annotated: Annotated, descriptions: Sequence[Any]) -> Kept:
    """What a forward returns for its backward, each tensor once however it is looked at."""
    output = annotated.graph.output_node()
    pairs = zip(output.args[0], descriptions, strict=True)  # type: ignore[arg-type]
    saved = (value for value, said in pairs if isinstance(value, Node) and type(said).__name__.startswith(SAVED))
    tensors = {node: found for node in map(base, saved)
               if node.op != "placeholder" and (found := annotated.facts[node].tensor) is not None}
    return Kept(len(tensors), sum(tensor.bytes for tensor in tensors.values()))


def _ordered(step: ReportedStep, bound_by: str | None) -> tuple[Price, ...]:
    """The prices by what the graph waits for, the chosen executor's first.

    Where the host bounds the graph, less device time wins nothing for an executor that needs more of the host.
    """
    if bound_by != "host":
        return tuple(sorted(step.prices, key=lambda p: (p.executor != step.executor, p.device_us)))
    told = (replace(p, flip=None) if p.host_us > (step.host_us or 0.0) else p for p in step.prices)
    return tuple(sorted(told, key=lambda p: (p.executor != step.executor, p.host_us)))


# ---------------------------------------------------------------------- one step


def _fused_step(region: Region, annotated: Annotated, key: str, reads: tuple[str, ...]) -> ReportedStep:
    nodes = _computing(region, annotated)
    forced, fallback = _forcing(nodes, annotated, region.executor)
    prices = _prices(region)
    own = next((price for price in prices if price.executor == region.executor), None)
    margin = region.decision.margin
    return ReportedStep(
        region.name, region.executor, tuple(str(node.target) for node in nodes), key, region.bytes,
        own.device_us if own else region.predicted_us,
        host_us=own.host_us if own else None,
        prices=prices,
        margin=margin if margin != float("inf") else None,
        unsure=region.decision.unsure,
        measured_us=dict(region.decision.measured),
        kernel_class=region.decision.kernel_class,
        merges=tuple(" + ".join(pair) for pair in region.merges),
        notes=region.reasons, forced=forced, fallback=fallback, reads=reads,
        nodes=tuple(node.name for node in nodes), lines=_lines(nodes),
    )


def _eager_step(node: Node, annotated: Annotated, device: devices.Device | None, reads: tuple[str, ...]) -> ReportedStep:
    """An op that runs eager, priced as the planner prices it: by its arithmetic, or by the bytes that are known."""
    known = _tensor_bytes(node, annotated)
    prices: tuple[Price, ...] = ()
    notes: tuple[str, ...] = ()
    if device is not None:
        found = call_prediction(node, sum(size for size in known if size is not None), device)
        prices = (Price("eager", found.device_us, found.host_us),)
        notes = (PARTIAL,) if found.partial else ()
    forced, fallback = _forcing([node], annotated, "eager")
    return ReportedStep(
        node.name, "eager", (str(node.target),), None, None if None in known else sum(filter(None, known)),
        prices[0].device_us if prices else None,
        reason=annotated.facts[node].reason,
        host_us=prices[0].host_us if prices else None,
        prices=prices, notes=notes, forced=forced, fallback=fallback, reads=reads, nodes=(node.name,), lines=_lines([node]),
    )


def _computing(region: Region, annotated: Annotated) -> Sequence[Node]:
    return [node for node in region.nodes if annotated.facts[node].role is Role.FUSED]


def _launches(node: Node, annotated: Annotated) -> bool:
    """Whether a step outside the regions calls something."""
    return annotated.facts[node].role is Role.EAGER and launches(node)


def _tensor_bytes(node: Node, annotated: Annotated) -> Sequence[int | None]:
    """Bytes of an eager call's tensors, each once; None for what is not known, as of several outputs."""
    facts = [annotated.facts[n] for n in {node: None, **dict.fromkeys(node.all_input_nodes)}]
    return [f.tensor.bytes if f.tensor is not None else None for f in facts if f.role is not Role.HOST]


def _prices(region: Region) -> tuple[Price, ...]:
    """The options of a region's decision, the executor that runs it first."""
    options = sorted(region.decision.options, key=lambda option: option.executor != region.executor)
    return tuple(Price(o.executor, o.device_us, o.host_us, _flip(o, options[0])) for o in options)


def _flip(option: Option, chosen: Option) -> Override | None:
    """An option's override; None where the executor is fast enough on the device already and lost by its host time."""
    return option.override if option.device_us > chosen.device_us else None


def _forcing(nodes: Iterable[Node], annotated: Annotated, executor: str) -> tuple[str | None, tuple[str, ...]]:
    """The executor that the nodes are forced to, if that runs them, and what was asked for and is not kept."""
    facts = [annotated.facts[node] for node in nodes]
    forced = next((f.forced for f in facts if f.forced == executor), None)
    elsewhere = (f"{f.forced}: {f.reason or f'runs on {executor}'}" for f in facts if f.forced not in (None, executor))
    return forced, tuple(dict.fromkeys((*(f.fallback for f in facts if f.fallback), *elsewhere)))


def _lines(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The user's lines that the nodes come from, each once, in order."""
    return tuple(dict.fromkeys(filter(None, map(user_line, nodes))))[:MOST_LINES]


# ---------------------------------------------------------------------- who reads whom


def _reads(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Per step the names of the earlier steps that made what it reads, through views and picks of an output."""
    annotated = plan.annotated
    launching = [step for step in plan.steps if isinstance(step, Region) or _launches(step, annotated)]
    makers = {node for step in launching for node in ([step] if isinstance(step, Node) else step.outputs)}
    roots = _roots(annotated, makers)
    made: dict[Node, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for step in launching:
        sources = step.inputs if isinstance(step, Region) else step.all_input_nodes
        reached = (made.get(root) for source in sources for root in roots.get(source, ()))
        found[step.name] = tuple(dict.fromkeys(name for name in reached if name is not None))
        made.update(dict.fromkeys((*step.outputs, *step.copies.values()) if isinstance(step, Region) else [step], step.name))
    return found


def _roots(annotated: Annotated, makers: set[Node]) -> Mapping[Node, tuple[Node, ...]]:
    """What each node is a look at: itself if a step makes it or it comes from outside, else what its operands look at."""
    roots: dict[Node, tuple[Node, ...]] = {}
    for node in annotated.graph.nodes:
        looks = node.op == "call_function" and node not in makers and annotated.facts[node].role in (Role.VIEW, Role.EAGER)
        through = [root for source in node.all_input_nodes for root in roots[source]] if looks else [node]
        roots[node] = tuple(dict.fromkeys(through))
    return roots
