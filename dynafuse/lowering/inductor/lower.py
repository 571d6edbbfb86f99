"""From a spec to a program over torch: its ops called one after another. Inductor is not imported.

    lower(spec) -> Program            raises LoweringError where the region is one that Inductor cannot take
    refusal(spec) -> str              why it cannot, or ""
    compiler.build(program, ...)      what Inductor makes of a program

Worked example: the program of ``relu(x) + 1`` is the spec itself; called with fake tensors it is traced into the FX graph
``add(relu(arg0), 1)``, called with real ones it runs eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ir import Layout, OpSpec, Ref, Spec, iter_instances, references
from dynafuse.lowering.calls import row_and_call
from dynafuse.lowering.interpret import Interpreter, Sizes, size_at
from dynafuse.lowering.nvfuser.layout import memory_order
from dynafuse.lowering.rounding import Rounding
from dynafuse.ops import Kind, Row, inductor_rows
from dynafuse.ops.literals import rounded
from dynafuse.ops.promotion import comparands
from dynafuse.ops.torch_calls import torch_call

VALUES = frozenset({Kind.POINTWISE, Kind.REDUCTION, Kind.SCAN, Kind.CREATION, Kind.RANDOM})
"""Kinds of ops whose numbers make values, not places."""


@dataclass(frozen=True)
class Program:
    """A spec that can be called. ``stored`` are the stores that make tensors of their own."""

    spec: Spec

    def __str__(self) -> str:
        return str(self.spec)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the names of the sizes that it takes."""
        return self.spec.symbols

    @property
    def into(self) -> tuple[int | None, ...]:
        """Return, per store, the input that it overwrites."""
        return tuple(store.into for store in self.spec.stores)

    def strides(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return, per store that makes a tensor, its strides."""
        known = dict(zip(self.symbols, sizes, strict=True))
        layouts = [store.layout for store in self.spec.stores if store.into is None]
        return tuple(tuple(size_at(stride, known) for stride in layout.stride) for layout in layouts)

    def run(self, inputs: Sequence[torch.Tensor], sizes: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the tensors that are stored; inputs that are overwritten are so at the end, when all has been read.

        Args:
            inputs: The tensors of the spec's inputs, in order.
            sizes: The values of the spec's size symbols, in order: ints, or symbolic ones while it is traced.
            device: Where tensors are made that no input goes into.
        """
        known = dict(zip(self.symbols, sizes, strict=True))
        values = _Traced(self.spec, known, inputs, device).stored()
        stored = ((value, store.layout) for value, store in zip(values, self.spec.stores, strict=True) if store.into is None)
        return tuple(_laid_out(value, layout, known) for value, layout in stored)


class _Traced(Interpreter):
    """Rounds where kernels do, and gives Inductor what it computes as eager does."""

    def __init__(self, spec: Spec, sizes: Sizes, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(spec, sizes, inputs, device)
        self.rounding = Rounding(spec)

    def computed(self, position: int) -> torch.Tensor:
        """Return what an op computes, in the dtype and the sizes that the spec says."""
        op = self.spec.ops[position]
        value = _of_one(op, _checked(op, self._call(position), self.sizes))
        return _rounded(value, value.dtype) if self.rounding.rounds_result(position) else value

    def _call(self, position: int) -> torch.Tensor:
        row, call = self.rounding.calls[position]
        operands = [self.rounding.dtype(ref) for ref in references(tuple(call.args.values()))]
        args = comparands(row, call.args, operands)
        given = {name: self._taken(position, at, value) for at, (name, value) in enumerate(args.items())}
        if row.kind is Kind.CREATION and call.dtype.is_floating_point:  # Inductor hands the number as it is to what reads it
            given |= {name: rounded(given[name], call.dtype) for name in FILLS if isinstance(given.get(name), float)}
        instead = inductor_rows.replacement(call)
        return instead(given) if instead else torch_call(call.target, given, self.device)

    def _taken(self, position: int, at: int, value: Any) -> Any:
        """Return an argument of an op, rounded where the op asks for it."""
        narrow = self.rounding.operand_dtype(position, at, value) if isinstance(value, Ref) else None
        return self.argument(value) if narrow is None else _rounded(self.argument(value), narrow)


def lower(spec: Spec) -> Program:
    """Return the program of a region.

    Raises:
        LoweringError: :func:`refusal` refuses it.
    """
    reason = refusal(spec)
    if reason:
        raise LoweringError(spec.ops[-1].target, reason)
    return Program(spec)


def refusal(spec: Spec) -> str:
    """Return why Inductor cannot take a region, or "": an op that it cannot do, an option that it does not honour."""
    calls = list(map(row_and_call, spec.ops))
    if all(row.kind is Kind.VIEW for row, _ in calls):
        return "it computes nothing"
    for (row, call), op in zip(calls, spec.ops, strict=True):
        reason = inductor_rows.refusal(row, call) or _refused_position(row, op)
        if reason:
            return f"{op.target}: {reason}"
    if dict(spec.options).get("round_like_eager"):
        narrow = [op for op in spec.ops if op.dtype.is_floating_point and op.dtype.itemsize < 4]
        if narrow:
            return f"{narrow[0].target}: Inductor does not round {narrow[0].dtype} as eager does (round_like_eager)"
    return ""


def _refused_position(row: Row, op: OpSpec) -> str:
    """Return why a position is refused, or "".

    Inductor takes what is added to an index for positive: it drops multiples of a divisor and divides as C does.
    """
    placed = () if row.kind in VALUES else tuple(value for _, value in op.args)
    for size in iter_instances((op.shape, placed), sympy.Expr):
        if not all(symbol.is_nonnegative for symbol in size.free_symbols):
            return f"Inductor indexes wrongly by {size}, which may be negative"
    return ""


FILLS = ("fill_value", "s", "scalar")
"""The arguments of ops of creation that are the elements' value."""


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a value as a dtype has it: Inductor holds 16-bit floats in 32 bits, but not where it looks at their bits."""
    bits = value.to(dtype).view(torch.int16)
    return (bits | bits).view(dtype).to(value.dtype)


def _checked(op: OpSpec, value: torch.Tensor, known: Sizes) -> torch.Tensor:
    shape = [size_at(size, known) for size in op.shape]
    if value.dtype is not op.dtype or not _same(value.shape, shape):
        actual = f"{str(value.dtype)[6:]}{list(value.shape)}"
        raise LoweringError(op.target, f"its output is {actual} here, {str(op.dtype)[6:]}{shape} in the graph")
    return value


def _of_one(op: OpSpec, value: torch.Tensor) -> torch.Tensor:
    """Return a value whose sizes are 1 where the graph's are: Inductor reads beyond what it does not know to broadcast."""
    for dim, size in enumerate(op.shape):
        if size == 1 and not _known(value.shape[dim]):
            value = value.select(dim, 0).unsqueeze(dim)
    return value


def _same(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether sizes agree where they are known; those that are not are as the graph says."""
    return len(sizes) == len(others) and all(a == b for a, b in zip(sizes, others, strict=True) if _known(a) and _known(b))


def _known(size: Any) -> bool:
    return isinstance(size, int)


def _laid_out(value: torch.Tensor, layout: Layout, known: Sizes) -> torch.Tensor:
    """Return a value with the strides that the store promises: those of one-element dimensions do not matter."""
    wanted = [size_at(stride, known) for stride in layout.stride]
    if all(size == 1 or have == want for size, have, want in zip(layout.shape, value.stride(), wanted, strict=True)):
        return value
    order = memory_order(layout)
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.dim())])
