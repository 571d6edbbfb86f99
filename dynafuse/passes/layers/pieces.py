"""Takes a Dynamo graph apart: what stands before repeated layers, one layer of each kind, and what comes after.

A piece is a function of the values that it takes from outside to those that are used outside, and is compiled on its own, as
the parts of a graph around a graph break are. The graph that is left only calls them. Mutated buffers, aliases, random
numbers and saved tensors are thus autograd's and AOTAutograd's own business.

Worked example: ``take_apart(module, labels, least_saved=100)`` of 32 equal layers has three pieces; the second is called 31
times, from a cut inside the first layer to the same cut inside the last one.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dynafuse.cost.device import Device
from dynafuse.fx import extract
from dynafuse.passes.layers.cuts import GRAD_MODE, Cut, Program, crosses, cuts, is_static, value_of
from dynafuse.passes.layers.price import Price, price
from dynafuse.passes.layers.repeats import Run, runs

log = logging.getLogger(__name__)

LOGS = frozenset({torch._C._log_api_usage_once})
"""Calls without a value that nothing depends on, wherever they stand."""

CUTS = 4
"""Cuts that are tried before a run is left as it is."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Calls that are compiled together. ``sites`` has, per place where they stand, the values that they take there."""

    calls: tuple[Node, ...]
    sites: tuple[tuple[Node, ...], ...]
    outputs: tuple[int, ...]  # positions of the calls whose values are used outside
    lost_bytes: int = 0  # per call, for being cut off
    price: Price | None = None

    @property
    def strides(self) -> tuple[tuple[int, ...] | None, ...]:
        """How the outputs lie in memory; None for what is no strided tensor."""
        return tuple(map(_strides, (value_of(self.calls[i]) for i in self.outputs)))

    def module(self, root: GraphModule) -> GraphModule:
        """A module of its own, which takes the values of a site and returns a tuple."""
        module, _ = extract(root, self.calls, self.sites[0], [self.calls[i] for i in self.outputs])
        return module

    def inputs(self, root: GraphModule, given: Sequence[Any], fake_mode: FakeTensorMode) -> list[Any]:
        """What the first site takes, to compile with: the graph's own inputs as ``given``, the others as fake tensors."""
        placeholders = dict(zip((node for node in root.graph.nodes if node.op == "placeholder"), given, strict=True))
        return [placeholders[node] if node in placeholders else _fake(root, node, fake_mode) for node in self.sites[0]]


@dataclass(frozen=True)
class Pieces:
    """A graph in pieces: for each stretch of calls, in order, the piece and which of its sites it is."""

    root: GraphModule
    program: Program
    stretches: tuple[tuple[int, int, Piece, int], ...]  # start, end, piece, site

    @property
    def distinct(self) -> list[Piece]:
        """Each piece once, in order."""
        return list(dict.fromkeys(piece for _, _, piece, _ in self.stretches))

    def __str__(self) -> str:
        sites = ", ".join(f"{len(p.calls)} calls {len(p.sites)} times" + (f" ({p.price})" if p.price else "")
                          for p in self.distinct)
        lost = sum(p.lost_bytes * len(p.sites) for p in self.distinct)
        return f"{sites}; cuts cost {lost / 1e6:.3g} MB a step"

    def assemble(self, functions: Mapping[Piece, Callable[..., Any]]) -> Callable[..., Any]:
        """The function that the graph was, as calls of compiled pieces."""
        graph, now = Graph(), dict[Node, Node]()
        calls = {piece: _laid_out(function, piece.strides) for piece, function in functions.items()}
        for node in self.root.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                now[node] = graph.node_copy(node)
        for start, _, piece, site in self.stretches:
            call = graph.call_function(calls[piece], tuple(now[node] for node in piece.sites[site]))
            for position, i in enumerate(piece.outputs):
                now[self.program.calls[start + i]] = graph.call_function(operator.getitem, (call, position))
        result = next(node for node in self.root.graph.nodes if node.op == "output")
        graph.output(map_arg(result.args[0], lambda node: now[node]))
        graph.eliminate_dead_code()
        assembled: Callable[..., Any] = GraphModule(self.root, graph).forward
        return assembled


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _laid_out(function: Callable[..., Any], strides: Sequence[tuple[int, ...] | None]) -> Callable[..., Any]:
    """A function whose results have the strides that Dynamo knows, for which what takes them is compiled.

    Torch's decompositions do not always keep them: a ``cat`` of one tensor and an empty one has the strides of the one.
    """
    def piece(*args: Any) -> list[Any]:
        results = function(*args)
        return [result if stride is None or result.stride() == stride else _restrided(result, stride)
                for result, stride in zip(results, strides, strict=True)]

    return piece


def _restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor in another layout; itself if only dimensions of one element differ, whose strides nobody uses."""
    if all(size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _fake(root: GraphModule, node: Node, fake_mode: FakeTensorMode) -> torch.Tensor:
    """A constant of a module, or a fake tensor that looks as a call's value does."""
    if node.op == "get_attr":
        constant: torch.Tensor = operator.attrgetter(str(node.target))(root)
        return constant
    value = value_of(node)
    with fake_mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)


def take_apart(module: GraphModule, labels: Mapping[Node, Hashable], least_saved: int,
               device: Device | None = None) -> Pieces | None:
    """The pieces of a graph in which at least ``least_saved`` calls stand again; None if there is no such repetition.

    ``labels`` say of nodes what else has to be the same in equal layers, such as executors that they are forced to. With a
    ``device`` layers stay where they are if being functions of their own costs too much there.
    """
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op in ("call_function", "call_method", "call_module")]
    program = Program(calls, labels)
    if len(calls) <= least_saved or not _is_understood(nodes):
        return None
    candidates = (_layers(program, run, least_saved, device) for run in runs(program.letters, least_saved))
    layers = [found for found in candidates if found is not None]
    return Pieces(module, program, tuple(_stretches(program, layers))) if layers else None


