"""Specs computed op by op with torch: what Inductor is given, how indices are checked, and what a region costs in eager.

Worked example: for the spec of ``relu(x) + 1``, ``Interpreter(spec, {}, [x]).value(Ref("op", 1))`` is that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from dynafuse.ir import Ref, Size, Spec, references
from dynafuse.ops.overloads import overload
from dynafuse.ops.torch_calls import torch_call

Sizes = Mapping[str, Any]
"""The values of a spec's size symbols: ints, or torch's symbolic ones while a program is traced."""


def size_at(size: Size, sizes: Sizes) -> Any:
    """Return a size, given those of the symbols in it.

    Args:
        size: An int, which is returned as it is, or an expression.
        sizes: The symbols' values by name. If one is symbolic itself, so is the result.

    Returns:
        An int; a symbolic size; a float for an expression of floats.

    Raises:
        KeyError: A symbol has no value.
    """
    if not isinstance(size, sympy.Expr):
        return size
    known = {symbol: sizes[str(symbol)] for symbol in size.free_symbols}
    if not all(isinstance(value, int) for value in known.values()):
        return sympy_interp(PythonReferenceAnalysis, known, size)
    number = size.xreplace({symbol: sympy.Integer(value) for symbol, value in known.items()})
    return int(number) if number.is_integer else float(number)


def sizes_at(sizes: Sequence[Size], known: Sizes) -> tuple[Any, ...]:
    """Return several sizes, given those of the symbols in them, as :func:`size_at` does."""
    return tuple(size_at(size, known) for size in sizes)


class Interpreter:
    """A spec's values on given inputs and sizes, each computed when it is first asked for.

    ``device`` is where values are made that no input goes into; it is needed by a spec without inputs only.
    """

    def __init__(self, spec: Spec, sizes: Sizes, inputs: Sequence[torch.Tensor],
                 device: torch.device | None = None) -> None:
        """Take a spec and what it is computed on.

        Args:
            spec: The region.
            sizes: The values of its symbols, by name.
            inputs: The tensors of its inputs, in order. A store ``into`` one overwrites it when :meth:`stored` is called.
            device: Where tensors are made that no input goes into; None: where the first input is.
        """
        self.spec = spec
        self.sizes = sizes
        self.inputs = inputs
        self.device = device or inputs[0].device
        self._held: dict[int, torch.Tensor] = {}

    def value(self, ref: Ref) -> torch.Tensor:
        """Return the tensor that ``ref`` stands for."""
        if ref.kind == "in":
            return self.inputs[ref.position]
        for position in operands_of(self.spec, ref):
            if position not in self._held:
                self._held[position] = self.computed(position)
        return self._held[ref.position]

    def computed(self, position: int) -> torch.Tensor:
        """Return what an op computes from its operands, which have values."""
        op = self.spec.ops[position]
        target = overload(op.target)
        assert target is not None, op.target
        return torch_call(target, {name: self.argument(value) for name, value in op.args}, self.device)

    def argument(self, value: Any) -> Any:
        """Return an argument of an op as torch takes it: tensors, lists and sizes."""
        if isinstance(value, Ref):
            return self._held[value.position] if value.kind == "op" else self.inputs[value.position]
        if isinstance(value, tuple):
            return [self.argument(item) for item in value]
        return size_at(value, self.sizes)

    def stored(self) -> list[torch.Tensor]:
        """Return the values of the spec's stores, in order; those that overwrite an input are copied into it at the end."""
        for position in range(len(self.spec.ops)):
            if position not in self._held:
                self._held[position] = self.computed(position)
        values = [self.value(Ref("op", store.op)) for store in self.spec.stores]
        for i, store in enumerate(self.spec.stores):
            if store.into is not None:
                values[i] = self.inputs[store.into].copy_(values[i])
        return values


def eager(spec: Spec, sizes: Sizes,
          device: torch.device | None = None) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """Return the region as torch runs it, op by op: a kernel to be measured beside the fused ones.

    Args:
        spec: The region.
        sizes: The values of its symbols, by name.
        device: Where a region without inputs is computed; None: where its first input is.

    Returns:
        A function of the spec's inputs, in order, that returns the values of its stores, in order.
    """
    return lambda inputs: Interpreter(spec, sizes, inputs, device).stored()


def operands_of(spec: Spec, ref: Ref) -> list[int]:
    """Return the ops that an op's value needs, itself included, operands first.

    Args:
        spec: The spec that ``ref`` refers into.
        ref: An op, or an input, which needs none.

    Returns:
        Positions in ``spec.ops``, ascending.
    """
    if ref.kind == "in":
        return []
    needed, todo = {ref.position}, [ref.position]
    while todo:
        new = {r.position for r in references(spec.ops[todo.pop()].args) if r.kind == "op"} - needed
        needed |= new
        todo.extend(new)
    return sorted(needed)


def inputs_of(spec: Spec, ref: Ref) -> frozenset[int]:
    """Return the inputs that a value depends on.

    Args:
        spec: The spec that ``ref`` refers into.
        ref: An op, or an input, which depends on itself.

    Returns:
        Positions in ``spec.inputs``.
    """
    if ref.kind == "in":
        return frozenset({ref.position})
    ops = (spec.ops[position] for position in operands_of(spec, ref))
    return frozenset(r.position for op in ops for r in references(op.args) if r.kind == "in")
