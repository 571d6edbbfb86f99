"""A function of dynamic sizes that is compiled once more for sizes that keep coming.

One compilation serves all sizes, but its kernels do not know them: they divide by sizes that are arguments, mask what no
size needs, and have the schedule of an example. So calls are counted that run on them one after the other with the same
sizes. When there are enough, the graph is compiled as if these sizes were the only ones, for all later calls with them.

Worked example: with ``after=3`` the calls of ``f(4, x)``, ``f(4, x)``, ``f(4, x)`` run two times on what was made for
any size, the third time on what was made for 4; ``f(5, x)``, ``f(6, x)``, ``f(7, x)`` never do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from dynafuse.forks import Lock

log = logging.getLogger(__name__)

MOST_SIZES = 4
"""Sizes for which a graph is compiled once more: of batches there are few, of lengths there would be hundreds."""


class Specialized:
    """A compiled graph as a function of its arguments. ``static`` has the functions of fixed sizes, of the others."""

    def __init__(self, dynamic: Callable[..., Any], positions: Sequence[int], after: int,
                 make: Callable[[Sequence[Any]], Callable[..., Any] | None]) -> None:
        """Take what runs for any sizes.

        Args:
            dynamic: The function of all arguments.
            positions: Which arguments are sizes.
            after: How many calls with the same sizes follow each other when a function of fixed sizes is made.
            make: Makes one, of all arguments too, for those of a call. None if that fails.
        """
        self.dynamic = dynamic
        self.static: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._positions = positions
        self._after = after
        self._make = make
        self._last: tuple[int, ...] = ()
        self._count = 0
        self._lock = Lock()

    def __call__(self, *arguments: Any) -> Any:
        """Return the results of a call, of the function for the sizes among its arguments."""
        sizes = tuple([arguments[i] for i in self._positions])
        function = self.static.get(sizes)
        if function is not None:
            return function(*arguments)
        self._count = self._count + 1 if sizes == self._last else 1
        self._last = sizes
        if self._count >= self._after and len(self.static) < MOST_SIZES and _may_compile():
            return self._specialized(sizes, arguments)(*arguments)
        return self.dynamic(*arguments)

    def _specialized(self, sizes: tuple[int, ...], arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the function for some sizes from now on."""
        with self._lock:
            if sizes not in self.static:
                log.info("compiled once more for sizes %s", sizes)
                self.static[sizes] = self._make(arguments) or self.dynamic
            return self.static[sizes]


def of_some(positions: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of many arguments that calls one of those at some positions.

    Args:
        positions: Where its arguments are among all.
        function: The function that is called.
    """
    if len(positions) < 2:
        return lambda *arguments: function(*(arguments[i] for i in positions))
    picked = itemgetter(*positions)
    return lambda *arguments: function(*picked(arguments))


def _may_compile() -> bool:
    """Return whether nothing is being recorded of which a compilation would become a part."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@contextmanager
def compiling(mode: FakeTensorMode) -> Iterator[None]:
    """Have a graph compiled while it is called as Dynamo has it compiled: one at a time, under none of the caller's modes.

    Args:
        mode: Whose tensors the inputs become while they are traced.
    """
    session = getattr(torch.compiler, "_compile_session_context", nullcontext)  # since torch 2.12; other threads ask for it
    with compile_lock, _disable_current_modes(), session(), tracing(TracingContext(mode)):
        yield
