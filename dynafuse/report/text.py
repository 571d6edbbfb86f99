"""The text of a report: per graph a table of steps, and below it notes. No line is over 120 columns.

Worked example of the notes below a table::

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

from dynafuse.lowering.registry import EAGER

if TYPE_CHECKING:  # a report is printed by this module
    from dynafuse.report.data import Relative, Report, ReportedGraph, ReportedStep, Reuse


WIDTH = 120  # columns of what is printed, whatever the terminal is
STEP_WIDTH = 24  # columns for a step's name
OPS_SHOWN = 6  # different ops that a step's line names
STEPS_SHOWN = 6  # steps that a note names
LABEL_WIDTH = 12  # columns for a note's label
RELATIVES_SHOWN = 10  # new kernels that are nearly equal to an earlier one
RELATIVES_INDENT = 2
DIFFERENCES_WIDTH = 40  # columns that their differences have at least, however long the names of steps are

Notes = Iterator[tuple[str, str]]  # pairs of a label and a line


def text(report: Report) -> str:
    """Return the text of a report."""
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
            lines += [total(graph), eager_total(graph)]
        if graph.capture:
            lines += wrapped(graph.capture)
        if graph.replays and (graph.replays.replayed or graph.replays.launched):
            lines += wrapped(str(graph.replays))
        if graph.steps:
            lines.append(_rendered(_table(graph)))
            lines += notes(graph)
    related = relatives(report)
    if related:
        lines += ["", f"{NEARLY}:", *(" " * RELATIVES_INDENT + line for line in related)]
    return "\n".join(lines)


def breaks(report: Report) -> list[str]:
    """Return a line per place where Dynamo ended a graph, with the cause."""
    return [f"graph break at {graph_break.where} – {graph_break.reason}" for graph_break in report.breaks]


def extent(report: Report) -> str:
    """Return how much a report covers: ``2 graphs, 14 distinct kernels``."""
    return f"{count(len(report.graphs), 'graph')}, {count(report.kernels, 'distinct kernel')}"


def reused(reuse: Reuse) -> str:
    """Return a line on reuse: ``reuse: 9 regions on 5 kernels; 4 (44 %) have an earlier region's; 1 of the others …``."""
    def with_share(number: int) -> str:
        return f"{number} ({100 * number / reuse.regions:.0f} %)"

    launched = f"{count(reuse.regions, 'region')} on {count(reuse.distinct, 'kernel')}"
    has = "has" if reuse.exact == 1 else "have"
    families = f", {with_share(reuse.family)} one for folds of several lengths" if reuse.family else ""
    apart = f"; {reuse.apart} of the others nearly {'does' if reuse.apart == 1 else 'do'}" if reuse.apart else ""
    return f"reuse: {launched}; {with_share(reuse.exact)} {has} an earlier region's{families}{apart}"


NEARLY = "nearly the same kernels"


def relatives(report: Report) -> list[str]:
    """Return a line per new kernel that has a relative, with the differences, the fewest first."""
    related = [(number, step) for number, graph in enumerate(report.graphs, 1) for step in graph.fused if step.relative]
    related.sort(key=lambda pair: len(pair[1].relative.differences) if pair[1].relative else 0)
    lines = [differences_of(step, number, len(report.graphs) > 1) for number, step in related[:RELATIVES_SHOWN]]
    rest = len(related) - RELATIVES_SHOWN
    return [*lines, f"… {rest} more"] if rest > 0 else lines


def differences_of(step: ReportedStep, graph: int, names_graph: bool) -> str:
    """Return a line with a step's differences from its relative.

    Args:
        step: A step that has a relative.
        graph: The number of its graph.
        names_graph: Whether the line begins with that number.
    """
    assert step.relative is not None
    differences = list(step.relative.differences)
    head = (f"graph {graph}: " if names_graph else "") + f"{step.name} differs from {place(step.relative, graph)}: "
    room = WIDTH - RELATIVES_INDENT - len(head) - len("; … 999 more")
    shown = sum(length <= room for length in itertools.accumulate(len(difference) + 2 for difference in differences)) or 1
    cut = textwrap.shorten("; ".join(differences[:shown]), max(room, DIFFERENCES_WIDTH), placeholder=" …")
    return head + cut + (f"; … {len(differences) - shown} more" if len(differences) > shown else "")


