"""What the steps of the pipeline hand to each other: frozen values, each with a ``__str__`` worth reading.

The way of a graph: ``Annotated`` (an FX graph plus facts per node) → ``Plan`` (regions, eager calls and views in
order) → ``Spec`` per region (canonical, without names: what a kernel is made from and keyed by) → ``Kernel``.

Worked example: ``relu(x) + 1`` over ``float32[8, 4]`` becomes one region, whose spec prints as::

    in0: float32[8, 4] (4, 1)
    %0 = aten.relu.default(in0) : float32[8, 4]
    %1 = aten.add.Tensor(%0, 1) : float32[8, 4]
    store %1 (4, 1)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import sympy
import torch
from torch.fx import Graph, Node

from dynafuse.ops.literals import Number
from dynafuse.ops.symbols import symbol_of
from dynafuse.ops.table import Call, Row

if TYPE_CHECKING:  # it takes a second to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

T = TypeVar("T")
Size: TypeAlias = int | sympy.Expr
"""A size or stride: an int when static, a sympy expression over the graph's size symbols when dynamic."""

COUNT = "count"
"""The argument of a kernel that says how many terms its fold has."""

MAX_TENSORS = 100
"""The most tensors that one kernel reads and writes."""

INT32_LIMIT = 2**31 - 1 - 2**16
"""What offsets in 32 bits stay below, with room for a block beyond the end."""

PLACE_WIDTH = 160
"""Bytes that a kernel's asserts leave for the user's line: it is put into the binary that is loaded, and into no key."""

Dims: TypeAlias = tuple[tuple[int, ...], ...]
"""A tensor's dimensions in a region's axes: per dimension the axes that it runs over, outermost first."""


@dataclass(frozen=True)
class Tensor:
    """Sizes, strides (in elements), dtype and device of a strided tensor; ``hint`` is its number of elements for costs."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    hint: int

    @property
    def bytes(self) -> int:
        """Bytes of its elements, each counted once (a stride of zero repeats an element without moving it)."""
        return self.hint * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Facts:
    """What is known of one node. ``tensor`` is None for scalars and for ops with several outputs."""

    role: str  # input | host | view | fused | eager | output
    tensor: Tensor | None
    row: Row | None = None
    call: Call | None = None
    reason: str = ""  # why a node that computes runs eager
    forced: str | None = None  # the executor that the user's code or options hold it to
    fallback: str = ""  # which executor it was forced to without `strict`, and why that one does not run it


@dataclass(frozen=True)
class Annotated:
    """An FX graph with facts about each of its nodes."""

    graph: Graph
    facts: Mapping[Node, Facts]
    environment: ShapeEnv | None = field(default=None, compare=False)  # what torch knows of the sizes, if some are dynamic

    def __str__(self) -> str:
        return "\n".join(f"{node.name:24s} {f.role:6s} {f.tensor or ''} {f.reason}" for node, f in self.facts.items())


@dataclass(frozen=True)
class Axis:
    """One axis of a region's iteration space: its size, and whether a reduction of the region closes over it."""

    size: Size
    reduced: bool = False


@dataclass(frozen=True)
class Refusal:
    """A merge that was turned down: what kind of obstacle, between which two nodes, with which numbers."""

    kind: str
    first: str
    second: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.first} | {self.second}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Option:
    """An executor that could have run a region: predicted microseconds, and which override would have made it win."""

    executor: str
    device_us: float
    host_us: float
    override: str = ""


@dataclass(frozen=True)
class Fitted:
    """A region with a fold of ``terms`` and a kernel with one of ``width``."""

    terms: int
    width: int

    def __str__(self) -> str:
        return f"fold of {self.terms} in {self.width}"


@dataclass(frozen=True)
class Near(Fitted):
    """Why a region runs on the kernel that its family shares: what that loses, and what it saves, microseconds a call."""

    loss_us: float
    saved_us: float


@dataclass(frozen=True)
class Decision:
    """Why a region runs where it does: the executors that could, the winner first.

    ``margin`` is how much more the second costs, relative to the first; ``unsure`` are those that the cost model cannot
    tell apart, so that a measurement should; ``measured`` are its microseconds, by executor. ``error`` is how far off the
    model may be, relatively.
    """

    options: tuple[Option, ...] = ()
    margin: float = float("inf")
    unsure: tuple[str, ...] = ()
    kernel_class: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0
    near: Near | None = None  # on Triton


