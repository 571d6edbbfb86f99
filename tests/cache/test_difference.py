"""What ``key.diff`` says of two regions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from torch.fx import Node

from dynafuse.cache import canonical as key
from dynafuse.cache.canonical import CanonicalRegion
from dynafuse.config import resolve
from dynafuse.ir import Axis, Layout, Nest, OpSpec, Ref, Spec, Store
from tests.support import graphs

X, Y = torch.randn(6, 8), torch.randn(6, 8)
Write = Callable[..., Any]


def bound(write: Write, *inputs: torch.Tensor, dynamic: bool = False, target: str = "sm90", **options: Any) -> CanonicalRegion:
    """The one region of a graph."""
    plan = graphs.planned(graphs.built(write, *(inputs or (X, Y)), dynamic=dynamic))
    (region,) = plan.regions
    return key.canonical(plan.annotated, region, resolve(options=options, environ={}).key(), target)


def pair(first: str = "aten.sub.Tensor", swapped: bool = False) -> Write:
    """exp(x) and y in some op of two operands."""
    def write(build: graphs.Builder, x: Node, y: Node) -> Node:
        operands = (build.op("aten.exp.default", x), y)
        return build.op(first, *(reversed(operands) if swapped else operands))

    return write


def summed(dim: int) -> Write:
    return lambda b, x: b.op("aten.sum.dim_IntList", x, [dim])


def into(build: graphs.Builder, x: Node, y: Node) -> Node:
    return build.op("aten.copy_.default", y, pair()(build, x, y))


def both(build: graphs.Builder, x: Node, y: Node) -> list[Node]:
    e = build.op("aten.exp.default", x)
    return [e, build.op("aten.sub.Tensor", e, y)]


def scaled(number: float) -> Write:
    return lambda b, x: b.op("aten.mul.Tensor", b.op("aten.exp.default", x), number)


SQUARE = torch.randn(16, 16)
WORDS: dict[str, tuple[CanonicalRegion, CanonicalRegion, list[str]]] = {
    "a stride": (bound(pair()), bound(pair(), X, torch.randn(8, 6).t()), ["input 1: stride (8, 1) against (1, 6)"]),
    "a size": (bound(pair()), bound(pair(), X, torch.randn(8)),
               ["input 1: size (6, 8) against (8,)", "input 1: stride (8, 1) against (1,)"]),
    "a dtype": (bound(pair()), bound(pair(), X, Y.half()), ["input 1: dtype float32 against float16"]),
    "operands": (bound(pair()), bound(lambda b, y, x: pair(swapped=True)(b, x, y)),
                 ["op 1: aten.sub(%0, in1, 1) against aten.sub(in0, %0, 1)"]),
    "an op": (bound(pair()), bound(pair("aten.div.Tensor")), ["op 1: aten.sub(%0, in1, 1) against aten.div(%0, in1)"]),
    "an op more": (bound(pair()), bound(lambda b, x, y: b.op("aten.sin.default", pair()(b, x, y))),
                   ["op 2 of the second: sin in the second alone", "output 0: %1 against %2 of the second"]),
    "a dimension": (bound(summed(0), SQUARE), bound(summed(1), SQUARE), ["op 0: sum over dimension 0 against dimension 1"]),
    "a number": (bound(scaled(2.0), X), bound(scaled(0.5), X), ["op 1: mul with other 2.0 against 0.5"]),
    "a number's type": (bound(scaled(2.0), X), bound(scaled(2), X), ["op 1: mul with other 2.0 against 2"]),
    "an alias": (bound(pair()), bound(into), ["output 0 aliases an input in the second alone"]),
    "an output more": (bound(pair()), bound(both), ["number of outputs: 1 against 2"]),
    "an option": (bound(pair()), bound(pair(), round_like_eager=True), ["option round_like_eager: False against True"]),
    "a device": (bound(pair()), bound(pair(), target="sm100"), ["target sm90 against sm100"]),
}


@pytest.mark.parametrize("what", WORDS)
def test_the_difference_is_told(what: str) -> None:
    first, second, told = WORDS[what]
    assert first.key != second.key
    found = key.diff(first, second)
    assert [line for line in told if line not in found] == [], found


@pytest.mark.parametrize("what", ["a stride", "a dtype", "a number", "an option", "a device"])
def test_nothing_else_is_told(what: str) -> None:
    first, second, told = WORDS[what]
    assert key.diff(first, second) == told


@pytest.mark.parametrize("what", WORDS)
def test_a_region_differs_from_itself_in_nothing(what: str) -> None:
    first, second, _ = WORDS[what]
    assert key.diff(first, first) == key.diff(second.spec, second) == []


def test_executors_are_told() -> None:
    first = bound(pair())
    moved = key.rekeyed(first, replace(first.region, executor="nvfuser"), "nvfuser 1.0 sm90")
    assert key.diff(first, moved) == ["executor triton against nvfuser"]
    assert key.diff(first.spec, moved.spec) == []


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    first = bound(pair())
    monkeypatch.setattr("dynafuse.cache.canonical.versions", lambda: ("0", "0", "0"))
    assert key.diff(first, bound(pair())) == ["versions of dynafuse, torch or Triton"]


def test_static_sizes_differ_from_dynamic_ones() -> None:
    found = key.diff(bound(pair()), bound(pair(), dynamic=True))
    assert "size symbols () against ('s0', 's1')" in found
    assert "input 0: size (6, 8) against (s0, s1)" in found


# Every part of a spec -------------------------------------------------------------------------------------------------

LAYOUT = Layout(torch.float32, (4, 4), (4, 1))
OP = OpSpec("aten.sum.dim_IntList", (("self", Ref("in", 0)), ("dim", (1,))), (4,), torch.float32)
LAST = OpSpec("aten.exp.default", (("self", Ref("op", 0)),), (4,), torch.float32)
STORE = Store(1, Layout(torch.float32, (4,), (1,)), ((0,),))
SPEC = Spec((LAYOUT,), (OP, LAST), (Axis(4), Axis(4, True)), ((0, ((0,), (1,))),), (STORE,), ("s0",), (("a", 1),))
CHANGES: dict[str, list[Spec]] = {
    "inputs": [replace(SPEC, inputs=changed) for changed in (
        (), (replace(LAYOUT, dtype=torch.int32),), (replace(LAYOUT, shape=(4, 5)),), (replace(LAYOUT, stride=(1, 4)),),
        (replace(LAYOUT, alignment=4),), (LAYOUT, LAYOUT))],
    "ops": [replace(SPEC, ops=(changed, LAST)) for changed in (
        replace(OP, target="aten.mean.dim"), replace(OP, args=(("self", Ref("in", 1)), ("dim", (1,)))),
        replace(OP, args=(("self", Ref("in", 0)), ("dim", (0,)))), replace(OP, shape=(5,)),
        replace(OP, dtype=torch.float64), replace(OP, args=(("self", Ref("in", 0)), ("dim", (True,)))))],
    "axes": [replace(SPEC, axes=changed) for changed in (
        (Axis(4),), (Axis(5), Axis(4, True)), (Axis(sympy.Symbol("s0")), Axis(4, True)), (Axis(4), Axis(4)))],
    "reductions": [replace(SPEC, reductions=changed) for changed in ((), ((0, ((1,), (0,))),))],
    "scans": [replace(SPEC, scans=((1, ((0,),)),))],
    "stores": [replace(SPEC, stores=changed) for changed in (
        (), (STORE, STORE), (replace(STORE, op=0),), (replace(STORE, layout=LAYOUT),), (replace(STORE, dims=((1,),)),),
        (replace(STORE, into=0),))],
    "symbols": [replace(SPEC, symbols=("s1",)), replace(SPEC, symbols=())],
    "examples": [replace(SPEC, examples=(512,)), replace(SPEC, examples=(513,))],
    "narrow": [replace(SPEC, narrow=True)],
    "nests": [replace(SPEC, nests=(Nest((0, 1), (0,)),)), replace(SPEC, nests=(Nest((0,), (0,)), Nest((1,), ())))],
    "options": [replace(SPEC, options=changed) for changed in ((), (("a", 2),), (("a", True),), (("b", 1),))],
}


def test_every_part_of_a_spec_is_changed_here() -> None:
    assert CHANGES.keys() == Spec.__dataclass_fields__.keys()


@pytest.mark.parametrize("part", CHANGES)
def test_whatever_changes_is_told(part: str) -> None:
    for changed in CHANGES[part]:
        assert key.key_of(changed, "sm90") != key.key_of(SPEC, "sm90")
        assert key.diff(SPEC, changed), changed
        assert key.diff(changed, SPEC), changed
        assert not key.diff(changed, changed)


def test_which_input_is_overwritten_is_told() -> None:
    first, second = (replace(SPEC, stores=(replace(STORE, into=into),)) for into in (0, 1))
    assert key.diff(first, second) == ["output 0 aliases input 0 against 1"]
