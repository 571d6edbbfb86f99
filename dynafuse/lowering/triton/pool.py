"""Compilation beside whoever traces: in worker processes, and in threads of this process until those are ready.

The workers start in the background (``workers.py``), are born with all that compiles kernels (``worker.py``), and answer
with binaries. Kernels that no thread has begun when they are ready go to them. With ``workers=0`` a kernel compiles where
it is asked for.

Worked example: ``submit(lowered, 90, None).result()`` is the tuple of compiled kernels.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from dynafuse.fallback import attempted
from dynafuse.forks import in_child
from dynafuse.futures import finished, settle, together
from dynafuse.ir import Launch, Lowered
from dynafuse.lowering.triton.binary import restored
from dynafuse.lowering.triton.compiler import compile_launch, job_of, load, path_of, use_torchs_assembler
from dynafuse.lowering.triton.jobs import Taken
from dynafuse.lowering.triton.parsing import take_turns
from dynafuse.lowering.triton.worker import Task
from dynafuse.lowering.triton.workers import Workers, WorkersEnded

log = logging.getLogger(__name__)

THREADS = 4
"""Threads that compile while workers start. LLVM and ptxas run beside Python, the rest takes turns with whoever traces."""


def warm(workers: int | None) -> None:
    """Start the workers without waiting for them, and have Triton look at itself, once.

    Args:
        workers: The option of that name: how many; None for as many as torch would have, 0 for none.
    """
    if workers != 0:
        attempted(lambda: _workers(workers), lambda error: log.info("no workers: %s", error))
    _read_triton()


@cache
def _workers(given: int | None) -> Workers | None:
    """Return so many workers, started now if they have not been; None where compiling is left to one process."""
    from torch._inductor.config import decide_compile_threads

    count = decide_compile_threads() if given is None else given
    if count < (2 if given is None else 1):
        return None
    use_torchs_assembler()
    return Workers(count)


def _ready(count: int | None) -> Workers | None:
    """Return so many workers if they are ready by now, else None."""
    workers = _workers(count)
    return workers if workers is not None and workers.ready.done() else None


@cache
def _read_triton() -> None:
    """Work out Triton's key beforehand: it is of hundreds of files, which take seconds to read beside a busy thread."""
    from torch._inductor.runtime.triton_compat import triton_key

    threading.Thread(target=triton_key, daemon=True).start()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "dynafuse-compile")


for _kept in (_workers, _threads):
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
    return together([_submitted(lowered.source, launch, capability, workers) for launch in lowered.launches])


def _submitted(source: str, launch: Launch, capability: int, workers: int | None) -> Future[Any]:
    compiled: Future[Any] = Future()
    _threads().submit(_compile, compiled, source, launch, capability, workers)
    return compiled


def _compile(compiled: Future[Any], source: str, launch: Launch, capability: int, count: int | None) -> None:
    """Compile in a worker if they are ready by now, else in this thread."""
    def compile_here() -> Any:
        return compile_launch(source, launch, capability)

    answer_to_come = _sent(source, launch, capability, count)
    if answer_to_come is None:
        settle(compiled, compile_here)
        return

    def received(answer: Future[Taken]) -> Any:
        if isinstance(answer.exception(), WorkersEnded):
            return compile_here()
        return restored(launch, *answer.result(), capability)

    def fetch(answer: Future[Taken]) -> None:  # called by the thread that all workers answer to: it must not be kept
        with contextlib.suppress(RuntimeError):  # this process is ending
            _threads().submit(settle, compiled, lambda: received(answer))

    answer_to_come.add_done_callback(fetch)


def _sent(source: str, launch: Launch, capability: int, count: int | None) -> Future[Taken] | None:
    """Return what a worker will answer; None if they are not ready, or no more."""
    def send() -> Future[Taken] | None:
        workers = _ready(count)
        return None if workers is None else workers.submit(Task(source, path_of(source), job_of(launch, capability)))

    return attempted(send, lambda error: log.info("compiled in a thread, for lack of workers: %s", error))