@dataclass(frozen=True)
class Region:
    """Nodes that one kernel computes. ``nodes`` may repeat cheap nodes of other regions: those are computed again."""

    name: str
    executor: str
    nodes: tuple[Node, ...]  # in graph order
    inputs: tuple[Node, ...]  # materialised tensors that are read
    outputs: tuple[Node, ...]  # what is stored, in graph order
    axes: tuple[Axis, ...]
    dims: Mapping[Node, Dims]  # of every node that runs along the axes; of a reduction, its operand's
    out_dims: Mapping[Node, Dims]  # of outputs
    reductions: frozenset[Node]  # those that are not written out element by element
    copies: Mapping[Node, Node]  # outputs that overwrite an input, with that input
    bytes: int
    predicted_us: float
    reasons: tuple[str, ...] = ()
    decision: Decision = field(default_factory=Decision)
    origins: tuple[str, ...] = ()  # the user's lines that it comes from

    def __str__(self) -> str:
        ops = ", ".join(n.name for n in self.nodes)
        return f"{self.name} [{self.executor}] {ops}: {self.bytes / 1e6:.3f} MB, {self.predicted_us:.1f} us"


@dataclass(frozen=True)
class Plan:
    """A graph as steps in order: regions, and single nodes that run eager, are views, or compute sizes on the host.

    ``unplaced`` are fusible nodes that no executor takes: the plan has no steps until they are annotated to run eager.
    """

    annotated: Annotated
    steps: tuple[Region | Node, ...]
    refusals: tuple[Refusal, ...] = ()
    unplaced: Mapping[Node, str] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The steps that are fused regions."""
        return tuple(step for step in self.steps if isinstance(step, Region))

    def __str__(self) -> str:
        facts = self.annotated.facts
        lines = [str(s) if isinstance(s, Region) else f"{s.name} [{facts[s].role}] {s.target}" for s in self.steps]
        return "\n".join(lines)


@dataclass(frozen=True)
class Ref:
    """A reference inside a spec: to its input or to its op number ``position``."""

    kind: str  # in | op
    position: int

    def __str__(self) -> str:
        return f"in{self.position}" if self.kind == "in" else f"%{self.position}"

    __repr__ = __str__


def references(value: Any) -> Iterator[Ref]:
    """The tensors among an op's arguments, in order, those in lists included."""
    return among(value, Ref)


def among(value: Any, kind: type[T]) -> Iterator[T]:
    """What of a type is among a call's arguments, in order, those in lists included."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from among(one, kind)


@dataclass(frozen=True)
class Layout:
    """A tensor as a kernel sees it: what code depends on, without names."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    aligned: bool = True  # whether its address is a multiple of 16 bytes

    def __str__(self) -> str:
        shape, stride = (", ".join(map(str, sizes)) for sizes in (self.shape, self.stride))
        return f"{str(self.dtype)[6:]}[{shape}] ({stride})" + ("" if self.aligned else " unaligned")


@dataclass(frozen=True)
class OpSpec:
    """One op of a spec: its overload's name, its arguments by schema name (tensors as ``Ref``), its output.

    A float that does not change code may be there as a ``Number``: an argument of the kernel. An op with a ``guard`` is
    computed only if the kernel's argument ``count`` is larger; otherwise it is its first operand.
    """

    target: str
    args: tuple[tuple[str, Any], ...]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    guard: int = 0

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value}" for name, value in self.args)
        guard = f" if {COUNT} > {self.guard}" if self.guard else ""
        return f"{self.target}({args}){guard} : {str(self.dtype)[6:]}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Store:
    """One stored op: to a new tensor of a layout, or into input ``into``."""

    op: int
    layout: Layout
    dims: Dims
    into: int | None = None


