"""The canonical form of a region, and its key.

A ``Spec`` holds everything that a region computes and nothing else: names, node order and layer numbers do not enter.
Lowering sees only a spec, so two regions with one key cannot need different kernels: for Triton, the spec without the floats
that do not change code and, as an option, for a class of sizes; both are arguments of its kernels.

Worked example: the residual adds of layers 3 and 17 both become ``%0 = aten.add.Tensor(in0, in1)`` over the same
layouts, hence one key and one kernel; so do norms that add 1e-5 and 1e-6. Where there are two, ``diff`` says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any

import sympy
import torch
from torch.fx import Node

from dynafuse import __version__
from dynafuse.cache.difference import differences
from dynafuse.cache.examples import checked_at_most, example_of, hint_of
from dynafuse.cache.fold_families import Member, member
from dynafuse.cache.hoisted import hoist_scalars
from dynafuse.cache.integers import Integers
from dynafuse.cache.size_classes import SIZES, any_size, classed
from dynafuse.ir import (
    INT32_LIMIT,
    Annotated,
    Axis,
    Dims,
    Layout,
    OpSpec,
    Plan,
    Ref,
    Refusal,
    Region,
    Role,
    Size,
    Spec,
    Store,
    iter_instances,
)
from dynafuse.lowering.base import VARIANT
from dynafuse.lowering.registry import executor
from dynafuse.ops import Kind
from dynafuse.ops.algebra import CONCATENATION, DIMENSIONS, commutes, counted_from_front
from dynafuse.ops.hoisted import hoisted_scalars

IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Arguments that say where and how eager would allocate; a kernel writes where its output's layout says."""


@dataclass(frozen=True)
class CanonicalRegion:
    """A spec with what its names stand for in one graph: the kernel's arguments."""

    region: Region
    spec: Spec
    code: Spec  # what its kernel is made from and keyed by: the spec, on Triton without what is among its arguments
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    ops: tuple[Node, ...]  # what the spec's ops are in the graph
    symbols: tuple[sympy.Expr, ...]  # what the spec's symbols are in the graph: sizes, or what is computed from them
    hoisted: tuple[float, ...]  # the values of the code's hoisted scalars
    key: str
    target: str  # what its kernel runs on: a device's capability or a library
    member: Member | None = None  # the family whose kernel serves it on Triton, where that is not its own
    classes: bool = False  # whether its kernel on Triton may be one for a class of sizes
    sizes: tuple[int, ...] = ()  # what the size symbols are that only the code has

    @property
    def family(self) -> Member | None:
        """Return the region as a member of the fold family whose kernel it runs on; None if it runs on its own kernel."""
        return self.member if executor(self.region.executor).takes_arguments else None

    @property
    def name(self) -> str:
        """Return its name in its plan."""
        return self.region.name

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        device: torch.device = self.region.outputs[0].meta["val"].device
        return device

    @property
    def hints(self) -> dict[str, int]:
        """Return the spec's symbols with their values in the example inputs; made-up ones where only data tell."""
        environment = self._environment
        return {name: hint_of(expr, environment) for name, expr in zip(self.spec.symbols, self.symbols, strict=True)}

    @property
    def has_unknown_sizes(self) -> bool:
        """Return whether hints are made up, which need not fit one another."""
        environment = self._environment
        return any(example_of(expr, environment) is None for expr in self.symbols)

    @property
    def _environment(self) -> Any:
        """Return what knows the symbols of its graph, if any does."""
        nodes = dict.fromkeys((*self.inputs, *(n for node in self.region.nodes for n in (node, *node.all_input_nodes))))
        return next((e for node in nodes for e in _environments(node.meta.get("val"))), None)

    @property
    def arguments(self) -> tuple[Node, ...]:
        """Return what the inputs of its kernel are, in order."""
        return self.inputs if self.family is None else tuple(self.inputs[i] for i in self.family.inputs)

    @property
    def count(self) -> int | None:
        """Return how many terms the kernel's fold has here, if the kernel asks."""
        return None if self.family is None else self.family.terms

    def __str__(self) -> str:
        shared = f", {self.family}" if self.family else ""
        return f"{self.name} on {self.region.executor}, key {self.key}{shared}\n{self.code}"


def _environments(value: Any) -> Iterator[Any]:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    yield from (size.node.shape_env for size in sizes if isinstance(size, torch.SymInt) and size.node.shape_env)


