"""A report as plain text: a table of steps per graph, and below it what they have in common. No line is over 120 columns.

Worked example of what stands below a table::

    eager       mm ×9: contraction: stays with the vendor's library
    would flip  DYNAFUSE_COST_EFFICIENCY_NVFUSER_ROW above 0.93 (r4), 0.97 (r0, r9)
"""

from __future__ import annotations

import io
import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # a report is printed by this module
    from dynafuse.report.data import Relative, Report, ReportedGraph, ReportedStep, Reuse


WIDTH = 120  # columns of what is printed, whatever the terminal is
STEP_WIDTH = 24  # columns for a step's name
OPS_SHOWN = 6  # different ops that a step's line names
STEPS_SHOWN = 6  # steps that a line below the table names
LABEL_WIDTH = 12  # columns for what such a line is about
RELATIVES_SHOWN = 10  # kernels that are nearly an earlier one's
RELATIVES_INDENT = 2
MOST_NARROW = 40  # columns that what keeps them apart has at least, whatever the steps are called

Notes = Iterator[tuple[str, str]]  # what a line below the table is about, the line


def text(report: Report) -> str:
    """The whole report."""
    lines = wrapped(f"plan for {report.title}: {extent(report)}")
    for reason in report.unusable.values():
        lines += wrapped(reason)
    if report.reuse.regions:
        lines += wrapped(reused(report.reuse))
    for line in breaks(report):
        lines += wrapped(line)
    if report.dropped:
        lines.append(f"{count(report.dropped, 'earlier graph')} not listed")
    if not report.graphs:
        lines.append(report.empty)
    for number, graph in enumerate(report.graphs, 1):
        lines += ["", *wrapped(f"graph {number}, {graph.title}: {summary(graph)}")]
        if graph.bound_by:
            lines.append(total(graph))
        if graph.steps:
            lines.append(_rendered(_table(graph)))
            lines += notes(graph)
    found = relatives(report)
    return "\n".join([*lines, "", f"{NEARLY}:", *(" " * RELATIVES_INDENT + line for line in found)] if found else lines)


def breaks(report: Report) -> list[str]:
    """The places where Dynamo ended a graph, a line each, with the cause."""
    return [f"graph break at {one.where} – {one.reason}" for one in report.breaks]


def extent(report: Report) -> str:
    """How much a report covers: ``2 graphs, 14 distinct kernels``."""
    return f"{count(len(report.graphs), 'graph')}, {count(report.kernels, 'distinct kernel')}"


def reused(reuse: Reuse) -> str:
    """How far they are shared: ``reuse: 9 regions on 5 kernels; 4 (44 %) have an earlier region's; 1 of the others …``."""
    def part(number: int) -> str:
        return f"{number} ({100 * number / reuse.regions:.0f} %)"

    launched = f"{count(reuse.regions, 'region')} on {count(reuse.distinct, 'kernel')}"
    has = "has" if reuse.exact == 1 else "have"
    families = f", {part(reuse.family)} one for folds of several lengths" if reuse.family else ""
    apart = f"; {reuse.apart} of the others nearly {'does' if reuse.apart == 1 else 'do'}" if reuse.apart else ""
    return f"reuse: {launched}; {part(reuse.exact)} {has} an earlier region's{families}{apart}"


NEARLY = "nearly the same kernels"


def relatives(report: Report) -> list[str]:
    """What keeps kernels apart that are nearly the same, a line each, those with the fewest differences first."""
    found = [(number, step) for number, graph in enumerate(report.graphs, 1) for step in graph.fused if step.relative]
    found.sort(key=lambda pair: len(pair[1].relative.differences) if pair[1].relative else 0)
    lines = [apart(step, number, len(report.graphs) > 1) for number, step in found[:RELATIVES_SHOWN]]
    rest = len(found) - RELATIVES_SHOWN
    return [*lines, f"… {rest} more"] if rest > 0 else lines


