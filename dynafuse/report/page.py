"""The HTML page of a report: the data as JSON, and a script that draws the part that is in view.

The page loads nothing else. What comes from the user's code (names of ops, lines) is data for the script, which sets text
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
MOST_DIFFERENCES = 12  # between two kernels that the page lists
MOST_TEXT = 400  # characters of anything that the user's code named


def page(report: Report) -> str:
    """Return the page of a report."""
    strings: dict[str, int] = {}
    graphs = [_graph(graph, number, strings) for number, graph in enumerate(report.graphs, 1)]
    data = {"graphs": graphs, "strings": list(strings)}
    return _template().render(title=report.title, extent=extent(report), unusable=list(report.unusable.values()), data=data,
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
    """Return a graph for the script. Texts are numbers into ``strings``, which grows; steps are numbers in plan order."""
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
    """Return a step for the script, without empty fields."""
    ops = Counter(map(short, step.ops))
    fields = {
        "name": _cut(step.name),
        "executor": step.executor,
        "label": _number(shorten(step.ops), strings),
        "ops": [[_number(name, strings), number] for name, number in ops.items()],
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
        "reason": _number(step.reason, strings) if step.reason else None,
        "forced": step.forced,
        "fallback": [_number(reason, strings) for reason in step.fallback],
        "notes": [_number(note, strings) for note in step.notes],
        "merges": [_number(merge, strings) for merge in step.merges[:MOST_MERGES]],
        "lines": [_number(line, strings) for line in step.lines],
    }
    return {name: value for name, value in fields.items() if not (value is None or value is False or value in ("", [], {}))}


def _second(second: Second | None) -> dict[str, Any]:
    """Return the next best executor: its name, whether its time is the device's or the host's, the time, how much more."""
    if second is None:
        return {}
    more = None if second.more is None else _rounded(second.more)
    return {"second": [second.executor, second.of, _rounded(second.us), more]}


def _relative(step: ReportedStep, graph: int, strings: dict[str, int]) -> dict[str, Any]:
    """Return the earlier step whose kernel is nearly this one's, and the differences."""
    if step.relative is None:
        return {}
    listed = step.relative.differences[:MOST_DIFFERENCES]
    differences = [_number(difference, strings) for difference in listed]
    return {"nearly": _number(place(step.relative, graph), strings), "apart": differences}


def _refusals(graph: ReportedGraph, strings: dict[str, int]) -> list[Any]:
    """Return per refusal its kind, both nodes, the detail, and the steps that hold either node."""
    holders: dict[str, set[int]] = {}
    for i, step in enumerate(graph.steps):
        for name in step.nodes:
            holders.setdefault(name, set()).add(i)
    return [
        [_number(r.kind, strings), _number(r.first, strings), _number(r.second, strings), _number(r.detail, strings),
         sorted(holders.get(r.first, set())), sorted(holders.get(r.second, set()))]
        for r in islice(graph.refusals, MOST_REFUSALS)
    ]


def _number(value: str, strings: dict[str, int]) -> int:
    """Return the number of a text in ``strings``, where it is added if it is new."""
    return strings.setdefault(_cut(value), len(strings))


def _cut(value: str) -> str:
    return value if len(value) <= MOST_TEXT else value[: MOST_TEXT - 1] + "…"


def _rounded(value: float | None) -> float | None:
    """Round to three decimals; infinity, which JSON cannot hold, becomes a very large number."""
    return None if value is None else round(min(value, 1e12), 3)