@dataclass(frozen=True)
class CanonicalPlan:
    """A plan whose regions are in canonical form; each prints as what it computes."""

    annotated: Annotated
    steps: tuple[CanonicalRegion | Node, ...]
    refusals: tuple[Refusal, ...] = ()
    unplaced: Mapping[Node, str] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[CanonicalRegion, ...]:
        """Return the steps that are regions."""
        return tuple(step for step in self.steps if isinstance(step, CanonicalRegion))

    @property
    def by_name(self) -> dict[str, CanonicalRegion]:
        """Return the regions by their names in the plan."""
        return {region.name: region for region in self.regions}

    @property
    def plan(self) -> Plan:
        """Return the plan as the planner made it, with what has been decided since."""
        steps = tuple(step.region if isinstance(step, CanonicalRegion) else step for step in self.steps)
        return Plan(self.annotated, steps, self.refusals, self.unplaced)

    def mapped(self, change: Callable[[CanonicalRegion], CanonicalRegion]) -> CanonicalPlan:
        """Return the plan with every region changed."""
        steps = tuple(change(step) if isinstance(step, CanonicalRegion) else step for step in self.steps)
        return replace(self, steps=steps)

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *(f"\n{region}" for region in self.regions)])


@cache
def versions() -> tuple[str, ...]:
    """Return the versions that change what a kernel's source or binary is."""
    return __version__, torch.__version__, version("triton")


def canonical(annotated: Annotated, region: Region, options: tuple[tuple[str, Any], ...], target: str,
              classes: bool = False) -> CanonicalRegion:
    """Return the spec of a region, with the key of its kernel.

    Args:
        annotated: The graph with its facts.
        region: One of its regions.
        options: Name and value of the options that change generated code (``Config.key``); they become a part of the spec.
        target: What the kernel runs on, a part of its key: see ``Executor.target``.
        classes: Whether a kernel that takes arguments is one for a class of sizes, where the region has one.
    """
    return _Canonical(annotated, region, classes).bound(options, target)


def rekeyed(bound: CanonicalRegion, region: Region, target: str) -> CanonicalRegion:
    """Return the same spec for a region that differs in its executor and what is said of it, on another target.

    Args:
        bound: The canonical region whose spec is kept.
        region: The same nodes with another executor, decision or reasons.
        target: What the kernel runs on now, a part of its key.
    """
    code = _code(bound.spec, region.executor, bound.classes, bound.member)
    return replace(bound, region=region, code=code.spec, sizes=code.sizes, hoisted=code.hoisted,
                   key=key_of(code.spec, target), target=target)


def varied(bound: CanonicalRegion, variant: str) -> CanonicalRegion:
    """Return a region whose kernel is made in another way than the usual one, and has a key of its own."""
    spec = replace(bound.spec, options=(*bound.spec.options, (VARIANT, variant)))
    return rekeyed(replace(bound, spec=spec), bound.region, bound.target)


def family(bound: CanonicalRegion, least: int) -> CanonicalRegion | None:
    """Return a region on its family's kernel, if its executor takes arguments and it has a fold of ``least`` terms."""
    takes_arguments = executor(bound.region.executor).takes_arguments
    family_member = member(bound.code, bound.hoisted, least) if takes_arguments else None
    return None if family_member is None else rekeyed(replace(bound, member=family_member), bound.region, bound.target)


@dataclass(frozen=True)
class Code:
    """What a kernel is made from, and what it takes as arguments beside tensors and the sizes of the graph."""

    spec: Spec
    sizes: tuple[int, ...] = ()
    hoisted: tuple[float, ...] = ()


def code_of(spec: Spec, classes: bool, family_member: Member | None = None) -> Code:
    """Return what a kernel that takes arguments is made from, for a spec, its class of sizes or its fold family.

    Args:
        spec: The region's own spec.
        classes: Whether to take the spec of its class of sizes, where it has one.
        family_member: The region as a member of its fold family, whose spec is taken instead; None if it runs on a kernel of
            its own.
    """
    form, sizes = classed(spec) if classes else (spec, ())
    code, hoisted = (family_member.code, family_member.hoisted) if family_member else hoist_scalars(form)
    return Code(code, sizes, hoisted)


def _code(spec: Spec, name: str, classes: bool, family_member: Member | None = None) -> Code:
    return code_of(spec, classes, family_member) if executor(name).takes_arguments else Code(spec)


