"""Regret: device time of the plan that dynafuse chose over that of the best system that was measured.

Example:
    python -m bench.regret --out regret.json                       # measure all kernels, then compare
    python -m bench.regret --case rms_norm,softmax --budget 300 --out regret.json
    python -m bench.regret --from regret.json                      # compare again, measure nothing

The kernels are those of `bench.micro`, the systems dynafuse with all executors and with one each, eager, Inductor,
nvFuser as Thunder drives it, and Liger's kernels; one that is not there leaves its error, or that it was skipped, and
is not compared. What is wrong is no best. A regret of 1 says that no system was faster than the plan. Rows of suite
`regret` join those of suite `micro` in the file; the row of case `all` has the geometric mean and the worst.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import run, table
from bench.measure import Metrics

SYSTEMS = "dynafuse-all,dynafuse-triton,dynafuse-nvfuser,eager,inductor,nvfuser,liger"
CHOSEN = "dynafuse-all"
ALL = "all"


def regrets(rows: table.Rows) -> dict[str, Metrics]:
    """Per case that the chosen plan was measured in and is right: its regret; and their summary under `all`."""
    found = {case: one for case in dict.fromkeys(case for case, _ in rows) if (one := regret_of(case, rows)) is not None}
    if found:
        ratios = [one["regret"] for one in found.values()]
        worst = max(found, key=lambda case: found[case]["regret"])
        summary = {"regret": statistics.geometric_mean(ratios), "worst_regret": max(ratios), "worst": worst}
        found[ALL] = {**summary, "cases": len(ratios), "never_beaten": sum(ratio == 1 for ratio in ratios)}
    return found


def regret_of(case: str, rows: table.Rows) -> Metrics | None:
    """The regret in one case; None where the chosen plan has no right numbers."""
    times = {system: m[key] for (name, system), m in rows.items() if name == case and (key := clock(m)) is not None}
    if CHOSEN not in times:
        return None
    best = min(times, key=lambda system: (times[system], system != CHOSEN))
    ratio = times[CHOSEN] / times[best]
    return {"device_us": times[CHOSEN], "best_us": times[best], "best": best, "regret": ratio, "times": times}


def clock(m: Metrics) -> str | None:
    """Which time of a row counts: the device's, the host's where there is no device, none where it failed or is wrong."""
    if "error" in m or m.get("right") is False:
        return None
    return next((key for key in ("device_us", "wall_us") if m.get(key)), None)


def compare(path: Path) -> dict[str, Metrics]:
    """Add the rows of suite `regret` to a results file, in place of those that it has."""
    data: dict[str, Any] = json.loads(path.read_text())
    micro = {(row["case"], row["system"]): row["metrics"] for row in data["rows"] if row["suite"] == "micro"}
    found = regrets(micro)
    kept = [row for row in data["rows"] if row["suite"] != "regret"]
    data["rows"] = kept + [{"suite": "regret", "case": case, "system": CHOSEN, "metrics": m} for case, m in found.items()]
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(partial, path)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure unless told not to, compare and print; 1 if the chosen plan has no right numbers in some case."""
    parser = argparse.ArgumentParser(prog="python -m bench.regret", description="What other choices would have gained.")
    parser.add_argument("--from", dest="path", type=Path, help="a results file to compare, instead of measuring")
    options, rest = parser.parse_known_args(arguments)
    path = options.path or measure(rest)
    found = compare(path)
    print(table.render([path]), end="")
    cases = {row["case"] for row in json.loads(path.read_text())["rows"] if row["suite"] == "micro"}
    missing = sorted(cases - found.keys())
    print(f"regret of {len(found) - bool(found)} cases" + (f", none of {', '.join(missing)}" if missing else ""))
    return 1 if missing or not found else 0


def measure(arguments: list[str]) -> Path:
    """Run the micro suite with `bench.run`'s own arguments; where its rows are."""
    fixed = ["--suite", "micro"] + ([] if "--systems" in arguments else ["--systems", SYSTEMS])
    arguments = [*fixed, *arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(run.parse(arguments).out).replace("micro-", "regret-")]
    run.main(arguments)  # systems that failed are rows like others here
    return Path(arguments[arguments.index("--out") + 1])


if __name__ == "__main__":
    sys.exit(main())
