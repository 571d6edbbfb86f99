"""What is said of many kernels under many schedules: how much slower the chosen ones are than the best that were tried."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import geometric_mean
from typing import Any

NOTABLE = 1.05
"""Regret from which on a kernel is counted."""


def regrets_by_class(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the regrets of kernels by the class of the chosen schedule: its time over the least of any."""
    by_class: dict[str, list[float]] = defaultdict(list)
    for row in rows.values():
        if "regret" in row:
            by_class[row["class"]].append(row["regret"])
    return dict(sorted(by_class.items()))


def summary(rows: Mapping[str, Mapping[str, Any]], most: int = 12) -> str:
    """Return the regret of each class, and the kernels with the most.

    Args:
        rows: The rows by case.
        most: How many kernels to name.
    """
    lines = [f"{name}: {len(regrets)} kernels, regret {geometric_mean(regrets):.3f}, "
             f"{sum(regret > NOTABLE for regret in regrets)} above {NOTABLE:g}"
             for name, regrets in regrets_by_class(rows).items()]
    worst = sorted(((row["regret"], case, row) for case, row in rows.items() if "regret" in row), key=lambda item: -item[0])
    lines += [f"{regret:.2f} {case}: {row['tried'][0]['schedule']} {row['device_us']:.1f} µs, "
              f"{row['best']} {row['best_us']:.1f} µs" for regret, case, row in worst[:most]]
    return "\n".join(lines) or "no kernel was timed"
