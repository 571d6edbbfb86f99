"""What is written and printed: a line of JSON per program, progress, failures by cause, and the counts."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAILURES = ("wrong", "raises", "crash", "slow", "broken")
EVERY = 10.0


@dataclass
class Report:
    """The answers so far."""

    path: Path
    counts: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    smallest: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    start: float = field(default_factory=time.monotonic)
    shown: float = 0.0
    spent: float = 0.0

    def take(self, answer: Mapping[str, Any]) -> None:
        """Count an answer and write it down."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(answer) + "\n")
        if answer.get("shrunk"):
            if answer["status"] in FAILURES:
                self.smallest[answer["signature"]].append(answer)
            return
        self.counts[answer["status"]] += 1
        self.spent += answer.get("seconds", 0.0)
        if answer["status"] in FAILURES:
            self.found[answer["signature"]].append(answer)

    @property
    def programs(self) -> int:
        """How many programs ran."""
        return sum(self.counts.values())

    @property
    def failures(self) -> int:
        """How many failed."""
        return sum(self.counts[status] for status in FAILURES)

    def progress(self, left: int) -> None:
        """A line on standard error, now and then."""
        now = time.monotonic()
        if now - self.shown > EVERY:
            self.shown = now
            print(f"{now - self.start:5.0f} s: {self}, {left} to go", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        parts = [f"{self.counts[status]} {status}" for status in ("ok", "torch", "invalid", *FAILURES) if self.counts[status]]
        return f"{self.programs} programs: " + (", ".join(parts) or "none")

    def summary(self) -> str:
        """Failures by signature, each with its smallest program, and the counts."""
        lines = []
        for signature, answers in sorted(self.found.items(), key=lambda item: -len(item[1])):
            lines += [f"== {signature}: {len(answers)} programs, such as {[a.get('index') for a in answers[:8]]}"]
        for signature, answers in sorted(self.smallest.items()):
            for answer in sorted(answers, key=lambda a: len(a["text"]))[:6]:
                lines += ["", f"# -- {signature}, index {answer.get('index')}", f"# {answer['detail'].strip()[:400]!r}", answer["text"]]
        took = time.monotonic() - self.start
        lines += [f"{self} in {took:.0f} s ({self.spent / max(1, self.programs):.2f} s each); {len(self.found)} signatures; {self.path}"]
        return "\n".join(lines)
