"""Rematerialization: which values of a forward are kept for its backward, and which are computed again.

The backward either gets a value of the forward or computes it again from its operands. The cheapest way to have all that it
needs is a minimum cut. Torch's ``min_cut_rematerialization_partition`` prices what is kept, and forbids by rules of thumb
what would cost too much to compute again; here both have a price of the cost model, in microseconds::

    keep(v)      = (kept_share + reads(v)) × move(v), and move(v) if the forward would not store v
    recompute(v) = arithmetic(v), move(operand) for a reduction
                   + (1 + reads(v)) × move(v) if the backward would have to store v
                   + sum of move(u) over operands u whose home is another level

``move`` is the time in which a tensor's bytes are read or written. Nodes between the same library calls are on one *level*
and count as one kernel; ``reads`` counts the levels and the library calls of the backward that need v. The backward has to
store what a library call or several levels need. The home of a value is the level of its own layer: to compute v from an
operand whose home is another level, that operand has to be read once more. So a residual stream is not computed from all
the layers before it.

Worked example: of ``x + f(norm(x))``, layer after layer, the backward keeps every ``x`` and the norm's one number per row.
It computes the normalized values again, unless a matrix product needs them, but no ``x`` from the one before.
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
from dynafuse.cost.library_calls import is_call
from dynafuse.cost.model import LEAST
from dynafuse.fx import is_view, looked_at
from dynafuse.ir import Annotated, Role

UNITS = 1e6  # capacities are whole picoseconds: with floats the flow may not terminate
NUMBER_US = 1e-3  # for work of the host alone: passing a size, taking a view
HIDDEN = 0.9  # share of arithmetic that the loads and stores of its kernel hide
SOURCE, SINK = "source", "sink"
COMPUTED, GIVEN = "computed", "given"


class Sides(Protocol):
    """The nodes of a joint graph that belong to its forward and to its backward: torch's ``NodeInfo``."""

    inputs: Collection[Node]  # of the forward
    required_bw_nodes: Collection[Node]

    def is_required_fw(self, n: Node) -> bool:
        """Return whether a result of the forward depends on a node."""


def saved_values(annotated: Annotated, sides: Sides, device: Device) -> list[Node]:
    """Return the values of a joint graph that the forward passes to the backward, in graph order.

    Args:
        annotated: The joint graph with its facts.
        sides: Which nodes belong to the forward and to the backward.
        device: The device that is priced.
    """
    import networkx  # slow to import, and only ``rematerialize="cost"`` needs it

    uses = Uses(annotated, sides)
    network = networkx.DiGraph()
    for tail, head, us in _edges(uses, Prices(uses, device)):
        network.add_edge(tail, head, capacity=us if us == math.inf else round(us * UNITS))
    if SINK not in network:
        return []
    _, (_, behind) = networkx.minimum_cut(network, SOURCE, SINK)
    return [node for node in uses.nodes if (node, GIVEN) in behind and (node, COMPUTED) not in behind]


def _edges(uses: Uses, prices: Prices) -> Iterator[tuple[Any, Any, float]]:
    """Yield the edges of the network of all that the backward may need: tail, head, capacity in microseconds.

    A node is computed again if its half ``COMPUTED`` is behind the cut, and kept if only ``GIVEN`` is. For a node that only
    the forward can compute, the former is the source; for one that the backward has to compute, the sink.
    """
    computed: dict[Node, Any] = {}
    for node in reversed(uses.nodes):
        heads = dict.fromkeys(computed[user] for user in node.users if user in computed)
        if node in uses.backward or must_recompute(node):
            computed[node] = SINK
        elif heads or node in uses.sides.required_bw_nodes:  # the latter is a gradient that is a value of the forward
            recompute_us = prices.recompute(node)
            computed[node] = SOURCE if recompute_us == math.inf else (node, COMPUTED)
            if computed[node] is not SOURCE:
                yield SOURCE, computed[node], recompute_us
            yield computed[node], (node, GIVEN), prices.keep(node)
            for head in heads if node not in uses.sides.required_bw_nodes else (SINK,):
                if head is not SOURCE:
                    yield (node, GIVEN), head, math.inf


