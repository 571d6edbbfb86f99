"""The values of a report: frozen, and readable as data (``to_dict``), as text (``str``) and as a page (``to_html``).

Worked example, with the numbers of a softmax that two executors could run::

    step = report.graphs[0].steps[0]
    step.prices[0]    # Price("triton", 10.4, 5.0)
    step.prices[1]    # Price("nvfuser", 12.0, 6.8, Override("efficiency_nvfuser_row", 1.10))
    step.margin       # 0.17: with nvFuser the user would wait for the step 17 % longer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dynafuse.ir import FoldFamily, Override, Refusal
from dynafuse.report.breaks import Break
from dynafuse.runtime.observers import Replays


@dataclass(frozen=True)
class Price:
    """The predicted price of a step on one executor, in microseconds of the device and of the host.

    ``flip`` is the override of a cost constant that would make the executor as fast on the device as the chosen one; None
    for the chosen one, and where no single constant does it.
    """

    executor: str
    device_us: float
    host_us: float
    flip: Override | None = None

    @property
    def override(self) -> str:
        """Return ``flip`` as a variable to set, as ``DYNAFUSE_COST_EFFICIENCY_NVFUSER_ROW above 1.10``; "" without one."""
        return str(self.flip or "")

    def to_dict(self) -> dict[str, Any]:
        """Return the price as data that ``json`` can write."""
        return {"executor": self.executor, "device_us": self.device_us, "host_us": self.host_us, "override": self.override}


@dataclass(frozen=True)
class Second:
    """The second-best executor for a step.

    ``us`` is its time in microseconds, of the ``device`` or the ``host`` (``of``), whichever bounds the graph. ``more`` is
    how much longer that is than the chosen executor's, relatively; None where the chosen one takes no time.
    """

    executor: str
    of: str
    us: float
    more: float | None

    def __str__(self) -> str:
        host = " host" if self.of == "host" else ""
        return f"{self.executor} {self.us:.1f}{host}" + ("" if self.more is None else f" {percent(self.more)}")


def percent(more: float) -> str:
    """Format a relative difference: ``+31 %``, ``-4 %``; from ten times on as a factor, ``×12``."""
    return f"{100 * more:+.0f} %" if more < 9 else f"×{1 + more:.0f}"


@dataclass(frozen=True)
class Relative:
    """The earlier step whose kernel nearly equals that of a new one: its name, its graph (from 1 on) and the differences.

    The differences are those of ``dynafuse.cache.canonical.diff``; "the first" in them is the new step.
    """

    step: str
    graph: int
    differences: tuple[str, ...]


@dataclass(frozen=True)
class ReportedStep:
    """One step that launches work: a fused region, or an op that runs eager.

    ``ops`` are overload names in graph order, ``nodes`` their names in the graph. ``bytes`` counts what is read and
    written, each tensor once. ``key`` is the kernel's, None for eager steps. ``predicted_us`` and ``host_us`` are the times
    on the executor that runs the step, None where there is no price. ``reused`` says that an earlier step of the report has
    the same key, ``reason`` why an eager step is eager.
    """

    name: str
    executor: str
    ops: tuple[str, ...]
    key: str | None
    bytes: int | None
    predicted_us: float | None
    reused: bool = False
    reason: str = ""
    host_us: float | None = None
    eager_us: float | None = None  # predicted device time of the step's ops one by one
    eager_host_us: float | None = None
    prices: tuple[Price, ...] = ()  # of the executors that could run the step, best first
    margin: float | None = None  # how much longer the user would wait, host and device together, with the second
    unsure: tuple[str, ...] = ()  # executors whose predictions are closer than the model's error
    measured_us: Mapping[str, float] = field(default_factory=dict)  # measured device time by executor
    kernel_class: str = ""
    merges: tuple[str, ...] = ()  # pairs of nodes along which a region grew
    notes: tuple[str, ...] = ()  # other decisions about the step
    forced: str | None = None
    fallback: tuple[str, ...] = ()  # executors that were asked for and do not run the step, with the reason
    reads: tuple[str, ...] = ()  # earlier steps of the graph whose results the step reads
    nodes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # the user's lines that the step computes
    relative: Relative | None = None  # of a step with a new kernel: the earlier step whose kernel is nearly the same
    family: FoldFamily | None = None  # set if the kernel is one that several lengths of the fold share
    origin: str = ""  # of a step that has run: "compiled", or where its kernel was found, "disk" or "memory"

    @property
    def others(self) -> tuple[Price, ...]:
        """Return the prices of the executors that were not chosen, the best first."""
        return tuple(price for price in self.prices if price.executor != self.executor)

    def second(self, bound_by: str | None) -> Second | None:
        """Return the best executor that was not chosen, by the time that bounds the graph; None without one."""
        if not self.others:
            return None
        other = self.others[0]
        of = "host" if bound_by == "host" else "device"
        chosen_us, us = (self.host_us, other.host_us) if of == "host" else (self.predicted_us, other.device_us)
        return Second(other.executor, of, us, us / chosen_us - 1 if chosen_us else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as data that ``json`` can write."""
        plain = {name: _plain(value) for name, value in asdict(self).items()}
        return plain | {"prices": [price.to_dict() for price in self.prices]}