@dataclass(frozen=True)
class Spec:
    """A region in canonical form. Two regions with equal specs are computed by the same kernel."""

    inputs: tuple[Layout, ...]
    ops: tuple[OpSpec, ...]
    axes: tuple[Axis, ...]
    reductions: tuple[tuple[int, Dims], ...]  # op, its operand's dims; a reduction that is not here is written out
    stores: tuple[Store, ...]
    symbols: tuple[str, ...]  # each an integer argument of the kernel; what is known of its sign is in its name
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers that are not part of the spec, each a float32 argument of the kernel."""
        return tuple(value.name for op in self.ops for _, value in op.args if isinstance(value, Number))

    @property
    def counts(self) -> tuple[str, ...]:
        """The kernel's integer arguments besides sizes: ``count``, if an op has a guard."""
        return (COUNT,) if any(op.guard for op in self.ops) else ()

    @property
    def typical(self) -> Spec:
        """The spec whose sizes tell how it is scheduled: for a class of sizes that of its smallest, for others itself."""
        return self

    @property
    def wide(self) -> bool:
        """Whether some offset does not provably fit in 32 bits."""
        for layout in (*self.inputs, *(s.layout for s in self.stores)):
            last: Size = 1
            for size, stride in zip(layout.shape, layout.stride, strict=True):
                last = last + (size - 1) * stride
            if not isinstance(last, int) or last > INT32_LIMIT:
                return True
        shapes = (tuple(axis.size for axis in self.axes), *(op.shape for op in self.ops))  # indices count their elements
        points = [functools.reduce(operator.mul, shape, 1) for shape in shapes]
        return any(not isinstance(count, int) or count > INT32_LIMIT for count in points)

    def __str__(self) -> str:
        lines = [f"in{i}: {layout}" for i, layout in enumerate(self.inputs)]
        lines += [f"%{i} = {op}" for i, op in enumerate(self.ops)]
        lines += [f"store %{s.op} {s.layout}" + ("" if s.into is None else f" into in{s.into}") for s in self.stores]
        return "\n".join(lines)


@dataclass(frozen=True)
class Classed(Spec):
    """A spec of a class of sizes: its only size symbol is at least ``least`` and below twice that."""

    least: int = 1

    @property
    def most(self) -> int:
        """The largest value of the symbol."""
        return 2 * self.least - 1

    @property
    def typical(self) -> Spec:
        """The spec of the smallest size: a power of two, as most sizes are."""
        return self.at(self.least)

    @property
    def wide(self) -> bool:
        """Whether some offset does not provably fit in 32 bits, whatever the size."""
        return self.at(self.most).wide

    def at(self, size: int) -> Spec:
        """The spec of one size."""
        known = {symbol_of(name): sympy.Integer(size) for name in self.symbols}
        return Spec(**{one.name: _valued(getattr(self, one.name), known) for one in fields(Spec)} | {"symbols": ()})

    def __str__(self) -> str:
        return f"{', '.join(self.symbols)}: {self.least} to {self.most}\n{super().__str__()}"


def _valued(value: Any, known: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    """A part of a spec with ints for its sizes."""
    if isinstance(value, tuple):
        return tuple(_valued(one, known) for one in value)
    if isinstance(value, (Layout, OpSpec, Axis, Store)):
        return replace(value, **{one.name: _valued(getattr(value, one.name), known) for one in fields(value)})
    return int(value.xreplace(known)) if isinstance(value, sympy.Expr) else value


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a lowered region.

    ``arguments`` name, in order, what the kernel takes: ``in0``, ``out0``, ``tmp0`` (workspaces), size symbols,
    numbers (``k0``) and ``count``.
    ``grid`` holds integer expressions over the size symbols.
    """

    entry: str  # the function's name in the source
    signature: tuple[tuple[str, str], ...]  # argument, Triton type
    grid: tuple[Size, Size, Size]
    constants: tuple[tuple[str, int], ...]  # constexpr arguments
    warps: int
    stages: int = 1
    unaligned: frozenset[str] = frozenset()  # pointer arguments that may not be 16-byte aligned
    asserts: bool = False  # whether it checks something on the device


@dataclass(frozen=True)
class Workspace:
    """A temporary tensor of a lowered region."""

    name: str
    dtype: torch.dtype
    size: Size  # elements


@dataclass(frozen=True)
class Lowered:
    """Generated source with its launches, in order."""

    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()
    kernel_class: str = ""
    notes: tuple[str, ...] = field(default=())
