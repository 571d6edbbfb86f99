"""A process that compiles kernels for another one, in workers that are forked from it.

Workers are born with all that compiles kernels and have seen one compiled, so that the first of each takes no longer than
the others. None of them has torch: importing it, and Dynamo with it, as torch's own pools of workers do, takes most of the
time that a small model takes to compile.

The other process sends a number with a :class:`Task`, and gets the number back with what :func:`compiled_text` returns. What
it gets first is :data:`READY`. Both ends notice when the other is gone. Nobody who asks for nothing keeps workers.

Worked example: ``compiled_text(Task(text, "/tmp/kernels.py", job))``, in a worker, is metadata and cubin of one kernel.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from types import ModuleType

import triton

from dynafuse.fallback import attempted
from dynafuse.lowering.triton.header import HEADER, QUICK
from dynafuse.lowering.triton.jobs import Job, Taken, compile_job, taken
from dynafuse.lowering.triton.scratch import scratch_folder

log = logging.getLogger(__name__)

READY = "ready"
"""What is sent once workers can be forked."""

RESTING_S = 60.0
"""Seconds after which workers that nobody asks for anything are ended; others are forked when they are needed."""

FIRST = HEADER + QUICK + """

@triton.jit
def first(x, y, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(y + i, lq.exp(tl.load(x + i)))
"""
"""A kernel that is compiled to have all loaded that compiles kernels."""

ANY_CAPABILITY = 80
"""That of the first kernel, which nobody runs."""


@dataclass(frozen=True)
class Task:
    """A kernel to compile, with the text of its module and where that is to be shown to lie: binaries name it."""

    text: str
    path: str
    job: Job


@dataclass(frozen=True)
class Failure:
    """Why there is no kernel."""

    text: str


# What workers do ------------------------------------------------------------------------------------------------------


def compiled_text(task: Task) -> Taken | Failure:
    """Return metadata and binary of a kernel, or why there are none: not every error of Triton's can be sent."""
    def compiled() -> Taken | Failure:
        with files_in_memory():
            return taken(compile_job(task.job, _module(task.text, task.path)))

    return attempted(compiled, lambda error: Failure(f"{type(error).__name__}: {error}"))


@lru_cache(maxsize=4)
def _module(text: str, path: str) -> ModuleType:
    """Return the module of a text. Triton finds its lines as Python does those of files that are not there any more."""
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    module = ModuleType("dynafuse_kernels")
    module.__file__ = path
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    return module


@contextmanager
def files_in_memory() -> Iterator[None]:
    """Have Triton and ptxas write to memory, for this whole process: Triton's own cache would keep what ours keeps, too."""
    with scratch_folder() as folder, triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.store_binary_only = True
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _begin(connection: Connection) -> None:
    """Begin as a worker: leave talking to the process that forks workers, and end with it."""
    connection.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


# The process that forks them ------------------------------------------------------------------------------------------


def main() -> None:
    """Compile until the other process is gone. Arguments: the descriptor to talk over, and how many workers."""
    connection, count = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever interrupts the other process has not meant this one
    attempted(_compile_first, lambda error: log.info("workers are born without a kernel compiled: %s", error))
    connection.send(READY)
    with connection:
        _Server(connection, count).serve()


def _compile_first() -> None:
    job = Job("first", (("x", "*fp32"), ("y", "*fp32")), (("XBLOCK", 128),), ((0, 16), (1, 16)), 4, 1, False, ANY_CAPABILITY)
    with files_in_memory():
        taken(compile_job(job, _module(FIRST, "<first>")))


class _Server:
    """Hands tasks to workers, and their answers back."""

    def __init__(self, connection: Connection, count: int) -> None:
        self.connection = connection
        self.count = count
        self.workers: ProcessPoolExecutor | None = None
        self.sending = threading.Lock()
        self.under_way: set[int] = set()

    def serve(self) -> None:
        """Take tasks until the other end is closed."""
        while True:
            if not self.connection.poll(RESTING_S if self.workers else None):
                self._rest()
                continue
            try:
                number, task = self.connection.recv()
            except (EOFError, OSError):
                self._end()
                return
            self.under_way.add(number)
            self._woken().submit(compiled_text, task).add_done_callback(partial(self._answer, number))

    def _woken(self) -> ProcessPoolExecutor:
        """Return the workers, forked now if there are none."""
        if self.workers is None:
            forking = multiprocessing.get_context("fork")
            self.workers = ProcessPoolExecutor(self.count, forking, _begin, (self.connection,))
        return self.workers

    def _answer(self, number: int, done: Future[Taken | Failure]) -> None:
        """Hand back what a worker has answered. If one was killed the others end as well, and so does this process."""
        if done.exception() is not None:
            os._exit(1)
        with self.sending, contextlib.suppress(OSError):  # nobody listens any more
            self.connection.send((number, done.result()))
        self.under_way.discard(number)

    def _rest(self) -> None:
        if self.workers is not None and not self.under_way:
            self.workers.shutdown()
            self.workers = None

    def _end(self) -> None:
        if self.workers is not None:
            self.workers.shutdown(wait=False, cancel_futures=True)
        os._exit(0)  # workers notice; what they are about is of no use to anybody
