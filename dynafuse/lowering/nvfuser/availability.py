"""Whether nvFuser can be used here: its wheel is built for one torch and one CUDA.

The wheel declares no requirement on torch, so its distribution's name is read: ``nvfuser-cu128-torch210`` is for torch
2.10 built for CUDA 12.8. Nothing is imported to find out; :func:`load` imports.

Worked example: ``find()`` is ``Availability(True, "nvfuser-cu128-torch210 0.2.36", ...)``, or with torch 2.13
``nvFuser is not available: nvfuser-cu128-torch210 is built for torch 2.10, this is torch 2.13.0``.

``DYNAFUSE_NVFUSER_UNMATCHED=1`` allows a pair that does not match: some symbols may be missing, so they are bound when they
are first called, and the communicator, whose creation calls one, is kept from being made by ``NVFUSER_MASTER_PORT``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import torch

MODULE = "nvfuser_direct"
OVERRIDE = "DYNAFUSE_NVFUSER_UNMATCHED"
PORT = "NVFUSER_MASTER_PORT"
DEFAULT_PORT = "29513"
_NAME = re.compile(r"nvfuser[-_]cu(\d+)[-_]torch(\d)(\d+)$", re.IGNORECASE)


@dataclass(frozen=True)
class Availability:
    """Whether nvFuser can be used, why (not), and what was found. ``matched`` is False where the override decided."""

    available: bool
    reason: str
    distribution: str = ""
    version: str = ""
    matched: bool = True

    def __str__(self) -> str:
        return self.reason if self.available else f"nvFuser is not available: {self.reason}"


@cache
def find() -> Availability:
    """Return the answer for this process; asked once."""
    present = find_spec(MODULE) is not None
    return judge(installed(), present, torch.__version__, torch.version.cuda, os.environ.get(OVERRIDE) == "1")


def installed() -> Mapping[str, str]:
    """Return nvFuser's distributions, with their versions."""
    named = ((d.metadata["Name"] or "", d.version) for d in distributions())
    return {name: version for name, version in named if _NAME.match(name)}


def judge(versions: Mapping[str, str], present: bool, torch_version: str, cuda: str | None, override: bool) -> Availability:
    """Return whether an nvFuser can be used with a torch.

    Args:
        versions: The installed distributions, with their versions.
        present: Whether the module is there.
        torch_version: Torch's version.
        cuda: The version of CUDA that torch is built for; None for none.
        override: Whether one that is built for another torch may be used.
    """
    if not present:
        return Availability(False, f"no module {MODULE} (dynafuse doctor names its wheel)")
    if not versions:
        return _unmatched(f"{MODULE} has no distribution that says which torch it is for", "", "", override)
    for name, version in versions.items():
        if not mismatch(name, torch_version, cuda):
            return Availability(True, f"{name} {version}", name, version)
    name, version = next(iter(versions.items()))
    return _unmatched(mismatch(name, torch_version, cuda), name, version, override)


def _unmatched(reason: str, name: str, version: str, override: bool) -> Availability:
    if override:
        return Availability(True, f"{reason}, but {OVERRIDE}=1 allows it", name, version, matched=False)
    return Availability(False, f"{reason} ({OVERRIDE}=1 tries it anyway)", name, version, matched=False)


def mismatch(name: str, torch_version: str, cuda: str | None) -> str:
    """Return why a distribution is not for a torch, or "".

    Args:
        name: The distribution, whose name says what it is built for: ``nvfuser-cu128-torch210``.
        torch_version: Torch's version; the first two numbers count.
        cuda: The version of CUDA that torch is built for, as "12.8"; None for none.
    """
    parts = _NAME.match(name)
    assert parts is not None, name
    built_cuda, built_torch = parts[1], f"{parts[2]}.{parts[3]}"
    if ".".join(torch_version.split(".")[:2]) != built_torch:
        return f"{name} is built for torch {built_torch}, this is torch {torch_version}"
    if cuda is None:
        return f"{name} is built for CUDA, this torch has none"
    if cuda.replace(".", "") != built_cuda:
        return f"{name} is built for CUDA {built_cuda[:-1]}.{built_cuda[-1]}, this torch for CUDA {cuda}"
    return ""


@cache
def load() -> Any:
    """Import nvFuser's module.

    Raises:
        ImportError: It is not available; the message says why.
    """
    availability = find()
    if not availability.available:
        raise ImportError(str(availability))
    return import_module(MODULE) if availability.matched else _load_lazily()


def _load_lazily() -> Any:
    os.environ.setdefault(PORT, DEFAULT_PORT)
    before = sys.getdlopenflags()
    sys.setdlopenflags((before & ~os.RTLD_NOW) | os.RTLD_LAZY)
    try:
        return import_module(MODULE)
    finally:
        sys.setdlopenflags(before)
