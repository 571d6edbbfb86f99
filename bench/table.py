"""Results as Markdown: ratios against Inductor, by suite.

Example:
    python -m bench.table                      # newest file of each suite in bench/results/
    python -m bench.table a.json b.json        # these files, later ones winning row by row
    python -m bench.table --into docs/benchmarks.md                 # and write it between the markers of a page
    python -m bench.table a.json --summary --into README.md         # the README's table: training, a line a model

A ratio is time over Inductor's: below 1 is faster. A dash means not measured; an error shows its first words.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.region_summary import BASE, NEAR, SLOWER, summary_of
from bench.schedule_summary import NOTABLE, regrets_by_class
from bench.zoo_summary import summary_of as zoo_summary_of

RESULTS = Path(__file__).resolve().parent / "results"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"

Metrics = dict[str, Any]
Rows = dict[tuple[str, str], Metrics]  # (case, system) -> metrics


def newest(folder: Path) -> list[Path]:
    """For every suite the newest file that has rows of it, oldest first."""
    by_suite: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: json.loads(path.read_text())["date"]):
        for row in json.loads(path.read_text())["rows"]:
            by_suite[row["suite"]] = path
    return list(dict.fromkeys(by_suite.values()))


def load(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], dict[str, Rows]]:
    """The files' heads, and rows by suite; a later file replaces a row of an earlier one."""
    heads, suites = [], dict[str, Rows]()
    for path in paths:
        data = json.loads(path.read_text())
        heads.append({key: data[key] for key in ("machine", "versions", "date")})
        for row in data["rows"]:
            suites.setdefault(row["suite"], {})[row["case"], row["system"]] = row["metrics"]
    return heads, suites


def render(paths: Iterable[Path]) -> str:
    """All tables of these files."""
    heads, suites = load(paths)
    parts = list(dict.fromkeys(map(provenance, heads)))
    for suite, rows in suites.items():
        parts.append(f"**{TITLES.get(suite, suite)}**\n\n" + TABLES.get(suite, models)(rows))
    return "\n\n".join(parts) + "\n"


def provenance(head: dict[str, Any]) -> str:
    """One line that says where the numbers come from."""
    machine, versions = head["machine"], head["versions"]
    packages = ("torch", "triton", "transformers", "torchvision")
    named = [f"{name} {versions[name]}" for name in packages if name in versions]
    return f"{machine.get('gpu', machine.get('cpu', 'CPU'))}, {', '.join(named)}, {head['date'][:10]}."


def summary(paths: Iterable[Path]) -> str:
    """Steps and cold starts of training, a line a model: what the README shows."""
    rows = load(paths)[1]["models"]
    cases = [case for case, system in rows if system == BASE and case.endswith("/train")]
    head = ["training", "eager ms", f"{BASE} ms", "dynafuse ms", f"× {BASE}", f"device time × {BASE}",
            f"cold start: {BASE} s", "dynafuse s", f"× {BASE}"]

    def line(case: str) -> list[str]:
        eager, base, own = (rows[case, system] for system in ("eager", BASE, "dynafuse"))
        steps = [number(m, "step_ms") for m in (eager, base, own)]
        return [case.removesuffix("/train"), *steps, ratio(own, base, "step_ms"), ratio(own, base, "device_ms"),
                number(base, "cold_s"), number(own, "cold_s"), ratio(own, base, "cold_s")]

    return markdown(head, map(line, cases)) + "\n"


def models(rows: Rows) -> str:
    """One line per case and system: step, ratio, device time by kind, cold compile, memory, agreement with eager."""
    head = ["case", "system", "step ms", f"× {BASE}", "device ms", "Triton ms", f"× {BASE}", "GEMM", "attention",
            "conv", "cold s", f"× {BASE}", "peak GB", "grad norm Δ", "error / eager's", "right"]
    lines = (model_line(case, system, m, rows.get((case, BASE), {})) for (case, system), m in rows.items())
    return markdown(head, lines)


def model_line(case: str, system: str, m: Metrics, base: Metrics) -> list[str]:
    """The cells of one row of the models table."""
    if "error" in m and "step_ms" not in m:
        return [case, system, failure(m), *["–"] * 13]
    return [
        case, system, number(m, "step_ms"), ratio(m, base, "step_ms"), number(m, "device_ms"), number(m, "triton_ms"),
        ratio(m, base, "triton_ms"), number(m, "gemm_ms"), number(m, "attention_ms"), number(m, "convolution_ms"),
        number(m, "cold_s"), ratio(m, base, "cold_s"), number(m, "peak_gb"), number(m, "grad_norm_max"),
        against_eager(m), verdict(m),
    ]


def layers(rows: Rows) -> str:
    """Compiled kernels and cold seconds as the model grows: cases are named MODEL/LAYERS."""
    head = ["case", "system", "distinct kernels", "launch sites", "cold s", f"× {BASE}", "step ms", f"× {BASE}"]

    def line(case: str, system: str, m: Metrics) -> list[str]:
        if "error" in m and "cold_s" not in m:
            return [case, system, failure(m), *["–"] * 5]
        base = rows.get((case, BASE), {})
        return [case, system, number(m, "kernels"), number(m, "launch_sites"), number(m, "cold_s"),
                ratio(m, base, "cold_s"), number(m, "step_ms"), ratio(m, base, "step_ms")]

    return markdown(head, (line(case, system, m) for (case, system), m in rows.items()))


