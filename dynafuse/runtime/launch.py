"""Launches of compiled kernels, bound to what does not change from call to call.

Worked example: a kernel ``k`` over ``(in0, out0)`` becomes ``k.launch(stream, grid_x, grid_y, grid_z, in0, out0)``, which
is one C call on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynafuse.ir import Launch

Launcher = Callable[..., None]


@dataclass(frozen=True)
class Kernel:
    """What a spec compiled to: its launches, ready to be bound, and their source."""

    key: str
    source: str
    launches: tuple[Launch, ...]
    workspaces: tuple[Any, ...]
    compiled: tuple[Any, ...]
    interpreted: bool

    def bound(self) -> tuple[Launcher, ...]:
        """One callable ``(stream, x, y, z, *arguments)`` per launch."""
        bind = _interpreted if self.interpreted else _native
        return tuple(bind(compiled, launch) for compiled, launch in zip(self.compiled, self.launches, strict=True))


def _native(compiled: Any, launch: Launch) -> Launcher:
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    constants = tuple(value for _, value in launch.constants)

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *constants)

    return call


def _interpreted(function: Any, launch: Launch) -> Launcher:
    constants = dict(launch.constants)

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        function[(x, y, z)](*arguments, **constants)

    return call
