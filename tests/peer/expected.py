"""The failures that are expected, and a run's results against them.

A line of ``expected.txt`` says where a test fails and why::

    base,dynamic/*   test_kernel_names   inductor: asserts on the name of a kernel that Inductor wrote

Before the slash stand the modes, behind it the executors, each a list of names or ``*``. Kinds of reasons are those of ``KINDS``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .run import Result, Task

KINDS = {
    "inductor": "the test looks at Inductor's code, caches or settings",
    "torch": "torch fails as well, with Inductor or eager: a test of another version, or a bug of torch",
    "numbers": "the test wants closer agreement than the arithmetic of the dtype gives, and float64 says that both are right",
    "time": "Triton's interpreter takes longer than the limit",
    "limit": "dynafuse documents that it does otherwise",
}
MAY_PASS = frozenset({"torch", "time", "numbers"})
"""Kinds that depend on the machine or on the version of torch."""

OUTCOMES = ("applies", "passed", "expected", "unexpected", "skipped")


@dataclass(frozen=True)
class Expected:
    """A failure that is expected, with its reason."""

    modes: tuple[str, ...]
    executors: tuple[str, ...]
    test: str
    kind: str
    reason: str

    def covers(self, task: Task) -> bool:
        """Whether this is about ``task``."""
        return (task.test == self.test and any(fnmatchcase(task.mode, mode) for mode in self.modes)
                and any(fnmatchcase(task.executor, executor) for executor in self.executors))


def parse(text: str) -> list[Expected]:
    """The lines of a list; blank ones and comments are left out. ValueError names a line that says too little."""
    expected = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split(maxsplit=2)
        kind, colon, reason = words[-1].partition(": ")
        if len(words) < 3 or "/" not in words[0] or kind not in KINDS or not colon or not reason.strip():
            raise ValueError(f"line {number}: want 'modes/executors test kind: reason', kind one of {', '.join(KINDS)}: {line}")
        modes, executors = words[0].split("/")
        expected.append(Expected(tuple(modes.split(",")), tuple(executors.split(",")), words[1], kind, reason.strip()))
    return expected


def read(path: Path) -> list[Expected]:
    """The list in a file."""
    return parse(path.read_text(encoding="utf-8"))


def judge(result: Result, expected: Sequence[Expected]) -> str:
    """One of ``OUTCOMES``: a failure nobody expects is unexpected, and so is a pass where a failure was."""
    if result.status == "skipped":
        return "skipped"
    entry = next((entry for entry in expected if entry.covers(result.task)), None)
    if result.status == "passed":
        return "passed" if entry is None or entry.kind in MAY_PASS else "unexpected"
    return "unexpected" if entry is None else "expected"


def table(results: Iterable[Result], expected: Sequence[Expected]) -> str:
    """How many tests of each mode and executor apply, pass, and fail as expected or not."""
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: dict.fromkeys(OUTCOMES, 0))
    for result in results:
        row = counts[result.task.mode, result.task.executor]
        outcome = judge(result, expected)
        row[outcome] += 1
        row["applies"] += outcome != "skipped"
    width = max([len(mode) for mode, _ in counts] + [4])
    lines = [f"{'mode':{width}}  {'executor':8}" + "".join(f"{name:>12}" for name in OUTCOMES)]
    for (mode, executor), row in counts.items():
        lines.append(f"{mode:{width}}  {executor:8}" + "".join(f"{row[name]:12}" for name in OUTCOMES))
    return "\n".join(lines)