@dataclass(frozen=True)
class Reuse:
    """Counts of how far ``regions`` share their ``distinct`` kernels.

    Of the regions that have an earlier region's kernel, ``exact`` ones are equal to that region, and ``family`` ones share a
    kernel that was made for several lengths of a fold. ``apart`` ones have a new kernel though an earlier one is nearly the
    same. Regions of earlier graphs count as earlier.
    """

    regions: int
    distinct: int
    exact: int
    family: int
    apart: int

    @property
    def rate(self) -> float:
        """Return the share of regions that have an earlier region's kernel; 0 without regions."""
        return (self.exact + self.family) / self.regions if self.regions else 0.0


def reuse_of(steps: Sequence[ReportedStep]) -> Reuse:
    """Count how far some steps share kernels; eager ones do not count."""
    fused = [step for step in steps if step.key is not None]
    in_family = [step.family is not None for step in fused if step.reused]
    apart = sum(step.relative is not None for step in fused)
    return Reuse(len(fused), len({step.key for step in fused}), in_family.count(False), in_family.count(True), apart)


@dataclass(frozen=True)
class Kept:
    """The tensors that a forward keeps in memory for its backward, besides its inputs: their number and their bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class ReportedGraph:
    """One graph of a ``kind``: ``forward``, ``backward`` or ``inference``. ``ops`` counts the ops that compute, each once.

    ``captured`` says that the graph is replayed as a CUDA graph: its launches then cost the host nothing. ``called`` is
    how often a step of training or inference calls the graph: more than once for layers that ``reuse_layers`` compiles
    once. All times are those of one call. ``kept`` is None except for a forward. ``capture`` says why the graph is captured
    or not; it is empty if the option ``capture`` does not ask for it. ``replays`` counts the calls of a graph that may be
    captured, in this process. ``sizes`` are those for which alone a graph with dynamic sizes was compiled once more.
    """

    kind: str
    steps: tuple[ReportedStep, ...]
    ops: int
    refusals: tuple[Refusal, ...]
    captured: bool = False
    called: int = 1
    kept: Kept | None = None
    capture: str = ""
    replays: Replays | None = None
    sizes: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Return the kind, with the number of calls if that is more than one, and the sizes for which alone it is."""
        called = "" if self.called == 1 else f", {self.called} times a step"
        return f"{self.kind}{called}" + (f", for sizes of {', '.join(map(str, self.sizes))} alone" if self.sizes else "")

    @property
    def fused(self) -> tuple[ReportedStep, ...]:
        """Return the steps that are fused regions."""
        return tuple(step for step in self.steps if step.key is not None)

    @property
    def reuse(self) -> Reuse:
        """Return how far the regions share kernels with each other and with those of earlier graphs."""
        return reuse_of(self.steps)

    @property
    def device_us(self) -> float:
        """Return the predicted device time of all steps, microseconds; steps without a price do not count."""
        return sum(step.predicted_us or 0.0 for step in self.steps)

    @property
    def host_us(self) -> float:
        """Return the predicted host time of all steps, microseconds."""
        return sum(step.host_us or 0.0 for step in self.steps)

    @property
    def eager_us(self) -> float:
        """Return the predicted device time if every op ran eager, microseconds."""
        return sum(step.eager_us or 0.0 for step in self.steps)

    @property
    def eager_host_us(self) -> float:
        """Return the predicted host time if every op ran eager, microseconds."""
        return sum(step.eager_host_us or 0.0 for step in self.steps)

    @property
    def bound_by(self) -> str | None:
        """Return ``device`` or ``host``, whichever takes longer; None where a step has no price."""
        if not self.steps or any(step.predicted_us is None for step in self.steps):
            return None
        return "device" if self.captured or self.device_us >= self.host_us else "host"

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as data that ``json`` can write."""
        return {
            "kind": self.kind,
            "called": self.called,
            "sizes": list(self.sizes),
            "ops": self.ops,
            "device_us": self.device_us,
            "host_us": self.host_us,
            "eager_us": self.eager_us,
            "eager_host_us": self.eager_host_us,
            "bound_by": self.bound_by,
            "captured": self.captured,
            "capture": self.capture,
            "replays": asdict(self.replays) if self.replays else None,
            "kept": asdict(self.kept) if self.kept else None,
            "reuse": asdict(self.reuse),
            "steps": [step.to_dict() for step in self.steps],
            "refusals": [asdict(refusal) | {"kind": str(refusal.kind)} for refusal in self.refusals],
        }


@dataclass(frozen=True)
class Report:
    """The plans of all graphs of a function, in the order in which they were compiled.

    ``device`` names the device that was planned for, ``title`` spells it out. ``unusable`` are executors that the options
    name but that cannot be used, with the reason. ``breaks`` are the places where Dynamo ended a graph, so that there are
    several, or code runs eager. ``str`` gives plain tables of a fixed width.
    """

    device: str
    title: str
    graphs: tuple[ReportedGraph, ...]
    unusable: Mapping[str, str] = field(default_factory=dict)
    breaks: tuple[Break, ...] = ()
    dropped: int = 0  # earlier graphs that are not listed
    empty: str = "nothing to compile: no tensor operations were captured"  # the text of a report without graphs

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Return the rejected merges, over all graphs."""
        return tuple(refusal for graph in self.graphs for refusal in graph.refusals)

    @property
    def kernels(self) -> int:
        """Return the number of different kernels that the graphs need."""
        return self.reuse.distinct

    @property
    def reuse(self) -> Reuse:
        """Return how far all regions share kernels."""
        return reuse_of([step for graph in self.graphs for step in graph.steps])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data that ``json`` can write."""
        graphs = [graph.to_dict() for graph in self.graphs]
        return {"device": self.device, "graphs": graphs, "kernels": self.kernels, "reuse": asdict(self.reuse),
                "unusable": dict(self.unusable), "breaks": [asdict(graph_break) for graph_break in self.breaks],
                "dropped": self.dropped}

    def to_html(self) -> str:
        """Return the report as one page that needs nothing else: no network, no fonts, no other files."""
        from dynafuse.report.page import page  # needs jinja2, which is optional

        return page(self)

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_html` to a file and return its path.

        Raises:
            OSError: The file cannot be written.
        """
        path = Path(path)
        path.write_text(self.to_html(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        from dynafuse.report.text import text  # rich is slow to import

        return text(self)


def _plain(value: Any) -> Any:
    """Return a value with lists for its tuples, as JSON would have them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
