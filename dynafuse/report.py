"""What dynafuse decided about a function: :func:`explain` plans it, a :class:`Report` prints the plan.

Worked example, for a machine without a GPU::

    >>> import torch
    >>> report = explain(lambda x: torch.softmax(x, -1) * 2, torch.randn(64, 1024), device="h200")
    >>> [step["ops"] for step in report.to_dict()["graphs"][0]["steps"]]  # doctest: +NORMALIZE_WHITESPACE
    [['aten.amax.default', 'aten.sub.Tensor', 'aten.exp.default', 'aten.sum.dim_IntList', 'aten.div.Tensor',
      'aten.mul.Tensor']]
    >>> print(report)  # doctest: +SKIP
    plan for NVIDIA H200: 1 graph, 1 distinct kernel
    <BLANKLINE>
    graph 1, inference: 6 ops → 1 kernel (1 distinct), 0 eager calls; fused part 2.9 µs
    ...

Planning compiles no kernel and runs the graphs node by node, on whatever device the tensors are.
"""

from __future__ import annotations

import copy
import io
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.fx import Node
from torch.utils import _pytree as pytree

from dynafuse import backend
from dynafuse.backend import Compiled
from dynafuse.config import resolve
from dynafuse.ir import Annotated, Facts, Refusal, Region
from dynafuse.ops import Kind
from dynafuse.partition import device as devices
from dynafuse.partition.cost import eager_us

WIDTH = 120  # columns of the printed tables, whatever the terminal is
STEP_WIDTH = 28  # columns for a step's name
OPS_SHOWN = 6  # different ops that a step's line names


@dataclass(frozen=True)
class ReportedStep:
    """One step that launches work: a fused region, or an op that runs eager.

    ``ops`` are overload names in graph order. ``bytes`` counts what is read and written, each tensor once. ``key`` is
    None for eager steps, ``predicted_us`` for those that the cost model has no price for. ``reused`` says that an
    earlier step of the report has the same key; ``reason`` says why an eager step is eager.
    """

    name: str
    executor: str
    ops: tuple[str, ...]
    key: str | None
    bytes: int | None
    predicted_us: float | None
    reused: bool = False
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The step as data; only eager steps have a reason."""
        names = ("executor", "ops", "key", "bytes", "predicted_us", "reused")
        found = {name: getattr(self, name) for name in names} | {"ops": list(self.ops)}
        return found | {"reason": self.reason} if self.key is None else found


@dataclass(frozen=True)
class ReportedGraph:
    """One graph: ``forward``, ``backward`` or ``inference``. ``ops`` counts those that compute, each once."""

    kind: str
    steps: tuple[ReportedStep, ...]
    ops: int
    refusals: tuple[Refusal, ...]

    @property
    def fused(self) -> tuple[ReportedStep, ...]:
        """The steps that are fused regions."""
        return tuple(step for step in self.steps if step.key is not None)

    @property
    def summary(self) -> str:
        """The graph in one line."""
        calls = len(self.steps) - len(self.fused)
        distinct = len({step.key for step in self.fused})
        us = sum(step.predicted_us or 0.0 for step in self.fused)
        kernels = f"{_count(len(self.fused), 'kernel')} ({distinct} distinct)"
        return f"{_count(self.ops, 'op')} → {kernels}, {_count(calls, 'eager call')}; fused part {us:.1f} µs"


@dataclass(frozen=True)
class Report:
    """The plans of all graphs of a function, in the order in which they were compiled.

    ``device`` names what was planned for, ``title`` spells it out. ``str`` gives plain tables of a fixed width.
    """

    device: str
    title: str
    graphs: tuple[ReportedGraph, ...]

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The merges that were turned down, over all graphs."""
        return tuple(refusal for graph in self.graphs for refusal in graph.refusals)

    @property
    def kernels(self) -> int:
        """How many different kernels the graphs need."""
        return len({step.key for graph in self.graphs for step in graph.fused})

    def to_dict(self) -> dict[str, Any]:
        """The report as data that ``json`` can write."""
        graphs = [{"kind": g.kind, "steps": [step.to_dict() for step in g.steps]} for g in self.graphs]
        return {"device": self.device, "graphs": graphs, "kernels": self.kernels}

    def __str__(self) -> str:
        graphs = _count(len(self.graphs), "graph")
        lines = [f"plan for {self.title}: {graphs}, {_count(self.kernels, 'distinct kernel')}"]
        if not self.graphs:
            lines.append("nothing to compile: no tensor operations were captured")
        for number, graph in enumerate(self.graphs, 1):
            lines += ["", f"graph {number}, {graph.kind}: {graph.summary}"]
            if graph.steps:
                lines.append(_rendered(_table(graph)))
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Report:
    """Plan ``fn(*args, **kwargs)``, and its backward if an output requires grad, and report the plan.

    ``fn`` is a function or an nn.Module; ``device`` names a described GPU to plan for, such as ``"h200"``, which need
    not be there (a ``device`` argument of ``fn`` itself can be bound with ``functools.partial``). Options come from the
    environment.

    The function is called once, and a backward runs from the sum of its outputs. A module, and the tensors among the
    arguments, are copied first, so that parameters, buffers and inputs stay as they are; gradients never go to a
    ``.grad``, and random number generators are put back. Only what a plain function changes by itself (buffers of a
    module that it closes over, a list that it appends to) stays changed. Dynamo is reset before and after: what was
    compiled compiles again at its next call.

    Raises OptionError for a device that is not described, and whatever ``fn`` raises.
    """
    name = device or resolve().device
    if name is not None:
        devices.describe(name)
    compiled: list[Compiled] = []
    call, args, kwargs = _detached(_eager(fn), args, kwargs)
    options: dict[str, Any] = {} if name is None else {"device": name}
    with _fresh_dynamo(), _unchanged_random(), backend.listening(compiled.append, plan_only=True):
        _backward(torch.compile(call, backend=backend.dynafuse, options=options)(*args, **kwargs))
    return _report(compiled, name)