def apart(step: ReportedStep, graph: int, named: bool) -> str:
    """What keeps a step's kernel apart from its relative's, cut to a line; ``named``: with the number of the graph."""
    assert step.relative is not None
    said = list(step.relative.differences)
    head = (f"graph {graph}: " if named else "") + f"{step.name} differs from {place(step.relative, graph)}: "
    room = WIDTH - RELATIVES_INDENT - len(head) - len("; … 999 more")
    shown = sum(length <= room for length in itertools.accumulate(len(one) + 2 for one in said)) or 1
    cut = textwrap.shorten("; ".join(said[:shown]), max(room, MOST_NARROW), placeholder=" …")
    return head + cut + (f"; … {len(said) - shown} more" if len(said) > shown else "")


def place(relative: Relative, graph: int) -> str:
    """A relative as it is called in a graph: ``r3``, or ``graph 1's r3``."""
    return relative.step if relative.graph == graph else f"graph {relative.graph}'s {relative.step}"


def summary(graph: ReportedGraph) -> str:
    """What became of a graph, in one line."""
    calls = len(graph.steps) - len(graph.fused)
    distinct = len({step.key for step in graph.fused})
    us = sum(step.predicted_us or 0.0 for step in graph.fused)
    kernels = f"{count(len(graph.fused), 'kernel')} ({distinct} distinct)"
    return f"{count(graph.ops, 'op')} → {kernels}, {count(calls, 'eager call')}; fused part {us:.1f} µs"


def total(graph: ReportedGraph) -> str:
    """The plan's predicted time in one line, and what it keeps in memory."""
    bound = "as a CUDA graph, the device bounds it" if graph.captured else f"the {graph.bound_by} bounds it"
    line = f"predicted: device {graph.device_us:.1f} µs, host {graph.host_us:.1f} µs; {bound}"
    if graph.kept is None:
        return line
    return f"{line}; keeps {count(graph.kept.tensors, 'tensor')}, {graph.kept.bytes / 1e6:.3f} MB for the backward"


# ---------------------------------------------------------------------- the table


