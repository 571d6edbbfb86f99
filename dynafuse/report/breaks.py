"""Graph breaks: where Dynamo gave up on a function, and why.

Worked example, for ``y = x.sum().item()`` on line 7 of ``model.py``::

    Break("model.py:7: y = x.sum().item()",
          "Unsupported Tensor.item() call with capture_scalar_outputs=False: Dynamo does not support …",
          "Set `torch._dynamo.config.capture_scalar_outputs = True` or …")

Dynamo tells this to two of its loggers only (those of ``TORCH_LOGS=graph_breaks``), so they are listened to.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.utils import DuplicateWarningChecker

from dynafuse.fx import PACKAGES

LOGGERS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
TOLD_BEFORE = "suppressed due to duplicate"  # a place comes again where the function that breaks is compiled by itself
PLACE = re.compile(r"in user code at (.*):(\d+)\n")
FRAME = re.compile(r'File "(.*)", line (\d+), in ')
CAUSE = re.compile(r"(?:^|: |\n)([^\n]+)\n  Explanation: ([^\n]+)")
HINT = re.compile(r"^  Hint: (?!This graph break)(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Break:
    """A place where a graph ends although the function goes on: the user's line, the cause, and what Dynamo advises."""

    where: str
    reason: str
    hint: str = ""


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[Break]]:
    """The breaks that Dynamo meets on this thread meanwhile, each once, in order.

    Dynamo remembers which places it has told of and then leaves out the stack, so it gets a memory of its own for this.
    """
    listener = _Listener()
    dynamo: Any = symbolic_convert
    known, dynamo.graph_break_dup_warning_checker = dynamo.graph_break_dup_warning_checker, DuplicateWarningChecker()
    try:
        with contextlib.ExitStack() as stack:
            for name in LOGGERS:
                stack.enter_context(_listening(logging.getLogger(name), listener))
            yield listener.breaks
    finally:
        dynamo.graph_break_dup_warning_checker = known


class _Listener(logging.Handler):
    """Keeps the breaks among the records of a thread."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.breaks: list[Break] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if record.thread != self._thread or TOLD_BEFORE in told:
            return
        found = break_of(told, record.exc_info[1] if record.exc_info else None)
        if found and found not in self.breaks:
            self.breaks.append(found)


@contextlib.contextmanager
def _listening(logger: logging.Logger, listener: logging.Handler) -> Iterator[None]:
    """Hand a logger's records to a listener; they are shown only if they were before."""
    level, propagate, shown = logger.level, logger.propagate, logger.isEnabledFor(logging.DEBUG)
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = propagate and shown
    try:
        yield
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


def break_of(told: str, error: BaseException | None = None) -> Break | None:
    """The break that a line of Dynamo's log is about; ``error`` is the exception that came with it.

    A break inside of torch is one of the line that calls it.
    """
    frames = [(frame[1], int(frame[2])) for frame in FRAME.finditer(told)]
    place = PLACE.search(told)
    places = [*frames, (place[1], int(place[2]))] if place else frames
    if not places:
        return None
    file, line = next((one for one in reversed(places) if not one[0].startswith(PACKAGES)), places[-1])
    text = linecache.getline(file, line).strip()
    words = str(error) if error is not None else told.partition("Graph Break Reason: ")[2]
    cause, hint = CAUSE.search(words), HINT.search(words)
    reason = f"{cause[1]}: {cause[2]}" if cause else words.strip().partition("\n")[0]
    return Break(f"{file}:{line}" + (f": {text}" if text else ""), reason, hint[1] if hint else "")
