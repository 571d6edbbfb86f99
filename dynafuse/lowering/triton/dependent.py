"""Launches that begin while the kernel before them still runs: NVIDIA's programmatic dependent launch.

A kernel of few programs begins by waiting until the results of the kernel before can be read (``gdc_wait``), so that it may
be launched before that one has ended. If it has little to do as well, it lets the programs of the next kernel take their
places as soon as all of its own run (``gdc_launch_dependents``). Of the 2 µs that a small kernel costs the first takes 0.2,
both take 0.5. A kernel of more programs is launched when the one before has ended, and so after all that came before: each
program would pay, for the signal, and for what others had brought into the caches of its processor.

Only launches that a CUDA graph captures are made so: they are made once, and torch's launcher, which is quicker, knows no
such launches.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, "griddepcontrol".

Worked example: of ten captured kernels of 4,096 elements each, every one after the first begins 0.5 µs earlier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from dynafuse.ir import Launch, Size

WAITS = "WAITS"
"""The constant of every kernel that says whether its device has such launches."""

MOST_PROGRAMS = 512
"""The most programs of a kernel that is launched so: they all run at once."""

PROGRAMS = "tl.num_programs(0) * tl.num_programs(1)"

MOST_POINTS = 2**20
"""The most points of a kernel that lets the next one's programs take their places: those wait some microseconds there."""

LEAST_DRIVER = 12040  # CUDA 12.4: graphs capture such launches as edges of their own
WARP = 32
TYPES = {"i1": ctypes.c_int32, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
         "fp32": ctypes.c_float, "fp64": ctypes.c_double}
"""How scalar arguments are passed, by Triton's names of their types; a pointer is ``void *``."""


def prologue(programs: Size, points: int | None) -> Iterator[str]:
    """Yield what a kernel does before it touches memory.

    Args:
        programs: How many programs it has. A kernel that may have more at another call waits there without need.
        points: How many points a program computes; None if that is not known.
    """
    brief = min(MOST_PROGRAMS, MOST_POINTS // points if points else 0)
    if not isinstance(programs, int):
        yield f"if {WAITS} and {PROGRAMS} <= {MOST_PROGRAMS}:"
        yield "    gdc_wait()"
        if brief:
            yield f"    if {PROGRAMS} <= {brief}:"
            yield "        gdc_launch_dependents()"
    elif programs <= MOST_PROGRAMS:
        yield f"if {WAITS}:"
        yield "    gdc_wait()"
        if programs <= brief:
            yield "    gdc_launch_dependents()"


def dependent_launcher(function: int, launch: Launch, shared: int, unused: int) -> Callable[..., None] | None:
    """Return a launch of a kernel that waits by itself for the one before; None where the driver has none.

    Args:
        function: The kernel, as the driver knows it.
        launch: Its launch.
        shared: Its shared memory, in bytes.
        unused: How many pointers it takes behind its arguments, for which nothing is passed.

    Raises:
        RuntimeError: (the returned launch) The driver refuses.
    """
    driver = _driver()
    if driver is None:
        return None
    typed = (ctypes.c_void_p if kind[0] == "*" else TYPES[kind] for _, kind in launch.signature)
    kinds, padding = (*typed, *[ctypes.c_void_p] * unused), (0,) * unused
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1

    def call(stream: int, x: int, y: int, z: int, *arguments: Any) -> None:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.warps * WARP, 1, 1
        config.sharedMemBytes, config.hStream = shared, driver.CUstream(int(stream))
        config.attrs, config.numAttrs = [attribute], 1
        values = (*(given.data_ptr() if isinstance(given, torch.Tensor) else given for given in arguments), *padding)
        error, = driver.cuLaunchKernelEx(config, driver.CUfunction(function), (values, kinds), 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{launch.entry} could not be launched: {error.name}")

    return call


@cache
def _driver() -> Any:
    """Return the driver's functions; None where they are not installed, or the driver is too old."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    error, version = driver.cuDriverGetVersion()
    return driver if error == driver.CUresult.CUDA_SUCCESS and version >= LEAST_DRIVER else None