def micro(rows: Rows) -> str:
    """One line per kernel, TB/s of ideal traffic by system; bold is the best, and wrong numbers say so."""
    systems = list(dict.fromkeys(system for _, system in rows))
    cases = list(dict.fromkeys(case for case, _ in rows))
    head = ["kernel", *systems, *(f"{system} time × {BASE}" for system in systems if system not in (BASE, "eager"))]
    return markdown(head, (micro_line(case, systems, rows) for case in cases))


def micro_line(case: str, systems: list[str], rows: Rows) -> list[str]:
    """The cells of one kernel: device rates where there are any, otherwise wall time in microseconds."""
    mine = {system: rows.get((case, system), {}) for system in systems}
    best = max((m["tb_per_s"] for m in mine.values() if m.get("right") and "tb_per_s" in m), default=None)
    others = [mine[system] for system in systems if system not in (BASE, "eager")]
    key = "device_us" if best is not None else "wall_us"
    ratios = [ratio(m, mine.get(BASE, {}), key) for m in others]
    return [case, *(micro_cell(m, best) for m in mine.values()), *ratios]


def micro_cell(m: Metrics, best: float | None) -> str:
    """A rate, or a time without a device; what is wrong is marked."""
    if "error" in m:
        return failure(m)
    text = number(m, "tb_per_s") if "tb_per_s" in m else number(m, "wall_us") + (" µs" if "wall_us" in m else "")
    text = f"**{text}**" if best is not None and m.get("tb_per_s") == best else text
    return text if m.get("right", True) else f"{text} wrong"


def regret(rows: Rows) -> str:
    """One line per kernel: what dynafuse's plan takes, the best of all that was measured, and their ratio; then its mean."""
    head = ["kernel", "dynafuse µs", "best µs", "best system", "regret"]
    kernels = {case: m for (case, _), m in rows.items() if case != "all"}
    lines = [[case, number(m, "device_us"), number(m, "best_us"), m.get("best", "–"), number(m, "regret")]
             for case, m in kernels.items()]
    mean = statistics.mean(m["regret"] for m in kernels.values())
    return markdown(head, [*lines, ["mean", "–", "–", "–", f"{mean:.3f}"]])


def host(rows: Rows) -> str:
    """One line per small graph, host microseconds a call by system, and dynafuse's over its peers'."""
    systems = list(dict.fromkeys(system for _, system in rows))
    cases = list(dict.fromkeys(case for case, _ in rows))
    over = [system for system in ("eager", BASE) if system in systems]
    head = ["graph", *(f"{system} µs" for system in systems), *(f"dynafuse × {system}" for system in over)]

    def line(case: str) -> list[str]:
        mine = {system: rows.get((case, system), {}) for system in systems}
        cells = [failure(m) if "error" in m else number(m, "host_us") for m in mine.values()]
        return [case, *cells, *(ratio(mine.get("dynafuse", {}), mine[system], "host_us") for system in over)]

    return markdown(head, map(line, cases))


def residual(rows: Rows) -> str:
    """Kernels, cold seconds and host microseconds as the same layer is repeated: cases are named GRAPH/LAYERS."""
    head = ["case", "system", "distinct kernels", "cold s", f"× {BASE}", "host µs a step", f"× {BASE}", "right"]

    def line(case: str, system: str, m: Metrics) -> list[str]:
        if "error" in m and "cold_s" not in m:
            return [case, system, failure(m), *["–"] * 5]
        base = rows.get((case, BASE), {})
        distinct = number(m, "sources" if "sources" in m else "kernels")
        return [case, system, distinct, number(m, "cold_s"), ratio(m, base, "cold_s"), number(m, "host_us"),
                ratio(m, base, "host_us"), verdict(m)]

    return markdown(head, (line(case, system, m) for (case, system), m in rows.items()))


def regions(rows: Rows) -> str:
    """One line per system: how it does beside the baseline over all regions, and how far off its predictions are."""
    head = ["system", "regions", f"speed × {BASE}", *(f"below {bound:g}" for bound in SLOWER), "slowest", "cold s",
            f"× {BASE}", "measured / predicted", f"within {NEAR:g}×", "largest difference from eager", "failed"]

    def line(system: str) -> list[str]:
        found = summary_of(system, rows)
        speed, slowest = found.speed, found.worst[0][0] if found.worst else None
        numbers = {"speed": speed, "slowest": slowest, "cold": found.cold_s, "off": found.off,
                   "difference": found.largest_difference and found.largest_difference[0]}
        return [system, str(found.regions), number(numbers, "speed"), *map(str, found.below.values()),
                number(numbers, "slowest"), number(numbers, "cold"), ratio(numbers, {"cold": found.base_cold_s}, "cold"),
                number(numbers, "off"), "–" if found.near is None else f"{100 * found.near:.0f} %",
                number(numbers, "difference"), str(found.failed)]

    return markdown(head, (line(system) for system in dict.fromkeys(system for _, system in rows) if system != BASE))


