"""Counters by which a kernel's programs find out which of them is the last: zero before a launch, and after it.

On a stream one launch follows the other, so that all of them share counters. What a CUDA graph has captured may be replayed
on any stream, beside others: each captured launch has counters of its own, for as long as the process lives. They are taken
from memory that is there before: what is allocated during a capture would be cleared at each replay, by a launch.

Worked example: ``counters_on(0)(stream, 32)`` returns 1,024 zeros of device 0, of which the launch uses 32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from dynafuse.forks import Lock
from dynafuse.lowering.triton.combine import MOST_COUNTERS
from dynafuse.lowering.triton.launch import Captured

FOR_CAPTURED = 1 << 18
"""Counters of a device for captured launches; once they are taken, further ones are allocated and cleared by replays."""


class Counters:
    """The counters of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_stream: dict[object, Tensor] = {}
        self._for_captured: Tensor | None = None
        self._taken = 0
        self._lock = Lock()

    def __call__(self, stream: object, count: int) -> Tensor:
        """Return counters for a launch, at least as many as are asked for; all are zero.

        Args:
            stream: Where it is launched: the device's current stream.
            count: How many it needs.
        """
        if isinstance(stream, Captured):
            return self._own(count)
        counters = self._of_stream.get(stream)
        return self._new(stream) if counters is None else counters

    def _new(self, stream: object) -> Tensor:
        """Allocate the counters of a stream, and at first those for captured launches."""
        with self._lock:
            if self._for_captured is None:
                self._for_captured = self._lasting(FOR_CAPTURED)
            return self._of_stream.setdefault(stream, self._lasting(MOST_COUNTERS))

    def _own(self, count: int) -> Tensor:
        """Return counters that no other launch has."""
        with self._lock:
            start = self._taken
            if self._for_captured is None or start + count > FOR_CAPTURED:
                return self._zeros(count)
            self._taken += count
            return self._for_captured[start:start + count]

    def _lasting(self, count: int) -> Tensor:
        """Allocate counters in another thread: whoever has all that this one allocates lie in a pool, expects it back."""
        def allocate() -> Tensor:
            counters = self._zeros(count)
            torch.cuda.synchronize(self._device)  # they are zero on whichever stream a kernel reads them
            return counters

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(allocate).result()

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


def interpreted(stream: object, count: int) -> Tensor:
    """Return counters for a launch in the interpreter: new ones, because one that raises leaves its own as they are.

    Args:
        stream: As for :class:`Counters`.
        count: How many it needs.
    """
    return torch.zeros(count, dtype=torch.int32)


@cache
def counters_on(device: int | None) -> Callable[[object, int], Tensor]:
    """Return what gives launches their counters on a CUDA device or, for None, in the interpreter."""
    return interpreted if device is None else Counters(torch.device("cuda", device))
