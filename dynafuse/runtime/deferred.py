"""A graph's function that is made at its first call, when nobody has to wait for kernels any more, or whoever calls does.

Worked example: ``deferred(finish)`` is a function; ``finish``, which waits for kernels and writes the graph's own, is called
when that is, once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from dynafuse.forks import Lock


def deferred(finish: Callable[[], Callable[..., Any]], pending: Collection[Future[Any]] = (),
             meanwhile: Callable[[list[Any]], Any] | None = None) -> Callable[[list[Any]], Any]:
    """A function that is made when it is called for the first time, once whoever calls.

    With one to run ``meanwhile`` it is made at the first call that finds nothing ``pending``.
    """
    made: list[Callable[..., Any]] = []
    todo = [(finish, pending, meanwhile)]  # goes with what it holds of the graph
    process = os.getpid()
    lock = Lock()

    def run(args: list[Any]) -> Any:
        for finish, pending, meanwhile in todo[:1]:
            # Nobody is left in a forked process who would end what is pending.
            if meanwhile is not None and os.getpid() == process and not all(future.done() for future in pending):
                return meanwhile(args)
            with lock:
                if not made:
                    made.append(finish())
                    todo.clear()
        return made[0](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
