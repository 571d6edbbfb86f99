"""Repetitions in sequences."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynafuse.passes.layers.repeats import Run, runs


@pytest.mark.parametrize(("text", "expected"), [
    ("pabcabcabcq", [Run(1, 10, 3)]),
    ("pabcabcabcabq", [Run(1, 12, 3)]),
    ("ababab", [Run(0, 6, 2)]),
    ("aaaa", [Run(0, 4, 1)]),
    ("abcdef", []),
    ("", []),
    ("xdddddyefefefefz", [Run(1, 6, 1), Run(7, 15, 2)]),
    ("aabaabaabaab", [Run(0, 12, 3)]),  # not the pairs of a
    ("acabcbacabcb", [Run(0, 12, 6)]),  # no letter stands once in it
])
def test_runs(text: str, expected: list[Run]) -> None:
    assert runs(text, least=2) == expected


def test_what_saves_little_is_left() -> None:
    assert runs("abcabc", least=4) == [] and runs("abcabc", least=3) == [Run(0, 6, 3)]


@given(st.text("ab", max_size=3), st.text("abc", min_size=1, max_size=6), st.integers(2, 6), st.text("ab", max_size=3))
def test_a_run_repeats_itself_and_cannot_be_longer(before: str, unit: str, copies: int, after: str) -> None:
    text = before + unit * copies + after
    found = runs(text)
    assert sum(run.saved for run in found) >= (copies - 1) * len(unit) or found, text
    for run in found:
        assert run.copies >= 2
        assert all(text[i] == text[i + run.period] for i in range(run.start, run.end - run.period))
        assert run.end == len(text) or text[run.end] != text[run.end - run.period] or any(o.start == run.end for o in found)


def test_time_is_linear_in_length() -> None:
    def seconds(copies: int) -> float:
        letters = [("op", i) for _ in range(copies) for i in range(70)]
        start = time.process_time()
        assert runs(letters, least=100)[0].copies == copies
        return time.process_time() - start

    seconds(100)
    assert seconds(3200) < 8 * 4 * max(seconds(400), 0.005)
