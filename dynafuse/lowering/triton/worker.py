"""What worker processes do, and what they have when they are born.

Torch's pool starts one process, which imports the module of the pool's pickler, and forks the workers from that. With a
pickler of this module they are born with all that compiles kernels, and have seen a kernel compiled: the first of a worker
then takes no longer than the others.

Worked example: ``compiled_bytes(source, launch, 90)``, in a worker, is metadata and cubin of one kernel.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import sympy
import triton
from torch._inductor.compile_worker.subproc_pool import SubprocPickler

from dynafuse.fallback import attempted
from dynafuse.ir import Launch
from dynafuse.lowering.triton.binary import Taken, taken
from dynafuse.lowering.triton.compiler import compile_launch
from dynafuse.lowering.triton.scratch import scratch_folder
from dynafuse.lowering.triton.source import HEADER, QUICK

log = logging.getLogger(__name__)

FIRST = HEADER + QUICK + """

@triton.jit
def first(x, y, XBLOCK: tl.constexpr, WAITS: tl.constexpr = False):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(y + i, lq.exp(tl.load(x + i)))
"""
"""A kernel that is compiled to have all loaded that compiles kernels."""

ANY_CAPABILITY = 80
"""That of the first kernel, which nobody runs."""


class Pickler(SubprocPickler):
    """Torch's pickler, and by its module what workers are born with."""

    def __init__(self, is_parent: bool = True) -> None:
        """Compile a first kernel if this is the process that workers are forked from, which passes no argument.

        Args:
            is_parent: Whether this is that process.
        """
        if is_parent:
            attempted(_compile_first, lambda error: log.info("workers are born without a kernel compiled: %s", error))


def _compile_first() -> None:
    launch = Launch("first", (("x", "*fp32"), ("y", "*fp32")), (sympy.Integer(1),) * 3, (("XBLOCK", 128),), 4, 1)
    compiled_bytes(FIRST, launch, ANY_CAPABILITY)


def compiled_bytes(source: str, launch: Launch, capability: int) -> Taken:
    """Compile a kernel to what :func:`dynafuse.lowering.triton.binary.taken` returns.

    Args:
        source, launch, capability: As for :func:`dynafuse.lowering.triton.compiler.compile_launch`.
    """
    with _files_in_memory():
        return taken(compile_launch(source, launch, capability))


@contextmanager
def _files_in_memory() -> Iterator[None]:
    """Have Triton and ptxas write to memory, for this whole process: Triton's own cache would keep what ours keeps, too."""
    with scratch_folder() as folder, triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.store_binary_only = True
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before
