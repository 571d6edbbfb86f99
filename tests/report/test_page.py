"""The page of a report: complete, on its own, safe, small; and the places of the steps in its picture."""

from __future__ import annotations

import itertools
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from dynafuse.report import Report, ReportedGraph, explain
from dynafuse.report.layout import BOX, GAP, LANE, MOST_IN_ROW, MOST_ROWS_PASSED, layout
from dynafuse.report.page import MOST_REFUSALS
from tests.support.report_samples import HOSTILE, hostile, large, small

VOID = {"meta", "input", "br", "img", "link"}


class Page(HTMLParser):
    """Elements with their attributes, what scripts hold, and whether every element that begins ends."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


# ---------------------------------------------------------------------- the page


def test_every_step_is_there_with_what_is_known_of_it() -> None:
    page = Page(small().to_html())
    (graph,) = page.data["graphs"]
    assert [step["name"] for step in graph["steps"]] == ["r0", "mm", "r1", "r2"]
    string = page.data["strings"].__getitem__
    first, product, moved, forced = graph["steps"]
    assert first["prices"][1] == ["nvfuser", 12.0, 6.8, "DYNAFUSE_COST_EFFICIENCY_NVFUSER_ROW above 1.10"]
    assert (first["unsure"], first["measured"]) == (["triton", "nvfuser"], {"triton": 11.0, "nvfuser": 10.1})
    assert first["second"] == ["nvfuser", "device", 12.0, 0.154]
    assert string(product["reason"]) == "contraction: stays with the vendor's library" and "key" not in product
    assert [[string(name), n] for name, n in moved["ops"]] == [["mul", 2], ["cast", 1]]
    assert string(moved["notes"][0]).startswith("not on nvFuser") and string(moved["fallback"][0]).startswith("nvfuser")
    assert forced["forced"] == "nvfuser" and forced["reused"]
    assert string(moved["nearly"]) == "r0" and len(moved["apart"]) == 2 and "apart" not in first
    assert "r1 differs from r0: op 2: mul with other 2.0 against k0" in page.text and "on 2 kernels; 1 (33 %)" in page.text
    assert sorted([*map(tuple, graph["far"]), *((e[0], e[1]) for e in graph["edges"])]) == [(0, 1), (0, 3), (1, 2), (1, 3)]


def test_refusals_know_their_steps() -> None:
    page = Page(small().to_html())
    found = page.data["graphs"][0]["refusals"]
    assert [(page.data["strings"][r[0]], r[4], r[5]) for r in found] == [
        ("does not pay", [0], [2]), ("dimensions do not line up", [2], [3]),
    ]


def test_without_scripts_the_text_is_shown() -> None:
    page = Page(small().to_html())
    assert str(small()) in page.text


@pytest.mark.parametrize("report", [small(), large(100), Report("cpu", "CPU", ())], ids=["small", "large", "empty"])
def test_it_needs_nothing_else(report: Report) -> None:
    html = report.to_html()
    for address in re.findall(r"https?://[^\"'\s)<]+", html):
        assert address == "http://www.w3.org/2000/svg"  # the name of SVG, which nothing loads
    page = Page(html)
    assert not {tag for tag, _ in page.elements} & {"link", "iframe", "img", "object", "embed", "base"}
    assert not any({"src", "href", "action"} & set(attributes) for _, attributes in page.elements)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(|innerHTML|eval\(", html)


def test_hostile_names_stay_text() -> None:
    html = hostile().to_html()
    page = Page(html)
    assert len(page.scripts) == 2 and not any(tag == "img" for tag, _ in page.elements)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert HOSTILE in page.data["strings"] and page.data["graphs"][0]["steps"][0]["name"] == HOSTILE
    assert not re.search("[<>&]", page.scripts[0]) and "{{ 7 * 7 }}" in html


def test_controls_have_names() -> None:
    page = Page(small().to_html())
    for tag, attributes in page.elements:
        if tag in ("section", "aside") or attributes.get("role") in ("img", "group", "tablist"):
            assert attributes.get("aria-label") or attributes.get("aria-labelledby")
    html = small().to_html()
    assert html.startswith("<!DOCTYPE html>") and '<html lang="en">' in html
    assert html.count("<label>") == html.count("<input") == 2
    assert "prefers-color-scheme: dark" in html


def test_it_is_the_same_every_time() -> None:
    assert large(300).to_html() == large(300).to_html()
    made = [explain(lambda x, w: torch.relu(x) @ w, torch.ones(8, 8), torch.ones(8, 8), device="h200").to_html() for _ in "ab"]
    assert made[0] == made[1]


def test_a_deep_model_stays_small_and_quick() -> None:
    report = large(2000)
    began = time.perf_counter()
    html = report.to_html()
    assert time.perf_counter() - began < 20
    assert len(html.encode()) < 2_500_000
    assert len(Page(html).data["graphs"][0]["steps"]) == 2000


def test_refusals_are_bounded_and_counted() -> None:
    refusals = small().graphs[0].refusals * MOST_REFUSALS
    graph = Page(Report("h200", "", (ReportedGraph("forward", (), 0, refusals),)).to_html()).data["graphs"][0]
    assert (len(graph["refusals"]), graph["refused"]) == (MOST_REFUSALS, 2 * MOST_REFUSALS)


def test_save_writes_it(tmp_path: Path) -> None:
    path = small().save(tmp_path / "plan.html")
    assert path == tmp_path / "plan.html" and path.read_text(encoding="utf-8") == small().to_html()
    assert small().save(str(path)) == path
    with pytest.raises(OSError, match="none"):
        small().save(tmp_path / "none" / "plan.html")


# ---------------------------------------------------------------------- places


@pytest.mark.parametrize(
    "reads",
    [
        [],
        [[]],
        [[], [0], [0], [1, 2]],
        [[] for _ in range(50)],
        [[], *([i - 1] for i in range(1, 60))],
        [[], *([0] for _ in range(40)), list(range(1, 41))],
        [[j for j in {i - 1, i - 3, i // 2} if 0 <= j < i] for i in range(200)],
    ],
    ids=["nothing", "one", "diamond", "apart", "chain", "fan", "mesh"],
)
def test_steps_stand_below_what_they_read_and_apart_from_each_other(reads: list[list[int]]) -> None:
    places = layout(reads)
    assert all(places.rows[s] < places.rows[i] for i, sources in enumerate(reads) for s in sources)
    rows: dict[int, list[tuple[float, float]]] = {}
    for row, x in zip(places.rows, places.centres, strict=True):
        rows.setdefault(row, []).append((x, BOX))
    for edge in places.edges:
        assert len(edge.lanes) == (0 if edge.far else places.rows[edge.target] - places.rows[edge.source] - 1)
        for i, x in enumerate(edge.lanes, places.rows[edge.source] + 1):
            rows[i].append((x, LANE))
    for row in rows.values():
        assert sum(width == BOX for _, width in row) <= MOST_IN_ROW
        row.sort()
        for (x, width), (after, next_width) in itertools.pairwise(row):
            assert after - x >= (width + next_width) / 2 + GAP - 0.2  # places are rounded
    assert all(BOX / 2 <= x <= places.width - BOX / 2 for x in places.centres)


def test_a_chain_stands_straight_and_edges_that_pass_many_rows_are_apart() -> None:
    reads = [[], *([i - 1] for i in range(1, 40))]
    assert len(set(layout(reads).centres)) == 1
    far = [edge for edge in layout([*reads, [0, 39]]).edges if edge.far]
    assert [(e.source, e.target) for e in far] == [(0, 40)] and MOST_ROWS_PASSED < 40


def test_depth_does_not_make_the_picture_wide() -> None:
    """A residual path beside every few steps, on one side."""
    reads = [[j for j in ({i - 1, i - 4} if i % 4 == 0 else {i - 1}) if j >= 0] for i in range(1, 0x200)]
    assert layout([[], *reads]).width < 4 * BOX


def test_columns_that_a_narrow_page_leaves_out_are_named_in_its_style() -> None:
    text = small().to_html()
    assert "@media (max-width: 640px)" in text and ".wide { display: none; }" in text and text.count("wide: true") >= 6
