"""Specs of several loop nests, taken apart: each nest as a spec of its own.

Worked example: of ``%0 = relu(in0)`` and ``%1 = add(in2, in1)``, with a nest each, the second becomes ``%0 = add(in0, in1)``
with the inputs ``(2, 1)``: nests that compute the same have equal specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynafuse.ir.graph import Dims
from dynafuse.ir.spec import Nest, OpSpec, Ref, Spec, references
from dynafuse.ops.literals import HoistedScalar


@dataclass(frozen=True)
class Apart:
    """A nest as a spec of its own; of what it takes and stores, what that is in the whole spec, in order."""

    spec: Spec
    inputs: tuple[int, ...]
    stores: tuple[int, ...]
    hoisted: tuple[str, ...]

    def names(self) -> dict[str, str]:
        """Return the arguments of its kernel, each with its name among those of the whole."""
        inputs = {f"in{own}": f"in{whole}" for own, whole in enumerate(self.inputs)}
        stores = {f"out{own}": f"out{whole}" for own, whole in enumerate(self.stores)}
        hoisted = dict(zip(self.spec.hoisted, self.hoisted, strict=True))
        return {**inputs, **stores, **hoisted, **{name: name for name in (*self.spec.symbols, *self.spec.counts)}}


def nests_apart(spec: Spec) -> tuple[Apart, ...]:
    """Return the nests of a spec that has some, each as a spec of its own."""
    return tuple(_apart(spec, nest) for nest in spec.nests)


def _apart(spec: Spec, nest: Nest) -> Apart:
    ops = _needed(spec, nest)
    order = dict.fromkeys(ref.position for op in ops for ref in references(spec.ops[op].args) if ref.kind == "in")
    order |= dict.fromkeys(into for store in nest.stores if (into := spec.stores[store].into) is not None)
    placed = {**{Ref("in", whole): Ref("in", own) for own, whole in enumerate(order)},
              **{Ref("op", whole): Ref("op", own) for own, whole in enumerate(ops)}}
    axes = {whole: own for own, whole in enumerate(nest.axes)}
    hoisted: dict[str, int] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, HoistedScalar):
            return replace(value, position=hoisted.setdefault(value.name, len(hoisted)))
        if isinstance(value, Ref):
            return placed[value]
        return tuple(map(argument, value)) if isinstance(value, tuple) else value

    def call(op: OpSpec) -> OpSpec:
        return replace(op, args=tuple((name, argument(value)) for name, value in op.args))

    def along(given: Sequence[tuple[int, Dims]]) -> tuple[tuple[int, Dims], ...]:
        return tuple((placed[Ref("op", op)].position, _renumbered(dims, axes)) for op, dims in given if op in ops)

    stores = tuple(replace(store, op=placed[Ref("op", store.op)].position, dims=_renumbered(store.dims, axes),
                           into=None if store.into is None else placed[Ref("in", store.into)].position)
                   for store in (spec.stores[k] for k in nest.stores))
    calls, layouts = tuple(call(spec.ops[op]) for op in ops), tuple(spec.inputs[k] for k in order)
    own = replace(spec, inputs=layouts, ops=calls, axes=tuple(spec.axes[k] for k in nest.axes), stores=stores,
                  reductions=along(spec.reductions), scans=along(spec.scans), nests=())
    return Apart(own, tuple(order), nest.stores, tuple(hoisted))


def _needed(spec: Spec, nest: Nest) -> list[int]:
    """Return the ops that a nest computes, operands first. One that several nests need is computed by each."""
    needed: set[int] = set()
    stack = [spec.stores[store].op for store in nest.stores]
    while stack:
        op = stack.pop()
        if op not in needed:
            needed.add(op)
            stack += [ref.position for ref in references(spec.ops[op].args) if ref.kind == "op"]
    return sorted(needed)


def _renumbered(dims: Dims, axes: Mapping[int, int]) -> Dims:
    return tuple(tuple(axes[axis] for axis in dim) for dim in dims)