def _table(graph: ReportedGraph) -> Table:
    """The steps; a column for the next best executor only where there is one."""
    compared = any(step.others for step in graph.steps)
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False)
    table.add_column("step", max_width=STEP_WIDTH, no_wrap=True)
    table.add_column("executor", no_wrap=True)
    table.add_column("ops", ratio=1)
    for title in ("MB", "µs"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("next best", "kernel", "reuse") if compared else ("kernel", "reuse"):
        table.add_column(title, no_wrap=True)
    for step in graph.steps:
        cells = _cells(step, graph.bound_by)
        table.add_row(*map(escape, cells if compared else (*cells[:5], *cells[6:])))
    return table


def _cells(step: ReportedStep, bound_by: str | None) -> Sequence[str]:
    megabytes = "–" if step.bytes is None else f"{step.bytes / 1e6:.3f}"
    us = "–" if step.predicted_us is None else f"{step.predicted_us:.1f}"
    second = str(step.second(bound_by) or "")
    return step.name, step.executor, shorten(step.ops), megabytes, us, second, (step.key or "–")[:8], reuse(step)


def reuse(step: ReportedStep) -> str:
    """Return where the kernel comes from: a fold family (``family: fold of 5 in 8``), an earlier step (``reused``), or, of
    a step that has run, how it was obtained (``compiled``, ``disk``, ``memory``)."""
    return f"family: {step.family}" if step.family else "reused" if step.reused else step.origin


def shorten(ops: Sequence[str]) -> str:
    """Ops without their overloads, equal ones counted: ``mul ×3, add, rsqrt``."""
    parts = [times(name, n) for name, n in Counter(map(short, ops)).items()]
    return _some(parts, OPS_SHOWN)


def short(op: str) -> str:
    """``aten.mul.Tensor`` as ``mul``."""
    name = op.split(".")[1] if op.count(".") == 2 else op
    return "cast" if name in ("convert_element_type", "_to_copy") else name


def _rendered(table: Table) -> str:
    """A table as plain text; no line ends in a space."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


# ---------------------------------------------------------------------- what stands below the table


def notes(graph: ReportedGraph) -> list[str]:
    """What several steps have in common, or what concerns a few: labelled lines, with an empty one before."""
    lines: list[str] = []
    shown = ""
    for label, line in itertools.chain.from_iterable(find(graph.steps) for find in NOTES):
        lines += textwrap.wrap(
            line, WIDTH - 1, initial_indent=f"{'' if label == shown else label:{LABEL_WIDTH}}",
            subsequent_indent=" " * (LABEL_WIDTH + 2), break_on_hyphens=False,
        )
        shown = label
    return ["", *(" " + line for line in lines)] if lines else []


def _eager(steps: Sequence[ReportedStep]) -> Notes:
    """Why ops run eager, one line per reason."""
    for reason, group in _grouped((step.reason, step) for step in steps if step.reason):
        yield "eager", f"{shorten([step.ops[0] for step in group])}: {reason}"


def _overrides(steps: Sequence[ReportedStep]) -> Notes:
    """Per constant at which values steps go to another executor, the first one to go first."""
    found: dict[str, dict[float, list[str]]] = {}
    for step in steps:
        for price in step.others if not step.reused else ():
            if price.flip:
                found.setdefault(price.flip.variable, {}).setdefault(price.flip.above, []).append(step.name)
    for constant, values in sorted(found.items()):
        yield "would flip", f"{constant} above {_some([f'{v:.2f} ({_some(values[v])})' for v in sorted(values)])}"


def _unsure(steps: Sequence[ReportedStep]) -> Notes:
    for names, group in _grouped((", ".join(step.unsure), step) for step in steps if step.unsure):
        yield "too close", f"{_names(group)}: {names}"


def _measured(steps: Sequence[ReportedStep]) -> Notes:
    for step in steps:
        if step.measured_us:
            times_ = ", ".join(f"{name} {us:.1f}" for name, us in sorted(step.measured_us.items(), key=lambda i: i[1]))
            yield "measured", f"{step.name}: {times_} µs"


def _families(steps: Sequence[ReportedStep]) -> Notes:
    for width, group in _grouped((str(step.family.width), step) for step in steps if step.family):
        lost = max(step.family.loss_us for step in group if step.family)
        saved = min(step.family.saved_us for step in group if step.family)
        told = f"a call loses {lost:.2f} µs at most, and saves {saved:.2f} of compile time at least"
        yield "family", f"{_names(group)} in kernels of {width} terms: {told}"


def _forced(steps: Sequence[ReportedStep]) -> Notes:
    for executor, group in _grouped((step.forced or "", step) for step in steps if step.forced):
        yield "forced", f"{_names(group)} to {executor}"


def _fallback(steps: Sequence[ReportedStep]) -> Notes:
    for reason, group in _grouped((reason, step) for step in steps for reason in step.fallback):
        yield "fell back", f"{_names(group)}, asked for {reason}"


def _noted(steps: Sequence[ReportedStep]) -> Notes:
    for note, group in _grouped((note, step) for step in steps for note in step.notes):
        yield "note", f"{_names(group)}: {note}"


NOTES: tuple[Callable[[Sequence[ReportedStep]], Notes], ...] = (
    _eager, _forced, _fallback, _unsure, _overrides, _measured, _families, _noted,
)
"""What is said below a table, in order."""


def _grouped(pairs: Iterable[tuple[str, ReportedStep]]) -> Iterable[tuple[str, list[ReportedStep]]]:
    """Steps by what they share, in the order of the first ones."""
    groups: dict[str, list[ReportedStep]] = {}
    for shared, step in pairs:
        groups.setdefault(shared, []).append(step)
    return groups.items()


def _names(steps: Sequence[ReportedStep]) -> str:
    return _some([step.name for step in steps])


def _some(parts: Sequence[str], most: int = STEPS_SHOWN) -> str:
    """The first few, and how many there are besides."""
    rest = len(parts) - most
    return ", ".join(parts[:most]) + (f", … {rest} more" if rest > 0 else "")


def wrapped(line: str) -> list[str]:
    """A line in as many as it needs."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def count(number: int, what: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def times(name: str, number: int) -> str:
    """``mul``, or ``mul ×3``."""
    return name if number == 1 else f"{name} ×{number}"
