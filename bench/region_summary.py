"""Many regions in a few numbers: how fast a system is beside Inductor, and how far off predictions are.

Worked example: of two regions, one twice as fast as Inductor and one half as fast, ``summary_of("dynafuse", rows)`` says
``speed`` 1.0, ``below`` {0.97: 1, 0.8: 1} and ``worst`` ((0.5, "slow one"),).
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Metrics = Mapping[str, Any]
Rows = Mapping[tuple[str, str], Metrics]  # (case, system) -> metrics

BASE = "inductor"
SLOWER = (0.97, 0.8)
"""Speeds beside Inductor's below which regions are counted."""

NEAR = 1.3
"""A prediction is near if neither it nor the measured time is more than this times the other."""

MOST_WORST = 8


@dataclass(frozen=True)
class Summary:
    """What is said of one system over all regions that ran on it and on Inductor.

    Attributes:
        regions: how many those are.
        failed: regions that failed on this system, or whose results are infinitely far from eager's.
        speed: geometric mean of Inductor's time over this system's; None without regions.
        below: how many are slower than each of ``SLOWER``.
        worst: speed and name of the slowest, the slowest first.
        cold_s, base_cold_s: seconds of all first calls, of this system and of Inductor.
        off: measured over predicted time of the kernels, without the replay's own, median; None without predictions.
        near: the share of predictions that are near (``NEAR``).
        largest_difference: the largest difference from eager of any region, and its name.
    """

    regions: int
    failed: int
    speed: float | None
    below: Mapping[float, int]
    worst: tuple[tuple[float, str], ...]
    cold_s: float
    base_cold_s: float
    off: float | None
    near: float | None
    largest_difference: tuple[float, str] | None

    def __str__(self) -> str:
        if self.speed is None:
            return f"nothing to compare with {BASE}, {self.failed} failed"
        below = ", ".join(f"{count} below {bound:g}" for bound, count in self.below.items())
        speed = f"{self.speed:.3f} of {BASE}'s speed (geometric mean)"
        lines = [f"{self.regions} regions at {speed}, {below}, {self.failed} failed",
                 "slowest: " + ", ".join(f"{speed:.2f} {name}" for speed, name in self.worst),
                 f"cold starts: {self.cold_s:.1f} s, {BASE}'s {self.base_cold_s:.1f} s"]
        if self.off is not None:
            near = 100 * (self.near or 0)
            lines.append(f"measured over predicted: {self.off:.2f} (median), {near:.0f} % within {NEAR:g}×")
        if self.largest_difference is not None:
            lines.append("largest difference from eager: {:.2g}, {}".format(*self.largest_difference))
        return "\n".join(lines)


def summary_of(system: str, rows: Rows) -> Summary:
    """Return the summary of a system."""
    own = {case: row for (case, name), row in rows.items() if name == system}
    right = {case: row for case, row in own.items() if is_right(row)}
    pairs = {case: (row, base) for case, row in right.items() if is_right(base := rows.get((case, BASE), {"error": ""}))}
    speeds = sorted((base[clock] / row[clock], case) for case, (row, base) in pairs.items() if (clock := _clock(row, base)))
    predicted = (row for row in right.values() if row.get("predicted_us") and "device_us" in row)
    off = [(row["device_us"] - row.get("replay_us", 0.0)) / row["predicted_us"] for row in predicted]
    differences = [(row["output_vs_eager"], case) for case, row in right.items()]
    return Summary(
        regions=len(speeds), failed=len(own) - len(right),
        speed=statistics.geometric_mean([speed for speed, _ in speeds]) if speeds else None,
        below={bound: sum(speed < bound for speed, _ in speeds) for bound in SLOWER},
        worst=tuple(speeds[:MOST_WORST]),
        cold_s=sum(row["cold_s"] for row, _ in pairs.values()),
        base_cold_s=sum(base["cold_s"] for _, base in pairs.values()),
        off=statistics.median(off) if off else None,
        near=statistics.mean(1 / NEAR <= ratio <= NEAR for ratio in off) if off else None,
        largest_difference=max(differences, default=None),
    )


def is_right(row: Metrics) -> bool:
    """Return whether a region ran, with results that can be compared with eager's; infinity is text in a file."""
    return "error" not in row and math.isfinite(float(row.get("output_vs_eager", "nan")))


def _clock(row: Metrics, base: Metrics) -> str | None:
    """Return the time that both have: the device's, or the host's where there is no device."""
    return next((key for key in ("device_us", "wall_us") if row.get(key) and base.get(key)), None)
