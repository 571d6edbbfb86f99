"""Lowers a spec to a recipe: every op by its row of the op table, every store in its layout. nvFuser is not imported.

    lower(spec) -> Recipe             raises LoweringError where the region is one that nvFuser cannot take
    refusal(spec) -> str              why it cannot, or ""
    replay.define(recipe)             the FusionDefinition of a recipe

16-bit floats are computed in float32 and rounded where ``lowering/rounding.py`` says, and at stores. Elements that are only
moved stay as narrow as they are in memory.

Worked example: the recipe of ``relu(x) + 1`` is shown in ``recipe.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from dynafuse.errors import LoweringError
from dynafuse.ir import Ref, Size, Spec, references
from dynafuse.lowering.calls import row_and_call
from dynafuse.lowering.nvfuser.layout import is_dense, stride_order
from dynafuse.lowering.nvfuser.recipe import Output, Recipe
from dynafuse.lowering.nvfuser.recorder import Recorder
from dynafuse.lowering.rounding import Rounding
from dynafuse.ops import Call, Context, Kind, Row, nvfuser_rows
from dynafuse.ops.literals import opmath
from dynafuse.ops.nvfuser_fusion import FusionTensor
from dynafuse.ops.nvfuser_math import evaluate
from dynafuse.ops.promotion import Operand, comparand, compute_dtype


def lower(spec: Spec) -> Recipe:
    """Return the recipe of a region.

    Raises:
        LoweringError: :func:`refusal` refuses it.
    """
    reason = refusal(spec)
    if reason:
        raise LoweringError(spec.ops[-1].target, reason)
    return _Lowering(spec).recipe()


def refusal(spec: Spec) -> str:
    """Return why nvFuser cannot take a region: for an op, a layout, or an input that is overwritten too early; or ""."""
    calls = list(map(row_and_call, spec.ops))
    rows = [row for row, _ in calls]
    if all(row.kind is Kind.VIEW for row in rows):
        return "it computes nothing"
    for (row, call), op in zip(calls, spec.ops, strict=True):
        reason = nvfuser_rows.refusal(row, call, [_tensor(spec, ref) for ref in references(op.args)])
        if reason:
            return f"{op.target}: {reason}"
    gaps = [store.layout for store in spec.stores if store.into is not None and not is_dense(store.layout)]
    return f"it overwrites an input with gaps: {gaps[0]}" if gaps else _overwritten_too_early(spec, rows)


def _overwritten_too_early(spec: Spec, rows: Sequence[Row]) -> str:
    """Return which input may be overwritten before it has been read, or "".

    An overwritten input may be read element by element for that store, and by nothing else: nvFuser may cut a fusion into
    kernels, and does not promise to read an input in all of them before it is overwritten.
    """
    inputs_of: list[set[int]] = []  # the inputs that each op is computed from
    for row, op in zip(rows, spec.ops, strict=True):
        refs = [ref for i, arg in enumerate(op.args) if row.uses(i) for ref in references((arg,))]
        inputs_of.append({k for ref in refs for k in ((ref.position,) if ref.kind == "in" else inputs_of[ref.position])})
    for store in spec.stores:
        if store.into is None:
            continue
        readers = [i for i, inputs in enumerate(inputs_of) if store.into in inputs]
        movers = [spec.ops[i].target for i in readers if rows[i].kind is not Kind.POINTWISE]
        if movers:
            return f"in{store.into} is overwritten, but {movers[0]} reads it"
        if any(store.into in inputs_of[other.op] for other in spec.stores if other is not store):
            return f"in{store.into} is overwritten, but another store reads it"
    return ""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a spec as refusals and type promotion see it."""

    dtype: torch.dtype
    shape: tuple[Size, ...]


