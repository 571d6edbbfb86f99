"""What statements there are: makers, each with how often it is tried.

A maker looks at the state, proposes statements and returns whether one was taken up::

    @maker(2)
    def flipped(state: State) -> bool:
        name = state.pick(lambda t: t.dim() > 0)
        return name is not None and state.add(f"{name}.flip(0)") is not None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.fuzz.state import State

Maker = Callable[[State], bool]
MAKERS: list[tuple[Maker, float]] = []

TRIES = 6
"""How many statements are tried for each that is wanted."""


def maker(weight: float) -> Callable[[Maker], Maker]:
    """Register a maker."""
    def register(function: Maker) -> Maker:
        MAKERS.append((function, weight))
        return function

    return register


def step(state: State, makers: Sequence[tuple[Maker, float]] = MAKERS) -> bool:
    """Try one maker, picked by weight."""
    (found,) = state.rng.choices([m for m, _ in makers], [w for _, w in makers])
    return found(state)


def proposed(state: State, expression: str) -> bool:
    """Propose a new value."""
    return state.add(expression) is not None
