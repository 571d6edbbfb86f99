"""Differences of two specs, as sentences.

Worked example: the specs of ``x.sum(0)`` and ``x.sum(1)`` over ``float32[8, 8]`` differ in ``op 0: sum over dimension 0
against dimension 1`` and in the axis that is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any

import torch

from dynafuse.ir import Classed, Layout, OpSpec, Ref, Spec, Store, references
from dynafuse.ops.algebra import DIMENSIONS


def differences(first: Spec, second: Spec) -> list[str]:
    """Return a sentence per difference, none if the specs are equal. Ops are numbered as in the first spec.

    Args:
        first, second: The specs.
    """
    pair = _Pair(first, second, tuple(_match(first.ops, second.ops)))
    return [*pair.inputs(), *pair.ops(), *pair.axes(), *pair.outputs(), *pair.symbols(), *pair.options()]


def _match(first: Sequence[OpSpec], second: Sequence[OpSpec]) -> Iterator[tuple[int | None, int | None]]:
    """Match ops by their positions: equal targets in order, and the ops between them one by one. None stands for no op."""
    first_targets, second_targets = ([op.target for op in ops] for ops in (first, second))
    for _, i, end_i, j, end_j in SequenceMatcher(a=first_targets, b=second_targets, autojunk=False).get_opcodes():
        yield from zip_longest(range(i, end_i), range(j, end_j))


@dataclass(frozen=True)
class _Pair:
    """Two specs, and which of their ops are matched."""

    first: Spec
    second: Spec
    paired: tuple[tuple[int | None, int | None], ...]

    def inputs(self) -> Iterator[str]:
        yield from _count_compared("inputs", self.first.inputs, self.second.inputs)
        for i, (a, b) in enumerate(zip(self.first.inputs, self.second.inputs, strict=False)):
            yield from _layout(f"input {i}", a, b)

    def ops(self) -> Iterator[str]:
        first_axes, second_axes = dict(self.first.of_rows), dict(self.second.of_rows)
        for i, j in self.paired:
            if i is None or j is None:
                yield from self._alone(i, j)
                continue
            yield from _op(f"op {i}", self.first.ops[i], self._renumbered(self.second.ops[j]))
            yield from _compared(f"op {i}: its operand along axes", first_axes.get(i), second_axes.get(j))

    def _alone(self, i: int | None, j: int | None) -> Iterator[str]:
        if i is not None:
            yield f"op {i}: {_name(self.first.ops[i].target)} in the first alone"
        if j is not None:
            yield f"op {j} of the second: {_name(self.second.ops[j].target)} in the second alone"

    def axes(self) -> Iterator[str]:
        yield from _count_compared("axes", self.first.axes, self.second.axes)
        for i, (a, b) in enumerate(zip(self.first.axes, self.second.axes, strict=False)):
            yield from _compared(f"axis {i}: size", a.size, b.size)
            yield from _only_one(f"axis {i} is reduced", a.reduced, b.reduced)
        yield from _count_compared("loop nests", self.first.nests, self.second.nests)
        yield from _compared("axes and outputs of loop nests:", *(
            [(nest.axes, nest.stores) for nest in spec.nests] for spec in (self.first, self.second)))

    def outputs(self) -> Iterator[str]:
        yield from _count_compared("outputs", self.first.stores, self.second.stores)
        for i, (a, b) in enumerate(zip(self.first.stores, self.second.stores, strict=False)):
            yield from self._output(f"output {i}", a, b)

    def _output(self, name: str, a: Store, b: Store) -> Iterator[str]:
        yield from _compared(f"{name}:", Ref("op", a.op), self._renamed(Ref("op", b.op)))
        yield from _layout(name, a.layout, b.layout)
        yield from _compared(f"{name}: along axes", a.dims, b.dims)
        yield from _only_one(f"{name} aliases an input", a.into is not None, b.into is not None)
        yield from _only_one(f"{name} is scattered", a.scatters, b.scatters)
        if a.into is not None and b.into is not None:
            yield from _compared(f"{name} aliases input", a.into, b.into)

    def symbols(self) -> Iterator[str]:
        yield from _compared("size symbols", self.first.symbols, self.second.symbols)
        yield from _compared("sizes of the example inputs", self.first.examples, self.second.examples)
        yield from _only_one("offsets fit in 32 bits", self.first.narrow, self.second.narrow)
        if isinstance(self.first, Classed) and isinstance(self.second, Classed):
            yield from _compared("size s0 from", *(f"{spec.least} to {spec.most}" for spec in (self.first, self.second)))

    def options(self) -> Iterator[str]:
        first, second = dict(self.first.options), dict(self.second.options)
        for name in dict.fromkeys((*first, *second)):
            yield from _compared(f"option {name}:", first.get(name), second.get(name))

    def _renumbered(self, op: OpSpec) -> OpSpec:
        """Return an op of the second spec with the first spec's numbers in its arguments."""
        return replace(op, args=self._renamed(op.args))

    def _renamed(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._renamed, value))
        if not isinstance(value, Ref) or value.kind == "in":
            return value
        position = next((i for i, j in self.paired if j == value.position), None)
        return Ref("op", position) if position is not None else f"{value} of the second"


