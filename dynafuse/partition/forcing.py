"""Forced executors: which ones the user's code and options ask for, node by node, and whether they can be had.

Three things force a node, and the innermost of them wins: a mark that ``force_backend`` left on it, a pattern of the
option ``force`` that matches a module it lies in, and the mark around the code that is being compiled. A decorated module
and a pattern lie as deep as their modules; where they meet on one module the pattern wins, and a pattern that begins
deeper wins over one that begins further out. A decorated function and a ``with`` block lie inside every module. A node of
no place in the user's code, such as the sum of two gradients, follows its neighbours where they agree.

Worked example: with ``force={"layers.*": "triton", "layers.*.mlp": "eager"}`` the nodes of ``layers.0.mlp.act`` and of
their backward are forced to ``eager``, the other nodes of ``layers.0`` to ``triton``.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.traceback import GRADIENT_ACC_SPECIAL_STACK

from dynafuse.config import FORCE_MARK
from dynafuse.errors import DynafuseWarning, ForceError, OptionError, Violation
from dynafuse.fx import module_path, module_stack, user_line, user_place
from dynafuse.ir import Facts, Role
from dynafuse.lowering.base import Executor
from dynafuse.lowering.registry import EAGER, PREFERRED, executor
from dynafuse.ops import Kind, is_library, is_unfilled, lookup

Mark = tuple[str, bool, str]  # executor, strict, name of the decorated class if it was one
Path_ = tuple[str, ...]  # a module's dotted path, in parts

EMPTY = "an empty tensor"
ONE_ELEMENT = "reduces no more than one element"
NOTHING_TO_RUN = frozenset({EMPTY, ONE_ELEMENT})
"""Reasons for running eager that no executor could do better about: the contract is not about them."""


_settled: set[str] = set()  # patterns that have matched, or that the user has been told of


@dataclass(frozen=True)
class Order:
    """What a node is forced to. Only what the user wrote is held to the contract (``strict``)."""

    executor: str
    strict: bool


@dataclass(frozen=True)
class Pattern:
    """One entry of the option ``force``."""

    text: str
    order: Order

    @cached_property
    def parts(self) -> Path_:
        """Return the pattern in parts; a lone star is for everything."""
        return ("**",) if self.text == "*" else tuple(part.strip() for part in self.text.split("."))

    @property
    def literal(self) -> int:
        """Return how much of it is no wildcard."""
        return sum(character not in "*?[]" for character in self.text)


@dataclass(frozen=True)
class Place:
    """The modules that a node lies in, outermost first: per module its path, as a part of the compiled module and with
    the variable's name in front, and the names of its class and that one's bases."""

    paths: tuple[tuple[Path_, Path_], ...]
    classes: tuple[frozenset[str], ...]

    def depth_of(self, pattern: Pattern) -> int:
        """Return how deep the outermost module lies that a pattern matches; -1 if it matches none."""
        hits = (i for i, paths in enumerate(self.paths) if any(_matches(path, pattern.parts) for path in paths))
        return next(hits, -1)

    def depth_of_class(self, name: str) -> int:
        """Return how deep the innermost module of a class lies; the compiled module, on no stack, lies outermost."""
        return max((i for i, names in enumerate(self.classes) if name in names), default=0)


@dataclass(frozen=True)
class Forcing:
    """All that forces nodes of one compiled function. ``enabled`` are the executors that the plan may use;
    ``how_to_enable`` says of others what to do to have them."""

    patterns: tuple[Pattern, ...] = ()
    around: Mark | None = None
    enabled: tuple[str, ...] = (PREFERRED, EAGER)
    how_to_enable: Callable[[str], str] = field(default=lambda name: "", compare=False, repr=False)
    _found: dict[Any, tuple[Place, int, Order | None]] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(force: Mapping[str, str], enabled: Sequence[str]) -> Forcing:
        """Read the option ``force`` and the executors in use; to be called while Dynamo calls the backend.

        Args:
            force: Executors by pattern of modules; a "?" behind the executor's name lets ops fall back.
            enabled: The names of the executors that the plan may use.
        """
        patterns = [Pattern(text, Order(name.removesuffix("?"), name[-1] != "?")) for text, name in force.items()]
        around = torch.fx.traceback.current_meta.get("custom", {}).get(FORCE_MARK)
        return Forcing(tuple(patterns), around, tuple(enabled))

    def applied(self, graph: Graph, facts: Mapping[Node, Facts]) -> dict[Node, Facts]:
        """Return the facts with what forces each node taken in.

        Args:
            graph: An annotated graph.
            facts: The facts of all its nodes.

        Raises:
            ForceError: A strict order cannot be kept; it has all violations of the graph.
        """
        result = dict(facts)
        violations: list[Violation] = []
        for node, order in self.orders(graph).items():
            if facts[node].role not in (Role.FUSED, Role.EAGER, Role.VIEW):
                continue
            reason = self._obstacle(node, order, facts)
            if reason and order.strict and facts[node].role is not Role.VIEW:
                violations.append(_violation(node, order, facts[node], reason))
            result[node] = _forced(facts[node], order, reason)
        if violations:
            missing = dict.fromkeys(v.executor for v in violations if v.executor not in self.enabled)
            raise ForceError(violations, self.enabled, [*filter(None, map(self.how_to_enable, missing))])
        return result

    def orders(self, graph: Graph) -> dict[Node, Order]:
        """Return the order that each forced node is under."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        if not self.patterns and self.around is None and not any(map(_mark, calls)):
            return {}
        orders = {node: order for node in calls if not _has_no_place(node) and (order := self._order(node))}
        for node in filter(_has_no_place, calls):
            order = _of_neighbours(_called(node.all_input_nodes), orders)
            if order is not None:
                orders[node] = order
        for node in filter(_has_no_place, reversed(calls)):
            if node not in orders and not _called(node.all_input_nodes):
                order = _of_neighbours(_called(node.users), orders)
                if order is not None:
                    orders[node] = order
        if self.around is not None:
            homeless = [node for node in calls if node not in orders and not module_stack(node)]
            orders |= dict.fromkeys(homeless, Order(self.around[0], strict=False))
        return orders

    def forced_to_eager(self, graph: Graph) -> frozenset[Node]:
        """Return the nodes that are forced to eager."""
        return self.forced_to(graph, lambda executor: not executor.fuses)

    def forced_to(self, graph: Graph, which: Callable[[Executor], bool]) -> frozenset[Node]:
        """Return the nodes that are forced to executors of some kind.

        Args:
            graph: The graph.
            which: Tells whether an executor is one of them.
        """
        return frozenset(node for node, order in self.orders(graph).items() if which(executor(order.executor)))

    def _order(self, node: Node) -> Order | None:
        """Return what forces a node itself: the innermost of its marks and the patterns that match."""
        mark = _mark(node) or self.around
        if mark is not None and not (mark[2] and self.patterns):
            return Order(*mark[:2])
        place, depth, order = self._innermost(node)
        if mark is not None and (order is None or place.depth_of_class(mark[2]) > depth):
            return Order(*mark[:2])
        return order

    def _innermost(self, node: Node) -> tuple[Place, int, Order | None]:
        """Return where a node lies, and the pattern that matches there and begins deepest; the more literal one of
        two, the later one of two alike."""
        key = tuple((str(entry[0]), entry[1]) for entry in module_stack(node).values())
        if key not in self._found:
            place = _place(key)
            ranks = [(place.depth_of(p), p.literal, i) for i, p in enumerate(self.patterns)]
            depth, _, position = max(ranks, default=(-1, 0, 0))
            self._found[key] = place, depth, self.patterns[position].order if depth >= 0 else None
        return self._found[key]

    def _obstacle(self, node: Node, order: Order, facts: Mapping[Node, Facts]) -> str:
        """Return why a node does not run on the executor that it is forced to, or ""."""
        if node.target is operator.getitem:
            return ""
        if order.executor not in self.enabled:
            return f"executor {order.executor!r} is not enabled"
        return "" if _is_exempt(node, facts[node]) else executor(order.executor).refuses_node(node, facts)

    def check(self, graph: Graph, strict: bool) -> None:
        """Look for patterns that match nothing, in a graph of Dynamo's that has modules; others say nothing about patterns.

        Such a pattern may be for another graph, of code behind a graph break or of another module, and it is none if it
        matches a module of which whoever calls the compiled code knows. Otherwise it is told of once.

        Args:
            graph: Dynamo's graph.
            strict: Whether such a pattern raises, unless it may fall back, instead of being told of.

        Raises:
            OptionError: Under ``strict``, a pattern that may not fall back matches nothing.
        """
        unknown = [p for p in self.patterns if p.text not in _settled]
        if not unknown:
            return
        places = {self._innermost(node)[0] for node in graph.nodes}
        paths = {".".join(path) for place in places for path, _ in place.paths if path}
        unmatched = [p for p in unknown if all(place.depth_of(p) < 0 for place in places)]
        _settled.update(p.text for p in unknown if p not in unmatched)
        if not paths or not unmatched:
            return
        known = _modules_of_callers()
        names = sorted(paths | {".".join(path) for _, path in known if path})
        for pattern in unmatched:
            if any(_matches(named, pattern.parts) for name, path in known for named in (path, (name, *path))):
                continue
            close = difflib.get_close_matches(pattern.text, names, n=3, cutoff=0.0)
            text = f"force pattern {pattern.text!r} matches no module of what is compiled; closest: {', '.join(close)}"
            if strict and pattern.order.strict:
                raise OptionError(text)
            _settled.add(pattern.text)
            warnings.warn(text, DynafuseWarning, stacklevel=2)


