"""Runs PyTorch's own tests through dynafuse against the list of failures that are expected.

    python -m tests.peer                                            # all modes, both executors of a CPU
    python -m tests.peer --modes base,deep --executors triton --jobs 8 --out peer.jsonl
    python -m tests.peer --tests 'test_*pool*' --executors default
    python -m tests.peer --names failures.txt                   # the tests that a file lists
    python -m tests.peer --modes inductor/test_unbacked_symints.py  # any file of PyTorch's tests
    python -m tests.peer --modes dynamo/test_repros.py --executors torch  # by torch's own backends, to tell whose a failure is
    PEER_GPUS=0,1 python -m tests.peer --executors cuda             # natively, in turn on two GPUs

A run that is started again with the same ``--out`` goes on where it ended. Exits with 1 where anything is unexpected.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

from .expected import Expected, judge, read, table
from .fetch import fetched
from .run import NotLoaded, Result, Task, Worker, environment, results_in, run_all

HERE = Path(__file__).parent
MODES = "base,deep,dynamic,half,bf16,aot"
SECONDS_BETWEEN_LINES = 30.0


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments say; the exit status."""
    options = _arguments(argv)
    folder = fetched()
    expected = read(options.expected)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        return _run(options, folder, Path(logs), expected)


def _run(options: argparse.Namespace, folder: Path, logs: Path, expected: list[Expected]) -> int:
    worker = Worker(options.executors[0], folder, logs / "worker-names.log", environment(options.executors[0], 0))
    names = _names(options, worker)
    tasks = [Task(mode, executor, name) for executor in options.executors for mode in names for name in names[mode][::options.every]]
    results = [result for result in results_in(options.out) if result.task in frozenset(tasks)]
    done = {result.task for result in results}
    progress = Progress(results, expected, len(tasks), options.out)
    left = [task for task in tasks if task not in done]
    if len(names) > 1:  # a process loads a mode when it comes to it, not all at once
        worker.stop()
    run_all(left, folder, logs, options.jobs, options.limit, progress.add, options.budget, worker if len(names) <= 1 else None)
    print(table(results, expected))
    if len(results) < len(tasks):
        print(f"{len(tasks) - len(results)} were not run: the budget is spent")
    unexpected = [result for result in results if judge(result, expected) == "unexpected"]
    for result in unexpected:
        print(shown(result))
    return 1 if unexpected or len(results) < len(tasks) or len(names) < len(set(options.modes)) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.peer", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    words = {"type": lambda text: text.replace(",", " ").split()}
    parser.add_argument("--modes", **words, default=MODES.split(","), help="modes, or files of PyTorch's tests")
    parser.add_argument("--executors", **words, default=["default", "triton"], help="default, triton (interpreted), cuda, torch")
    parser.add_argument("--tests", default="*", help="a pattern of names")
    parser.add_argument("--names", type=_words_of, help="a file with names, of which these are the only ones run")
    parser.add_argument("--every", type=int, default=1, help="a sample: one of so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a test")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no test is begun")
    parser.add_argument("--out", type=Path, default=Path(".peer/results.jsonl"), help="where results go, one a line")
    parser.add_argument("--expected", type=Path, default=HERE / "expected.txt", help="the failures that are expected")
    return parser.parse_args(argv)


def _words_of(path: str) -> frozenset[str]:
    return frozenset(Path(path).read_text(encoding="utf-8").split())


def _names(options: argparse.Namespace, worker: Worker) -> dict[str, list[str]]:
    """The tests of each mode that a process can load, in order."""
    names: dict[str, list[str]] = {}
    for mode in options.modes:
        try:
            names[mode] = [name for name in worker.tests(mode)
                           if fnmatchcase(name, options.tests) and (options.names is None or name in options.names)]
        except NotLoaded as error:
            print(error, file=sys.stderr)
    return names


class Progress:
    """Keeps results, and prints what is unexpected at once and a line every now and then."""

    def __init__(self, results: list[Result], expected: list[Expected], total: int, out: Path) -> None:
        self.results, self.expected, self.total, self.out = results, expected, total, out
        self.start = self.last = time.monotonic()

    def add(self, result: Result) -> None:
        """Note a result."""
        self.results.append(result)
        with self.out.open("a") as file:
            file.write(result.line() + "\n")
        if judge(result, self.expected) == "unexpected":
            print(shown(result), flush=True)
        if time.monotonic() - self.last > SECONDS_BETWEEN_LINES:
            self.last = time.monotonic()
            print(f"[{self.last - self.start:6.0f} s] {len(self.results)} of {self.total}", flush=True)


def shown(result: Result) -> str:
    """A result in a line: where, what, and the end of its trace."""
    lines = [line for line in result.reason.splitlines() if line.strip()]
    return f"{result.status:8}{result.task.mode}/{result.task.executor} {result.task.test}: {lines[-1][:200] if lines else ''}"


if __name__ == "__main__":
    sys.exit(main())
