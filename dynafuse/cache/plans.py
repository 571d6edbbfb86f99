"""Conversion of plans to JSON and back, and of the graphs that they are made from to text, which enters their keys.

A plan is a function of the annotated graph and of the planner's other inputs. Its entry names nodes by their positions in
the graph, so another process reads it onto an equal graph, and nothing is grown or priced again.

Worked example: the plan of ``relu(x) + 1`` becomes ``{"steps": [{"name": "r0", "nodes": [1, 2], "inputs": [0], …}], …}``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from dynafuse.cache import sources
from dynafuse.cache.canonical import versions
from dynafuse.cache.disk import Disk
from dynafuse.cache.entry import Entry
from dynafuse.cache.folder import digest_of, disk
from dynafuse.cache.integers import sign_of_size
from dynafuse.cache.launches import NoEntry, Symbols, size_from_json, size_to_json
from dynafuse.cache.once import read
from dynafuse.config import Config
from dynafuse.fallback import Guard
from dynafuse.fx import user_line
from dynafuse.ir import Annotated, Axis, Decision, Dims, Facts, Nest, Option, Override, Plan, Refusal, RefusalKind, Region
from dynafuse.ops import shipped

log = logging.getLogger(__name__)

KIND = "plan"
LEAST_NODES = 64
"""Nodes of a graph from which its plan is kept: smaller ones are planned as fast as an entry is read."""

DESCRIBED_BY_TEXT = frozenset({
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.SymInt, torch.SymFloat, torch.SymBool})
"""Types of arguments that their text describes completely."""

Line: TypeAlias = Callable[[Node], str]
"""Returns the line of the user's code that a node comes from."""


def described(annotated: Annotated) -> str:
    """Return all that the planner sees of an annotated graph, its nodes' names included, as text.

    Raises:
        NoEntry: No text describes the graph: it has a subgraph, or a row that was registered at run time.
    """
    signs = " ".join(f"{name}:{sign_of_size(symbol, annotated.environment)}" for name, symbol in _symbols(annotated).items())
    return "\n".join([signs, *(_line(node, facts) for node, facts in annotated.facts.items())])


def _symbols(annotated: Annotated) -> dict[str, sympy.Symbol]:
    """Return the symbols in the sizes and numbers of a graph, by name."""
    sizes: set[Any] = {size for facts in annotated.facts.values() if (tensor := facts.tensor) is not None
                       for size in (*tensor.shape, *tensor.stride)}
    values = (node.meta.get("val") for node in annotated.facts)
    sizes.update(value.node.expr for value in values if isinstance(value, torch.SymInt))
    symbols = {symbol for size in sizes if isinstance(size, sympy.Expr) for symbol in size.free_symbols}
    return {str(symbol): symbol for symbol in sorted(symbols, key=str)}


def _line(node: Node, facts: Facts) -> str:
    """Return all that the planner sees of a node. Raises NoEntry."""
    if facts.row is not None and not shipped(str(node.target)):
        raise NoEntry(f"the row of {node.target} was registered at run time")
    tensor = facts.tensor
    layout = (tensor.shape, tensor.stride, tensor.dtype, tensor.device, tensor.hint) if tensor else None
    _check(node.args)
    _check(node.kwargs)
    return (f"{node.name} {node.op} {_target(node)} {node.args} {node.kwargs} {layout} "
            f"{facts.role} {facts.reason!r} {facts.forced} {facts.fallback!r} {facts.accuracy} {facts.alignment}")


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    if isinstance(target, (FunctionType, BuiltinFunctionType)):
        return f"{target.__module__}.{target.__qualname__}"
    raise NoEntry(f"{target} is more than its name")


def _check(value: Any) -> None:
    """Check that text describes an argument. Raises NoEntry."""
    if isinstance(value, Node) or type(value) in DESCRIBED_BY_TEXT:
        return
    if isinstance(value, (tuple, list)):
        for item in value:
            _check(item)
    elif isinstance(value, dict):
        _check(list(value.values()))
    else:
        raise NoEntry(f"an argument is a {type(value).__name__}")


# Kept on disk ---------------------------------------------------------------------------------------------------------


def get_or_make(annotated: Annotated, told: Sequence[object], config: Config, guard: Guard,
                make: Callable[[], Plan]) -> Plan:
    """Return the plan of a graph from the disk, or what ``make`` returns, which is kept there.

    Args:
        annotated: The graph; one of fewer than LEAST_NODES nodes is neither looked for nor kept.
        told: What the plan depends on beside the graph, each with a ``repr`` or ``str`` that says all of it.
        config: The options, which say whether there is a cache and how large it may be.
        guard: How far a failure of the disk reaches.
        make: Plans the graph.
    """
    def looked_up() -> tuple[Disk | None, str | None, Plan | None]:
        target = disk(config) if len(annotated.facts) >= LEAST_NODES else None
        key = None if target is None else key_of(annotated, told)
        return target, key, None if target is None or key is None else read(target, key, decode)

    def decode(entry: Entry) -> Plan:
        if entry.kind != KIND:
            raise ValueError(f"it is a {entry.kind} entry")
        return plan_from_json(entry.data, annotated, user_line)

    def keep(target: Disk, key: str, plan: Plan) -> None:
        with contextlib.suppress(NoEntry):
            target.write(Entry(KIND, key, plan_to_json(plan, user_line)))

    target, key, plan = guard.stage("plans on disk", looked_up, lambda: (None, None, None))
    if plan is not None:
        return plan
    plan = make()
    if target is not None and key is not None:
        guard.stage("plans on disk", lambda: keep(target, key, plan), lambda: None)
    return plan


