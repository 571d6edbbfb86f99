"""Compilation in worker processes.

The workers are torch's own (the pool that Inductor compiles in): they start in the background, have torch and Triton
imported, and leave each binary in Triton's cache folder, from which this process loads it in about a millisecond. Until
they are ready, and with ``workers=0``, kernels compile in this process.

Worked example: ``submit(lowered, 90, None).result()`` is the tuple of compiled kernels.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from dynafuse.ir import Lowered
from dynafuse.lowering.triton.compiler import compile_all, load


def warm(workers: int | None) -> None:
    """Start the workers without waiting for them."""
    if workers != 0:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup() if hasattr(AsyncCompile, "wakeup") else None
        threading.Thread(target=AsyncCompile.process_pool, daemon=True).start()


def _pool(workers: int | None) -> Any:
    """torch's pool if it may be used and is ready, else None."""
    if workers == 0:
        return None
    from torch._inductor.async_compile import AsyncCompile

    return AsyncCompile.process_pool() if AsyncCompile.use_process_pool() else None


def submit(lowered: Lowered, capability: int | None, workers: int | None) -> Future[tuple[Any, ...]]:
    """Compile a lowered spec; the future holds what :func:`dynafuse.lowering.triton.compiler.load` returns."""
    done: Future[tuple[Any, ...]] = Future()
    pool = None if capability is None else _pool(workers)
    if pool is None:
        done.set_result(load(lowered, capability))
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
