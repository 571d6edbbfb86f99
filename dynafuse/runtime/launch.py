"""Launches of compiled kernels, bound to what does not change from call to call.

Worked example: a kernel ``k`` over ``(in0, out0)`` becomes ``launch(stream, grid_x, grid_y, grid_z, in0, out0)``, which
is one C call on a GPU: torch's launcher of Triton's binaries, which needs nothing generated or compiled per signature.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynafuse.forks import Lock
from dynafuse.ir import Launch

_INTERPRETING = Lock()
Launcher = Callable[..., None]
KINDS = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
"""How torch's launcher spells the types of scalar arguments; a pointer is ``O``."""


@dataclass(frozen=True)
class Kernel:
    """What a spec compiled to: its launches, ready to be bound, and their source."""

    key: str
    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Any, ...]
    compiled: tuple[Any, ...]
    interpreted: bool
    _loaded: dict[int, tuple[Launcher, ...]] = field(default_factory=dict, compare=False, repr=False)

    def bound(self, device: int | None) -> tuple[Launcher, ...]:
        """One callable ``(stream, x, y, z, *arguments)`` per launch, on a CUDA device or (None) in the interpreter."""
        pairs = list(zip(self.compiled, self.launches, strict=True))
        if self.interpreted or device is None:
            return tuple(_interpreted(function, launch) for function, launch in pairs)
        if device not in self._loaded:
            self._loaded[device] = tuple(_native(compiled, launch, device) for compiled, launch in pairs)
        return self._loaded[device]


def _native(compiled: Any, launch: Launch, device: int) -> Launcher:
    scratch = [getattr(compiled.metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if any(scratch) or not hasattr(torch._C, "_StaticCudaLauncher"):
        return _generated(compiled, launch, device)
    return _static(compiled, launch, device, unused=sum(size is not None for size in scratch))


def _static(compiled: Any, launch: Launch, device: int, unused: int) -> Launcher:
    """By torch's launcher. ``unused`` are the trailing parameters of the binary that nothing is passed for."""
    api: Any = torch._C._StaticCudaLauncher
    run, shared, warps = api._launch_kernel, compiled.metadata.shared, launch.warps
    with tempfile.TemporaryDirectory(prefix="dynafuse-") as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        function = api._load_kernel(str(binary), launch.entry, shared, device)[-3]  # .., function, registers, spills
    types = "".join("O" if kind[0] == "*" else KINDS[kind] for _, kind in launch.signature) + "O" * unused
    padding = (None,) * unused

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        run(function, x, y, z, warps, shared, types, arguments + padding, stream)

    return call


def _generated(compiled: Any, launch: Launch, device: int) -> Launcher:
    """By Triton's launcher, which it compiles for every signature."""
    with torch.cuda.device(device):
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    constants = tuple(value for _, value in launch.constants)

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *constants)

    return call


def _interpreted(function: Any, launch: Launch) -> Launcher:
    """By Triton's interpreter, whose place in the grid is a global: one launch at a time."""
    constants = dict(launch.constants)

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        with _INTERPRETING:
            function[(x, y, z)](*arguments, **constants)

    return call
