"""From a spec to Triton source: schedule, then the kernels of the chosen class.

Worked example: ``lower(spec)`` of a row softmax returns one launch whose source is a kernel named
``dynafuse_persistent_amax_sub_exp_sum_div``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dynafuse.ir import Lowered, Spec
from dynafuse.lowering.triton.kernels import lowered
from dynafuse.lowering.triton.schedule import schedule

FRAMES_PER_OP = 40
"""More calls than a value takes to ask for the one that it is computed from."""
_lock = threading.Lock()
_deep: list[int] = []  # the limits that lowerings under way need, after the one that was set before them


def lower(spec: Spec) -> Lowered:
    """Source and launches of a spec's kernels. Raises LoweringError if an op's row promises too much."""
    with _recursion(FRAMES_PER_OP * len(spec.ops)):
        return lowered(spec, schedule(spec), bool(dict(spec.options).get("round_like_eager")))


@contextmanager
def _recursion(frames: int) -> Iterator[None]:
    """Let values ask for values as deep as a chain of ops goes; the limit is one for all threads."""
    with _lock:
        if not _deep:
            _deep.append(sys.getrecursionlimit())
        needed = _deep[0] + frames
        _deep.append(needed)
        sys.setrecursionlimit(max(_deep))
    try:
        yield
    finally:
        with _lock:
            _deep.remove(needed)
            if len(_deep) == 1:
                sys.setrecursionlimit(_deep.pop())
