"""A report as one HTML page: its data as JSON inside, and a script that draws what is in view of it.

The page loads nothing. Whatever comes from the user's code (names of ops, lines) is data for the script, which sets text
and never markup; the JSON has no character that could end the element it is in.

Worked example: ``page(report)`` begins with ``<!DOCTYPE html>``; a plan of 2,000 steps takes about a megabyte.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from dynafuse.report.layout import layout
from dynafuse.report.text import breaks, extent, place, relatives, reused, short, shorten, summary, text, total

if TYPE_CHECKING:  # a report is printed by this module
    from dynafuse.report.data import Report, ReportedGraph, ReportedStep, Second

MOST_REFUSALS = 5000  # of a graph that the page lists
MOST_MERGES = 40  # of a step that the page lists
MOST_DIFFERENCES = 12  # between a step's kernel and its relative's that the page lists
MOST_TEXT = 400  # characters of anything that the user's code named


def page(report: Report) -> str:
    """The page."""
    strings: dict[str, int] = {}
    graphs = [_graph(graph, number, strings) for number, graph in enumerate(report.graphs, 1)]
    data = {"graphs": graphs, "strings": list(strings)}
    return _template().render(title=report.title, found=extent(report), unusable=list(report.unusable.values()), data=data,
                              breaks=breaks(report), empty=report.empty,
                              reuse=reused(report.reuse) if report.reuse.regions else "", relatives=relatives(report),
                              plain=text(report))


@cache
def _template() -> Template:
    loader = PackageLoader("dynafuse.report", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("page.html.jinja")


def _graph(graph: ReportedGraph, number: int, strings: dict[str, int]) -> dict[str, Any]:
    """A graph for the script. Texts that repeat are numbers into ``strings``, steps are numbers in the order of the plan."""
    position = {step.name: i for i, step in enumerate(graph.steps)}
    places = layout([[position[name] for name in step.reads] for step in graph.steps])
    steps = [_step(step, strings) | _second(step.second(graph.bound_by)) | _relative(step, number, strings)
             for step in graph.steps]
    for step, row, x in zip(steps, places.rows, places.centres, strict=True):
        step.update(row=row, x=x)
    return {
        "kind": graph.title,
        "summary": summary(graph),
        "total": total(graph) if graph.bound_by else "",
        "width": places.width,
        "rows": max(places.rows, default=-1) + 1,
        "steps": steps,
        "edges": [[e.source, e.target, *e.lanes] for e in places.edges if not e.far],
        "far": [[e.source, e.target] for e in places.edges if e.far],
        "refusals": _refusals(graph, strings),
        "refused": len(graph.refusals),
    }


def _step(step: ReportedStep, strings: dict[str, int]) -> dict[str, Any]:
    """A step for the script; what is empty is left out."""
    ops = Counter(map(short, step.ops))
    found = {
        "name": _cut(step.name),
        "executor": step.executor,
        "label": _held(shorten(step.ops), strings),
        "ops": [[_held(name, strings), number] for name, number in ops.items()],
        "key": step.key,
        "bytes": step.bytes,
        "us": _rounded(step.predicted_us),
        "host": _rounded(step.host_us),
        "reused": step.reused,
        "origin": step.origin,
        "family": str(step.family) if step.family else None,
        "kernel_class": step.kernel_class,
        "prices": [[p.executor, _rounded(p.device_us), _rounded(p.host_us), p.override] for p in step.prices],
        "unsure": list(step.unsure),
        "measured": {name: _rounded(us) for name, us in step.measured_us.items()},
        "reason": _held(step.reason, strings) if step.reason else None,
        "forced": step.forced,
        "fallback": [_held(reason, strings) for reason in step.fallback],
        "notes": [_held(note, strings) for note in step.notes],
        "merges": [_held(merge, strings) for merge in step.merges[:MOST_MERGES]],
        "lines": [_held(line, strings) for line in step.lines],
    }
    return {name: value for name, value in found.items() if not (value is None or value is False or value in ("", [], {}))}


def _second(second: Second | None) -> dict[str, Any]:
    """The next best executor: its name, of what its time is, the time, and how much more that is."""
    if second is None:
        return {}
    more = None if second.more is None else _rounded(second.more)
    return {"second": [second.executor, second.of, _rounded(second.us), more]}


def _relative(step: ReportedStep, graph: int, strings: dict[str, int]) -> dict[str, Any]:
    """The step whose kernel is nearly this one's, and what keeps them apart."""
    if step.relative is None:
        return {}
    listed = step.relative.differences[:MOST_DIFFERENCES]
    return {"nearly": _held(place(step.relative, graph), strings), "apart": [_held(one, strings) for one in listed]}


def _refusals(graph: ReportedGraph, strings: dict[str, int]) -> list[Any]:
    """Kind, both nodes and the detail of each, with the steps that the nodes are in."""
    holders: dict[str, set[int]] = {}
    for i, step in enumerate(graph.steps):
        for name in step.nodes:
            holders.setdefault(name, set()).add(i)
    return [
        [_held(r.kind, strings), _held(r.first, strings), _held(r.second, strings), _held(r.detail, strings),
         sorted(holders.get(r.first, set())), sorted(holders.get(r.second, set()))]
        for r in islice(graph.refusals, MOST_REFUSALS)
    ]


def _held(value: str, strings: dict[str, int]) -> int:
    """The number of a text."""
    return strings.setdefault(_cut(value), len(strings))


def _cut(value: str) -> str:
    return value if len(value) <= MOST_TEXT else value[: MOST_TEXT - 1] + "…"


def _rounded(value: float | None) -> float | None:
    """Three digits behind the point; more than JSON can hold as a very large number."""
    return None if value is None else round(min(value, 1e12), 3)
