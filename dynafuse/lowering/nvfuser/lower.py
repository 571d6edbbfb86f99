"""From a spec to a recipe: every op by its row of the op table, every store in its layout. nvFuser is not imported.

    lower(spec) -> Recipe             raises LoweringError where the region is one that nvFuser cannot take
    refusal(spec) -> str              why it cannot, or ""
    replay.define(recipe)             the FusionDefinition of a recipe

16-bit floats are computed in float32 and rounded where ``lowering/rounding.py`` says, and at stores. What is
only moved stays as narrow as it is in memory.

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
from dynafuse.ops.nvfuser_math import evaluate
from dynafuse.ops.nvfuser_parts import Part
from dynafuse.ops.promotion import Operand, comparand, compute_dtype


def lower(spec: Spec) -> Recipe:
    """The recipe of a region. Raises LoweringError for what :func:`refusal` refuses."""
    reason = refusal(spec)
    if reason:
        raise LoweringError(spec.ops[-1].target, reason)
    return _Lowering(spec).recipe()


def refusal(spec: Spec) -> str:
    """Why nvFuser cannot take a region, or "": an op that it cannot do, a layout, an input that is overwritten too early."""
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
    """An input that a store overwrites may be read element by element for that store, and by nothing else.

    nvFuser may cut a fusion into kernels, and does not promise to read an input in all of them before it is overwritten.
    """
    reach: list[set[int]] = []
    for row, op in zip(rows, spec.ops, strict=True):
        refs = [ref for i, arg in enumerate(op.args) if row.uses(i) for ref in references((arg,))]
        reach.append({k for ref in refs for k in ((ref.position,) if ref.kind == "in" else reach[ref.position])})
    for store in spec.stores:
        if store.into is None:
            continue
        readers = [i for i, inputs in enumerate(reach) if store.into in inputs]
        moved = [spec.ops[i].target for i in readers if rows[i].kind is not Kind.POINTWISE]
        others = [s for s in spec.stores if s is not store and store.into in reach[s.op]]
        if moved or others:
            return f"in{store.into} is overwritten, but " + (f"{moved[0]} reads it" if moved else "another store reads it")
    return ""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a spec, for refusals."""

    dtype: torch.dtype
    shape: tuple[Size, ...]


class _Lowering:
    """One spec on its way to a recipe."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.recorder = Recorder(spec.inputs, spec.symbols)
        self.rounding = Rounding(spec, bool(dict(spec.options).get("round_like_eager")))

    def recipe(self) -> Recipe:
        for position, op in enumerate(self.spec.ops):
            self.recorder.origin = op.target
            self.recorder.values[Ref("op", position)] = self._settled(position, *self.rounding.calls[position])
        return self.recorder.recipe(list(self._outputs()))

    def _settled(self, position: int, row: Row, call: Call) -> Part:
        """An op's part: in the op's dtype or its opmath type, in the op's sizes."""
        wide = self._round_operands(position, call)
        part: Part = self._pointwise(row, call) if row.nvfuser is None else row.nvfuser.build(self.recorder, call)
        self.recorder.values.update(wide)
        assert part.dtype in (call.dtype, opmath(call.dtype)), (str(call.target), part.dtype, call.dtype)
        part = self.recorder.expanded(part, call.shape)
        return self.recorder.cast(part, call.dtype) if self.rounding.result(position) else part

    def _round_operands(self, position: int, call: Call) -> dict[Ref, Part]:
        """Put rounded parts in the places of operands that the op takes so; returns what was there."""
        wide: dict[Ref, Part] = {}
        for i, arg in enumerate(call.args.values()):
            narrow = self.rounding.operand(position, i, arg) if isinstance(arg, Ref) else None
            if narrow is not None:
                wide[arg] = self.recorder.operand(arg)
                self.recorder.values[arg] = self.recorder.cast(self.recorder.cast(wide[arg], narrow), wide[arg].dtype)
        return wide

    def _pointwise(self, row: Row, call: Call) -> Part:
        """The row's expression, over operands that are cast as the row says."""
        f = self.recorder
        args = list(call.args.values())
        dtype = compute_dtype(row, call, [self._kind(a) for i, a in enumerate(args) if i not in row.raw and _is_operand(a)])
        names: dict[str, Part] = {}
        for i, arg in enumerate(args):
            if isinstance(arg, Ref) and row.uses(i):
                own = _tensor(self.spec, arg).dtype
                names[f"x{i}"] = f.cast(f.operand(arg), opmath(own if dtype is None or i in row.raw else dtype))
            elif _is_size(arg):
                names[f"x{i}"] = f.full((), arg, opmath(dtype or call.dtype))
        before = tuple(_tensor(self.spec, arg).dtype for arg in args if isinstance(arg, Ref))
        context = Context(opmath(dtype or call.dtype), call.dtype, before)
        operands = [f"x{i}" if isinstance(arg, Ref) or _is_size(arg) else comparand(row, arg, dtype)
                    for i, arg in enumerate(args)]
        made = evaluate(f, nvfuser_rows.expression(row, context, operands), names)
        wide = opmath(call.dtype)
        return f.cast(made, wide) if isinstance(made, Part) else f.full(call.shape, made, wide)

    def _kind(self, arg: Any) -> Operand:
        if isinstance(arg, Ref):
            tensor = _tensor(self.spec, arg)
            return tensor.dtype, len(tensor.shape) == 0
        return int if isinstance(arg, sympy.Expr) else type(arg)

    def _outputs(self) -> Iterator[Output]:
        """Every output's order of dimensions is said: nvFuser would choose one from those of the inputs."""
        self.recorder.origin = "store"
        for store in self.spec.stores:
            order = stride_order(store.layout) if len(store.layout.shape) > 1 else None
            yield self.recorder.output(self.recorder.values[Ref("op", store.op)], store.layout, order, store.into)


def _tensor(spec: Spec, ref: Ref) -> _Tensor:
    held = (spec.inputs if ref.kind == "in" else spec.ops)[ref.position]
    return _Tensor(held.dtype, held.shape)


def _is_operand(arg: Any) -> bool:
    return isinstance(arg, (Ref, bool, int, float, sympy.Expr))


def _is_size(arg: Any) -> bool:
    return isinstance(arg, sympy.Expr)

