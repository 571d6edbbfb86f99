"""A process that runs programs: jobs come in as JSON lines, verdicts go out as JSON lines.

A job is an index (of the worker's seed), or that with ``shrink``, or a text. A worker that dies, or that takes longer than its
parent allows, is replaced; only the program that it was running is lost.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.support import interpreter

LOST = "CUDA error"
"""What messages say after which a process has no device any more."""


class OutOfTime(BaseException):
    """A program took too long; no ``except Exception`` on the way stops it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` in here after so many seconds of processor time: a busy machine fails no program."""
    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def serve(seed: int, device: str, executors: tuple[str, ...], limit: float, shrink_seconds: float, captured: bool) -> None:
    """Work until there is no more input, or the device is lost. Only answers go to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    import torch

    interpreter.install()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions in it are far off, and not alike in every layout
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        made = answer(json.loads(line), seed, device, executors, limit, shrink_seconds, captured)
        answers.write(json.dumps(made) + "\n")
        answers.flush()
        if made["last"]:
            return


def answer(job: Mapping[str, Any], seed: int, device: str, executors: tuple[str, ...], limit: float,
           shrink_seconds: float, captured: bool) -> dict[str, Any]:
    """What becomes of one job."""
    from tests.fuzz.generate import generate
    from tests.fuzz.shrink import shrink
    from tests.fuzz.subject import Verdict, examine

    start = time.monotonic()
    text = ""
    try:
        with limited(limit + (shrink_seconds if job.get("shrink") else 0)):
            program = None if "text" in job else generate(seed, job["index"], executors)
            text = job["text"] if program is None else str(program)
            verdict = examine(text, device, captured)
            if job.get("shrink") and verdict.failed and program is not None:
                least, verdict = shrink(program, verdict, lambda t: examine(t, device, captured), shrink_seconds)
                text = str(least)
    except OutOfTime:
        verdict = Verdict("slow", "time", f"more than {limit} s")
    except Exception as error:  # a fault of the fuzzer's
        verdict = Verdict("broken", type(error).__name__, repr(error)[:500])
    return {"index": job.get("index"), "status": verdict.status, "kind": verdict.kind, "detail": verdict.detail,
            "where": verdict.where, "signature": verdict.signature, "seconds": round(time.monotonic() - start, 2),
            "text": text if verdict.status != "ok" or "text" in job else "", "last": LOST in verdict.detail}
