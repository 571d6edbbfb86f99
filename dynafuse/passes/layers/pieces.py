"""Split of a Dynamo graph into pieces: what precedes repeated layers, one layer of each kind, and what follows.

A piece is a function from the values that it reads from outside to those that are used outside. It is compiled on its own,
as the parts of a graph around a graph break are, and the remaining graph only calls the pieces. So mutated buffers, aliases,
random numbers and saved tensors are left to autograd and AOTAutograd.

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
"""Calls without a value that may be in any piece, because nothing depends on them."""

CUTS = 4
"""How many cuts of a run are tried before it is left whole."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Calls that are compiled together. ``sites`` has the values that they read at each of their occurrences."""

    calls: tuple[Node, ...]
    sites: tuple[tuple[Node, ...], ...]
    outputs: tuple[int, ...]  # positions of the calls whose values are used outside
    lost_bytes: int = 0  # per call of the piece, because of its cuts
    price: Price | None = None

    @property
    def strides(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return the strides of the outputs; None for what is no strided tensor."""
        return tuple(map(_strides, (value_of(self.calls[i]) for i in self.outputs)))

    def module(self, root: GraphModule) -> GraphModule:
        """Return a module of the calls, which takes the values of a site and returns a tuple."""
        module, _ = extract(root, self.calls, self.sites[0], [self.calls[i] for i in self.outputs])
        return module

    def inputs(self, root: GraphModule, given: Sequence[Any], fake_mode: FakeTensorMode) -> list[Any]:
        """Return the values of the first site, to compile with.

        Args:
            root: The graph that the piece is of.
            given: Examples of the graph's inputs, in order; the piece takes those that it reads as they are.
            fake_mode: In which all other values are made, as fake tensors.
        """
        placeholders = dict(zip((node for node in root.graph.nodes if node.op == "placeholder"), given, strict=True))
        return [placeholders[node] if node in placeholders else _fake(root, node, fake_mode) for node in self.sites[0]]


@dataclass(frozen=True)
class Pieces:
    """A graph as stretches of calls in order, each with its piece and the index of its site."""

    root: GraphModule
    program: Program
    stretches: tuple[tuple[int, int, Piece, int], ...]  # start, end, piece, site

    @property
    def distinct(self) -> list[Piece]:
        """Return the pieces in order, each once."""
        return list(dict.fromkeys(piece for _, _, piece, _ in self.stretches))

    def __str__(self) -> str:
        sites = ", ".join(f"{len(p.calls)} calls {len(p.sites)} times" + (f" ({p.price})" if p.price else "")
                          for p in self.distinct)
        lost = sum(p.lost_bytes * len(p.sites) for p in self.distinct)
        return f"{sites}; cuts cost {lost / 1e6:.3g} MB a step"

    def assemble(self, functions: Mapping[Piece, Callable[..., Any]]) -> Callable[..., Any]:
        """Return the function of the whole graph, from the compiled functions of its pieces."""
        graph, copies = Graph(), dict[Node, Node]()
        calls = {piece: _with_strides(function, piece.strides) for piece, function in functions.items()}
        for node in self.root.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                copies[node] = graph.node_copy(node)
        for start, _, piece, site in self.stretches:
            call = graph.call_function(calls[piece], tuple(copies[node] for node in piece.sites[site]))
            for position, i in enumerate(piece.outputs):
                copies[self.program.calls[start + i]] = graph.call_function(operator.getitem, (call, position))
        result = next(node for node in self.root.graph.nodes if node.op == "output")
        graph.output(map_arg(result.args[0], lambda node: copies[node]))
        graph.eliminate_dead_code()
        assembled: Callable[..., Any] = GraphModule(self.root, graph).forward
        return assembled


def _strides(value: Any) -> tuple[int, ...] | None:
    return value.stride() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _with_strides(function: Callable[..., Any], strides: Sequence[tuple[int, ...] | None]) -> Callable[..., Any]:
    """Return the function with its results in the strides that Dynamo has traced: other pieces are compiled for these.

    Torch's decompositions do not always keep them: a ``cat`` with an empty tensor has the strides of the other one.
    """
    def piece(*args: Any) -> list[Any]:
        results = function(*args)
        return [result if stride is None or result.stride() == stride else _restrided(result, stride)
                for result, stride in zip(results, strides, strict=True)]

    return piece


def _restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy a tensor to other strides; return it as it is if only strides of dimensions of one element differ."""
    if all(size == 1 or old == new for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _fake(root: GraphModule, node: Node, fake_mode: FakeTensorMode) -> torch.Tensor:
    """Return a constant of a module, or a new fake tensor with the layout of a call's value."""
    if node.op == "get_attr":
        constant: torch.Tensor = operator.attrgetter(str(node.target))(root)
        return constant
    value = value_of(node)
    with fake_mode:
        tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return tensor.requires_grad_(value.requires_grad)


def take_apart(module: GraphModule, labels: Mapping[Node, Hashable], least_saved: int,
               device: Device | None = None) -> Pieces | None:
    """Split a graph into pieces; return None if it does not repeat enough calls.

    Args:
        module: The Dynamo graph.
        labels: What else has to be equal in equal layers, by node, such as the executors that nodes are forced to.
        least_saved: The least number of calls that have to repeat earlier ones.
        device: Where the graph runs; layers are left in place if being functions of their own costs too much there.
    """
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op in ("call_function", "call_method", "call_module")]
    program = Program(calls, labels)
    if len(calls) <= least_saved or not _is_understood(nodes):
        return None
    candidates = (_layers(program, run, least_saved, device) for run in runs(program.letters, least_saved))
    layers = [candidate for candidate in candidates if candidate is not None]
    return Pieces(module, program, tuple(_stretches(program, layers))) if layers else None


def _is_understood(nodes: Sequence[Node]) -> bool:
    """Return whether all inputs are tensors, all sizes are static, and all calls without a value are known."""
    inputs = (node for node in nodes if node.op == "placeholder")
    calls = (node for node in nodes if node.op.startswith("call"))
    without_value = (node for node in calls if value_of(node) is None and not node.users)
    known = (node.target is GRAD_MODE or node.target in LOGS or _exits_context(node) for node in without_value)
    return all(map(crosses, inputs)) and all(map(is_static, nodes)) and all(known)


def _exits_context(node: Node) -> bool:
    """Return whether a call without a value ends a context: it reads what the beginning returned, so no cut parts them."""
    return bool(node.all_input_nodes)


@dataclass(frozen=True)
class _Layers:
    """Equal windows, one directly behind another."""

    start: int
    piece: Piece = field(repr=False)

    @property
    def end(self) -> int:
        return self.start + len(self.piece.calls) * len(self.piece.sites)


def _layers(program: Program, run: Run, least_saved: int, device: Device | None) -> _Layers | None:
    """Return the layers of a run at the best cut that keeps enough of them; None if there is none or it costs too much."""
    for cut in cuts(program, run)[:CUTS]:
        layers = _windows(program, run, cut)
        if layers is not None and (len(layers.piece.sites) - 1) * run.period >= least_saved:
            return layers if device is None else _priced(program, layers, device)
    return None


def _priced(program: Program, layers: _Layers, device: Device) -> _Layers | None:
    """Return the layers with their price; None if it is too high."""
    piece = layers.piece
    crossing = (*piece.sites[0], *(piece.calls[i] for i in piece.outputs))
    predicted = price(program, piece.calls, crossing, piece.lost_bytes, device)
    if not predicted.pays:
        log.info("%d layers of %d calls stay in one graph: %s", len(piece.sites), len(piece.calls), predicted)
        return None
    return _Layers(layers.start, replace(piece, price=predicted))


def _windows(program: Program, run: Run, cut: Cut) -> _Layers | None:
    """Return the longest row of windows that compute the same from what they read; None if it cannot be cut out."""
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
    used = [_used_outside(program, starts[i], starts[i] + run.period) for i in range(first, first + count)]
    outputs = tuple(sorted(set().union(*used)))
    piece = Piece(tuple(program.calls[starts[first]:starts[first] + run.period]),
                  tuple(tuple(forms[i][1]) for i in range(first, first + count)), outputs, cut.lost_bytes)
    layers = _Layers(starts[first], piece)
    return layers if _may_stand_alone(program, layers) else None


def _may_stand_alone(program: Program, layers: _Layers) -> bool:
    """Return whether pieces can pass on all values that enter, leave or bypass the windows, with gradients as outside."""
    step = len(layers.piece.calls)
    boundaries = range(layers.start, layers.end + 1, step)
    inputs = (node for site in layers.piece.sites for node in site)
    outputs = (program.calls[start + i] for start in boundaries[:-1] for i in layers.piece.outputs)
    bypassing = (node for node in program.calls[:layers.start] if program.last_use(node) >= layers.end)
    return (all(program.grad_mode_is_outer[b] for b in boundaries) and all(map(crosses, inputs))
            and all(map(crosses, outputs)) and all(map(crosses, bypassing)))


def _form(program: Program, start: int, end: int) -> tuple[Hashable, dict[Node, int]]:
    """Return a key of what a window computes, and the values that it reads from outside, numbered in order of first use."""
    inputs: dict[Node, int] = {}
    inside = {node: i for i, node in enumerate(program.calls[start:end])}

    def place(operand: Node) -> Hashable:
        if operand in inside:
            return ("inside", inside[operand])
        if value_of(operand) is None:
            return ("submodule", operand.name)
        return ("outside", inputs.setdefault(operand, len(inputs)))

    form = []
    for position in range(start, end):  # a letter has all of a call but which values its operands are
        node, operands = program.calls[position], list[Node]()
        map_arg((node.args, node.kwargs), operands.append)  # also those inside slices
        form.append((program.letters[position], *map(place, operands)))
    return tuple(form), inputs


def _used_outside(program: Program, start: int, end: int) -> set[int]:
    """Return the positions in a window of the calls whose values are used behind it."""
    return {i - start for i in range(start, end) if program.last_use(program.calls[i]) >= end}


def _stretches(program: Program, layers: Sequence[_Layers]) -> list[tuple[int, int, Piece, int]]:
    """Return all calls as stretches in order: the windows, and what is between them as pieces of one site each."""
    stretches: list[tuple[int, int, Piece, int]] = []
    position = 0
    for group in layers:
        stretches += _between(program, position, group.start)
        step = len(group.piece.calls)
        starts = range(group.start, group.end, step)
        stretches += [(start, start + step, group.piece, i) for i, start in enumerate(starts)]
        position = group.end
    return stretches + _between(program, position, len(program.calls))


def _between(program: Program, start: int, end: int) -> list[tuple[int, int, Piece, int]]:
    if start == end:
        return []
    _, inputs = _form(program, start, end)
    outputs = tuple(sorted(_used_outside(program, start, end)))
    tensors = tuple(node for node in inputs if value_of(node) is not None)
    return [(start, end, Piece(tuple(program.calls[start:end]), (tensors,), outputs), 0)]
