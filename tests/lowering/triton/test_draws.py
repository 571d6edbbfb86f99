"""Which tiles count positions up in fours."""

from __future__ import annotations

import pytest
import sympy

from dynafuse.lowering.triton.draws import counts_in_fours
from dynafuse.ops.indexing_math import floordiv, symbol

i, j, k = symbol("i0", 6), symbol("i1", 50), symbol("i2", 512)
loaded = symbol("v3", 100)
s = sympy.Symbol("s0", integer=True, positive=True)


@pytest.mark.parametrize(("position", "lanes", "expected"), [
    (k, [k], True),
    (512 * i + k, [k], True),
    (512 * i + k, [i, k], True),
    (513 * i + k, [k], False),  # every second row begins within a block
    (50 * i + j, [i, j], True),  # one run, of which tiles begin at multiples of four
    (50 * i + j, [j], False),
    (52 * i + j, [i, j], False),  # rows end within a block
    (520 * i + k, [i, k], True),
    (512 * i + k + 4, [k], True),
    (512 * i + k + 1, [k], False),
    (2 * k, [k], False),
    (-k + 511, [k], False),
    (4 * k, [k], False),
    (512 * k + j, [k], False),  # neighbours lie along another axis
    (512 * loaded + k, [k], False),
    (512 * i + k + 4 * floordiv(k, sympy.Integer(8)), [k], False),
    (512 * floordiv(i, sympy.Integer(2)) + k, [k], True),
    (512 * s + k, [k], True),
    (s * i + k, [k], False),
    (sympy.Integer(3), [k], False),
    (k, [], False),
])
def test_which_positions_count_up_in_fours(position: sympy.Expr, lanes: list[sympy.Symbol], expected: bool) -> None:
    assert counts_in_fours(position, lanes, {loaded}) is expected
