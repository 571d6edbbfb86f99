"""Which values of a forward its backward keeps, and which it computes again: a minimum cut over the cost model's prices.

Whatever the forward computes the backward either gets from it or computes again from its operands. The cheapest way to have
all that it needs is a minimum cut. Torch's ``min_cut_rematerialization_partition`` prices what is kept, and forbids by
rules of thumb what would cost too much to compute again; here both have a price, in microseconds::

    keep(v)      = (kept_share + reads(v)) × move(v), and move(v) if the forward would not store v
    recompute(v) = arithmetic(v), move(operand) for a reduction
                   + (1 + reads(v)) × move(v) if the backward would have to store v
                   + sum of move(u) over operands u that are at home elsewhere

``move`` is the time in which a tensor's bytes are read or written. Kernels between the same library calls, on one *level*,
count as one; ``reads`` are the levels and the library calls of the backward that want v. The backward has to store what a
library wants, or several levels. A value is at home on the level of its own layer: to compute v from what is at home on
another level, that has to be read once more. So a residual stream is not computed from all the layers before it.

Worked example: of ``x + f(norm(x))``, layer after layer, the backward keeps every ``x`` and the norm's one number per row.
What is normalized it computes again, unless a matrix product wants it, and no ``x`` from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from torch._functorch.partitioners import must_recompute
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils.checkpoint import CheckpointPolicy

from dynafuse.cost.device import Device
from dynafuse.cost.library_calls import launches
from dynafuse.cost.model import LEAST
from dynafuse.fx import is_view, looked_at
from dynafuse.ir import Annotated, Role
from dynafuse.ops import Kind

UNITS = 1e6  # capacities are whole picoseconds: a flow of floats may not end
NUMBER_US = 1e-3  # for what only the host does: to hand over a size, to look at a tensor in another way
HIDDEN = 0.9  # share of arithmetic that the loads and stores of its kernel hide
SOURCE, SINK = "source", "sink"
MADE, GIVEN = "made", "given"


class Sides(Protocol):
    """Which nodes of a joint graph belong to its forward and its backward: torch's ``NodeInfo``."""

    inputs: Collection[Node]  # of the forward
    required_bw_nodes: Collection[Node]

    def is_required_fw(self, n: Node) -> bool:
        """Whether a result of the forward needs a node."""


def kept(annotated: Annotated, sides: Sides, device: Device) -> list[Node]:
    """What the backward of a joint graph gets from its forward, in graph order."""
    import networkx

    wanted = Wanted(annotated, sides)
    network = networkx.DiGraph()
    for tail, head, us in _edges(wanted, Prices(wanted, device)):
        network.add_edge(tail, head, capacity=us if us == math.inf else round(us * UNITS))
    if SINK not in network:
        return []
    _, (_, behind) = networkx.minimum_cut(network, SOURCE, SINK)
    return [node for node in wanted.nodes if (node, GIVEN) in behind and (node, MADE) not in behind]


def _edges(wanted: Wanted, prices: Prices) -> Iterator[tuple[Any, Any, float]]:
    """The network of what the backward may need.

    A node is computed again if its half ``MADE`` is behind the cut, and kept if only ``GIVEN`` is. What the forward alone
    can compute is made at the source, what the backward has to compute at the sink.
    """
    made: dict[Node, Any] = {}
    for node in reversed(wanted.nodes):
        heads = dict.fromkeys(made[user] for user in node.users if user in made)
        if node in wanted.backward or must_recompute(node):
            made[node] = SINK
        elif heads or node in wanted.sides.required_bw_nodes:  # the latter is a gradient that is a value of the forward
            again = prices.recompute(node)
            made[node] = SOURCE if again == math.inf else (node, MADE)
            if made[node] is not SOURCE:
                yield SOURCE, made[node], again
            yield made[node], (node, GIVEN), prices.keep(node)
            for head in heads if node not in wanted.sides.required_bw_nodes else (SINK,):
                if head is not SOURCE:
                    yield (node, GIVEN), head, math.inf