NOTHING = Forcing()


def reset() -> None:
    """Forget which patterns the user has been told of."""
    _settled.clear()


# ---------------------------------------------------------------------- marks and places


def _mark(node: Node) -> Mark | None:
    mark: Mark | None = (node.meta.get("custom") or {}).get(FORCE_MARK)
    return mark


def _has_no_place(node: Node) -> bool:
    """Return whether a node stands for nothing that the user wrote: a sum of gradients, a constant, what a pass put in."""
    if _mark(node) is not None or module_stack(node):
        return False
    trace = node.meta.get("stack_trace")
    return not trace or GRADIENT_ACC_SPECIAL_STACK in trace


def _called(nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if node.op == "call_function"]


def _of_neighbours(neighbours: Sequence[Node], orders: Mapping[Node, Order]) -> Order | None:
    """Return what all neighbours are forced to, if they agree; no contract comes with it."""
    executors = {orders[n].executor if n in orders else None for n in neighbours}
    executor = executors.pop() if len(executors) == 1 else None
    return None if executor is None else Order(executor, strict=False)


def _place(stack: Sequence[tuple[str, Any]]) -> Place:
    """Return where the module stack of a node says that it lies. Modules that are only passed through count as well."""
    paths: dict[tuple[Path_, Path_], frozenset[str]] = {((), ()): frozenset()}
    for source, cls in stack:
        name, *parts = module_path(source)
        for end in range(len(parts) + 1):
            key = (tuple(parts[:end]), (name, *parts[:end]))
            paths.setdefault(key, frozenset())
        paths[key] = _names(cls)
    return Place(tuple(paths), tuple(paths.values()))


