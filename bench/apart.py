"""Suites whose systems do not take turns: a process for each case and system, which is the suite run with ``--inside``.

Example:
    python -m bench.generate --inside --cases llama/1 --systems dynafuse --out row.json     # what such a process runs
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import systems
from bench.measure import Metrics
from bench.report import Report, describe_machine, describe_versions
from bench.run import default_device, split


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, suite: str, limit: float) -> argparse.Namespace:
    """Return a suite's options, with those that all such suites have; `limit` is the default of ``--limit``, in seconds."""
    parser.add_argument("--systems", default="eager,inductor,dynafuse",
                        help="names, each with or without @VAR=VALUE;VAR=VALUE")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--limit", type=float, default=limit, help="seconds for a case under a system")
    parser.add_argument("--inside", action="store_true", help="measure one case under one system in this process")
    parser.add_argument("--out", type=Path, help=f"default: bench/results/{suite}-DATE.json")
    options = parser.parse_args(arguments)
    options.device = options.device or default_device()
    options.out = options.out or Path("bench/results") / f"{suite}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return options


def run(suite: str, cases: Sequence[str], options: argparse.Namespace, passed: Sequence[str],
        measured: Callable[[systems.System, argparse.Namespace], Metrics]) -> list[Metrics]:
    """Measure cases under all systems, report each, and return the rows; inside, write one row and return none.

    `passed` names the options that a process is given as they are, `measured` measures ``options.cases`` in this process.
    """
    names = split(options.systems)
    if options.inside:
        options.out.write_text(json.dumps(measured(systems.find(names[0]), options)))
        return []
    report = Report(options.out, describe_machine(), describe_versions())
    rows = []
    for case in cases:
        for name in names:
            rows.append(_apart(f"bench.{suite}", case, name, options, passed))
            report.put(suite, case, name, rows[-1])
            print(case, name, *(f"{key} {value:.4g}" for key, value in rows[-1].items() if key != "error"),
                  rows[-1].get("error", ""), flush=True)
    return rows


def _apart(module: str, case: str, name: str, options: argparse.Namespace, passed: Sequence[str]) -> Metrics:
    """Measure a case under a system in a process with empty caches; its error where it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", module, "--inside", "--cases", case, "--systems", name, "--out", str(out)]
        for option in passed:
            command += [f"--{option}", str(getattr(options, option))]
        env = {**os.environ, **systems.fresh_cache_env(), **systems.find(name).env}
        try:
            process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.limit, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {options.limit:g} s"}
        with contextlib.suppress(FileNotFoundError):
            row: Metrics = json.loads(out.read_text())
            return row
        return {"error": process.stderr.strip()[-2000:]}
