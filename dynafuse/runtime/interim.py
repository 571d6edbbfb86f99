"""Interim plans: plans that a graph runs on while its own kernels are being compiled.

A region whose kernel is missing may differ from one with a compiled kernel by a few ops at its beginning or end. Until its
own kernel is compiled, it runs on that kernel, and those few ops run eager. The cost model decides whether a graph does so:
by what its calls lose in the meantime, against the waiting that is saved.

Worked example: a process that has run ``softmax(x)`` comes to ``softmax(relu(x))``, one region and a new kernel. The first
call runs eager's ``relu`` and the softmax's compiled kernel; the first call after the compiler is done runs the new kernel.
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
from dynafuse.partition.search import partition
from dynafuse.select.compile import is_there
from dynafuse.select.place import target_of

V = TypeVar("V")

MOST_KERNELS = 4
"""The most kernels that a graph may lack. Each of them needs a stand-in, which is unlikely for more."""

MOST_OPS = 4
"""The most ops of a region that run eager, each a launch: as many as the backward of a ``tanh`` that is computed again."""

MOST_NODES = 500
"""The most nodes that are planned again for a graph, in all attempts: 0.4 s at most, and mostly a tenth of that."""

NO_OPS: frozenset[Node] = frozenset()


@dataclass(frozen=True)
class InterimPlan:
    """A plan of compiled kernels that stands in for one whose kernels are missing."""

    plan: CanonicalPlan
    regions: tuple[str, ...]  # names of the other plan's regions that run otherwise
    meanwhile: Meanwhile  # what that loses and saves

    def __str__(self) -> str:
        return f"{', '.join(self.regions)} on compiled kernels, with what these lack run eager; {self.meanwhile}"


def interim_plan(plan: CanonicalPlan, missing: Collection[str], module: GraphModule, device: Device,
                 compilation: Compilation) -> InterimPlan | None:
    """Return the plan that a graph runs on while the kernels of its regions ``missing`` are compiled.

    Args:
        plan: The graph's own plan.
        missing: Names of regions.
        module: The graph's module.
        device: What the cost model prices for.
        compilation: What kernels are compiled for.

    Returns:
        None if some region has no stand-in.
    """
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
    gain = meanwhile(plan_prediction(plan.plan, device), plan_prediction(replaced, device), len(late), device)
    return InterimPlan(interim, tuple(missing), gain)


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
    """The plan of a region, made on a copy, in which a few of its ops run eager and the rest on compiled kernels."""

    whole: CanonicalRegion
    copies: Mapping[Node, Node]  # of the region's nodes and of its inputs
    plan: Plan

    def at(self, bound: CanonicalRegion) -> Iterator[Region | Node]:
        """Yield the steps of this plan over the nodes of a region that equals ``whole``."""
        pairs = zip((*self.whole.ops, *self.whole.inputs), (*bound.ops, *bound.inputs), strict=True)
        nodes = {self.copies[own]: node for own, node in pairs}
        for step in self.plan.steps:
            yield _moved(step, bound.region.name, nodes) if isinstance(step, Region) else nodes[step]


def _moved(region: Region, whole: str, nodes: Mapping[Node, Node]) -> Region:
    """Return a region over the nodes of another graph, as a part of its region ``whole``; ``nodes`` maps its own."""
    def each(own: Iterable[Node]) -> tuple[Node, ...]:
        return tuple(nodes[node] for node in own)

    def keyed(values: Mapping[Node, V]) -> dict[Node, V]:
        return {nodes[node]: value for node, value in values.items()}

    return replace(
        region, name=f"{whole}.{region.name}", reasons=(f"stands in for {whole}, whose kernel is being compiled",),
        merges=(), nodes=each(region.nodes), inputs=each(region.inputs), outputs=each(region.outputs),
        dims=keyed(region.dims), out_dims=keyed(region.out_dims), reductions=frozenset(each(region.reductions)),
        copies={nodes[node]: nodes[into] for node, into in region.copies.items()})


@dataclass(frozen=True)
class _Search:
    """Looks for compiled kernels that compute parts of a graph's regions."""

    annotated: Annotated
    module: GraphModule
    device: Device
    compilation: Compilation

    def rest(self, whole: CanonicalRegion, nodes: int) -> Rest | None:
        """Return the plan of a region that runs the fewest ops eager and needs only compiled kernels; None without one.

        At most ``nodes`` nodes are planned. A region that the user has forced onto its executor stays there as a whole; one
        on its family's kernel runs on a shared kernel already.
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
                         max_ops=config.max_region_ops, joins=False)

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
    """Return the sets of ops that may run eager after the rest of a region, before it, or both; the smallest first.

    A backward that computes a value of the forward again begins with that op and ends with its derivative. Ops that draw
    random numbers stay in the region: eager would draw others.
    """
    ends = _reached(reversed(region.nodes), lambda node: node.users, facts)
    beginnings = _reached(region.nodes, lambda node: node.all_input_nodes, facts)
    both = (end | beginning for end, beginning in itertools.product((NO_OPS, *ends), (NO_OPS, *beginnings)))
    return sorted(dict.fromkeys(ops for ops in both if 0 < len(ops) <= MOST_OPS), key=len)


def _reached(nodes: Iterable[Node], onward: Callable[[Node], Iterable[Node]],
             facts: Mapping[Node, Facts]) -> list[frozenset[Node]]:
    """Return, for each node, the ops that can be reached from it by ``onward``, if they are few and none is random."""
    reached: dict[Node, frozenset[Node]] = {}
    for node in nodes:
        own = {node} if facts[node].role is Role.FUSED else ()
        reached[node] = frozenset(own).union(*(reached[other] for other in onward(node) if other in reached))
    few = (ops for node, ops in reached.items() if node in ops and len(ops) <= MOST_OPS)
    return [ops for ops in few if not any(_is_random(facts[node]) for node in ops)]


def _is_random(facts: Facts) -> bool:
    return facts.row is not None and facts.row.kind is Kind.RANDOM
