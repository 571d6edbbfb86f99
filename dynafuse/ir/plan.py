"""Plans: a graph as regions that one kernel each computes, and single nodes; with the reasons for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch.fx import Node

from dynafuse.config import COST_PREFIX
from dynafuse.ir.graph import Annotated, Axis, Dims, Tensor
from dynafuse.ir.spec import Nest

MAX_TENSORS = 100
"""The most tensors that one kernel reads and writes."""


class RefusalKind(str, Enum):
    """Why two regions are not merged, or a region has no kernel."""

    # of a pair of regions
    REGION_TOO_LARGE = "region too large"
    DIFFERENT_DEVICES = "different devices"
    FORCED_APART = "forced to different executors"
    OVERWRITTEN = "reads what the other overwrites"
    SCATTERED = "known when its kernel has ended"
    READ_ELSEWHERE = "known at one place, read at another"
    CYCLE = "a path outside runs from one to the other"
    DOES_NOT_PAY = "does not pay"
    DIFFERENT_PLACES = "reads at different places"
    DIMENSIONS_DIFFER = "dimensions do not line up"
    FIXED_INDEX = "cannot be computed at another index"
    STORED = "stored, and read at another index"

    # of a region's price
    TOO_MANY_TENSORS = "too many tensors"
    ROWS_TOO_LONG = "rows too long for one pass"
    WAITS = "waits for all that shares long rows"  # while regions grow: no plan has it
    NO_EXECUTOR = "no executor takes it"
    TOO_MUCH_CODE = "computes too much at too many offsets"

    # of a region's iteration space
    REPEATED_AXIS = "one axis twice"
    DIFFERENT_REDUCTIONS = "reductions over different dimensions"
    SIZES_DIFFER = "sizes differ"
    FEWER_ROWS = "a reduction over fewer rows"
    NOT_CONTIGUOUS = "no contiguous rows"
    UNKNOWN_LENGTH = "rows of unknown length for one pass"
    INCOMPLETE = "used before it is complete"
    SEVERAL_STATES = "a column reduction of several states"
    SCANNED_APART = "scans along different dimensions, or in different orders"
    SCANNED_ACROSS = "a scan across rows that others reduce"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Refusal:
    """A rejected merge: what kind of obstacle, between which two nodes, with which numbers."""

    kind: RefusalKind
    first: str
    second: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.first} | {self.second}: {self.kind}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class Override:
    """The value of a cost constant from which on another executor is as fast on the device as the chosen one."""

    constant: str
    above: float

    @property
    def variable(self) -> str:
        """Return the environment variable that overrides the constant."""
        return COST_PREFIX + self.constant.upper()

    def __str__(self) -> str:
        return f"{self.variable} above {self.above:.2f}"


@dataclass(frozen=True)
class Option:
    """An executor that could have run a region: predicted microseconds, and which override would have made it win."""

    executor: str
    device_us: float
    host_us: float
    override: Override | None = None  # None for the winner, and where no single constant does it


@dataclass(frozen=True)
class FoldFit:
    """A region with a fold of ``terms`` and a kernel with one of ``width``."""

    terms: int
    width: int

    def __str__(self) -> str:
        return f"fold of {self.terms} in {self.width}"


@dataclass(frozen=True)
class FoldFamily(FoldFit):
    """Why a region runs on the kernel that its family shares: what that loses, and what it saves, microseconds a call."""

    loss_us: float
    saved_us: float


@dataclass(frozen=True)
class Decision:
    """Why a region runs where it does: the executors that could, the winner first.

    ``margin`` is how much more the second costs, relative to the first; ``unsure`` are those that the cost model cannot
    tell apart, so that a measurement should; ``measured`` are its microseconds, by executor. ``error`` is how far off the
    model may be, relatively. ``eager`` is what its ops take one by one.
    """

    options: tuple[Option, ...] = ()
    margin: float = float("inf")
    unsure: tuple[str, ...] = ()
    kernel_class: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)
    error: float = 0.0
    family: FoldFamily | None = None  # on Triton
    eager: Option | None = None


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
    reasons: tuple[str, ...] = ()  # what was decided about it after it had grown
    decision: Decision = field(default_factory=Decision)
    origins: tuple[str, ...] = ()  # the user's lines that it comes from
    merges: tuple[tuple[str, str], ...] = ()  # the pairs of nodes along which it grew
    nests: tuple[Nest, ...] = ()  # where loop nests that have nothing in common share its launch

    def __str__(self) -> str:
        ops = ", ".join(n.name for n in self.nodes)
        return f"{self.name} [{self.executor}] {ops}: {self.bytes / 1e6:.3f} MB, {self.predicted_us:.1f} us"


@dataclass(frozen=True)
class Plan:
    """A graph as steps in order: regions, and single nodes that run eager, are views, or compute sizes on the host.

    ``unplaced`` are fusible nodes that no executor takes, or that are cheaper eager: the plan has no steps until they are
    annotated to run eager.
    """

    annotated: Annotated
    steps: tuple[Region | Node, ...]
    refusals: tuple[Refusal, ...] = ()
    unplaced: Mapping[Node, str] = field(default_factory=dict)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Return the steps that are fused regions."""
        return tuple(step for step in self.steps if isinstance(step, Region))

    def made_by(self, step: Region | Node) -> dict[Node, Tensor]:
        """Return the tensors that a step makes in memory of their own."""
        nodes = [node for node in step.outputs if node not in step.copies] if isinstance(step, Region) else [step]
        return {node: tensor for node in nodes if (tensor := self.annotated.facts[node].tensor) is not None
                and self.annotated.memory(node) is node}

    def __str__(self) -> str:
        facts = self.annotated.facts
        lines = [str(s) if isinstance(s, Region) else f"{s.name} [{facts[s].role}] {s.target}" for s in self.steps]
        return "\n".join(lines)