class _Lowering:
    """Records one spec as a recipe."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.recorder = Recorder(spec.inputs, spec.symbols)
        self.rounding = Rounding(spec, bool(dict(spec.options).get("round_like_eager")))

    def recipe(self) -> Recipe:
        """Return the recipe of the spec."""
        for position, op in enumerate(self.spec.ops):
            self.recorder.origin = op.target
            self.recorder.values[Ref("op", position)] = self._op(position, *self.rounding.calls[position])
        return self.recorder.recipe(list(self._outputs()))

    def _op(self, position: int, row: Row, call: Call) -> FusionTensor:
        """Return the result of an op, in the op's dtype or its opmath type and in the op's sizes."""
        wide_operands = self._round_operands(position, call)
        result: FusionTensor = self._pointwise(row, call) if row.nvfuser is None else row.nvfuser.build(self.recorder, call)
        self.recorder.values.update(wide_operands)
        assert result.dtype in (call.dtype, opmath(call.dtype)), (str(call.target), result.dtype, call.dtype)
        result = self.recorder.expand(result, call.shape)
        return self.recorder.cast(result, call.dtype) if self.rounding.rounds_result(position) else result

    def _round_operands(self, position: int, call: Call) -> dict[Ref, FusionTensor]:
        """Replace operands that the op takes rounded; returns what they were."""
        wide_operands: dict[Ref, FusionTensor] = {}
        for i, arg in enumerate(call.args.values()):
            narrow = self.rounding.operand_dtype(position, i, arg) if isinstance(arg, Ref) else None
            if narrow is not None:
                wide = wide_operands[arg] = self.recorder.operand(arg)
                self.recorder.values[arg] = self.recorder.cast(self.recorder.cast(wide, narrow), wide.dtype)
        return wide_operands

    def _pointwise(self, row: Row, call: Call) -> FusionTensor:
        """Return the value of the row's expression over operands that are cast as the row says."""
        recorder = self.recorder
        args = list(call.args.values())
        promoted = [self._kind(arg) for i, arg in enumerate(args) if i not in row.raw and _is_operand(arg)]
        dtype = compute_dtype(row, call, promoted)
        tensors: dict[str, FusionTensor] = {}
        for i, arg in enumerate(args):
            if isinstance(arg, Ref) and row.uses(i):
                operand_dtype = _tensor(self.spec, arg).dtype if dtype is None or i in row.raw else dtype
                tensors[f"x{i}"] = recorder.cast(recorder.operand(arg), opmath(operand_dtype))
            elif _is_size(arg):
                tensors[f"x{i}"] = recorder.full((), arg, opmath(dtype or call.dtype))
        own_dtypes = tuple(_tensor(self.spec, arg).dtype for arg in args if isinstance(arg, Ref))
        context = Context(opmath(dtype or call.dtype), call.dtype, own_dtypes)
        operands = [f"x{i}" if isinstance(arg, Ref) or _is_size(arg) else comparand(row, arg, dtype)
                    for i, arg in enumerate(args)]
        result = evaluate(recorder, nvfuser_rows.expression(row, context, operands), tensors)
        wide = opmath(call.dtype)
        if isinstance(result, FusionTensor):
            return recorder.cast(result, wide)
        return recorder.full(call.shape, result, wide)

    def _kind(self, arg: Any) -> Operand:
        """Return an argument as type promotion sees it."""
        if isinstance(arg, Ref):
            tensor = _tensor(self.spec, arg)
            return tensor.dtype, len(tensor.shape) == 0
        return int if isinstance(arg, sympy.Expr) else type(arg)

    def _outputs(self) -> Iterator[Output]:
        """Yield the outputs, each with its order of dimensions: nvFuser would choose one from those of the inputs."""
        self.recorder.origin = "store"
        for store in self.spec.stores:
            order = stride_order(store.layout) if len(store.layout.shape) > 1 else None
            yield self.recorder.output(self.recorder.values[Ref("op", store.op)], store.layout, order, store.into)


def _tensor(spec: Spec, ref: Ref) -> _Tensor:
    held = spec.tensor(ref)
    return _Tensor(held.dtype, held.shape)


def _is_operand(arg: Any) -> bool:
    return isinstance(arg, (Ref, bool, int, float, sympy.Expr))


def _is_size(arg: Any) -> bool:
    return isinstance(arg, sympy.Expr)