def key_of(annotated: Annotated, told: Sequence[object]) -> str | None:
    """Return the key of a graph's plan; None for a graph that no key describes.

    Args:
        annotated: The graph.
        told: What the plan depends on beside the graph; the ``repr`` of each is in the key.
    """
    try:
        graph = described(annotated)
    except NoEntry as error:
        log.info("a plan is not kept: %s", error)
        return None
    return digest_of(KIND, graph, repr(tuple(told)), sources.digest(sources.PLANNERS), *versions())


# To JSON --------------------------------------------------------------------------------------------------------------


def plan_to_json(plan: Plan, line: Line) -> dict[str, Any]:
    """Convert a plan to what JSON can hold: nodes as their places in the graph.

    Args:
        plan: The plan, before anything was measured or moved to a family's kernel.
        line: Returns the user's line of a node.

    Raises:
        NoEntry: A size would not be read back as the same.
    """
    place = {node: i for i, node in enumerate(plan.annotated.graph.nodes)}
    symbols = _symbols(plan.annotated).__getitem__
    steps = [_region_to_json(step, place, line, symbols) if isinstance(step, Region) else place[step] for step in plan.steps]
    return {"steps": steps, "refusals": [list(asdict(refusal).values()) for refusal in plan.refusals],
            "unplaced": [[place[node], reason] for node, reason in plan.unplaced.items()]}


def _region_to_json(region: Region, place: Mapping[Node, int], line: Line, symbols: Symbols) -> dict[str, Any]:
    def places(nodes: Iterable[Node]) -> list[int]:
        return [place[node] for node in nodes]

    def by_place(dims: Mapping[Node, Dims]) -> list[Any]:
        return [[place[node], node_dims] for node, node_dims in dims.items()]

    decision, of_line = region.decision, {line(node): place[node] for node in reversed(region.nodes)}
    assert not decision.measured and decision.family is None, "what the planner left open"
    return {
        "name": region.name, "executor": region.executor, "nodes": places(region.nodes), "inputs": places(region.inputs),
        "outputs": places(region.outputs),
        "axes": [[size_to_json(axis.size, symbols), axis.reduced] for axis in region.axes],
        "dims": by_place(region.dims), "out_dims": by_place(region.out_dims),
        "reductions": sorted(places(region.reductions)),
        "copies": [[place[node], place[into]] for node, into in region.copies.items()],
        "bytes": region.bytes, "predicted_us": region.predicted_us, "reasons": region.reasons, "merges": region.merges,
        "origins": [of_line[text] for text in region.origins],
        "options": [_option_to_json(option) for option in decision.options], "margin": decision.margin,
        "unsure": decision.unsure, "kernel_class": decision.kernel_class, "error": decision.error,
        "eager": _option_to_json(decision.eager) if decision.eager else None,
        "nests": [[nest.axes, nest.stores] for nest in region.nests],
    }


def _option_to_json(option: Option) -> list[Any]:
    override = option.override
    return [option.executor, option.device_us, option.host_us, [override.constant, override.above] if override else None]


# From JSON ------------------------------------------------------------------------------------------------------------


def plan_from_json(plain: Mapping[str, Any], annotated: Annotated, line: Line) -> Plan:
    """Read the plan that :func:`plan_to_json` wrote, onto an equal graph.

    Args:
        plain: What was written.
        annotated: A graph with the key of the one that was planned: the same nodes in the same places.
        line: Returns the user's line of a node, for the regions' origins.
    """
    nodes = list(annotated.graph.nodes)
    symbols = _symbols(annotated).__getitem__
    steps = tuple(_region_from_json(s, nodes, line, symbols) if isinstance(s, dict) else nodes[s] for s in plain["steps"])
    refusals = tuple(Refusal(RefusalKind(kind), *fields) for kind, *fields in plain["refusals"])
    return Plan(annotated, steps, refusals, {nodes[place]: reason for place, reason in plain["unplaced"]})


def _region_from_json(plain: Mapping[str, Any], nodes: Sequence[Node], line: Line, symbols: Symbols) -> Region:
    def at(name: str) -> Iterator[Node]:
        return (nodes[place] for place in plain[name])

    def by_node(name: str) -> dict[Node, Dims]:
        return {nodes[place]: tuple(map(tuple, dims)) for place, dims in plain[name]}

    decision = Decision(tuple(map(_option_from_json, plain["options"])), plain["margin"], tuple(plain["unsure"]),
                        plain["kernel_class"], error=plain["error"],
                        eager=_option_from_json(plain["eager"]) if plain["eager"] else None)
    return Region(
        plain["name"], plain["executor"], tuple(at("nodes")), tuple(at("inputs")), tuple(at("outputs")),
        tuple(Axis(size_from_json(size, symbols), reduced) for size, reduced in plain["axes"]),
        by_node("dims"), by_node("out_dims"), frozenset(at("reductions")),
        {nodes[place]: nodes[into] for place, into in plain["copies"]}, plain["bytes"], plain["predicted_us"],
        tuple(plain["reasons"]), decision, tuple(map(line, at("origins"))), tuple(map(tuple, plain["merges"])),
        tuple(Nest(tuple(axes), tuple(stores)) for axes, stores in plain["nests"]))


def _option_from_json(fields: Sequence[Any]) -> Option:
    executor, device_us, host_us, override = fields
    return Option(executor, device_us, host_us, Override(*override) if override else None)
