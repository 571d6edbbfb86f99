"""Many models in a few numbers: how a system does beside Inductor and eager over all of them.

Worked example: of two cases, one in half of Inductor's step and one in twice of it, ``summary_of("dynafuse", rows)`` says
``means["step_ms"]`` 1.0 and ``slowest`` ((2.0, "slow/train"),).
"""
from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.region_summary import BASE

Metrics = Mapping[str, Any]
Rows = Mapping[tuple[str, str], Metrics]  # (case, system) -> metrics

CLOCKS = ("step_ms", "device_ms", "cold_s", "peak_gb", "reserved_gb")
MOST_SLOW = 8


@dataclass(frozen=True)
class Summary:
    """What is said of one system over all cases.

    Attributes:
        cases, right, failed, skipped: how many it ran, of how many the results are right, failed, were not installed.
        means: geometric mean of this system's over Inductor's, by clock, over cases that are right on both.
        against_eager: that of the step over eager's.
        slowest: step over Inductor's and case, the slowest first.
    """

    cases: int
    right: int
    failed: int
    skipped: int
    means: Mapping[str, float]
    against_eager: float | None
    slowest: tuple[tuple[float, str], ...]

    def __str__(self) -> str:
        means = ", ".join(f"{key} {value:.3f}" for key, value in self.means.items())
        eager = "" if self.against_eager is None else f"; step over eager's {self.against_eager:.3f}"
        slowest = ", ".join(f"{ratio:.2f} {case}" for ratio, case in self.slowest)
        return (f"{self.right} of {self.cases} right, {self.failed} failed, {self.skipped} skipped; over {BASE}'s: "
                f"{means or '–'}{eager}; slowest: {slowest or '–'}")


def summary_of(system: str, rows: Rows) -> Summary:
    """Return the summary of a system."""
    own = {case: row for (case, name), row in rows.items() if name == system}
    ran = {case: row for case, row in own.items() if "step_ms" in row and "error" not in row}
    right = {case: row for case, row in ran.items() if row.get("right")}
    slowest = sorted(ratios("step_ms", right, BASE, rows), reverse=True)[:MOST_SLOW]
    means = {key: mean for key in CLOCKS if (mean := geometric_mean(ratios(key, right, BASE, rows))) is not None}
    return Summary(
        cases=len(ran), right=len(right), failed=sum("error" in row for row in own.values()),
        skipped=sum("skipped" in row for row in own.values()), means=means,
        against_eager=geometric_mean(ratios("step_ms", right, "eager", rows)), slowest=tuple(slowest))


def ratios(key: str, right: Mapping[str, Metrics], base: str, rows: Rows) -> list[tuple[float, str]]:
    """Return a number over the baseline's, and the case, for each case that has both and is right on both."""
    pairs = ((row.get(key), rows.get((case, base), {}), case) for case, row in right.items())
    return [(mine / other[key], case) for mine, other, case in pairs if mine and other.get(key) and other.get("right")]


def geometric_mean(found: list[tuple[float, str]]) -> float | None:
    """Return the mean of ratios; None of none."""
    return statistics.geometric_mean([ratio for ratio, _ in found]) if found else None
