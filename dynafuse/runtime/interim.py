"""Interim plans: what a graph runs on while its kernels are being compiled.

A region whose kernel is not there yet may equal one whose kernel is, but for a few ops at its end or its beginning. Until
its own kernel is compiled it runs on that one, and the few ops run eager. Whether a graph does so is for the cost model
to say: what its calls lose meanwhile against the waiting that is saved.

Worked example: a process that has run ``softmax(x)`` comes to ``softmax(relu(x))``, one region and a new kernel. The first
call runs eager's ``relu`` and the softmax that is there; the first call after the compiler is done runs the new kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torch.fx import GraphModule, Node

from dynafuse.cache.canonical import CanonicalPlan, CanonicalRegion, canonical
from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import plan_prediction
from dynafuse.cost.model import Meanwhile, meanwhile
from dynafuse.fx import extract
from dynafuse.ir import Annotated, Facts, Plan, Region, Role
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.registry import executor
from dynafuse.ops import Kind
from dynafuse.partition.annotate import annotate
from dynafuse.partition.grow import partition
from dynafuse.select.compile import is_there
from dynafuse.select.place import target_of

V = TypeVar("V")

MOST_KERNELS = 4
"""Kernels that a graph may lack: where there are more, hardly all of them have a stand-in, and all have to."""

MOST_OPS = 4
"""Ops of a region that run eager, each a launch: as many as the backward of ``tanh``, which is computed again for it."""

MOST_NODES = 500
"""Nodes that are planned again for a graph, over all that is tried: 0.4 s at most, and as a rule a tenth of that."""

NO_OPS: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class InterimPlan:
    """A plan whose kernels are there, to run in the place of one whose are not, and what that loses and saves."""

    plan: CanonicalPlan
    regions: tuple[str, ...]  # of the other plan: those that run otherwise
    meanwhile: Meanwhile

    def __str__(self) -> str:
        return f"{', '.join(self.regions)} on kernels that are there, with what these lack run eager; {self.meanwhile}"


def interim_plan(plan: CanonicalPlan, missing: Collection[str], module: GraphModule, device: Device,
                 compilation: Compilation) -> InterimPlan | None:
    """Return what a graph runs on while the kernels of the regions ``missing`` are compiled; None where one has no help."""
    regions = plan.by_name
    late = {_same(regions[name]): regions[name] for name in missing}
    if len(late) > MOST_KERNELS:
        return None
    search = _Search(plan.annotated, module, device, compilation)
    rests: dict[Hashable, Rest] = {}
    for same, region in late.items():
        rest = search.rest(region, MOST_NODES // len(late))
        if rest is None:
            return None
        rests[same] = rest
    replaced = _replaced(plan.plan, {name: tuple(rests[_same(regions[name])].at(regions[name])) for name in missing})
    steps = tuple(step if isinstance(step, Node) else regions.get(step.name) or search.canonical(plan.annotated, step)
                  for step in replaced.steps)
    interim = CanonicalPlan(replaced.annotated, steps, replaced.refusals, replaced.unplaced)
    if not all(is_there(region, compilation) for region in interim.regions):
        return None
    numbers = meanwhile(plan_prediction(plan.plan, device), plan_prediction(replaced, device), len(late), device)
    return InterimPlan(interim, tuple(missing), numbers)


def _same(bound: CanonicalRegion) -> Hashable:
    """Return what two regions must share for one stand-in to serve both: the kernel, and sizes of the kernel's classes."""
    return bound.key, bound.sizes


def _replaced(plan: Plan, instead: Mapping[str, tuple[Region | Node, ...]]) -> Plan:
    """Return a plan with other steps in the place of some regions; single ops among them run eager."""
    facts = plan.annotated.facts
    eager = {step: _eager(facts[step], f"{name}'s kernel is being compiled")
             for name, steps in instead.items() for step in steps if isinstance(step, Node) and facts[step].is_fused}
    steps = ((instead.get(step.name, (step,)) if isinstance(step, Region) else (step,)) for step in plan.steps)
    annotated = replace(plan.annotated, facts={**facts, **eager})
    return replace(plan, annotated=annotated, steps=tuple(itertools.chain.from_iterable(steps)))


def _eager(facts: Facts, reason: str = "") -> Facts:
    return replace(facts, role=Role.EAGER, reason=reason)


# ---------------------------------------------------------------------- the rest of a region


@dataclass(frozen=True)
class Rest:
    """What is left of a region without a few of its ops, planned on a copy."""

    whole: CanonicalRegion
    copies: Mapping[Node, Node]  # of the region's nodes and of its inputs
    plan: Plan

    def at(self, bound: CanonicalRegion) -> Iterator[Region | Node]:
        """Its steps in an equal region."""
        pairs = zip((*self.whole.ops, *self.whole.inputs), (*bound.ops, *bound.inputs), strict=True)
        there = {self.copies[here]: node for here, node in pairs}
        for step in self.plan.steps:
            yield _moved(step, bound.region.name, there) if isinstance(step, Region) else there[step]


