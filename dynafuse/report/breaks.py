"""Graph breaks: where Dynamo gave up on a function, and why.

Worked example, for ``y = x.sum().item()`` on line 7 of ``model.py``::

    Break("model.py:7: y = x.sum().item()",
          "Unsupported Tensor.item() call with capture_scalar_outputs=False: Dynamo does not support …",
          "Set `torch._dynamo.config.capture_scalar_outputs = True` or …")

Dynamo reports breaks to two of its loggers only (those of ``TORCH_LOGS=graph_breaks``), so a handler listens to these.
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
DUPLICATE = "suppressed due to duplicate"  # logged again when Dynamo compiles the function that breaks by itself
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
    """Collect the breaks that Dynamo meets on this thread inside the block, each once, in order.

    Dynamo remembers which places it has reported and leaves the stack out the second time, so it gets a fresh memory here.
    """
    listener = _Listener()
    dynamo: Any = symbolic_convert
    checker, dynamo.graph_break_dup_warning_checker = dynamo.graph_break_dup_warning_checker, DuplicateWarningChecker()
    try:
        with contextlib.ExitStack() as stack:
            for name in LOGGERS:
                stack.enter_context(_listening(logging.getLogger(name), listener))
            yield listener.breaks
    finally:
        dynamo.graph_break_dup_warning_checker = checker


class _Listener(logging.Handler):
    """Collects the breaks among the log records of one thread."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.breaks: list[Break] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.thread != self._thread or DUPLICATE in message:
            return
        graph_break = break_of(message, record.exc_info[1] if record.exc_info else None)
        if graph_break and graph_break not in self.breaks:
            self.breaks.append(graph_break)


@contextlib.contextmanager
def _listening(logger: logging.Logger, listener: logging.Handler) -> Iterator[None]:
    """Hand a logger's records to a listener; the user sees them only where they would have been shown anyway."""
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


def break_of(message: str, error: BaseException | None = None) -> Break | None:
    """Parse the break that a message of Dynamo's log is about; None if it names no place.

    ``error`` is the exception that was logged with it. A break inside of torch is reported at the line that calls torch.
    """
    frames = [(frame[1], int(frame[2])) for frame in FRAME.finditer(message)]
    place = PLACE.search(message)
    places = [*frames, (place[1], int(place[2]))] if place else frames
    if not places:
        return None
    file, line = next((place for place in reversed(places) if not place[0].startswith(PACKAGES)), places[-1])
    text = linecache.getline(file, line).strip()
    explanation = str(error) if error is not None else message.partition("Graph Break Reason: ")[2]
    cause, hint = CAUSE.search(explanation), HINT.search(explanation)
    reason = f"{cause[1]}: {cause[2]}" if cause else explanation.strip().partition("\n")[0]
    return Break(f"{file}:{line}" + (f": {text}" if text else ""), reason, hint[1] if hint else "")
