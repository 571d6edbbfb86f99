"""Lowers a spec to Triton source: a schedule, then the kernels of its class.

Worked example: ``lower(spec)`` of a row softmax returns one launch whose source is a kernel named
``dynafuse_persistent_amax_sub_exp_sum_div``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dynafuse.ir import Lowered, Spec
from dynafuse.lowering.base import VARIANT
from dynafuse.lowering.triton.kernels import write_kernels, write_nests
from dynafuse.lowering.triton.room import roomier
from dynafuse.lowering.triton.schedule import choose_schedule
from dynafuse.lowering.triton.tiles import Schedule

FRAMES_PER_OP = 40
"""More frames of Python than it takes one value to ask for the value that it is computed from."""

_lock = threading.Lock()
_recursion_limits: list[int] = []  # the limit as it was before, then the limits that the running lowerings need


def lower(spec: Spec, schedule: Schedule | None = None) -> Lowered:
    """Return source and launches of a spec's kernels.

    Args:
        spec: What the kernels compute.
        schedule: How; None for the schedule that ``choose_schedule`` chooses.

    Raises:
        LoweringError: if an op's row promises too much.
    """
    round_like_eager = bool(dict(spec.options).get("round_like_eager"))
    with _recursion_room(FRAMES_PER_OP * len(spec.ops)):
        if spec.nests:
            return write_nests(spec, round_like_eager)
        return write_kernels(spec, schedule or choose_schedule(spec), round_like_eager)


def lowerings(spec: Spec) -> Iterator[Lowered]:
    """Yield a spec's kernels under the schedule that ``choose_schedule`` chooses, then under others with more warps.

    Raises:
        LoweringError: if an op's row promises too much.
    """
    if spec.nests:
        yield lower(spec)
        return
    schedule = choose_schedule(spec)
    yield lower(spec, schedule)
    if VARIANT not in dict(spec.options):
        for other in roomier(schedule):
            yield lower(spec, other)


@contextmanager
def _recursion_room(frames: int) -> Iterator[None]:
    """Let values ask for values as deep as a chain of ops goes. All threads share one limit, the highest that one needs."""
    with _lock:
        if not _recursion_limits:
            _recursion_limits.append(sys.getrecursionlimit())
        limit = _recursion_limits[0] + frames
        _recursion_limits.append(limit)
        sys.setrecursionlimit(max(_recursion_limits))
    try:
        yield
    finally:
        with _lock:
            _recursion_limits.remove(limit)
            if len(_recursion_limits) == 1:
                sys.setrecursionlimit(_recursion_limits.pop())