# ---------------------------------------------------------------------- running without a trace


def _eager(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiled function or module was compiled from; anything else as it is."""
    return torch._dynamo.eval_frame.innermost_fn(getattr(fn, "_orig_mod", fn))


def _detached(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function with its arguments, where modules and tensors are copies that share memory as the originals do."""
    memo: dict[int, Any] = {}
    call = copy.deepcopy(fn, memo) if isinstance(fn, torch.nn.Module) else _wrapped(fn)
    twins: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = memo[id(tensor)] if id(tensor) in memo else _twin(tensor, memo)
        return twins[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, twin, (args, kwargs))
    return call, args, kwargs


def _wrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of our own around ``fn``: Dynamo skips torch's functions when they are what is compiled."""
    return lambda *args, **kwargs: fn(*args, **kwargs)


def _twin(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """The same sizes, strides, values and marks (``mark_dynamic``), outside the original's autograd graph."""
    made: torch.Tensor = copy.deepcopy(tensor.detach(), memo).requires_grad_(tensor.requires_grad)
    made = made if tensor.is_leaf else made.clone()  # no leaf either: it may be overwritten
    made.__dict__.update(tensor.__dict__)
    return made


@contextmanager
def _fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, and nothing left behind."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextmanager
def _unchanged_random() -> Iterator[None]:
    """Put torch's random number generators back, on all devices."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def _backward(result: Any) -> None:
    """Differentiate the sum of the tensors in ``result`` that require grad; the gradients are dropped."""
    leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    outputs = list({id(leaf): leaf for leaf in leaves}.values())
    inputs = _grad_leaves(outputs)
    if inputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)


def _grad_leaves(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a backward from ``outputs`` would put gradients on."""
    found = {id(t): t for t in outputs if t.grad_fn is None}
    stack = [t.grad_fn for t in outputs]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack.extend(after for after, _ in node.next_functions)
        if hasattr(node, "variable"):  # only the nodes that accumulate into a leaf have one
            found[id(node.variable)] = node.variable
    return list(found.values())


# ---------------------------------------------------------------------- from plans to values


def _report(compiled: Sequence[Compiled], device: str | None) -> Report:
    named = devices.describe(device) if device else _planned_for(compiled)
    keys: set[str] = set()
    graphs = tuple(_graph(one, named, keys) for one in compiled)
    return Report(named.name if named else "cpu", named.title if named else "CPU, where nothing is fused", graphs)


def _planned_for(compiled: Sequence[Compiled]) -> devices.Device | None:
    """The device whose costs decided; None if no graph had anything to fuse and no GPU is there."""
    found = [one.device for one in compiled if one.plan.regions or torch.cuda.is_available()]
    return found[0] if found else None


def _graph(compiled: Compiled, device: devices.Device | None, keys: set[str]) -> ReportedGraph:
    """One graph's steps, priced for ``device``; ``keys`` are those of the graphs before, and grows."""
    plan = compiled.plan
    steps: list[ReportedStep] = []
    for step in plan.steps:
        if isinstance(step, Region):
            key = compiled.bounds[step.name].key
            steps.append(_fused_step(step, plan.annotated, key, key in keys))
            keys.add(key)
        elif _launches(step, plan.annotated):
            steps.append(_eager_step(step, plan.annotated, device))
    fused = {node for region in plan.regions for node in _computing(region, plan.annotated)}
    calls = sum(step.key is None for step in steps)
    return ReportedGraph(compiled.kind, tuple(steps), len(fused) + calls, plan.refusals)


def _fused_step(region: Region, annotated: Annotated, key: str, reused: bool) -> ReportedStep:
    ops = tuple(str(node.target) for node in _computing(region, annotated))
    return ReportedStep(region.name, region.executor, ops, key, region.bytes, region.predicted_us, reused)


def _computing(region: Region, annotated: Annotated) -> Sequence[Node]:
    return [node for node in region.nodes if annotated.facts[node].role == "fused"]


def _launches(node: Node, annotated: Annotated) -> bool:
    """Whether a step outside the regions calls something: views and picking one of several outputs do not."""
    view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    return annotated.facts[node].role == "eager" and node.target is not operator.getitem and not view


def _eager_step(node: Node, annotated: Annotated, device: devices.Device | None) -> ReportedStep:
    facts, moved = annotated.facts[node], _bytes(node, annotated)
    us = _eager_us(facts, moved, device)
    return ReportedStep(node.name, "eager", (str(node.target),), None, moved, us, reason=facts.reason)


def _eager_us(facts: Facts, moved: int | None, device: devices.Device | None) -> float | None:
    """The price of an op that could be fused but for its operands: memory bounds it. Others have none."""
    if device is None or moved is None or facts.row is None or facts.row.kind is Kind.OPAQUE:
        return None
    return eager_us(moved, device)


def _bytes(node: Node, annotated: Annotated) -> int | None:
    """Bytes of an eager call's tensors, each once; None if one of them is not known."""
    facts = [annotated.facts[n] for n in {node: None, **dict.fromkeys(node.all_input_nodes)}]
    tensors = [f.tensor for f in facts if f.role != "host"]
    return sum(t.bytes for t in tensors if t is not None) if None not in tensors else None


# ---------------------------------------------------------------------- from values to text


def _table(graph: ReportedGraph) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False)
    table.add_column("step", max_width=STEP_WIDTH, no_wrap=True)
    table.add_column("executor", no_wrap=True)
    table.add_column("ops", ratio=1)
    for title in ("MB", "µs"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("kernel", "reuse"):
        table.add_column(title, no_wrap=True)
    for step in graph.steps:
        table.add_row(*map(escape, _cells(step)))
    return table


def _cells(step: ReportedStep) -> Sequence[str]:
    megabytes = "–" if step.bytes is None else f"{step.bytes / 1e6:.3f}"
    us = "–" if step.predicted_us is None else f"{step.predicted_us:.1f}"
    ops = _shorten(step.ops) + (f": {step.reason}" if step.reason else "")
    return step.name, step.executor, ops, megabytes, us, (step.key or "–")[:8], "reused" if step.reused else ""


def _shorten(ops: Sequence[str]) -> str:
    """Ops without their overloads, equal ones counted: ``mul ×3, add, rsqrt``."""
    counts = Counter(_short(op) for op in ops)
    parts = [name if n == 1 else f"{name} ×{n}" for name, n in counts.items()]
    rest = len(parts) - OPS_SHOWN
    return ", ".join(parts[:OPS_SHOWN]) + (f", … {rest} more" if rest > 0 else "")


def _short(op: str) -> str:
    """``aten.mul.Tensor`` as ``mul``."""
    name = op.split(".")[1] if op.count(".") == 2 else op
    return "cast" if name in ("convert_element_type", "_to_copy") else name


def _rendered(table: Table) -> str:
    """A table as plain text; no line ends in a space."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
