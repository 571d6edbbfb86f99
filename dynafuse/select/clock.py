"""Clocks for kernels on the current CUDA device: their device time, their host time, their time in a captured graph.

Worked example: ``Gpu().device(lambda: torch.add(x, y, out=z), 20)`` is the device time of the addition in microseconds,
the same on a slow host as on a fast one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Protocol

import torch

Run = Callable[[], object]


class Refused(Exception):
    """A measurement that is not to be trusted; the message says why."""


class CaptureFailed(Refused):
    """A call that cannot be captured into a CUDA graph."""


class Timer(Protocol):
    """The clocks; all give microseconds per call of ``run``."""

    def device(self, run: Run, calls: int) -> float:
        """Device time, the host's pace left out."""

    def host(self, run: Run, calls: int) -> float:
        """Host time, of calls that the device keeps up with."""

    def replay(self, run: Run, calls: int = ..., replays: int = ..., rounds: int = ...) -> float:
        """Device time of a captured call, replayed; the median of rounds. Raises CaptureFailed."""


class Gpu:
    """The clocks on the current CUDA device and stream."""

    HOLD_CYCLES = 4_000_000  # some 2 ms
    LONGEST_HOLD = 1_000_000_000
    WARM = 3
    CALLS = 20

    def device(self, run: Run, calls: int) -> float:
        """Events around calls that queue up while the device is held; held longer until the host is ahead."""
        cycles = self.HOLD_CYCLES
        while cycles < self.LONGEST_HOLD:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            ahead = not begin.query()
            torch.cuda.synchronize()
            if ahead:
                return 1e3 * float(begin.elapsed_time(end)) / calls
            cycles *= 4
        raise Refused("the host did not get ahead of the device")

    def host(self, run: Run, calls: int) -> float:
        """Wall time of calls, from an idle device, without waiting for it at the end."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        us = 1e6 * (time.perf_counter() - began) / calls
        torch.cuda.synchronize()
        return us

    def replay(self, run: Run, calls: int = CALLS, replays: int = CALLS, rounds: int = 1) -> float:
        """Replays of ``calls`` captured calls, through :meth:`device`."""
        graph = self._captured(run, calls)
        return median(self.device(graph.replay, replays) for _ in range(rounds)) / calls

    def _captured(self, run: Run, calls: int) -> torch.cuda.CUDAGraph:
        before, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(self.WARM):
                    run()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for _ in range(calls):
                    run()
        except RuntimeError as error:  # what CUDA and torch raise
            _end_capture()
            raise CaptureFailed(str(error)) from error
        finally:
            torch.cuda.set_stream(before)  # a capture that cannot be ended leaves its own stream current
        before.wait_stream(side)
        return graph


def _end_capture() -> None:
    """After a failed capture: an empty one, which takes the random number generator out of its capturing state."""
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            pass
