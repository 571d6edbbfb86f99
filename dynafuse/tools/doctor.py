"""``dynafuse doctor``: what dynafuse finds on this machine, and what to do about what is missing.

Worked example, three of its findings on a machine without a GPU::

    ✓  torch         2.13.0+cpu
    ✓  GPU           none: CPU tensors run in C++ kernels
    ✗  C++ compiler  none: install g++, or name one in CXX

A finding is fine, worth knowing, or a fault; the exit status is 1 if there is a fault in what dynafuse cannot do without.
That is Triton where there is a GPU, and a C++ compiler where there is none.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import dynafuse
from dynafuse import config
from dynafuse.cost import calibration
from dynafuse.cost import device as devices
from dynafuse.cost.device import COST_CONSTANTS, Device
from dynafuse.errors import OptionError
from dynafuse.lowering.inductor import availability as inductor
from dynafuse.lowering.nvfuser import availability
from dynafuse.lowering.triton.compiler import interpreting

TORCH = ((2, 10), (2, 13))  # the first and the last series that dynafuse is tested with
TRITON = (3, 6)
OLD_DAYS = 90
COMPILER_SECONDS = 60
FINE, NOTE, FAULT = "fine", "note", "fault"
MARKS = {FINE: "[green]✓[/]", NOTE: "[yellow]![/]", FAULT: "[red]✗[/]"}
WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's: a part of the machine or the set-up, and how it is."""

    name: str
    state: str  # fine, note or fault
    found: str  # a description
    advice: str = ""  # what to do about it


