"""The integers of regions: what of them kernels take, and that keys, entries and plans tell their signs apart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, PythonMod

from dynafuse.cache import launches, plans
from dynafuse.cache.canonical import canonical
from dynafuse.cache.integers import Integers
from dynafuse.config import resolve
from dynafuse.ops.symbols import is_name, place_of, symbol_of
from tests.support import graphs

X = torch.randn(6, 8)


class Known:
    """A shape environment with a size ``s`` and integers ``n``, of any sign, ``plus`` and ``minus``."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.s = self._made(self.env.create_symbol, 7, "s")
        self.n, self.plus, self.minus = (self._made(self.env.create_unspecified_symbol, value, name)
                                         for value, name in ((5, "n"), (5, "plus"), (-5, "minus")))
        assert self.plus >= 0 and self.minus < 0  # guards
        self.unbacked = self.env.create_unbacked_symint()

    def _made(self, make: Callable[..., sympy.Expr], value: int, name: str) -> Any:
        source = ConstantSource(name)
        return self.env.create_symintnode(make(value, source, DimDynamic.DYNAMIC), hint=value, source=source)

    def named(self, *sizes: Any) -> tuple[list[str], dict[str, str]]:
        """Sizes in a kernel, and what the kernel is handed, by name; with the names of this class."""
        integers = Integers(self.env)
        texts = [str(integers.named(size.node.expr)) for size in sizes]
        names = {getattr(self, name).node.expr: sympy.Symbol(name) for name in ("s", "n", "plus", "minus", "unbacked")}
        return texts, {str(symbol): str(given.xreplace(names)) for given, symbol in integers.symbols.items()}


def test_names_tell_signs() -> None:
    known = Known()
    assert known.named(known.s, known.n, known.plus, known.unbacked) == (
        ["s0", "n1", "z2", "n3"], {"s0": "s", "n1": "n", "z2": "plus", "n3": "unbacked"})
    torch._check(known.unbacked >= 1)
    assert known.named(known.unbacked)[0] == ["s0"]


def test_of_what_is_negative_the_opposite_is_handed() -> None:
    known = Known()
    assert known.named(known.minus, 3 + known.minus, known.s - known.minus) == (
        ["-s0", "3 - s0", "s0 + s1"], {"s0": "-minus", "s1": "s"})


@pytest.mark.parametrize(("compute", "inside"), [
    (lambda k: k.s // 2 + (k.s * 3) % 4, True), (lambda k: (k.plus + k.s) // 2, True), (lambda k: torch.sym_max(k.s, k.n), True),
    (lambda k: k.s * k.n - 3, True), (lambda k: k.n**2, True), (lambda k: k.n // 2, False), (lambda k: k.n % 3, False), (lambda k: (k.s - 9) // 2, False),
    (lambda k: k.s // k.n, False), (lambda k: abs(k.n), False), (lambda k: math.ceil(k.s * 1.5), False), (lambda k: math.floor(k.s / 2), False),
    (lambda k: math.trunc(k.n / 2), False), (lambda k: round(k.n / 2), False), (lambda k: k.n << 1, True), (lambda k: k.n & 3, False),
])
def test_what_kernels_compute_and_what_they_are_handed(compute: Callable[[Known], Any], inside: bool) -> None:
    known = Known()
    size = compute(known)
    (text,), given = known.named(size)
    assert set(given.values()) <= {"s", "n", "plus"} if inside else is_name(text) and len(given) == 1, (text, given)


def test_a_part_that_is_handed_is_so_everywhere() -> None:
    known = Known()
    half = known.n // 2
    texts, given = known.named(known.s + half, half * 3, torch.sym_max(half, known.s))
    name, = (name for name in given if name.startswith("n"))
    assert sorted(given.values()) == ["(n//2)", "s"] and all(name in text for text in texts)


def bound_of(number: Any) -> Any:
    """``relu(x) * number``: its region in canonical form."""
    module = graphs.built(lambda build, x, n: build.op("aten.mul.Tensor", build.op("aten.relu.default", x), n), X, number)
    plan = graphs.planned(module)
    return canonical(plan.annotated, plan.regions[0], resolve(environ={}).key(), "sm90")


def test_regions_that_differ_in_a_sign_do_not_share_a_key() -> None:
    known = Known()
    bounds = [bound_of(number) for number in (known.s, known.n, known.plus, known.minus)]
    assert [bound.spec.symbols for bound in bounds] == [("s0",), ("n0",), ("z0",), ("s0",)]
    assert len({bound.key for bound in bounds}) == 4
    assert bound_of(Known().n).key == bounds[1].key


# ---------------------------------------------------------------------- on disk


@pytest.mark.parametrize("size", [symbol_of("n3"), symbol_of("z0") + 1, FloorDiv(symbol_of("z0") + 5, 4), PythonMod(symbol_of("n0"), 3)], ids=str)
def test_signs_come_back(size: sympy.Expr) -> None:
    found = launches.size_from_json(json.loads(json.dumps(launches.size_to_json(size))))
    assert found == size and found.is_nonnegative == size.is_nonnegative


def test_symbols_know_their_places_and_other_names_are_none() -> None:
    assert place_of(symbol_of("n12")) == 12 == place_of("s12")
    assert not any(map(is_name, ("x0", "s", "s0 ", "in0", "u3")))
    with pytest.raises(ValueError, match="no size symbol"):
        symbol_of("u0")


def test_plans_are_those_of_graphs_with_equal_signs() -> None:
    known = Known()
    module = graphs.built(lambda build, x, n: build.op("aten.add.Tensor", x, n), X, known.n)
    graph = graphs.planned(module).annotated
    any_sign = plans.described(graph).splitlines()
    assert known.n >= 0  # a guard
    not_negative = plans.described(graph).splitlines()
    assert any_sign[1:] == not_negative[1:] and any_sign[0] != not_negative[0]