def _is_understood(nodes: Sequence[Node]) -> bool:
    """Whether all inputs are tensors, all sizes static, those that data tell too, and calls known that have no value."""
    inputs = (node for node in nodes if node.op == "placeholder")
    calls = (node for node in nodes if node.op.startswith("call"))
    silent = (node for node in calls if value_of(node) is None and not node.users)
    known = (node.target is GRAD_MODE or node.target in LOGS or _leaves(node) for node in silent)
    return all(map(crosses, inputs)) and all(map(is_static, nodes)) and all(known)


def _leaves(node: Node) -> bool:
    """Whether a call without a value is the end of a context: its beginning is a value, which no cut can part from it."""
    return bool(node.all_input_nodes)


@dataclass(frozen=True)
class _Layers:
    """Equal windows in a row."""

    start: int
    piece: Piece = field(repr=False)

    @property
    def end(self) -> int:
        return self.start + len(self.piece.calls) * len(self.piece.sites)


def _layers(program: Program, run: Run, least_saved: int, device: Device | None) -> _Layers | None:
    """The layers of a run at the best cut that keeps enough of them; None if there is none, or if that costs too much."""
    for cut in cuts(program, run)[:CUTS]:
        found = _windows(program, run, cut)
        if found is not None and (len(found.piece.sites) - 1) * run.period >= least_saved:
            return found if device is None else _priced(program, found, device)
    return None


def _priced(program: Program, layers: _Layers, device: Device) -> _Layers | None:
    """Layers with their price; None if it is too high."""
    piece = layers.piece
    crossing = (*piece.sites[0], *(piece.calls[i] for i in piece.outputs))
    found = price(program, piece.calls, crossing, piece.lost_bytes, device)
    if not found.pays:
        log.info("%d layers of %d calls stay in one graph: %s", len(piece.sites), len(piece.calls), found)
        return None
    return _Layers(layers.start, replace(piece, price=found))


def _windows(program: Program, run: Run, cut: Cut) -> _Layers | None:
    """The longest row of windows that compute the same from what they take, between cuts that are possible."""
    starts = range(run.start + cut.offset, run.end - run.period + 1, run.period)
    forms = [_form(program, start, start + run.period) for start in starts]
    best: tuple[int, int] = (0, 0)
    begin = 0
    for i in range(1, len(forms) + 1):
        if i == len(forms) or forms[i][0] != forms[begin][0]:
            best = max(best, (i - begin, -begin))
            begin = i
    count, first = best[0], -best[1]
    if count < 2:
        return None
    inside = [_used_outside(program, starts[i], starts[i] + run.period) for i in range(first, first + count)]
    outputs = tuple(sorted(set().union(*inside)))
    piece = Piece(tuple(program.calls[starts[first]:starts[first] + run.period]),
                  tuple(tuple(forms[i][1]) for i in range(first, first + count)), outputs, cut.lost_bytes)
    layers = _Layers(starts[first], piece)
    return layers if _may_stand_alone(program, layers) else None


def _may_stand_alone(program: Program, layers: _Layers) -> bool:
    """Whether everything that enters or leaves a window can, and what lies before and after can be compiled as well."""
    step = len(layers.piece.calls)
    boundaries = range(layers.start, layers.end + 1, step)
    taken = (node for site in layers.piece.sites for node in site)
    left = (program.calls[start + i] for start in boundaries[:-1] for i in layers.piece.outputs)
    outer = (node for node in program.calls[:layers.start] if program.last_use(node) >= layers.end)
    return (all(program.grad_mode_is_outer[b] for b in boundaries) and all(map(crosses, taken)) and all(map(crosses, left))
            and all(map(crosses, outer)))


def _form(program: Program, start: int, end: int) -> tuple[Hashable, dict[Node, int]]:
    """What a window computes, with what it takes from outside numbered in order of first use; and what that is."""
    taken: dict[Node, int] = {}
    inside = {node: i for i, node in enumerate(program.calls[start:end])}

    def place(operand: Node) -> Hashable:
        if operand in inside:
            return ("inside", inside[operand])
        if value_of(operand) is None:
            return ("submodule", operand.name)
        return ("outside", taken.setdefault(operand, len(taken)))

    form = []
    for position in range(start, end):  # letters have everything but which values the operands are
        node, operands = program.calls[position], list[Node]()
        map_arg((node.args, node.kwargs), operands.append)  # slices may have some
        form.append((program.letters[position], *map(place, operands)))
    return tuple(form), taken


def _used_outside(program: Program, start: int, end: int) -> set[int]:
    """Positions in a window of calls whose values are used after it."""
    return {i - start for i in range(start, end) if program.last_use(program.calls[i]) >= end}


def _stretches(program: Program, layers: Sequence[_Layers]) -> list[tuple[int, int, Piece, int]]:
    """All calls in order: windows, and what lies between them as pieces of one site each."""
    found: list[tuple[int, int, Piece, int]] = []
    position = 0
    for group in layers:
        found += _between(program, position, group.start)
        step = len(group.piece.calls)
        starts = range(group.start, group.end, step)
        found += [(start, start + step, group.piece, i) for i, start in enumerate(starts)]
        position = group.end
    return found + _between(program, position, len(program.calls))


def _between(program: Program, start: int, end: int) -> list[tuple[int, int, Piece, int]]:
    if start == end:
        return []
    _, taken = _form(program, start, end)
    outputs = tuple(sorted(_used_outside(program, start, end)))
    tensors = tuple(node for node in taken if value_of(node) is not None)
    return [(start, end, Piece(tuple(program.calls[start:end]), (tensors,), outputs), 0)]