class Uses:
    """The uses of a forward's values: by which kernels of the backward, on which levels."""

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
            self.users[node] = tuple(dict.fromkeys(self._through_views(node)))
            if node not in self.backward:
                self.home[node] = self._home(node)

    def _backward(self) -> set[Node]:
        """Return the nodes that only the backward can compute: all that depend on its own inputs."""
        backward: set[Node] = set()
        for node in self.nodes:
            required = node in self.sides.required_bw_nodes
            is_result = any(user.op == "output" for user in node.users)
            is_own_input = node.op == "placeholder" and node not in self.sides.inputs
            if required and (is_own_input or not is_result or any(n in backward for n in node.all_input_nodes)):
                backward.add(node)
        return backward

    def is_call(self, node: Node) -> bool:
        """Return whether a node calls a library."""
        return is_call(node, self.facts)

    def is_view(self, node: Node) -> bool:
        """Return whether a node moves no data."""
        return self.facts[node].role is Role.VIEW or is_view(node)

    def _through_views(self, node: Node) -> Iterator[Node]:
        """Yield the users of a value, and those of its views instead of these."""
        for user in node.users:
            yield from self.users[user] if self.is_view(user) else (user,)

    def base(self, node: Node) -> Node:
        """Return what a value is a view of, be it in the plan or by an eager call."""
        return looked_at(node, self.is_view)

    def _home(self, node: Node) -> int:
        """Return the level of a value's layer: the last one of the backward, which runs through the layers in reverse."""
        users = self.users[node]
        fused = [self.level[user] for user in users if user in self.backward and not self.is_call(user)]
        recomputed = [self.home[user] for user in users if user in self.home and not self.is_call(user)]
        calls = [self.level[user] for user in users if user in self.backward]
        return max(fused or recomputed or calls, default=-1)

    def kernels(self, node: Node) -> set[Any]:
        """Return the levels and the library calls of the backward that read a value."""
        users = (user for user in self.users[node] if user in self.backward)
        return {user if self.is_call(user) else self.level[user] for user in users}

    def stored(self, node: Node) -> bool:
        """Return whether the forward stores a value, kept or not."""
        if self.facts[node].role is not Role.FUSED:
            return True
        users = [user for user in self.users[node] if user not in self.backward]
        if any(user.op == "output" or self.is_call(user) for user in users):
            return True
        return len({self.level[user] for user in users}) > 1


class Prices:
    """The prices of keeping a value and of computing it again, in microseconds a step."""

    def __init__(self, uses: Uses, device: Device) -> None:
        self.uses, self.device = uses, device

    def keep(self, node: Node) -> float:
        """Return the price of passing a value from the forward to the backward."""
        value = node.meta.get("val")
        if isinstance(value, py_sym_types):
            return NUMBER_US
        if not isinstance(value, torch.Tensor):
            return 0.0 if _is_object(value) else math.inf
        base = self.uses.base(node)
        stores = 0 if self.uses.stored(base) else 1
        reads = max(1, len(self.uses.kernels(node)))
        return (self.device.kept_share + stores + reads) * self._move(base) + NUMBER_US

    def recompute(self, node: Node) -> float:
        """Return the price of computing a value again from its operands."""
        if node.op == "placeholder":
            return math.inf if node in self.uses.sides.inputs else 0.0
        if not self.uses.sides.is_required_fw(node):
            return 0.0  # only the backward computes it in any case
        facts = self.uses.facts[node]
        if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE or self.uses.is_call(node):
            return math.inf
        if facts.role is not Role.FUSED or facts.row is None:
            return NUMBER_US
        operands = dict.fromkeys(map(self.uses.base, node.all_input_nodes))  # in order: sums of floats depend on it
        elsewhere = [u for u in operands if self.uses.home.get(u) != self.uses.home[node]]
        kernels = self.uses.kernels(node)
        stores = len(kernels) > 1 or any(isinstance(kernel, Node) for kernel in kernels)
        largest = max([node, *operands], key=self._move)
        passes = self._move(largest) if facts.row.kind.needs_rows else 0.0
        return (self._arithmetic(facts.row.flops, largest) + passes + stores * (1 + len(kernels)) * self._move(node)
                + sum(map(self._move, elsewhere)))

    def _arithmetic(self, flops: float, node: Node) -> float:
        tensor = self.uses.facts[node].tensor
        return (1 - HIDDEN) * flops * tensor.hint / max(self.device.flops_tflops * 1e6, LEAST) if tensor else 0.0

    def _move(self, node: Node) -> float:
        """Return the time of reading or writing a tensor once."""
        tensor = self.uses.facts[node].tensor
        return tensor.bytes / max(self.device.bandwidth_tbs * 1e6, LEAST) if tensor else 0.0


def _is_object(value: Any) -> bool:
    """Return whether a value takes no memory: neither a tensor nor several of them."""
    return value is not None and not isinstance(value, (torch.Tensor, list, tuple))
