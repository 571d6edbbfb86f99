"""Prices of regions while they grow: per executor that can take a region, and the cheapest of them.

What counts is what a region adds to the time that the user waits for (``cost.objective``): beside work that keeps the
device busy that is its device time, in a graph that the host bounds its host time.

What a kernel does is predicted before there is one: its class and how many programs it has are those that
``lowering/triton/schedule.py`` is going to choose, as far as can be told from axes.

Worked example: a softmax over ``bfloat16[8192, 4096]`` among matrix products costs 40 µs on Triton and 38 µs on nvFuser;
over ``[8, 64]``, with nothing beside it, 6 µs and 11 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import calls_prediction
from dynafuse.cost.model import Choice, Prediction, Work, choose, objective, predict
from dynafuse.ir import MAX_TENSORS, Refusal, RefusalKind
from dynafuse.ops import Kind
from dynafuse.partition import legality
from dynafuse.partition.executors import Executors
from dynafuse.partition.iteration_space import Read, Spaces, tensor_arguments
from dynafuse.partition.legality import Shape, classify, members, product
from dynafuse.partition.order import Dependencies

COLUMN_PROGRAMS = 256  # columns that keep as much of a device busy as one row does
NOTHING = Prediction()
LOAD_FLOPS = 8.0  # what could be computed while an element is loaded again: 0.2 ps for averages of 3 × 3 elements on an H200
REGISTERS = 208 << 10  # bytes that a row + column kernel may hold: of a processor's 256 KiB, less what addresses take


@dataclass(frozen=True)
class Priced:
    """A region's iteration space, its work, what it costs on each executor that can take it, and the cheapest of them.

    ``us`` is what the cheapest adds to the time that the user waits for.
    """

    shape: Shape
    work: Work
    predictions: Mapping[str, Prediction]
    choice: Choice
    us: float

    @property
    def prediction(self) -> Prediction:
        """What the region costs on the executor that it is given to."""
        return self.predictions[self.choice.executor]


class Pricing:
    """The prices of a graph's regions on a device. ``outputs`` tells which of some nodes are stored.

    ``total`` is what the graph's calls and the regions of the moment cost together. Prices are what a region adds to it,
    so whoever adds or replaces a region says so.
    """

    def __init__(self, spaces: Spaces, dependencies: Dependencies, device: Device, executors: Executors, captured: bool,
                 outputs: Callable[[Sequence[Node]], frozenset[Node]]) -> None:
        self.spaces = spaces
        self.dependencies = dependencies
        self.device = device
        self.executors = executors
        self.captured = captured
        self.outputs = outputs
        self.total = calls_prediction(spaces.facts, device)

    def replace(self, before: Prediction, after: Prediction) -> None:
        """Price from now on beside ``after`` instead of ``before``."""
        self.total = self.total.less(before) + after

    def adds(self, prediction: Prediction, rest: Prediction) -> float:
        """Microseconds that the user waits longer if ``prediction`` comes to ``rest``."""
        return objective(rest + prediction, self.device, self.captured) - objective(rest, self.device, self.captured)

    def price(self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node],
              instead_of: Prediction = NOTHING) -> Priced | Refusal:
        """The price of one kernel that computes ``nodes``, in place of a part of ``total``.

        A refusal where no executor has one.
        """
        outputs = self.outputs(nodes)
        sources = {read.source for read in reads} - set(nodes)
        tensors = len(sources) + len(outputs)
        if tensors > MAX_TENSORS and len(nodes) > 1:
            return Refusal(RefusalKind.TOO_MANY_TENSORS, nodes[0].name, nodes[-1].name, f"{tensors}, at most {MAX_TENSORS}")
        found = members(self.spaces, nodes, inlined, outputs)
        shape = classify(self.spaces, found)
        if isinstance(shape, Refusal):
            return shape
        if shape.kind == "rowcol" and (held := self._held(shape, found, sources)) > REGISTERS:
            return Refusal(RefusalKind.ROWS_TOO_LONG, nodes[0].name, nodes[-1].name,
                           f"{held >> 10} KiB to hold, at most {REGISTERS >> 10}")
        closure = self.dependencies.closure(nodes)
        names = self.executors.of(closure)
        if not names:
            reasons = "; ".join(f"{name}: {self.executors.reason(name, closure)}" for name in self.executors.enabled)
            return Refusal(RefusalKind.NO_EXECUTOR, nodes[0].name, nodes[-1].name, reasons)
        work = self._work(shape, found, sources, outputs, self._moved(reads, sources, outputs),
                          self._flops(shape, found, closure))
        work = replace(work, atomics=sum(self.spaces.point_count(node) for node in nodes if self.spaces.adds(node)))
        predictions = {name: predict(work, self.device, name) for name in names}
        rest = self.total.less(instead_of)
        choice = choose(predictions, self.device, self.captured, rest)
        return Priced(shape, work, predictions, choice, self.adds(predictions[choice.executor], rest))

    # ------------------------------------------------------------------ what a kernel does

    def _held(self, shape: Shape, found: Sequence[legality.Member], sources: set[Node]) -> int:
        """Bytes that a row + column kernel holds: a row of what it reads, and a running state per column reduction."""
        points = product(shape.axes)
        read = sum(t.dtype.itemsize for t in map(self.spaces.tensor, sources) if t.hint >= points)
        running = sum(max(4, self.spaces.tensor(m.node).dtype.itemsize) for m in found if m.reduced == shape.columns)
        return (1 << (shape.length - 1).bit_length()) * (read + running)

    def _moved(self, reads: Sequence[Read], sources: set[Node], outputs: Iterable[Node]) -> int:
        """Bytes: each source once, but of one that is only picked from no more than is loaded; the outputs."""
        loaded = dict.fromkeys(sources, 0)
        for read in reads:
            if read.source in sources:
                tensor = self.spaces.tensor(read.source)
                picked = min(tensor.bytes, read.elements * tensor.dtype.itemsize)
                loaded[read.source] = max(loaded[read.source], tensor.bytes if read.dims is not None else picked)
        return sum(loaded.values()) + sum(self._written(n) for n in outputs)

    def _written(self, node: Node) -> int:
        """Bytes of an output: of what is scattered into, no more than there are values."""
        tensor = self.spaces.tensor(node)
        return min(tensor.bytes, self.spaces.point_count(node) * tensor.dtype.itemsize) if self.spaces.is_scatter(node) \
            else tensor.bytes

    def _flops(self, shape: Shape, found: Sequence[legality.Member], closure: Sequence[Node]) -> float:
        """Arithmetic: all is computed wherever it is read, but what is known once per row; and loads again from a cache."""
        points = product(shape.axes)
        per_row = {m.node for m in found if shape.reduced and not m.reduced and not m.out & shape.reduced}
        total = 0.0
        for node, times in self._evaluations(points, found, closure).items():
            row = self.spaces.facts[node].row
            times = shape.rows if node in per_row else times
            total += self._times_reach(node) * (row.flops if row else 1.0) * times
            loads = (self.spaces.reach(node, argument) for argument in tensor_arguments(node) if argument not in closure)
            total += LOAD_FLOPS * sum(max(times * reach - points, 0.0) for reach in loads)
        return total

    def _times_reach(self, node: Node) -> int:
        """How many elements a node takes in for one of its own, from the operand of which it takes the most."""
        return max((self.spaces.reach(node, argument) for argument in tensor_arguments(node)), default=1)

    def _evaluations(self, points: int, found: Sequence[legality.Member], closure: Sequence[Node]) -> Mapping[Node, float]:
        """How often each node is computed: what runs along the axes at all points, any other node wherever it is read."""
        evaluations = dict.fromkeys(closure, 0.0) | {member.node: float(points) for member in found}
        for node in reversed(closure):
            for argument in tensor_arguments(node):
                if argument in evaluations:
                    evaluations[argument] = max(evaluations[argument], self._reads(node, argument, evaluations[node]))
        return evaluations

    def _reads(self, reader: Node, argument: Node, times: float) -> float:
        """How often an operand is read by a node that is computed so many times; one that is a part of it, in its share."""
        row, reach = self.spaces.facts[reader].row, self.spaces.reach(reader, argument)
        if row is None or row.kind is not Kind.INDEX or reach != 1:
            return times * reach
        return times * min(1.0, self.spaces.tensor(argument).hint / max(self.spaces.tensor(reader).hint, 1))

    def _work(self, shape: Shape, found: Sequence[legality.Member], sources: set[Node], outputs: frozenset[Node], moved: int,
              flops: float) -> Work:
        largest = max((self.spaces.tensor(n) for n in (*sources, *outputs)), key=lambda t: t.bytes, default=None)
        width, count = largest.dtype.itemsize if largest else 2, len(outputs)
        if shape.kind == "pointwise":
            return Work(moved, flops, max(product(shape.axes) // 256, 1), "pointwise", 1, width, 0, count)
        if shape.kind == "rowcol":
            return Work(moved, flops, shape.rows, "rowcol", 2, width, shape.length, count)
        inner = legality._innermost(self.spaces, found, shape.reduced)
        programs = shape.rows if inner else max(shape.rows // COLUMN_PROGRAMS, 1)
        if programs < 2 * self.device.processors and shape.length > 1024 and self._splits(shape, found):
            return Work(moved, flops, programs * max(shape.length // 1024, 1), "split", 2, width, shape.length, count)
        return Work(moved, flops, programs, "row" if inner else "column", 1, width, shape.length, count)

    def _splits(self, shape: Shape, found: Sequence[legality.Member]) -> bool:
        """Whether rows can be split over programs: then nothing may need a complete row before the end."""
        reductions = frozenset(m.node for m in found if m.reduced)
        late = legality.after(self.spaces, found, reductions)
        return not any(m.node in late and (m.reduced or m.out & shape.reduced) for m in found)
