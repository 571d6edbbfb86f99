"""Prices of regions while they grow: per executor that can take a region, and the cheapest of them.

What counts is what a region adds to the time that the user waits for (``cost.objective``): beside work that keeps the
device busy that is its device time, in a graph that the host bounds its host time.

What a kernel does is predicted by ``work.py``, before there is one.

Worked example: a softmax over ``bfloat16[8192, 4096]`` among matrix products costs 40 µs on Triton and 38 µs on nvFuser;
over ``[8, 64]``, with nothing beside it, 6 µs and 11 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch._ops import OpOverload
from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import call_prediction, calls_prediction, torch_prediction
from dynafuse.cost.model import NOTHING, Choice, Prediction, Work, choose, objective, predict, total
from dynafuse.ir import MAX_TENSORS, Refusal, RefusalKind, Role
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.partition.code_size import MOST_EXPRESSIONS, ONCE, CodeSize
from dynafuse.partition.executors import Executors
from dynafuse.partition.iteration_space import Read, Spaces
from dynafuse.partition.kernel_class import LONG_BESIDE_COLUMNS
from dynafuse.partition.legality import Member, Shape, classify, members_of
from dynafuse.partition.order import Dependencies
from dynafuse.partition.work import Asked, rows_held, torch_work, work_of

OFF_US = 1.0  # by which predictions may be off however small they are: about what a kernel takes besides its work


@dataclass(frozen=True)
class Priced:
    """A region's iteration space, its work, what it costs on each executor that can take it, and the cheapest of them.

    ``us`` is what the cheapest adds to the time that the user waits for. ``eager`` is what the region's ops cost one by
    one, ``is_eager`` whether that is less even if both predictions are off: then they run so. The kernel reads and writes
    ``tensors``.
    """

    shape: Shape
    work: Work
    predictions: Mapping[str, Prediction]
    choice: Choice
    us: float
    eager: Prediction
    tensors: int
    is_eager: bool = False

    @property
    def fused(self) -> Prediction:
        """Return what the region costs on the executor that fuses it."""
        return self.predictions[self.choice.executor]

    @property
    def prediction(self) -> Prediction:
        """Return what the region costs."""
        return self.eager if self.is_eager else self.fused


@dataclass(frozen=True)
class Kernel:
    """What a kernel does, with the nodes it computes, those that executors ask about, and how many tensors it takes."""

    shape: Shape
    work: Work
    closure: Collection[Node]
    executors: Sequence[str]
    tensors: int


Kernels: TypeAlias = dict[tuple[Any, ...], Kernel | Refusal]
"""Kernels by their nodes, and how these came together."""


class Pricing:
    """The prices of a graph's regions on a device. ``outputs`` tells which of some nodes are stored.

    ``total`` is what the graph's calls and the regions of the moment cost together, and what is assumed to run beside them.
    Prices are what a region adds to it, so whoever adds or replaces a region says so.
    """

    def __init__(self, spaces: Spaces, dependencies: Dependencies, device: Device, executors: Executors, captured: bool,
                 outputs: Callable[[Sequence[Node]], frozenset[Node]], one_pass: bool = True,
                 beside: Prediction = NOTHING, kernels: Kernels | None = None) -> None:
        self.spaces = spaces
        self.dependencies = dependencies
        self.device = device
        self.executors = executors
        self.captured = captured
        self.outputs = outputs
        self.one_pass = one_pass  # whether long rows may be reduced in the kernel that reduces columns
        self.code = CodeSize(spaces)
        self.beside = beside
        self.kernels: Kernels = {} if kernels is None else kernels
        self.total = calls_prediction(spaces.facts, device) + beside
        self._calls: dict[Node, Prediction] = {}
        self._predictions: dict[tuple[str, Work], Prediction] = {}  # of layers that repeat themselves: equal work
        self._torchs: dict[Work, Prediction] = {}

    def replace(self, before: Prediction, after: Prediction) -> None:
        """Price from now on beside ``after`` instead of ``before``.

        Args:
            before: What has counted so far.
            after: What counts from now on.
        """
        self.total = self.total.less(before) + after

    @property
    def now(self) -> Prediction:
        """Return what the graph's calls and the regions of the moment cost together."""
        return self.total.less(self.beside)

    @property
    def us(self) -> float:
        """Return the microseconds that the user waits for that."""
        return objective(self.now, self.device, self.captured)

    def adds(self, prediction: Prediction, rest: Prediction) -> float:
        """Return the microseconds that the user waits longer if ``prediction`` comes to ``rest``."""
        return objective(rest + prediction, self.device, self.captured) - objective(rest, self.device, self.captured)

    def price(self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node],
              instead_of: Prediction = NOTHING, merges: Hashable = None) -> Priced | Refusal:
        """Price one kernel that computes some nodes, in place of a part of ``total``.

        Args:
            nodes: The region's nodes, operands first.
            reads: What they read, and where.
            inlined: Those of the nodes that are computed at other indices.
            instead_of: The part of ``total`` that the kernel replaces.
            merges: How the nodes came together, if the kernel may be one that is known, of other axes that are alike.

        Returns:
            The price; a refusal where no executor has such a kernel.
        """
        if merges is None:
            kernel = self._kernel(nodes, reads, inlined)
        else:
            key = tuple(nodes), inlined, merges, self.one_pass
            kernel = self.kernels.get(key) or self.kernels.setdefault(key, self._kernel(nodes, reads, inlined))
        if isinstance(kernel, Refusal):
            return kernel
        predictions = {name: self._predict(name, kernel.work) for name in kernel.executors}
        rest = self.total.less(instead_of)
        choice = choose(predictions, self.device, self.captured, rest)
        fused, eager = predictions[choice.executor], self._eager(kernel.closure)
        is_eager = (self._is_less(eager, fused, choice.error) and self.adds(eager, rest) < choice.us
                    and self._may_be_eager(kernel.closure))
        return Priced(kernel.shape, kernel.work, predictions, choice, choice.us, eager, kernel.tensors, is_eager)

    def _kernel(self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node]) -> Kernel | Refusal:
        """Return what a kernel that computes some nodes does; a refusal where there is none."""
        outputs = self.outputs(nodes)
        inside = set(nodes)
        sources = dict.fromkeys(read.source for read in reads if read.source not in inside)
        tensors = len(sources) + len(outputs)
        if tensors > MAX_TENSORS and len(nodes) > 1:
            return Refusal(RefusalKind.TOO_MANY_TENSORS, nodes[0].name, nodes[-1].name, f"{tensors}, at most {MAX_TENSORS}")
        members = members_of(self.spaces, nodes, inlined, outputs)
        shape = classify(self.spaces, members)
        if isinstance(shape, Refusal):
            return shape
        if shape.kind == "rowcol" and not self._has_room(shape, members, sources):
            return Refusal(RefusalKind.ROWS_TOO_LONG, nodes[0].name, nodes[-1].name,
                           f"{shape.length} elements beside states of columns")
        closure = self.dependencies.closure(nodes)
        times = self.code.times((m.node for m in members), closure)
        if times is None and len(nodes) > 1:
            return Refusal(RefusalKind.TOO_MUCH_CODE, nodes[0].name, nodes[-1].name, f"at most {MOST_EXPRESSIONS} in all")
        names = self.executors.of(closure)
        if not names:
            reasons = "; ".join(f"{name}: {self.executors.reason(name, closure)}" for name in self.executors.enabled)
            return Refusal(RefusalKind.NO_EXECUTOR, nodes[0].name, nodes[-1].name, reasons)
        stored = [node for node in nodes if node in outputs]
        work = work_of(self.spaces, Asked(shape, members, reads, sources, stored, closure, times or ONCE))
        return Kernel(shape, work, closure, names, tensors)

    def _has_room(self, shape: Shape, members: Sequence[Member], sources: Collection[Node]) -> bool:
        """Return whether a kernel may reduce rows of a length beside columns."""
        return (self.one_pass or shape.length <= LONG_BESIDE_COLUMNS) and (
            rows_held(self.spaces, shape, members, sources) is not None)

    def _predict(self, name: str, work: Work) -> Prediction:
        if (name, work) not in self._predictions:
            self._predictions[name, work] = predict(work, self.device, name)
        return self._predictions[name, work]

    # ------------------------------------------------------------------ the ops one by one

    def _eager(self, closure: Iterable[Node]) -> Prediction:
        """Predict what nodes cost as calls of torch's; views cost nothing."""
        return total(self._call(node) for node in closure if self.spaces.facts[node].role is Role.FUSED)

    def _call(self, node: Node) -> Prediction:
        if node not in self._calls:
            work = torch_work(self.spaces, node)
            if self.spaces.is_scatter(node):
                self._calls[node] = call_prediction(node, work.bytes, self.device)
            else:
                self._calls[node] = self._torchs.get(work) or torch_prediction(work, self.device)
                self._torchs[work] = self._calls[node]
        return self._calls[node]

    def _is_less(self, eager: Prediction, fused: Prediction, error: float) -> bool:
        """Return whether the device takes less time, even if both predictions are off. Host times are too close for that."""
        return eager.device_us * (1 + error) + OFF_US < fused.device_us * (1 - error)

    def _may_be_eager(self, closure: Iterable[Node]) -> bool:
        """Return whether torch has a kernel for each node, not Python code over others, and no executor is forced."""
        facts = self.spaces.facts
        return all(facts[node].forced is None and (facts[node].role is not Role.FUSED or self._has_kernel(node))
                   for node in closure)

    def _has_kernel(self, node: Node) -> bool:
        target, row = node.target, self.spaces.facts[node].row
        is_cast = row is not None and row.casts
        return isinstance(target, OpOverload) and (target.namespace == "aten" or is_cast) and target is not COPIES_INTO
