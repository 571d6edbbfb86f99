"""A results file: machine, versions, date and rows; rewritten after every row, so that a killed run keeps what it has.

Example:
    >>> report = Report(Path("out.json"), describe_machine(), describe_versions())
    >>> report.put("models", "llama", "eager", {"step_ms": 60.5})
"""
from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "torchvision", "timm", "dynafuse", "nvfuser-cu130-torch210", "liger-kernel",
            "numpy")


class Report:
    """Rows by (suite, case, system); writing one merges into what is there."""

    def __init__(self, path: Path, machine: dict[str, Any], versions: dict[str, str]) -> None:
        self.path = path
        date = datetime.datetime.now().isoformat(timespec="seconds")
        self.head = {"machine": machine, "versions": versions, "date": date}
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()  # rows may come from several threads

    def put(self, suite: str, case: str, system: str, metrics: dict[str, Any]) -> None:
        """Merge metrics into a row and write the file."""
        with self._lock:
            self.rows.setdefault((suite, case, system), {}).update(metrics)
            self.write()

    def write(self) -> None:
        """Write all rows; a reader never sees half a file."""
        rows = [{"suite": a, "case": b, "system": c, "metrics": plain(m)} for (a, b, c), m in self.rows.items()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({**self.head, "rows": rows}, indent=1) + "\n")
        os.replace(partial, self.path)


def plain(value: Any) -> Any:
    """`value` as strict JSON has it: NaN and Inf as text, floats at six significant digits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def settled(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of a row, where an error that says that something cannot run here is no failure but `skipped`."""
    error = metrics.get("error", "")
    return {"skipped": error.removeprefix("Skip: ")} if error.startswith("Skip: ") else metrics


def describe_machine() -> dict[str, Any]:
    """GPU, driver and processor; no name of the machine."""
    import torch

    machine: dict[str, Any] = {"cpu_cores": os.cpu_count(), "cpu": _cpu(), "architecture": platform.machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_memory_gb": properties.total_memory / 1e9, "driver": _driver()}
    return machine


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return answer[0] if answer else None


def describe_versions() -> dict[str, str]:
    """Versions of what the numbers depend on; what is not installed is left out."""
    import torch

    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
