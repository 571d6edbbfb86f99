"""A spec computed op by op with torch: how its indices are checked, and what a region costs that is left to eager.

Worked example: for the spec of ``relu(x) + 1``, ``Evaluation(spec, {}, [x]).value(Ref("op", 1))`` is that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from dynafuse.ir import OpSpec, Ref, Size, Spec, references
from dynafuse.ops.overloads import overload
from dynafuse.ops.torch_calls import torch_call


def number(size: Size, hints: Mapping[str, int]) -> int:
    """A size with the spec's symbols at their hints. Raises KeyError for a symbol without one."""
    if isinstance(size, int):
        return size
    return int(size.xreplace({symbol: sympy.Integer(hints[str(symbol)]) for symbol in size.free_symbols}))


def numbers(sizes: Sequence[Size], hints: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes, all with the symbols at their hints."""
    return tuple(number(size, hints) for size in sizes)


class Evaluation:
    """A spec's values on given inputs, each computed when it is first asked for."""

    def __init__(self, spec: Spec, hints: Mapping[str, int], inputs: Sequence[torch.Tensor],
                 device: torch.device | None = None) -> None:
        self.spec = spec
        self.hints = hints
        self.inputs = inputs
        self.device = device or inputs[0].device
        self._held: dict[int, torch.Tensor] = {}

    def value(self, ref: Ref) -> torch.Tensor:
        """The tensor that ``ref`` stands for."""
        if ref.kind == "in":
            return self.inputs[ref.position]
        for position in operands_of(self.spec, ref):
            if position not in self._held:
                self._held[position] = self._computed(self.spec.ops[position])
        return self._held[ref.position]

    def _computed(self, op: OpSpec) -> torch.Tensor:
        args = {name: self._argument(value) for name, value in op.args}
        target = overload(op.target)
        assert target is not None, op.target
        return torch_call(target, args, self.device)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._held[value.position] if value.kind == "op" else self.inputs[value.position]
        if isinstance(value, tuple):
            return [self._argument(one) for one in value]
        return number(value, self.hints) if isinstance(value, sympy.Expr) else value

    def stored(self) -> list[torch.Tensor]:
        """The values of the spec's stores, in order; those that overwrite an input are copied into it."""
        found = [self.value(Ref("op", store.op)) for store in self.spec.stores]
        for i, store in enumerate(self.spec.stores):
            if store.into is not None:
                found[i] = self.inputs[store.into].copy_(found[i])
        return found


def eager(spec: Spec, hints: Mapping[str, int],
          device: torch.device | None = None) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """The region as torch runs it, op by op: a kernel to be measured beside the fused ones.

    ``device`` is needed by a region without inputs only.
    """
    return lambda inputs: Evaluation(spec, hints, inputs, device).stored()


def operands_of(spec: Spec, ref: Ref) -> list[int]:
    """The ops that an op's value needs, itself included, operands first."""
    if ref.kind == "in":
        return []
    needed, todo = {ref.position}, [ref.position]
    while todo:
        new = {r.position for r in references(spec.ops[todo.pop()].args) if r.kind == "op"} - needed
        needed |= new
        todo.extend(new)
    return sorted(needed)


def inputs_of(spec: Spec, ref: Ref) -> frozenset[int]:
    """The inputs that a value depends on."""
    if ref.kind == "in":
        return frozenset({ref.position})
    ops = (spec.ops[position] for position in operands_of(spec, ref))
    return frozenset(r.position for op in ops for r in references(op.args) if r.kind == "in")
