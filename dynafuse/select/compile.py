"""The kernels of regions: asked for by key, made by the executors that the regions were given to.

Worked example: ``request(region, compilation)`` is a future; a region on Triton is compiled in a worker process meanwhile,
one on nvFuser was compiled, and its results compared with torch's, when the future is returned.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from dynafuse.cache import kernels
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.forks import Lock
from dynafuse.futures import then
from dynafuse.lowering.base import Compilation
from dynafuse.lowering.registry import executor
from dynafuse.select.validation import validate

_LOWERING = Lock()
"""Lowering is not made for threads, and who has waited for another process's kernel may have to lower it in one."""


def request(region: CanonicalRegion, compilation: Compilation) -> Future[Any]:
    """Return the kernel of a region: from this process's store, from the disk, or made now.

    Args:
        region: The region, with the name of the executor that makes its kernel.
        compilation: What the kernel is compiled for.

    Returns:
        A future, the same for every request of this process with an equal key.
    """
    runs_on = executor(region.region.executor)

    def usable(kernel: Any) -> Any:
        if runs_on.validated:
            validate(kernel, region)
        return kernel

    def make() -> Future[Any]:
        with _LOWERING:
            return then(runs_on.compile(region, compilation), usable)

    return kernels.get_or_make(region, runs_on, compilation, make, usable)


def is_there(region: CanonicalRegion, compilation: Compilation) -> bool:
    """Return whether the kernel of a region need not be compiled: this process has it, or it is on disk."""
    return kernels.is_there(region, executor(region.region.executor), compilation)
