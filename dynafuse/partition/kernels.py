"""What kernels would do and cost: of some nodes the iteration space, the work, and the time on each executor.

No part of it depends on what else there is in a graph, so that it is asked for once, however many ways of growing come
to the same nodes. What a kernel does is predicted by ``work.py``, before there is one.

Worked example: a softmax over ``bfloat16[8192, 4096]`` moves 134 MB, for which Triton takes 37 µs on an H200; its
ops one by one take 141 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import call_prediction, torch_prediction
from dynafuse.cost.model import Prediction, Work, predict, total
from dynafuse.ir import MAX_TENSORS, Refusal, RefusalKind, Role
from dynafuse.ops.overloads import COPIES_INTO
from dynafuse.partition.code_size import MOST_EXPRESSIONS, ONCE, CodeSize
from dynafuse.partition.executors import Executors
from dynafuse.partition.iteration_space import Read, Spaces
from dynafuse.partition.kernel_class import LONG_BESIDE_COLUMNS
from dynafuse.partition.legality import Member, Shape, classify, members_of
from dynafuse.partition.order import Dependencies
from dynafuse.partition.work import Asked, rows_held, torch_work, work_of


@dataclass(frozen=True)
class Kernel:
    """What one kernel does and costs: its iteration space, its work, and what it costs on each executor that can take it.

    ``eager`` is what its ops cost one by one, ``may_be_eager`` whether they may run so. It reads and writes ``tensors``.
    """

    shape: Shape
    work: Work
    predictions: Mapping[str, Prediction]
    eager: Prediction
    may_be_eager: bool
    tensors: int


class Kernels:
    """The kernels of a graph on a device. ``outputs`` tells which of some nodes are stored."""

    def __init__(self, spaces: Spaces, dependencies: Dependencies, device: Device, executors: Executors,
                 outputs: Callable[[Sequence[Node]], frozenset[Node]]) -> None:
        self.spaces = spaces
        self.dependencies = dependencies
        self.device = device
        self.executors = executors
        self.outputs = outputs
        self.code = CodeSize(spaces)
        self._known: dict[Hashable, Kernel | Refusal] = {}
        self._calls: dict[Node, Prediction] = {}
        self._predictions: dict[tuple[str, Work], Prediction] = {}  # of layers that repeat themselves: equal work
        self._torchs: dict[Work, Prediction] = {}

    def known(self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node], one_pass: bool,
              merges: Hashable) -> Kernel | Refusal:
        """Return a kernel that was made of nodes that came together in the same way, maybe of other axes, or else make it.

        Args:
            nodes: The kernel's nodes, operands first.
            reads: What they read, and where.
            inlined: Those of the nodes that are computed at other indices.
            one_pass: Whether long rows may be reduced in a kernel that reduces columns.
            merges: How the nodes came together.
        """
        key = tuple(nodes), inlined, merges, one_pass
        return self._known.get(key) or self._known.setdefault(key, self.of(nodes, reads, inlined, one_pass))

    def of(self, nodes: Sequence[Node], reads: Sequence[Read], inlined: frozenset[Node],
           one_pass: bool = True) -> Kernel | Refusal:
        """Return a kernel that computes some nodes; a refusal where there is none.

        Args:
            nodes: The kernel's nodes, operands first.
            reads: What they read, and where.
            inlined: Those of the nodes that are computed at other indices.
            one_pass: Whether long rows may be reduced in a kernel that reduces columns.
        """
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
        if shape.kind == "rowcol" and not self._has_room(shape, members, sources, one_pass):
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
        predictions = {name: self._predict(name, work) for name in names}
        return Kernel(shape, work, predictions, self._eager(closure), self._may_be_eager(closure), tensors)

    def _has_room(self, shape: Shape, members: Sequence[Member], sources: Collection[Node], one_pass: bool) -> bool:
        """Return whether a kernel may reduce rows of a length beside columns."""
        return (one_pass or shape.length <= LONG_BESIDE_COLUMNS) and (
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

    def _may_be_eager(self, closure: Iterable[Node]) -> bool:
        """Return whether torch has a kernel for each node, not Python code over others, and no executor is forced."""
        facts = self.spaces.facts
        return all(facts[node].forced is None and (facts[node].role is not Role.FUSED or self._has_kernel(node))
                   for node in closure)

    def _has_kernel(self, node: Node) -> bool:
        target, row = node.target, self.spaces.facts[node].row
        is_cast = row is not None and row.casts
        return isinstance(target, OpOverload) and (target.namespace == "aten" or is_cast) and target is not COPIES_INTO
