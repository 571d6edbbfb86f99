"""When a function of dynamic sizes is compiled once more for some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dynafuse.runtime.specialized import MOST_SIZES, Specialized, of_some

CALLS = [4, 4, 4, 4, 5, 5, 4, 5, 5]
"""Calls with 4 that have a function do not come between those with 5."""


class Maker:
    """Makes functions that say for which arguments they were made, and notes these."""

    def __init__(self, positions: Sequence[int] = (0,), fails: bool = False) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.positions = positions
        self.fails = fails

    def __call__(self, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        self.made.append(tuple(arguments))
        others = [i for i in range(len(arguments)) if i not in self.positions]
        return None if self.fails else of_some(others, lambda *given: ("static", arguments[0], *given))


def of(maker: Maker, after: int = 3) -> Specialized:
    return Specialized(lambda *arguments: ("dynamic", *arguments), maker.positions, after, maker)


def test_sizes_that_keep_coming_get_a_function() -> None:
    maker = Maker()
    call = of(maker)
    results = [call(size, "x", "y") for size in CALLS]
    assert [result[0] for result in results] == ["dynamic"] * 2 + ["static"] * 2 + ["dynamic"] * 2 + ["static"] * 3
    assert all(result[1:] == (size, "x", "y") for size, result in zip(CALLS, results, strict=True))
    assert maker.made == [(4, "x", "y"), (5, "x", "y")]


def test_sizes_that_change_with_every_call_get_none() -> None:
    maker = Maker()
    call = of(maker)
    assert all(call(size % 7)[0] == "dynamic" for size in range(50)) and maker.made == []


def test_there_are_few_of_them() -> None:
    maker = Maker()
    call = of(maker, after=1)
    kinds = [call(size)[0] for size in range(MOST_SIZES + 2)]
    assert kinds == ["static"] * MOST_SIZES + ["dynamic"] * 2 and len(maker.made) == MOST_SIZES


def test_what_fails_is_not_tried_again() -> None:
    maker = Maker(fails=True)
    call = of(maker)
    assert {call(4, "x") for _ in range(9)} == {("dynamic", 4, "x")} and len(maker.made) == 1


@pytest.mark.parametrize(("positions", "rest"), [((0,), ("b", "c")), ((1, 2), ("a",)), ((0, 1, 2), ())])
def test_a_function_of_fixed_sizes_takes_the_others(positions: Sequence[int], rest: tuple[str, ...]) -> None:
    call = of(Maker(positions), after=1)
    assert call("a", "b", "c") == ("static", "a", *rest)
