"""Compilation in worker processes.

The workers are torch's own (the pool that Inductor compiles in): they start in the background, have torch and Triton
imported, and leave each binary in Triton's cache folder, from which this process loads it in about a millisecond. Until
they are ready, kernels compile in this process for a second, so that a small graph waits for nobody, and then wait for them.
With ``workers=0`` all kernels compile in this process.

Worked example: ``submit(lowered, 90, None).result()`` is the tuple of compiled kernels.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from functools import cache
from typing import Any

from dynafuse.ir import Lowered
from dynafuse.lowering.triton.compiler import compile_all, load

PATIENCE_S = 1.0
"""How long this process compiles itself, all told, while workers are starting."""


def warm(workers: int | None) -> None:
    """Start the workers without waiting for them, and have Triton look at itself; once."""
    if workers != 0:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup() if hasattr(AsyncCompile, "wakeup") else AsyncCompile.process_pool()
    _read_triton()


@cache
def _read_triton() -> None:
    """Work out Triton's key beforehand: it is of hundreds of files, which take seconds to read beside a busy thread."""
    from torch._inductor.runtime.triton_compat import triton_key

    threading.Thread(target=triton_key, daemon=True).start()


class _Here:
    """Seconds of compiling in this process so far."""

    spent: float = 0.0


def _pool(workers: int | None) -> Any:
    """torch's pool if it may be used, and is ready or worth waiting for; else None."""
    if workers == 0:
        return None
    from torch._inductor.async_compile import AsyncCompile

    if AsyncCompile.use_process_pool():
        return AsyncCompile.process_pool()
    is_starting = getattr(AsyncCompile, "_ready_future", None) is not None
    return AsyncCompile.process_pool() if is_starting and _Here.spent > PATIENCE_S else None


def submit(lowered: Lowered, capability: int | None, workers: int | None) -> Future[tuple[Any, ...]]:
    """Compile a lowered spec; the future holds what :func:`dynafuse.lowering.triton.compiler.load` returns."""
    done: Future[tuple[Any, ...]] = Future()
    pool = None if capability is None else _pool(workers)
    if pool is None:
        began = time.perf_counter()
        done.set_result(load(lowered, capability))
        _Here.spent += time.perf_counter() - began
        return done
    remote = pool.submit(compile_all, lowered.source, lowered.launches, capability)

    def finish(result: Future[Any]) -> None:
        try:
            result.result()
            done.set_result(load(lowered, capability))
        except Exception as error:  # handed to whoever waits for the kernel
            done.set_exception(error)

    remote.add_done_callback(finish)
    return done
