"""Gives tests to worker processes, and starts another where one dies or hangs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
"""How long a process may take until it has imported torch and the suite."""


@dataclass(frozen=True)
class Task:
    """One test, where it is run."""

    mode: str
    executor: str
    test: str


@dataclass(frozen=True)
class Result:
    """How a test went: ``passed``, ``skipped``, ``failed``, ``hung`` or ``crashed``, with the trace or the reason."""

    task: Task
    status: str
    seconds: float
    reason: str

    def line(self) -> str:
        """As a line of a file of results."""
        return json.dumps({**asdict(self.task), "status": self.status, "seconds": self.seconds, "reason": self.reason})


def results_in(path: Path) -> list[Result]:
    """What a run before has written; a line that it did not finish is left out."""
    results = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        results.append(Result(Task(row["mode"], row["executor"], row["test"]), row["status"], row["seconds"], row["reason"]))
    return results


class Died(Exception):
    """A worker is no longer there."""


class NotLoaded(Exception):
    """A file of tests that this torch has not all of the names for; the message says what it lacks."""


class Hung(Exception):
    """A worker did not answer in time."""


class Worker:
    """A process that runs tests on one executor."""

    def __init__(self, executor: str, folder: Path, log: Path, environment: dict[str, str]) -> None:
        self.executor = executor
        self.log = log
        self._modes: set[str] = set()
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.peer.worker", executor, str(folder)], cwd=ROOT, stderr=stderr,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env={**os.environ, **environment})

    def tests(self, mode: str) -> list[str]:
        """The names of a mode's tests, which are loaded by this. Raises NotLoaded."""
        self._modes.add(mode)
        answer = self._ask({"mode": mode}, START_SECONDS)
        if "error" in answer:
            raise NotLoaded(f"{mode} was not loaded: {answer['error']}")
        names: list[str] = answer["tests"]
        return names

    def run(self, task: Task, limit: float) -> Result:
        """Run a test. Whoever gets ``hung`` or ``crashed`` needs another worker."""
        start = time.monotonic()
        try:
            if task.mode not in self._modes:
                self.tests(task.mode)
            answer = self._ask({"mode": task.mode, "test": task.test}, limit)
        except (Hung, Died) as error:
            status = "hung" if isinstance(error, Hung) else "crashed"
            self.stop()
            return Result(task, status, round(time.monotonic() - start, 2), f"{error}\n{self._tail()}")
        return Result(task, answer["status"], answer["seconds"], answer["reason"])

    def _ask(self, request: dict[str, Any], limit: float) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except BrokenPipeError:
            raise Died("the process is gone") from None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise Hung(f"no answer within {limit:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise Died(f"the process ended with {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 3000))
            return file.read().decode(errors="replace")


class Queue:
    """The tasks that are left. A worker stays with its executor while that has any, since another needs a new process."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._lock = threading.Lock()
        self._left: dict[str, list[Task]] = defaultdict(list)
        self._taken: dict[str, int] = defaultdict(int)
        for task in tasks:
            self._left[task.executor].append(task)
        for left in self._left.values():
            left.reverse()

    def next(self, executor: str | None) -> Task | None:
        """A task for a worker that is on ``executor`` (None: on none yet)."""
        with self._lock:
            if executor is not None and not self._left[executor]:
                self._taken[executor] -= 1
                executor = None
            if executor is None:
                waiting = {name: len(left) / (1 + self._taken[name]) for name, left in self._left.items() if left}
                if not waiting:
                    return None
                executor = max(waiting, key=lambda name: waiting[name])
                self._taken[executor] += 1
            return self._left[executor].pop()


def run_all(tasks: Iterable[Task], folder: Path, logs: Path, jobs: int, limit: float,
            report: Callable[[Result], None], budget: float = float("inf"), started: Worker | None = None) -> None:
    """Run tasks in ``jobs`` processes; ``report`` is called with each result, by one thread at a time.

    None is begun once ``budget`` seconds are over. ``started`` is a process that is there already; it is ended, too.
    """
    queue, lock = Queue(tasks), threading.Lock()
    end = time.monotonic() + budget

    def serve(number: int) -> None:
        worker = started if number == 0 else None
        executor = None
        while time.monotonic() < end and (task := queue.next(executor)):
            if worker is not None and worker.executor != task.executor:
                worker.stop()
                worker = None
            executor = task.executor
            worker = worker or Worker(executor, folder, logs / f"worker-{number}.log", environment(executor, number))
            result = worker.run(task, limit)
            with lock:
                report(result)
            if result.status in ("hung", "crashed"):
                worker = None
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def environment(executor: str, number: int) -> dict[str, str]:
    """One thread for each worker, and where it runs natively one GPU, in turn; others see none."""
    gpus = os.environ.get("PEER_GPUS", "0").split(",") if executor == "cuda" else [""]
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
