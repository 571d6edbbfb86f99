"""The processes that compile kernels, as the process sees them that wants kernels (``worker.py`` is what they do).

Worked example::

    workers = Workers(16)
    workers.ready.result()
    metadata, cubin = workers.submit(Task(text, path, job)).result()
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing import Pipe

from dynafuse.lowering.triton.jobs import Taken
from dynafuse.lowering.triton.worker import READY, Failure, Task

START = "import sys; sys.path[:] = sys.argv[3:]; from dynafuse.lowering.triton.worker import main; main()"
"""The program of the process: what it imports lies where this process would find it."""

PATIENCE_S = 5.0
"""How long this process waits at its end for that one's."""


class WorkersEnded(RuntimeError):
    """There are no workers any more: somebody has ended them, or the machine has run out of memory."""


class WorkerError(RuntimeError):
    """What a worker says of a kernel that it could not compile."""


class Workers:
    """A process that forks workers, which compile. It starts in the background; :attr:`ready` is done once it has.

    Args:
        count: How many workers.
    """

    def __init__(self, count: int) -> None:
        self.ready: Future[None] = Future()
        self._connection, theirs = Pipe()
        self._numbers = itertools.count()
        self._awaited: dict[int, Future[Taken]] = {}
        self._lock = threading.Lock()
        self._has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno()), str(count), *sys.path], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        theirs.close()
        self._owner = os.getpid()
        threading.Thread(target=self._listen, name="dynafuse-workers", daemon=True).start()
        atexit.register(self.stop)

    def submit(self, task: Task) -> Future[Taken]:
        """Return what a worker will have compiled; it fails with :class:`WorkerError` or :class:`WorkersEnded`.

        Raises:
            WorkersEnded: There are no workers any more.
        """
        answer: Future[Taken] = Future()
        with self._lock:
            if self._has_ended:
                raise WorkersEnded
            number = next(self._numbers)
            self._awaited[number] = answer
            try:
                self._connection.send((number, task))
            except OSError:
                del self._awaited[number]
                raise WorkersEnded from None
        return answer

    def stop(self) -> None:
        """Stop the process, and with it the workers; a process that was forked from this one leaves them alone."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)

    def _listen(self) -> None:
        """Hand on answers until there are none any more."""
        with contextlib.suppress(EOFError, OSError):
            if self._connection.recv() == READY:
                self.ready.set_result(None)
            while True:
                number, answer = self._connection.recv()
                future = self._awaited.pop(number)
                if isinstance(answer, Failure):
                    future.set_exception(WorkerError(answer.text))
                else:
                    future.set_result(answer)
        with self._lock:
            self._has_ended = True
        if not self.ready.done():
            self.ready.set_exception(WorkersEnded())
        for awaited in self._awaited.values():
            awaited.set_exception(WorkersEnded())