def findings(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return all findings, in the order in which they are printed."""
    examinations: tuple[Callable[[], Finding], ...] = (
        versions, torch_version, triton_version, gpu, compiler, nvfuser, description, calibrated, cache,
        lambda: options(environ), workers,
    )
    return [examine() for examine in examinations]


# ---------------------------------------------------------------------- software


def versions() -> Finding:
    """Report the versions of dynafuse and Python."""
    return Finding("dynafuse", FINE, f"{dynafuse.__version__}, Python {platform.python_version()}")


def torch_version() -> Finding:
    """Report torch, and whether it is a version that dynafuse is tested with."""
    low, high = (".".join(map(str, series)) for series in TORCH)
    series = _series(torch.__version__)
    advice = f"install torch {low} to {high}"
    if series < TORCH[0]:
        return Finding("torch", FAULT, f"{torch.__version__}, older than {low}", advice)
    if series > TORCH[1]:
        return Finding("torch", NOTE, f"{torch.__version__}, newer than what is tested ({high})", f"if it fails, {advice}")
    return Finding("torch", FINE, str(torch.__version__))


def triton_version() -> Finding:
    """Report Triton, and whether it compiles or interprets."""
    version = calibration.versions()["triton"]
    least = ".".join(map(str, TRITON))
    if version == "none":
        return Finding("Triton", FAULT, "not installed", f"pip install 'triton>={least}'")
    if _series(version) < TRITON:
        return Finding("Triton", FAULT, f"{version}, older than {least}", f"pip install 'triton>={least}'")
    if interpreting() and torch.cuda.is_available():
        return Finding("Triton", NOTE, f"{version}, interpreter", "unset TRITON_INTERPRET to compile kernels for the GPU")
    return Finding("Triton", FINE, f"{version}, {'interpreter' if interpreting() else 'compiler'}")


def _interprets() -> bool:
    """Return whether Triton is there and interprets."""
    return calibration.versions()["triton"] != "none" and interpreting()


def _series(version: str) -> tuple[int, ...]:
    """Return a version as numbers: ``2.13.0+cpu`` is (2, 13)."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])


def nvfuser() -> Finding:
    """Report nvFuser, or why it is not used."""
    library = availability.find()
    if not library.available and not torch.cuda.is_available():
        return Finding("nvFuser", FINE, "none, and of no use without a GPU")
    if library.available and library.matched:
        return Finding("nvFuser", FINE, library.reason)
    if library.available:
        advice = f"what it was not built for may crash: unset {availability.OVERRIDE}"
        return Finding("nvFuser", NOTE, library.reason, advice)
    advice = "optional, a second fuser to choose from: nvfuser-cuXXX-torchYZZ of this torch"
    return Finding("nvFuser", NOTE, f"not available: {library.reason.partition(' (dynafuse doctor')[0]}", advice)


# ---------------------------------------------------------------------- the device


def gpu() -> Finding:
    """Report the GPU, its capability and driver; without a GPU, kernels run in the interpreter or not at all."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{properties.name}, capability {properties.major}.{properties.minor}, driver {calibration.driver()}"
        return Finding("GPU", FINE, f"{device}; {torch.cuda.device_count()} in all")
    driver = calibration.driver()
    if driver != "none" and torch.version.cuda is None:
        return Finding("GPU", FAULT, f"driver {driver} is there, but this torch is built without CUDA",
                       "install a torch that is built for CUDA; for CPU tensors alone this one will do")
    if driver != "none":
        return Finding("GPU", FAULT, f"driver {driver} is there, but torch for CUDA {torch.version.cuda} finds no GPU",
                       "look at CUDA_VISIBLE_DEVICES; a newer driver, or a torch for an older CUDA")
    if _interprets():
        return Finding("GPU", NOTE, "none: CPU tensors run in Triton's interpreter, slowly, because of TRITON_INTERPRET",
                       "unset TRITON_INTERPRET for C++ kernels")
    return Finding("GPU", FINE, "none: CPU tensors run in C++ kernels")


PROGRAM = """
#include <omp.h>
#include <Python.h>
#include <vector>
extern "C" int threads() { std::vector<int> one(1, omp_get_max_threads()); return one[0]; }
"""
"""What kernels for CPU tensors need of a compiler: OpenMP, Python's headers, the standard library, a shared object."""


def compiler() -> Finding:
    """Report the C++ compiler that kernels for CPU tensors need, and whether it compiles; a fault only without a GPU."""
    is_needed = not torch.cuda.is_available() and not _interprets()
    state, advice = FAULT if is_needed else NOTE, "CPU tensors run eager without it"
    cxx = inductor.find("cpu")
    if not cxx.available:
        return Finding("C++ compiler", state, f"none: {cxx.reason}", advice)
    failure = _compile_failure(cxx.reason)
    if failure:
        return Finding("C++ compiler", state, f"{cxx.reason} does not compile: {failure}", f"repair it; {advice}")
    return Finding("C++ compiler", FINE, f"{cxx.reason} compiles")


def _compile_failure(name: str) -> str:
    """Return why a compiler does not make a shared object of a small program, in its words; "" if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
        source.write_text(PROGRAM)
        include = sysconfig.get_paths()["include"]
        command = [name, "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-I", include, str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode == 0 and library.exists():
            return ""
        messages = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        return messages[0].strip() if messages else f"it ends with status {done.returncode} and leaves no library"


def description() -> Finding:
    """Report the device description that the cost model uses."""
    device, why = _device()
    advice = "dynafuse calibrate measures this GPU" if device.kind == "scaled" else ""
    state = NOTE if advice else FINE
    return Finding("cost model", state, f"{device.title} ({device.kind}; {why}{device.source})", advice)


def _device() -> tuple[Device, str]:
    """Return the device that is planned for, and why it is that one."""
    named = os.environ.get("DYNAFUSE_DEVICE")
    if named in devices.known():
        return devices.describe(str(named)), "DYNAFUSE_DEVICE; "
    if torch.cuda.is_available():
        return devices.at_hand(torch.cuda.current_device()), ""
    return (devices.describe("h200"), "interpreter; ") if _interprets() else (devices.of_host(), "no GPU; ")


def calibrated() -> Finding:
    """Report the calibration of this GPU: its age, or why it does not count."""
    if not torch.cuda.is_available():
        return Finding("calibration", FINE, "none, without a GPU")
    name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    used = calibration.load(name, COST_CONSTANTS)
    if used is not None:
        days = _age(used.date)
        advice = "dynafuse calibrate measures anew" if days > OLD_DAYS else ""
        described = f"{len(used.constants)} constants, {days} days old"
        return Finding("calibration", NOTE if advice else FINE, described, advice)
    others = [stored for stored in calibration.stored(COST_CONSTANTS) if stored.device == name]
    if not others:
        return Finding("calibration", NOTE, "none", "dynafuse calibrate: predictions for this very GPU, in under a minute")
    return Finding("calibration", NOTE, f"not used: {_differences(others[-1].versions)}", "dynafuse calibrate measures anew")


def _age(date: str) -> int:
    """Return the days since an ISO date; text that is no date counts as old."""
    try:
        then = datetime.datetime.fromisoformat(date)
        return (datetime.datetime.now(datetime.timezone.utc) - then).days
    except (ValueError, TypeError):
        return OLD_DAYS + 1


def _differences(then: Mapping[str, str]) -> str:
    now = calibration.versions()
    changed = [f"{name} was {then.get(name, 'none')}, is {now[name]}" for name in now if then.get(name) != now[name]]
    return "; ".join(changed)


# ---------------------------------------------------------------------- settings


def cache() -> Finding:
    """Report the cache folder: its path, whether it can be written to, and how much is in it."""
    folder = calibration.cache_folder()
    advice = "set DYNAFUSE_CACHE_DIR to a folder that can be written"
    try:
        existed = folder.is_dir()
        _write_in(folder)
        if folder.is_dir() and folder.stat().st_uid != os.getuid():
            return Finding("cache", FAULT, f"{folder} belongs to another user", advice)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return Finding("cache", FAULT, f"{folder} cannot be written: {why}", advice)
    if not existed:
        return Finding("cache", FINE, f"{folder}, not yet made")
    files, size = _contents(folder)
    return Finding("cache", FINE, f"{folder}, {files} files, {size / 1e6:.1f} MB")


def _write_in(folder: Path) -> None:
    """Make a folder, with the folders above it, and a file in it, then remove them again. Raises OSError on failure."""
    missing = [path for path in (folder.absolute(), *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _contents(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder, and their bytes; files that vanish in the meantime do not count."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except OSError:
            continue
    return len(sizes), sum(sizes)


def options(environ: Mapping[str, str]) -> Finding:
    """Report the options that the environment sets, and whether dynafuse knows them."""
    given = {name: environ[name] for name in sorted(environ) if name.startswith(config.PREFIX) and environ[name]}
    described = ", ".join(f"{name}={value}" for name, value in given.items()) or "none"
    try:
        resolved = config.resolve(None, None, environ)
        if resolved.device is not None:
            devices.describe(resolved.device)
    except OptionError as error:
        # The list of all that is valid can be long; the option at fault and the nearest name come first.
        return Finding("environment", FAULT, described, f"{str(error).split('; valid:')[0]}: `dynafuse options` lists all")
    return Finding("environment", FINE, described)


def workers() -> Finding:
    """Report how many processes will compile kernels."""
    try:
        count = config.resolve().workers
    except OptionError:
        return Finding("workers", NOTE, "not known", "first correct the environment")
    if count == 0:
        return Finding("workers", NOTE, "none: kernels compile one after the other", "unset DYNAFUSE_WORKERS")
    if _interprets():
        return Finding("workers", FINE, "none needed: nothing is compiled in the interpreter")
    from torch._inductor import config as inductor_config

    # The workers are torch's own pool, which is as large as torch was told.
    return Finding("workers", FINE, f"up to {inductor_config.compile_threads} processes, {os.cpu_count()} cores")


# ---------------------------------------------------------------------- the command


def main(as_json: bool = False, console: Console | None = None) -> int:
    """Print the findings and return the exit status: 1 if one is a fault."""
    listed = findings()
    faults = sum(finding.state == FAULT for finding in listed)
    if as_json:
        data = {"ok": not faults, "findings": [asdict(finding) for finding in listed]}
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        show(console or Console(), listed)
    return 1 if faults else 0


def show(console: Console, listed: list[Finding]) -> None:
    """Print a row per finding, its advice below; long ones wrap in their column."""
    table = Table(box=None, show_header=False, pad_edge=False, width=min(WIDTH, console.width))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in listed:
        table.add_row(MARKS[finding.state], finding.name, escape(finding.found))
        if finding.advice:
            table.add_row("", "", f"[bold]→[/] {escape(finding.advice)}")
    console.print(table)
    faults = sum(finding.state == FAULT for finding in listed)
    console.print("everything that dynafuse needs is there" if not faults else
                  f"{faults} {'fault' if faults == 1 else 'faults'}: see → above")
