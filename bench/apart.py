"""One case under one system in a process of its own, which is the same module run with ``--inside``.

Example:
    python -m bench.generate --inside --cases llama/1 --systems dynafuse --out row.json     # what the process runs
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import systems
from bench.measure import Metrics


def measured_apart(module: str, case: str, name: str, options: argparse.Namespace, passed: Sequence[str]) -> Metrics:
    """Measure a case under a system in a process with empty caches; its error where it fails or takes too long.

    `passed` names the options that the process is given as they are.
    """
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
