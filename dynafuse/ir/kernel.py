"""What a lowering makes of a spec: source, launches, workspaces."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dynafuse.fx import Size

ARRIVED = "arrived"
"""The argument for counters: one for each program of the grid's first dimension, 0 before the launch and after it."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a lowered region.

    ``signature`` names, in order, what the kernel takes: ``in0``, ``out0``, ``tmp0`` (workspaces), size symbols,
    numbers (``k0``), ``count`` and ``arrived``.
    ``grid`` holds integer expressions over the size symbols.
    """

    entry: str  # the function's name in the source
    signature: tuple[tuple[str, str], ...]  # argument, Triton type
    grid: tuple[Size, Size, Size]
    constants: tuple[tuple[str, int], ...]  # constexpr arguments
    warps: int
    stages: int = 1
    alignments: tuple[tuple[str, int], ...] = ()  # pointers, each with the bytes that it is a multiple of, if fewer than 16
    asserts: bool = False  # whether it checks something on the device
    overwrites: tuple[tuple[str, str], ...] = ()  # outputs, each with an input that may be the same tensor


@dataclass(frozen=True)
class Workspace:
    """A temporary tensor of a lowered region."""

    name: str
    dtype: torch.dtype
    size: Size  # elements


@dataclass(frozen=True)
class Lowered:
    """Generated source with its launches, in order."""

    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()
    schedule_class: str = ""
    fills_registers: bool = False  # whether few warps with many registers each are what it is meant to have
    notes: tuple[str, ...] = field(default=())
