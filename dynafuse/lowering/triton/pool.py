"""Compilation beside whoever traces: in worker processes, and in threads of this process until those are ready.

The workers are a pool of torch's (such as Inductor compiles in): they start in the background, are born with all that
compiles kernels (`worker.py`), and answer with binaries. Kernels that no thread has begun when they are ready go to them.
With ``workers=0`` a kernel compiles where it is asked for.

Worked example: ``submit(lowered, 90, None).result()`` is the tuple of compiled kernels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from dynafuse.fallback import attempted
from dynafuse.forks import in_child
from dynafuse.futures import finished, settle, together
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton.binary import Taken, restored
from dynafuse.lowering.triton.compiler import compile_launch, load
from dynafuse.lowering.triton.parsing import take_turns

if TYPE_CHECKING:
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

log = logging.getLogger(__name__)

THREADS = 4
"""Threads that compile while workers start. LLVM and ptxas run beside Python, the rest takes turns with whoever traces."""


def warm(workers: int | None) -> None:
    """Start the workers without waiting for them, again if they have rested, and have Triton look at itself, once."""
    if workers != 0 and _are_ready():
        attempted(_workers().wakeup, lambda error: log.info("no workers: %s", error))
    _read_triton()


def _are_ready() -> bool:
    """Return whether workers answer by now; start them if they are to be started."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads() > 1 and _first_answer().done()


@cache
def _first_answer() -> Future[Any]:
    return _workers().submit(os.getpid)


@cache
def _workers() -> SubprocPool:
    from multiprocessing.util import Finalize

    from torch._inductor import async_compile, config
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    from dynafuse.lowering.triton.worker import Pickler

    count, pickler = async_compile.get_compile_threads(), Pickler(is_parent=False)
    workers = SubprocPool(count, pickler, quiesce=config.quiesce_async_compile_pool)
    # As torch does with its own: they are shut down when this process ends, also if `multiprocessing` has started it.
    async_compile._pool_set.add(workers)
    Finalize(None, workers.shutdown, exitpriority=sys.maxsize)
    return workers


@cache
def _read_triton() -> None:
    """Work out Triton's key beforehand: it is of hundreds of files, which take seconds to read beside a busy thread."""
    from torch._inductor.runtime.triton_compat import triton_key

    threading.Thread(target=triton_key, daemon=True).start()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "dynafuse-compile")


for _kept in (_first_answer, _workers, _threads):
    in_child(_kept.cache_clear)


def submit(lowered: Lowered, capability: int | None, workers: int | None) -> Future[tuple[Any, ...]]:
    """Compile a lowered spec, its kernels side by side; the future holds them, in the order of their launches.

    Args:
        lowered: Source and launches.
        capability: The device's compute capability, as 90; None: the source is interpreted.
        workers: The option of that name: 0 compiles here and now.
    """
    take_turns()
    if capability is None or workers == 0:
        return finished(lambda: load(lowered, capability))
    return together([_submitted(lowered.source, launch, capability) for launch in lowered.launches])


def _submitted(source: str, launch: Launch, capability: int) -> Future[Any]:
    compiled: Future[Any] = Future()
    _threads().submit(_compile, compiled, source, launch, capability)
    return compiled


def _compile(compiled: Future[Any], source: str, launch: Launch, capability: int) -> None:
    """Compile in a worker if they are ready by now, else in this thread."""
    answer_to_come = _sent(source, launch, capability)
    if answer_to_come is None:
        settle(compiled, lambda: compile_launch(source, launch, capability))
        return

    def fetch(answer: Future[Taken]) -> None:  # called by the thread that all workers answer to: it must not be kept
        with contextlib.suppress(RuntimeError):  # this process is ending
            _threads().submit(settle, compiled, lambda: restored(launch, *answer.result(), capability))

    answer_to_come.add_done_callback(fetch)


def _sent(source: str, launch: Launch, capability: int) -> Future[Taken] | None:
    """Return what a worker will answer; None if they are not ready, or no more."""
    from dynafuse.lowering.triton.worker import compiled_bytes

    def send() -> Future[Taken] | None:
        return _workers().submit(compiled_bytes, source, launch, capability) if _are_ready() else None

    # Somebody may have shut them down.
    return attempted(send, lambda error: log.info("compiled in a thread, for lack of workers: %s", error))
