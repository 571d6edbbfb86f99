"""Programs of few long rows of which one kernel reduces rows and columns: launches cost them so much that it is one.

Worked example, over ``p0`` of ``[140, 5120]`` and ``p1`` of ``[5120]``::

    v0 = p0 * p1
    v1 = v0.square().mean(1, keepdim=True)
    v2 = v0 - v1
    v3 = v2.sum(0)
"""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz import computing, inputs, rows
from tests.fuzz.grammar import TRIES, Maker, proposed, step
from tests.fuzz.program import Argument
from tests.fuzz.state import State, any_dtype

LARGEST = 2_400_000
"""Most elements of a value: what Triton's interpreter reads in seconds."""

COSTS = {"launch_us_triton": 1000.0, "launch_us_eager": 1000.0, "efficiency_triton_rowcol": 5.0}
"""Constants of the cost model with which whatever can be is in one kernel."""

EVEN_LENGTHS = (4608, 5120, 6144, 8192, 10240, 12288, 16384)

DTYPES = ("float32", "float16", "bfloat16")


def options(rng: random.Random) -> dict[str, Any]:
    """The options of a program, without its executor."""
    return {"cost": dict(COSTS), **({"round_like_eager": True} if rng.random() < 0.1 else {})}


def grown(rng: random.Random) -> State:
    """A state with statements: values, what rows are reduced to, values that depend on that, and sums of columns."""
    state = _started(rng)
    for makers, counts in PHASES:
        wanted = len(state.statements) + rng.choice(counts)
        for _ in range(TRIES * (wanted - len(state.statements))):
            if len(state.statements) >= wanted:
                break
            step(state, makers)
    return state


def _started(rng: random.Random) -> State:
    # Rows that are read again are the longest, where columns leave no room for them.
    length = rng.choice((rng.randrange(4097, 8200), rng.randrange(8193, 16384), rng.randrange(11500, 16385), rng.choice(EVEN_LENGTHS)))
    # Some are more than there are programs, one or two for each processor of a GPU: these take several rows each.
    count = min(rng.choice((rng.randrange(1, 41), rng.randrange(133, 181), rng.randrange(265, 300))), LARGEST // length)
    state = State(rng, [], [[]], [], largest=LARGEST)
    whole = (str(count), str(length))
    grad = rng.random() < 0.1
    shapes = [whole] * rng.choice((1, 2, 2, 3))
    shapes += [part for part in (whole[1:], (whole[0], "1")) if rng.random() < 0.4]
    for shape in shapes:
        _argue(state, shape, grad)
    for name in list(state.tensors):
        if state.dtype(name).itemsize == 2 and rng.random() < 0.6:
            state.add(f"{name}.float()")
    return state


def _argue(state: State, shape: tuple[str, ...], grad: bool) -> None:
    """Another tensor argument; the first is of floats."""
    rng, number = state.rng, len(state.arguments)
    dtype = rng.choice(DTYPES) if not number or rng.random() < 0.8 else any_dtype(rng)
    layout = "contiguous" if rng.random() < 0.85 else rng.choice(inputs.LAYOUTS)
    values = rng.choice(("normal",) * 4 + ("exact", "positive"))
    state.argue(Argument(f"a{number}", shape, dtype, rng.randrange(1000), values, layout, grad and dtype in inputs.FLOATS))


# Makers ---------------------------------------------------------------------------------------------------------------

OF_ROW = ("{0}.sum(1, keepdim=True)", "{0}.sum(1, keepdim=True) / 32", "{0}.mean(1, keepdim=True)", "{0}.amax(1, keepdim=True)",
          "{0}.amin(1, keepdim=True)", "{0}.var(1, keepdim=True)", "{0}.square().mean(1, keepdim=True)", "{0}.sum(1)")

BY_ROW = ("{0} - {1}", "{0} * {1}", "{1} - {0}", "{0} / ({1}.abs() + 1)", "({0} - {1}).tanh()", "{0} * torch.rsqrt({1}.abs() + 1e-3)")

OF_COLUMN = ("{0}.sum(0)", "{0}.sum(0)", "({0} * {1}).sum(0)", "({0} + {1}).sum(0)", "{0}.mean(0)", "{0}.amax(0)",
             "{0}.sum(0, keepdim=True)")


def _whole(state: State) -> str:
    """A value of floats that has all rows and columns, as the first argument is."""
    shape = state.value("p0").shape
    name = state.pick(lambda t: t.is_floating_point() and t.shape == shape)
    assert name is not None
    return name


def of_row(state: State) -> bool:
    """A reduction of rows."""
    return proposed(state, state.rng.choice(OF_ROW).format(_whole(state)))


def by_row(state: State) -> bool:
    """A value that depends on what its row was reduced to."""
    name = _whole(state)
    shape = (state.value(name).shape[0], 1)
    reduced = state.pick(lambda t: t.is_floating_point() and t.shape == shape)
    return reduced is not None and proposed(state, state.rng.choice(BY_ROW).format(name, reduced))


def of_column(state: State) -> bool:
    """A reduction of columns."""
    return proposed(state, state.rng.choice(OF_COLUMN).format(_whole(state), _whole(state)))


VALUES: tuple[tuple[Maker, float], ...] = (
    (rows.arithmetic, 5), (rows.pointwise, 2), (computing.masked, 2), (computing.cast, 1), (computing.normalized, 1))

PHASES: tuple[tuple[tuple[tuple[Maker, float], ...], tuple[int, ...]], ...] = (
    (VALUES, (0, 1, 1, 2, 3)), (((of_row, 1),), (1, 1, 2)), (((by_row, 3), *VALUES), (0, 1, 2, 2)),
    (((of_column, 1),), (1, 2, 2, 3)), (VALUES, (0, 0, 0, 1)))
"""The makers of each part of a program, and how many statements there may be of it."""
