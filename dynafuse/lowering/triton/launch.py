"""Launches of compiled kernels, bound to what does not change from call to call.

Worked example: a kernel ``k`` over ``(in0, out0)`` becomes ``launch(stream, grid_x, grid_y, grid_z, in0, out0)``, which
is one C call on a GPU: torch's launcher of Triton's binaries, which needs nothing generated or compiled per signature.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynafuse.errors import IndexOutOfRange
from dynafuse.forks import Lock
from dynafuse.ir import Launch
from dynafuse.lowering.triton.compiler import constants_of
from dynafuse.lowering.triton.dependent import MOST_PROGRAMS, WAITS, dependent_launcher
from dynafuse.lowering.triton.header import PLACE_WIDTH

_INTERPRETING = Lock()
Launcher = Callable[..., None]
Places = Mapping[str, str]
"""Per op that indexes by what it loads, where the user wrote it: which op, and the line as asserts name it."""
ASSERT = re.compile(rb"(index out of range: (\S+): [^\0]*?) {%d}" % PLACE_WIDTH)
NOWHERE: Places = {}
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a device's index -> a raw pointer
is_captured: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
KINDS = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "l", "fp32": "f", "fp64": "d"}
"""How torch's launcher spells the types of scalar arguments; a pointer is ``O``."""


class Captured(int):
    """A stream whose work is being captured as a CUDA graph."""


def stream_of(device: int) -> int:
    """Return the current stream of a device, as a raw pointer, of a class of its own while it is captured."""
    stream: int = raw_stream(device)
    return Captured(stream) if is_captured() else stream


@dataclass(frozen=True)
class Kernel:
    """What a spec compiled to: its launches, ready to be bound, and their source."""

    key: str
    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Any, ...]
    compiled: tuple[Any, ...]
    interpreted: bool
    _loaded: dict[Any, tuple[Launcher, ...]] = field(default_factory=dict, compare=False, repr=False)

    def bound(self, device: int | None, places: Places = NOWHERE) -> tuple[Launcher, ...]:
        """Return a callable ``(stream, x, y, z, *arguments)`` per launch, on a CUDA device or (None) in the interpreter."""
        pairs = list(zip(self.compiled, self.launches, strict=True))
        if self.interpreted or device is None:
            return tuple(_interpreted(function, launch, places) for function, launch in pairs)
        asserts = any(launch.asserts for launch in self.launches)  # each place in the user's code has binaries of its own
        key = (device, *(sorted(places.items()) if asserts else ()))
        if key not in self._loaded:
            self._loaded[key] = tuple(_native(compiled, launch, device, places) for compiled, launch in pairs)
        return self._loaded[key]


def located(binary: bytes, places: Places) -> bytes:
    """Return a binary whose asserts name the user's lines, in the room that is left for them."""
    def filled(match: re.Match[bytes]) -> bytes:
        place = places.get(match[2].decode(), "").encode()
        told = b", at " + place[-(PLACE_WIDTH - 5):] if place else b""
        return match[1] + told.ljust(PLACE_WIDTH, b"\0")

    return ASSERT.sub(filled, binary)


def _native(compiled: Any, launch: Launch, device: int, places: Places) -> Launcher:
    scratch = [getattr(compiled.metadata, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    with torch.cuda.device(device):  # a binary is loaded for the device that is current
        if any(scratch) or not hasattr(torch._C, "_StaticCudaLauncher"):
            return _generated(compiled, launch)
        return _static(compiled, launch, device, places, unused=sum(size is not None for size in scratch))


def _static(compiled: Any, launch: Launch, device: int, places: Places, unused: int) -> Launcher:
    """Return a launch by torch's launcher. ``unused``: trailing parameters of the binary that nothing is passed for."""
    api: Any = torch._C._StaticCudaLauncher
    run, shared, warps, arch = api._launch_kernel, compiled.metadata.shared, launch.warps, compiled.metadata.target.arch
    with tempfile.TemporaryDirectory(prefix="dynafuse-") as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(located(compiled.asm["cubin"], places))
        function = api._load_kernel(str(binary), launch.entry, shared, device)[-3]  # .., function, registers, spills
    types = "".join("O" if kind[0] == "*" else KINDS[kind] for _, kind in launch.signature) + "O" * unused
    padding = (None,) * unused
    dependent = dependent_launcher(function, launch, shared, unused) if constants_of(launch, arch)[WAITS] else None

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        if dependent is not None and stream.__class__ is Captured and x * y * z <= MOST_PROGRAMS:
            dependent(stream, x, y, z, *arguments)
        else:
            run(function, x, y, z, warps, shared, types, arguments + padding, stream)

    return call


def _generated(compiled: Any, launch: Launch) -> Launcher:
    """Return a launch by Triton's launcher, which it compiles for every signature."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    constants = tuple(constants_of(launch, compiled.metadata.target.arch).values())

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *constants)

    return call


def _interpreted(function: Any, launch: Launch, places: Places) -> Launcher:
    """Return a launch by Triton's interpreter, whose place in the grid is a global: one launch at a time."""
    constants = dict(launch.constants)

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        try:
            with _INTERPRETING:
                function[(x, y, z)](*arguments, **constants)
        except Exception as error:
            cause = _first_cause(error)
            if isinstance(cause, IndexOutOfRange):
                raise _placed(cause, places) from None
            raise

    return call


def _first_cause(error: BaseException) -> BaseException:
    """Return what was raised first: the interpreter wraps an error in one of its own for each function that it leaves."""
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _placed(error: IndexOutOfRange, places: Places) -> IndexOutOfRange:
    """Return an error of the interpreter with the user's line."""
    return IndexOutOfRange(error.what, next((place for op, place in places.items() if f" {op}: " in error.what), ""))