def _moved(region: Region, whole: str, there: Mapping[Node, Node]) -> Region:
    """Return a part of a region of another graph, over the nodes of the region ``whole`` that compute the same."""
    def each(nodes: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(there[node] for node in nodes)

    def known(values: Mapping[Node, V]) -> dict[Node, V]:
        return {there[node]: value for node, value in values.items()}

    return replace(
        region, name=f"{whole}.{region.name}", reasons=(f"stands in for {whole}, whose kernel is being compiled",),
        merges=(), nodes=each(region.nodes), inputs=each(region.inputs), outputs=each(region.outputs),
        dims=known(region.dims), out_dims=known(region.out_dims), reductions=frozenset(each(region.reductions)),
        copies={there[node]: there[into] for node, into in region.copies.items()})


@dataclass(frozen=True)
class _Search:
    """Looks for kernels that are there for parts of a graph's regions."""

    annotated: Annotated
    module: GraphModule
    device: Device
    compilation: Compilation

    def rest(self, whole: CanonicalRegion, nodes: int) -> Rest | None:
        """Return a region without as few of its ops as make the rest one whose kernels are there.

        At most ``nodes`` are planned. What the user has forced onto its executor stays there as a whole; a region on its
        family's kernel runs on a shared one already.
        """
        region, facts = whole.region, self.annotated.facts
        aside = executor(region.executor).compiles_aside
        if not aside or whole.family or any(facts[node].forced for node in region.nodes):
            return None
        copy, copies = extract(self.module, region.nodes, _inputs(region), region.outputs)
        annotated = annotate(copy, whole.device.type)
        for ops in itertools.islice(remainders(region, facts), nodes // len(region.nodes)):
            plan = self._without([copies[node] for node in ops], annotated)
            parts = (self.canonical(plan.annotated, part) for part in plan.regions)
            if not plan.unplaced and all(is_there(part, self.compilation) for part in parts):
                return Rest(whole, copies, plan)
        return None

    def _without(self, ops: Iterable[Node], annotated: Annotated) -> Plan:
        """Return the plan of a graph in which some ops run eager."""
        facts = {**annotated.facts, **{node: _eager(annotated.facts[node]) for node in ops}}
        config = self.compilation.config
        return partition(replace(annotated, facts=facts), self.device, recompute=config.recompute,
                         max_ops=config.max_region_ops)

    def canonical(self, annotated: Annotated, region: Region) -> CanonicalRegion:
        """Return a region in canonical form."""
        config = self.compilation.config
        target = target_of(region, region.executor, self.compilation.capability)
        return canonical(annotated, region, config.key(), target, config.size_classes)


def _inputs(region: Region) -> Iterable[Node]:
    """Return the tensors and sizes that a region takes, without constants of the module, in order of first use."""
    inside = set(region.nodes)
    operands = itertools.chain.from_iterable(node.all_input_nodes for node in region.nodes)
    return dict.fromkeys(node for node in operands if node not in inside and node.op != "get_attr")


def remainders(region: Region, facts: Mapping[Node, Facts]) -> list[frozenset[Node]]:
    """Yield the ops that may run eager after the rest of a region, before it, or both, the fewest first.

    A backward that computes a value of the forward again begins with that op and ends with its derivative. Random numbers
    stay where they are: eager would draw others.
    """
    ends = _reached(reversed(region.nodes), lambda node: node.users, facts)
    beginnings = _reached(region.nodes, lambda node: node.all_input_nodes, facts)
    both = (end | beginning for end, beginning in itertools.product((NO_OPS, *ends), (NO_OPS, *beginnings)))
    return sorted(dict.fromkeys(ops for ops in both if 0 < len(ops) <= MOST_OPS), key=len)


def _reached(nodes: Iterable[Node], onward: Callable[[Node], Iterable[Node]],
             facts: Mapping[Node, Facts]) -> list[frozenset[Node]]:
    """Return the ops from each of a region's nodes onward, where those are few and none is random."""
    reached: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        own = {node} if facts[node].role is Role.FUSED else ()
        reached[node] = frozenset(own).union(*(reached[other] for other in onward(node) if other in reached))
    few = (ops for node, ops in reached.items() if node in ops and len(ops) <= MOST_OPS)
    return [ops for ops in few if not any(_is_random(facts[node]) for node in ops)]


def _is_random(facts: Facts) -> bool:
    return facts.row is not None and facts.row.kind is Kind.RANDOM