def _names(cls: Any) -> frozenset[str]:
    if not isinstance(cls, type):
        return frozenset({str(cls)})
    return frozenset(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


def _modules_of_callers() -> set[tuple[str, Path_]]:
    """Return all modules that running functions have variables for: the variable's name, and the path from what it holds."""
    modules: set[tuple[str, Path_]] = set()
    seen: set[tuple[str, int]] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        for name, value in _variables(frame):
            if (name, id(value)) in seen or not isinstance(value, torch.nn.Module) or isinstance(value, GraphModule):
                continue
            seen.add((name, id(value)))
            inner = getattr(value, "_orig_mod", value).named_modules()
            modules.update((name, tuple(path.split(".")) if path else ()) for path, _ in inner)
        frame = frame.f_back
    return modules


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Return names and values that a running function sees, and those that functions among them close over."""
    values = list(frame.f_locals.items())
    for _, value in values:
        if isinstance(value, FunctionType) and value.__closure__:
            with contextlib.suppress(ValueError):  # a cell that is empty as yet
                yield from [(name, cell.cell_contents) for name, cell in zip(value.__code__.co_freevars, value.__closure__,
                                                                            strict=True)]
    yield from values
    yield from list(frame.f_globals.items())


def _matches(path: Path_, pattern: Path_) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[i:], pattern[1:]) for i in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


# ---------------------------------------------------------------------- the contract


def _is_exempt(node: Node, facts: Facts) -> bool:
    """Return whether the contract does not concern a node: it computes nothing, or stays with a library everywhere.

    The contract concerns what an executor could fuse. Products, convolutions, attention and FFTs are calls of libraries
    under every executor; views, picks of one output, checks and creations out of nothing move no data. The
    ops of a subgraph are looked at when that one is compiled.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is torch.ops.higher_order.invoke_subgraph or not isinstance(target, torch._ops.HigherOrderOperator)
    if is_library(target) or is_unfilled(target) or target.is_view or node.meta.get("val") is None:
        return True
    if facts.row is not None and facts.row.kind is Kind.VIEW:
        return True
    reads = any(isinstance(a.meta.get("val"), torch.Tensor) for a in node.all_input_nodes)
    return facts.reason in NOTHING_TO_RUN or (facts.role is Role.EAGER and not reads)


def _forced(facts: Facts, order: Order, reason: str) -> Facts:
    if reason:
        return facts if facts.role is Role.VIEW else replace(facts, fallback=f"{order.executor}: {reason}")
    if not executor(order.executor).fuses and facts.role is Role.FUSED:
        return replace(facts, role=Role.EAGER, reason=f"forced to {order.executor}", forced=order.executor)
    return replace(facts, forced=order.executor)


def _violation(node: Node, order: Order, facts: Facts, reason: str) -> Violation:
    value = node.meta.get("val")
    tensor = f"{facts.tensor} on {facts.tensor.device}" if facts.tensor else _described(value)
    return Violation(order.executor, str(node.target), tensor, reason, user_line(node))


def _described(value: Any) -> str:
    """Describe outputs that are no single strided tensor."""
    if isinstance(value, (tuple, list)):
        return ", ".join(_described(v) for v in value)
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}[{', '.join(map(str, value.shape))}] on {value.device}"
    return type(value).__name__


def index_lines(nodes: Iterable[Node]) -> dict[str, str]:
    """Return where the user wrote what indexes by loaded values, as ``model.py:12; model.py:20``, per op."""
    lines: dict[str, dict[str, None]] = {}
    for node in nodes:
        row = lookup(node.target)
        if row is not None and row.kind in (Kind.GATHER, Kind.SCATTER):
            lines.setdefault(str(node.target), {})[user_place(node)] = None
    return {op: "; ".join(filter(None, places)) for op, places in lines.items()}