class _Canonical:
    """Numbers a region's inputs, ops and size symbols in the order in which its outputs need them."""

    def __init__(self, annotated: Annotated, region: Region, classes: bool = False) -> None:
        self.facts = annotated.facts
        self.region = region
        self.classes = classes
        self.inside = set(region.nodes)
        self.inputs: dict[Node, int] = {}
        self.ops: dict[Node, int] = {}
        self.specs: list[OpSpec] = []
        self.integers = Integers(annotated.environment)
        self.calls = {node: self._call(node) for node in region.nodes}
        self.digests: dict[Node, tuple[str, ...]] = {}
        for node in region.nodes:  # operands come first
            self.calls[node] = self._ordered(node, self.calls[node])
            self.digests[node] = self._digest(node)

    def bound(self, options: tuple[tuple[str, Any], ...], target: str) -> CanonicalRegion:
        for node in self.region.outputs:
            self._visit(node)
        stores = tuple(self._store(node) for node in self.region.outputs)
        inputs = tuple(self._layout(node) for node in self.inputs)
        axes = tuple(Axis(self._size(axis.size), axis.reduced) for axis in self.region.axes)
        along = [(self.ops[node], self.region.dims[node], node) for node in self.ops if node in self.region.dims]
        reductions = tuple((op, dims) for op, dims, node in along if node in self.region.reductions)
        scans = tuple((op, dims) for op, dims, node in along if self._kind(node) is Kind.SCAN)
        symbols = self.integers.symbols
        spec = Spec(inputs, tuple(self.specs), axes, reductions, stores, tuple(map(str, symbols.values())), options,
                    scans, nests=self.region.nests)
        if symbols and executor(self.region.executor).takes_arguments:
            spec = self._with_examples(spec)
        code = _code(spec, self.region.executor, self.classes)
        return CanonicalRegion(self.region, spec, code.spec, tuple(self.inputs), self.region.outputs, tuple(self.ops),
                     tuple(symbols), code.hoisted, key_of(code.spec, target), target, classes=self.classes,
                     sizes=code.sizes)

    def _with_examples(self, spec: Spec) -> Spec:
        """Return a spec with what its symbols are in the example inputs, and with offsets of 32 bits if they fit."""
        environment = self.integers.environment
        examples = [known for expr in self.integers.symbols if (known := example_of(expr, environment)) is not None]
        if len(examples) < len(spec.symbols):
            return spec
        real = {symbol: expr for expr, symbol in self.integers.symbols.items()}
        extents = (sympy.sympify(extent).xreplace(real) for extent in spec.extents)
        return replace(spec, examples=tuple(examples), narrow=checked_at_most(extents, INT32_LIMIT, environment))

    def _kind(self, node: Node) -> Kind:
        row = self.facts[node].row
        assert row is not None, node
        return row.kind

    # ------------------------------------------------------------------ one form of a call

    def _call(self, node: Node) -> dict[str, Any]:
        """Return a call's arguments; the dimensions of reductions and concatenations counted from the front."""
        call = self.facts[node].call
        assert call is not None
        args = {name: value for name, value in call.args.items() if name not in IGNORED}
        if not self._kind(node).needs_rows and node.target not in CONCATENATION:
            return args
        rank = max((len(t.shape) for a in node.all_input_nodes if (t := self.facts[a].tensor) is not None), default=0)
        return {name: counted_from_front(value, rank) if name in DIMENSIONS else value for name, value in args.items()}

    def _ordered(self, node: Node, args: dict[str, Any]) -> dict[str, Any]:
        """Order operands that may change places by what they compute; inputs by their layouts."""
        names = list(args)[:2]
        operands = [args[name] for name in names]
        if not commutes(node.target, args) or not all(isinstance(a, Node) for a in operands):
            return args
        return args | dict(zip(names, sorted(operands, key=self._digest_of), strict=True))

    def _digest_of(self, node: Node) -> tuple[str, ...]:
        return self.digests[node] if node in self.digests else tuple(f"~{tensor}" for tensor in self._tensors(node))

    def _is_exact(self, node: Node) -> bool:
        """Return whether no float that does not change code takes part in a node."""
        return len(set(self._digest_of(node))) == 1

    def _digest(self, node: Node) -> tuple[str, ...]:
        """Digest what a node computes, whatever its inputs are called: without floats that do not change code, and with.

        Where sizes may have classes, before that without what has one.
        """
        args, numbers, tensors = self.calls[node], self._lifted(node), self._tensors(node)
        if not self.classes and not numbers and all(map(self._is_exact, node.all_input_nodes)):
            return (self._hashed(node, args, tensors[0], 0),) * 2
        forms = [args | dict.fromkeys(numbers, "number"), args]
        if self.classes:
            forms.insert(0, forms[0] | dict.fromkeys(SIZES & args.keys(), "size"))
        pairs = zip(forms, tensors, strict=True)
        return tuple(self._hashed(node, form, tensor, which) for which, (form, tensor) in enumerate(pairs))

    def _tensors(self, node: Node) -> tuple[str, ...]:
        """Return a node's tensor as text, for each of its digests."""
        tensor = self.facts[node].tensor
        exact = str(tensor)
        return (exact if tensor is None else any_size(tensor), exact, exact) if self.classes else (exact, exact)

    def _lifted(self, node: Node) -> Mapping[str, Any]:
        facts = self.facts[node]
        assert facts.tensor is not None
        operands = (t.dtype for a in node.all_input_nodes if (t := self.facts[a].tensor) is not None)
        return hoisted_scalars(facts.row, self.calls[node], facts.tensor.dtype, operands)

    def _hashed(self, node: Node, args: Mapping[str, Any], tensor: str, which: int) -> str:
        named = {name: self._named(value, which) for name, value in args.items()}
        text = f"{node.target} {named} {tensor} {self.facts[node].accuracy}".rstrip()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _named(self, value: Any, which: int) -> Any:
        if isinstance(value, Node):
            return self._digest_of(value)[which]
        return [self._named(item, which) for item in value] if isinstance(value, (list, tuple)) else str(value)

    # ------------------------------------------------------------------ numbering

    def _visit(self, root: Node) -> None:
        """Number ``root`` and what it needs, operands first, without recursion (chains may be long)."""
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in self.ops or node in self.inputs:
                continue
            if node not in self.inside:
                if self.facts[node].tensor is not None:
                    self.inputs[node] = len(self.inputs)
            elif ready:
                self._number(node)
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(self._operands(node)))

    def _operands(self, node: Node) -> Sequence[Node]:
        operands = dict.fromkeys(iter_instances(tuple(self.calls[node].values()), Node))
        return [a for a in operands if self.facts[a].role is not Role.HOST]

    def _number(self, node: Node) -> None:
        facts = self.facts[node]
        assert facts.tensor is not None
        args = tuple((k, self._argument(v)) for k, v in self.calls[node].items())
        self.ops[node] = len(self.specs)
        self.specs.append(OpSpec(str(node.target), args, self._sizes(facts.tensor.shape), facts.tensor.dtype,
                                 accuracy=facts.accuracy))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            if value in self.ops:
                return Ref("op", self.ops[value])
            return Ref("in", self.inputs[value]) if value in self.inputs else self._size(_expr(value.meta["val"]))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        return self._size(_expr(value)) if isinstance(value, (torch.SymInt, sympy.Expr)) else value

    def _sizes(self, sizes: Sequence[Size]) -> tuple[Size, ...]:
        return tuple(map(self._size, sizes))

    def _size(self, size: Size) -> Size:
        return self.integers.named(size)

    # ------------------------------------------------------------------ tensors

    def _layout(self, node: Node) -> Layout:
        tensor = self.facts[node].tensor
        assert tensor is not None
        return Layout(tensor.dtype, self._sizes(tensor.shape), self._sizes(tensor.stride), self.facts[node].alignment)

    def _store(self, node: Node) -> Store:
        dims: Dims = self.region.out_dims[node]
        target = self.region.copies.get(node)
        into = None if target is None else self.inputs.setdefault(target, len(self.inputs))
        scatters = self.facts[node].scatters_into is not None
        return Store(self.ops[node], self._layout(node if target is None else target), dims, into, scatters)