class Wanted:
    """Where the values of a forward are wanted: by which kernels of the backward, in which layer."""

    def __init__(self, annotated: Annotated, sides: Sides) -> None:
        self.facts, self.sides = annotated.facts, sides
        self.nodes = [node for node in annotated.graph.nodes if node.op != "output"]
        self.backward = self._backward()
        self.level: dict[Node, int] = {}
        for node in self.nodes:
            self.level[node] = max((self.level[n] + self.is_call(n) for n in node.all_input_nodes
                                    if (n in self.backward) == (node in self.backward)), default=0)
        self.users: dict[Node, tuple[Node, ...]] = {}
        self.home: dict[Node, int] = {}
        for node in reversed(self.nodes):
            self.users[node] = tuple(dict.fromkeys(self._users(node)))
            if node not in self.backward:
                self.home[node] = self._home(node)

    def _backward(self) -> set[Node]:
        """What only the backward can compute: all that depends on its own inputs."""
        found: set[Node] = set()
        for node in self.nodes:
            needed = node in self.sides.required_bw_nodes
            result = any(user.op == "output" for user in node.users)
            own = node.op == "placeholder" and node not in self.sides.inputs
            if needed and (own or not result or any(n in found for n in node.all_input_nodes)):
                found.add(node)
        return found

    def is_call(self, node: Node) -> bool:
        """Whether a node is a call of a library."""
        return self.facts[node].role is Role.EAGER and launches(node)

    def is_view(self, node: Node) -> bool:
        """Whether a node moves nothing."""
        return self.facts[node].role is Role.VIEW or is_view(node)

    def _users(self, node: Node) -> Iterator[Node]:
        """Those of its views included."""
        for user in node.users:
            yield from self.users[user] if self.is_view(user) else (user,)

    def base(self, node: Node) -> Node:
        """Return what a value is a view of, be it in the plan or by an eager call."""
        return looked_at(node, self.is_view)

    def _home(self, node: Node) -> int:
        """The level of its layer: where the backward comes last to it, which goes through the layers backwards."""
        users = self.users[node]
        fused = [self.level[user] for user in users if user in self.backward and not self.is_call(user)]
        again = [self.home[user] for user in users if user in self.home and not self.is_call(user)]
        calls = [self.level[user] for user in users if user in self.backward]
        return max(fused or again or calls, default=-1)

    def kernels(self, node: Node) -> set[Any]:
        """The levels and the library calls of the backward that want a value itself."""
        users = (user for user in self.users[node] if user in self.backward)
        return {user if self.is_call(user) else self.level[user] for user in users}

    def stored(self, node: Node) -> bool:
        """Whether the forward stores a value in any case."""
        if self.facts[node].role is not Role.FUSED:
            return True
        users = [user for user in self.users[node] if user not in self.backward]
        if any(user.op == "output" or self.is_call(user) for user in users):
            return True
        return len({self.level[user] for user in users}) > 1


class Prices:
    """What it costs, in microseconds a step, to keep a value or to compute it again."""

    def __init__(self, wanted: Wanted, device: Device) -> None:
        self.wanted, self.device = wanted, device

    def keep(self, node: Node) -> float:
        """To have a value from the forward."""
        value = node.meta.get("val")
        if isinstance(value, py_sym_types):
            return NUMBER_US
        if not isinstance(value, torch.Tensor):
            return 0.0 if _is_object(value) else math.inf
        base = self.wanted.base(node)
        stores = 0 if self.wanted.stored(base) else 1
        reads = max(1, len(self.wanted.kernels(node)))
        return (self.device.kept_share + stores + reads) * self._move(base) + NUMBER_US

    def recompute(self, node: Node) -> float:
        """To have it again from its operands."""
        if node.op == "placeholder":
            return math.inf if node in self.wanted.sides.inputs else 0.0
        if not self.wanted.sides.is_required_fw(node):
            return 0.0  # nobody else computes it
        facts = self.wanted.facts[node]
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or self.wanted.is_call(node):
            return math.inf
        if facts.role is not Role.FUSED or facts.row is None:
            return NUMBER_US
        operands = dict.fromkeys(map(self.wanted.base, node.all_input_nodes))  # in order: sums of floats depend on it
        elsewhere = [u for u in operands if self.wanted.home.get(u) != self.wanted.home[node]]
        kernels = self.wanted.kernels(node)
        stores = len(kernels) > 1 or any(isinstance(kernel, Node) for kernel in kernels)
        largest = max([node, *operands], key=self._move)
        passes = self._move(largest) if facts.row.kind is Kind.REDUCTION else 0.0
        return (self._arithmetic(facts.row.flops, largest) + passes + stores * (1 + len(kernels)) * self._move(node)
                + sum(map(self._move, elsewhere)))

    def _arithmetic(self, flops: float, node: Node) -> float:
        tensor = self.wanted.facts[node].tensor
        return (1 - HIDDEN) * flops * tensor.hint / max(self.device.flops_tflops * 1e6, LEAST) if tensor else 0.0

    def _move(self, node: Node) -> float:
        """Reading or writing a tensor once."""
        tensor = self.wanted.facts[node].tensor
        return tensor.bytes / max(self.device.bandwidth_tbs * 1e6, LEAST) if tensor else 0.0


def _is_object(value: Any) -> bool:
    """Whether a value takes no memory: neither a tensor nor several of them."""
    return value is not None and not isinstance(value, (torch.Tensor, list, tuple))