def zoo(rows: Rows) -> str:
    """One line per case and system: step, device time, cold start and peak, each with its ratio, and how it was judged."""
    head = ["case", "system", "step ms", f"× {BASE}", "× eager", "device ms", f"× {BASE}", "cold s", f"× {BASE}", "peak GB",
            f"× {BASE}", "error / eager's", "right"]

    def line(case: str, system: str, m: Metrics) -> list[str]:
        if "skipped" in m or ("error" in m and "step_ms" not in m):
            text = failure(m) if "error" in m else f"skipped: {m['skipped']}"[:60].replace("|", "/")
            return [case, system, text, *["–"] * 10]
        base, eager = rows.get((case, BASE), {}), rows.get((case, "eager"), {})
        return [case, system, number(m, "step_ms"), ratio(m, base, "step_ms"), ratio(m, eager, "step_ms"),
                number(m, "device_ms"), ratio(m, base, "device_ms"), number(m, "cold_s"), ratio(m, base, "cold_s"),
                number(m, "peak_gb"), ratio(m, base, "peak_gb"), number(m, "distance"), verdict(m)]

    systems = dict.fromkeys(system for _, system in rows)
    said = "\n".join(f"- {system}: {zoo_summary_of(system, rows)}" for system in systems)
    return markdown(head, (line(case, system, m) for (case, system), m in rows.items())) + f"\n\n{said}"


def schedules(rows: Rows) -> str:
    """One line per class: how much slower the chosen schedules are than the best that were tried."""
    head = ["class", "kernels", "time × best (geometric mean)", f"above {NOTABLE:g}", "most"]
    regrets_of = regrets_by_class({case: m for (case, _), m in rows.items()})
    return markdown(head, ([name, str(len(regrets)), f"{statistics.geometric_mean(regrets):.3f}",
                            str(sum(regret > NOTABLE for regret in regrets)), f"{max(regrets):.2f}"]
                           for name, regrets in regrets_of.items()))


TABLES: dict[str, Callable[[Rows], str]] = {
    "models": models, "layers": layers, "micro": micro, "regret": regret, "host": host, "residual": residual,
    "regions": regions, "schedules": schedules, "zoo": zoo}
TITLES = {
    "models": "Whole models (a step is loss and gradients in training, the output in inference)",
    "layers": "The same model with more layers",
    "micro": "Memory-bound kernels, TB/s of ideal traffic by device time",
    "host": "Small graphs, host time a call",
    "residual": "Layers of tanh, matrix product and residual add, forward and backward; the k-th of `growing` adds k",
    "regions": "Fusible regions of models: speed beside Inductor's (above 1 is faster) by geometric mean, and those slower",
    "schedules": "Kernels of these regions under many schedules, before the formulas were fitted to them",
    "zoo": "A zoo of architectures, few layers each, at their own widths and vocabularies",
    "regret": "Regret: device time of the plan that dynafuse chose over the best that was measured",
}


def number(m: Metrics, key: str) -> str:
    """Three significant digits, whole from a hundred on; a dash when absent."""
    value = m.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "–" if value is None else str(value)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def ratio(m: Metrics, base: Metrics, key: str) -> str:
    """Over the baseline's, two decimals."""
    mine, theirs = m.get(key), base.get(key)
    if not isinstance(mine, (int, float)) or not isinstance(theirs, (int, float)) or not theirs:
        return "–"
    return f"{mine / theirs:.2f}"


def against_eager(m: Metrics) -> str:
    """The system's error against float32 over eager's own."""
    key = "grad_rmse" if "grad_rmse" in m else "output_rmse"
    return ratio(m, {key: m.get(f"eager_{key}")}, key)


def verdict(m: Metrics) -> str:
    """yes, no, or a dash where nothing was checked; an error after the check is shown with it."""
    answer = {True: "yes", False: "**no**", None: "–"}[m.get("right")]
    return f"{answer}; {failure(m)}" if "error" in m else answer


def failure(m: Metrics) -> str:
    """The first words of an error, safe inside a table."""
    first = str(m["error"]).strip().splitlines()[0][:60]
    return f"failed: {first}".replace("|", "/")


def markdown(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def update(path: Path, text: str) -> None:
    """Replace what stands between the markers of a page; an error when they are missing."""
    old = path.read_text()
    if BEGIN not in old or END not in old:
        raise SystemExit(f"bench: {path.name} has no {BEGIN} and {END} to write between")
    before, rest = old.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}")


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.table", description="Results as Markdown.")
    parser.add_argument("files", nargs="*", type=Path, help="default: newest of each suite in bench/results/")
    parser.add_argument("--into", type=Path, help="a page to write the tables into, between its markers")
    parser.add_argument("--summary", action="store_true", help="one table: training, a line a model")
    options = parser.parse_args(arguments)
    files = options.files or newest(RESULTS)
    if not files:
        raise SystemExit("bench: no results yet: python -m bench.run writes them")
    text = summary(files) if options.summary else render(files)
    print(text, end="")
    if options.into:
        update(options.into, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