def place(relative: Relative, graph: int) -> str:
    """Return the name of a relative as seen from a graph: ``r3``, or ``graph 1's r3``."""
    return relative.step if relative.graph == graph else f"graph {relative.graph}'s {relative.step}"


def summary(graph: ReportedGraph) -> str:
    """Return a line on a graph: ``8 ops → 2 kernels (1 distinct), 1 eager call; fused part 2.9 µs``."""
    calls = len(graph.steps) - len(graph.fused)
    distinct = len({step.key for step in graph.fused})
    us = sum(step.predicted_us or 0.0 for step in graph.fused)
    kernels = f"{count(len(graph.fused), 'kernel')} ({distinct} distinct)"
    return f"{count(graph.ops, 'op')} → {kernels}, {count(calls, 'eager call')}; fused part {us:.1f} µs"


def total(graph: ReportedGraph) -> str:
    """Return a line on a graph's predicted time, and on what it keeps in memory for the backward."""
    bound = "captured, the device bounds it" if graph.captured else f"the {graph.bound_by} bounds it"
    line = f"predicted: device {graph.device_us:.1f} µs, host {graph.host_us:.1f} µs; {bound}"
    if graph.kept is None:
        return line
    return f"{line}; keeps {count(graph.kept.tensors, 'tensor')}, {graph.kept.bytes / 1e6:.3f} MB for the backward"


def eager_total(graph: ReportedGraph) -> str:
    """Return a line on what a graph's ops would take one by one, as torch runs them: ``eager: device 41.5 µs, ...``."""
    return f"eager: device {graph.eager_us:.1f} µs, host {graph.eager_host_us:.1f} µs"


# ---------------------------------------------------------------------- the table