def _op(where: str, a: OpSpec, b: OpSpec) -> Iterator[str]:
    """Yield how two matched ops differ: as calls if an operand or the op itself differs, else argument by argument."""
    a_args, b_args = dict(a.args), dict(b.args)
    changed = {name: (a_args.get(name), b_args.get(name)) for name in dict.fromkeys((*a_args, *b_args))
               if _differ(a_args.get(name), b_args.get(name))}
    if a.target != b.target or any(True for _ in references(tuple(changed.values()))):
        name_of = _brief if _brief(a.target) != _brief(b.target) or a.target == b.target else str
        yield f"{where}: {_call(name_of(a.target), a)} against {_call(name_of(b.target), b)}"
    else:
        yield from (f"{where}: {_name(a.target)} {_argument(name, *values)}" for name, values in changed.items())
    yield from _compared(f"{where}: size", a.shape, b.shape)
    yield from _compared(f"{where}: dtype", a.dtype, b.dtype)
    yield from _compared(f"{where}: guard", a.guard, b.guard)


def _layout(where: str, a: Layout, b: Layout) -> Iterator[str]:
    yield from _compared(f"{where}: dtype", a.dtype, b.dtype)
    yield from _compared(f"{where}: size", a.shape, b.shape)
    yield from _compared(f"{where}: stride", a.stride, b.stride)
    yield from _compared(f"{where}: alignment", a.alignment, b.alignment)


def _differ(a: Any, b: Any) -> bool:
    """Return whether two values give different keys: 1, 1.0 and True are three values."""
    return repr(a) != repr(b)


def _compared(what: str, a: Any, b: Any) -> Iterator[str]:
    if _differ(a, b):
        yield f"{what} {_text(a)} against {_text(b)}"


def _only_one(what: str, a: bool, b: bool) -> Iterator[str]:
    if a != b:
        yield f"{what} in the {'first' if a else 'second'} alone"


def _count_compared(what: str, a: Sequence[Any], b: Sequence[Any]) -> Iterator[str]:
    yield from _compared(f"number of {what}:", len(a), len(b))


def _argument(name: str, a: Any, b: Any) -> str:
    if name in DIMENSIONS:
        return f"over {_dimensions(a)} against {_dimensions(b)}"
    return f"with {name} {_text(a)} against {_text(b)}"


def _dimensions(dims: Any) -> str:
    listed = dims if isinstance(dims, tuple) else (dims,)
    if not listed or None in listed:
        return "all dimensions"
    return f"dimension{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


def _call(name: str, op: OpSpec) -> str:
    return f"{name}({', '.join(str(value) for _, value in op.args)})"


def _brief(target: str) -> str:
    """Return ``aten.sub`` for ``aten.sub.Tensor``."""
    return target.rpartition(".")[0]


def _name(target: str) -> str:
    """Return ``sub`` for ``aten.sub.Tensor``."""
    return _brief(target).rpartition(".")[2]


def _text(value: Any) -> str:
    return str(value)[6:] if isinstance(value, torch.dtype) else str(value)
