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
    """Raised for a measurement that is not to be trusted; the message says why."""


class CaptureFailed(Refused):
    """Raised if a call cannot be captured into a CUDA graph."""


class Timer(Protocol):
    """Clocks; all return microseconds per call of ``run``."""

    def device(self, run: Run, calls: int) -> float:
        """Return the device time of a call in microseconds, however slow the host is.

        Args:
            run: The call.
            calls: How many calls are timed together.
        """

    def host(self, run: Run, calls: int) -> float:
        """Return the host time of a call in microseconds, of calls that the device keeps up with.

        Args:
            run: The call.
            calls: How many calls are timed together.
        """

    def replay(self, run: Run, calls: int = ..., replays: int = ..., rounds: int = ...) -> float:
        """Return the device time of a call in a CUDA graph in microseconds, as the median of rounds of replays.

        Args:
            run: The call.
            calls: How many calls a graph has.
            replays: How many replays a round times.
            rounds: How many rounds there are.

        Raises:
            CaptureFailed: The call cannot be captured.
        """


class Gpu:
    """Clocks on the current CUDA device and stream."""

    HOLD_CYCLES = 4_000_000  # some 2 ms
    LONGEST_HOLD = 1_000_000_000
    WARM = 3
    CALLS = 20

    def device(self, run: Run, calls: int) -> float:
        """Time calls by events, while the device is held before the first; held longer until the host is ahead.

        Args:
            run: The call.
            calls: How many calls are timed together.

        Raises:
            Refused: The host never gets ahead of the device.
        """
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
        """Time calls on the host, from an idle device on, without waiting for the device at the end."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        us = 1e6 * (time.perf_counter() - start) / calls
        torch.cuda.synchronize()
        return us

    def replay(self, run: Run, calls: int = CALLS, replays: int = CALLS, rounds: int = 1) -> float:
        """Capture calls into a graph and time its replays by :meth:`device`.

        Args:
            run: The call.
            calls: How many calls the graph has.
            replays: How many replays a round times.
            rounds: How many rounds there are; the median counts.

        Raises:
            CaptureFailed: The call cannot be captured.
        """
        graph = self._capture(run, calls)
        return median(self.device(graph.replay, replays) for _ in range(rounds)) / calls

    def _capture(self, run: Run, calls: int) -> torch.cuda.CUDAGraph:
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
    """Capture nothing after a failed capture, which takes the random number generator out of its capturing state."""
    with suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph is empty
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            pass