def _table(graph: ReportedGraph) -> Table:
    """Return the table of steps, with a column for the next best executor where any step has one."""
    compared = any(step.others for step in graph.steps)
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False)
    table.add_column("step", max_width=STEP_WIDTH, no_wrap=True)
    table.add_column("executor", no_wrap=True)
    table.add_column("ops", ratio=1)
    for title in ("MB", "µs", "eager"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("next best", "kernel", "reuse") if compared else ("kernel", "reuse"):
        table.add_column(title, no_wrap=True)
    for step in graph.steps:
        cells = _cells(step, graph.bound_by)
        table.add_row(*map(escape, cells if compared else (*cells[:6], *cells[7:])))
    return table


def _cells(step: ReportedStep, bound_by: str | None) -> Sequence[str]:
    megabytes = "–" if step.bytes is None else f"{step.bytes / 1e6:.3f}"
    us = "–" if step.predicted_us is None else f"{step.predicted_us:.1f}"
    eager = "–" if step.eager_us is None else f"{step.eager_us:.1f}"
    second = str(step.second(bound_by) or "")
    return step.name, step.executor, shorten(step.ops), megabytes, us, eager, second, (step.key or "–")[:8], reuse(step)


def reuse(step: ReportedStep) -> str:
    """Return where a step's kernel comes from.

    A fold family (``family: fold of 5 in 8``), an earlier step (``reused``) or, if the step has run, ``compiled``, ``disk``
    or ``memory``.
    """
    return f"family: {step.family}" if step.family else "reused" if step.reused else step.origin


def shorten(ops: Sequence[str]) -> str:
    """Return ops without their overloads, equal ones counted: ``mul ×3, add, rsqrt``."""
    parts = [times(name, n) for name, n in Counter(map(short, ops)).items()]
    return _some(parts, OPS_SHOWN)


def short(op: str) -> str:
    """Return ``mul`` for ``aten.mul.Tensor``; casts are all called ``cast``."""
    name = op.split(".")[1] if op.count(".") == 2 else op
    return "cast" if name in ("convert_element_type", "_to_copy") else name


def _rendered(table: Table) -> str:
    """Return a table as plain text without trailing spaces."""
    file = io.StringIO()
    Console(file=file, width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


# ---------------------------------------------------------------------- the notes below the table


def notes(graph: ReportedGraph) -> list[str]:
    """Return the notes on a graph's steps as lines: an empty one, then labelled ones. Empty without notes."""
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
    """Yield why ops run eager, a line per reason."""
    for reason, group in _grouped((step.reason, step) for step in steps if step.reason):
        yield EAGER, f"{shorten([step.ops[0] for step in group])}: {reason}"


def _overrides(steps: Sequence[ReportedStep]) -> Notes:
    """Yield per cost constant the values at which steps would go to another executor, in ascending order."""
    flips: dict[str, dict[float, list[str]]] = {}  # by constant and value, the names of the steps
    for step in steps:
        for price in step.others if not step.reused else ():
            if price.flip:
                flips.setdefault(price.flip.variable, {}).setdefault(price.flip.above, []).append(step.name)
    for constant, values in sorted(flips.items()):
        yield "would flip", f"{constant} above {_some([f'{v:.2f} ({_some(values[v])})' for v in sorted(values)])}"


def _unsure(steps: Sequence[ReportedStep]) -> Notes:
    """Yield the executors whose predictions are too close to the chosen one's, with the steps."""
    for names, group in _grouped((", ".join(step.unsure), step) for step in steps if step.unsure):
        yield "too close", f"{_names(group)}: {names}"


def _measurements(steps: Sequence[ReportedStep]) -> Notes:
    """Yield the measured device times of steps, the fastest executor first."""
    for step in steps:
        if step.measured_us:
            fastest_first = sorted(step.measured_us.items(), key=lambda pair: pair[1])
            yield "measured", f"{step.name}: {', '.join(f'{name} {us:.1f}' for name, us in fastest_first)} µs"


def _families(steps: Sequence[ReportedStep]) -> Notes:
    """Yield the steps that run on their fold families' kernels, with what that loses and saves at worst."""
    for width, group in _grouped((str(step.family.width), step) for step in steps if step.family):
        lost = max(step.family.loss_us for step in group if step.family)
        saved = min(step.family.saved_us for step in group if step.family)
        gain = f"a call loses {lost:.2f} µs at most, and saves {saved:.2f} of compile time at least"
        yield "family", f"{_names(group)} in kernels of {width} terms: {gain}"


def _forced(steps: Sequence[ReportedStep]) -> Notes:
    """Yield the steps that are forced onto an executor."""
    for executor, group in _grouped((step.forced or "", step) for step in steps if step.forced):
        yield "forced", f"{_names(group)} to {executor}"


def _fallback(steps: Sequence[ReportedStep]) -> Notes:
    """Yield the steps that do not run where they were asked to, with the reason."""
    for reason, group in _grouped((reason, step) for step in steps for reason in step.fallback):
        yield "fell back", f"{_names(group)}, asked for {reason}"


def _noted(steps: Sequence[ReportedStep]) -> Notes:
    """Yield other decisions about steps."""
    for note, group in _grouped((note, step) for step in steps for note in step.notes):
        yield "note", f"{_names(group)}: {note}"


NOTES: tuple[Callable[[Sequence[ReportedStep]], Notes], ...] = (
    _eager, _forced, _fallback, _unsure, _overrides, _measurements, _families, _noted,
)
"""The kinds of notes below a table, in order."""


def _grouped(pairs: Iterable[tuple[str, ReportedStep]]) -> Iterable[tuple[str, list[ReportedStep]]]:
    """Group steps by the string that they are paired with, in the order of first occurrence."""
    groups: dict[str, list[ReportedStep]] = {}
    for shared, step in pairs:
        groups.setdefault(shared, []).append(step)
    return groups.items()


def _names(steps: Sequence[ReportedStep]) -> str:
    return _some([step.name for step in steps])


def _some(parts: Sequence[str], most: int = STEPS_SHOWN) -> str:
    """Join the first parts by commas, followed by the number of the others."""
    rest = len(parts) - most
    return ", ".join(parts[:most]) + (f", … {rest} more" if rest > 0 else "")


def wrapped(line: str) -> list[str]:
    """Wrap a line to the width of the text."""
    return textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def count(number: int, what: str) -> str:
    """Return a number with its noun: ``1 graph``, ``2 graphs``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def times(name: str, number: int) -> str:
    """Return a name with how often it occurs: ``mul``, or ``mul ×3``."""
    return name if number == 1 else f"{name} ×{number}"
