"""Repetitions in a sequence: runs of one period, chosen by how much they save.

Worked example: ``runs("p abc abc abc q")`` (blanks left out) is one run that starts at 1, has period 3 and ends at 10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

CANDIDATES = 8
"""How many periods are tried: the commonest distances between equal words."""

WORDS = (1, 3, 9)
"""The lengths of these words. In a period that contains every letter twice, longer words occur once."""


@dataclass(frozen=True)
class Run:
    """A stretch ``[start, end)`` in which every letter equals the one a period before; it may end within a period."""

    start: int
    end: int
    period: int

    @property
    def copies(self) -> int:
        """Return the number of whole periods."""
        return (self.end - self.start) // self.period

    @property
    def saved(self) -> int:
        """Return the number of letters that repeat earlier ones."""
        return (self.copies - 1) * self.period


def runs(letters: Sequence[Hashable], least: int = 1) -> list[Run]:
    """Return runs that do not overlap and save at least ``least`` letters each, in order of position.

    Takes the run that saves most, of equal ones that with the shorter period, then searches before and behind it. Linear in
    the number of letters, for a bounded number of runs.

    Args:
        letters: What repeats itself; equal ones have equal hashes.
        least: The least number of letters that a run saves.
    """
    number_of: dict[Hashable, int] = {}
    numbers = [number_of.setdefault(letter, len(number_of)) for letter in letters]  # quick to compare
    chosen: list[Run] = []
    open_stretches = [(0, len(letters))]
    while open_stretches:
        low, high = open_stretches.pop()
        best = _best(numbers, low, high)
        if best is not None and best.saved >= least:
            chosen.append(best)
            open_stretches += [(low, best.start), (best.end, high)]
    return sorted(chosen, key=lambda run: run.start)


def _best(letters: Sequence[int], low: int, high: int) -> Run | None:
    """Return the run of ``letters[low:high]`` that saves most, of CANDIDATES periods."""
    periods = [period for period, _ in _distances(letters, low, high).most_common(CANDIDATES)]
    candidates = [run for period in periods if (run := _longest(letters, low, high, period)) is not None]
    return max(candidates, key=lambda run: (run.saved, -run.period), default=None)


def _distances(letters: Sequence[int], low: int, high: int) -> Counter[int]:
    """Count the distances between words and their next occurrences, in letters."""
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
    """Return the longest run of one period; None if it repeats nothing."""
    best = begin = low
    length = 0
    for position in range(low, high - period + 1):
        same = position < high - period and letters[position] == letters[position + period]
        if not same:
            if position - begin > length:
                best, length = begin, position - begin
            begin = position + 1
    return Run(best, best + length + period, period) if length >= period else None
