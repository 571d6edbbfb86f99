"""Workers as processes of their own: jobs are handed out, answers collected, the dead and the stuck replaced."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT

PATIENCE = 5.0
"""How much longer than its limit, which is processor time, a job may take by the clock before its worker is killed."""


@dataclass
class Worker:
    """A process with the job that it is at."""

    process: subprocess.Popen[bytes]
    job: Mapping[str, Any] | None = None
    since: float = 0.0
    jobs: int = 0

    def hand(self, job: Mapping[str, Any]) -> None:
        """Give it a job."""
        self.job, self.since, self.jobs = job, time.monotonic(), self.jobs + 1
        assert self.process.stdin
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Let it finish, or kill it in the middle of a job."""
        if self.job is not None:
            self.process.kill()
        elif self.process.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Pool:
    """``jobs`` workers: ``python -m`` with ``arguments`` and ``environment``.

    Each is replaced after ``lifetime`` jobs, as compiled code is never freed, or when one takes much longer than ``limit`` seconds.
    """

    jobs: int
    arguments: Sequence[str]
    environment: Mapping[str, str]
    limit: float
    errors: Path
    lifetime: int
    queue: deque[Mapping[str, Any]] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def _start(self) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-m", *self.arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors.open("ab"), env={**os.environ, **self.environment}, cwd=ROOT)
        worker = Worker(process)
        self.selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        self.workers.append(worker)
        return worker

    def _drop(self, worker: Worker) -> None:
        assert worker.process.stdout
        self.selector.unregister(worker.process.stdout)
        worker.end()
        worker.process.stdout.close()
        self.workers.remove(worker)

    def answers(self, deadline: float | None) -> Iterator[dict[str, Any]]:
        """Answers as they come, until the queue is empty and all is done, or the deadline is over."""
        try:
            while self.queue or any(worker.job for worker in self.workers):
                if deadline is not None and time.monotonic() > deadline:
                    return
                self._feed()
                for key, _ in self.selector.select(timeout=1.0):
                    yield self._read(key.data)
                yield from self._stuck()
        finally:
            for worker in list(self.workers):
                self._drop(worker)

    def _feed(self) -> None:
        for worker in list(self.workers):
            if worker.job is None and worker.jobs >= self.lifetime:
                self._drop(worker)
        while self.queue and len(self.workers) < self.jobs:
            self._start().hand(self.queue.popleft())
        for worker in self.workers:
            if self.queue and worker.job is None:
                worker.hand(self.queue.popleft())

    def _read(self, worker: Worker) -> dict[str, Any]:
        assert worker.process.stdout
        line, job = worker.process.stdout.readline(), dict(worker.job or {})
        if not line:
            code = worker.process.wait()
            self._drop(worker)
            name = signal.Signals(-code).name if code < 0 else f"exit {code}"
            return {**job, "status": "crash", "kind": name, "signature": f"crash {name}", "detail": "the worker died", "text": ""}
        worker.job, answer = None, json.loads(line)
        if answer["last"]:
            self._drop(worker)
        return {**answer, "shrunk": bool(job.get("shrink"))}

    def _stuck(self) -> Iterator[dict[str, Any]]:
        for worker in list(self.workers):
            more = worker.job.get("seconds", 0) if worker.job else 0
            if worker.job and time.monotonic() - worker.since > PATIENCE * (self.limit + more):
                job = dict(worker.job)
                self._drop(worker)
                yield {**job, "status": "slow", "kind": "stuck", "signature": "stuck", "detail": "killed", "text": ""}