def _expr(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def key_of(spec: Spec, target: str) -> str:
    """Return the key of a spec: a digest of its text, the versions and the target."""
    return hashlib.sha256("\n".join([repr(spec), *versions(), target]).encode()).hexdigest()[:32]


def diff(a: CanonicalRegion | Spec, b: CanonicalRegion | Spec) -> list[str]:
    """Return why two regions missed each other, a plain sentence per difference; nothing for equal keys.

    Args:
        a, b: Regions in canonical form. Of one that is only a spec, specs are compared, and no keys.
    """
    if isinstance(a, Spec) or isinstance(b, Spec):
        return differences(*(region.spec if isinstance(region, CanonicalRegion) else region for region in (a, b)))
    if a.key == b.key:
        return []
    if a.region.executor != b.region.executor:
        return [*differences(a.spec, b.spec), f"executor {a.region.executor} against {b.region.executor}"]
    reasons = differences(a.code, b.code)
    if a.target != b.target:
        reasons.append(f"target {a.target} against {b.target}")
    return reasons or ["versions of dynafuse, torch or Triton"]


def reuse(bounds: Sequence[CanonicalRegion]) -> Mapping[str, int]:
    """Return how many regions each key serves."""
    counts: dict[str, int] = {}
    for bound in bounds:
        counts[bound.key] = counts.get(bound.key, 0) + 1
    return counts
