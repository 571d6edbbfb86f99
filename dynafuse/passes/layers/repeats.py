"""Where a sequence repeats itself: runs of one period, the longest savings first.

Worked example: ``runs("p abc abc abc q")`` (blanks left out) is one run that starts at 1, has period 3 and ends at 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

CANDIDATES = 8
"""Periods that are tried: the commonest distances between equal words."""

WORDS = (1, 3, 9)
"""How long these words are. In a period that has every letter twice, longer words stand once."""


@dataclass(frozen=True)
class Run:
    """A stretch ``[start, end)`` in which every letter equals the one a period before; it may end within a period."""

    start: int
    end: int
    period: int

    @property
    def copies(self) -> int:
        """Whole periods in it."""
        return (self.end - self.start) // self.period

    @property
    def saved(self) -> int:
        """Letters that stand there again."""
        return (self.copies - 1) * self.period


def runs(letters: Sequence[Hashable], least: int = 1) -> list[Run]:
    """Runs that do not overlap and save at least ``least`` letters each, in order. Linear in the number of letters.

    The run that saves most is taken, then what lies before and after it is looked through; of two that save alike, the one
    of the shorter period.
    """
    known: dict[Hashable, int] = {}
    numbers = [known.setdefault(letter, len(known)) for letter in letters]  # quick to compare
    found: list[Run] = []
    open_stretches = [(0, len(letters))]
    while open_stretches:
        low, high = open_stretches.pop()
        best = _best(numbers, low, high)
        if best is not None and best.saved >= least:
            found.append(best)
            open_stretches += [(low, best.start), (best.end, high)]
    return sorted(found, key=lambda run: run.start)


def _best(letters: Sequence[int], low: int, high: int) -> Run | None:
    """The run of ``letters[low:high]`` that saves most."""
    periods = [period for period, _ in _distances(letters, low, high).most_common(CANDIDATES)]
    found = [run for period in periods if (run := _longest(letters, low, high, period)) is not None]
    return max(found, key=lambda run: (run.saved, -run.period), default=None)


def _distances(letters: Sequence[int], low: int, high: int) -> Counter[int]:
    """How often a word comes back after how many letters."""
    distances: Counter[int] = Counter()
    for length in WORDS:
        last: dict[tuple[int, ...], int] = {}
        for position in range(low, high - length + 1):
            word = tuple(letters[position:position + length])
            if word in last:
                distances[position - last[word]] += 1
            last[word] = position
    return distances


def _longest(letters: Sequence[int], low: int, high: int, period: int) -> Run | None:
    """The longest run of one period; None if nothing stands there twice."""
    best = begin = low
    length = 0
    for position in range(low, high - period + 1):
        same = position < high - period and letters[position] == letters[position + period]
        if not same:
            if position - begin > length:
                best, length = begin, position - begin
            begin = position + 1
    return Run(best, best + length + period, period) if length >= period else None
