"""The function of a graph whose kernels are being compiled: made at its first call, which waits for them.

Worked example: ``deferred(finish)`` returns a function at once. Its first call calls ``finish``, which waits for kernels and
writes the graph's function; that call and all later ones run what ``finish`` returned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from dynafuse.forks import Lock


def deferred(finish: Callable[[], Callable[..., Any]], pending: Collection[Future[Any]] = (),
             meanwhile: Callable[[list[Any]], Any] | None = None) -> Callable[[list[Any]], Any]:
    """Return a boxed function that ``finish`` makes at the first call, once, in whichever thread that is.

    Args:
        finish: Returns the function; it may wait for what is pending.
        pending: Kernels that are being compiled.
        meanwhile: A function to call instead while something is pending; without one the first call waits.
    """
    finished: list[Callable[..., Any]] = []
    todo = [(finish, pending, meanwhile)]  # emptied when it is done, because it holds the graph
    process = os.getpid()
    lock = Lock()

    def run(args: list[Any]) -> Any:
        for finish, pending, meanwhile in todo[:1]:
            # In a forked process no thread is left that would complete what is pending.
            if meanwhile is not None and os.getpid() == process and not all(future.done() for future in pending):
                return meanwhile(args)
            with lock:
                if not finished:
                    finished.append(finish())
                    todo.clear()
        return finished[0](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
